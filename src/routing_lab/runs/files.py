"""How files are written: whole or not at all, and with the same bytes for equal content.

A file is written under a temporary name in its folder and then renamed, so a reader sees the old file or the new one
and never half of one, and a process killed at any moment leaves the previous version.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an error.

    The new content reaches the disk before the name changes, and permissions that `path` has are kept. After an error
    the temporary file is removed and `path` stays as it was. The folder must be there: one that somebody removed is not
    made again.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        with suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_text(path: Path | str, text: str) -> Path:
    """Write `text` (UTF-8, newlines as given) so that `path` holds all of it or what it held before."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    return Path(path)


def json_text(payload: Mapping[str, Any]) -> str:
    """`payload` as JSON, the same text for equal payloads.

    Keys are sorted, whole numbers among them by value. Floats are written with the digits that give the same float
    back; NaN and infinities as `NaN` and `Infinity`, the dialect that Python and pandas read. Tuples and arrays
    become lists, numpy numbers plain numbers, paths strings.

    Raises:
        TypeError: a value that JSON cannot hold.
    """
    return json.dumps(_plain(payload), indent=1, ensure_ascii=False)


def write_json(path: Path | str, payload: Mapping[str, Any]) -> Path:
    """Write `json_text` of `payload`, atomically and with the same bytes for equal payloads; raises like it."""
    return write_text(path, json_text(payload) + "\n")


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which `layer10` follows `layer9`."""
    parts = re.split(r"(\d+)", str(text))
    return tuple((1, 0, part) if i % 2 == 0 else (0, int(part), "") for i, part in enumerate(parts) if part)


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        keys = sorted(((str(key), key) for key in value), key=lambda pair: natural(pair[0]))
        return {key: _plain(value[original]) for key, original in keys}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [_plain(item) for item in sorted(value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, (str, int, float)):
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a record cannot hold a {type(value).__name__}: {value!r}")


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
