"""Where data lies and how it is divided: class folders in a folder or ZIP archive, and stratified splits.

Torch-free, because the configuration check looks here before torch is imported.

Splits do not depend on the order in which files are listed: the examples of a class are ranked by a hash of the split
seed and of the example's own name, and the first ones are taken.
"""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from routing_lab.data.listing import Archive, LeftOut, Listing, list_files
from routing_lab.streams import stream_seed

Split = Literal["train", "val", "test"]

SPLITS: tuple[Split, ...] = ("train", "val", "test")

EXTENSIONS = frozenset(
    [
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".jpf", ".jpx", ".j2c", ".jpc", ".png", ".apng", ".bmp"),
        *(".dib", ".gif", ".webp", ".avif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tga", ".icb"),
        *(".vda", ".vst", ".psd", ".pcx", ".dds", ".ico", ".icns", ".qoi", ".sgi", ".rgb", ".rgba", ".bw", ".ras"),
        *(".xbm", ".xpm", ".im", ".msp"),
    ]
)
"""Endings of the formats that Pillow decodes by itself. Stated here, so that the images of a folder do not depend on
how the Pillow of a machine was built."""

SIDECARS = frozenset(
    [
        *(".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".html", ".htm", ".css"),
        *(".js", ".log", ".py", ".sh", ".pdf", ".db", ".ini", ".mat", ".npy"),
    ]
)
"""Endings of files that lie beside images without being some: a folder with nothing else is no class."""

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
    mark: int

    @property
    def full_name(self) -> str:
        """Split and name: what identifies the image wherever the data lies."""
        return f"{self.split}/{self.name}" if self.split else self.name


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """The images of a folder or ZIP archive, sorted by split and name.

    `classes` are the class folders in alphabetical order; with explicit splits they are those of `train`. `notes` name
    what was left out.
    """

    path: Path
    images: tuple[Image, ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def root(self) -> Path | Archive:
        """What `listing.opened` opens the images from."""
        return self.path if self.path.is_dir() else Archive(self.path)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that have a folder of their own, empty when class folders are at the top."""
        present = {image.split for image in self.images}
        return tuple(split for split in SPLITS if split in present)


def find_layout(path: str | Path, key: str = "data.path", only: Collection[str] | None = None) -> FolderLayout:
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
    found = {file.path: file for file in listing.files if _has_ending(file.path, EXTENSIONS)}
    left_out = [
        *listing.left_out,
        *(
            LeftOut(file.path, f"ending {os.path.splitext(file.path)[1] or 'missing'}, which is no image's")
            for file in listing.files
            if file.path not in found and not _has_ending(file.path, SIDECARS)
        ),
    ]
    depths = {name: name.split("/") for name in found}
    prefix = _prefix(depths.values())
    files = {name: parts[len(prefix) :] for name, parts in depths.items()}
    files = {name: parts for name, parts in files.items() if len(parts) > 1}
    if not files:
        raise DataProblem(
            key,
            path,
            f"no images in class folders there (looked at {path.absolute()}); expected <class>/<image> or"
            f" train/<class>/<image>, with the endings of images (.jpg, .png, ...){_examples(left_out)}",
        )
    explicit = _has_explicit_splits(files.values())
    if explicit:
        _check_explicit(path, key, files)
    images: list[Image] = []
    real: dict[Any, str] = {}
    for name, parts in sorted(files.items(), key=lambda item: item[0]):
        split = _SPLIT_FOLDERS[parts[0].lower()] if explicit else None
        below = parts[1:] if explicit else parts
        if only is not None and below[0] not in only:
            continue
        file = found[name]
        # Two links to one file in a class are one example; in two classes or splits they are the user's mistake.
        first = name if file.real is None else real.setdefault((split, below[0], file.real), name)
        if first != name:
            left_out.append(LeftOut(name, f"the same file as {first}"))
            continue
        images.append(Image(split, below[0], "/".join(below), name, file.size, file.mark))
    images.sort(key=lambda image: (image.split or "", image.name))
    _check_none_lost(path, key, images, left_out, prefix, explicit, only)
    classes = sorted({image.label for image in images if image.split in (None, "train")})
    if len(classes) < 2:
        one = f"one class only ({classes[0]})" if classes else "none of the wanted classes"
        raise DataProblem(key, path, f"{one} there (looked at {path.absolute()}); expected at least two class folders")
    unknown = sorted({image.label for image in images} - set(classes))
    if unknown:
        raise DataProblem(
            key, path, f"classes {', '.join(unknown[:5])} have no folder in train; expected the same classes"
        )
    return FolderLayout(path, tuple(images), tuple(classes), tuple(_notes(key, path, left_out)))


def divide(
    groups: Sequence[Split | None],
    labels: Sequence[int],
    names: Sequence[str],
    val_fraction: float | None,
    test_fraction: float | None,
    seed: int | None,
) -> dict[Split, list[int]]:
    """Complete the splits: what has no group is divided, and what is missing comes out of the training split.

    A set with `train` and `val` but no `test` is used as ImageNet is: its `val` is the test split, and a new `val` is
    carved out of `train`, so that choices made on `val` never see the images of the final figure.

    Args:
        groups: the split that each example has of its own, None without.
        labels, names: as of `stratified_split`.
        val_fraction, test_fraction: part of the training examples that a missing split takes.
        seed: seed of the division; None for a set that brings all three splits.

    Returns:
        Ascending positions of every split.

    Raises:
        DataProblem: a class is left without a training example.
    """
    found: dict[Split, list[int]] = {split: [i for i, group in enumerate(groups) if group == split] for split in SPLITS}
    train = found["train"] or [i for i, group in enumerate(groups) if group is None]
    if found["val"] and not found["test"]:
        found["test"], found["val"] = found["val"], []
    counts: dict[Split, int] = {}
    if not found["test"] and test_fraction is not None:
        counts["test"] = round(test_fraction * len(train))
    if not found["val"] and val_fraction is not None:
        counts["val"] = round(val_fraction * len(train))
    if counts and seed is not None:
        parts = stratified_split([labels[i] for i in train], [names[i] for i in train], counts, seed)
        for split in counts:
            found[split] = [train[i] for i in parts[split]]
        train = [train[i] for i in parts["rest"]]
        missing = set(labels) - {labels[i] for i in train}
        if missing:
            raise DataProblem(
                "data.val_fraction",
                val_fraction,
                f"leaves {len(missing)} classes without a training image; expected a smaller part",
            )
    return {"train": sorted(train), "val": sorted(found["val"]), "test": sorted(found["test"])}


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


def _list(path: Path, key: str) -> Listing:
    try:
        return list_files(path)
    except FileNotFoundError:
        raise DataProblem(
            key,
            path,
            f"nothing there (looked at {path.absolute()}); expected a folder or a ZIP archive of class folders",
        ) from None
    except (zipfile.BadZipFile, OSError) as error:
        raise DataProblem(
            key, path, f"cannot be read as a ZIP archive ({error}); expected a folder or a .zip"
        ) from error


def _has_ending(name: str, endings: Collection[str]) -> bool:
    return os.path.splitext(name)[1].lower() in endings


def _notes(key: str, path: Path, left_out: Collection[LeftOut]) -> Iterable[str]:
    """One line for each reason why something is not read."""
    reasons = Counter(left.reason for left in left_out)
    for reason, number in sorted(reasons.items()):
        names = [left.path for left in left_out if left.reason == reason]
        more = f" and {number - 3} more" if number > 3 else ""
        yield f"{key}={path}: left out {', '.join(names[:3])}{more}: {reason}"


def _examples(left_out: Sequence[LeftOut]) -> str:
    return f"; left out: {', '.join(map(str, left_out[:3]))}" if left_out else ""


def _check_none_lost(
    path: Path,
    key: str,
    images: Sequence[Image],
    left_out: Sequence[LeftOut],
    prefix: Sequence[str],
    explicit: bool,
    only: Collection[str] | None,
) -> None:
    """Refuse a class, or a whole split, of which nothing is left."""
    present = {(image.split, image.label) for image in images}
    lost: dict[str, LeftOut] = {}
    for left in left_out:
        parts = left.path.split("/")
        below = parts[len(prefix) :]
        if parts[: len(prefix)] != list(prefix) or len(below) < 2:
            continue
        split = _SPLIT_FOLDERS.get(below[0].lower()) if explicit else None
        if explicit and below[1:] == [""]:
            gone = split is not None and not any(has == split for has, _ in present)
        elif explicit:
            gone = len(below) > 2 and split is not None and (split, below[1]) not in present
        else:
            gone = (None, below[0]) not in present
        label = below[1] if explicit and len(below) > 2 else below[0]
        if gone and (only is None or label in only):
            lost.setdefault("/".join(below[: 2 if explicit and len(below) > 2 else 1]), left)
    if lost:
        name, left = next(iter(lost.items()))
        more = f" and {len(lost) - 1} more folders" if len(lost) > 1 else ""
        raise DataProblem(
            key,
            path,
            f"no image is left of {name}{more}: {left}; remove the folder, or give it images that can be read",
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
