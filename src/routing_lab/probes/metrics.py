"""What the probes compute, as pure functions of arrays: structure of a map, agreement with a mask, rank correlation.

Shape legend: B samples, N tokens, H heads, Q query rows, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
Coefficient = Literal["pearson", "spearman", "kendall"]
COEFFICIENTS: tuple[Coefficient, ...] = ("pearson", "spearman", "kendall")


# --- structure of a distribution ---


def entropy(p: Array, axis: int = -1) -> Array:
    """Shannon entropy in nats of distributions along `axis`: log N where all N are equal, 0 where one has all."""
    p = np.asarray(p, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, -p * np.log(p), 0.0)
    return np.asarray(terms.sum(axis=axis))


def gini(values: Array, axis: int = -1) -> Array:
    """Gini coefficient of non-negative values along `axis`: 0 where all are equal, (N - 1) / N where one has all."""
    ordered = np.sort(np.moveaxis(np.asarray(values, dtype=np.float64), axis, -1), axis=-1)
    count = ordered.shape[-1]
    rank = np.arange(1, count + 1)
    total = ordered.sum(axis=-1)
    weighted = ((2 * rank - count - 1) * ordered).sum(axis=-1)
    return np.divide(weighted, count * total, out=np.zeros_like(total), where=total > 0)


def top_share(values: Array, part: float, axis: int = -1) -> Array:
    """Share of the sum that the largest `part` of non-negative values has, at least one of them; NaN for none."""
    ordered = -np.sort(-np.moveaxis(np.asarray(values, dtype=np.float64), axis, -1), axis=-1)
    total = ordered.sum(axis=-1)
    largest = ordered[..., : max(1, int(part * ordered.shape[-1]))].sum(axis=-1)
    return np.divide(largest, total, out=np.full_like(total, np.nan), where=total > 0)


# --- agreement of a choice with a mask ---


def auc(scores: Array, mask: NDArray[np.bool_]) -> Array:
    """Probability that a token inside the mask scores above one outside, ties counting half; per sample [B].

    Args:
        scores: [B, N]. mask: [B, N] bool. NaN where a sample has no token inside, or none outside.
    """
    ranks = stats.rankdata(scores, axis=1)
    inside = mask.sum(axis=1)
    outside = mask.shape[1] - inside
    above = (ranks * mask).sum(axis=1) - inside * (inside + 1) / 2
    pairs = (inside * outside).astype(np.float64)
    return np.divide(above, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)


def iou(kept: NDArray[np.bool_], mask: NDArray[np.bool_]) -> Array:
    """Intersection over union of the kept tokens and the mask, per sample [B]; NaN where both are empty."""
    union = (kept | mask).sum(axis=1).astype(np.float64)
    return np.divide((kept & mask).sum(axis=1), union, out=np.full(len(union), np.nan), where=union > 0)


def share(of: NDArray[np.bool_], among: NDArray[np.bool_]) -> Array:
    """Share of the tokens `among` that are also in `of`, per sample [B]; NaN where `among` is empty."""
    count = among.sum(axis=1).astype(np.float64)
    return np.divide((of & among).sum(axis=1), count, out=np.full(len(count), np.nan), where=count > 0)


def best(scores: Array, fraction: float) -> NDArray[np.bool_]:
    """[B, N] bool: of each sample the best `fraction` of those that have a score, at least one; of equals the first."""
    count = np.maximum(1, np.floor(fraction * np.isfinite(scores).sum(axis=1))).astype(np.int64)
    order = np.argsort(-np.where(np.isfinite(scores), scores, -np.inf), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(scores.shape[1])[None], axis=1)
    return np.asarray((rank < count[:, None]) & np.isfinite(scores))


def chance_overlap(first: float, second: float) -> float:
    """Expected |A and B| over expected |A or B| of two independent choices of these shares of the tokens."""
    both = first * second
    return both / max(first + second - both, 1e-12)


def boundary(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Patches of a mask [B, rows, columns] with one of their four neighbours on the other side of its outline."""
    padded = np.pad(mask, ((0, 0), (1, 1), (1, 1)), mode="edge")
    centre = padded[:, 1:-1, 1:-1]
    neighbours = (padded[:, :-2, 1:-1], padded[:, 2:, 1:-1], padded[:, 1:-1, :-2], padded[:, 1:-1, 2:])
    return np.asarray(np.logical_or.reduce([neighbour != centre for neighbour in neighbours]))


