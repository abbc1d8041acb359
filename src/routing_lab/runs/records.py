"""What a run leaves behind, and how it is read.

A run folder holds `config.yaml`, `run.json` (the record), `history.csv`, `predictions.npz` and `checkpoints/`. The
record is one JSON object with the sections of `SECTIONS`; accuracies are fractions in [0, 1], costs are
multiply-accumulates of one example, times are seconds.

Importing this module costs a few milliseconds: pandas and numpy are loaded by the functions that need them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routing_lab.axes import AXES
from routing_lab.keys import LATER, VOLATILE
from routing_lab.runs import validation
from routing_lab.runs.files import natural

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

SCHEMA = 1
"""Version of the record; a record of a newer version is not read."""

RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"

STATUSES = (RUNNING, FINISHED, FAILED, INTERRUPTED)
"""What a writer puts into `status`. Reading adds `unreadable`, with the cause under `reason`."""

CHOICES = ("backbone", *AXES, "data", "init")
"""The choices that define an arm; `axes` holds for each of them the member's name and its options."""

SECTIONS = ("axes", "config", "metrics", "cost", "routing", "environment", "git", "data", "init")
"""Sections of a record that are mappings; a missing one reads as empty."""

NOT_COMPARED = ("seed", *VOLATILE)
"""Config keys that never make two runs different arms: the seed, and whatever is no part of a run's identity."""

RECORD_FILE = "run.json"

_REQUIRED = ("schema", "run_id", "name", "status", "seed")


class RecordError(ValueError):
    """A record that is missing, half-written, damaged or of another schema."""


def new_record(config: Mapping[str, Any], *, run_id: str, name: str, command: str) -> dict[str, Any]:
    """The record of a run that starts now, with every section present.

    Args:
        config: the resolved configuration, a plain mapping with one node per axis; it is stored whole, and the axes'
            names and options are repeated under `axes`.
        run_id: identity of the run, the hash of its resolved configuration.
        name: readable name of the run.
        command: the command that a person types to get this run again.
    """
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "run_id": run_id,
        "name": name,
        "status": RUNNING,
        "command": command,
        "seed": config["seed"],
        "study": config.get("study"),
        "arm": config.get("arm"),
        **{section: {} for section in SECTIONS},
        "warnings": [],
    }
    record["config"] = dict(config)
    record["axes"] = {axis: _visible(config[axis]) for axis in CHOICES if isinstance(config.get(axis), Mapping)}
    return record


