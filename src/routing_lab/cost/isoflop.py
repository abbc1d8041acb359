"""Which size costs what it should: the number that a knob of any configuration needs, and the layers or the width of a
dense baseline. Imports no torch.

Costs are multiply-accumulates under the convention of `routing_lab.cost.macs`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import count
from typing import Literal

from routing_lab.cost.macs import ModelShape, dense_macs


def closest(cost: Callable[[int], float], target: float, low: int, high: int | None = None) -> range:
    """The numbers that come closest to a target cost: neighbours of equal cost, the cheaper ones of two equally close.

    Args:
        cost: of a number; it rises, or falls, over the whole range, and may stay where it is in between.
        target: the cost wanted.
        low, high: the range, both included. high None: as far as the target is reached, of a cost that rises for good.
    """
    cost = cache(cost)
    if high is None:
        high = next(number for number in (max(low, 1) * 2**power for power in count()) if cost(number) >= target)
    numbers = range(low, high + 1)
    sign = 1 if cost(low) <= cost(high) else -1

    def rising(number: int) -> float:
        return sign * cost(number)

    above = bisect_right(numbers, sign * target, key=rising)
    around = numbers[max(0, above - 1) : above + 1]
    found = min((cost(number) for number in around), key=lambda macs: (abs(macs - target), macs))
    return numbers[bisect_left(numbers, sign * found, key=rising) : bisect_right(numbers, sign * found, key=rising)]


def solve_depth(full: ModelShape, target: float) -> ModelShape:
    """The model with as many layers of `full`, at least one and at most all, as come closest to the target cost."""
    depths = closest(lambda depth: dense_macs(replace(full, depth=depth)).total, target, 1, full.depth)
    return replace(full, depth=depths[0])


def solve_width(full: ModelShape, target: float, mlp: Literal["keep", "adjust"] = "adjust") -> ModelShape:
    """The model with the depth and heads of `full` whose width comes closest to the target cost.

    Args:
        full: the model whose width is changed; a head's width changes with it.
        target: the cost wanted.
        mlp: `keep`: the MLP stays as many times wider than the residual stream as in `full`; the width is the nearest
            multiple of the heads. `adjust`: at that width the MLP's own takes up the rest of the gap.
    """
    ratio = Fraction(full.mlp_hidden, full.width)

    def resized(step: int) -> ModelShape:
        width = step * full.heads
        return replace(full, width=width, mlp_hidden=max(1, math.floor(width * ratio)), head_dim=None)

    shape = resized(closest(lambda step: dense_macs(resized(step)).total, target, 1)[0])
    if mlp == "keep":
        return shape
    one = shape.depth * shape.tokens * shape.mlp_matrices * shape.width
    hidden = shape.mlp_hidden + round((target - dense_macs(shape).total) / one)
    return replace(shape, mlp_hidden=max(1, hidden))


def chosen_layers(full_depth: int, depth: int, rule: Literal["first", "uniform"]) -> list[int]:
    """Zero-based layers that a shallower model takes over: the first ones, or evenly spaced ones from first to last."""
    if not 1 <= depth <= full_depth:
        raise ValueError(f"depth = {depth}: must lie between 1 and {full_depth}")
    if rule == "first" or depth == 1:
        return list(range(depth))
    return [math.floor(rank * (full_depth - 1) / (depth - 1) + 0.5) for rank in range(depth)]
