"""Attention output and column means in one pass, in slabs of rows that stay in a CPU's cache.

Every product of a slab writes into memory that is reused: logits, softmax, output and column sums are computed while
the slab is in cache. The backward pass recomputes the map slab by slab.

Shape legend: B batch, H heads, G key heads, N queries, M keys, d head width; of a slab: h heads, R rows, S keys seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from routing_lab.attention.backends import Backend
from routing_lab.attention.maps import AttentionMap, part, per_head, slices

_SLAB_ELEMENTS = 2**19  # 2 MiB of float32: the maps of all heads at 197 tokens, 128 rows of one head at 4096
_SLAB_ELEMENTS_GPU = 2**25


class Fused(Backend):
    """One pass, O(slab) memory, forward and backward.

    Args:
        slab: elements of a slab.
    """

    name: ClassVar[str] = "fused"

    def __init__(self, slab: int = _SLAB_ELEMENTS) -> None:
        self.slab = slab

    def received(self, attention: AttentionMap) -> Tensor:
        return self._run(attention, None)[1]

    def attend(self, attention: AttentionMap, value: Tensor) -> tuple[Tensor, Tensor]:
        output, received = self._run(attention, value)
        assert output is not None
        return output, received

    def _run(self, attention: AttentionMap, value: Tensor | None) -> tuple[Tensor | None, Tensor]:
        tensors = [attention.query, attention.key] + ([] if value is None else [value])
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return _OnePass.apply(attention.query, attention.key, value, attention, self.slab)
        return _forward(attention, value, self.slab)


def differentiable_received(attention: AttentionMap, compute: Callable[[], Tensor]) -> Tensor:
    """Column means from `compute`, with the backward pass of `Fused`: for a kernel that has none of its own."""
    return _Received.apply(attention.query, attention.key, attention, compute)


class _OnePass(torch.autograd.Function):
    """`_forward`, with a backward pass of its own."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor | None, attention: AttentionMap, slab: int
    ) -> tuple[Tensor | None, Tensor]:
        output, received = _forward(attention, value, slab)
        if attention.detach:
            ctx.mark_non_differentiable(received)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, output)
        ctx.attention, ctx.slab = replace(attention, query=query.detach(), key=key.detach()), slab
        return output, received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_received: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output = ctx.saved_tensors
        attention = replace(ctx.attention, query=query, key=key)
        return *_backward(attention, value, output, grad_output, grad_received, ctx.slab), None, None


