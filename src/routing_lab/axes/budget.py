"""How many tokens a rule keeps or merges: whole numbers, without torch, for the layers and for the cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """What a routed layer may choose from, in evaluation, before any score is known.

    tokens: tokens that may be kept. first_tokens: those that entered the first layer. prefix: prefix tokens among
    either. rank: position of the layer among the `num_routed` routed ones.
    """

    tokens: int
    first_tokens: int
    prefix: int
    rank: int
    num_routed: int


def layer_fraction(
    fraction: float | Sequence[float], rank: int, num_routed: int, last: float | None = None, schedule: str = "constant"
) -> float:
    """The fraction of the routed layer number `rank` out of `num_routed`, from a number, a list or a depth schedule."""
    if schedule == "constant":
        return per_layer(fraction, rank, num_routed, "capacity.fraction")
    first = per_layer(fraction, 0, num_routed, "capacity.fraction")
    if schedule == "power":
        return first ** (rank + 1)
    if last is None:
        raise ValueError(
            f"capacity.depth_schedule = {schedule}: needs capacity.fraction_last, the fraction of the last routed layer"
        )
    position = rank / (num_routed - 1) if num_routed > 1 else 0.0
    return between(first, last, position, schedule)


def topk_count(
    fraction: float,
    rounding: str,
    tokens: int,
    *,
    base: int | None = None,
    num_uncounted: int = 0,
    num_protected: int = 0,
) -> int:
    """How many of `tokens` tokens top-k keeps: fraction x N rounded, with every protected token and at least one.

    Args:
        base: the N that the fraction is taken of; None: `tokens`.
        num_uncounted: prefix tokens that count neither in N nor in k; the protected ones are kept besides.
        num_protected: tokens that are always kept.
    """
    kept = round_count(fraction * ((tokens if base is None else base) - num_uncounted), rounding)
    kept += min(num_uncounted, num_protected)
    return min(max(kept, num_protected, 1), tokens)


def topk_uncounted(num_prefix: int, num_protected: int, count_prefix: bool, protect_count: str) -> int:
    """How many prefix tokens top-k leaves out of N and of k: all of them, the protected ones, or none."""
    if not count_prefix:
        return num_prefix
    return num_protected if protect_count == "beside" else 0


def percentile_count(
    fraction: float, tokens: int, compare: str = "ge", interpolation: str = "linear", *, num_uncounted: int = 0
) -> int:
    """How many of `tokens` distinct scores lie at (`ge`) or above (`gt`) their (1 - fraction)-quantile.

    Args:
        num_uncounted: tokens whose scores take no part in the quantile and that are kept besides.
    """
    tokens -= num_uncounted
    if tokens == 0:
        return num_uncounted
    low, high, _ = quantile_bounds(1 - fraction, tokens, interpolation)
    # Between two scores the comparison does not matter; on one, `gt` leaves it out.
    return num_uncounted + tokens - high - (1 if low == high and compare == "gt" else 0)


def quantile_bounds(beta: float, tokens: int, interpolation: str = "linear") -> tuple[int, int, float]:
    """Ranks, from 0 for the lowest, of the two scores between which the beta-quantile lies, and the second's weight.

    The position beta (N - 1) is computed in double precision and snapped to a whole number that it misses by rounding
    noise: in single precision a threshold meant to equal a score falls beside it, and the comparison goes wrong.
    """
    position = beta * (tokens - 1)
    if abs(position - round(position)) < 1e-9 * max(1.0, position):
        position = float(round(position))
    low, high = math.floor(position), math.ceil(position)
    if interpolation == "lower":
        high = low
    elif interpolation == "higher":
        low = high
    elif interpolation == "nearest":
        low = high = round(position)
    return low, high, 0.5 if interpolation == "midpoint" else position - low


def merge_schedule(merged: float | Sequence[int], inflect: float, tokens: int, num_layers: int) -> list[int]:
    """Tokens to merge in each of `num_layers` layers (ToMe's `r`), before each layer's own limit.

    Args:
        merged: r of every layer, a list with one r a layer, or below 1 a fraction of `tokens`, rounded.
        inflect: slope over depth: from r (1 - inflect), truncated, in the first layer to its mirror image in the last;
            -1 from 2r down to 0, 0 constant, 1 from 0 up to 2r. A list ignores it.
        tokens: number of tokens that enter the first layer.
    """
    if not isinstance(merged, (int, float)):
        if len(merged) != num_layers:
            raise ValueError(f"bypass.merged = {list(merged)}: {len(merged)} entries for {num_layers} routed layers")
        return list(merged)
    count = merged if isinstance(merged, int) else round_count(merged * tokens, "round")
    first = int(count * (1.0 - inflect))
    last = 2 * count - first
    step = (last - first) / max(1, num_layers - 1)
    return [int(first + step * layer) for layer in range(num_layers)]


def merge_count(wanted: int, tokens: int, num_prefix: int) -> int:
    """How many of `tokens` tokens are merged away: at most half of those behind the prefix."""
    return max(0, min(wanted, (tokens - num_prefix) // 2))


def round_count(value: float, rounding: str) -> int:
    """`value` as a whole number of tokens; products that miss a whole number by rounding noise count as that number."""
    nearest = round(value)
    if abs(value - nearest) < 1e-9 * max(1.0, abs(value)):
        return nearest
    return {"floor": math.floor, "ceil": math.ceil, "round": lambda v: math.floor(v + 0.5)}[rounding](value)


def per_layer(value: float | Sequence[float], rank: int, num_routed: int, key: str) -> float:
    """The value of routed layer number `rank`, from one for all or a list; an error names it by `key`."""
    if isinstance(value, (int, float)):
        return float(value)
    if len(value) != num_routed:
        raise ValueError(f"{key} = {list(value)}: {len(value)} entries for {num_routed} routed layers")
    return float(value[rank])


def between(start: float, end: float, position: float, shape: str) -> float:
    """From start at position 0 to end at position 1, `linear` or along half a `cosine`."""
    if shape == "cosine":
        position = (1 - math.cos(math.pi * position)) / 2
    return start + (end - start) * position
