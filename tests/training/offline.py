"""Reads back what Weights & Biases writes offline: a log of protocol buffers in the format of LevelDB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from wandb.proto import wandb_internal_pb2

HEADER, BLOCK = 7, 32768
"""Bytes before the first record and before every part of one; bytes of a block, across which no part reaches."""


class Offline(NamedTuple):
    """One offline run: its identity, group, history by row, last summary, and its exit code where it was closed."""

    run_id: str
    group: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    exit_code: int | None


def read_offline(folder: Path) -> list[Offline]:
    """The offline runs below a run folder, also those whose writer was killed."""
    return [_run(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _run(path: Path) -> Offline:
    rows, summary, run, code = [], {}, None, None
    for message in _messages(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(message)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        elif kind == "history":
            rows.append(
                {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            )
        elif kind == "summary":
            summary |= _values(record.summary.update)
        elif kind == "exit":
            code = record.exit.exit_code
    assert run is not None
    return Offline(run.run_id, run.run_group, rows, summary, code)


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _messages(data: bytes) -> Iterator[bytes]:
    position, message = HEADER, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        message += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield message
            message = b""
