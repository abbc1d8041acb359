"""Records from Weights & Biases, for reports and notebooks on machines that do not have the run folders.

Every mirrored run carries its record whole, as JSON in its summary (`RECORD_KEY`), and its history row by row; both
come back here. Predictions are not mirrored: what is computed from them (the bootstrap over examples) is left out of a
report that was made from Weights & Biases.

Importing this module does not import wandb; no function here asks for a login.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from routing_lab.runs.records import RecordError, in_order, parse_record, read_records, unreadable_record

PREFIX = "wandb:"
"""What a source that is not a folder begins with: `wandb:<entity>/<project>`."""

RECORD_KEY = "record"
"""Summary key under which a mirrored run holds its record as JSON."""

NO_API_KEY = "no API key for Weights & Biases; `wandb login` or the environment variable WANDB_API_KEY gives one"

WITHOUT_PREDICTIONS = "read from Weights & Biases, which holds no predictions: no bootstrap over examples"


def is_wandb(source: Path | str) -> bool:
    """Whether `source` names a project of Weights & Biases rather than a folder."""
    return os.fspath(source).startswith(PREFIX)


def read_source(source: Path | str) -> list[dict[str, Any]]:
    """The records of a folder of runs, or of `wandb:<entity>/<project>`; see `read_records`, `records_from_wandb`.

    Raises:
        RecordError: neither of them, or a source that cannot be read.
    """
    if not is_wandb(source):
        return read_records(source)
    text = os.fspath(source)
    entity, _, project = text.removeprefix(PREFIX).strip("/").partition("/")
    if not entity or not project or "/" in project:
        raise RecordError(f"{text}: {PREFIX}<entity>/<project> is expected")
    return records_from_wandb(entity, project)


def records_from_wandb(
    entity: str, project: str, filters: Mapping[str, Any] | None = None, api: Any = None
) -> list[dict[str, Any]]:
    """Records of the mirrored runs of a project, in the order of `read_records`.

    Each is the record as it is on disk, with `wandb:<entity>/<project>/<run>` as its `folder` and the columns of its
    history under `history`. Of two runs with one `run_id`, as after `rerun=true` or two uploads, the one that was
    created last counts. A run without a record in its summary is `unreadable`.

    Args:
        entity: user or team.
        project: project.
        filters: further conditions on the runs, in the form of `wandb.Api().runs`: `{"config.study": "confound.toy"}`.
        api: what stands in for `wandb.Api()`.

    Raises:
        RecordError: there is no API key, or the project cannot be read.
    """
    where = f"{entity}/{project}"
    records: dict[str, dict[str, Any]] = {}
    try:
        client = _client() if api is None else api
        for run in client.runs(where, filters={"jobType": "train", **(filters or {})}, order="+created_at"):
            record = _record(run, f"{PREFIX}{where}/{run.id}")
            records[record["run_id"]] = record
    except RecordError:
        raise
    except Exception as error:  # whatever the client raises for a wrong name, missing rights or no network
        raise RecordError(f"{PREFIX}{where}: {type(error).__name__}: {error}") from error
    return in_order(records.values())


def has_api_key() -> bool:
    """Whether Weights & Biases finds an API key; asks nobody and reaches no network."""
    import wandb

    return bool(wandb.login(prompt=False, verify=False))


def _client() -> Any:
    if not has_api_key():
        raise RecordError(NO_API_KEY)
    import wandb

    return wandb.Api()


def _record(run: Any, place: str) -> dict[str, Any]:
    text = run.summary.get(RECORD_KEY)
    if not isinstance(text, str):
        return unreadable_record(place, f"its summary holds no {RECORD_KEY!r}; it is no mirror of a record")
    try:
        record = parse_record(text, place, place)
    except RecordError as error:
        return unreadable_record(place, str(error))
    return {**record, "history": _columns(run.scan_history())}


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Rows as columns of floats, NaN where a row says nothing; without the keys that Weights & Biases adds."""
    kept = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    names = dict.fromkeys(name for row in kept for name in row)
    return {name: [_number(row.get(name)) for row in kept] for name in names}


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
