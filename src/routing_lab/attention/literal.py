"""Algorithm 1 of A-MoD as printed: a counter-example, kept to show what it computes.

The printed algorithm walks over tiles of the map as FlashAttention does and adds P_ij / l_i to the score of key j when
it meets the tile. But l_i, the row's normaliser, is final only after the last tile of keys: earlier keys are divided by
less than the row's sum, and by exponentials of a smaller maximum. Their scores come out too high, and the scores of a
sample no longer sum to one. With a single tile of keys the result is Eq. 4. `tests/attention/test_backends.py` shows
both.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from routing_lab.attention.backends import Backend, Eager
from routing_lab.attention.maps import AttentionMap, per_head, slices


class Literal(Backend):
    """Attention received with the running normaliser, tile by tile; the output is exact.

    Args:
        tile: keys of a tile.
    """

    name: ClassVar[str] = "literal"

    def __init__(self, tile: int = 64) -> None:
        self.tile = tile

    def received(self, attention: AttentionMap) -> Tensor:
        query, key = attention.query, per_head(attention.key, attention.groups)
        maximum = query.new_full(query.shape[:3], -torch.inf, dtype=attention.dtype)
        total = torch.zeros_like(maximum)
        found = []
        for tile in slices(key.shape[2], self.tile):
            logits = attention.logits(slice(None), tile)
            highest = torch.maximum(maximum, logits.amax(dim=-1)).clamp_min(torch.finfo(logits.dtype).min)
            exponential = (logits - highest.unsqueeze(-1)).exp()
            total = total * (maximum - highest).exp() + exponential.sum(dim=-1)
            maximum = highest
            running = exponential / total.unsqueeze(-1)  # the normaliser so far
            found.append((attention.row_weight().unsqueeze(2) @ running).squeeze(2))
        return torch.cat(found, dim=-1)

    def attend(self, attention: AttentionMap, value: Tensor) -> tuple[Tensor, Tensor]:
        return Eager().attend(attention, value)[0], self.received(attention)
