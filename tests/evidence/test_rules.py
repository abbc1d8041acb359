"""Rules conclude nothing from not knowing, are complete and exclusive, and are adjusted over what luck could claim."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from scipy import special
from tests.evidence.test_study import content

from routing_lab.evidence import power, sequential
from routing_lab.evidence.rules import Evidence, parse_condition
from routing_lab.evidence.study import StudyError, load_study, parse_study

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

MARGIN = {"size": 0.01, "because": "for the test"}
WHOLE = [
    {"verdict": "supports", "says": "better", "when": {"source at none": "superior"}},
    {"verdict": "contradicted", "says": "no better", "when": {"source at none": "non-superior"}},
]


def strict(*rules: dict[str, Any], **decision: Any) -> dict[str, Any]:
    return content(margin=MARGIN, decision={"rules": list(rules), **decision})


@pytest.mark.parametrize("word", ["not negative", "not positive", "not within 0.1", "not superior"])
def test_a_condition_that_holds_where_nothing_is_known_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="also holds where nothing is known"):
        parse_condition(word)


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        ((0.001, 0.006, 0.0015, 0.005), "equivalent"),
        ((0.002, 0.03, 0.004, 0.028), "superior"),
        ((-0.03, -0.002, -0.028, -0.004), "inferior"),
        ((-0.006, 0.03, -0.004, 0.028), "non-inferior"),
        ((-0.03, 0.006, -0.028, 0.004), "non-superior"),
        ((-0.03, 0.03, -0.028, 0.028), "inconclusive"),
    ],
)
def test_an_interval_has_one_state(ends: tuple[float, float, float, float], state: str) -> None:
    assert Evidence(*ends, 0.01).state == state


def test_incomplete_and_overlapping_rules_are_refused_with_the_patterns() -> None:
    with pytest.raises(StudyError, match="not complete"):
        parse_study(strict(WHOLE[0]))
    overlapping = WHOLE[1] | {"verdict": "mixed", "when": {"source at none": "equivalent"}}
    with pytest.raises(StudyError, match="not exclusive"):
        parse_study(strict(*WHOLE, overlapping))
    assert parse_study(strict(*WHOLE, overlapping, order="the test says so")).family.size == 1
    assert parse_study(strict(*WHOLE)).patterns is not None


def test_undecided_is_evidence_for_nothing() -> None:
    with pytest.raises(StudyError, match="not knowing is no evidence"):
        parse_study(strict({"verdict": "contradicted", "says": "s", "when": {"source at none": "inconclusive"}}))


def test_a_conjunction_needs_no_adjustment_and_alternatives_do() -> None:
    both = {"source at none": "superior", "papers": "superior"}
    rest = {"verdict": "mixed", "says": "neither"}
    every = parse_study(strict({"verdict": "supports", "says": "s", "when": both}, otherwise=rest))
    some = parse_study(strict({"verdict": "supports", "says": "s", "when_any": both}, otherwise=rest))
    assert (every.family.size, some.family.size) == (1, 2)


def test_looks_spend_alpha_as_tabled() -> None:
    # Lan-DeMets bounds of the O'Brien-Fleming type for five equal looks, one-sided 0.025.
    levels = sequential.one_sided_levels((1, 2, 3, 4, 5), 0.025)
    bounds = [-float(special.ndtri(level)) for level in levels]
    assert bounds == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=2e-4)


def test_simulated_rules_keep_their_error_rate_and_name_what_cannot_be_met() -> None:
    study = parse_study(strict(*WHOLE))
    null = power.simulate(study, dict.fromkeys(study.arms, 0.0), (5, 10, 15), 0.02, draws=4000)
    assert null.false < 0.05
    hopeless = power.rule_powers(study, "toy", 0.2)
    assert hopeless[1].is_hopeless
    assert not power.rule_powers(study, "toy", 0.002)[1].is_hopeless
    assert math.isclose(power.equivalence_power(0.02, 45, 0.01), 0.9, abs_tol=0.01)


def test_looks_keep_the_error_rate_of_equivalence_too() -> None:
    """At the margin itself an effect is called equivalent, or the study contradicted, in 5 of 100 at most."""
    rules = [
        {"verdict": "supports", "says": "equal", "when": {"source at none": "equivalent"}},
        {"verdict": "contradicted", "says": "better", "when": {"source at none": "superior"}},
    ]
    study = parse_study(strict(*rules, otherwise={"verdict": "mixed", "says": "worse"}))
    truth = dict.fromkeys(study.arms, 0.0) | {"amod_none": 0.01}
    looked = power.simulate(study, truth, (5, 10, 15, 20, 30), 0.01, draws=4000)
    assert looked.rates[0] < 0.05 + 2 * math.sqrt(0.05 / 4000)
    # Half a margin is none as a claim: the interval lies inside, and no rule that asks for a gain is met.
    inside = power.simulate(study, truth | {"amod_none": 0.002}, (5, 10, 15, 20, 30), 0.01, draws=4000)
    assert inside.rates[0] > 0.9


def test_at_the_margin_every_wrong_word_keeps_its_rate_and_two_of_them_add_up() -> None:
    study = load_study(EXPERIMENTS / "selection_matters.yaml")
    truth = power.true_values(study, study.branches[1], study.margin_size)
    assert truth is not None
    found = power.simulate(study, truth, (12,), study.margin_size, draws=4000)
    assert found.false_word < 0.05 + 2 * math.sqrt(0.05 / 4000)
    assert found.false_word < found.false < 0.1 + 2 * math.sqrt(0.1 / 4000)
    assert found.false == pytest.approx(found.rates[0] + found.rates[2])
