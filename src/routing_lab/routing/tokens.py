"""The tokens that travel through the layers, and which of them a layer keeps.

Shape legend: B batch, N tokens, K kept tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class Tokens:
    """The token sequence at one depth.

    Args:
        x: [B, N, D], the residual stream.
        num_prefix: how many of the first tokens are not patches (class, distillation, registers).
        origin: [B, N] int64, the patch each token came from, -1 for a token without one; None while no token has been
            removed, when token n came from patch n - num_prefix.
    """

    x: Tensor
    num_prefix: int = 0
    origin: Tensor | None = None

    def with_x(self, x: Tensor) -> Tokens:
        """The same tokens with another residual stream."""
        return replace(self, x=x)

    def origins(self) -> Tensor:
        """[B, N] int64: the patch each token came from, -1 where it has none."""
        if self.origin is not None:
            return self.origin
        batch, tokens, _ = self.x.shape
        index = torch.arange(-self.num_prefix, tokens - self.num_prefix, device=self.x.device)
        return index.clamp_min(-1).expand(batch, tokens)


@dataclass
class Selection:
    """Which tokens a layer keeps, as indices into the tokens that entered it.

    Args:
        index: [B, K] int64, ascending in every row. Where a row keeps fewer than K tokens, its rest is padding.
        valid: [B, K] bool, False at padding; None when every sample keeps K tokens.
        num_tokens: N.
    """

    index: Tensor
    valid: Tensor | None
    num_tokens: int

    @classmethod
    def from_mask(cls, mask: Tensor) -> Selection:
        """The selection that keeps the True positions of `mask` [B, N]; counts may differ between samples."""
        batch, tokens = mask.shape
        counts = mask.sum(dim=1)
        largest = int(counts.max()) if batch else 0
        index = torch.sort((~mask).to(torch.uint8), dim=1, stable=True).indices[:, :largest]
        if bool((counts == largest).all()):
            return cls(index, None, tokens)
        valid = torch.arange(largest, device=mask.device) < counts.unsqueeze(1)
        return cls(index, valid, tokens)

    @classmethod
    def first(cls, batch: int, kept: int, tokens: int, device: torch.device) -> Selection:
        """The selection that keeps the first `kept` of `tokens` tokens in every sample."""
        return cls(torch.arange(kept, device=device).expand(batch, kept), None, tokens)

    @property
    def keeps_all(self) -> bool:
        """Whether every token of every sample is kept."""
        return self.valid is None and self.index.shape[1] == self.num_tokens

    def counts(self) -> Tensor:
        """[B] int64: how many tokens each sample keeps."""
        if self.valid is not None:
            return self.valid.sum(dim=1)
        return torch.full((self.index.shape[0],), self.index.shape[1], device=self.index.device)

    def mask(self) -> Tensor:
        """[B, N] bool, True at kept tokens."""
        batch = self.index.shape[0]
        mask = torch.zeros(batch, self.num_tokens, dtype=torch.bool, device=self.index.device)
        if self.valid is None:
            return mask.scatter(1, self.index, True)
        # Padding may repeat the index of a kept token: sum instead of overwriting.
        return mask.to(torch.int32).scatter_add(1, self.index, self.valid.to(torch.int32)) > 0

    def padded_index(self) -> Tensor:
        """[B, K] int64 as `index`, with -1 at padding."""
        return self.index if self.valid is None else self.index.masked_fill(~self.valid, -1)

    def complement(self) -> Selection:
        """The selection of the tokens that this one does not keep."""
        if self.valid is not None:
            return Selection.from_mask(~self.mask())
        order = torch.sort(self.mask().to(torch.uint8), dim=1, stable=True).indices
        return Selection(order[:, : self.num_tokens - self.index.shape[1]], None, self.num_tokens)

    def gather(self, x: Tensor) -> Tensor:
        """[B, K, ...] the kept rows of x [B, N, ...]; padding repeats some token of the sample."""
        if self.keeps_all:
            return x
        batch, kept = self.index.shape
        return x.flatten(0, 1).index_select(0, self._rows().flatten()).unflatten(0, (batch, kept))

    def scatter(self, x: Tensor, update: Tensor) -> Tensor:
        """x [B, N, ...] with the kept rows replaced by update [B, K, ...]; every other row is x's own, bit by bit."""
        if self.keeps_all:
            return update
        rows, values = self._rows().flatten(), update.flatten(0, 1)
        if self.valid is not None:
            chosen = self.valid.flatten()
            rows, values = rows[chosen], values[chosen]
        # Under autocast a branch may come back in lower precision than the residual stream.
        return x.flatten(0, 1).index_copy(0, rows, values.to(x.dtype)).unflatten(0, x.shape[:2])

    def _rows(self) -> Tensor:
        start = torch.arange(self.index.shape[0], device=self.index.device).unsqueeze(1) * self.num_tokens
        return self.index + start
