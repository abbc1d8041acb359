"""Effects are sums of the arms' results with the right weights, and intervals over seeds of these sums."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.evidence.synthetic import write_run
from tests.evidence.test_statistics import GOLDEN
from tests.evidence.test_study import ARMS, content

from routing_lab.evidence import statistics
from routing_lab.evidence.study import StudyError, parse_study
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
            write_run(tmp_path, {**ARMS[arm], "study": "confound.toy", "arm": arm}, seed, value / 100)
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
        assert 100 * effect.estimate == pytest.approx(expected["mean"], rel=1e-9)
        assert [100 * effect.low, 100 * effect.high] == pytest.approx(expected["ci"], rel=1e-9)


def test_pairing_is_worth_what_it_saves(tmp_path: Path) -> None:
    """A spread that both arms share falls out of their difference: so many more unpaired seeds would be needed."""
    rng = np.random.default_rng(0)
    for seed in range(6):
        shared = rng.normal(0, 0.03)
        for arm, changes in ARMS.items():
            value = 0.8 + shared + rng.normal(0, 0.01)
            write_run(tmp_path, {**changes, "study": "confound.toy", "arm": arm}, seed, value)
    result = evaluate(parse_study(content()), read_records(tmp_path))
    effect = result.effects["source at none"]
    values = [list(result.arms[arm].values("test/acc").values()) for arm in ("amod_none", "linear_none")]
    unpaired = np.var(values[0], ddof=1) + np.var(values[1], ddof=1)
    assert effect.effective_seeds == pytest.approx(6 * unpaired / effect.sd**2)
    assert effect.effective_seeds > 12


@pytest.mark.parametrize(("n", "correlation"), [(6, 0.0), (6, 0.9), (20, 0.6)])
def test_a_control_variate_keeps_what_its_interval_promises_and_narrows_it_where_it_explains(
    n: int, correlation: float
) -> None:
    rng = np.random.default_rng(n)
    missed, widths, plain = 0, [], []
    for _ in range(1500):
        control = rng.standard_normal(60)
        values = correlation * control[:n] + math.sqrt(1 - correlation**2) * rng.standard_normal(n)
        found = statistics.control_variate(values, control[:n], control)
        missed += not found.low <= 0 <= found.high
        widths.append(found.high - found.low)
        plain.append(np.subtract(*statistics.one_sample_t(values).interval[::-1]))
    # Nominal or conservative, within two standard errors of 1500 draws.
    assert missed / 1500 <= 0.05 + 0.0113
    if correlation:
        assert np.mean(widths) < np.mean(plain)
    four = rng.standard_normal(4)
    assert statistics.control_variate(four, four, control) == statistics.one_sample_t(four)


def test_a_registered_control_variate_is_taken_out_of_every_effect(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    settings: dict[str, Any] = {"control_variate": {"arm": "dense", "seeds": 30}}
    study = parse_study(content(**settings))
    assert len(study.planned_cells("toy")) == 6 * 5 + 24
    for seed in range(30):
        common = rng.normal(0, 0.02)
        for arm, changes in ARMS.items():
            # What makes a seed good for the dense arm widens the gap between the two routers.
            value = 0.7 + common * {"dense": 1, "amod_none": 1.5, "linear_none": 0.5}.get(arm, 1) + rng.normal(0, 0.002)
            if arm == "dense" or seed < 6:
                write_run(tmp_path, {**changes, "study": "confound.toy", "arm": arm}, seed, value)
    records = read_records(tmp_path)
    with_it, without = (evaluate(s, records, scale="toy") for s in (study, parse_study(content())))
    assert with_it.verdict.is_complete
    assert with_it.provenance == ()
    first, second = (result.effects["source at none"] for result in (with_it, without))
    assert first.high - first.low < 0.6 * (second.high - second.low)
    assert first.effective_seeds > 2 * second.effective_seeds
    told = [record for record in records if not (record["arm"] == "dense" and record["seed"] == 29)]
    assert evaluate(study, told, scale="toy").missing == ("dense: missing: seed 29",)
    assert not evaluate(study, told, scale="toy").verdict.is_complete
    with pytest.raises(StudyError, match=r"control_variate.seeds=6: more than the 6 seeds"):
        parse_study(content(control_variate={"arm": "dense", "seeds": 6}))


def untrained(root: Path, accuracy: dict[str, float], examples: int, order: int = 0) -> None:
    """Runs whose predictions depend on no seed, as of a model that nothing trains."""
    rng = np.random.default_rng(order)
    target = rng.integers(0, 10, examples)
    ease = rng.random(examples)
    for number, (arm, changes) in enumerate(ARMS.items()):
        own = ease + np.random.default_rng([order, number]).normal(0, 0.1, examples)
        right = own < np.quantile(own, accuracy.get(arm, 0.8))
        for seed in range(6):
            record = write_run(root, {**changes, "study": "confound.toy", "arm": arm}, seed, float(right.mean()))
            prediction = np.where(right, target, (target + 1) % 10)
            arrays = {"index": np.arange(examples), "target": target, "prediction": prediction, "loss": 1.0 - right}
            np.savez(root / record["name"] / "predictions.npz", **arrays)


def test_where_no_prediction_depends_on_the_seed_arms_are_paired_by_example(tmp_path: Path) -> None:
    untrained(tmp_path / "large", {"amod_none": 0.86}, 2000)
    effect = evaluate(parse_study(content()), read_records(tmp_path / "large")).effects["source at none"]
    assert effect.state_text == "superior"
    assert effect.estimate == pytest.approx(0.06, abs=1e-3)
    # As of two proportions of the same examples (McNemar): the width follows from the examples that differ.
    assert "paired by example" in effect.note
    assert effect.high - effect.low < 2 * 1.96 * math.sqrt(0.8 * 0.2 * 2 / 2000)
    assert math.isnan(effect.effective_seeds)
    # Too few examples differ: no guide, and the seeds have no width.
    untrained(tmp_path / "small", {"amod_none": 0.82}, 40)
    small = evaluate(parse_study(content()), read_records(tmp_path / "small")).effects["source at none"]
    assert small.state_text == "insensitive"


def test_intervals_over_examples_hold_what_they_promise() -> None:
    """Of a thousand test sets drawn, the 95 % interval of the difference misses its true value in about 50."""
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(1000):
        kinds = rng.choice([-1.0, 0.0, 1.0], size=400, p=[0.04, 0.9, 0.06])
        found = statistics.one_sample_t(kinds, 0.95)
        missed += not found.low <= 0.02 <= found.high
    assert 30 <= missed <= 72


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


def test_accuracies_of_texts_are_judged_over_seeds_alone(tmp_path: Path) -> None:
    """A language model keeps sums over a window, and no class of it."""
    for seed in range(6):
        for number, (arm, changes) in enumerate(ARMS.items()):
            write_run(tmp_path, {**changes, "study": "confound.toy", "arm": arm}, seed, 0.3 + 0.01 * number)
    for run in tmp_path.iterdir():
        kept = {name: np.arange(4) for name in ("index", "tokens", "bytes", "correct")}
        np.savez(run / "predictions.npz", **kept, loss=np.ones(4))  # type: ignore[arg-type]
    result = evaluate(parse_study(content()), read_records(tmp_path))
    assert all(effect.n == 6 and effect.bootstrap is None for effect in result.effects.values() if not effect.refusal)
    assert "source at none" in result.effects
