"""What a record must be for its figures to count: types, ranges and depth, looked at once, when it is read.

A record may come from anywhere. What is wrong with it is said in one sentence, and nothing that reads records has to
guard against it again: a report names the run with that sentence and leaves it out of every figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from routing_lab.runs.metrics import OF_PREDICTIONS

if TYPE_CHECKING:
    import numpy as np

DEEPEST = 30
"""Levels of nesting; a record needs fewer than ten."""

TOLERANCE = 1e-5
"""How far a metric of a record may lie from what its predictions give: sums in single precision."""

MOST_BITS = 64
"""Of a whole number: seeds have at most as many."""


def first_problem(record: Mapping[str, Any]) -> str | None:
    """What is wrong with a record whose required keys are there and whose sections are mappings; None: nothing."""
    return next(_problems(record), None)


def arrays_problem(arrays: Mapping[str, np.ndarray]) -> str | None:
    """What is wrong with the arrays of a `predictions.npz`; None: nothing."""
    if "index" not in arrays:
        return "has no array 'index'"
    index = arrays["index"]
    for name, values in arrays.items():
        if values.dtype.kind not in "iufb":
            return f"{name} holds {values.dtype}, expected numbers"
        if values.ndim == 0 or len(values) != len(index):
            return f"{name} has the shape {values.shape}, expected a row for each of {index.size} examples"
    if index.ndim != 1 or index.dtype.kind not in "iu":
        return "index is expected to be whole numbers, one an example"
    if len(set(index.tolist())) != len(index):
        return "index names an example twice"
    for name in ("target", "prediction"):
        if name in arrays and arrays[name].dtype.kind not in "iu":
            return f"{name} holds {arrays[name].dtype}, expected whole numbers"
    return None


def recomputed(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics of the test split from the arrays of a `predictions.npz`; empty where these allow none."""
    if not {"prediction", "target"} <= arrays.keys() or arrays["prediction"].shape != arrays["target"].shape:
        return {}
    correct = arrays["prediction"] == arrays["target"]
    return {OF_PREDICTIONS: float(correct.mean())} if correct.size else {}


def disagreement(metrics: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str | None:
    """Which metric of a record is not that of its predictions; None: all agree."""
    for key, value in recomputed(arrays).items():
        stated = metrics.get(key)
        if stated is not None and _number(stated) and abs(stated - value) > TOLERANCE * max(1.0, abs(value)):
            return f"{key} is {stated:.6g} in run.json and {value:.6g} by predictions.npz"
    return None


def _problems(record: Mapping[str, Any]) -> Iterator[str]:
    yield from _nested(record, "", DEEPEST)
    for key in ("run_id", "name"):
        if not isinstance(record[key], str) or not record[key] or not record[key].isprintable():
            yield f"{key} is {_shown(record[key])}, expected text"
    for key in ("study", "arm"):
        if not isinstance(record.get(key), str | None):
            yield f"{key} is {_shown(record[key])}, expected text or null"
    if not all(isinstance(line, str) for line in record["warnings"]):
        yield "warnings hold something else than text"
    finished = record["status"] == "finished"
    seed = record["seed"]
    if not _whole(seed) and (finished or seed is not None):
        yield f"seed is {_shown(seed)}, expected a whole number at least 0"
    for key, value in record["metrics"].items():
        yield from _metric(key, value, finished)
    for key, value in record["cost"].items():
        if value is not None and not (_number(value) and value >= 0):
            yield f"cost.{key} is {_shown(value)}, expected a number at least 0"
    yield from _routing(record["routing"])
    for section in ("environment", "git"):
        for key, value in record[section].items():
            if not isinstance(value, str | int | float | None):
                yield f"{section}.{key} is {_shown(value)}, expected text or a number"


def _metric(key: str, value: Any, finished: bool) -> Iterator[str]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        yield f"metrics.{key} is {_shown(value)}, expected a number"
    elif finished and not math.isfinite(value):
        yield f"metrics.{key} is {_shown(value)}, expected a finite number in a finished run"
    elif key.rpartition("/")[2] in ("acc", "top5") and math.isfinite(value) and not 0 <= value <= 1:
        yield f"metrics.{key} is {_shown(value)}, expected a fraction between 0 and 1"


def _routing(routing: Mapping[str, Any]) -> Iterator[str]:
    layers = routing.get("routed_layers", [])
    if not isinstance(layers, list) or not all(_whole(layer) for layer in layers):
        yield f"routing.routed_layers is {_shown(layers)}, expected a list of layers"
    limits: tuple[tuple[str, Callable[[float], bool], str], ...] = (
        ("kept_fraction", lambda value: 0 <= value <= 1, "a fraction between 0 and 1"),
        ("update_ratio", lambda value: value >= 0, "a number at least 0"),
        ("tokens", lambda value: value >= 0, "a number at least 0"),
    )
    for name, allowed, what in limits:
        by_layer = routing.get(name, {})
        if not isinstance(by_layer, Mapping):
            yield f"routing.{name} is {_shown(by_layer)}, expected a number for each layer"
            continue
        for layer, value in by_layer.items():
            if not str(layer).isdecimal():
                yield f"routing.{name} has the key {_shown(layer)}, expected the number of a layer"
            if value is not None and not (_number(value) and allowed(value)):
                yield f"routing.{name}.{layer} is {_shown(value)}, expected {what}"


def _nested(value: Any, path: str, left: int) -> Iterator[str]:
    """Too deep, or with numbers that no float holds."""
    if left == 0:
        yield f"{path.split('.')[0]} is nested more than {DEEPEST} levels deep"
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(item, dict | list):
            yield from _nested(item, f"{path}.{key}".lstrip("."), left - 1)
        elif type(item) is int and item.bit_length() > MOST_BITS:
            yield f"{path}.{key}".lstrip(".") + f" is a whole number of {item.bit_length()} bits; at most {MOST_BITS}"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    kind = {"dict": "a mapping", "list": "a list"}.get(type(value).__name__)
    text = kind or ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
