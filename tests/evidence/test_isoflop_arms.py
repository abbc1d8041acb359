"""Baselines of equal cost among arms: named by what was asked, not by the size that was found."""

from __future__ import annotations

from typing import Any

from routing_lab.config import load
from routing_lab.evidence.arms import arm_labels
from routing_lab.runs.records import comparable


def config(*overrides: str) -> dict[str, Any]:
    return comparable(load(overrides).resolved)


def test_labels_say_what_was_asked() -> None:
    amod = config()
    baselines = [config("isoflop.by=width", f"capacity.fraction={fraction}") for fraction in (0.5, 0.25)]
    assert arm_labels([amod, *baselines]) == [
        "router=amod capacity.fraction=0.5 isoflop.by=none",
        "router=dense capacity.fraction=0.5 isoflop.by=width",
        "router=dense capacity.fraction=0.25 isoflop.by=width",
    ]


def test_labels_fall_back_on_the_cost_where_only_that_differs() -> None:
    given = [config("router=dense", "isoflop.by=width", f"isoflop.target_macs={macs}") for macs in (2e6, 3e6)]
    labels = arm_labels(given)
    assert len(set(labels)) == 2
    assert all("isoflop.target_macs=" in label for label in labels)
