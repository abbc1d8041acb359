"""Image folders and archives: reading in place, splits, fingerprints and unreadable images."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from routing_lab.data import VisionData, build_data
from routing_lab.data.layout import DataProblem, find_layout
from routing_lab.data.sources import FileSource, build_source

WriteImages = Callable[..., Path]
Build = Callable[..., VisionData]

NAMES = [f"{label}/{i}.png" for label in ("bird", "cat", "dog") for i in range(20)]
SHARED = Path(__file__).parents[3] / "shared" / "data" / "cifar10_jpg.zip"


@pytest.fixture
def build(node: Callable[..., Any], recipe: Callable[..., Any], runtime: Callable[..., Any]) -> Build:
    def make(path: Path, values: dict[str, Any] | None = None, workers: int = 0, **train: Any) -> VisionData:
        config = node("image_folder", path=str(path), **{"memory": False, **(values or {})})
        return build_data(config, recipe(**{"batch_size": 8, **train}), 0, runtime(workers))

    return make


def everything(data: VisionData) -> torch.Tensor:
    return data.examples(torch.arange(len(data.targets)))[0]


def test_seeded_split_of_class_folders(write_images: WriteImages, build: Build) -> None:
    data = build(write_images(NAMES))
    assert data.class_names == ("bird", "cat", "dog")
    assert data.sizes == {"train": 42, "val": 6, "test": 12}
    assert data.targets[data.split["test"]].bincount().tolist() == [4, 4, 4]
    assert torch.equal(data.split["val"], build(write_images(NAMES)).split["val"])
    other = build(write_images(NAMES), {"split_seed": 1})
    assert not torch.equal(data.split["test"], other.split["test"])
    assert data.fingerprint != other.fingerprint


def names(*splits: str) -> list[str]:
    return [f"{split}/{name}" for split in splits for name in NAMES]


@pytest.mark.parametrize(
    ("folders", "sizes"),
    [
        (["train", "val", "test"], {"train": 60, "val": 60, "test": 60}),
        (["train", "test"], {"train": 54, "val": 6, "test": 60}),
        (["train", "valid"], {"train": 54, "val": 6, "test": 60}),
        (["train"], {"train": 42, "val": 6, "test": 12}),
    ],
)
def test_missing_splits_are_carved_out_of_train(
    write_images: WriteImages, build: Build, folders: list[str], sizes: dict[str, int]
) -> None:
    data = build(write_images(names(*folders)))
    assert data.sizes == sizes
    assert len(torch.cat(list(data.split.values())).unique()) == sum(sizes.values())


def test_split_without_training_images_of_a_class_is_refused(write_images: WriteImages, build: Build) -> None:
    path = write_images([*(f"cat/{i}.png" for i in range(30)), "dog/1.png", "dog/2.png"])
    with pytest.raises(DataProblem, match=r"data.val_fraction=0.45: leaves 1 classes without a training image"):
        build(path, {"val_fraction": 0.45, "test_fraction": 0.5})
    with pytest.raises(DataProblem, match="its split 'val' is empty"):
        build(path, {"val_fraction": 0.001})


def test_archive_folder_and_memory_give_the_same_images(write_images: WriteImages, build: Build) -> None:
    folder, archive = build(write_images(NAMES)), build(write_images(NAMES, "images.zip"))
    memory = build(write_images(NAMES), {"memory": True})
    automatic = build(write_images(NAMES), {"memory": None})
    images = everything(folder)
    assert images.shape == (60, 3, 8, 8)
    for data in (archive, memory, automatic):
        assert torch.equal(images, everything(data))
        assert data.fingerprint == folder.fingerprint
        assert all(torch.equal(data.split[name], folder.split[name]) for name in data.sizes)
    assert not isinstance(automatic._source, FileSource)


def test_fingerprint_follows_content_and_not_the_place(write_images: WriteImages, build: Build, tmp_path: Path) -> None:
    path = write_images(NAMES)
    before = build(path).fingerprint
    moved = Path(shutil.copytree(path, tmp_path / "elsewhere" / "photos"))
    assert build(moved).fingerprint == build(moved.parent).fingerprint == before
    Image.open(moved / NAMES[0]).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(moved / NAMES[0])
    changed = build(moved).fingerprint
    (moved / NAMES[1]).rename(moved / "bird" / "renamed.png")
    assert len({before, changed, build(moved).fingerprint}) == 3


def test_large_sets_enter_the_fingerprint_with_names_and_sizes(
    write_images: WriteImages, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_images(NAMES)
    monkeypatch.setattr("routing_lab.data.sources.HASHED_BYTES", 100)
    monkeypatch.setattr(FileSource, "_stream", None)
    before = build(path).fingerprint
    with (path / NAMES[0]).open("ab") as file:
        file.write(b"0")
    assert build(path).fingerprint != before


@pytest.mark.parametrize("target", ["images", "images.zip"])
@pytest.mark.parametrize("memory", [False, True])
def test_an_unreadable_image_is_named(
    write_images: WriteImages, build: Build, tmp_path: Path, target: str, memory: bool
) -> None:
    path = write_images(NAMES)
    content = (path / "cat/7.png").read_bytes()
    (path / "cat/7.png").write_bytes(content[: len(content) // 2])
    if target.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / target, "w") as archive:
            for name in NAMES:
                archive.write(path / name, name)
        path = tmp_path / target
    with pytest.raises(ValueError, match=r"cat/7\.png: cannot read this image"):
        everything(build(path, {"memory": memory}))


def test_images_of_other_depths_are_refused_rather_than_clipped(write_images: WriteImages, build: Build) -> None:
    path = write_images(NAMES)
    Image.fromarray(np.full((8, 8), 5000, dtype=np.uint16)).save(path / "dog/3.png")
    with pytest.raises(ValueError, match=r"dog/3\.png: .* expected 8 bits a channel"):
        everything(build(path))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK"])
def test_images_of_every_usual_mode_become_colour_or_grey(
    write_images: WriteImages, build: Build, mode: str, tmp_path: Path
) -> None:
    path = write_images(NAMES)
    ending = "jpg" if mode == "CMYK" else "png"
    Image.new("RGB", (9, 9), (255, 255, 255)).convert(mode).save(path / f"bird/white.{ending}")
    for channels in (1, 3):
        values = {"channels": channels, "mean": [0.0], "std": [1.0]}
        images = everything(build(path, values))
        assert images.shape == (61, channels, 8, 8)
        position = [Path(image.name).stem for image in find_layout(path).images].index("white")
        torch.testing.assert_close(images[position], torch.ones(channels, 8, 8), atol=0.02, rtol=0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_read_an_archive_that_was_open_before(write_images: WriteImages, build: Build) -> None:
    path = write_images(NAMES, "images.zip")
    here, there = build(path, augment="randaugment"), build(path, workers=2, augment="randaugment")
    everything(there)
    for one, two in zip(here.train_dataloader(), there.train_dataloader(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("augment", ["light", "standard", "randaugment"])
def test_augmented_files_depend_on_epoch_and_index(write_images: WriteImages, build: Build, augment: str) -> None:
    path = write_images(NAMES)
    passes = []
    for batch_size, epoch in ((8, 0), (5, 0), (8, 1)):
        data = build(path, augment=augment, erasing=0.3, batch_size=batch_size)
        data.set_epoch(epoch)
        images = {int(i): x for xs, _, index in data.train_dataloader() for i, x in zip(index, xs, strict=True)}
        passes.append(images)
    first, again, later = passes
    assert all(torch.equal(first[i], again[i]) for i in first.keys() & again.keys())
    assert not all(torch.equal(first[i], later[i]) for i in first.keys() & later.keys())
    assert all(torch.isfinite(image).all() for image in first.values())


def test_the_whole_module_can_be_sent_to_another_process(write_images: WriteImages, build: Build) -> None:
    data = build(write_images(NAMES, "images.zip"), augment="randaugment")
    everything(data)
    builder = pickle.loads(pickle.dumps(data._train))
    request = data._train_requests()[0]
    assert torch.equal(builder(request)[0], data._train(request)[0])


def archives() -> list[str]:
    return ["generated", *(["shared"] if SHARED.exists() else [])]


@pytest.mark.parametrize("which", archives())
def test_an_archive_is_read_without_unpacking(
    write_images: WriteImages, node: Callable[..., Any], tmp_path: Path, which: str
) -> None:
    if which == "shared":
        path, sizes = SHARED, [45000, 5000, 10000]
    else:
        path, sizes = write_images(names("train", "test"), "images.zip"), [54, 6, 60]
    before = sorted(tmp_path.rglob("*"))
    source = build_source(node("image_folder", path=str(path)))
    assert [len(source.splits[name]) for name in ("train", "val", "test")] == sizes
    assert isinstance(source, FileSource)
    for index in (0, len(source.names) - 1):
        assert source.open(index).size in ((32, 32), (12, 10))
        assert source.class_names[source.targets[index]] == source.names[index].split("/")[1]
    assert sorted(tmp_path.rglob("*")) == before
