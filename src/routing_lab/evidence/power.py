"""What a study can find: its rules tried on simulated results, before anything has run.

Every arm is given a true value, every seed noise of the spread that a pilot measured, and the rules are applied to the
intervals as they would be to records. The power of a rule is how often it gives the verdict when exactly what it says
is true: signs of twice the margin, and no effect where it asks for equivalence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from routing_lab.evidence import sequential, statistics
from routing_lab.evidence.rules import DECIDED, Branch, Evidence
from routing_lab.evidence.study import Study

Noise = Literal["normal", "heavy-tailed", "discrete"]

DRAWS = 2000
SIGNS = 2.0
"""Effects that a rule calls superior or inferior are given this many margins."""

RIDGE = 1e-6
"""Weight of the values' own size beside the conditions that they have to meet."""

HARDLY = 0.1
"""A rule with less power cannot be said to be asked."""


@dataclass(frozen=True)
class Simulation:
    """Verdicts of simulated studies.

    `rates` holds for each rule the share of studies that it decided, `otherwise`, `inconclusive` and `insensitive`
    those without one; `false` the share with a verdict that is not true of the effects they were made with, and
    `false_word` that of the verdict word that was wrong most often; `seeds` the mean number of seeds at the look that
    ended them.
    """

    rates: tuple[float, ...]
    otherwise: float
    inconclusive: float
    insensitive: float
    false: float
    false_word: float
    seeds: float


@dataclass(frozen=True)
class RulePower:
    """Power of one rule at the planned seeds; NaN, with the reason, where it cannot be simulated."""

    number: int
    verdict: str
    says: str
    power: float
    why: str = ""

    @property
    def is_hopeless(self) -> bool:
        """Whether the rule can hardly be met even when what it says is true."""
        return self.power < HARDLY


def rule_powers(study: Study, scale: str, spread: float, draws: int = DRAWS) -> list[RulePower]:
    """The power of every rule of a study with its planned seeds, at a spread of differences under one seed."""
    sizes = [len(seeds) for seeds in study.looks(scale)]
    found = []
    for number, branch in enumerate(study.branches):
        truth = true_values(study, branch, SIGNS * study.margin_size)
        if truth is None:
            found.append(RulePower(number, branch.verdict, branch.says, 0.0, "its conditions exclude each other"))
        elif math.isnan(study.margin_size) or set(study.read_effects) - study.weights.keys():
            why = "no margin" if math.isnan(study.margin_size) else "reads a ratio, whose spread is not known"
            found.append(RulePower(number, branch.verdict, branch.says, math.nan, why))
        else:
            done = simulate(study, truth, sizes, spread, draws=draws, seed=number)
            found.append(RulePower(number, branch.verdict, branch.says, done.rates[number]))
    return found


def power_lines(study: Study, scale: str, spread: float, source: str) -> list[str]:
    """`rule_powers` in words, hopeless rules named first."""
    sizes = ", ".join(str(len(seeds)) for seeds in study.looks(scale))
    lines = [f"Power with {sizes} seeds, at a spread of {spread:.3g} under one seed ({source}):"]
    for rule in rule_powers(study, scale, spread):
        shown = f"{100 * rule.power:.0f} %" if not math.isnan(rule.power) else rule.why
        lines.append(f"  {rule.verdict}: {rule.says}: {shown}")
        if rule.is_hopeless:
            why = rule.why or "this many seeds cannot show it at this spread"
            lines.append(f"  warning: this rule can hardly be met, even when what it says is true: {why}")
    return lines


