"""What is read of a folder or archive, and what is left out and named: links, pipes, endings, damage, repeats."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from routing_lab.data import VisionData, build_data
from routing_lab.data.inspect import inspect, remarks
from routing_lab.data.layout import DataProblem, find_layout

WriteImages = Callable[..., Path]
Build = Callable[..., VisionData]
NAMES = [f"{label}/{i}.png" for label in ("cat", "dog") for i in range(20)]


@pytest.fixture
def build(node: Callable[..., Any], recipe: Callable[..., Any], runtime: Callable[..., Any]) -> Build:
    def make(path: Path, **values: Any) -> VisionData:
        config = node("image_folder", path=str(path), **{"memory": False, **values})
        return build_data(config, recipe(batch_size=8), 0, runtime(0))

    return make


def names(path: Path) -> list[str]:
    return [image.full_name for image in find_layout(path).images]


def test_every_real_file_is_read_once(write_images: WriteImages, tmp_path: Path) -> None:
    path = write_images(NAMES)
    before = names(path)
    (path / "cat" / "loop").symlink_to("..")
    (path / "cat" / "self").symlink_to("self")
    (path / "cat" / "gone.png").symlink_to(tmp_path / "nothing.png")
    (path / "cat" / "again.png").symlink_to("0.png")
    os.mkfifo(path / "dog" / "pipe.png")
    layout = find_layout(path)
    assert [image.full_name for image in layout.images] == before
    assert sorted(note.split(": ", 1)[1] for note in layout.notes) == [
        "left out cat/again.png: the same file as cat/0.png",
        "left out cat/gone.png: a link to nothing",
        "left out cat/loop/: a link to the top folder, which is read already",
        "left out cat/self: cannot be read: Too many levels of symbolic links",
        "left out dog/pipe.png: a pipe",
    ]


def test_links_to_files_and_folders_elsewhere_are_followed(write_images: WriteImages, tmp_path: Path) -> None:
    store = write_images(NAMES, "store")
    path = tmp_path / "set"
    (path / "cat").mkdir(parents=True)
    (path / "dog").symlink_to(store / "dog")
    for number in range(5):
        (path / "cat" / f"{number}.png").symlink_to(store / "cat" / f"{number}.png")
    assert len(names(path)) == 25


def test_a_class_that_is_a_second_name_of_another_is_refused(write_images: WriteImages) -> None:
    path = write_images(NAMES)
    (path / "aardvark").symlink_to("cat")
    with pytest.raises(DataProblem, match=r"no image is left of aardvark: aardvark/ \(a link to cat, which is read"):
        find_layout(path)


def test_a_split_that_is_a_second_name_of_another_is_refused(write_images: WriteImages) -> None:
    path = write_images([f"train/{name}" for name in NAMES])
    (path / "test").symlink_to("train")
    with pytest.raises(DataProblem, match=r"no image is left of test: test/ \(a link to train"):
        find_layout(path)


def test_what_browsers_save_is_read_and_what_nothing_reads_is_named(write_images: WriteImages) -> None:
    path = write_images([*NAMES, "owl/1.jfif", "owl/2.JFIF", "owl/3.webp"])
    (path / "cat" / "20.heic").write_bytes(b"?")
    (path / "cat" / "notes.txt").write_text("about cats")
    layout = find_layout(path)
    assert layout.classes == ("cat", "dog", "owl")
    assert len(layout.images) == 43
    assert [note.split(": ", 1)[1] for note in layout.notes] == [
        "left out cat/20.heic: ending .heic, which is no image's"
    ]


@pytest.mark.parametrize("target", ["images", "images.zip"])
def test_a_class_that_loses_all_its_files_is_refused(write_images: WriteImages, tmp_path: Path, target: str) -> None:
    path = write_images(NAMES)
    (path / "owl").mkdir()
    (path / "owl" / "1.heic").write_bytes(b"?")
    (path / "docs").mkdir()
    (path / "docs" / "readme.txt").write_text("no class")
    if target.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / target, "w") as archive:
            for file in sorted(file for file in path.rglob("*") if file.is_file()):
                archive.write(file, file.relative_to(path))
    with pytest.raises(DataProblem, match=r"no image is left of owl: owl/1\.heic"):
        find_layout(tmp_path / target)


def test_a_pipe_as_data_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "images.zip")
    with pytest.raises(DataProblem, match="it is a pipe"):
        find_layout(tmp_path / "images.zip")


# --- repeats ---


def repeated(write_images: WriteImages) -> Path:
    path = write_images([f"{split}/{name}" for split in ("train", "val", "test") for name in NAMES])
    (path / "test/cat/0.png").write_bytes((path / "train/cat/3.png").read_bytes())
    (path / "val/cat/0.png").write_bytes((path / "train/cat/3.png").read_bytes())
    return path


@pytest.mark.parametrize("target", ["folder", "archive"])
def test_a_file_in_two_splits_is_refused(
    write_images: WriteImages, node: Callable[..., Any], build: Build, tmp_path: Path, target: str
) -> None:
    path = repeated(write_images)
    if target == "archive":
        with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
            for file in sorted(path.rglob("*.png")):
                archive.write(file, file.relative_to(path))
        path = tmp_path / "images.zip"
    expected = (
        "the same file stands in two splits: test/cat/0.png (test) = train/cat/3.png (train) = val/cat/0.png (val)"
    )
    ((key, value, message),) = inspect(node("image_folder", path=str(path)))
    assert (key, value) == ("data.duplicates", "refuse")
    assert message.startswith(expected)
    with pytest.raises(DataProblem, match=r"data\.duplicates=refuse: the same file"):
        build(path)


def test_repeated_files_leave_the_splits_before_the_last_one(
    write_images: WriteImages, node: Callable[..., Any], recipe: Callable[..., Any], build: Build
) -> None:
    path = repeated(write_images)
    assert build(path, duplicates="allow").sizes == {"train": 40, "val": 40, "test": 40}
    data = build(path, duplicates="drop")
    assert data.sizes == {"train": 39, "val": 39, "test": 40}
    train = recipe(batch_size=8, epochs=1)
    (dropped,) = remarks(node("image_folder", path=str(path), duplicates="drop"), train)
    assert "1 from train, 1 from val" in dropped
    (allowed,) = remarks(node("image_folder", path=str(path), duplicates="allow"), train)
    assert "keeps 1 files that stand in more than one split" in allowed


def test_equal_files_of_one_split_are_nobodys_mistake(write_images: WriteImages, build: Build) -> None:
    path = write_images([f"{split}/{name}" for split in ("train", "test") for name in NAMES])
    (path / "test/cat/0.png").write_bytes((path / "test/cat/1.png").read_bytes())
    assert build(path).sizes["test"] == 40


# --- remarks ---


def test_a_class_without_images_in_a_split_and_a_large_batch_are_remarked(
    write_images: WriteImages, node: Callable[..., Any], recipe: Callable[..., Any]
) -> None:
    path = write_images([*(f"train/{name}" for name in NAMES), *(f"test/cat/{i}.png" for i in range(30, 40))])
    said = list(remarks(node("image_folder", path=str(path)), recipe(batch_size=64, epochs=1)))
    assert any("test has no image of dog" in line for line in said)
    assert any("train.batch_size=64 is above the 36 training examples" in line for line in said)
    assert list(remarks(node("digits"), recipe(batch_size=64, epochs=1))) == []


# --- images ---


def test_photographs_are_turned_as_viewers_show_them(write_images: WriteImages, build: Build) -> None:
    path = write_images(NAMES)
    upright = np.zeros((32, 16, 3), np.uint8)
    upright[:16] = 255
    photo = Image.fromarray(np.rot90(upright, 1).copy())
    exif = photo.getexif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to see it
    photo.save(path / "cat/photo.jpg", exif=exif, quality=95)
    source = build(path)._source
    shown = source.open(source.names.index("cat/photo.jpg"))  # type: ignore[union-attr]
    assert shown.size == (16, 32)
    pixels = np.asarray(shown).astype(int)
    assert pixels[:8].mean() > 200
    assert pixels[-8:].mean() < 50


def test_images_are_judged_before_training(
    write_images: WriteImages, node: Callable[..., Any], recipe: Callable[..., Any]
) -> None:
    path = write_images(NAMES)
    frames = [Image.new("RGB", (9, 9), (shade, 0, 0)) for shade in (0, 255)]
    frames[0].save(path / "dog/moving.gif", save_all=True, append_images=frames[1:])
    config = node("image_folder", path=str(path))
    assert inspect(config) == []
    (note,) = remarks(config, recipe(batch_size=8, epochs=1))
    assert "of animated images the first frame is used: dog/moving.gif" in note
    Image.fromarray(np.full((8, 8), 5000, dtype=np.uint16)).save(path / "dog/3.png")
    (path / "cat/5.png").write_text("not an image")
    ((key, _, message),) = inspect(config)
    assert key == "data.path"
    assert "cat/5.png: cannot read this image (cannot identify image file" in message
    assert "dog/3.png: cannot read this image (pixels of mode I;16; expected 8 bits a channel)" in message


def test_an_image_that_vanishes_is_named(write_images: WriteImages, build: Build) -> None:
    path = write_images(NAMES)
    data = build(path)
    (path / "cat/7.png").unlink()
    with pytest.raises(ValueError, match=r"cat/7\.png: cannot (read this image|be read)"):
        data.examples(torch.arange(40))
    with pytest.raises(ValueError, match=r"cat/7\.png: cannot be read \(No such file"):
        _ = data.fingerprint


# --- archives ---


def archive_with(path: Path, images: Path, **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name in NAMES:
            archive.write(images / name, name)
    return path


def patched(path: Path, field: int, value: int, number: int) -> Path:
    """Set a 16-bit field of a member's entry in the central directory and in its local header."""
    content = bytearray(path.read_bytes())
    for signature, shift in ((b"PK\x01\x02", 2), (b"PK\x03\x04", 0)):
        position = -1
        for _ in range(number + 1):
            position = content.index(signature, position + 1)
        content[position + field + shift : position + field + shift + 2] = value.to_bytes(2, "little")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (6, 1, "encrypted; unpack the archive"),
        (8, 93, "compression method 93, which Python cannot read; pack it again"),
    ],
)
def test_members_that_cannot_be_read_are_named_with_the_remedy(
    write_images: WriteImages, node: Callable[..., Any], recipe: Callable[..., Any], field: int, value: int, reason: str
) -> None:
    images = write_images(NAMES)
    path = patched(archive_with(images.parent / "set.zip", images), field, value, 3)
    (note,) = find_layout(path).notes
    assert f"left out {NAMES[3]}: {reason}" in note
    for number in range(20):
        patched(path, field, value, number)
    ((_, _, message),) = inspect(node("image_folder", path=str(path)))
    assert f"no image is left of cat: cat/0.png ({reason}" in message


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_damaged_stream_is_named_before_training(write_images: WriteImages, build: Build, method: int) -> None:
    images = write_images(NAMES, size=(40, 40))
    path = archive_with(images.parent / "set.zip", images, compression=method)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(NAMES[7])
    content = bytearray(path.read_bytes())
    middle = info.header_offset + 60 + info.compress_size // 2
    content[middle : middle + 40] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"set\.zip.*cat/7\.png: cannot (be read|read this image)"):
        _ = build(path).fingerprint


def test_members_stay_inside_the_archive(write_images: WriteImages, tmp_path: Path) -> None:
    images = write_images(NAMES)
    path = archive_with(tmp_path / "set.zip", images)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("cat/../../evil/3.png", (images / NAMES[0]).read_bytes())
        link = zipfile.ZipInfo("cat/link.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    before = sorted(tmp_path.rglob("*"))
    layout = find_layout(path)
    assert [image.full_name for image in layout.images] == sorted(NAMES)
    assert any("left out cat/link.png: a link" in note for note in layout.notes)
    assert any("cat/../../evil/3.png: its path leads out of the archive" in note for note in layout.notes)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../evil/1.png", (images / NAMES[0]).read_bytes())
    with pytest.raises(DataProblem, match=r"no image is left of \.\.: \.\./evil/1\.png \(its path leads out"):
        find_layout(path)
    assert sorted(tmp_path.rglob("*")) == before
