"""Statistics of attention maps on their way from the layer that made them to those that read them.

Shape legend: B batch, N tokens, K covered tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from routing_lab.attention import AttentionStatistics, StatisticsRequest
from routing_lab.routing.tokens import Selection, Tokens, samples_of


@dataclass
class Maps:
    """What a layer is told about attention maps, and what is wanted of its own.

    Args:
        source: statistics of the source layer's map, aligned with the entering tokens; None: the router needs none, or
            the source is this layer itself (`own`).
        own: this layer is its own source.
        request: statistics of this layer's own map that its own or later layers need.
        projection: random queries and keys for these statistics, see `Block.attend_with_statistics`.
    """

    source: AttentionStatistics | None = None
    own: bool = False
    request: StatisticsRequest | None = None
    projection: Tensor | None = None


@dataclass
class Statistics:
    """Statistics of one layer's map and the tokens they cover.

    Args:
        values: aligned with the covered tokens.
        covered: the tokens that took part in attention; None: all.
    """

    values: AttentionStatistics
    covered: Selection | None

    def filled(self, policy: str, previous: AttentionStatistics | None) -> AttentionStatistics:
        """The statistics aligned with all tokens that entered the layer.

        Tokens that took no part get zero (`zero`), the mean over those that did (`mean`), or the value they had in the
        latest map that covered them (`carry`; zero before there is one).
        """
        covered = self.covered
        if covered is None:
            return self.values
        return _mapped(self.values, lambda name, value: _filled(name, value, covered, policy, previous))


def follow_statistics(statistics: AttentionStatistics, before: Tokens, after: Tokens) -> AttentionStatistics:
    """Statistics that were aligned with the tokens before a removal, aligned with those after it.

    A token that stands for several gets the value of the last of them.
    """
    if after.source is None or after is before:
        return statistics
    batch, tokens = after.x.shape[:2]
    position = torch.full((batch, tokens + 1), -1, device=after.x.device)
    moved = after.sources().masked_fill(after.sources() < 0, tokens)
    position = position.scatter_reduce(1, moved, before.sources(), "amax")[:, :tokens]

    def taken(name: str, value: Tensor) -> Tensor:
        rows = _tokens_first(name, value)
        index = position.clamp_min(0).view(batch, tokens, *[1] * (rows.dim() - 2)).expand(-1, -1, *rows.shape[2:])
        present = (position >= 0).view(batch, tokens, *[1] * (rows.dim() - 2))
        return _tokens_first(name, rows.gather(1, index) * present)

    return _mapped(statistics, taken)


@dataclass(frozen=True)
class Entering:
    """What enters a layer.

    Args:
        layer: zero-based.
        tokens: as they left the layer before.
        maps: statistics of earlier layers that this layer or a later one reads, by layer.
        latest: those of the last layer that made any, see `placement.attention_fill`.
    """

    layer: int
    tokens: Tokens
    maps: Mapping[int, AttentionStatistics] = field(default_factory=dict)
    latest: AttentionStatistics | None = None

    def take(self, rows: Tensor) -> Entering:
        """The samples `rows` [R], which may repeat."""
        return replace(
            self,
            tokens=samples_of(self.tokens, rows),
            maps={layer: samples_of(values, rows) for layer, values in self.maps.items()},
            latest=samples_of(self.latest, rows),
        )

    def keep(self, selection: Selection) -> Entering:
        """The tokens that a selection keeps; the others are gone."""
        after = self.tokens.keep(selection)
        return replace(
            self,
            tokens=after,
            maps={layer: follow_statistics(values, self.tokens, after) for layer, values in self.maps.items()},
            latest=None if self.latest is None else follow_statistics(self.latest, self.tokens, after),
        )


def _mapped(statistics: AttentionStatistics, change: Callable[[str, Tensor], Tensor]) -> AttentionStatistics:
    changed = {}
    for item in fields(statistics):
        value = getattr(statistics, item.name)
        changed[item.name] = None if value is None else change(item.name, value)
    return AttentionStatistics(**changed)


def _tokens_first(name: str, value: Tensor) -> Tensor:
    """[B, N, ...] from a statistic, and back: those per head are [B, H, N]."""
    return value.transpose(1, 2) if name in ("received", "class_row") else value


def _filled(name: str, value: Tensor, covered: Selection, policy: str, previous: AttentionStatistics | None) -> Tensor:
    rows = _tokens_first(name, value)  # [B, K, ...]
    shape = (rows.shape[0], covered.num_tokens, *rows.shape[2:])
    if policy == "carry" and previous is not None:
        base = _tokens_first(name, getattr(previous, name))
    elif policy == "mean":
        weight = torch.ones_like(rows)
        if covered.valid is not None:
            weight = weight * covered.valid.view(*covered.valid.shape, *[1] * (rows.dim() - 2))
        base = ((rows * weight).sum(dim=1, keepdim=True) / weight.sum(dim=1, keepdim=True).clamp_min(1)).expand(shape)
    else:
        base = rows.new_zeros(shape)
    return _tokens_first(name, covered.scatter(base.contiguous(), rows))
