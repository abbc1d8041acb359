"""An attention map as what it is made of, and the parts of it that a back end works on.

Shape legend: B batch, H heads, G key heads, N queries, M keys, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMap:
    """A = softmax(scale * query key^T + mask), and which of it counts in its column means.

    No row may be without a key.

    Args:
        query: [B, H, N, d]. key: [B, G, M, d]; with G < H every H / G query heads in turn share a key head.
        scale: multiplier of the logits.
        mask: [B or 1, H or 1, N or 1, M] bool, True where a query may attend, or numbers added to the logits.
        causal: query n sees keys 0 .. n + M - N only: queries are the last N of M positions.
        weight: [B, 1, N], weight of each row in the column means; None: 1 / N.
        own_key: [B, N] int64, for each query the key whose entry does not count (others are not renormalised); None:
            every entry counts.
        detach: no gradient flows from the column means.
    """

    query: Tensor
    key: Tensor
    scale: float
    mask: Tensor | None = None
    causal: bool = False
    weight: Tensor | None = None
    own_key: Tensor | None = None
    detach: bool = False

    @property
    def groups(self) -> int:
        """Query heads for each key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """What the map is computed in: half precision is raised to float32."""
        return raised(self.query.dtype)

    def row_weight(self) -> Tensor:
        """[B, 1, N] the weight of each row."""
        if self.weight is not None:
            return self.weight.to(self.dtype)
        batch, _, queries, _ = self.query.shape
        return torch.full((1, 1, 1), 1 / max(queries, 1), dtype=self.dtype, device=self.query.device).expand(
            batch, 1, queries
        )

    def rows(self, row: slice = slice(None)) -> Tensor:
        """[B, H, R, M] the map's rows in `row`."""
        return self.logits(row).softmax(dim=-1)

    def logits(self, row: slice = slice(None), column: slice = slice(None)) -> Tensor:
        """[B, H, R, C] what the softmax is of, -inf where a query may not attend."""
        key = per_head(self.key[:, :, column], self.groups).to(self.dtype)
        # Scaling the query instead of the logits saves one pass over them.
        logits = (self.scale * self.query[:, :, row].to(self.dtype)) @ key.transpose(-2, -1)
        if self.mask is not None:
            mask = part(self.mask, 2, row)[..., column]
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        if self.causal:
            logits = logits.masked_fill(self.hidden(row, self.key.shape[2])[:, column], -torch.inf)
        return logits

    def hidden(self, row: slice, keys: int) -> Tensor:
        """[R, keys] bool, True where a key comes after a query of the slice `row`."""
        queries = self.query.shape[2]
        start, stop, _ = row.indices(queries)
        position = torch.arange(start, stop, device=self.query.device) + (self.key.shape[2] - queries)
        return torch.arange(keys, device=self.query.device) > position.unsqueeze(1)

    def counted(self, attention: Tensor, row: slice = slice(None)) -> Tensor:
        """[B, H, M] the weighted column sums of rows `attention` [B, H, R, M]; a product is their fastest form."""
        attention = attention.detach() if self.detach else attention
        if self.own_key is not None:
            own = self.own_key[:, None, row, None].expand(*attention.shape[:-1], 1)
            attention = attention.scatter(-1, own, 0)
        return (self.row_weight()[:, :, row].unsqueeze(2) @ attention).squeeze(2)


def raised(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, else the same."""
    return torch.promote_types(dtype, torch.float32)


def per_head(x: Tensor, groups: int, dim: int = 1) -> Tensor:
    """Key heads repeated for the query heads that share them."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=dim)


def part(x: Tensor, dim: int, at: slice) -> Tensor:
    """A slice of one dimension, which may be broadcast."""
    if x.shape[dim] == 1:
        return x
    return x[(slice(None),) * dim + (at,)]


def slices(length: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most `step`."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
