"""Budgets and rules: from scores to a selection.

Shape legend: B batch, N tokens, K kept tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from routing_lab.axes.budget import between, layer_fraction, per_layer, quantile_bounds, topk_count, topk_uncounted
from routing_lab.axes.capacities import (
    ArgmaxConfig,
    ControlledConfig,
    EntropyConfig,
    Evaluate,
    GumbelConfig,
    Interpolation,
    InverseTransformConfig,
    NeverConfig,
    PercentileConfig,
    ProtectCount,
    Rounding,
    Shape,
    ThresholdConfig,
    TopKConfig,
)
from routing_lab.axes.facts import CapacityTraits, ScoreScale
from routing_lab.routing.base import Capacity, LayerSpec, RunState, log_odds
from routing_lab.routing.tokens import Selection


class FractionCapacity(Capacity):
    """A rule that keeps a stated fraction of the tokens.

    Args:
        fraction: fraction of tokens to keep, in (0, 1], or one per routed layer.
        fraction_last: with depth_schedule, the fraction of the last routed layer.
        depth_schedule: `constant`; from `fraction` at the first routed layer to `fraction_last` at the last, `linear`
            or along half a `cosine`; or `power`: fraction, fraction^2, ... from one routed layer to the next.
        warmup: part of training, in [0, 1), after which the fraction has its value; before, it moves there from
            `warmup_start`.
        warmup_hold: part of training, below warmup, in which the fraction stays at `warmup_start` before it moves.
        warmup_start: fraction at the start of training.
        warmup_shape: `linear` or `cosine`.
        scope: the budget holds in every `sample`, or over the `batch`, where samples may keep different numbers.
        order, protect: as for every capacity.
    """

    def __init__(
        self,
        spec: LayerSpec,
        *,
        fraction: float | Sequence[float] = 0.5,
        fraction_last: float | None = None,
        depth_schedule: Literal["constant", "linear", "cosine", "power"] = "constant",
        warmup: float = 0.0,
        warmup_hold: float = 0.0,
        warmup_start: float = 1.0,
        warmup_shape: Shape = "linear",
        scope: Literal["sample", "batch"] = "sample",
        **common: Any,
    ) -> None:
        super().__init__(spec, **common)
        self.fraction = layer_fraction(fraction, spec.rank, spec.num_routed, fraction_last, depth_schedule)
        self.warmup = warmup
        self.warmup_hold = warmup_hold
        self.warmup_start = warmup_start
        self.warmup_shape: Shape = warmup_shape
        self.scope = scope

    def aimed_fraction(self, progress: float) -> float:
        return self.current_fraction(progress)

    def current_fraction(self, progress: float) -> float:
        """The fraction in force when training has come as far as `progress` in [0, 1]."""
        if progress >= self.warmup:
            return self.fraction
        position = max(0.0, progress - self.warmup_hold) / (self.warmup - self.warmup_hold)
        return between(self.warmup_start, self.fraction, position, self.warmup_shape)


class TopK(FractionCapacity):
    """Keeps the k best tokens, k = fraction x N rounded; of equal scores the first tokens.

    Args:
        rounding: `floor`, `ceil` or `round` (half up) of fraction x N.
        count: N is the number of tokens that enter the layer (`current`) or that entered the first layer (`initial`).
        count_prefix: whether the prefix tokens count in N and in k; if not, k patches are kept besides those protected
            (EViT, DynamicViT).
        protect_count: whether the protected tokens count in N and in k, `inside` the budget, or are kept `beside` it;
            with protect=prefix the same as count_prefix.
        evaluate: in evaluation, `budget`: the k best; `choice`: the tokens for which the router itself decides,
            whatever their number, which needs no later token (Mixture-of-Depths, section 3.5).
        boundary: for `choice`, the score at which the router's decision flips; a tie is not kept.
        others: as for every capacity with a fraction.
    """

    traits: ClassVar[CapacityTraits] = TopKConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        rounding: Rounding = "floor",
        count: Literal["current", "initial"] = "current",
        count_prefix: bool = True,
        protect_count: ProtectCount = "inside",
        evaluate: Evaluate = "budget",
        boundary: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self.rounding: Rounding = rounding
        self.count = count
        self.boundary = _own_boundary(self, evaluate, boundary)
        self.compares = self.boundary is None
        self.num_uncounted = topk_uncounted(len(spec.prefix), self.num_protected, count_prefix, protect_count)

    def forward(self, scores: Tensor, state: RunState, valid: Tensor | None = None) -> Selection:
        if state.training or self.boundary is None:
            return super().forward(scores, state, valid)
        scores = scores if self.order == "highest" else -scores
        kept = scores.detach() > self.boundary
        return _keep(kept, self.num_protected, valid)

    def select(self, scores: Tensor, state: RunState) -> Selection:
        return _best(scores, self._count(scores.shape[1], state), self.num_protected, self.scope)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        return _best_present(scores, valid, partial(self._count, state=state), self.num_protected)

    def _count(self, tokens: int, state: RunState) -> int:
        return topk_count(
            self.current_fraction(state.progress),
            self.rounding,
            tokens,
            base=tokens if self.count == "current" else state.initial_tokens,
            num_uncounted=self.num_uncounted,
            num_protected=self.num_protected,
        )


class Percentile(FractionCapacity):
    """Keeps r_i >= P_beta(R) with beta = 1 - fraction (A-MoD), or r_i > P_beta(R) (Mixture-of-Depths).

    Protected tokens are kept whatever their scores. Equal scores share their fate, so that samples may keep different
    numbers; constant scores keep all with `ge` and none with `gt`.

    Args:
        compare: `ge` or `gt`.
        interpolation: of the quantile, as numpy names them: linear, lower, higher, midpoint, nearest.
        protect_count: the quantile is that of all scores, with the protected tokens `inside`, whose scores then decide
            how many others are kept; or of the other scores, with the protected tokens `beside` the budget.
        others: as for every capacity with a fraction.
    """

    traits: ClassVar[CapacityTraits] = PercentileConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        compare: Literal["ge", "gt"] = "ge",
        interpolation: Interpolation = "linear",
        protect_count: ProtectCount = "inside",
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self.num_uncounted = self.num_protected if protect_count == "beside" else 0
        self.compare = compare
        self.interpolation: Interpolation = interpolation

    def select(self, scores: Tensor, state: RunState) -> Selection:
        beta = 1 - self.current_fraction(state.progress)
        counted = scores[:, self.num_uncounted :]
        if counted.numel() == 0:
            return _keep(torch.ones_like(scores, dtype=torch.bool), 0)
        pool = counted if self.scope == "sample" else counted.flatten().unsqueeze(0)
        return _keep(self._passes(scores, quantile(pool, beta, self.interpolation)), self.num_protected)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        beta = 1 - self.current_fraction(state.progress)
        counted, free = scores[:, self.num_uncounted :], valid[:, self.num_uncounted :]
        if counted.numel() == 0:
            return Selection.from_mask(valid)
        bounds = [(0, 0, 0.0), *(quantile_bounds(beta, n, self.interpolation) for n in range(1, free.shape[1] + 1))]
        number = free.sum(dim=1, keepdim=True)
        low, high, weight = torch.tensor(bounds, dtype=torch.float64, device=scores.device)[number].unbind(dim=-1)
        ordered = counted.masked_fill(~free, float("inf")).sort(dim=1).values
        below, above = ordered.gather(1, low.long()), ordered.gather(1, high.long())
        threshold = torch.where(low == high, below, torch.lerp(below, above, weight.to(scores.dtype)))
        return _keep(self._passes(scores, threshold), self.num_protected, valid)

    def _passes(self, scores: Tensor, threshold: Tensor) -> Tensor:
        return scores > threshold if self.compare == "gt" else scores >= threshold


class Threshold(Capacity):
    """Keeps scores of at least a fixed threshold (with order=lowest: of at most).

    Args:
        threshold: the score, or one per routed layer.
        order, protect: as for every capacity.
    """

    traits: ClassVar[CapacityTraits] = ThresholdConfig.facts

    def __init__(self, spec: LayerSpec, *, threshold: float | Sequence[float] = 0.5, **common: Any) -> None:
        super().__init__(spec, **common)
        value = per_layer(threshold, spec.rank, spec.num_routed, "capacity.threshold")
        self.threshold = value if self.order == "highest" else -value

    def select(self, scores: Tensor, state: RunState) -> Selection:
        return _keep(scores >= self.threshold, self.num_protected)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        return _keep(scores >= self.threshold, self.num_protected, valid)


class Controlled(Capacity):
    """Keeps scores of at least a threshold that training moves until a fraction of the tokens is kept.

    After each training step the threshold changes by rate x (fraction kept - target): a budget without a loss, met by
    every layer for itself, and a rule that looks at no other token. Kept in checkpoints; evaluation takes the last one.

    Args:
        target: fraction of the tokens to keep.
        rate: of the controller.
        start: threshold at the beginning.
        order, protect: as for every capacity.
    """

    traits: ClassVar[CapacityTraits] = ControlledConfig.facts
    threshold: Tensor

    def __init__(
        self, spec: LayerSpec, *, target: float = 0.1, rate: float = 0.01, start: float = 0.5, **common: Any
    ) -> None:
        super().__init__(spec, **common)
        self.target = target
        self.rate = rate
        start = start if self.order == "highest" else -start
        self.register_buffer("threshold", torch.tensor(start, dtype=torch.float64))

    def aimed_fraction(self, progress: float) -> float:
        return self.target

    def select(self, scores: Tensor, state: RunState) -> Selection:
        return self.select_ragged(scores, torch.ones_like(scores, dtype=torch.bool), state)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        kept = (scores >= self.threshold) & valid
        if state.training:
            share = torch.stack([kept.sum(), valid.sum()]).double()
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(share)
            # Out of place: a recomputed layer finds the threshold that its first forward had where autograd kept it.
            self.threshold = self.threshold + self.rate * (share[0] / share[1].clamp_min(1) - self.target)
        return _keep(kept, self.num_protected, valid)


class Argmax(Capacity):
    """Token choice: keeps the tokens for which the router itself prefers to attend, p > 0.5 (DTRNet, Eq. 2).

    Args:
        boundary: score at which the router's decision flips; a tie is not kept.
        force: in training, where a layer would keep none of the batch's tokens, this fraction of each sample's at
            random instead, rounded up, so that its router goes on learning (DTRNet's code: 0.15).
        order, protect: as for every capacity.
    """

    traits: ClassVar[CapacityTraits] = ArgmaxConfig.facts

    def __init__(self, spec: LayerSpec, *, boundary: float, force: float = 0.0, **common: Any) -> None:
        super().__init__(spec, **common)
        self.boundary = boundary if self.order == "highest" else -boundary
        self.force = force

    def select(self, scores: Tensor, state: RunState) -> Selection:
        return _keep(self._forced(scores > self.boundary, state), self.num_protected)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        return _keep(self._forced((scores > self.boundary) & valid, state), self.num_protected, valid)

    def _forced(self, mask: Tensor, state: RunState) -> Tensor:
        if not self.force or not state.training or mask[:, self.num_protected :].any():
            return mask
        tokens = mask.shape[1]
        noise = state.noise.uniform(tokens, self.spec.seed, self.spec.layer)
        kept = topk_count(self.force, "ceil", tokens, base=tokens, num_uncounted=0, num_protected=self.num_protected)
        return _best(noise, kept, self.num_protected, "sample").mask()


class Never(Capacity):
    """Keeps no token but the protected ones: every other gets the bypass (DTRNet, ablation A3)."""

    traits: ClassVar[CapacityTraits] = NeverConfig.facts

    def select(self, scores: Tensor, state: RunState) -> Selection:
        return Selection.first(scores.shape[0], self.num_protected, scores.shape[1], scores.device)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        return _keep(torch.zeros_like(valid), self.num_protected, valid)


class Gumbel(FractionCapacity):
    """Draws every token's decision in training, keeps the best tokens in evaluation (DynamicViT, Rao et al. 2021).

    Training: d = [l + g_0 - g_1 >= 0] with l the log odds of keeping that the score stands for and g standard Gumbel
    noise (counter-based, see `NoiseSource`); the gradient is that of sigmoid((l + g_0 - g_1) / T), the hard
    straight-through Gumbel-softmax. The number of kept tokens is free: a loss such as `losses=ratio` is to hold it at
    the fraction.

    Evaluation: the k best tokens besides the protected prefix, k = fraction x the number of patches that entered the
    first layer, rounded.

    Args:
        temperature: T.
        rounding: `floor`, `ceil` or `round` (half up).
        scale: what the router's score says about keeping, see `RouterTraits.scale`.
        evaluate: in evaluation, `budget`: as above; `choice`: the tokens that are at least as likely kept as
            not (D-LLM).
        boundary: for `choice`, the score at which the router's decision flips.
        others: as for every capacity with a fraction.
    """

    traits: ClassVar[CapacityTraits] = GumbelConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        scale: ScoreScale,
        temperature: float = 1.0,
        rounding: Rounding = "floor",
        evaluate: Evaluate = "budget",
        boundary: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self.boundary = _own_boundary(self, evaluate, boundary)
        self.compares = self.boundary is None
        self.scale: ScoreScale = scale
        self.temperature = temperature
        self.rounding: Rounding = rounding

    def forward(self, scores: Tensor, state: RunState, valid: Tensor | None = None) -> Selection:
        if not state.training:
            if self.boundary is None:
                return super().forward(scores, state, valid)
            kept = (scores if self.order == "highest" else -scores).detach() >= self.boundary
            return _keep(kept, self.num_protected, valid)
        odds = log_odds(scores, self.scale)
        if self.order == "lowest":
            odds = -odds
        noise = state.noise.gumbel(scores.shape[1], self.spec.seed, self.spec.layer).to(odds.dtype)
        odds = odds + noise[..., 0] - noise[..., 1]
        free = torch.arange(scores.shape[1], device=scores.device) >= self.num_protected
        kept = (odds >= 0) | ~free
        soft = (odds / self.temperature).sigmoid() * free
        selection = Selection.from_mask(kept if valid is None else kept & valid)
        selection.relaxed = kept.to(soft.dtype) + (soft - soft.detach())
        return selection

    def select(self, scores: Tensor, state: RunState) -> Selection:
        return _best(scores, self._count(scores.shape[1], state), self.num_protected, self.scope)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        return _best_present(scores, valid, partial(self._count, state=state), self.num_protected)

    def _count(self, tokens: int, state: RunState) -> int:
        return topk_count(
            self.current_fraction(state.progress),
            self.rounding,
            tokens,
            base=state.initial_tokens,
            num_uncounted=len(self.spec.prefix),
            num_protected=self.num_protected,
        )


class InverseTransform(FractionCapacity):
    """Samples tokens in proportion to their scores, without chance, and keeps each that is hit (ATS, Fayyaz et al.
    2022).

    The cumulative sums of the scores of the unprotected tokens, moved and scaled to [0, 1], are inverted at K points,
    K = fraction x N rounded: each point hits the token whose cumulative sum is nearest, the first of equals. Tokens hit
    several times are kept once: the more uneven the scores, the fewer are kept. Protected tokens are kept besides.

    Args:
        points: `ends`: c_1 + (1 - c_1) k / (K - 1), k = 0 .. K - 1, with c_1 the smallest positive cumulative sum
            (ATS's code); `middles`: (2 k + 1) / (2 K) (the paper).
        sort: sum up from the smallest score to the largest (ATS's code); false: in the order of the tokens (the paper).
        at_least: smallest K, as far as there are tokens.
        count: N is the number of unprotected tokens that enter the layer (`current`) or entered the first (`initial`).
        others: as for every capacity with a fraction; the scope is always the sample.
    """

    traits: ClassVar[CapacityTraits] = InverseTransformConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        points: Literal["ends", "middles"] = "ends",
        sort: bool = True,
        at_least: int = 8,
        count: Literal["current", "initial"] = "current",
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self.points = points
        self.sort = sort
        self.at_least = at_least
        self.count = count

    def select(self, scores: Tensor, state: RunState) -> Selection:
        return self.select_ragged(scores, torch.ones_like(scores, dtype=torch.bool), state)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        first = self.num_protected
        scores, free = scores[:, first:], valid[:, first:]
        present = free.sum(dim=1, keepdim=True)
        base = present if self.count == "current" else torch.full_like(present, state.initial_tokens - first)
        wanted = (self.current_fraction(state.progress) * base).round().clamp_min(self.at_least)
        points = torch.minimum(wanted, present.to(wanted.dtype))
        largest = scores.shape[1] if self.count == "current" else state.initial_tokens - first
        most = max(self.at_least, math.ceil(self.current_fraction(state.progress) * largest))
        most = min(most, scores.shape[1])
        # Padding comes last: it adds nothing, and is never the first of equals.
        key = scores if self.sort else torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
        order = key.masked_fill(~free, float("inf") if self.sort else scores.shape[1]).argsort(dim=1, stable=True)
        summed_up = scores.clamp_min(0).masked_fill(~free, 0).gather(1, order)
        hits = self._hits(summed_up, free.gather(1, order), points, most)
        mask = torch.zeros_like(free).scatter(1, order, hits)
        return _keep(torch.cat([valid[:, :first], mask], dim=1), 0, most=first + most)

    def _hits(self, scores: Tensor, free: Tensor, points: Tensor, most: int) -> Tensor:
        """[B, M] bool: which of the summed-up tokens are hit. points [B, 1]: K, of which none is above `most`."""
        if scores.numel() == 0:
            return torch.zeros_like(free)
        summed = scores.double().cumsum(dim=1)
        low, high = summed[:, :1], summed[:, -1:]
        summed = (summed - low) / (high - low).clamp_min(torch.finfo(summed.dtype).tiny)
        number = torch.arange(most, device=scores.device).expand(len(scores), -1)
        if self.points == "middles":
            at = (2 * number + 1) / (2 * points)
        else:
            start = summed.masked_fill(summed <= 0, float("inf")).amin(dim=1, keepdim=True).clamp_max(1)
            at = start + (1 - start) * number / (points - 1).clamp_min(1)
        distance = (at.unsqueeze(2) - summed.unsqueeze(1)).abs().masked_fill(~free.unsqueeze(1), float("inf"))
        nearest = distance.argmin(dim=2)
        counted = (number < points).to(torch.int32)
        return torch.zeros_like(scores, dtype=torch.int32).scatter_add(1, nearest, counted) > 0


class Entropy(Capacity):
    """Keeps as many of the best tokens as the scores are spread over: a budget of its own for every layer and sample.

    k = share x exp(H) rounded, H = -sum_i p_i log p_i with p_i = r_i / sum_j r_j over the unprotected tokens: exp(H) is
    their number where scores are equal and 1 where one token has them all. Protected tokens are kept besides.

    Args:
        share: part of the effective number of tokens exp(H) to keep; above 1 more than those.
        at_least: smallest k, as far as there are tokens.
        order, protect: as for every capacity.
    """

    traits: ClassVar[CapacityTraits] = EntropyConfig.facts

    def __init__(self, spec: LayerSpec, *, share: float = 0.5, at_least: int = 1, **common: Any) -> None:
        super().__init__(spec, **common)
        self.share = share
        self.at_least = at_least

    def select(self, scores: Tensor, state: RunState) -> Selection:
        return self.select_ragged(scores, torch.ones_like(scores, dtype=torch.bool), state)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        place = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
        free = valid & (place >= self.num_protected)
        weight = scores.clamp_min(0).masked_fill(~free, 0)
        p = weight / weight.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        spread = torch.special.entr(p).sum(dim=1, keepdim=True).exp()
        kept = (self.share * spread).round().clamp_min(self.at_least)
        order = scores.masked_fill(~free, float("-inf")).argsort(dim=1, descending=True, stable=True)
        rank = torch.zeros_like(order).scatter(1, order, place)
        return _keep((rank < kept) & free, self.num_protected, valid)


def quantile(scores: Tensor, beta: float, interpolation: Interpolation = "linear") -> Tensor:
    """[B, 1] the beta-quantile of each row of scores [B, N], as `numpy.quantile`."""
    ordered = scores.sort(dim=1).values
    low, high, weight = quantile_bounds(beta, scores.shape[1], interpolation)
    below, above = ordered[:, low : low + 1], ordered[:, high : high + 1]
    return below if low == high else torch.lerp(below, above, weight)


def _own_boundary(capacity: Capacity, evaluate: Evaluate, boundary: float | None) -> float | None:
    """The score, `order` applied, at which a router's own decision flips; None where the budget decides."""
    if evaluate == "budget":
        return None
    if boundary is None:
        raise ValueError("capacity.evaluate = choice: the router decides nothing by itself")
    return boundary if capacity.order == "highest" else -boundary


def _best(scores: Tensor, kept: int, num_protected: int, scope: str) -> Selection:
    """The `kept` best tokens of every sample, or of the batch on average; protected ones first, of equals the first."""
    batch, tokens = scores.shape
    if kept == tokens:
        return Selection.first(batch, tokens, tokens, scores.device)
    scores = _protect(scores, num_protected)
    if scope == "batch":
        order = torch.sort(scores.flatten(), descending=True, stable=True).indices[: kept * batch]
        mask = torch.zeros(batch * tokens, dtype=torch.bool, device=scores.device)
        return Selection.from_mask(mask.index_fill(0, order, True).view(batch, tokens))
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :kept]
    return Selection(order.sort(dim=1).values, None, tokens)


def _best_present(scores: Tensor, valid: Tensor, count: Callable[[int], int], num_protected: int) -> Selection:
    """`_best` of the tokens that each sample has, of n tokens the `count(n)` best."""
    tokens = scores.shape[1]
    wanted = torch.tensor([count(n) for n in range(tokens + 1)], device=scores.device)[valid.sum(dim=1, keepdim=True)]
    order = torch.sort(_protect(scores, num_protected), dim=1, descending=True, stable=True).indices
    present_first = torch.sort((~valid.gather(1, order)).to(torch.uint8), dim=1, stable=True).indices
    ranked = torch.arange(tokens, device=scores.device) < wanted
    return Selection.from_mask(torch.zeros_like(valid).scatter(1, order.gather(1, present_first), ranked))


def _protect(scores: Tensor, num_protected: int) -> Tensor:
    if num_protected == 0:
        return scores
    return nn.functional.pad(scores[:, num_protected:], (num_protected, 0), value=float("inf"))


def _keep(mask: Tensor, num_protected: int, valid: Tensor | None = None, most: int | None = None) -> Selection:
    """The True positions of a mask and the protected tokens, padding apart; most: see `Selection.from_mask`."""
    if num_protected:
        mask = torch.cat([torch.ones_like(mask[:, :num_protected]), mask[:, num_protected:]], dim=1)
    return Selection.from_mask(mask if valid is None else mask & valid, most)
