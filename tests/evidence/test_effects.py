"""Effects are sums of the arms' results with the right weights, and intervals over seeds of these sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.evidence.synthetic import write_run
from tests.evidence.test_statistics import GOLDEN
from tests.evidence.test_study import ARMS, content

from routing_lab.evidence.study import parse_study
from routing_lab.evidence.verdict import evaluate
from routing_lab.runs.records import read_records

CELLS = {
    "linear_none": "linear_none",
    "linear_multiply": "linear_score",
    "amod_none": "attn_none",
    "amod_multiply": "attn_score",
}


def test_main_effects_and_interaction_of_crossed_factors(tmp_path: Path) -> None:
    case: dict[str, Any] = GOLDEN["factorial_2x2"]
    for arm, cell in CELLS.items():
        for seed, value in enumerate(case["y"][cell]):
            write_run(tmp_path, {**ARMS[arm], "study": "confound.toy", "arm": arm}, seed, value)
    seeds = list(range(len(case["y"]["linear_none"])))
    study = parse_study(content(seeds=seeds, decision__adjust="none", reference="linear_none"))
    effects = evaluate(study, read_records(tmp_path)).effects
    names = {
        "source (attn - linear)": "source: attention - linear",
        "scaling (score - none)": "scaling: multiply - none",
        "interaction (difference of differences)": "source x scaling",
        "simple effect of source at scaling none": "source at none",
        "confounded contrast (attn_none - linear_score)": "papers",
    }
    for golden, name in names.items():
        expected, effect = case["expected"][golden], effects[name]
        assert effect.estimate == pytest.approx(expected["mean"], rel=1e-9)
        assert [effect.low, effect.high] == pytest.approx(expected["ci"], rel=1e-9)


def test_a_factor_with_three_levels_compares_each_with_the_reference() -> None:
    arms = {f"{row}{column}": ["router=amod"] for row in "abc" for column in "xy"}
    levels = {row: [f"{row}x", f"{row}y"] for row in "abc"}
    study = parse_study(
        content(
            arms=arms,
            reference="ax",
            contrasts={"one": {"arms": ["ax", "bx"], "differ_in": "router"}},
            factors={
                "f": {"differ_in": "router", "levels": levels},
                "g": {"differ_in": "scaling", "levels": {c: [f"{r}{c}" for r in "abc"] for c in "xy"}},
            },
            hypothesis__predicted={"one": "positive"},
            decision={"rules": [{"verdict": "supports", "says": "s", "when": {"one": "positive"}}]},
        )
    )
    assert study.weights["f: c - a"] == {"cx": 0.5, "cy": 0.5, "ax": -0.5, "ay": -0.5}
    assert study.weights["g: y - x"]["by"] == pytest.approx(1 / 3)
    assert study.weights["f x g (c - a, y - x)"] == {"cy": 1.0, "ay": -1.0, "cx": -1.0, "ax": 1.0}
