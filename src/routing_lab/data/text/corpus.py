"""Documents and their splits: embedded, from files, or streamed from the Hugging Face hub.

Files are read as UTF-8 with one line end, and sorted by their names below the folder, so that the same texts give the
same tokens on every machine.
"""

from __future__ import annotations

import hashlib
import lzma
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from routing_lab.data.layout import SPLITS, DataProblem, Split
from routing_lab.data.text.inspect import split_of, text_files


@dataclass(frozen=True)
class Corpus:
    """Documents of each split, as UTF-8."""

    documents: dict[Split, list[bytes]]

    @property
    def sizes(self) -> dict[Split, int]:
        """Bytes of each split."""
        return {split: sum(map(len, self.documents[split])) for split in SPLITS}


def read_corpus(data: Any) -> Corpus:
    """The texts of a validated `data` node.

    Raises:
        DataProblem: they cannot be read, or are too short to be split.
    """
    if data.name == "shakespeare":
        return carve([shakespeare()], data)
    if data.name == "hub_text":
        return carve(_cached(data), data)
    files = text_files(data.path)
    found: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    rest: list[bytes] = []
    for name, path in files:
        text = _read(path)
        split = split_of(name)
        (rest if split is None else found[split]).append(text)
    carved = carve(rest or found["train"], data, [split for split in SPLITS[1:] if not found[split]])
    return Corpus({split: (found[split] if split != "train" else []) or carved.documents[split] for split in SPLITS})


def shakespeare() -> bytes:
    """The embedded plays, 1,115,394 bytes of ASCII."""
    packed = resources.files("routing_lab.data.text").joinpath("tinyshakespeare.txt.xz").read_bytes()
    return lzma.decompress(packed)


def carve(documents: Sequence[bytes], data: Any, splits: Sequence[Split] = ("val", "test")) -> Corpus:
    """The last parts of the documents become the wanted `splits`; a document in two of them is cut at a line's end.

    Raises:
        DataProblem: a split would be empty.
    """
    total = sum(map(len, documents))
    fractions = {"val": data.val_fraction, "test": data.test_fraction}
    parts: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    ends: list[tuple[Split, float]] = []
    left = total - sum(fractions[split] * total for split in splits)
    ends.append(("train", left))
    for split in SPLITS[1:]:
        if split in splits:
            left += fractions[split] * total
            ends.append((split, left))
    at, current = 0, 0
    for document in documents:
        rest = document
        while rest:
            split, end = ends[current]
            room = round(end) - at
            if current == len(ends) - 1 or len(rest) <= room:
                parts[split].append(rest)
                at += len(rest)
                break
            cut = _cut(rest, max(room, 0))
            parts[split].append(rest[:cut])
            at += cut
            rest = rest[cut:]
            current += 1
    for split in ("train", *splits):
        if not any(parts[split]):
            raise DataProblem(
                f"data.{'val' if split == 'train' else split}_fraction",
                fractions.get(split, data.val_fraction),
                f"leaves nothing for {split}: there are {total} bytes of text in {len(documents)} documents",
            )
    return Corpus(parts)


def _cut(text: bytes, place: int) -> int:
    """Where to cut a text at `place` or a little later: behind a line, else behind a word, else between characters."""
    for mark in (b"\n", b" "):
        found = text.find(mark, place, place + 4096)
        if found >= 0:
            return found + 1
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return place


def _read(path: Path) -> bytes:
    try:
        return path.read_text(encoding="utf-8").encode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataProblem("data.path", path, f"cannot be read as UTF-8 ({error})") from error


def _cached(data: Any) -> list[bytes]:
    """The documents streamed from the hub, kept under `data.root` so that the next run needs no network."""
    name = "\0".join(map(str, (data.path, data.subset, data.text_key, data.max_bytes)))
    path = Path(data.root).expanduser() / "texts" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.npz"
    if not path.is_file():
        documents = _streamed(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            text = np.frombuffer(b"".join(documents), dtype=np.uint8)
            np.savez_compressed(file, text=text, ends=np.cumsum([len(document) for document in documents]))
        os.replace(temporary, path)
    with np.load(path) as found:
        text, ends = found["text"].tobytes(), found["ends"].tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _streamed(data: Any) -> list[bytes]:
    """The first documents of a data set on the hub, up to `max_bytes`."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataProblem("data.name", "hub_text", "needs the datasets library: pip install -e '.[text]'") from error
    try:
        rows: Iterable[Any] = load_dataset(data.path, data.subset, split="train", streaming=True)
        documents: list[bytes] = []
        size = 0
        for row in rows:
            if data.text_key not in row:
                raise DataProblem("data.text_key", data.text_key, f"no such column; there are {', '.join(row)}")
            text = str(row[data.text_key]).encode()
            if text:
                documents.append(text)
                size += len(text)
            if size >= data.max_bytes:
                break
    except DataProblem:
        raise
    except Exception as error:
        raise DataProblem("data.path", data.path, f"cannot be streamed from the hub ({error})") from error
    return documents
