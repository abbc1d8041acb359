"""A look at the data a configuration names, cheap enough for the configuration check and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from routing_lab.data.layout import DataProblem, Layout, find_layout

_TORCHVISION: dict[str, tuple[str, str]] = {
    "cifar10": ("cifar-10-batches-py", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "cifar100": ("cifar-100-python", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "cars": (
        "stanford_cars",
        "a copy of the Stanford Cars archive, unpacked as torchvision.datasets.StanfordCars says",
    ),
    "pets": ("oxford-iiit-pet", "https://www.robots.ox.ac.uk/~vgg/data/pets/"),
    "flowers": ("flowers-102", "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"),
}


def inspect(data: Any) -> list[tuple[str, Any, str]]:
    """Problems of a `data` node with what is really on disk, as (key, value, message); empty when all is well.

    Folders and archives are listed, no image is opened. Data sets that come with a library or are generated have no
    problems.
    """
    try:
        if data.name == "image_folder":
            check_image_folder(data)
        elif data.name in ("imagenet", "imagenet100"):
            check_imagenet(data)
        elif data.name in _TORCHVISION:
            check_torchvision(data)
    except DataProblem as problem:
        return [(problem.key, problem.value, problem.message)]
    return []


def check_image_folder(data: Any) -> Layout:
    """List `data.path`; raise `DataProblem` unless it has `data.num_classes` classes (null: at least two)."""
    layout = find_layout(data.path, "data.path")
    if data.num_classes is not None and data.num_classes != len(layout.classes):
        raise DataProblem(
            "data.num_classes",
            data.num_classes,
            f"{layout.path.absolute()} holds {len(layout.classes)} class folders; expected null or that number",
        )
    return layout


def check_imagenet(data: Any) -> None:
    """Raise `DataProblem` unless `data.root` has `train` and `val` with the wanted class folders."""
    root = Path(data.root).expanduser()
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise DataProblem(
                "data.root",
                data.root,
                f"no folder {split!r} of class folders there (looked at {(root / split).absolute()}); get"
                " ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from"
                " https://image-net.org/download-images, put them there and unpack them with"
                " torchvision.datasets.ImageNet(root, 'train') and torchvision.datasets.ImageNet(root, 'val')",
            )
    for name in read_class_list(data) or ():
        if not (root / "train" / name).is_dir():
            raise DataProblem("data.class_list", data.class_list, f"class {name} has no folder {root / 'train' / name}")


def read_class_list(data: Any) -> list[str] | None:
    """The classes of `data.class_list`, one a line; None for a data set without such a key.

    Raises:
        DataProblem: no such file, a class named twice, or another number of classes than `data.num_classes`.
    """
    if data.name != "imagenet100":
        return None
    path = Path(data.root).expanduser() / Path(data.class_list).expanduser()
    if not path.is_file():
        raise DataProblem(
            "data.class_list",
            data.class_list,
            f"no such file (looked at {path.absolute()}); expected a text file with one wnid a line, such as the list"
            " of Contrastive Multiview Coding (Tian et al., 2020), imagenet100.txt in their repository",
        )
    names = path.read_text(encoding="utf-8").split()
    if len(names) != data.num_classes or len(set(names)) != len(names):
        raise DataProblem(
            "data.class_list",
            data.class_list,
            f"names {len(names)} classes, {len(set(names))} of them different; expected data.num_classes="
            f"{data.num_classes} different ones",
        )
    return sorted(names)


def check_torchvision(data: Any) -> None:
    """Raise `DataProblem` unless torchvision's folder of the data set is below `data.root` or may be downloaded."""
    folder, source = _TORCHVISION[data.name]
    place = Path(data.root).expanduser() / folder
    if place.is_dir() or getattr(data, "download", False):
        return
    how = f"unpack it there from {source}"
    if hasattr(data, "download"):
        how = f"download it with data.download=true, or {how}"
    raise DataProblem("data.root", data.root, f"{data.name} is not there (looked at {place.absolute()}); {how}")
