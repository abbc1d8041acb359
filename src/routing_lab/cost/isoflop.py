"""Dense models of a given cost: how many layers, or which width, a baseline needs. Imports no torch.

Costs are multiply-accumulates under the convention of `routing_lab.cost.macs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from routing_lab.cost.macs import ModelShape, dense_macs


def solve_depth(full: ModelShape, target: float) -> ModelShape:
    """The model with as many layers of `full`, at least one and at most all, as come closest to the target cost."""
    return _closest((replace(full, depth=depth) for depth in range(1, full.depth + 1)), target)


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

    step = _last_below(lambda number: dense_macs(resized(number)).total <= target)
    shape = _closest((resized(number) for number in (max(1, step), step + 1)), target)
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


def _closest(shapes: Iterable[ModelShape], target: float) -> ModelShape:
    return min(shapes, key=lambda shape: abs(dense_macs(shape).total - target))


def _last_below(is_below: Callable[[int], bool]) -> int:
    """The largest number for which a falling condition holds, 0 if it holds for none."""
    high = 1
    while is_below(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low
