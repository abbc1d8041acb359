"""Where images come from: arrays in memory or files that are opened one by one, both with fixed splits.

A source numbers its examples 0 .. N-1 once, over all splits; this number is the `index` of a batch, of a record's
predictions and of the patch mask.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from routing_lab.data.contents import HASHED_BYTES, check_images, check_repeats, refused_mode, without_repeats
from routing_lab.data.inspect import check_image_folder, check_imagenet, check_torchvision, read_class_list
from routing_lab.data.layout import SPLITS, DataProblem, FolderLayout, Split, divide, find_layout, stratified_split
from routing_lab.data.listing import DAMAGE, Archive, opened
from routing_lab.data.planted import plant

Splits = dict[Split, NDArray[np.int64]]

MEMORY_BYTES = 2**30
"""Largest set of decoded images that `data.memory=null` keeps in memory."""

BACKGROUND = 2
"""In a trimap."""

_DIGITS: dict[Split, int] = {"test": 360, "val": 180}


@dataclass(frozen=True)
class ArraySource:
    """Images in memory: uint8 [N, C, H, W], C = 1 or 3. `masks` [N, grid, grid] only for planted images."""

    images: Tensor
    targets: NDArray[np.int64]
    class_names: tuple[str, ...]
    splits: Splits
    masks: Tensor | None = None
    content: str | None = None  # digest of what the arrays were decoded from, if they were

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over pixels, targets, class names and splits."""
        return _fingerprint(self.content or _digest(self.images), self)


