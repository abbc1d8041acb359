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
from routing_lab.evidence.sections import study_section
from routing_lab.evidence.study import parse_study
from routing_lab.evidence.verdict import StudyResult, effects_table, evaluate, verdict_text
from routing_lab.runs.records import read_records

ACCURACY = {"dense": 0.96, "linear_none": 0.9, "amod_none": 0.93}
Change = Callable[[dict[str, Any]], None]


def judged(
    root: Path, accuracy: dict[str, float], change: Change | None = None, spread: float = 0.001, **changes: Any
) -> StudyResult:
    """The verdict of a strict study on six seeds of every arm; `change` is made to each record of `amod_none`."""
    for number, (arm, keys) in enumerate(ARMS.items()):
        for seed in range(6):
            value = min(1.0, max(0.0, accuracy.get(arm, 0.9) + spread * math.sin(seed * (number + 2))))
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


@pytest.mark.parametrize("level", [1.0, 0.1, 0.0])
def test_results_at_the_ceiling_or_the_floor_are_insensitive_not_equivalent(tmp_path: Path, level: float) -> None:
    def sized(record: dict[str, Any]) -> None:
        record["data"] |= {"sizes": {"test": 1000}, "num_classes": 10}

    within = [
        {"verdict": "supports", "says": "equal", "when": {"source at none": "within 0.005"}},
        {"verdict": "contradicted", "says": "not", "when_any": {"source at none": "> 0.005 or < -0.005"}},
    ]
    decision = {"rules": within, "otherwise": {"verdict": "mixed", "says": "m"}}
    for spread in (0.0, 0.0004):
        result = judged(tmp_path / str(spread), dict.fromkeys(ARMS, level), sized, spread=-spread, decision=decision)
        assert result.verdict.name == "insensitive"
        assert result.effects["source at none"].state_text == "insensitive"


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


def test_other_commits_trees_and_machines_and_unequal_costs_are_shown_on_the_first_screen(tmp_path: Path) -> None:
    def other(record: dict[str, Any]) -> None:
        record["git"] |= {"commit": "other", "dirty": True}
        record["environment"]["cpu"] = "another"
        record["heartbeat"] = {"host": "elsewhere", "time": "2026-12-01"}
        record["cost"]["macs_measured"] *= 2
        record["routing"]["kept_fraction"] = {"1": 0.9}

    result = judged(tmp_path, ACCURACY, other)
    section = study_section(result)
    assert section.headline is not None
    shown = "\n".join(section.headline.notes)
    for what in ("commit", "uncommitted changes", "processor", "machine"):
        assert f"Cells differ in {what}" in shown
    assert "Source at none is no comparison at equal cost: cost 2.00 times, tokens kept 0.90 against 0.50" in shown
    rows = dict(zip(effects_table(result).column("effect"), effects_table(result).column("controlled"), strict=True))
    assert rows["source at none"] == "yes, at unequal cost"


def test_equal_cells_have_nothing_to_show(tmp_path: Path) -> None:
    result = judged(tmp_path, ACCURACY)
    assert result.provenance == ()
    assert result.effects["source at none"].unequal == ""


def test_a_metric_that_its_predictions_contradict_is_refused_by_name(tmp_path: Path) -> None:
    def edited(record: dict[str, Any]) -> None:
        zeros = np.zeros(10, int)
        path = Path(record["folder"]) / "predictions.npz"
        np.savez(path, index=np.arange(10), target=zeros, prediction=zeros + 1, loss=zeros + 1.0)

    refusal = judged(tmp_path, ACCURACY, edited).effects["source at none"].refusal
    assert "amod_none seed 0: test/acc is" in refusal


def test_no_verdict_before_the_planned_seeds_and_missing_ones_stand_in_its_line(tmp_path: Path) -> None:
    result = judged(tmp_path, ACCURACY, seeds=list(range(12)))
    assert not result.verdict.is_complete
    assert "no verdict before the planned seeds" in result.verdict.says
    (line,) = [line for line in verdict_text(result).splitlines() if line.startswith("Verdict: ")]
    assert "inconclusive (incomplete)" in line
    assert "amod_none: missing: seeds 6-11" in line


def test_seeds_that_have_run_and_that_the_file_no_longer_names_are_told(tmp_path: Path) -> None:
    result = judged(tmp_path, ACCURACY, seeds=[1, 3, 5])
    assert "seeds 0, 2, 4 have run as well and are none of the study's" in result.provenance


def test_a_rule_that_cannot_be_met_is_named_beside_the_verdict(tmp_path: Path) -> None:
    result = judged(tmp_path, ACCURACY, scales__toy__spread=0.2)
    plan = register(None, result.study, "toy", [], versions={}, now=datetime(2026, 12, 1, tzinfo=UTC))
    assert "can hardly be met" in verdict_text(replace(result, plan=plan))


def test_a_stated_look_decides_and_later_cells_change_nothing(tmp_path: Path) -> None:
    result = judged(tmp_path, ACCURACY, seeds={"first": 4, "step": 2, "most": 12})
    assert (result.verdict.name, len(result.look.seeds)) == ("supports", 4)


def test_a_control_that_an_early_look_cannot_show_is_given_its_further_seeds(tmp_path: Path) -> None:
    controls = {"positive": {"papers": 0.01}}
    looks = {"first": 3, "step": 3, "most": 6}
    early = judged(tmp_path / "early", ACCURACY, spread=0.004, controls=controls, seeds=[0, 1, 2])
    assert early.verdict.name == "supports"
    later = judged(tmp_path / "later", ACCURACY, spread=0.004, controls=controls, seeds=looks)
    assert (later.verdict.name, len(later.look.seeds)) == ("supports", 6)
    blind = judged(tmp_path / "blind", ACCURACY, spread=0.004, controls={"positive": {"papers": 0.2}}, seeds=looks)
    assert (blind.verdict.name, len(blind.look.seeds)) == ("insensitive", 6)
