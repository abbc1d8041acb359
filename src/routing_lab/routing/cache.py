"""Keys and values of the tokens that later ones will see: per layer, and only of those that its semantics keep.

A dense layer keeps those of every token; a routed one those of the tokens it kept (`visibility=kept`) or of all. Rows
of a sample lie side by side from the first, whatever padding the texts had; keys are rotated already, and positions say
which of them a query may see.

Shape legend: B batch, G key and value heads, N tokens of one call, S tokens that are kept so far, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PAGE = 32
"""Rows by which a layer's memory grows at least."""

GROWTH = 1.125
"""Factor by which it grows otherwise: what is allocated stays close to what is held."""


@dataclass(frozen=True)
class SeenKeys:
    """What the queries of one call may see.

    Args:
        key, value: [B, G, S, d].
        position: [B, S] int64.
        valid: [B, S] bool, False where a sample has fewer; None: all have S.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    valid: Tensor | None


class LayerCache:
    """Keys and values of one layer."""

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._position: Tensor | None = None
        self._counts: Tensor | None = None
        self._largest = 0
        self._ragged = False

    def extend(
        self, key: Tensor, value: Tensor, position: Tensor, valid: Tensor | None = None, stays: Tensor | None = None
    ) -> SeenKeys:
        """Add tokens, and give what their queries may see: themselves and what was there.

        Args:
            key, value: [B, G, N, d] of tokens that come later than all that are there, in their order.
            position: [B, N] int64.
            valid: [B, N] bool, False at padding, which is not added; None: there is none.
            stays: [B, N] bool, False at tokens that only this call sees; None: all stay.
        """
        before = self._seen() if stays is not None and self._largest else None
        self._write(key, value, position, valid if stays is None else (stays if valid is None else stays & valid))
        if stays is None:
            return self._seen()
        own = SeenKeys(key, value, position, valid)
        return own if before is None else _joined(before, own)

    @property
    def counts(self) -> Tensor | None:
        """[B] int64: tokens of each sample; None while nothing was added."""
        return self._counts

    @property
    def logical_bytes(self) -> int:
        """Bytes of the keys and values that are held."""
        if self._key is None or self._counts is None:
            return 0
        row = 2 * self._key.shape[1] * self._key.shape[3] * self._key.element_size()
        return int(self._counts.sum()) * row

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory taken for keys, values and positions."""
        return sum(part.nbytes for part in (self._key, self._value, self._position) if part is not None)

    # --- private ---

    def _seen(self) -> SeenKeys:
        assert self._key is not None
        assert self._value is not None
        assert self._position is not None
        assert self._counts is not None
        number = self._largest
        valid = None
        if self._ragged:
            valid = torch.arange(number, device=self._counts.device) < self._counts.unsqueeze(1)
        return SeenKeys(self._key[:, :, :number], self._value[:, :, :number], self._position[:, :number], valid)

    def _write(self, key: Tensor, value: Tensor, position: Tensor, written: Tensor | None) -> None:
        batch, number = position.shape
        if self._counts is None:
            self._counts = torch.zeros(batch, dtype=torch.int64, device=key.device)
        if written is None and not self._ragged:
            start = self._largest
            self._grow(start + number, key)
            assert self._key is not None
            assert self._value is not None
            assert self._position is not None
            self._key[:, :, start : start + number] = key
            self._value[:, :, start : start + number] = value
            self._position[:, start : start + number] = position
            self._counts += number
            self._largest = start + number
            return
        if written is None:
            written = torch.ones(batch, number, dtype=torch.bool, device=key.device)
        slot = self._counts.unsqueeze(1) + written.cumsum(dim=1) - 1
        counts = self._counts + written.sum(dim=1)
        self._largest = int(counts.max())
        self._ragged = bool((counts != self._largest).any())
        self._grow(self._largest, key)
        assert self._key is not None
        assert self._value is not None
        assert self._position is not None
        sample, token = written.nonzero(as_tuple=True)
        place = slot[sample, token]
        self._key[sample, :, place] = key[sample, :, token]
        self._value[sample, :, place] = value[sample, :, token]
        self._position[sample, place] = position[sample, token]
        self._counts = counts

    def _grow(self, needed: int, like: Tensor) -> None:
        held = 0 if self._key is None else self._key.shape[2]
        if needed <= held and self._key is not None:
            return
        size = -(-max(needed, int(held * GROWTH)) // PAGE) * PAGE
        batch, heads, _, width = like.shape
        key, value = like.new_zeros(batch, heads, size, width), like.new_zeros(batch, heads, size, width)
        position = torch.zeros(batch, size, dtype=torch.int64, device=like.device)
        if self._key is not None and self._value is not None and self._position is not None:
            key[:, :, :held], value[:, :, :held], position[:, :held] = self._key, self._value, self._position
        self._key, self._value, self._position = key, value, position


class KVCache:
    """What a causal model keeps of the tokens that it has read, so that the next ones cost only themselves.

    Args:
        depth: number of layers.

    Attributes:
        seen: [B] int64, tokens that each sample has read; None before the first.
        reach: positions up to which any sample may have come.
        shared: what a backbone keeps for all layers from one call to the next.
    """

    def __init__(self, depth: int) -> None:
        self.layers = [LayerCache() for _ in range(depth)]
        self.seen: Tensor | None = None
        self.reach = 0
        self.shared: Any = None

    def advance(self, batch: int, tokens: int, valid: Tensor | None, device: torch.device) -> None:
        """Count tokens [B, N] that every layer has read; valid [B, N] bool is False at padding."""
        if self.seen is None:
            self.seen = torch.zeros(batch, dtype=torch.int64, device=device)
        self.seen = self.seen + (tokens if valid is None else valid.sum(dim=1))
        self.reach += tokens

    @property
    def logical_bytes(self) -> int:
        """Bytes of the keys and values that are held, over all layers and samples."""
        return sum(layer.logical_bytes for layer in self.layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory taken for them, positions included."""
        return sum(layer.allocated_bytes for layer in self.layers)


def _joined(before: SeenKeys, own: SeenKeys) -> SeenKeys:
    valid = None
    if before.valid is not None or own.valid is not None:
        sides = [
            torch.ones_like(side.position, dtype=torch.bool) if side.valid is None else side.valid
            for side in (before, own)
        ]
        valid = torch.cat(sides, dim=1)
    return SeenKeys(
        torch.cat([before.key, own.key], dim=2),
        torch.cat([before.value, own.value], dim=2),
        torch.cat([before.position, own.position], dim=1),
        valid,
    )
