"""Statistics for comparing arms over a handful of seeds.

The unit of replication is the seed: arms are compared by their differences under equal seeds, with a t interval. A
percentile bootstrap over seeds alone is not offered, because over three seeds its 95 % interval covers 75 % (85 %
over five); the bootstrap here resamples test examples, or seeds and examples together.

Conventions: standard deviations have ddof 1, intervals are two-sided, a difference is `a - b`, p values are two-sided
unless named otherwise. Quantiles of Student's t come from `scipy.special`, which loads in a fraction of the time of
`scipy.stats`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

SINGLE_RUN = "single run"
"""Stamp of a result with fewer than `MIN_SEEDS` seeds."""

MIN_SEEDS = 3
REPLICATES = 2_000
"""Replicates of every bootstrap, fixed in advance."""

MAX_EXACT_SIGNS = 20
"""Largest number of differences for which all sign patterns are enumerated."""

Floats = NDArray[np.float64]
Outcome = Literal["win", "tie", "loss"]


class UnmatchedSeedsError(ValueError):
    """Two arms that cannot be paired because their seeds differ."""


@dataclass(frozen=True)
class Summary:
    """Mean of `n` values with its spread; `sd` and the interval are NaN where fewer than two values exist."""

    n: int
    mean: float
    sd: float
    low: float
    high: float
    level: float

    @property
    def stamp(self) -> str:
        """`single run` under three values, else empty."""
        return SINGLE_RUN if self.n < MIN_SEEDS else ""


@dataclass(frozen=True)
class Difference:
    """An estimated difference with its t interval.

    `is_degenerate` marks differences that are all equal to the last digit: the interval then has no width because the
    data carry no information about noise, not because there is none.
    """

    n: int
    mean: float
    sd: float
    se: float
    df: float
    t: float
    p: float
    low: float
    high: float
    level: float
    is_degenerate: bool = False

    @property
    def stamp(self) -> str:
        """`single run` under three pairs, else empty."""
        return SINGLE_RUN if self.n < MIN_SEEDS else ""

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies on one side of zero and can be trusted to; 0 where it does not."""
        return sign_of_interval(self.low, self.high) if not self.is_degenerate else 0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval, None where there is none to trust: differences that are equal and not zero have no known
        noise.
        """
        return None if math.isnan(self.low) or (self.is_degenerate and self.mean != 0) else (self.low, self.high)


@dataclass(frozen=True)
class SignFlip:
    """Exact sign-flip test: how many of the 2^n sign patterns are at least as extreme as the one observed."""

    patterns: int
    hits_two_sided: int
    hits_greater: int

    @property
    def p_two_sided(self) -> float:
        """Two-sided p."""
        return self.hits_two_sided / self.patterns

    @property
    def p_greater(self) -> float:
        """One-sided p for a positive mean."""
        return self.hits_greater / self.patterns


@dataclass(frozen=True)
class Bootstrap:
    """A percentile bootstrap interval of a mean difference."""

    estimate: float
    low: float
    high: float
    sd: float
    replicates: int
    level: float


@dataclass(frozen=True)
class ParetoPoint:
    """Where a point stands: `front`, `dominated`, or `tied` (dominated by its mean, but its band reaches the front)."""

    standing: Literal["front", "tied", "dominated"]
    dominated_by: int | None


@dataclass(frozen=True)
class Reached:
    """When a curve first met a target. Censored: `value` is the last point looked at, and the true one is larger."""

    value: float
    is_censored: bool


@dataclass(frozen=True)
class CostAtAccuracy:
    """Cost at which a curve of accuracy over cost first reaches a target.

    `at_most` is a curve whose cheapest point already reaches it; `not_reached` one that never does. Only `reached` is
    an estimate, the other two are bounds (the cheapest and the dearest cost looked at).
    """

    cost: float
    kind: Literal["reached", "at_most", "not_reached"]


@dataclass(frozen=True)
class SpeedUp:
    """Ratio of epochs to the same target, reference over arm, seed by seed.

    `kinds` says of each ratio whether it is `observed`, a lower bound (`at_least`: the reference never got there), an
    upper bound (`at_most`: the arm never did), or `unknown` (neither did). `mean` is the geometric mean over seeds;
    with a censored seed it is a bound in the direction of `kind`, without an interval, and NaN where bounds of both
    directions meet.
    """

    ratios: tuple[float, ...]
    kinds: tuple[str, ...]
    kind: Literal["observed", "at_least", "at_most", "unknown"]
    mean: float
    low: float
    high: float
    level: float


def summarize(values: ArrayLike, level: float = 0.95, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Summary:
    """Mean, standard deviation (ddof 1) and t interval of the mean.

    `bounds` are what a value can be: of the interval the part between them is given, which holds the mean as often as
    the whole.
    """
    x = _vector(values)
    n = len(x)
    if n == 0:
        return Summary(0, math.nan, math.nan, math.nan, math.nan, level)
    mean = float(x.mean())
    if n == 1:
        return Summary(1, mean, math.nan, math.nan, math.nan, level)
    sd = float(x.std(ddof=1))
    half = t_quantile(n - 1, level) * sd / math.sqrt(n)
    return Summary(n, mean, sd, max(mean - half, bounds[0]), min(mean + half, bounds[1]), level)


def t_quantile(df: float, level: float) -> float:
    """Two-sided critical value: the half width of a t interval in standard errors."""
    return float(special.stdtrit(df, 0.5 + level / 2))


def match_seeds(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[int, ...]:
    """The seeds of two arms in ascending order.

    Raises:
        UnmatchedSeedsError: an arm has a seed that the other lacks; the message names the seeds.
    """
    only_a, only_b = sorted(set(a) - set(b)), sorted(set(b) - set(a))
    if only_a or only_b:
        parts = [f"seeds {only} only in the {side}" for only, side in ((only_a, "first"), (only_b, "second")) if only]
        raise UnmatchedSeedsError(f"arms are compared under equal seeds; {', '.join(parts)}")
    return tuple(sorted(a))


def paired_by_seed(a: Mapping[int, float], b: Mapping[int, float], level: float = 0.95) -> Difference:
    """Paired t interval of `a - b`, each given as seed to value.

    Raises:
        UnmatchedSeedsError: the arms do not have the same seeds.
    """
    seeds = match_seeds(a, b)
    return paired_t([a[seed] for seed in seeds], [b[seed] for seed in seeds], level)


def paired_t(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> Difference:
    """Paired t interval and test of the mean of `a - b`, element by element.

    Raises:
        ValueError: `a` and `b` differ in length.
    """
    x, y = _vector(a), _vector(b)
    if len(x) != len(y):
        raise ValueError(f"paired values must be as many on both sides; got {len(x)} and {len(y)}")
    return one_sample_t(x - y, level, scale=float(np.max(np.abs([x, y]), initial=0.0)))


def one_sample_t(values: ArrayLike, level: float = 0.95, scale: float | None = None) -> Difference:
    """t interval and test of the mean of `values` against zero.

    `scale` is the magnitude of the numbers that `values` are differences of; a spread below its rounding noise counts
    as none.
    """
    d = _vector(values)
    n = len(d)
    mean = float(d.mean()) if n else math.nan
    if n < 2:
        return Difference(n, mean, math.nan, math.nan, max(n - 1, 0), math.nan, math.nan, math.nan, math.nan, level)
    noise = 8 * np.finfo(float).eps * (scale if scale is not None else float(np.max(np.abs(d))))
    sd = float(d.std(ddof=1))
    if sd <= noise:
        mean = 0.0 if abs(mean) <= noise else mean
        p, t = (1.0, 0.0) if mean == 0 else (math.nan, math.copysign(math.inf, mean))
        return Difference(n, mean, 0.0, 0.0, n - 1, t, p, mean, mean, level, is_degenerate=True)
    se = sd / math.sqrt(n)
    return _t_difference(n, mean, sd, se, n - 1, level)


def control_variate(values: ArrayLike, control: ArrayLike, everything: ArrayLike, level: float = 0.95) -> Difference:
    """t interval and test of the mean of `values`, with what they have in common with a control taken out.

    The regression estimator of double sampling (Cochran, 1977, section 12.6), mean(y) - b (mean(x) - mean(X)): the mean
    of the control is known better from N values than from the n that go with `values`. Its variance is
    s^2 (1 / n + (mean(x) - mean(X))^2 / SS(x)) + b^2 S^2 / N, s^2 that of the residuals with n - 2 degrees of freedom,
    which are taken for the whole.

    Args:
        values: y, one a seed.
        control: x, under the same seeds in the same order.
        everything: X, the control under all its seeds, those of `values` among them.
        level: of the interval.

    Returns:
        As `one_sample_t`; `sd` is the standard deviation whose mean over n would have this standard error. Under five
        values, or where the control does not vary, that of `values` alone.
    """
    y, x, whole = _vector(values), _vector(control), _vector(everything)
    n = len(y)
    plain = one_sample_t(y, level)
    spread = float(((x - x.mean()) ** 2).sum()) if n else 0.0
    if n < MIN_SEEDS + 2 or plain.is_degenerate or spread <= 1e-18:
        return plain
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    residual = float(((y - y.mean() - slope * (x - x.mean())) ** 2).sum()) / (n - 2)
    shift = float(x.mean() - whole.mean())
    se = math.sqrt(residual * (1 / n + shift**2 / spread) + slope**2 * float(whole.var(ddof=1)) / len(whole))
    return _t_difference(n, float(y.mean()) - slope * shift, se * math.sqrt(n), se, n - 2, level)


def welch(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> Difference:
    """Welch's interval and test of the difference of two unpaired means; `n` is the smaller group, `sd` is NaN.

    Raises:
        ValueError: a group has fewer than two values.
    """
    x, y = _vector(a), _vector(b)
    if min(len(x), len(y)) < 2:
        raise ValueError(f"Welch's test needs two values in each group; got {len(x)} and {len(y)}")
    va, vb = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    mean = float(x.mean() - y.mean())
    n = min(len(x), len(y))
    if va + vb == 0:
        p, t = (1.0, 0.0) if mean == 0 else (math.nan, math.copysign(math.inf, mean))
        return Difference(n, mean, math.nan, 0.0, math.nan, t, p, mean, mean, level, is_degenerate=True)
    df = float((va + vb) ** 2 / (va**2 / (len(x) - 1) + vb**2 / (len(y) - 1)))
    return _t_difference(n, mean, math.nan, math.sqrt(va + vb), df, level)


def sign_flip(differences: ArrayLike) -> SignFlip:
    """Exact sign-flip test of the mean of paired differences.

    All 2^n sign patterns are counted, the observed one among them; a pattern that ties with it counts as extreme,
    with a tolerance for rounding. The smallest two-sided p is 2 / 2^n: 0.25 at three seeds, 0.031 at six.

    Raises:
        ValueError: no differences, or more than `MAX_EXACT_SIGNS`.
    """
    d = _vector(differences)
    if not 1 <= len(d) <= MAX_EXACT_SIGNS:
        raise ValueError(f"the exact sign-flip test takes 1 to {MAX_EXACT_SIGNS} differences; got {len(d)}")
    sums = np.zeros(1)
    for value in d:
        sums = np.concatenate([sums + value, sums - value])
    observed, tolerance = d.sum(), 1e-9 * float(np.abs(d).sum())
    two_sided = int(np.count_nonzero(np.abs(sums) >= abs(observed) - tolerance))
    greater = int(np.count_nonzero(sums >= observed - tolerance))
    return SignFlip(len(sums), two_sided, greater)


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    *,
    unit: Literal["example", "both"],
    replicates: int = REPLICATES,
    seed: int = 0,
    level: float = 0.95,
    example_index: ArrayLike | None = None,
    seed_index: ArrayLike | None = None,
) -> Bootstrap:
    """Percentile bootstrap of the mean of `a - b` over test examples, the same draw for both arms.

    Args:
        a: per-example values (1 for a correct prediction, 0 for a wrong one, or a loss), [examples] or [seeds,
            examples].
        b: the same of the other arm, under the same seeds and examples.
        unit: `example` resamples examples and holds the seeds; `both` also resamples seeds, and takes the same
            examples for every drawn seed (hierarchical, crossed). Under five seeds `both` still understates the
            spread between seeds: quote it beside the paired t interval, not in its place.
        replicates: number of resamples; unused where indices are given.
        seed: of the random draws.
        level: of the interval, from `linear` quantiles.
        example_index: drawn examples [replicates, examples], in place of random ones.
        seed_index: drawn seeds [replicates, seeds], in place of random ones.

    Raises:
        ValueError: the shapes differ, or `unit` is another one (resampling seeds alone is refused).
    """
    if unit not in ("example", "both"):
        raise ValueError(
            f"unit={unit!r}: 'example' or 'both' is expected; a percentile bootstrap over seeds alone is not offered, "
            "because over three seeds its 95 % interval covers 75 % (use the paired t interval)"
        )
    first, second = np.atleast_2d(np.asarray(a, float)), np.atleast_2d(np.asarray(b, float))
    if first.shape != second.shape or first.size == 0:
        raise ValueError(f"both arms need the same seeds and examples; got shapes {first.shape} and {second.shape}")
    difference = first - second
    if unit == "example":
        difference = difference.mean(axis=0, keepdims=True)
        seed_index = None
    if example_index is None:
        # Examples with equal differences are interchangeable, so it is enough to draw how often each kind occurs.
        kinds, counts = np.unique(difference, axis=1, return_counts=True)
        means = _random_means(kinds, counts, unit == "both", replicates, np.random.default_rng(seed))
    else:
        index = np.asarray(example_index, int)
        rows = np.asarray(seed_index, int) if seed_index is not None else np.zeros((len(index), 1), int)
        if unit == "both" and seed_index is None:
            raise ValueError("unit='both' with example_index also needs seed_index")
        means = np.array([difference[np.ix_(r, i)].mean() for r, i in zip(rows, index, strict=True)])
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    spread = float(means.std(ddof=1))
    return Bootstrap(float(difference.mean()), float(low), float(high), spread, len(means), level)


def adjust(p: ArrayLike, method: Literal["holm", "benjamini_hochberg"] = "holm") -> Floats:
    """p values adjusted for their number, in the order given; NaN (a comparison that could not be made) stays NaN and
    is not counted.

    Raises:
        ValueError: another method.
    """
    values = _vector(p)
    made = np.flatnonzero(~np.isnan(values))
    order = made[np.argsort(values[made], kind="stable")]
    m = len(order)
    ranks = np.arange(m)
    if method == "holm":
        adjusted = np.maximum.accumulate((m - ranks) * values[order])
    elif method == "benjamini_hochberg":
        adjusted = np.minimum.accumulate((m / (ranks + 1) * values[order])[::-1])[::-1]
    else:
        raise ValueError(f"method={method!r}: 'holm' or 'benjamini_hochberg' is expected")
    result = np.full(len(values), math.nan)
    result[order] = np.minimum(adjusted, 1.0)
    return result


def minimum_detectable_effect(
    sd: float, n: int, *, kind: Literal["paired", "independent"] = "paired", alpha: float = 0.05, power: float = 0.8
) -> float:
    """Smallest true difference that the two-sided t test at level `alpha` finds with probability `power`.

    Exact, from the noncentral t distribution with both rejection tails. `sd` is that of the paired differences, or
    the common one of two independent groups of `n`. NaN under two seeds.
    """
    if n < 2 or math.isnan(sd):
        return math.nan
    df, scale = (n - 1, 1 / math.sqrt(n)) if kind == "paired" else (2 * n - 2, math.sqrt(2 / n))
    return _detectable_shift(df, alpha, power) * scale * sd


def approximate_detectable_effect(
    sd: float, n: int, *, kind: Literal["paired", "independent"] = "paired", alpha: float = 0.05, power: float = 0.8
) -> float:
    """The textbook approximation of `minimum_detectable_effect`: (t_{1-alpha/2} + t_{power}) standard errors."""
    df, scale = (n - 1, 1 / math.sqrt(n)) if kind == "paired" else (2 * n - 2, math.sqrt(2 / n))
    return float(special.stdtrit(df, 1 - alpha / 2) + special.stdtrit(df, power)) * scale * sd


def sign_of_interval(low: float, high: float) -> int:
    """1 where the interval lies above zero, -1 where below, 0 where it contains zero or is not known."""
    return 1 if low > 0 else -1 if high < 0 else 0


def outcome(difference: Difference, *, higher_is_better: bool = True) -> Outcome:
    """`win` or `loss` where the interval of `a - b` excludes zero, else `tie`: never from point values."""
    sign = difference.sign if higher_is_better else -difference.sign
    return "win" if sign > 0 else "loss" if sign < 0 else "tie"


def pareto(
    cost: ArrayLike, quality: ArrayLike, low: ArrayLike | None = None, high: ArrayLike | None = None
) -> list[ParetoPoint]:
    """Which points no other one dominates (at most the cost and at least the quality, one of them strictly).

    With bands, a dominated point whose band reaches into that of every point that dominates it is `tied`; without
    bands, or with NaN bands (a single run), only the means decide.
    """
    c, q = _vector(cost), _vector(quality)
    lows = q if low is None else np.where(np.isnan(_vector(low)), q, _vector(low))
    highs = q if high is None else np.where(np.isnan(_vector(high)), q, _vector(high))
    points = []
    for i in range(len(c)):
        better = (c <= c[i]) & (q >= q[i]) & ((c < c[i]) | (q > q[i]))
        if not better.any():
            points.append(ParetoPoint("front", None))
            continue
        strongest = int(np.flatnonzero(better)[np.argmax(q[better])])
        is_clear = bool(np.any(lows[better] > highs[i])) or bool(low is None)
        points.append(ParetoPoint("dominated" if is_clear else "tied", strongest))
    return points


def cost_at_accuracy(cost: ArrayLike, accuracy: ArrayLike, target: float) -> CostAtAccuracy:
    """Smallest cost at which the straight lines between neighbouring points reach `target`."""
    order = np.argsort(_vector(cost), kind="stable")
    c, a = _vector(cost)[order], _vector(accuracy)[order]
    if len(c) == 0:
        raise ValueError("a curve of accuracy over cost needs at least one point")
    if a[0] >= target:
        return CostAtAccuracy(float(c[0]), "at_most")
    above = np.flatnonzero(a >= target)
    if len(above) == 0:
        return CostAtAccuracy(float(c[-1]), "not_reached")
    i = int(above[0])
    share = (target - a[i - 1]) / (a[i] - a[i - 1])
    return CostAtAccuracy(float(c[i - 1] + share * (c[i] - c[i - 1])), "reached")


def epochs_to_target(epochs: ArrayLike, values: ArrayLike, target: float, *, higher_is_better: bool = True) -> Reached:
    """First epoch whose value meets `target`; censored at the last epoch where none does. NaN values are passed over.

    Raises:
        ValueError: no values.
    """
    x, y = _vector(epochs), _vector(values)
    x, y = x[~np.isnan(y)], y[~np.isnan(y)]
    if len(x) == 0:
        raise ValueError("a training curve needs at least one value")
    met = np.flatnonzero(y >= target if higher_is_better else y <= target)
    return Reached(float(x[met[0]]), False) if len(met) else Reached(float(x[-1]), True)


def speed_up(reference: Sequence[Reached], arm: Sequence[Reached], level: float = 0.95) -> SpeedUp:
    """Epochs of the reference over epochs of the arm, to the same target, paired by position; t interval on the log
    scale.

    Raises:
        ValueError: the sides differ in length, or a count of epochs is not positive.
    """
    if len(reference) != len(arm) or not arm:
        raise ValueError(
            f"paired curves must be as many on both sides, at least one; got {len(reference)} and {len(arm)}"
        )
    if min(r.value for r in (*reference, *arm)) <= 0:
        raise ValueError("epochs are counted from one, so that their ratio exists")
    ratios = tuple(r.value / a.value for r, a in zip(reference, arm, strict=True))
    names = {(False, False): "observed", (True, False): "at_least", (False, True): "at_most", (True, True): "unknown"}
    kinds = tuple(names[r.is_censored, a.is_censored] for r, a in zip(reference, arm, strict=True))
    nan = math.nan
    directions = set(kinds) - {"observed"}
    if len(directions) > 1 or "unknown" in directions:
        return SpeedUp(ratios, kinds, "unknown", nan, nan, nan, level)
    logs = summarize(np.log(ratios), level)
    mean = math.exp(logs.mean)
    if directions:
        return SpeedUp(ratios, kinds, "at_least" if "at_least" in directions else "at_most", mean, nan, nan, level)
    return SpeedUp(ratios, kinds, "observed", mean, math.exp(logs.low), math.exp(logs.high), level)


def area_under_curve(epochs: ArrayLike, values: ArrayLike) -> float:
    """Mean height of a training curve: the trapezoid area over the epochs, divided by their span. NaN values are
    passed over.
    """
    x, y = _vector(epochs), _vector(values)
    x, y = x[~np.isnan(y)], y[~np.isnan(y)]
    if len(x) == 0:
        return math.nan
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 else float(y[0])


def interquartile_mean(values: ArrayLike, *, weighted: bool = False) -> float:
    """Mean of the middle half: floor(n/4) values dropped at each end, or exactly a quarter of the mass with
    fractional weights.
    """
    x = np.sort(_vector(values))
    n = len(x)
    if n == 0:
        return math.nan
    if not weighted:
        cut = n // 4
        return float(x[cut : n - cut].mean())
    inside = np.minimum(np.arange(1, n + 1), 0.75 * n) - np.maximum(np.arange(n), 0.25 * n)
    weight = np.clip(inside, 0, None)
    return float(weight @ x / weight.sum())


def _vector(values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1:
        raise ValueError(f"a list of numbers is expected; got an array of shape {array.shape}")
    return array


def _t_difference(n: int, mean: float, sd: float, se: float, df: float, level: float) -> Difference:
    t = mean / se
    half = t_quantile(df, level) * se
    p = float(2 * special.stdtr(df, -abs(t)))
    return Difference(n, mean, sd, se, df, t, p, mean - half, mean + half, level)


def _random_means(
    kinds: Floats, counts: NDArray[np.int64], resample_seeds: bool, replicates: int, rng: np.random.Generator
) -> Floats:
    """Means of resampled blocks; `kinds` [seeds, kinds] are the distinct columns, `counts` how many examples show
    each.
    """
    num_seeds, num_kinds = kinds.shape
    n = int(counts.sum())
    means = np.empty(replicates)
    step = max(1, 2_000_000 // num_kinds)
    for start in range(0, replicates, step):
        size = min(step, replicates - start)
        drawn = np.full((size, num_seeds), 1.0)
        if resample_seeds:
            drawn = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=size).astype(float)
        often = rng.multinomial(n, counts / n, size=size)
        means[start : start + size] = ((drawn @ kinds) * often).sum(axis=1) / (num_seeds * n)
    return means


# Beyond, the noncentral F loses its digits: the power is then a mean over the quantiles of the sample variance.
_EXACT_CRITICAL = 12.0


@lru_cache(maxsize=256)
def _detectable_shift(df: int, alpha: float, power: float) -> float:
    """Noncentrality at which the two-sided t test rejects with probability `power`."""
    from scipy.optimize import brentq

    critical = float(special.stdtrit(df, 1 - alpha / 2))
    quantiles = (np.arange(20_000) + 0.5) / 20_000
    bounds = critical * np.sqrt(special.chdtri(df, quantiles) / df)

    def exact(shift: float) -> float:
        # The square of a noncentral t is a noncentral F, whose upper tail holds both rejection tails.
        below = float(special.ncfdtr(1, df, shift**2, critical**2))
        # Not a number where the shift is so large that nothing is left below the critical value.
        return 1 - (0.0 if math.isnan(below) else below) - power

    def averaged(shift: float) -> float:
        # Given the sample variance, t is normal.
        return float((special.ndtr(shift - bounds) + special.ndtr(-shift - bounds)).mean()) - power

    missing_power = averaged if critical > _EXACT_CRITICAL else exact
    return float(brentq(missing_power, 0.0, 4 * (critical + 10), xtol=1e-12, rtol=1e-12))
