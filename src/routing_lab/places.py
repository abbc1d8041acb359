"""Whether a folder can be written to, found out before anything is written there."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path


def unwritable(folder: str | Path) -> str | None:
    """Why nothing can be written into a folder, there already or still to be made; None where it can.

    Permissions say little of file systems that are read-only, full or no real ones, so an empty folder is made in the
    nearest one that is there, and removed.
    """
    folder = Path(folder).expanduser().absolute()
    try:
        nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        if not nearest.is_dir():
            kind = "is a file" if nearest.is_file() else "is no folder"
            return kind if nearest == folder else f"{nearest} {kind}"
        trial = nearest / f".routing_lab-{secrets.token_hex(4)}"
        trial.mkdir()
        trial.rmdir()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return _too_long(folder)


def _too_long(folder: Path) -> str | None:
    longest = max(len(os.fsencode(part)) for part in folder.parts)
    if longest > 255:
        return f"a part of it has {longest} bytes; file systems take 255"
    try:
        # As long as the files that are to come.
        (folder / ("x" * 255)).lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"it has {len(os.fsencode(folder))} bytes, which leaves no room for the names of files"
    return None
