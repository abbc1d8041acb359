"""What differs between two runs, from their records: configuration, code, data, versions, costs, metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from routing_lab.evidence import formatting
from routing_lab.evidence.arms import differing_keys, differing_things, group_arms
from routing_lab.evidence.provenance import pairing_problems, short
from routing_lab.evidence.tables import Column, Shown, Table
from routing_lab.keys import LATER, VOLATILE, is_below
from routing_lab.runs.records import compared_config, flatten

MEASURED = ("metrics", "cost")
"""Sections of numbers, of which a change is shown beside the values."""


def runs_table(first: Mapping[str, Any], second: Mapping[str, Any]) -> Table:
    """Every entry in which two records differ, with both values; of what is measured the change too."""
    parts, other = _sections(first), _sections(second)
    rows = []
    for section in parts:
        a, b = flatten(parts[section]), flatten(other[section])
        for key in differing_keys(a, b):
            values = [_value(section, key, values) for values in (a, b)]
            rows.append((section, key, *values, _change(section, key, a.get(key), b.get(key))))
    columns = (
        Column("section", "differs in"),
        Column("key", "key"),
        Column("first", "first"),
        Column("second", "second"),
        Column("change", "change"),
    )
    caption = f"{first['name']} ({first['run_id']}) and {second['name']} ({second['run_id']})"
    notes = ["change: second - first of a metric, second / first of a cost"] if rows else ["nothing differs"]
    return Table("runs", caption, columns, tuple(rows), tuple(notes), once=1)


def uncontrolled(first: Mapping[str, Any], second: Mapping[str, Any], allowed: Collection[str]) -> list[str]:
    """What differs besides what may, one line each; empty: a controlled comparison.

    A key counts as allowed with all below it, an axis with the options that only one of its members has. Runs of one
    seed must have seen the same data and begun at the same weights, unless what is allowed explains that.
    """
    things = differing_things(compared_config(first), compared_config(second))
    besides = [thing for thing in things if not is_below(thing, allowed)]
    lines = [f"{thing} differs too" for thing in besides]
    if first["seed"] != second["seed"]:
        return [*lines, *(["seed differs too"] if "seed" not in allowed else [])]
    pairs = zip(group_arms([first]), group_arms([second]), strict=True)
    return lines + [problem for arms in pairs for problem in pairing_problems(*arms, things)]


def _sections(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """A record's entries as they are compared. What says how or why a run is executed stands apart."""
    config = flatten(LATER) | flatten(record["config"])
    told = {key: value for key, value in config.items() if is_below(key, VOLATILE)}
    return {
        "config": {key: value for key, value in config.items() if key not in told},
        "execution": told,
        **{section: record[section] for section in ("git", "environment", "data", "init")},
        "run": {"status": record["status"], "schema": record["schema"]},
        **{section: record[section] for section in ("routing", *MEASURED)},
    }


def _value(section: str, key: str, values: Mapping[str, Any]) -> Any:
    if key not in values:
        return None
    if section in MEASURED and isinstance(values[key], int | float):
        return Shown(values[key], formatting.metric(_metric(section, key)).kind)
    return short(formatting.value_text(values[key]))


def _change(section: str, key: str, first: Any, second: Any) -> Any:
    numbers = [value for value in (first, second) if isinstance(value, int | float) and not isinstance(value, bool)]
    if section not in MEASURED or len(numbers) < 2:
        return None
    if section == "cost":
        return Shown(second / first, "ratio") if first else None
    return Shown(second - first, formatting.metric(key).kind, is_signed=True)


def _metric(section: str, key: str) -> str:
    return f"cost/{key}" if section == "cost" else key
