"""The files that a run reads, as they were when it read them, and what has changed since.

A run is never trained twice, so its record has to notice when the same command no longer means the same data. What a
record keeps of a set of files is a digest of names and sizes, one that has their marks as well (times of change, or
the checksums of an archive), and one of their content, for sets up to `HASHED_BYTES` or with `runtime.verify=content`.

Comparing is cheap: the marks agree, and nothing is read. Where only the marks differ, as after a copy, the content
decides. Torch-free, because a finished run is reported without torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from routing_lab.data.contents import HASHED_BYTES
from routing_lab.data.inspect import check_image_folder, check_imagenet, read_class_list, torchvision_folder
from routing_lab.data.layout import FolderLayout, find_layout
from routing_lab.data.listing import DAMAGE, Archive, list_files, opened

MOST_FOLDERS = 256
"""Folders that a state lists one by one, so that a change can be located; of more only the totals are kept."""

WAYS_ON = "put it back, train afresh with rerun=true, or keep both results with name=..."
WAYS_ON_IN_A_STUDY = "put it back, train such cells afresh with rerun=true, or keep both results with paths.runs=..."


@dataclass(frozen=True, slots=True)
class Listed:
    """A file. name: what it is called wherever the data lies; path: relative to the folder or archive."""

    name: str
    path: str
    size: int
    mark: int


@dataclass(frozen=True, slots=True)
class Files:
    """The files behind a `data` node, below a folder or in an archive."""

    root: Path
    files: tuple[Listed, ...]


def data_files(data: Any) -> Files | None:
    """The files of a validated `data` node; None for data that comes with a library or is generated.

    A node from elsewhere says with a method `input_files() -> sequence of paths` what it reads.

    Raises:
        DataProblem: they are not there as configured.
    """
    if data.name == "image_folder":
        return _of_layout(check_image_folder(data))
    if data.name in ("imagenet", "imagenet100"):
        check_imagenet(data)
        return _of_layout(find_layout(data.root, "data.root", only=read_class_list(data)))
    folder = torchvision_folder(data)
    if folder is not None:
        found = list_files(folder).files if folder.is_dir() else ()
        return Files(folder, tuple(Listed(file.path, file.path, file.size, file.mark) for file in found))
    if hasattr(data, "input_files"):
        return _of_paths(data.input_files())
    return None


def data_state(data: Any, full: bool = False) -> dict[str, Any] | None:
    """What a record keeps of the files of a `data` node; None where there are none.

    Args:
        data: a validated `data` node.
        full: read every byte, whatever the size.
    """
    files = data_files(data)
    return None if files is None else files_state(files, full)


def files_state(files: Files, full: bool = False, trusting: bool = True) -> dict[str, Any]:
    """Counts and digests of a set of files; `content` is None where it was not read.

    Args:
        files: the files.
        full: read every byte, whatever the size.
        trusting: whether what was read before of files with these marks still counts.
    """
    total = sum(file.size for file in files.files)
    contents = None
    if full or total <= HASHED_BYTES:
        contents = _contents(files) if trusting else _contents.__wrapped__(files)
    folders: dict[str, list[Any]] = {}
    for folder, members in _by_folder(files.files).items():
        digests = None if contents is None else [contents[file.name] for file in members]
        folders[folder] = [
            len(members),
            _digest((file.name, file.size) for file in members)[:16],
            None if digests is None else _digest((digest,) for digest in digests)[:16],
        ]
    return {
        "count": len(files.files),
        "bytes": total,
        "names": _digest((file.name, file.size) for file in files.files),
        "marks": _marks(files),
        "content": None if contents is None else _digest(sorted(contents.items())),
        "folders": folders if len(folders) <= MOST_FOLDERS else {},
    }


def file_state(path: Path) -> dict[str, Any]:
    """What a record keeps of one file of weights.

    Raises:
        OSError: it cannot be read.
    """
    status = path.stat()
    return {"bytes": status.st_size, "mark": status.st_mtime_ns, "sha256": _sha256(path, status.st_mtime_ns)}


def changed_data(before: Any, data: Any, full: bool = False) -> str | None:
    """What has changed in the files of a `data` node since a record kept their state; None where nothing has.

    Args:
        before: the state in the record; anything but a state (an older record has none) is compared with nothing.
        data: the validated `data` node.
        full: compare every byte instead of trusting names, sizes and times.
    """
    if not isinstance(before, Mapping) or not isinstance(before.get("names"), str):
        return None
    files = data_files(data)
    if files is None or (not full and before.get("marks") == _marks(files)):
        return None
    same_names = before["names"] == _digest((file.name, file.size) for file in files.files)
    knows_content = before.get("content") is not None
    if same_names and not knows_content:
        if before.get("marks") == _marks(files):
            return None
        return (
            "times of change differ, and the content was too large to be recorded (runtime.verify=content records it)"
        )
    now = files_state(files, full=knows_content, trusting=not full)
    if same_names and now["content"] == before["content"]:
        return None
    count = f"{before.get('count')} files then, {now['count']} now" if before.get("count") != now["count"] else ""
    return "; ".join(part for part in (count, _where(before.get("folders"), now["folders"])) if part) or (
        "other names or sizes" if not same_names else "other content under the same names"
    )


def changed_file(before: Any, path: Path, full: bool = False) -> str | None:
    """What has changed in a file of weights since a record kept its state; None where nothing has."""
    if not isinstance(before, Mapping) or not isinstance(before.get("sha256"), str):
        return None
    try:
        status = path.stat()
        if status.st_size != before.get("bytes"):
            return f"{before.get('bytes')} bytes then, {status.st_size} now"
        if not full and status.st_mtime_ns == before.get("mark"):
            return None
        same = _sha256(path, status.st_mtime_ns) == before["sha256"]
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if same else "other content of the same size"


def changed_inputs(record: Mapping[str, Any], config: Any, ways_on: str = WAYS_ON) -> list[tuple[str, Any, str]]:
    """What a run reads and that is no longer what its record was made from, as (key, value, message).

    A run that has learned nothing yet is bound to no data.

    Args:
        record: the record of the run, at any status.
        config: the checked configuration of the run that is asked for.
        ways_on: how whoever reads the message may go on.

    Raises:
        DataProblem: the data is not there as configured.
    """
    if record["status"] != "finished" and not record.get("num_epochs_done"):
        return []
    full = config.runtime.verify == "content"
    problems: list[tuple[str, Any, str]] = []
    found = changed_data(record["data"].get("files"), config.data, full)
    if found is not None:
        key = next((name for name in ("path", "root") if hasattr(config.data, name)), "name")
        message = f"is not the data of {record['name']}: {found}; {ways_on}"
        problems.append((f"data.{key}", getattr(config.data, key), message))
    if (named := config.init.file()) is not None:
        key, value, path = named
        found = changed_file(record["init"].get("file"), path, full)
        if found is not None:
            message = f"is not the file that {record['name']} started from: {found}; {ways_on}"
            problems.append((key, value, message))
    elif record["init"].get("file") is not None and isinstance(record["init"].get("source"), str):
        weights = Path(config.paths.runs) / Path(record["init"]["source"]).name / "checkpoints" / "final.safetensors"
        found = changed_file(record["init"]["file"], weights, full) if weights.exists() else None
        if found is not None:
            message = f"{weights} is not what {record['name']} started from: {found}; {ways_on}"
            problems.append(("init", config.init.kind, message))
    return problems


def _of_layout(layout: FolderLayout) -> Files:
    return Files(
        layout.path, tuple(Listed(image.full_name, image.member, image.size, image.mark) for image in layout.images)
    )


def _of_paths(paths: Sequence[str | Path]) -> Files:
    files = []
    for path in map(Path, paths):
        status = path.stat()
        files.append(Listed(path.name, str(path.absolute()), status.st_size, status.st_mtime_ns))
    return Files(Path(), tuple(files))


def _by_folder(files: Sequence[Listed]) -> dict[str, list[Listed]]:
    """The files by the first two folders of their names."""
    folders: dict[str, list[Listed]] = {}
    for file in files:
        folders.setdefault("/".join(file.name.split("/")[:-1][:2]) or ".", []).append(file)
    return folders


def _where(before: Any, now: Mapping[str, Sequence[Any]]) -> str:
    """Which folders differ, with what differs."""
    if not isinstance(before, Mapping) or not before or not now:
        return ""
    words = []
    for folder in sorted(before.keys() | now.keys()):
        then, found = before.get(folder), now.get(folder)
        if then is None:
            words.append(f"{folder} is new ({found[0]} files)" if found else "")
        elif found is None:
            words.append(f"{folder} is gone ({then[0]} files)")
        elif then[0] != found[0]:
            words.append(f"{folder} had {then[0]} files and has {found[0]}")
        elif then[1] != found[1]:
            words.append(f"{folder} has files of other names or sizes")
        elif None not in (then[2], found[2]) and then[2] != found[2]:
            words.append(f"{folder} has other content under the same names")
    more = f" and {len(words) - 4} more folders" if len(words) > 4 else ""
    return ", ".join(words[:4]) + more


def _marks(files: Files) -> str:
    return _digest((file.name, file.size, file.mark) for file in files.files)


def _digest(rows: Any) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(("\0".join(map(str, row)) + "\n").encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@lru_cache(maxsize=2)
def _contents(files: Files) -> dict[str, str]:
    """Name -> SHA-256 of every file; names the file that cannot be read."""
    root: Path | Archive = files.root if files.root.is_dir() else Archive(files.root)
    found = {}
    for file in files.files:
        try:
            with opened(root, file.path) as stream:
                found[file.name] = _sha256_of(stream)
        except DAMAGE as error:
            raise ValueError(f"{os.path.join(files.root, file.path)}: cannot be read ({error})") from error
    return found


@lru_cache(maxsize=8)
def _sha256(path: Path, mark: int) -> str:
    with open(path, "rb") as stream:
        return _sha256_of(stream)


def _sha256_of(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := stream.read(2**20):
        digest.update(block)
    return digest.hexdigest()
