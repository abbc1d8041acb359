"""A look at the text files a configuration names, without reading them and without torch."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from routing_lab.data.layout import DataProblem, Split

_SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}


def inspect_text(data: Any) -> list[tuple[str, Any, str]]:
    """Problems of a `data` node of text with what is on disk, as (key, value, message)."""
    try:
        if data.name == "text_files":
            text_files(data.path)
        folder = getattr(data, "tokenizer_folder", None)
        if folder is not None and ("/" not in folder or folder.startswith((".", "/", "~"))):
            path = Path(folder).expanduser()
            if not path.is_dir():
                raise DataProblem("data.tokenizer_folder", folder, f"no folder there (looked at {path.absolute()})")
    except DataProblem as problem:
        return [(problem.key, problem.value, problem.message)]
    return []


def text_files(path: str) -> list[tuple[str, Path]]:
    """The text files at `path`: name below the folder and place, sorted by name.

    Raises:
        DataProblem: there is none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        raise DataProblem("data.path", path, f"no file or folder there (looked at {root.absolute()})")
    found = sorted((file.relative_to(root).as_posix(), file) for file in root.rglob("*.txt") if file.is_file())
    if not found:
        raise DataProblem("data.path", path, f"{root.absolute()} holds no .txt file")
    return found


def split_of(name: str) -> Split | None:
    """The split that a file belongs to by its first folder or its own name; None: by neither."""
    path = PurePosixPath(name)
    first = path.parts[0] if len(path.parts) > 1 else path.stem
    return _SPLIT_NAMES.get(first.lower())
