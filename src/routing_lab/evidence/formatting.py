"""How numbers look: the one place that turns a value into text, for terminals, Markdown, LaTeX, HTML and figures alike.

A kind says what a number is. Accuracies are stored as fractions and shown in percent, their differences in percentage
points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from routing_lab.runs.metrics import Kind as Kind
from routing_lab.runs.metrics import Metric as Metric
from routing_lab.runs.metrics import metric as metric

MISSING = "-"
"""What a missing value looks like."""


def number(value: Any, kind: Kind = "number", *, signed: bool = False) -> str:
    """A value as text; `MISSING` where there is none."""
    if kind == "text":
        return MISSING if value is None or value == "" else str(value)
    if kind == "interval":
        raise ValueError("an interval needs the kind of its ends; use interval()")
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return MISSING
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = _digits(float(value), kind, signed)
    # A rounded zero has no sign.
    return text.lstrip("+-") if not any(digit in text for digit in "123456789") and kind != "p" else text


def interval(low: Any, high: Any, kind: Kind = "number", *, signed: bool = False) -> str:
    """`[low, high]`, or `MISSING` where an end is unknown."""
    ends = [number(end, kind, signed=signed) for end in (low, high)]
    return MISSING if MISSING in ends else f"[{ends[0]}, {ends[1]}]"


def level(confidence: float) -> str:
    """A level of confidence in percent, with two digits of what is missing to 100, so that none is shown as certain."""
    missing = 100 * (1 - confidence)
    digits = 2 if missing <= 0 else max(2, 1 - math.floor(math.log10(missing)))
    return f"{100 * confidence:.{digits}f}".rstrip("0").rstrip(".") + " %"


def duration(seconds: float) -> str:
    """A time in the unit that suits its length; `MISSING` where it is not known."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def bounds(shown: Metric) -> tuple[float, float]:
    """Between which values a stored value can lie."""
    return (0.0, 1.0) if shown.kind == "percent" else (-math.inf, math.inf)


def value_text(value: Any) -> str:
    """A configuration value in a label: as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(value_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{value_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def runs_of(values: list[int]) -> str:
    """Ascending whole numbers, runs of three or more shortened: `0-5, 8`."""
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts)


def _digits(value: float, kind: Kind, signed: bool) -> str:
    sign = "+" if signed else ""
    if kind == "count":
        return f"{value:{sign}.0f}"
    if kind == "percent":
        return f"{100 * value:{sign}.2f}"
    if kind == "fraction":
        return f"{value:{sign}.3f}"
    if kind == "macs":
        return _scaled(value, sign)
    if kind == "p":
        return "<0.0001" if value < 0.0001 else f"{value:.4f}"
    if kind == "ratio":
        return f"{value:{sign}.2f}"
    if kind == "seconds":
        return f"{value:{sign}.1f}"
    return f"{value:{sign}.4f}" if abs(value) < 100 else f"{value:{sign}.1f}"


def _scaled(value: float, sign: str) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:{sign}.3f} {unit}"
    return f"{value:{sign}.0f}"