def read_record(folder: Path | str) -> dict[str, Any]:
    """The record in a run folder, with the folder itself under `folder` and every section of `SECTIONS` present.

    Raises:
        RecordError: no record, or one that cannot be read; the message names the file and the cause.
    """
    path = os.path.join(folder, RECORD_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise RecordError(f"{path}: no record") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from error
    return parse_record(text, path, folder)


def read_run(folder: Path | str) -> dict[str, Any]:
    """`read_record`, after a look at the files beside it where the run has finished: a record counts only where its
    history and predictions can be read, and where the predictions give the metrics that it states.

    Raises:
        RecordError: as `read_record`; or for one of these files, or a metric that they contradict.
    """
    record = read_record(folder)
    if is_finished(record):
        read_history(record)
        if os.path.lexists(os.path.join(folder, "predictions.npz")):
            contradiction = validation.disagreement(record["metrics"], read_predictions(record))
            if contradiction is not None:
                raise RecordError(f"{os.path.join(folder, RECORD_FILE)}: {contradiction}")
    return record


def read_records(root: Path | str) -> list[dict[str, Any]]:
    """All records at or below `root`, ordered by name, then by run_id.

    A run folder that cannot be read gives a record with the status `unreadable`, the cause under `reason` and empty
    sections, so that a table can say that it is missing. A folder with a `config.yaml` and no record is such a folder
    too.

    Raises:
        RecordError: `root` is not a folder.
    """
    if not os.path.isdir(root):
        raise RecordError(f"{root}: not a folder; give the folder that holds the runs (paths.runs)")
    records = []
    for folder in _run_folders(os.fspath(root)):
        try:
            records.append(read_run(folder))
        except RecordError as error:
            # Where the folder stands is no part of what is wrong with it.
            records.append(unreadable_record(folder, str(error).replace(folder + os.sep, "")))
    return in_order(records)


def parse_record(text: str, path: str, folder: Path | str) -> dict[str, Any]:
    """A record from its JSON, with `folder` in it and every section of `SECTIONS` present.

    Args:
        text: what `run.json` holds.
        path: where the text comes from, for messages.
        folder: what the record says of where it stands.

    Raises:
        RecordError: text that is not a record that this version reads.
    """
    try:
        record = json.loads(text)
    except RecursionError:
        raise RecordError(f"{path}: nested too deeply for a record") from None
    except ValueError as error:
        raise RecordError(f"{path}: not JSON ({error}); the file is half-written or damaged") from error
    if not isinstance(record, dict):
        raise RecordError(f"{path}: holds a {type(record).__name__}, not a record")
    missing = [key for key in _REQUIRED if key not in record]
    if missing:
        raise RecordError(f"{path}: lacks {', '.join(missing)}")
    if not isinstance(record["schema"], int) or not 1 <= record["schema"] <= SCHEMA:
        raise RecordError(f"{path}: schema {record['schema']!r}; this version reads 1 to {SCHEMA}")
    if record["status"] not in STATUSES:
        raise RecordError(f"{path}: status {record['status']!r}; one of {', '.join(STATUSES)} is expected")
    for section in SECTIONS:
        if not isinstance(record.setdefault(section, {}), dict):
            raise RecordError(f"{path}: {section} is a {type(record[section]).__name__}, not a mapping")
    if not isinstance(record.setdefault("warnings", []), list):
        raise RecordError(f"{path}: warnings is a {type(record['warnings']).__name__}, not a list")
    record.setdefault("study", None)
    record.setdefault("arm", None)
    problem = validation.first_problem(record)
    if problem is not None:
        raise RecordError(f"{path}: {problem}")
    record["folder"] = os.fspath(folder)
    return record


def unreadable_record(folder: str, reason: str) -> dict[str, Any]:
    """What stands for a run that cannot be read: the status `unreadable`, the cause, and empty sections."""
    name = os.path.basename(os.path.normpath(folder))
    return {
        "schema": SCHEMA,
        "run_id": name,
        "name": name,
        "status": "unreadable",
        "reason": reason,
        "command": "",
        "seed": None,
        "study": None,
        "arm": None,
        **{section: {} for section in SECTIONS},
        "warnings": [],
        "folder": folder,
    }


def in_order(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records by name, numbers in it by value, then by run_id and folder."""
    return sorted(records, key=lambda record: (natural(record["name"]), record["run_id"], record["folder"]))


def is_finished(record: Mapping[str, Any]) -> bool:
    """Whether the run went to its end, so that its metrics count."""
    return bool(record["status"] == FINISHED)


def read_history(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Columns of the run's `history.csv` as lists of floats, NaN where a cell is empty; empty without a history.

    A record that stands in no folder carries these columns itself, under `history`.

    Raises:
        RecordError: a file that cannot be read.
    """
    import csv

    if "history" in record:
        return dict(record["history"])
    path = os.path.join(record["folder"], "history.csv")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, csv.Error) as error:
        raise RecordError(f"{path}: {error}") from error
    return {name: [_number(row[i]) if i < len(row) else math.nan for row in rows] for i, name in enumerate(header)}


def read_predictions(record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The run's `predictions.npz`: `index`, `target`, `prediction`, `loss` [N] (and `logits` [N, classes]), by
    ascending index.

    Raises:
        RecordError: no such file, or one that cannot be read.
    """
    import numpy as np

    path = os.path.join(record["folder"], "predictions.npz")
    try:
        # Opened here: of a damaged archive numpy leaves the file open.
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # whatever a damaged archive makes the libraries raise
        raise RecordError(f"{path}: {error!r}") from error
    problem = validation.arrays_problem(arrays)
    if problem is not None:
        raise RecordError(f"{path}: {problem}")
    order = np.argsort(arrays["index"], kind="stable")
    return {name: array[order] for name, array in arrays.items()}


def flatten(tree: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """One level of keys: `{"router": {"name": "amod"}}` becomes `{"router.name": "amod"}`. Lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, separator, f"{prefix}{key}{separator}"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flat keys of a configuration that make an arm: everything but `NOT_COMPARED` and class paths."""
    return {key: value for key, value in flatten(_kept(config)).items() if not key.endswith("_target_")}


def compared_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """`comparable` of the configuration that a record holds, or of its `axes` where it holds none."""
    return comparable(record["config"] or record["axes"])


def arm_key(record: Mapping[str, Any]) -> str:
    """Text that two records share exactly when what makes their arms is equal; cheaper than `compared_config`."""
    return json.dumps(_kept(record["config"] or record["axes"]), sort_keys=True, default=str)


def tidy_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One flat row per run.

    Keys: `run_id, name, status, study, arm, seed` as they are, then `scale`; configuration keys with dots
    (`router.name`, `capacity.fraction`); everything measured with slashes: metrics under their own names
    (`test/acc`), other sections with the section in front (`cost/macs_measured`, `routing/kept_fraction/3`,
    `git/commit`). Lists are JSON text, so that every value can be grouped and written to CSV.
    """
    configs: dict[str, dict[str, Any]] = {}
    rows = []
    for record in records:
        key = arm_key(record)
        if key not in configs:
            configs[key] = {name: _cell(value) for name, value in compared_config(record).items()}
        row = {name: record.get(name) for name in ("run_id", "name", "status", "study", "arm", "seed")}
        row["scale"] = scale_label(record)
        row |= configs[key]
        measured = dict(record["metrics"])
        for section in ("cost", "routing", "environment", "git", "data", "init"):
            measured |= flatten(record[section], "/", f"{section}/")
        row |= {name: _cell(value) for name, value in measured.items()}
        row |= {"num_warnings": len(record["warnings"]), "folder": record.get("folder")}
        rows.append(row)
    return rows


def to_frame(records: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """`tidy_rows` as a frame: one row per run, a column for every key that some run has."""
    import pandas as pd

    return pd.DataFrame(tidy_rows(records))


def scale_label(record: Mapping[str, Any]) -> str:
    """`paper`, `real`, `small` or `toy`: what the run's backbone, data and recipe can stand for.

    `toy`: the embedded or synthetic data, or a backbone of a few thousand parameters. `real`: published weights, routed
    without any training. `paper`: a published backbone on a data set of the papers, under a recipe other than `quick`.
    `small`: everything between. Runs that are not `paper` reproduce no published number.
    """
    backbone, data = _member(record, "backbone"), _member(record, "data")
    if data in _TOY_DATA or backbone in _TOY_BACKBONES:
        return "toy"
    if _has_published_weights(record) and _trained_epochs(record) == 0:
        return "real"
    if data in _PAPER_DATA and backbone in _PAPER_BACKBONES and _recipe(record) != "quick":
        return "paper"
    return "small"


def member_name(record: Mapping[str, Any], axis: str) -> str | None:
    """Name of the member that the run used on an axis (`amod` on `router`), or None where the record does not say."""
    return _member(record, axis)


_TOY_DATA = frozenset({"digits", "planted"})
_TOY_BACKBONES = frozenset({"vit_micro", "llama_micro"})
_PAPER_DATA = frozenset({"imagenet", "imagenet100", "cifar10", "cifar100", "cars", "pets", "flowers"})
_PAPER_BACKBONES = frozenset({"deit_tiny", "deit_small", "vit_base", "vit_large", "dinov2_small"})


def _run_folders(root: str, seen: set[tuple[int, int]] | None = None) -> Iterator[str]:
    """Run folders at or below `root`, each real folder once, so that links may lead in circles."""
    seen = set() if seen is None else seen
    place = os.stat(root)
    if (place.st_dev, place.st_ino) in seen:
        return
    seen.add((place.st_dev, place.st_ino))
    if os.path.exists(os.path.join(root, RECORD_FILE)):
        yield root
        return
    with os.scandir(root) as entries:
        listed = [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    if any(name == "config.yaml" for name, is_folder in listed if not is_folder):
        yield root
        return
    for name, is_folder in listed:
        if is_folder:
            yield from _run_folders(os.path.join(root, name), seen)


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without `NOT_COMPARED`, and without what came later where it changes nothing; nodes that lose a
    key are copied.
    """
    config = _as_matched(config)
    kept = {key: value for key, value in config.items() if key not in NOT_COMPARED and LATER.get(key) != value}
    for key in NOT_COMPARED:
        node, _, entry = key.partition(".")
        if entry and isinstance(kept.get(node), Mapping):
            kept[node] = {name: value for name, value in kept[node].items() if name != entry}
    for key, neutral in LATER.items():
        node, _, entry = key.partition(".")
        if entry and isinstance(kept.get(node), Mapping) and kept[node].get(entry) == neutral:
            kept[node] = {name: value for name, value in kept[node].items() if name != entry}
    return kept


def _as_matched(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration whose cost was matched, with the cost in the place of the number that gave it.

    Arms of one cost differ in what costs it, not in how many tokens pay for it. Sizes of the backbone stay as they are.
    """
    match = config.get("match") or {}
    section, _, key = (match.get("key") or "").partition(".")
    if not section:
        return config
    kept = {name: node for name, node in config.items() if name != "match"}
    if section == "backbone":
        return kept
    return {**kept, section: {**config[section], key: f"{match['share']:g} of {match['macs']:.0f} MACs"}}


def _visible(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if not str(key).startswith("_")}


def _member(record: Mapping[str, Any], axis: str) -> str | None:
    node = record["axes"].get(axis) or record["config"].get(axis)
    name = node.get("name", node.get("kind")) if isinstance(node, Mapping) else node
    return None if name is None else str(name)


def _recipe(record: Mapping[str, Any]) -> str | None:
    node = record["config"].get("train")
    return node.get("name") if isinstance(node, Mapping) else None


def _has_published_weights(record: Mapping[str, Any]) -> bool:
    init = record["config"].get("init") or {}
    return init.get("kind") == "pretrained" or bool(init.get("path"))


def _trained_epochs(record: Mapping[str, Any]) -> int | None:
    """Epochs of training on the run's data, those of the dense run that it starts from included; None: not known."""
    trained = (record["config"].get("train") or {}).get("epochs")
    before = (record["config"].get("init") or {}).get("epochs")
    return None if trained is None else trained + (before or 0)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
