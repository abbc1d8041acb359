"""Where the cells of a comparison come from: what breaks their pairing is refused, the rest is shown.

Two arms are paired by seed because everything but the arm is the same. Runs that saw other data, began at other
weights, or were made with other software or on another kind of device differ in more than the arm; such pairs are
refused. Other commits, changed working trees and machines are named. Metrics are computed again from the predictions
that a run kept, and a record that says otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from routing_lab.evidence.arms import Arm
from routing_lab.evidence.formatting import runs_of
from routing_lab.runs.records import RecordError, read_predictions
from routing_lab.runs.validation import disagreement

BREAKS = (
    ("data", "fingerprint", frozenset({"data"}), "data"),
    ("init", "hash", frozenset({"data", "init", "backbone", "isoflop"}), "initial weights"),
    ("environment", "torch", frozenset[str](), "torch versions"),
    ("environment", "timm", frozenset[str](), "timm versions"),
    ("environment", "routing_lab", frozenset[str](), "routing_lab versions"),
    ("environment", "device", frozenset[str](), "devices"),
)
"""(section, entry, axes whose difference explains it, name) of what must be equal under one seed."""

SHOWN = (
    ("git", "commit", "commit"),
    ("git", "dirty", "uncommitted changes"),
    ("environment", "lightning", "lightning"),
    ("environment", "python", "python"),
    ("environment", "cpu", "processor"),
    ("environment", "threads", "threads"),
    ("heartbeat", "host", "machine"),
)
"""(section, entry, name) of what is shown where the cells of a study differ in it."""

UNEQUAL_COST = 0.01
"""Relative difference of cost, and difference of kept fractions, from which a comparison is said to be of unequal
ones.
"""


def pairing_problems(first: Arm, second: Arm, differ_in: Sequence[str]) -> list[str]:
    """Why runs of equal seeds are no pair; empty when they are. Entries that neither record has are equal."""
    axes = {key.split(".", 1)[0] for key in differ_in}
    problems = []
    for section, entry, excused, what in BREAKS:
        if axes & excused:
            continue
        seeds = [
            seed
            for seed, record in first.finished.items()
            if seed in second.finished and record[section].get(entry) != second.finished[seed][section].get(entry)
        ]
        if seeds:
            problems.append(
                f"not paired: {first.label} and {second.label} have other {what} under one seed ({runs_of(seeds)})"
            )
    return problems


def contradictions(arm: Arm) -> list[str]:
    """Finished runs whose metrics are not those of the predictions that they kept."""
    problems = []
    for seed, record in arm.finished.items():
        try:
            found = disagreement(record["metrics"], read_predictions(record))
        except RecordError:  # it kept none
            continue
        if found is not None:
            problems.append(f"{arm.label} seed {seed}: {found}")
    return problems


def differences(arms: Iterable[Arm]) -> list[str]:
    """In what the finished cells of a study differ that does not break their pairing, one line each."""
    records = [record for arm in arms for record in arm.finished.values()]
    lines = []
    for section, entry, name in (*SHOWN, *((s, e, n) for s, e, _, n in BREAKS if s == "environment")):
        counts: dict[str, int] = {}
        for record in records:
            value = str(record.get(section, {}).get(entry))
            counts[value] = counts.get(value, 0) + 1
        if len(counts) > 1:
            shown = ", ".join(f"{short(value)} ({count})" for value, count in sorted(counts.items()))
            lines.append(f"cells differ in {name}: {shown}")
    dirty = sum(record["git"].get("dirty") is True for record in records)
    if records and dirty == len(records):
        lines.append("every cell ran from a working tree with uncommitted changes")
    return lines


def unequal_costs(first: Arm, second: Arm) -> str:
    """Costs and kept fractions of two arms in words where they differ, else empty."""
    parts = []
    for key in ("cost/macs_measured", "cost/macs_nominal"):
        a, b = first.mean(key), second.mean(key)
        if a == a and b == b:
            if abs(a - b) > UNEQUAL_COST * max(a, b):
                parts.append(f"cost {a / b:.2f} times" if b else "cost of nothing")
            break
    a, b = first.mean_kept_fraction, second.mean_kept_fraction
    if a == a and b == b and abs(a - b) > UNEQUAL_COST:
        parts.append(f"tokens kept {a:.2f} against {b:.2f}")
    return ", ".join(parts)


def short(value: str) -> str:
    """A text, or of a hash the first ten characters."""
    is_hash = len(value) >= 40 and " " not in value
    return value[:10] if is_hash else value
