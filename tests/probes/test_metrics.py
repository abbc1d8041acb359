"""Probe metrics against cases that can be worked out by hand, and against scipy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from routing_lab.probes import metrics

RNG = np.random.default_rng(0)


def test_entropy_and_gini_between_a_uniform_and_a_one_hot_distribution() -> None:
    for count in (2, 7, 100):
        uniform, one_hot = np.full(count, 1 / count), np.eye(count)[0]
        assert metrics.entropy(uniform) == pytest.approx(np.log(count))
        assert metrics.entropy(one_hot) == 0
        assert metrics.gini(uniform) == pytest.approx(0, abs=1e-12)
        assert metrics.gini(one_hot) == pytest.approx((count - 1) / count)
    assert metrics.gini(np.array([1.0, 3.0])) == pytest.approx(0.25)
    assert metrics.gini(np.zeros(4)) == 0


def test_auc_equals_scikit_learn_with_ties() -> None:
    scores = RNG.integers(0, 5, size=(6, 20)).astype(float)
    mask = RNG.random((6, 20)) < 0.3
    expected = [roc_auc_score(m, s) for m, s in zip(mask, scores, strict=True)]
    np.testing.assert_allclose(metrics.auc(scores, mask), expected)
    assert metrics.auc(mask.astype(float), mask) == pytest.approx(np.ones(6))
    assert np.isnan(metrics.auc(scores, np.zeros_like(mask))).all()


def test_overlaps() -> None:
    kept = np.array([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=bool)
    mask = np.array([[0, 1, 1, 0], [0, 0, 0, 0]], dtype=bool)
    np.testing.assert_array_equal(metrics.iou(kept, mask), [1 / 3, np.nan])
    np.testing.assert_array_equal(metrics.share(mask, kept), [0.5, np.nan])


def test_boundary_of_a_square() -> None:
    mask = np.zeros((1, 6, 6), dtype=bool)
    mask[0, 1:4, 1:4] = True
    edge = metrics.boundary(mask)[0]
    assert not edge[2, 2]
    assert edge[1, 1]
    assert edge[0, 1]
    assert not edge[0, 0]
    assert not metrics.boundary(np.ones((1, 4, 4), dtype=bool)).any()


def test_correlations_equal_scipy() -> None:
    x, y = RNG.normal(size=(2, 50))
    y[3] = np.nan
    a, b = np.delete(x, 3), np.delete(y, 3)
    assert metrics.correlation(x, y, "pearson") == pytest.approx(stats.pearsonr(a, b).statistic)
    assert metrics.correlation(x, y, "spearman") == pytest.approx(stats.spearmanr(a, b).statistic)
    assert metrics.correlation(x, y, "kendall") == pytest.approx(stats.kendalltau(a, b).statistic)
    assert np.isnan(metrics.correlation(x, np.ones(50), "spearman"))
    assert np.isnan(metrics.correlation(x[:2], y[:2], "pearson"))


def test_pooled_correlation_can_come_from_samples_that_differ() -> None:
    """Within each sample nothing correlates; the samples' levels do."""
    level = np.arange(10.0)[:, None] * 10
    x, y = level + RNG.normal(size=(10, 30)), level + RNG.normal(size=(10, 30))
    pooled, low, high, count = metrics.pooled_interval(x, y, "spearman")
    assert pooled > 0.9
    assert low < pooled < high
    assert count == 10
    assert abs(np.mean(metrics.within(x, y, "spearman"))) < 0.3


def test_the_interval_of_random_scores_covers_zero() -> None:
    x, y = RNG.normal(size=(2, 40, 16))
    _, low, high, _ = metrics.pooled_interval(x, y, "spearman")
    assert low < 0 < high


def test_mean_interval() -> None:
    values = RNG.normal(3, 1, size=12)
    mean, low, high, count = metrics.mean_interval([*values, np.nan])
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean, count) == (pytest.approx(values.mean()), 12)
    assert (low, high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert np.isnan(metrics.mean_interval([1.0])[1])
    assert metrics.mean_interval([])[3] == 0


def test_a_choice_by_position_is_predicted_and_one_by_content_is_not() -> None:
    by_position = np.tile(np.arange(16) < 4, (40, 1))
    assert metrics.position_predictability(by_position) == (1.0, 0.75)
    by_content = np.array([RNG.permutation(16) < 8 for _ in range(400)])
    right, majority = metrics.position_predictability(by_content)
    assert abs(right - majority) < 0.06
