"""torchvision's data sets and ImageNet, on small stand-ins in their real layout."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image
from torchvision import datasets

from routing_lab.data import VisionData, build_data
from routing_lab.data.inspect import inspect
from routing_lab.data.layout import DataProblem

Build = Callable[..., VisionData]


@pytest.fixture
def build(node: Callable[..., Any], recipe: Callable[..., Any], runtime: Callable[..., Any], tmp_path: Path) -> Build:
    def make(name: str, **values: Any) -> VisionData:
        return build_data(node(name, root=str(tmp_path), **values), recipe(batch_size=8), 0, runtime())

    return make


def draw(path: Path, label: int) -> None:
    """A small image whose grey level tells its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (40 * label,) * 3).save(path, format="PNG")


def draw_trimap(path: Path) -> None:
    """The upper left quarter is the animal's, with its outline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trimap = np.full((10, 12), 2, dtype=np.uint8)
    trimap[:5, :5] = 3
    trimap[:4, :4] = 1
    Image.fromarray(trimap).save(path)


def check(data: VisionData, sizes: tuple[int, int, int]) -> None:
    """Sizes, disjoint splits, and images that belong to their targets."""
    assert tuple(data.sizes.values()) == sizes
    assert torch.cat(list(data.split.values())).unique().numel() == sum(sizes)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for images, targets, index in loader:
            assert torch.equal(targets, data.targets[index])
            levels = data.examples(torch.arange(len(data.targets)))[0].mean((1, 2, 3))
            for image, target in zip(images, targets, strict=True):
                torch.testing.assert_close(image.mean(), levels[data.targets == target].mean(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "cars", "pets", "flowers", "imagenet", "imagenet100"])
def test_a_missing_set_says_where_it_was_looked_for_and_how_to_get_it(
    node: Callable[..., Any], build: Build, tmp_path: Path, name: str
) -> None:
    config = node(name, root=str(tmp_path))
    ((key, value, message),) = inspect(config)
    assert (key, value) == ("data.root", str(tmp_path))
    assert f"looked at {tmp_path}" in message
    assert "http" in message or "archive" in message
    if hasattr(config, "download"):
        assert "data.download=true" in message
        assert inspect(node(name, root=str(tmp_path), download=True)) == []
    with pytest.raises(DataProblem, match="looked at"):
        build(name)


def test_an_incomplete_set_is_reported(build: Build, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataProblem, match=r"data.root=.*cifar10 is incomplete in .*not found or corrupted"):
        build("cifar10")


@pytest.mark.parametrize(("name", "number"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    kind = datasets.CIFAR10 if number == 10 else datasets.CIFAR100
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    names_key = kind.meta["key"]

    def write(file: str, content: dict[str, Any]) -> list[str]:
        data = pickle.dumps(content)
        (folder / file).write_bytes(data)
        return [file, hashlib.md5(data).hexdigest()]

    def batch(count: int) -> dict[str, Any]:
        labels = [i % 5 for i in range(count)]
        pixels = np.repeat(np.array(labels, dtype=np.uint8)[:, None] * 40, 3072, axis=1)
        return {"data": pixels, "labels" if number == 10 else "fine_labels": labels}

    meta_file, meta_hash = write(kind.meta["filename"], {names_key: [f"class {i}" for i in range(number)]})
    monkeypatch.setattr(kind, "meta", {"filename": meta_file, "key": names_key, "md5": meta_hash})
    monkeypatch.setattr(kind, "train_list", [write("train_1", batch(40)), write("train_2", batch(10))])
    monkeypatch.setattr(kind, "test_list", [write("test_1", batch(15))])
    data = build(name, val_fraction=0.2)
    assert data.num_classes == number
    check(data, (40, 10, 15))


def test_flowers(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "flowers-102"
    labels = np.arange(24) % 4
    for i, label in enumerate(labels):
        draw(folder / "jpg" / f"image_{i + 1:05d}.jpg", int(label))
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": labels + 1})
    ids = np.arange(1, 25)
    scipy.io.savemat(folder / "setid.mat", {"trnid": ids[:8], "valid": ids[8:12], "tstid": ids[12:]})
    hashes = {key: hashlib.md5((folder / f"{key}.mat").read_bytes()).hexdigest() for key in ("imagelabels", "setid")}
    files = {"label": ("imagelabels.mat", hashes["imagelabels"]), "setid": ("setid.mat", hashes["setid"])}
    monkeypatch.setattr(datasets.Flowers102, "_file_dict", files)
    data = build("flowers")
    assert data.num_classes == 102
    check(data, (8, 4, 12))


def test_pets(build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    for split, count in (("trainval", 20), ("test", 8)):
        lines = []
        for i in range(count):
            label = i % 4
            draw(folder / "images" / f"Breed_{label}_{split}{i}.jpg", label)
            draw_trimap(folder / "annotations" / "trimaps" / f"Breed_{label}_{split}{i}.png")
            lines.append(f"Breed_{label}_{split}{i} {label + 1} 1 1")
        (folder / "annotations" / f"{split}.txt").write_text("\n".join(lines))
    data = build("pets", val_fraction=0.2)
    check(data, (16, 4, 8))
    mask = data.informative(data.split["test"][:2], (4, 4))
    assert mask is not None
    assert mask.reshape(2, 4, 4).tolist() == [[[row < 2 and column < 2 for column in range(4)] for row in range(4)]] * 2


def test_cars(build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    places = {"cars_train": "devkit/cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
    for images, table_file in places.items():
        rows = []
        for i in range(20):
            draw(folder / images / f"{i:05d}.jpg", i % 4)
            rows.append((f"{i:05d}.jpg", i % 4 + 1))
        table = np.array(rows, dtype=[("fname", object), ("class", np.int64)])
        scipy.io.savemat(folder / table_file, {"annotations": table})
    scipy.io.savemat(folder / "devkit/cars_meta.mat", {"class_names": np.array([f"car {i}" for i in range(4)], object)})
    check(build("cars", val_fraction=0.2), (16, 4, 20))


def imagenet(root: Path) -> None:
    for split, count in (("train", 10), ("val", 4)):
        for label in range(4):
            for i in range(count):
                draw(root / split / f"n0000000{label}" / f"{split}_{i}.JPEG", label)


def test_imagenet_uses_its_validation_images_as_test(build: Build, tmp_path: Path) -> None:
    imagenet(tmp_path)
    check(build("imagenet", val_fraction=0.2), (32, 8, 16))


def test_a_class_list_chooses_among_the_classes_of_imagenet(
    build: Build, node: Callable[..., Any], tmp_path: Path
) -> None:
    imagenet(tmp_path)
    (tmp_path / "imagenet100.txt").write_text("n00000003\nn00000001\n")
    data = build("imagenet100", num_classes=2, val_fraction=0.2)
    assert data.class_names == ("n00000001", "n00000003")
    check(data, (16, 4, 8))
    values: dict[str, Any] = {"root": str(tmp_path), "num_classes": 2}
    for content, message in (
        ("n00000001\nn99999999", "class n99999999 has no folder"),
        ("n00000001\nn00000001", "names 2 classes, 1 of them different"),
        ("n00000001", "names 1 classes"),
    ):
        (tmp_path / "other.txt").write_text(content)
        ((key, value, said),) = inspect(node("imagenet100", class_list="other.txt", **values))
        assert (key, value) == ("data.class_list", "other.txt")
        assert message in said
    ((key, _, said),) = inspect(node("imagenet100", class_list="gone.txt", **values))
    assert key == "data.class_list"
    assert str(tmp_path / "gone.txt") in said
