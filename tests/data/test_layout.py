"""Class folders in folders and archives, and stratified splits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.data.inspect import inspect
from routing_lab.data.layout import DataProblem, find_layout, stratified_split

WriteImages = Callable[..., Path]
FLAT = ["cat/1.png", "cat/2.png", "dog/1.png"]


@pytest.mark.parametrize("target", ["images", "images.zip"])
@pytest.mark.parametrize("prefix", ["", "photos/", "a/b/"])
def test_class_folders_at_the_top_or_below_other_folders(write_images: WriteImages, target: str, prefix: str) -> None:
    layout = find_layout(write_images([prefix + name for name in FLAT], target))
    assert layout.classes == ("cat", "dog")
    assert layout.splits == ()
    assert [image.name for image in layout.images] == FLAT


@pytest.mark.parametrize("target", ["images", "images.zip"])
def test_explicit_splits_and_names_for_them(write_images: WriteImages, target: str) -> None:
    names = [f"set/{split}/{name}" for split in ("train", "valid", "Test") for name in FLAT]
    layout = find_layout(write_images(names, target))
    assert layout.splits == ("train", "val", "test")
    assert layout.classes == ("cat", "dog")
    assert Counter(image.split for image in layout.images) == {"train": 3, "val": 3, "test": 3}


def test_hidden_files_and_other_files_are_passed_over(write_images: WriteImages) -> None:
    path = write_images([*FLAT, "__MACOSX/cat/1.png", ".cache/x/1.png", "preview.png", "dog/deeper/3.png"])
    (path / "cat" / "notes.txt").write_text("not an image")
    layout = find_layout(path)
    assert [image.name for image in layout.images] == [*FLAT, "dog/deeper/3.png"]


def test_a_class_may_be_called_train(write_images: WriteImages) -> None:
    layout = find_layout(write_images(["bus/1.png", "train/1.png", "test/1.png"]))
    assert layout.classes == ("bus", "test", "train")
    assert layout.splits == ()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cat/1.png", "cat/2.png"], r"one class only \(cat\)"),
        (["1.png"], "no images in class folders"),
        (["train/cat/1.png", "train/dog/1.png", "extra/cat/1.png"], "folders extra beside train"),
        (["train/cat/1.png", "train/dog/1.png", "test/1.png"], "test/1.png lies outside a class folder"),
        (["train/cat/1.png", "train/dog/1.png", "test/bird/1.png"], "classes bird have no folder in train"),
        (["train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "valid/cat/1.png"], "name the same split"),
    ],
)
def test_arrangements_that_cannot_be_used(
    write_images: WriteImages, node: Callable[..., Any], names: list[str], message: str
) -> None:
    path = write_images(names)
    with pytest.raises(DataProblem, match=message):
        find_layout(path)
    ((key, value, said),) = inspect(node("image_folder", path=str(path)))
    assert (key, str(value)) == ("data.path", str(path))
    assert str(path) in said or "train" in said or "class" in said or "split" in said


def test_missing_empty_and_broken_places(tmp_path: Path, node: Callable[..., Any]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.zip").write_bytes(b"not an archive")
    for name, message in (("gone", "nothing there"), ("empty", "no images"), ("broken.zip", "as a ZIP archive")):
        ((key, value, said),) = inspect(node("image_folder", path=str(tmp_path / name)))
        assert (key, value) == ("data.path", tmp_path / name)
        assert message in said


def test_number_of_classes_is_checked(write_images: WriteImages, node: Callable[..., Any]) -> None:
    path = str(write_images([f"{label}/{i}.png" for label in ("cat", "dog") for i in range(10)]))
    assert inspect(node("image_folder", path=path, num_classes=2)) == []
    ((key, value, said),) = inspect(node("image_folder", path=path, num_classes=3))
    assert (key, value) == ("data.num_classes", 3)
    assert "holds 2 class folders" in said


@pytest.mark.parametrize("name", ["digits", "planted"])
def test_sets_without_files_have_no_problems(node: Callable[..., Any], name: str) -> None:
    assert inspect(node(name)) == []


@given(st.lists(st.integers(0, 3), min_size=8, max_size=60), st.integers(0, 5), st.data())
def test_split_has_the_counts_and_the_proportions(labels: list[int], seed: int, data: st.DataObject) -> None:
    test = data.draw(st.integers(0, len(labels) // 2))
    val = data.draw(st.integers(0, len(labels) // 4))
    parts = stratified_split(labels, [str(i) for i in range(len(labels))], {"test": test, "val": val}, seed)
    assert (len(parts["test"]), len(parts["val"])) == (test, val)
    assert sorted(parts["test"] + parts["val"] + parts["rest"]) == list(range(len(labels)))
    for label, size in Counter(labels).items():
        share = sum(labels[i] == label for i in parts["test"])
        assert abs(share - test * size / len(labels)) < 1


def test_split_does_not_depend_on_listing_order_but_on_the_seed() -> None:
    names = [f"{i}.png" for i in range(60)]
    labels = [i % 3 for i in range(60)]
    order = list(range(60))
    random.Random(0).shuffle(order)
    listed = stratified_split(labels, names, {"val": 12}, 0)["val"]
    shuffled = stratified_split([labels[i] for i in order], [names[i] for i in order], {"val": 12}, 0)["val"]
    assert {names[i] for i in listed} == {names[order[i]] for i in shuffled}
    assert listed != stratified_split(labels, names, {"val": 12}, 1)["val"]
