"""What lies in a folder or ZIP archive: every real file once, and what was left out, with the reason.

Torch-free. Links are followed as long as they lead to something new: a link to a folder that is read already (a loop, a
second name), a dead link, a pipe or another special file, and a member of an archive that is no plain file are left out
and named. Hidden files and `__MACOSX` are passed over.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA})
"""Compression methods that every Python reads."""

DAMAGE = (OSError, ValueError, SyntaxError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile)
"""What reading a file, an archive's member or an image may raise; `zlib.error` and `lzma.LZMAError` are turned into
`zipfile.BadZipFile` by `Archive.read`."""


@dataclass(frozen=True, slots=True)
class File:
    """One file. path: relative POSIX path from the folder or archive on; mark: what changes when the content does.

    The mark is the time of the last change in nanoseconds, or the CRC-32 of an archive's member. `real` tells two paths
    of the same file from two files; None inside an archive.
    """

    path: str
    size: int
    mark: int
    real: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that is not read. path: as of `File`, of a folder with a slash at its end; reason: why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Listing:
    """What `list_files` found, both sorted by path."""

    files: tuple[File, ...]
    left_out: tuple[LeftOut, ...]


class Archive:
    """A ZIP archive read in place. Every process opens it for itself: a shared file position would be moved by all."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._opened: tuple[int, zipfile.ZipFile] | None = None

    def read(self, member: str) -> bytes:
        """Content of one member.

        Raises:
            zipfile.BadZipFile: the member is damaged, encrypted or of a compression that Python does not know.
        """
        try:
            return self._zip().read(member)
        except (OSError, EOFError, ValueError, zipfile.BadZipFile):
            raise
        except Exception as error:  # zlib.error, lzma.LZMAError, RuntimeError: no common base
            raise zipfile.BadZipFile(str(error) or type(error).__name__) from error

    def size(self, member: str) -> int:
        """Uncompressed bytes of one member."""
        return self._zip().getinfo(member).file_size

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_opened": None}

    def _zip(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), zipfile.ZipFile(self.path))
        return self._opened[1]


def list_files(path: Path) -> Listing:
    """The files of a folder or ZIP archive.

    Raises:
        OSError: the path cannot be read.
        zipfile.BadZipFile: a file that is no ZIP archive.
    """
    if path.exists() and not (path.is_dir() or path.is_file()):
        raise OSError(f"it is {_special(path.stat().st_mode)}")
    files, left_out = _list_folder(path) if path.is_dir() else _list_archive(path)
    return Listing(
        tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(left_out, key=lambda left: left.path))
    )


@contextmanager
def opened(root: Path | Archive, path: str) -> Iterator[BinaryIO]:
    """A file of a listing, open for reading."""
    if isinstance(root, Archive):
        yield io.BytesIO(root.read(path))
        return
    with open(root / path, "rb") as stream:
        yield stream


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _list_folder(root: Path) -> tuple[list[File], list[LeftOut]]:
    files: list[File] = []
    left_out: list[LeftOut] = []
    seen: dict[tuple[int, int], str] = {}
    folders, links = [""], list[str]()
    while folders or links:
        # Real folders first, so that of two names of a folder the link is the one that is left out.
        folder = folders.pop() if folders else links.pop(0)
        place = root / folder
        try:
            status = place.stat()
            first = seen.setdefault((status.st_dev, status.st_ino), folder)
            if first != folder:
                left_out.append(LeftOut(f"{folder}/", f"a link to {first or 'the top folder'}, which is read already"))
                continue
            with os.scandir(place) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if not folder:
                raise
            left_out.append(LeftOut(f"{folder}/", f"cannot be read: {error.strerror}"))
            continue
        for entry in found:
            if _is_hidden(entry.name):
                continue
            path = f"{folder}/{entry.name}".lstrip("/")
            try:
                status = entry.stat()
            except FileNotFoundError:
                left_out.append(LeftOut(path, "a link to nothing" if entry.is_symlink() else "gone while it was read"))
                continue
            except OSError as error:
                left_out.append(LeftOut(path, f"cannot be read: {error.strerror}"))
                continue
            if stat.S_ISDIR(status.st_mode):
                (links if entry.is_symlink() else folders).append(path)
            elif stat.S_ISREG(status.st_mode):
                files.append(File(path, status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino)))
            else:
                left_out.append(LeftOut(path, _special(status.st_mode)))
    return files, left_out


def _special(mode: int) -> str:
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _list_archive(path: Path) -> tuple[list[File], list[LeftOut]]:
    files: dict[str, File] = {}
    left_out: list[LeftOut] = []
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for info in members:
        parts = info.filename.split("/")
        if info.is_dir() or any(_is_hidden(part) for part in parts if part != ".."):
            continue
        if parts[0] == "" or ".." in parts or "\\" in info.filename:
            left_out.append(LeftOut(info.filename, "its path leads out of the archive"))
        elif stat.S_ISLNK(info.external_attr >> 16):
            left_out.append(LeftOut(info.filename, "a link"))
        elif info.flag_bits & 0x1:
            left_out.append(LeftOut(info.filename, "encrypted; unpack the archive, or write it without a password"))
        elif info.compress_type not in METHODS:
            reason = f"compression method {info.compress_type}, which Python cannot read; pack it again with zip"
            left_out.append(LeftOut(info.filename, reason))
        elif info.filename in files:
            left_out.append(LeftOut(info.filename, "stands in the archive twice"))
        else:
            files[info.filename] = File(info.filename, info.file_size, info.CRC)
    return list(files.values()), left_out
