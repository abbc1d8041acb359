"""A look into the files of an image folder before anything is trained: headers of images, and files that repeat.

Torch-free. Results are kept for as long as names, sizes and marks of the files stay the same, so that the cells of a
sweep share one look.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from routing_lab.data.layout import SPLITS, DataProblem, FolderLayout, Split, divide
from routing_lab.data.listing import DAMAGE, Archive, opened

if TYPE_CHECKING:
    from PIL import Image

HASHED_BYTES = 256 * 2**20
"""File sets up to this size enter the fingerprint with their content, larger ones with names and sizes."""

FIRST_LOOK = 1000
"""Images whose headers the configuration check reads; all others are read when the data is opened."""

ALL_HEADERS = 20_000
"""Sets up to this size have all their headers read; of larger ones those that are not named as JPEG (always 8 bits)."""

COMPARED = 100_000
"""Files of equal size that are compared by content across splits, at most."""

_HEAD = 4096  # bytes that tell nearly all different files of one size apart
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")


@dataclass(frozen=True)
class Seen:
    """Lines about images that cannot be used, and names of images with more than one frame."""

    problems: tuple[str, ...]
    animated: tuple[str, ...]


@dataclass(frozen=True)
class Repeats:
    """Groups of positions of files with the same content in different splits, and how many were not compared."""

    groups: tuple[tuple[int, ...], ...]
    not_compared: int


def refused_mode(image: Image.Image) -> str | None:
    """Why the pixels of an image cannot be used; None where they can."""
    if image.mode.startswith(("I", "F")):
        return f"pixels of mode {image.mode}; expected 8 bits a channel"
    return None


def splits_of(data: Any, layout: FolderLayout) -> dict[Split, list[int]]:
    """Positions of the images of every split, before repeated files are dropped."""
    return {
        split: list(indices)
        for split, indices in zip(
            SPLITS, _splits(layout, data.val_fraction, data.test_fraction, data.split_seed), strict=True
        )
    }


def repeats_of(data: Any, layout: FolderLayout) -> Repeats:
    """Files that stand in more than one split of an image folder."""
    return _repeats(layout, _splits(layout, data.val_fraction, data.test_fraction, data.split_seed))


def check_splits(data: Any, layout: FolderLayout) -> None:
    """Refuse fractions that leave a split without images.

    Raises:
        DataProblem: the split is named.
    """
    dropped = dropped_repeats(data, layout)
    for split, indices in splits_of(data, layout).items():
        if len(indices) <= len(dropped.get(split, ())):
            raise DataProblem("data.name", data.name, f"its split {split!r} is empty; expected at least one image")


def check_repeats(data: Any, layout: FolderLayout) -> None:
    """Refuse files that stand in two splits, where `data.duplicates` says so.

    Raises:
        DataProblem: with the first pairs named.
    """
    groups = repeats_of(data, layout).groups
    if data.duplicates != "refuse" or not groups:
        return
    owner = {index: split for split, indices in splits_of(data, layout).items() for index in indices}
    pairs = [
        " = ".join(f"{layout.images[index].full_name} ({owner[index]})" for index in group) for group in groups[:3]
    ]
    more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    raise DataProblem(
        "data.duplicates",
        data.duplicates,
        f"the same file stands in two splits: {'; '.join(pairs)}{more}; remove it, or use data.duplicates=drop (val"
        " loses what test has, train what either has) or allow",
    )


def without_repeats(data: Any, layout: FolderLayout, splits: dict[Split, Any]) -> dict[Split, Any]:
    """`splits`, arrays of positions, without the repeated files that `data.duplicates=drop` takes out."""
    dropped = dropped_repeats(data, layout)
    if not dropped:
        return splits
    return {
        split: indices[[index not in dropped[split] for index in indices.tolist()]] for split, indices in splits.items()
    }


def dropped_repeats(data: Any, layout: FolderLayout) -> dict[Split, set[int]]:
    """Positions that leave a split under `data.duplicates=drop`: what a later one of train, val, test has as well."""
    groups = repeats_of(data, layout).groups if data.duplicates == "drop" else ()
    if not groups:
        return {}
    splits = {split: set(indices) for split, indices in splits_of(data, layout).items()}
    dropped: dict[Split, set[int]] = {split: set() for split in SPLITS}
    for group in groups:
        last = max(SPLITS.index(split) for split in SPLITS if splits[split].intersection(group))
        for split in SPLITS[:last]:
            dropped[split] |= splits[split].intersection(group)
    return dropped


@lru_cache(maxsize=4)
def look(layout: FolderLayout, everything: bool) -> Seen:
    """Read headers of images; with `everything` those of all that may be unusable, else of `FIRST_LOOK` at most."""
    from PIL import Image

    images = list(layout.images)
    if len(images) > (ALL_HEADERS if everything else FIRST_LOOK):
        images = [image for image in images if not image.member.lower().endswith(_JPEG)]
    if not everything:
        images = images[:: max(1, -(-len(images) // FIRST_LOOK))]
    root = layout.root
    problems, animated = [], []
    for image in images:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with opened(root, image.member) as stream, Image.open(stream) as found:
                    problem = refused_mode(found)
                    frames = getattr(found, "is_animated", False)
        except (*DAMAGE, Image.DecompressionBombError) as error:
            problem, frames = str(error), False
        if problem is not None:
            shown = f"{root.path}: {image.member}" if isinstance(root, Archive) else str(root / image.member)
            problems.append(f"{shown}: cannot read this image ({problem})")
        if frames:
            animated.append(image.full_name)
    return Seen(tuple(problems), tuple(animated))


def check_images(layout: FolderLayout, key: str, everything: bool) -> None:
    """Refuse images that cannot be used, as far as their headers say.

    Raises:
        DataProblem: with the first ones named.
    """
    problems = look(layout, everything or len(layout.images) <= FIRST_LOOK).problems
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DataProblem(key, layout.path, f"{'; '.join(problems[:3])}{more}; convert or remove them")


@lru_cache(maxsize=4)
def _splits(layout: FolderLayout, val: float, test: float, seed: int) -> tuple[tuple[int, ...], ...]:
    number = {name: label for label, name in enumerate(layout.classes)}
    images = layout.images
    labels, names = [number[image.label] for image in images], [image.name for image in images]
    splits = divide([image.split for image in images], labels, names, val, test, seed)
    return tuple(tuple(splits[split]) for split in SPLITS)


@lru_cache(maxsize=4)
def _repeats(layout: FolderLayout, splits: tuple[tuple[int, ...], ...]) -> Repeats:
    images, root = layout.images, layout.root
    owner = {index: number for number, indices in enumerate(splits) for index in indices}

    def across(groups: Iterable[list[int]], key: Callable[[int], Hashable]) -> list[list[int]]:
        """The groups divided further by a key, as far as they still stand in two splits."""
        finer = []
        for group in groups:
            parts: dict[Hashable, list[int]] = {}
            for index in group:
                parts.setdefault(key(index), []).append(index)
            finer += [part for part in parts.values() if len({owner[index] for index in part}) > 1]
        return finer

    def content(index: int, most: int = -1) -> Hashable:
        try:
            with opened(root, images[index].member) as stream:
                return hashlib.sha256(stream.read(most)).digest()
        except DAMAGE:
            return index  # unreadable: named elsewhere, equal to nothing

    is_archive = isinstance(root, Archive)
    groups = across([sorted(owner)], lambda index: (images[index].size, images[index].mark if is_archive else 0))
    if not is_archive:
        candidates = sum(map(len, groups))
        if candidates > COMPARED:
            return Repeats((), candidates)
        groups = across(groups, lambda index: content(index, _HEAD))
    return Repeats(tuple(tuple(group) for group in across(groups, content)), 0)