def true_values(study: Study, branch: Branch, size: float) -> dict[str, float] | None:
    """True values of the arms of which a branch is true, zero on average: signs of `size`, no effect where equivalence
    is asked for, and where only worse or better effects are denied none or, if the signs need it, the smallest that is
    not denied. None where no values are.
    """
    asked = dict(branch.all_of) | dict(branch.any_of[:1])
    linear = {name: condition for name, condition in asked.items() if name in study.weights}
    arms = list(study.arms)
    matrix = np.array([[study.weights[name].get(arm, 0.0) for arm in arms] for name in linear])
    target = np.array([c.target(size, study.directions[name]) for name, c in linear.items()])
    if not len(target):
        return dict.fromkeys(arms, 0.0)
    values, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    if _fits(matrix @ values - target, size):
        return dict(zip(arms, values.tolist(), strict=True))
    signs = np.array([c.open_side * study.directions[name] for name, c in linear.items()], dtype=float)
    values, beyond = _with_room(matrix, target, signs)
    return dict(zip(arms, values.tolist(), strict=True)) if _fits(matrix @ values - target - beyond, size) else None


def simulate(
    study: Study,
    truth: Mapping[str, float],
    sizes: Sequence[int],
    spread: float,
    *,
    noise: Noise = "normal",
    examples: int = 0,
    draws: int = DRAWS,
    seed: int = 0,
    base: float = 0.9,
) -> Simulation:
    """Verdicts of studies whose arms have known values; controls are taken to behave.

    Args:
        study: its rules, margin and family. Every effect that the rules read is a sum of the arms' results. truth:
        true value of each arm, relative to `base`. sizes: numbers of seeds at the looks. spread: standard deviation of
        a difference of two arms under one seed. noise: `normal`; `heavy-tailed`, Student's t with three degrees of
        freedom at the same spread; `discrete`, normal
            seeds seen through `examples` right or wrong test examples, whose share of the spread comes on top.
        examples: size of the test set, for `discrete`.
        draws: number of simulated studies.
        seed: of the random numbers.
        base: accuracy that the arms' values are counted from, for `discrete`.
    """
    rng = np.random.default_rng([seed, draws, sizes[-1]])
    names = list(study.read_effects)
    used = [arm for arm in study.arms if any(study.weights[name].get(arm) for name in names)]
    weights = np.array([[study.weights[name].get(arm, 0.0) for name in names] for arm in used])
    means = np.array([truth[arm] for arm in used])
    values = means + _noise(rng, (draws, sizes[-1], len(used)), spread / math.sqrt(2), noise)
    if noise == "discrete":
        values = rng.binomial(examples, np.clip(base + values, 0, 1)) / examples
    return _judged(study, names, values @ weights, means @ weights, sizes)


def equivalence_power(sd: float, n: int, margin: float, alpha: float = 0.05) -> float:
    """Chance that two one-sided t tests at `alpha` show a difference that is zero to lie within the margin.

    The mean over the distribution of the estimated standard deviation of P(|mean| < margin - t s / sqrt(n)).
    """
    if n < 2:
        return math.nan
    quantiles = (np.arange(2000) + 0.5) / 2000
    s = sd * np.sqrt(special.chdtri(n - 1, 1 - quantiles) / (n - 1))
    room = margin - statistics.t_quantile(n - 1, 1 - 2 * alpha) * s / math.sqrt(n)
    return float(np.mean(np.clip(2 * special.ndtr(room * math.sqrt(n) / sd) - 1, 0, None)))


def seeds_for(sd: float, margin: float, alpha: float = 0.05, power: float = 0.9, most: int = 1000) -> tuple[int, int]:
    """Seeds with which a difference of twice the margin is shown to have its sign, and one of none to be equivalent,
    each with probability `power`; `most` where more are needed.
    """

    def has_sign(n: int) -> bool:
        return statistics.minimum_detectable_effect(sd, n, alpha=alpha, power=power) <= SIGNS * margin

    return (
        _fewest(has_sign, most),
        _fewest(lambda n: equivalence_power(sd, n, margin, alpha) >= power, most),
    )


def _fits(gap: NDArray[np.float64], size: float) -> bool:
    return bool(np.allclose(gap, 0, atol=1e-9 + 1e-6 * abs(size)))


