"""Merging: similar tokens become one, their mean weighted by how many tokens each already stands for.

Shape legend: B batch, N tokens, R merged tokens, N' tokens that leave, D width, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from routing_lab.attention import AttentionStatistics, StatisticsRequest
from routing_lab.axes.budget import merge_count, merge_schedule
from routing_lab.axes.bypasses import MergeConfig
from routing_lab.axes.facts import BypassTraits
from routing_lab.routing.base import LayerSpec, Reduction
from routing_lab.routing.tokens import Selection, Tokens


class Merge(Reduction):
    """Bipartite soft matching (ToMe): tokens that were not kept are gone, of the kept ones the most similar are merged.

    Similarity is the cosine of the keys of this layer, averaged over heads. Tokens at even positions are matched with
    those at odd positions, see `bipartite_matching`. The prefix tokens take no part. Remaining tokens are ordered:
    prefix, unmerged tokens at even positions, tokens at odd positions. The matching carries no gradient.

    Args:
        spec: the layer; its rank among the routed ones finds its number in a schedule.
        merged: tokens merged away in each layer (ToMe's r), a list with a number for each routed layer, or below 1 a
            fraction of the tokens that entered the first layer. At most half of those behind the prefix are merged.
        threshold: of these pairs those are merged whose similarity, in [-1, 1], is at least this, so that samples merge
            different numbers; with `merged=0.5` it decides alone. None: all of them.
        inflect: slope of that number over depth, see `merge_schedule`: -1 falls to 0, 0 is constant, 1 rises from 0.
        proportional: later layers add log(size) to the logits of each key.
    """

    traits: ClassVar[BypassTraits] = MergeConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        merged: float | Sequence[int] = 0.066,
        threshold: float | None = None,
        inflect: float = 0.0,
        proportional: bool = True,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.merged = merged
        self.threshold = threshold
        self.inflect = inflect
        self.proportional = proportional

    def request(self) -> StatisticsRequest:
        return StatisticsRequest(key_mean=True)

    def reduce(
        self, tokens: Tokens, selection: Selection, scores: Tensor, attention: AttentionStatistics | None
    ) -> Tokens:
        assert attention is not None
        assert attention.key_mean is not None
        kept = tokens.keep(selection)
        first_tokens = tokens.sources().shape[1]
        wanted = merge_schedule(self.merged, self.inflect, first_tokens, self.spec.num_routed)[self.spec.rank]
        count = merge_count(wanted, kept.x.shape[1], kept.num_prefix)
        if count == 0:
            return kept
        metric = selection.gather(attention.key_mean)
        matching = bipartite_matching(metric, count, kept.num_prefix, kept.valid, self.threshold)
        return replace(merge(kept, matching), proportional=self.proportional)


@dataclass
class Matching:
    """Which tokens are merged into which.

    Args:
        index: [B, R] int64, tokens that are merged away, at even positions.
        target: [B, R] int64, the token at an odd position that each of them joins.
        valid: [B, R] bool, False where a sample merges fewer tokens; None when every sample merges R.
    """

    index: Tensor
    target: Tensor
    valid: Tensor | None = None


@torch.no_grad()
def bipartite_matching(
    metric: Tensor,
    count: int,
    num_prefix: int = 0,
    valid: Tensor | None = None,
    threshold: float | None = None,
) -> Matching:
    """ToMe's matching: every token at an even position points at its most similar at an odd one; the best pairs merge.

    Args:
        metric: [B, N, d], compared by cosine.
        count: pairs to take, at most `merge_count` of N tokens.
        num_prefix: first tokens that are neither merged nor merged into.
        valid: [B, N] bool, False at padding, which comes last; a sample of n tokens merges at most `merge_count` of n.
        threshold: the least similarity of a pair; None: any.
    """
    batch, tokens, _ = metric.shape
    metric = normalize(metric.float() if metric.dtype in (torch.float16, torch.bfloat16) else metric, dim=-1)
    similarity = metric[:, ::2] @ metric[:, 1::2].transpose(1, 2)
    barred = torch.arange(tokens, device=metric.device).expand(batch, tokens) < num_prefix
    if valid is not None:
        barred = barred | ~valid
    similarity = similarity.masked_fill(barred[:, ::2, None] | barred[:, None, 1::2], float("-inf"))
    best, partner = similarity.max(dim=2)
    even = torch.sort(best, dim=1, descending=True, stable=True).indices[:, :count]
    matching = Matching(2 * even, 2 * partner.gather(1, even) + 1)
    if valid is not None:
        allowed = (valid.sum(dim=1, keepdim=True) - num_prefix).clamp_min(0) // 2
        matching.valid = torch.arange(count, device=metric.device) < allowed
    if threshold is not None:
        similar = best.gather(1, even) >= threshold
        matching.valid = similar if matching.valid is None else matching.valid & similar
    return matching


def merge(tokens: Tokens, matching: Matching) -> Tokens:
    """The tokens after the matched ones have joined their targets: x is the mean weighted by `size`, sizes add up.

    A merged token keeps the origin and the position of its target; `source` says everything that it stands for.
    """
    x, size = tokens.x, tokens.sizes()
    batch, number, _ = x.shape
    joins = torch.ones_like(matching.index, dtype=torch.bool) if matching.valid is None else matching.valid
    gone = torch.zeros(batch, number, dtype=torch.bool, device=x.device).scatter(1, matching.index, joins)
    if tokens.valid is not None:
        gone = gone | ~tokens.valid

    place = torch.arange(number, device=x.device)
    group = torch.where(place < tokens.num_prefix, 0, 1 + place % 2)
    order = torch.sort(group.expand(batch, number).masked_fill(gone, 3), dim=1, stable=True).indices
    position = torch.zeros_like(order).scatter(1, order, place.expand(batch, number))
    slot = position.gather(1, matching.target)
    position = position.scatter(1, matching.index, torch.where(joins, slot, position.gather(1, matching.index)))

    remaining = None
    if tokens.valid is None and matching.valid is None:
        order = order[:, : number - matching.index.shape[1]]
    else:
        counts = (~gone).sum(dim=1)
        order = order[:, : int(counts.max())]
        remaining = torch.arange(order.shape[1], device=x.device) < counts.unsqueeze(1)
        slot = slot.clamp_max(order.shape[1] - 1)  # of a pair that is not merged, whose target may be padding

    def taken(values: Tensor, index: Tensor) -> Tensor:
        wide = index.view(*index.shape, *[1] * (values.dim() - 2))
        return values.gather(1, wide.expand(*index.shape, *values.shape[2:]))

    joining = taken(size, matching.index) * joins
    total = taken(size, order).scatter_add(1, slot, joining)
    # The mean as a step from the target towards those that join it, so that tokens which nobody joins stay as they are.
    step = taken(x, matching.index) - taken(x, matching.target)
    step = step * (joining / total.gather(1, slot)).unsqueeze(-1)
    mean = taken(x, order).scatter_add(1, slot.unsqueeze(-1).expand_as(step), step)
    origin = taken(tokens.origins(), order)
    return replace(
        tokens,
        x=mean,
        origin=origin if remaining is None else origin.masked_fill(~remaining, -1),
        source=tokens.follow(position),
        position=taken(tokens.positions(), order),
        size=total,
        valid=remaining,
        mass=None if tokens.mass is None else taken(tokens.mass, order),
    )