@dataclass(frozen=True)
class FileSource:
    """Image files: `names` identify them independently of where they lie, `places` say where that is.

    Places are paths, or member names of the ZIP archive `archive`. `trimaps` are images of the same sizes that say of
    every pixel whether it is the object's (1), the background's (2) or on the outline between them (3).
    """

    names: tuple[str, ...]
    places: tuple[str, ...]
    targets: NDArray[np.int64]
    class_names: tuple[str, ...]
    splits: Splits
    archive: Archive | None = None
    trimaps: tuple[str, ...] | None = None
    masks: None = field(default=None, init=False)

    def open(self, index: int) -> Image.Image:
        """Decode one image to RGB, turned as its EXIF orientation says and viewers show it; of an animation its first.

        Raises:
            ValueError: the file cannot be read; it is named.
        """
        place = self.places[index]
        try:
            with self._stream(place) as stream, Image.open(stream) as image:
                if (problem := refused_mode(image)) is not None:
                    raise ValueError(problem)
                upright = ImageOps.exif_transpose(image)
                if "transparency" in image.info:
                    return upright.convert("RGBA").convert("RGB")
                return upright.convert("RGB")
        except (*DAMAGE, Image.DecompressionBombError) as error:
            raise ValueError(f"{self._shown(place)}: cannot read this image ({error})") from error

    def foreground(self, index: int) -> Image.Image:
        """What is no background in one image: 255, elsewhere 0.

        Raises:
            ValueError: the trimap cannot be read; it is named.
        """
        assert self.trimaps is not None
        place = self.trimaps[index]
        try:
            with Image.open(place) as image:
                return image.convert("L").point([0 if value == BACKGROUND else 255 for value in range(256)])
        except (*DAMAGE, Image.DecompressionBombError) as error:
            raise ValueError(f"{place}: cannot read this trimap ({error})") from error

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, sizes, content (up to `HASHED_BYTES` in all), targets, class names and splits."""
        return _fingerprint(self.content, self)

    @cached_property
    def content(self) -> str:
        """SHA-256 over names, sizes and, up to `HASHED_BYTES` in all, the bytes of the files."""
        try:
            sizes = [self.archive.size(place) if self.archive else os.stat(place).st_size for place in self.places]
        except OSError as error:
            raise ValueError(f"{error.filename}: cannot be read ({error.strerror})") from error
        read = sum(sizes) <= HASHED_BYTES
        digest = hashlib.sha256()
        for name, place, size in zip(self.names, self.places, sizes, strict=True):
            digest.update(f"{name}\0{size}\0".encode())
            if read:
                try:
                    with self._stream(place) as stream:
                        digest.update(hashlib.sha256(stream.read()).digest())
                except DAMAGE as error:
                    raise ValueError(f"{self._shown(place)}: cannot be read ({error})") from error
        return digest.hexdigest()

    def _stream(self, place: str) -> AbstractContextManager[BinaryIO]:
        return opened(self.archive or Path(), place)

    def _shown(self, place: str) -> str:
        return f"{self.archive.path}: {place}" if self.archive else place


Source = ArraySource | FileSource


def build_source(data: Any) -> Source:
    """The source of a validated `data` node.

    Raises:
        DataProblem: the data set is missing or not as configured; the message says where it was looked for.
    """
    build: dict[str, Callable[[Any], Source]] = {
        "digits": _digits,
        "planted": _planted,
        "image_folder": _image_folder,
        "imagenet": _imagenet,
        "imagenet100": _imagenet,
        "cifar10": _cifar,
        "cifar100": _cifar,
        "cars": _cars,
        "pets": _pets,
        "flowers": _flowers,
    }
    source = build[data.name](data)
    for split in SPLITS:
        if not len(source.splits[split]):
            raise DataProblem("data.name", data.name, f"its split {split!r} is empty; expected at least one image")
    return source


def _digits(data: Any) -> ArraySource:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Grey levels 0 .. 16 spread over a byte; rounding keeps them distinct.
    images = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8))[:, None]
    targets = digits.target.astype(np.int64)
    parts = stratified_split(targets.tolist(), [str(i) for i in range(len(targets))], _DIGITS, seed=0)
    splits = _arrays({"train": parts["rest"], "val": parts["val"], "test": parts["test"]})
    return ArraySource(images, targets, tuple("0123456789"), splits)


def _planted(data: Any) -> ArraySource:
    planted = plant(data)
    bounds = np.cumsum([0, data.num_train, data.num_val, data.num_test])
    splits = {split: np.arange(bounds[i], bounds[i + 1]) for i, split in enumerate(SPLITS)}
    names = tuple(str(label) for label in range(data.num_classes))
    masks = torch.from_numpy(planted.masks)
    return ArraySource(torch.from_numpy(planted.images), planted.targets, names, splits, masks)


def _cifar(data: Any) -> ArraySource:
    from torchvision import datasets

    check_torchvision(data)
    kind = datasets.CIFAR10 if data.name == "cifar10" else datasets.CIFAR100
    train, test = (_torchvision(kind, data, train=train) for train in (True, False))
    images = torch.from_numpy(np.concatenate([train.data, test.data])).permute(0, 3, 1, 2).contiguous()
    targets = np.array([*train.targets, *test.targets], dtype=np.int64)
    groups = ["train"] * len(train.data) + ["test"] * len(test.data)
    splits = _carve(data, groups, targets, [str(i) for i in range(len(targets))])
    return ArraySource(images, targets, tuple(train.classes), splits)


def _image_folder(data: Any) -> FileSource:
    layout = check_image_folder(data)
    check_images(layout, "data.path", everything=True)
    check_repeats(data, layout)
    source = _from_layout(data, layout)
    return replace(source, splits=without_repeats(data, layout, source.splits))


def _imagenet(data: Any) -> FileSource:
    check_imagenet(data)
    return _from_layout(data, find_layout(data.root, "data.root", only=read_class_list(data)))


def _from_layout(data: Any, layout: FolderLayout) -> FileSource:
    archive = layout.root if isinstance(layout.root, Archive) else None
    number = {name: label for label, name in enumerate(layout.classes)}
    images = layout.images
    targets = np.array([number[image.label] for image in images], dtype=np.int64)
    names = [image.name for image in images]
    splits = _carve(data, [image.split for image in images], targets, names)
    return FileSource(
        names=tuple(image.full_name for image in images),
        places=tuple(image.member if archive else str(layout.path / image.member) for image in images),
        targets=targets,
        class_names=layout.classes,
        splits=splits,
        archive=archive,
    )


def _cars(data: Any) -> FileSource:
    from torchvision.datasets import StanfordCars

    check_torchvision(data)
    parts = {split: _torchvision(StanfordCars, data, split=split, loader=_path) for split in ("train", "test")}
    return _from_torchvision(data, {split: list(part) for split, part in parts.items()}, parts["train"].classes)


def _flowers(data: Any) -> FileSource:
    from torchvision.datasets import Flowers102

    check_torchvision(data)
    parts = {split: _torchvision(Flowers102, data, split=split, loader=_path) for split in SPLITS}
    return _from_torchvision(data, {split: list(part) for split, part in parts.items()}, Flowers102.classes)


def _pets(data: Any) -> FileSource:
    from torchvision.datasets import OxfordIIITPet

    check_torchvision(data)
    parts = {name: _torchvision(OxfordIIITPet, data, split=name) for name in ("trainval", "test")}
    samples = {
        "train" if name == "trainval" else "test": list(zip(part._images, part._labels, strict=True))
        for name, part in parts.items()
    }
    source = _from_torchvision(data, samples, parts["trainval"].classes)
    return replace(source, trimaps=tuple(str(path) for part in parts.values() for path in part._segs))


def _torchvision(kind: Any, data: Any, **options: Any) -> Any:
    """Open a torchvision data set and say what torchvision says when its files are incomplete."""
    if getattr(data, "download", False):
        options["download"] = True
    root = Path(data.root).expanduser()
    try:
        return kind(root=str(root), **options)
    except (RuntimeError, OSError) as error:
        raise DataProblem(
            "data.root", data.root, f"{data.name} is incomplete in {root.absolute()} ({error})"
        ) from error


def _from_torchvision(
    data: Any, samples: dict[str, list[tuple[str | Path, int]]], class_names: Sequence[str]
) -> FileSource:
    rows = [(split, Path(path), label) for split, part in samples.items() for path, label in part]
    targets = np.array([label for _, _, label in rows], dtype=np.int64)
    root = Path(data.root).expanduser()
    names = [path.relative_to(root).as_posix() for _, path, _ in rows]
    splits = _carve(data, [split for split, _, _ in rows], targets, names)
    return FileSource(tuple(names), tuple(str(path) for _, path, _ in rows), targets, tuple(class_names), splits)


def _carve(data: Any, groups: Sequence[Any], targets: NDArray[np.int64], names: Sequence[str]) -> Splits:
    options = (getattr(data, key, None) for key in ("val_fraction", "test_fraction", "split_seed"))
    return _arrays(divide(groups, targets.tolist(), names, *options))


def _arrays(splits: dict[Split, list[int]]) -> Splits:
    return {split: np.array(sorted(indices), dtype=np.int64) for split, indices in splits.items()}


def _digest(images: Tensor) -> str:
    header = json.dumps(list(images.shape)).encode()
    return hashlib.sha256(header + images.contiguous().numpy().tobytes()).hexdigest()


def _fingerprint(content: str, source: Source) -> str:
    header = {"classes": list(source.class_names), "content": content}
    digest = hashlib.sha256(json.dumps(header, sort_keys=True, ensure_ascii=True).encode())
    for array in (source.targets, *(source.splits[split] for split in SPLITS)):
        digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    return digest.hexdigest()


def _path(path: str | Path) -> str:
    """A torchvision loader that leaves the file closed."""
    return str(path)