# --- correlation ---


def correlation(x: Array, y: Array, coefficient: Coefficient) -> float:
    """Correlation of two vectors; NaN with fewer than three finite pairs or where one of them is constant."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = np.asarray(x, dtype=np.float64)[finite], np.asarray(y, dtype=np.float64)[finite]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    if coefficient == "pearson":
        return float(np.corrcoef(x, y)[0, 1])
    if coefficient == "spearman":
        return float(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1])
    return float(stats.kendalltau(x, y).statistic)


def within(x: Array, y: Array, coefficient: Coefficient) -> Array:
    """`correlation` inside each sample of x and y [B, N]: [B]. A pooled one may come from samples that differ."""
    return np.array([correlation(a, b, coefficient) for a, b in zip(x, y, strict=True)])


# --- means and intervals over samples ---


def finite_mean(values: Array, axis: int) -> Array:
    """The mean of the finite values along an axis; NaN where there is none."""
    there = np.isfinite(values)
    count = there.sum(axis=axis)
    return np.asarray(np.where(there, values, 0).sum(axis=axis) / np.where(count, count, math.nan))


def mean_interval(values: Sequence[float] | Array, level: float = 0.95) -> tuple[float, float, float, int]:
    """Mean of the finite values, its t interval, and how many there are; NaN bounds with fewer than two."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return math.nan, math.nan, math.nan, 0
    mean = float(finite.mean())
    if len(finite) < 2:
        return mean, math.nan, math.nan, 1
    half = float(stats.t.ppf((1 + level) / 2, len(finite) - 1) * finite.std(ddof=1) / math.sqrt(len(finite)))
    return mean, mean - half, mean + half, len(finite)


def pooled_interval(
    x: Array, y: Array, coefficient: Coefficient, level: float = 0.95
) -> tuple[float, float, float, int]:
    """Correlation of x and y [B, N] over all tokens of all samples, its interval, and how many samples there are.

    Tokens of one sample are not independent, so whole samples are left out, one at a time: the jackknife's standard
    error on Fisher's scale, artanh of the coefficient (Efron & Tibshirani 1993, chapter 11), and a t interval.
    """
    value = correlation(x.ravel(), y.ravel(), coefficient)
    count = len(x)
    if count < 3 or not math.isfinite(value):
        return value, math.nan, math.nan, count
    left_out = [
        correlation(np.delete(x, row, axis=0).ravel(), np.delete(y, row, axis=0).ravel(), coefficient)
        for row in range(count)
    ]
    scale = np.arctanh(np.clip([value, *left_out], -1 + 1e-12, 1 - 1e-12))
    error = math.sqrt((count - 1) * float(scale[1:].var()))
    half = float(stats.t.ppf((1 + level) / 2, count - 1)) * error
    return value, math.tanh(scale[0] - half), math.tanh(scale[0] + half), count


# --- does the choice depend on the position alone? ---


def position_predictability(kept: NDArray[np.bool_], seed: int = 0) -> tuple[float, float]:
    """How well a token's position alone predicts whether it is kept: (accuracy, accuracy of the majority guess).

    Half of the samples gives each position its majority, the other half is predicted, and the other way round.

    Args:
        kept: [B, N] bool, aligned by position.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(kept))
    halves = (kept[order[::2]], kept[order[1::2]])
    right, majority = [], []
    for learn, test in (halves, halves[::-1]):
        if not len(learn) or not len(test):
            continue
        right.append(((learn.mean(axis=0) > 0.5) == test).mean())
        majority.append(((learn.mean() > 0.5) == test).mean())
    return (float(np.mean(right)), float(np.mean(majority))) if right else (math.nan, math.nan)
