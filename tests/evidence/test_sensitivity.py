"""A study that could not have seen its effects, or whose cells are no pairs, says so instead of deciding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.evidence.synthetic import write_run
from tests.evidence.test_rules import MARGIN, WHOLE
from tests.evidence.test_study import ARMS, content

from routing_lab.evidence.registration import register
from routing_lab.evidence.study import parse_study
from routing_lab.evidence.verdict import StudyResult, evaluate, verdict_text
from routing_lab.runs.records import read_records

ACCURACY = {"dense": 0.96, "linear_none": 0.9, "amod_none": 0.93}
Change = Callable[[dict[str, Any]], None]


def judged(
    root: Path, accuracy: dict[str, float], change: Change | None = None, spread: float = 0.001, **changes: Any
) -> StudyResult:
    """The verdict of a strict study on six seeds of every arm; `change` is made to each record of `amod_none`."""
    for number, (arm, keys) in enumerate(ARMS.items()):
        for seed in range(6):
            value = min(1.0, accuracy.get(arm, 0.9) + spread * math.sin(seed * (number + 2)))
            write_run(root, {**keys, "study": "confound.toy", "arm": arm}, seed, value)
    records = read_records(root)
    for record in records:
        if change is not None and record["arm"] == "amod_none":
            change(record)
    settings = {"margin": MARGIN, "decision": {"rules": WHOLE}} | changes
    return evaluate(parse_study(content(**settings)), records, scale="toy")


def test_a_gain_beyond_the_margin_supports_and_a_tiny_one_is_equivalent(tmp_path: Path) -> None:
    assert judged(tmp_path / "large", ACCURACY).verdict.name == "supports"
    tiny = judged(tmp_path / "tiny", ACCURACY | {"amod_none": 0.904})
    effect = tiny.effects["source at none"]
    assert effect.low > 0
    assert (effect.state_text, tiny.verdict.name) == ("equivalent", "contradicted")


def test_results_at_the_ceiling_are_insensitive(tmp_path: Path) -> None:
    result = judged(tmp_path, dict.fromkeys(ARMS, 1.0), spread=0.0)
    assert result.verdict.name == "insensitive"


def test_controls_make_a_verdict_insensitive_or_invalid(tmp_path: Path) -> None:
    controls = {"positive": {"papers": 0.2}}
    assert judged(tmp_path / "blind", ACCURACY, controls=controls).verdict.name == "insensitive"
    controls = {"negative": ["papers"]}
    assert judged(tmp_path / "broken", ACCURACY, controls=controls).verdict.name == "invalid"


@pytest.mark.parametrize("entry", ["torch", "timm", "routing_lab", "device"])
def test_other_software_or_devices_break_the_pairing(tmp_path: Path, entry: str) -> None:
    def other(record: dict[str, Any]) -> None:
        record["environment"][entry] = "other"

    result = judged(tmp_path, ACCURACY, other)
    assert "not paired" in result.effects["source at none"].refusal
    assert result.verdict.name == "inconclusive"


def test_other_commits_and_unequal_costs_are_shown(tmp_path: Path) -> None:
    def other(record: dict[str, Any]) -> None:
        record["git"]["commit"] = "other"
        record["cost"]["macs_measured"] *= 2

    result = judged(tmp_path, ACCURACY, other)
    assert any("cells differ in commit" in line for line in result.provenance)
    assert "cost 2.00 times" in result.effects["source at none"].note


def test_a_metric_that_its_predictions_contradict_is_refused_by_name(tmp_path: Path) -> None:
    def edited(record: dict[str, Any]) -> None:
        zeros = np.zeros(10, int)
        path = Path(record["folder"]) / "predictions.npz"
        np.savez(path, index=np.arange(10), target=zeros, prediction=zeros + 1, loss=zeros + 1.0)

    refusal = judged(tmp_path, ACCURACY, edited).effects["source at none"].refusal
    assert "amod_none seed 0: test/acc is" in refusal


def test_no_verdict_before_the_planned_seeds(tmp_path: Path) -> None:
    result = judged(tmp_path, ACCURACY, seeds=list(range(12)))
    assert not result.verdict.is_complete
    assert "no verdict before the planned seeds" in result.verdict.says


def test_a_rule_that_cannot_be_met_is_named_beside_the_verdict(tmp_path: Path) -> None:
    result = judged(tmp_path, ACCURACY, scales__toy__spread=0.2)
    plan = register(None, result.study, "toy", [], versions={}, now=datetime(2026, 12, 1, tzinfo=UTC))
    assert "can hardly be met" in verdict_text(replace(result, plan=plan))


def test_a_stated_look_decides_and_later_cells_change_nothing(tmp_path: Path) -> None:
    result = judged(tmp_path, ACCURACY, seeds={"first": 4, "step": 2, "most": 12})
    assert (result.verdict.name, len(result.look.seeds)) == ("supports", 4)