class _Received(torch.autograd.Function):
    """Column means by a function without gradient, and the backward pass of `_OnePass`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, attention: AttentionMap, compute: Callable[[], Tensor]) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.attention = replace(attention, query=query.detach(), key=key.detach())
        return compute()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_received: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.saved_tensors
        attention = replace(ctx.attention, query=query, key=key)
        grad_query, grad_key, _ = _backward(attention, None, None, None, grad_received, _SLAB_ELEMENTS_GPU)
        return grad_query, grad_key, None, None


def _forward(attention: AttentionMap, value: Tensor | None, slab: int) -> tuple[Tensor | None, Tensor]:
    """Output [B, H, N, d], laid out as [B, N, H, d], and column means [B, H, M]."""
    batch, heads, queries, _ = attention.query.shape
    keys, dtype = attention.key.shape[2], attention.dtype
    weight = attention.row_weight().contiguous()  # a broadcast row would be copied for every head
    output = None if value is None else value.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
    received = attention.query.new_zeros(batch, heads, keys, dtype=dtype)
    together, rows = _slab_shape(attention, slab)
    space = received.new_empty(together * rows * keys)
    products = None if value is None else received.new_empty(together * rows * value.shape[3])
    with torch.autocast(received.device.type, enabled=False):
        for sample, head in _samples_and_heads(attention, together):
            key_shd = _of(attention.key, sample, head, attention, rows)
            value_shd = None if value is None else _of(value, sample, head, attention, rows)
            total_hs = received[sample, head]
            for row in slices(queries, rows):
                slab_hrs = _softmax_into(space, attention, key_shd, sample, head, row)
                seen = slab_hrs.shape[2]
                if output is not None and value_shd is not None and products is not None:
                    output_hrd = output[sample, head, row]
                    product_hrd = products[: output_hrd.numel()].view(output_hrd.shape)
                    output_hrd.copy_(torch.bmm(slab_hrs, value_shd[:, :seen], out=product_hrd))
                _uncount_own(slab_hrs, attention, sample, row)
                sums_h1s = total_hs[:, :seen].unsqueeze(1)
                weight_h1r = weight[sample, :, row].expand(slab_hrs.shape[0], 1, -1)
                torch.baddbmm(sums_h1s, weight_h1r, slab_hrs, out=sums_h1s)
    return output, received


def _backward(
    attention: AttentionMap,
    value: Tensor | None,
    output: Tensor | None,
    grad_output: Tensor | None,
    grad_received: Tensor | None,
    slab: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of query, key and value.

    With P a row of the map, w its weight in the column means r, and O the output:
    dP_j = dO V_j + w dr_j, dS = P (dP - sum_j P_j dP_j), dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO.
    """
    query, key = attention.query, attention.key
    batch, heads, queries, width = query.shape
    keys, dtype = key.shape[2], attention.dtype
    weight = attention.row_weight()
    grad_query = query.new_empty(batch, queries, heads, width, dtype=dtype).transpose(1, 2)
    grad_key = query.new_zeros(batch, heads, keys, width, dtype=dtype)
    grad_value = None if value is None else query.new_zeros(batch, heads, keys, value.shape[3], dtype=dtype)
    together, rows = _slab_shape(attention, slab // 2)  # the map and its gradient
    space, grad_space = grad_key.new_empty(2, together * rows * keys)
    with torch.autocast(query.device.type, enabled=False):
        for sample, head in _samples_and_heads(attention, together):
            key_shd = _of(key, sample, head, attention, rows)
            value_shd = None if value is None else _of(value, sample, head, attention, rows)
            for row in slices(queries, rows):
                slab_hrs = _softmax_into(space, attention, key_shd, sample, head, row)
                seen = slab_hrs.shape[2]
                query_hrd = query[sample, head, row].to(dtype)
                grad_hrs = grad_space[: slab_hrs.numel()].view(slab_hrs.shape)
                if grad_output is not None and output is not None and value_shd is not None:
                    assert grad_value is not None
                    grad_hrd = grad_output[sample, head, row].to(dtype)
                    grad_value[sample, head, :seen] += torch.bmm(slab_hrs.transpose(1, 2), grad_hrd)
                    torch.bmm(grad_hrd, value_shd[:, :seen].transpose(1, 2), out=grad_hrs)
                    mean = (grad_hrd * output[sample, head, row].to(dtype)).sum(dim=-1, keepdim=True)
                else:
                    mean = grad_hrs.zero_().new_zeros(())
                if grad_received is not None:
                    of_row = weight[sample, :, row].unsqueeze(2) * grad_received[sample, head, None, :seen].to(dtype)
                    _uncount_own(of_row, attention, sample, row)
                    grad_hrs += of_row
                    mean = mean + (slab_hrs * of_row).sum(dim=-1, keepdim=True)
                grad_hrs.sub_(mean).mul_(slab_hrs)
                grad_query[sample, head, row] = torch.bmm(grad_hrs, key_shd[:, :seen]).mul_(attention.scale)
                grad_key[sample, head, :seen] += torch.bmm(grad_hrs.transpose(1, 2), query_hrd).mul_(attention.scale)
    return (
        grad_query.to(query.dtype),
        _of_group(grad_key, attention.groups).to(key.dtype),
        None if grad_value is None or value is None else _of_group(grad_value, attention.groups).to(value.dtype),
    )


def _softmax_into(
    space: Tensor, attention: AttentionMap, key_shd: Tensor, sample: int, head: slice, row: slice
) -> Tensor:
    """[h, R, S] rows of the map in `space`; S is M, or what a causal row may see."""
    query = attention.query[sample, head, row].to(attention.dtype)
    seen = attention.key.shape[2]
    if attention.causal:
        seen += row.stop - attention.query.shape[2]
    slab = space[: query.shape[0] * query.shape[1] * seen].view(*query.shape[:2], seen)
    keys = key_shd[:, :seen].transpose(1, 2)
    mask = attention.mask
    if mask is not None:
        mask = part(part(part(mask, 0, slice(sample, sample + 1))[0], 0, head), 1, row)[..., :seen]
    if mask is None or mask.dtype == torch.bool:
        torch.baddbmm(slab, query, keys, beta=0, alpha=attention.scale, out=slab)
        if mask is not None:
            slab.masked_fill_(~mask, -torch.inf)
    else:
        torch.baddbmm(mask.to(slab.dtype).expand_as(slab), query, keys, alpha=attention.scale, out=slab)
    if attention.causal:
        slab.masked_fill_(attention.hidden(row, seen), -torch.inf)
    return torch.softmax(slab, dim=-1, out=slab)


def _uncount_own(slab: Tensor, attention: AttentionMap, sample: int, row: slice) -> None:
    if attention.own_key is not None:
        slab.scatter_(-1, attention.own_key[sample, row, None].expand(*slab.shape[:2], 1), 0)


def _slab_shape(attention: AttentionMap, slab: int) -> tuple[int, int]:
    """Heads and rows of a slab: the maps of several heads, or some rows of one."""
    _, heads, queries, _ = attention.query.shape
    keys = attention.key.shape[2]
    whole = slab // max(queries * keys, 1)
    return (min(heads, whole), max(queries, 1)) if whole else (1, max(1, slab // keys))


def _samples_and_heads(attention: AttentionMap, together: int) -> Iterator[tuple[int, slice]]:
    batch, heads, _, _ = attention.query.shape
    for sample in range(batch):
        for head in slices(heads, together):
            yield sample, head


def _of(x: Tensor, sample: int, head: slice, attention: AttentionMap, rows: int) -> Tensor:
    """[h, M, d] keys or values of query heads; what several slabs read is made contiguous."""
    found = per_head(x[sample], attention.groups, dim=0)[head].to(attention.dtype)
    return found.contiguous() if rows < attention.query.shape[2] else found


def _of_group(x: Tensor, groups: int) -> Tensor:
    """[B, G, M, d] the sum over the query heads of each key head."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(dim=2)
