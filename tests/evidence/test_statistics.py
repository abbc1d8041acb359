"""Statistics: equal to stored reference numbers, to scipy and to statsmodels; intervals cover what they promise."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests

from routing_lab.evidence import statistics as s

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "stats.json").read_text())
close = pytest.approx


def exact(value: Any) -> Any:
    return pytest.approx(value, abs=1e-9, rel=1e-9)


@pytest.mark.parametrize("case", GOLDEN["paired_t"])
def test_paired_t(case: dict[str, Any]) -> None:
    # The level is the interval's own; one stored case labels a 90 % interval with 0.95, which its width gives away.
    expected = case["expected"]
    half = (expected["ci"][1] - expected["ci"][0]) / 2
    level = 1 - 2 * scipy.stats.t.sf(half / expected["se"], expected["df"])
    d = s.paired_t(case["a"], case["b"], level)
    assert round(level, 9) in (0.9, 0.95)
    assert (d.n, d.df) == (expected["n"], expected["df"])
    assert [d.mean, d.sd, d.se, d.t, d.p] == exact(
        [expected[key] for key in ("mean_difference", "sd_difference", "se", "t", "p_two_sided")]
    )
    assert [d.low, d.high] == exact(expected["ci"])


@pytest.mark.parametrize("case", GOLDEN["welch"])
def test_welch(case: dict[str, Any]) -> None:
    expected = case["expected"]
    d = s.welch(case["a"], case["b"])
    assert [d.mean, d.se, d.df, d.t, d.p] == exact(
        [expected[key] for key in ("mean_difference", "se", "df", "t", "p_two_sided")]
    )
    assert [d.low, d.high] == exact(expected["ci"])


@pytest.mark.parametrize("case", GOLDEN["sign_flip_exact"]["cases"])
def test_sign_flip(case: dict[str, Any]) -> None:
    result = s.sign_flip(case["differences"])
    expected = case["expected"]
    assert (result.patterns, result.hits_two_sided, result.hits_greater) == (
        expected["patterns"],
        expected["hits_two_sided"],
        expected["hits_greater"],
    )
    assert (result.p_two_sided, result.p_greater) == (expected["p_two_sided"], expected["p_greater"])


@pytest.mark.parametrize("case", GOLDEN["adjusted_p"]["cases"])
def test_adjusted_p(case: dict[str, Any]) -> None:
    expected = case["expected"]
    holm = s.adjust(case["p"], "holm")
    assert holm == exact(expected["holm"])
    assert (holm <= 0.05 + 1e-12).tolist() == expected["holm_reject_at_0_05"]
    assert s.adjust(case["p"], "benjamini_hochberg") == exact(expected["benjamini_hochberg"])


def test_bootstrap_over_examples() -> None:
    case = GOLDEN["bootstrap_examples"]
    expected = case["expected"]
    result = s.paired_bootstrap(case["correct_a"], case["correct_b"], unit="example", example_index=case["index"])
    assert result.estimate == exact(expected["estimate"])
    assert [result.low, result.high] == exact(expected["ci"])
    assert result.sd == exact(expected["bootstrap_sd_ddof1"])
    first = s.paired_bootstrap(case["correct_a"], case["correct_b"], unit="example", example_index=case["index"][:2])
    assert (first.low + first.high) / 2 == exact(sum(expected["resample_means_first5"][:2]) / 2)


def test_bootstrap_over_seeds_and_examples() -> None:
    case, index = GOLDEN["bootstrap_seed_and_example"], GOLDEN["bootstrap_examples"]["index"]
    a, b, expected = case["correct_a"], case["correct_b"], case["expected"]
    both = s.paired_bootstrap(a, b, unit="both", example_index=index, seed_index=case["seed_index"])
    assert both.estimate == exact(expected["estimate"])
    assert [both.low, both.high] == exact(expected["ci_both"])
    example = s.paired_bootstrap(a, b, unit="example", example_index=index)
    assert [example.low, example.high] == exact(expected["ci_example"])


def test_bootstrap_over_seeds_alone_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="covers 75 %"):
        s.paired_bootstrap([[1.0, 0.0]], [[0.0, 0.0]], unit="seed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed_index"):
        s.paired_bootstrap([[1.0, 0.0]], [[0.0, 0.0]], unit="both", example_index=[[0, 1]])
    with pytest.raises(ValueError, match="shapes"):
        s.paired_bootstrap([[1.0, 0.0]], [[0.0]], unit="both")


def test_random_bootstrap_is_seeded_and_agrees_with_drawing_indices() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((4, 60)) < 0.8, rng.random((4, 60)) < 0.7
    fast = s.paired_bootstrap(a, b, unit="both", replicates=20_000, seed=1)
    assert fast == s.paired_bootstrap(a, b, unit="both", replicates=20_000, seed=1)
    assert fast != s.paired_bootstrap(a, b, unit="both", replicates=20_000, seed=2)
    index = rng.integers(0, 60, (20_000, 60))
    slow = s.paired_bootstrap(a, b, unit="both", example_index=index, seed_index=rng.integers(0, 4, (20_000, 4)))
    assert [fast.low, fast.high, fast.sd] == close([slow.low, slow.high, slow.sd], abs=0.006)


@pytest.mark.parametrize("case", GOLDEN["iqm"]["cases"])
def test_interquartile_mean(case: dict[str, Any]) -> None:
    expected = case["expected"]
    assert s.interquartile_mean(case["x"]) == exact(expected["iqm_trim"])
    assert s.interquartile_mean(case["x"], weighted=True) == exact(expected["iqm_weighted"])
    assert s.summarize(case["x"]).mean == exact(expected["mean"])


@pytest.mark.parametrize("case", GOLDEN["minimum_detectable_effect"]["cases"])
def test_minimum_detectable_effect(case: dict[str, Any]) -> None:
    is_paired = case["kind"] == "paired"
    sd, n = (case["sd_of_differences"], case["n_seeds"]) if is_paired else (case["sd"], case["n_seeds_per_group"])
    options = {"kind": "paired" if is_paired else "independent", "alpha": case["alpha"], "power": case["power"]}
    expected = case["expected"]
    assert s.minimum_detectable_effect(sd, n, **options) == close(expected["mde_noncentral_t"], abs=1e-6)
    assert s.approximate_detectable_effect(sd, n, **options) == exact(expected["mde_t_approximation"])


@pytest.mark.parametrize(("n", "alpha"), [(2, 0.05), (2, 0.005), (3, 0.001), (50, 0.05), (500, 0.01)])
def test_minimum_detectable_effect_has_the_power_it_states(n: int, alpha: float) -> None:
    shift = s.minimum_detectable_effect(1.0, n, alpha=alpha) * math.sqrt(n)
    critical = scipy.stats.t.ppf(1 - alpha / 2, n - 1)
    # Given the variance, t is normal: the power is the mean over the chi-square quantiles of what the normal rejects.
    share = (np.arange(100_000) + 0.5) / 100_000
    bound = critical * np.sqrt(scipy.stats.chi2.ppf(share, n - 1) / (n - 1))
    rejected = scipy.stats.norm.sf(bound - shift) + scipy.stats.norm.cdf(-bound - shift)
    assert rejected.mean() == close(0.8, abs=1e-5)
    assert math.isnan(s.minimum_detectable_effect(1.0, 1))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_summary_and_t_agree_with_scipy(values: list[float]) -> None:
    summary = s.summarize(values)
    assert summary.mean == close(np.mean(values), abs=1e-9)
    assert summary.stamp == ("single run" if len(values) < 3 else "")
    d = s.one_sample_t(values)
    if not d.is_degenerate:
        reference = scipy.stats.ttest_1samp(values, 0.0)
        interval = reference.confidence_interval(0.95)
        assert [d.t, d.p] == close([reference.statistic, reference.pvalue], rel=1e-6, abs=1e-9)
        assert [d.low, d.high] == close([interval.low, interval.high], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_adjusted_p_agrees_with_statsmodels(n: int) -> None:
    p = np.random.default_rng(n).random(n).round(1)
    assert s.adjust(p, "holm") == close(multipletests(p, method="holm")[1], abs=1e-12)
    assert s.adjust(p, "benjamini_hochberg") == close(scipy.stats.false_discovery_control(p), abs=1e-12)


def test_adjusting_leaves_out_comparisons_that_could_not_be_made() -> None:
    adjusted = s.adjust([0.01, math.nan, 0.04])
    assert adjusted[[0, 2]] == close([0.02, 0.04])
    assert math.isnan(adjusted[1])
    with pytest.raises(ValueError, match="holm"):
        s.adjust([0.1], "tukey")  # type: ignore[arg-type]


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=8))
def test_sign_flip_agrees_with_listing_every_pattern(values: list[int]) -> None:
    sums = [
        sum(v * sign for v, sign in zip(values, signs, strict=True))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    result = s.sign_flip([v / 10 for v in values])
    assert result.hits_two_sided == sum(abs(t) >= abs(sum(values)) for t in sums)
    assert result.hits_greater == sum(t >= sum(values) for t in sums)


def test_unmatched_seeds_are_refused_with_the_seeds_that_differ() -> None:
    with pytest.raises(
        s.UnmatchedSeedsError, match=r"seeds \[3, 4\] only in the first, seeds \[7\] only in the second"
    ):
        s.paired_by_seed({0: 1.0, 3: 1.0, 4: 1.0}, {0: 1.0, 7: 1.0})
    with pytest.raises(ValueError, match="as many on both sides"):
        s.paired_t([1, 2], [1])


def test_identical_arms_give_an_interval_that_contains_zero() -> None:
    values = {0: 0.9512, 1: 0.9488, 2: 0.9533}
    d = s.paired_by_seed(values, dict(values))
    assert (d.mean, d.low, d.high, d.p, d.sign) == (0, 0, 0, 1, 0)
    assert s.outcome(d) == "tie"


def test_equal_differences_are_no_evidence_of_precision() -> None:
    d = s.paired_t([0.3 + 0.1, 0.7 + 0.1, 0.5 + 0.1], [0.3, 0.7, 0.5])
    assert d.is_degenerate
    assert d.mean == close(0.1)
    assert math.isnan(d.p)
    assert s.outcome(d) == "tie"


def test_few_values_are_stamped_and_have_no_interval() -> None:
    one = s.summarize([0.5])
    assert (one.n, one.mean, one.stamp) == (1, 0.5, "single run")
    assert math.isnan(one.sd)
    assert s.summarize([]).n == 0
    assert s.paired_t([0.5], [0.4]).stamp == "single run"
    assert s.summarize([1, 2]).stamp == "single run"
    assert s.summarize([1, 2, 3]).stamp == ""


@pytest.mark.parametrize("n", [3, 6])
def test_t_intervals_cover_what_they_promise(n: int) -> None:
    rng = np.random.default_rng(n)
    seeds, own = rng.normal(0, 1.0, (4000, 1, n)), rng.normal(0, 0.5, (4000, 2, n))
    arms = 0.9 + seeds + own + np.array([0.3, 0.0])[None, :, None]
    differences = [s.paired_t(a, b) for a, b in arms]
    assert np.mean([d.low <= 0.3 <= d.high for d in differences]) == close(0.95, abs=0.012)


def test_bootstrap_over_examples_covers_what_it_promises() -> None:
    rng = np.random.default_rng(5)
    covered = []
    for _ in range(400):
        u = rng.random(300)
        a, b = u < 0.85, (u + rng.normal(0, 0.1, 300)) % 1 < 0.80
        interval = s.paired_bootstrap(a, b, unit="example", replicates=400, seed=int(rng.integers(1 << 30)))
        covered.append(interval.low <= 0.05 <= interval.high)
    assert np.mean(covered) == close(0.95, abs=0.03)


def test_two_runs_of_one_arm_give_a_wide_interval_that_contains_zero() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((3, 500)) < 0.9, rng.random((3, 500)) < 0.9
    interval = s.paired_bootstrap(a, b, unit="both")
    assert interval.low < 0 < interval.high


def test_wins_ties_and_losses_follow_the_interval() -> None:
    above, below, across = ([0.5, 0.6, 0.55], [-0.5, -0.6, -0.55], [0.5, -0.4, 0.1])
    outcomes = [s.outcome(s.one_sample_t(values)) for values in (above, below, across)]
    assert outcomes == ["win", "loss", "tie"]
    assert s.outcome(s.one_sample_t(above), higher_is_better=False) == "loss"


def test_pareto_set_with_and_without_bands() -> None:
    cost, quality = [1.0, 2.0, 2.0, 3.0, 4.0], [0.5, 0.7, 0.6, 0.69, 0.9]
    assert [p.standing for p in s.pareto(cost, quality)] == ["front", "front", "dominated", "dominated", "front"]
    low, high = np.array(quality) - 0.02, np.array(quality) + 0.02
    points = s.pareto(cost, quality, low, high)
    assert [p.standing for p in points] == ["front", "front", "dominated", "tied", "front"]
    assert points[3].dominated_by == 1
    single = s.pareto(cost, quality, [math.nan] * 5, [math.nan] * 5)
    assert [p.standing for p in single] == ["front", "front", "dominated", "dominated", "front"]
    assert [p.standing for p in s.pareto([1, 1], [0.5, 0.5])] == ["front", "front"]


def test_cost_at_equal_accuracy_interpolates_and_says_when_it_cannot() -> None:
    reached = s.cost_at_accuracy([4.0, 1.0, 2.0], [0.8, 0.5, 0.7], 0.75)
    assert (reached.cost, reached.kind) == (close(3.0), "reached")
    assert s.cost_at_accuracy([1.0, 2.0], [0.5, 0.7], 0.4) == s.CostAtAccuracy(1.0, "at_most")
    assert s.cost_at_accuracy([1.0, 2.0], [0.5, 0.7], 0.8) == s.CostAtAccuracy(2.0, "not_reached")
    assert s.cost_at_accuracy([1.0, 2.0], [0.5, 0.7], 0.7) == s.CostAtAccuracy(2.0, "reached")


def test_epochs_to_target_and_speed_up_with_censoring() -> None:
    epochs = [1, 2, 3, 4]
    assert s.epochs_to_target(epochs, [0.1, 0.6, 0.4, 0.8], 0.5) == s.Reached(2.0, False)
    assert s.epochs_to_target(epochs, [0.1, 0.2, 0.3, math.nan], 0.5) == s.Reached(3.0, True)
    assert s.epochs_to_target(epochs, [2.0, 1.5, 0.9, 0.8], 1.0, higher_is_better=False) == s.Reached(3.0, False)

    full = [s.Reached(e, False) for e in (8, 6, 8)]
    half = [s.Reached(e, False) for e in (4, 3, 4)]
    ratio = s.speed_up(full, half)
    assert (ratio.kind, ratio.mean, ratio.ratios) == ("observed", close(2.0), (2.0, 2.0, 2.0))
    mixed = s.speed_up([*full[:2], s.Reached(10, True)], half)
    assert (mixed.kind, mixed.kinds) == ("at_least", ("observed", "observed", "at_least"))
    assert mixed.mean == close((2 * 2 * 2.5) ** (1 / 3))
    assert math.isnan(mixed.low)
    assert s.speed_up(half, [*full[:2], s.Reached(10, True)]).kind == "at_most"
    both = s.speed_up([*full[:2], s.Reached(10, True)], [*half[:2], s.Reached(10, True)])
    assert both.kind == "unknown"
    assert math.isnan(both.mean)
    observed = s.speed_up([s.Reached(e, False) for e in (8, 6, 9)], half)
    assert observed.low < observed.mean < observed.high


def test_area_under_curve_is_the_mean_height() -> None:
    assert s.area_under_curve([1, 2, 3], [0.5, 0.5, 0.5]) == close(0.5)
    assert s.area_under_curve([0, 1, 3], [0.0, 1.0, math.nan]) == close(0.5)
    assert s.area_under_curve([1], [0.25]) == 0.25
    assert math.isnan(s.area_under_curve([], []))
