"""Where data lies and how it is divided: class folders in a folder or ZIP archive, and stratified splits.

Torch-free, because the configuration check looks here before torch is imported.

Splits do not depend on the order in which files are listed: the examples of a class are ranked by a hash of the split
seed and of the example's own name, and the first ones are taken.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from routing_lab.streams import stream_seed

Split = Literal["train", "val", "test"]

SPLITS: tuple[Split, ...] = ("train", "val", "test")

EXTENSIONS = frozenset({".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})

_SPLIT_FOLDERS: dict[str, Split] = {
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}


class DataProblem(ValueError):
    """A data set that cannot be used as configured: the key, its value, and what would be accepted."""

    def __init__(self, key: str, value: Any, message: str) -> None:
        super().__init__(f"{key}={value}: {message}")
        self.key = key
        self.value = value
        self.message = message


@dataclass(frozen=True, slots=True)
class Image:
    """One image file: `name` is its path from the class folder on, `member` its path from the folder or archive on."""

    split: Split | None
    label: str
    name: str
    member: str
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The images of a folder or ZIP archive, sorted by split and name.

    `classes` are the class folders in alphabetical order; with explicit splits they are those of `train`.
    """

    path: Path
    images: tuple[Image, ...]
    classes: tuple[str, ...]

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that have a folder of their own, empty when class folders are at the top."""
        present = {image.split for image in self.images}
        return tuple(split for split in SPLITS if split in present)


def find_layout(path: str | Path, key: str = "data.path", only: Collection[str] | None = None) -> Layout:
    """List the images of a folder or ZIP archive and recognise how they are arranged.

    Explicit splits are recognised when a folder `train` holds class folders; beside it, `val` (or `valid`,
    `validation`) and `test` may be present. Otherwise the folders at the top are the classes. One folder around all of
    this is looked through, hidden files and `__MACOSX` are passed over, and images of a class may be nested deeper.

    Args:
        path: folder or .zip file.
        key: configuration key to name in errors.
        only: class folders to use; others are passed over.

    Raises:
        DataProblem: nothing there, not an archive, no images, one class only, or an arrangement with two meanings.
    """
    path = Path(path).expanduser()
    listing = _list(path, key)
    depths = {name: name.split("/") for name in listing if _is_image(name)}
    prefix = _prefix(depths.values())
    files = {name: parts[len(prefix) :] for name, parts in depths.items()}
    files = {name: parts for name, parts in files.items() if len(parts) > 1}
    if not files:
        raise DataProblem(
            key,
            path,
            f"no images in class folders there (looked at {path.absolute()}); expected <class>/<image> or"
            f" train/<class>/<image>, with the endings {', '.join(sorted(EXTENSIONS))}",
        )
    explicit = _has_explicit_splits(files.values())
    if explicit:
        _check_explicit(path, key, files)
    images = []
    for name, parts in files.items():
        split = _SPLIT_FOLDERS[parts[0].lower()] if explicit else None
        below = parts[1:] if explicit else parts
        if only is None or below[0] in only:
            images.append(Image(split, below[0], "/".join(below), name, listing[name]))
    images.sort(key=lambda image: (image.split or "", image.name))
    classes = sorted({image.label for image in images if image.split in (None, "train")})
    if len(classes) < 2:
        found = f"one class only ({classes[0]})" if classes else "none of the wanted classes"
        raise DataProblem(
            key, path, f"{found} there (looked at {path.absolute()}); expected at least two class folders"
        )
    unknown = sorted({image.label for image in images} - set(classes))
    if unknown:
        raise DataProblem(
            key, path, f"classes {', '.join(unknown[:5])} have no folder in train; expected the same classes"
        )
    return Layout(path, tuple(images), tuple(classes))


def stratified_split(
    labels: Sequence[int], names: Sequence[str], counts: Mapping[Split, int], seed: int
) -> dict[Split | Literal["rest"], list[int]]:
    """Take `counts[split]` examples for every named split, in proportion to the classes, and leave the rest.

    Every class gives its share `count * class size / total`, rounded by largest remainder. Which of its examples are
    taken depends on `seed` and on their names alone.

    Args:
        labels: class of every example.
        names: a name of every example, unique within its class.
        counts: number of examples of the splits to take, in that order.
        seed: seed of the split.

    Returns:
        Ascending positions for every name in `counts`, and the others under `"rest"`.
    """
    base = stream_seed(seed, "split")
    members: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        members.setdefault(label, []).append(position)
    queues = {
        label: sorted(members[label], key=lambda position: (_rank(base, names[position]), names[position]))
        for label in sorted(members)
    }
    taken: dict[Split | Literal["rest"], list[int]] = {}
    for split, count in counts.items():
        shares = _apportion({label: len(members[label]) for label in queues}, count, len(labels))
        taken[split] = sorted(position for label, share in shares.items() for position in queues[label][:share])
        queues = {label: queue[shares[label] :] for label, queue in queues.items()}
    taken["rest"] = sorted(position for queue in queues.values() for position in queue)
    return taken


def _list(path: Path, key: str) -> dict[str, int]:
    """Relative POSIX path -> size in bytes of every file."""
    if path.is_dir():
        return {
            (Path(folder) / file).relative_to(path).as_posix(): os.stat(os.path.join(folder, file)).st_size
            for folder, _, files in os.walk(path, followlinks=True)
            for file in files
            if _is_image(file)
        }
    if not path.exists():
        raise DataProblem(
            key,
            path,
            f"nothing there (looked at {path.absolute()}); expected a folder or a ZIP archive of class folders",
        )
    try:
        with zipfile.ZipFile(path) as archive:
            return {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
    except (zipfile.BadZipFile, OSError) as error:
        raise DataProblem(
            key, path, f"cannot be read as a ZIP archive ({error}); expected a folder or a .zip"
        ) from error


def _is_image(name: str) -> bool:
    parts = name.split("/")
    return os.path.splitext(parts[-1])[1].lower() in EXTENSIONS and not any(
        part.startswith(".") or part == "__MACOSX" for part in parts
    )


def _prefix(paths: Collection[list[str]]) -> list[str]:
    """Folders around everything: shared by all images, with folders of images below, and not named like a split."""
    prefix: list[str] = []
    while paths:
        depth = len(prefix)
        tops = {parts[depth] for parts in paths if len(parts) > depth + 1}
        if len(tops) != 1 or any(len(parts) < depth + 3 for parts in paths):
            break
        (top,) = tops
        if top.lower() in _SPLIT_FOLDERS:
            break
        prefix.append(top)
    return prefix


def _has_explicit_splits(paths: Collection[list[str]]) -> bool:
    train = [parts for parts in paths if parts[0].lower() == "train"]
    return bool(train) and all(len(parts) > 2 for parts in train)


def _check_explicit(path: Path, key: str, files: Mapping[str, list[str]]) -> None:
    tops = sorted({parts[0] for parts in files.values()})
    strangers = [top for top in tops if top.lower() not in _SPLIT_FOLDERS]
    if strangers:
        raise DataProblem(
            key,
            path,
            f"folders {', '.join(strangers[:5])} beside train: expected only train, val (or valid) and test there,"
            " or class folders without a train folder of class folders",
        )
    doubled = [
        top for top in tops if sum(_SPLIT_FOLDERS[top.lower()] == _SPLIT_FOLDERS[other.lower()] for other in tops) > 1
    ]
    if doubled:
        raise DataProblem(key, path, f"folders {', '.join(doubled)} name the same split; expected one of them")
    loose = next((name for name, parts in files.items() if len(parts) < 3), None)
    if loose is not None:
        raise DataProblem(key, path, f"{loose} lies outside a class folder; expected <split>/<class>/<image>")


def _apportion(sizes: Mapping[int, int], count: int, total: int) -> dict[int, int]:
    """Divide `count` over classes in proportion to their sizes, by largest remainder, ties to the lower class."""
    shares = {label: count * size // total for label, size in sizes.items()}
    remainders = sorted(sizes, key=lambda label: (-(count * sizes[label] % total), label))
    for label in remainders[: count - sum(shares.values())]:
        shares[label] += 1
    return shares


def _rank(base: int, name: str) -> bytes:
    return blake2b(f"{base}/{name}".encode(), digest_size=16).digest()
