"""A look at the data a configuration names, cheap enough for the configuration check and without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from routing_lab.data.contents import (
    FIRST_LOOK,
    check_images,
    check_repeats,
    check_splits,
    dropped_repeats,
    look,
    repeats_of,
    splits_of,
)
from routing_lab.data.layout import DataProblem, FolderLayout, find_layout
from routing_lab.data.text.inspect import inspect_text

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

    Folders and archives are listed; of image folders the headers of some images are read, and files of equal size are
    compared across splits. Data sets that come with a library or are generated have no problems.
    """
    try:
        if data.name == "image_folder":
            layout = check_image_folder(data)
            check_images(layout, "data.path", everything=False)
            check_repeats(data, layout)
            check_splits(data, layout)
        elif data.name in ("imagenet", "imagenet100"):
            check_imagenet(data)
        elif data.name in _TORCHVISION:
            check_torchvision(data)
    except DataProblem as problem:
        return [(problem.key, problem.value, problem.message)]
    return inspect_text(data)


def remarks(data: Any, train: Any) -> Iterator[str]:
    """What is worth knowing of data that can be used: what was left out, and splits that say less than they seem to.

    Args:
        data: a `data` node without problems.
        train: the `train` node; `batch_size` is read.
    """
    number = num_train(data)
    if data.name == "image_folder":
        layout = check_image_folder(data)
        yield from layout.notes
        yield from _about_contents(data, layout)
    if number is not None and train.epochs and train.batch_size > number:
        yield (
            f"train.batch_size={train.batch_size} is above the {number} training examples of data={data.name}: every"
            " epoch is one step with all of them"
        )


def num_train(data: Any) -> int | None:
    """Training examples, where the configuration or a listing tells them."""
    if data.name == "image_folder":
        layout = check_image_folder(data)
        return len(splits_of(data, layout)["train"]) - len(dropped_repeats(data, layout).get("train", ()))
    return getattr(data, "num_train", None)


def _about_contents(data: Any, layout: FolderLayout) -> Iterator[str]:
    animated = look(layout, everything=len(layout.images) <= FIRST_LOOK).animated
    if animated:
        more = f" and {len(animated) - 3} more" if len(animated) > 3 else ""
        yield f"data.path={data.path}: of animated images the first frame is used: {', '.join(animated[:3])}{more}"
    repeats = repeats_of(data, layout)
    if repeats.not_compared:
        yield f"data.path={data.path}: {repeats.not_compared} files of equal sizes were not compared across splits"
    dropped = dropped_repeats(data, layout)
    if dropped:
        lost = ", ".join(f"{len(indices)} from {split}" for split, indices in dropped.items() if indices)
        yield f"data.duplicates=drop took out files that another split has: {lost}"
    elif repeats.groups:
        yield f"data.duplicates=allow keeps {len(repeats.groups)} files that stand in more than one split"
    for split, indices in splits_of(data, layout).items():
        absent = sorted(set(layout.classes) - {layout.images[index].label for index in indices})
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            yield f"data.path={data.path}: {split} has no image of {', '.join(absent[:3])}{more}"


def check_image_folder(data: Any) -> FolderLayout:
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
    _, source = _TORCHVISION[data.name]
    place = torchvision_folder(data)
    assert place is not None
    if place.is_dir() or getattr(data, "download", False):
        return
    how = f"unpack it there from {source}"
    if hasattr(data, "download"):
        how = f"download it with data.download=true, or {how}"
    raise DataProblem("data.root", data.root, f"{data.name} is not there (looked at {place.absolute()}); {how}")


def torchvision_folder(data: Any) -> Path | None:
    """Where torchvision keeps the files of a data set; None for a data set that is not torchvision's."""
    if data.name not in _TORCHVISION:
        return None
    return Path(data.root).expanduser() / _TORCHVISION[data.name][0]
