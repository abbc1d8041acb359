"""Looking at results more than once without looking until they please: alpha spending for group-sequential designs.

A look at n of N seeds may spend as much of the error rate as the spending function of Lan and DeMets (1983) of the
O'Brien-Fleming type allows, f(t) = 2 (1 - Phi(z_{alpha/2} / sqrt(t))) with t = n / N: next to nothing early, alpha at
the end. The level of each look follows by recursive integration over the looks before (Armitage, McPherson and Rowe,
1969), for a Brownian motion; the t tests of the looks are made at these levels (Jennison and Turnbull, 2000, section
3.8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy import special

GRID = 801
"""Points of the integration over the partial sums that have not crossed."""


def spent(fraction: float, alpha: float) -> float:
    """Part of a one-sided error rate that may have been spent when `fraction` of the seeds have run."""
    return float(2 * special.ndtr(-special.ndtri(1 - alpha / 2) / math.sqrt(fraction)))


def one_sided_levels(looks: Sequence[int], alpha: float) -> tuple[float, ...]:
    """Level of the one-sided test at each look, so that the chance of ever rejecting a true hypothesis is `alpha`.

    Args:
        looks: numbers of seeds at which the study is looked at, ascending; the last one ends it.
        alpha: one-sided error rate over all looks.
    """
    return _levels(tuple(looks), alpha)


def two_sided_levels(looks: Sequence[int], alpha: float) -> tuple[float, ...]:
    """Level of the two-sided test at each look: both sides spend half of `alpha`."""
    return tuple(2 * level for level in _levels(tuple(looks), alpha / 2))


@lru_cache(maxsize=128)
def _levels(looks: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    if len(looks) == 1:
        return (alpha,)
    times = np.asarray(looks, float) / looks[-1]
    levels = []
    grid, density = np.zeros(1), np.ones(1)
    before = 0.0
    for i, time in enumerate(times):
        step = math.sqrt(time - (times[i - 1] if i else 0.0))
        target = spent(float(time), alpha) - before
        boundary = _boundary(grid, density, step, target)
        levels.append(float(special.ndtr(-boundary / math.sqrt(time))))
        before += target
        # The density of the sums that go on, on a grid up to the boundary; weights are those of Simpson's rule.
        points = np.linspace(-8 * math.sqrt(time), boundary, GRID)
        moved = np.exp(-(((points[:, None] - grid) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi)) @ density
        density, grid = moved * _simpson(points), points
    return tuple(levels)


def _boundary(grid: np.ndarray, weighted: np.ndarray, step: float, target: float) -> float:
    """Where a sum that starts from the weighted grid crosses with probability `target` in one step."""
    from scipy.optimize import brentq

    def crossing(boundary: float) -> float:
        return float(special.ndtr((grid - boundary) / step) @ weighted) - target

    return float(brentq(crossing, -10.0, 40.0, xtol=1e-10))


def _simpson(points: np.ndarray) -> np.ndarray:
    weights = np.full(len(points), 2.0)
    weights[1::2] = 4.0
    weights[[0, -1]] = 1.0
    return weights * (points[1] - points[0]) / 3
