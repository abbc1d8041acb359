"""Back ends of attention statistics: the interface, the reference, and the form that any device and tracer takes.

Shape legend: B batch, H heads, G key heads, N queries, M keys, d head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from routing_lab.attention.maps import AttentionMap, per_head, slices

_SLAB_ELEMENTS_CPU = 2**21
_SLAB_ELEMENTS_GPU = 2**25  # few, large launches

Result = TypeVar("Result")


class Backend(ABC):
    """A way to compute column means of an attention map, alone or beside the attention output."""

    name: ClassVar[str]

    @abstractmethod
    def received(self, attention: AttentionMap) -> Tensor:
        """Attention received per head, r_hi = sum_j w_j A_h[j, i] (A-MoD, Eq. 4, before the head mean): [B, H, M]."""

    @abstractmethod
    def attend(self, attention: AttentionMap, value: Tensor) -> tuple[Tensor, Tensor]:
        """A value, [B, H, N, d] in value's dtype, and `received`, both from one product; value [B, G, M, d]."""


class Eager(Backend):
    """The oracle: the whole map in memory."""

    name = "eager"

    def received(self, attention: AttentionMap) -> Tensor:
        return attention.counted(attention.rows())

    def attend(self, attention: AttentionMap, value: Tensor) -> tuple[Tensor, Tensor]:
        rows = attention.rows()
        output = rows @ per_head(value, attention.groups).to(rows.dtype)
        return output.to(value.dtype), attention.counted(rows)


class Chunked(Backend):
    """Slabs of rows of all samples and heads, recomputed in the backward pass: extra memory is O(slab), not O(N M).

    The number of slabs depends on the tokens alone, never on the batch, which a traced graph may leave open.

    Args:
        slab: elements of a slab in one sample; None: what suits the device.
    """

    name = "chunked"

    def __init__(self, slab: int | None = None) -> None:
        self.slab = slab

    def received(self, attention: AttentionMap) -> Tensor:
        return _total(self._parts(attention, lambda row: attention.counted(attention.rows(row), row)))

    def attend(self, attention: AttentionMap, value: Tensor) -> tuple[Tensor, Tensor]:
        if attention.query.dtype != attention.dtype:
            # The product in float32 that the statistics need costs more than the platform's kernel in half precision.
            return fused_attention(attention, value), self.received(attention)
        wide = per_head(value, attention.groups).to(attention.dtype)
        outputs: list[Tensor] = []

        def both(row: slice) -> tuple[Tensor, Tensor]:
            rows = attention.rows(row)
            return rows @ wide, attention.counted(rows, row)

        def received() -> Iterator[Tensor]:
            for output, means in self._parts(attention, both):
                outputs.append(output)
                yield means

        total = _total(received())
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return output.to(value.dtype), total

    def _parts(self, attention: AttentionMap, function: Callable[[slice], Result]) -> Iterator[Result]:
        _, heads, queries, _ = attention.query.shape
        slab = self.slab or (_SLAB_ELEMENTS_CPU if attention.query.device.type == "cpu" else _SLAB_ELEMENTS_GPU)
        rows = list(slices(max(queries, 1), max(1, slab // max(heads * attention.key.shape[2], 1))))
        again = len(rows) > 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        for row in rows:
            yield checkpoint(function, row, use_reentrant=False) if again else function(row)


def _total(parts: Iterator[Tensor]) -> Tensor:
    """Their sum, of which no two are held at a time."""
    total = next(parts)
    for part in parts:
        total = total + part
    return total


def fused_attention(attention: AttentionMap, value: Tensor, dropout: float = 0.0) -> Tensor:
    """The attention output [B, H, N, d] by the platform's fused kernel, value [B, G, M, d]."""
    query, mask = attention.query, attention.mask
    is_causal = attention.causal and mask is None and query.shape[2] == attention.key.shape[2]
    if attention.causal and not is_causal:
        hidden = attention.hidden(slice(None), attention.key.shape[2])
        if mask is None:
            mask = ~hidden
        else:
            mask = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, -torch.inf)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    return F.scaled_dot_product_attention(
        query,
        per_head(attention.key, attention.groups),
        per_head(value, attention.groups),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=attention.scale,
    )