def _with_room(
    matrix: NDArray[np.float64], target: NDArray[np.float64], signs: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Small values with `matrix @ values = target + beyond`, as nearly as there are any; `beyond` has `signs`, and is
    zero where they are.
    """
    count = matrix.shape[1]
    system = np.vstack([np.hstack([matrix, -np.diag(signs)]), RIDGE * np.eye(count + len(signs))])
    lowest = np.concatenate([np.full(count, -np.inf), np.zeros(len(signs))])
    found = optimize.lsq_linear(system, np.concatenate([target, np.zeros(system.shape[1])]), (lowest, np.inf)).x
    return found[:count], signs * found[count:]


def _fewest(is_enough: Callable[[int], bool], most: int) -> int:
    """Smallest number of seeds that is enough, where more are always better; `most` where that is not."""
    low, high = statistics.MIN_SEEDS - 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _noise(rng: np.random.Generator, shape: tuple[int, ...], sd: float, noise: Noise) -> NDArray[np.float64]:
    if noise == "heavy-tailed":
        # Student's t with three degrees of freedom has variance 3.
        return rng.standard_t(3, shape) * (sd / math.sqrt(3))
    return rng.standard_normal(shape) * sd


def _judged(
    study: Study, names: Sequence[str], effects: NDArray[np.float64], true: NDArray[np.float64], sizes: Sequence[int]
) -> Simulation:
    """Apply the rules look by look: the first look that decides ends a study. `effects` is [draws, seeds, effects]."""
    draws, branches = len(effects), study.branches
    alpha = study.decision.alpha / study.family.size
    looks = zip(
        sizes,
        sequential.two_sided_levels(sizes, alpha),
        sequential.one_sided_levels(sizes, alpha),
        strict=True,
    )
    otherwise, inconclusive, insensitive = range(len(branches), len(branches) + 3)
    verdicts, ended = np.full(draws, inconclusive), np.full(draws, sizes[-1])
    is_open = np.ones(draws, bool)
    for n, two_sided, one_sided in looks:
        here = _verdicts(study, names, effects[:, :n], two_sided, one_sided)
        verdicts[is_open], ended[is_open] = here[is_open], n
        is_open &= here >= inconclusive
    truth = dict(zip(names, true.tolist(), strict=True))
    is_true = [branch.is_true_of(truth, study.margin_size, study.directions) for branch in branches]
    rates = np.bincount(verdicts, minlength=insensitive + 1) / draws
    false: dict[str, float] = {}
    for branch, rate, is_right in zip(study.branches, rates.tolist(), is_true, strict=False):
        if not is_right:
            false[branch.verdict] = false.get(branch.verdict, 0.0) + rate
    return Simulation(
        tuple(rates[: len(branches)].tolist()),
        float(rates[otherwise]),
        float(rates[inconclusive]),
        float(rates[insensitive]),
        sum(false.values()),
        max(false.values(), default=0.0),
        float(ended.mean()),
    )


def _verdicts(
    study: Study, names: Sequence[str], effects: NDArray[np.float64], two_sided: float, one_sided: float
) -> NDArray[np.int64]:
    """Number of the rule that each study meets, then `otherwise`, inconclusive, insensitive; see `verdict.decide`."""
    n = effects.shape[1]
    mean, sd = effects.mean(axis=1), effects.std(axis=1, ddof=1)
    wide = statistics.t_quantile(n - 1, 1 - two_sided) * sd / math.sqrt(n)
    narrow = statistics.t_quantile(n - 1, 1 - 2 * one_sided) * sd / math.sqrt(n)
    evidence = {
        name: Evidence(
            (mean - wide)[:, i],
            (mean + wide)[:, i],
            (mean - narrow)[:, i],
            (mean + narrow)[:, i],
            study.margin_size,
            study.directions[name],
        )
        for i, name in enumerate(names)
    }
    count = len(study.branches)
    verdicts = np.full(len(effects), count + 1)
    if study.decision.otherwise is not None:
        verdicts[np.logical_and.reduce([_is_decided(found) for found in evidence.values()])] = count
    for number, branch in reversed(list(enumerate(study.branches))):
        verdicts[branch.holds(evidence)] = number
    verdicts[(sd <= 1e-12).any(axis=1)] = count + 2
    return verdicts


def _is_decided(evidence: Evidence) -> Any:
    return np.logical_or.reduce([evidence.facts[state] for state in sorted(DECIDED)])
