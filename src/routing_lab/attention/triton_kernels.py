"""Column means of an attention map on a GPU, exact, in O(N) memory: nothing of the map is ever written.

Two kernels. The first walks along the keys of a block of rows and leaves the attention output and the logarithm of each
row's normaliser (online softmax); the second walks along the rows of a block of keys and, knowing the final
normalisers, adds each entry of the map to its column. A column belongs to one program, so that there are no atomics and
the sums are the same in every run.

Importing this module needs triton, which comes with torch on Linux; `registry` imports it where it is used. With
TRITON_INTERPRET=1 the kernels run on the CPU, which is how they are tested where there is no GPU.

Shape legend: B batch, H heads, G key heads, N queries, M keys, d head width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from routing_lab.attention.backends import Backend, Chunked, fused_attention
from routing_lab.attention.fused import differentiable_received
from routing_lab.attention.maps import AttentionMap

_BLOCK_QUERIES, _BLOCK_KEYS = 64, 64
_LARGEST_HEAD = 256


class Triton(Backend):
    """The kernels where they can: masks of keys, causal order, grouped heads; else slabs in plain operations."""

    name: ClassVar[str] = "triton"

    def received(self, attention: AttentionMap) -> Tensor:
        if not _can(attention):
            return Chunked().received(attention)
        if _needs_grad(attention.query, attention.key) and not attention.detach:
            return differentiable_received(attention, lambda: _received(attention, _normaliser(attention, None)[1]))
        with torch.no_grad():
            return _received(attention, _normaliser(attention, None)[1])

    def attend(self, attention: AttentionMap, value: Tensor) -> tuple[Tensor, Tensor]:
        if not _can(attention) or value.shape[3] != attention.query.shape[3]:
            return Chunked().attend(attention, value)
        if _needs_grad(attention.query, attention.key, value):
            return fused_attention(attention, value), self.received(attention)
        output, normaliser = _normaliser(attention, value)
        return output, _received(attention, normaliser)


def _can(attention: AttentionMap) -> bool:
    mask, width = attention.mask, attention.query.shape[3]
    of_keys = mask is None or (mask.shape[1] == 1 and mask.shape[2] == 1)
    return of_keys and width <= _LARGEST_HEAD and attention.query.dtype != torch.float64


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _normaliser(attention: AttentionMap, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, d], laid out as [B, N, H, d] (empty without values), and log sum exp of each row, [B, H, N]."""
    query, key = attention.query, attention.key
    batch, heads, queries, width = query.shape
    values = key if value is None else value
    size = 0 if value is None else queries
    output = values.new_empty(batch, size, heads, width).transpose(1, 2)
    normaliser = query.new_empty(batch, heads, queries, dtype=torch.float32)
    bias = _bias(attention)
    grid = (triton.cdiv(queries, _BLOCK_QUERIES), batch * heads)
    _rows_kernel[grid](
        *(query, key, values, bias, output, normaliser),
        *(*query.stride(), *key.stride(), *values.stride(), *output.stride(), *bias.stride()),
        *(attention.scale, heads, attention.groups, queries, key.shape[2], width),
        HAS_VALUE=value is not None,
        **_constants(attention, width),
    )
    return output, normaliser


def _received(attention: AttentionMap, normaliser: Tensor) -> Tensor:
    query, key = attention.query, attention.key
    batch, heads, queries, width = query.shape
    received = query.new_empty(batch, heads, key.shape[2], dtype=torch.float32)
    bias, weight = _bias(attention), attention.row_weight()[:, 0]
    own = weight.new_full((1, 1), -1, dtype=torch.int64) if attention.own_key is None else attention.own_key
    own = own.expand(batch, queries)
    grid = (triton.cdiv(key.shape[2], _BLOCK_KEYS), batch * heads)
    _columns_kernel[grid](
        *(query, key, bias, weight, own, normaliser, received),
        *(*query.stride(), *key.stride(), *bias.stride(), *weight.stride(), *own.stride()),
        *(attention.scale, heads, attention.groups, queries, key.shape[2], width),
        **_constants(attention, width),
    )
    return received


def _bias(attention: AttentionMap) -> Tensor:
    """[B, M] float32 added to the logits of each key, by broadcasting where it can."""
    batch, keys = attention.query.shape[0], attention.key.shape[2]
    mask = attention.mask
    if mask is None:
        return attention.query.new_zeros(1, 1, dtype=torch.float32).expand(batch, keys)
    mask = mask[:, 0, 0]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    return mask.float().expand(batch, keys)


def _constants(attention: AttentionMap, width: int) -> dict[str, Any]:
    return {
        "CAUSAL": attention.causal,
        # float32 products in float32: TF32 would cost three digits.
        "PRECISION": "ieee" if attention.query.dtype == torch.float32 else "tf32",
        "BLOCK_QUERIES": _BLOCK_QUERIES,
        "BLOCK_KEYS": _BLOCK_KEYS,
        "BLOCK_WIDTH": max(16, triton.next_power_of_2(width)),
    }


@triton.jit
def _rows_kernel(
    query, key, value, bias, output, normaliser,
    query_b, query_h, query_n, query_d, key_b, key_h, key_n, key_d, value_b, value_h, value_n, value_d,
    output_b, output_h, output_n, output_d, bias_b, bias_n,
    scale, heads, groups, queries, keys, width,
    HAS_VALUE: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    d = tl.arange(0, BLOCK_WIDTH)
    in_rows = (row < queries)[:, None] & (d < width)[None, :]
    place = query + b * query_b + h * query_h + row[:, None] * query_n + d[None, :] * query_d
    q = tl.load(place, mask=in_rows, other=0.0)
    last = row + (keys - queries)
    highest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    mean = tl.zeros([BLOCK_QUERIES, BLOCK_WIDTH], tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK_QUERIES + keys - queries)
    for start in range(0, end, BLOCK_KEYS):
        column = start + tl.arange(0, BLOCK_KEYS)
        in_columns = (column < keys)[:, None] & (d < width)[None, :]
        place = key + b * key_b + (h // groups) * key_h + column[:, None] * key_n + d[None, :] * key_d
        k = tl.load(place, mask=in_columns, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        logits += tl.load(bias + b * bias_b + column * bias_n, mask=column < keys, other=float("-inf"))[None, :]
        if CAUSAL:
            logits = tl.where(column[None, :] <= last[:, None], logits, float("-inf"))
        # While every key so far is masked the maximum is -inf, from which nothing can be subtracted.
        above = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(above == float("-inf"), 0.0, above)
        exponential = tl.exp(logits - base[:, None])
        faded = tl.exp(highest - base)
        total = total * faded + tl.sum(exponential, 1)
        if HAS_VALUE:
            place = value + b * value_b + (h // groups) * value_h + column[:, None] * value_n + d[None, :] * value_d
            v = tl.load(place, mask=in_columns, other=0.0)
            mean = mean * faded[:, None] + tl.dot(exponential.to(v.dtype), v, input_precision=PRECISION)
        highest = above
    tl.store(normaliser + tl.program_id(1).to(tl.int64) * queries + row, highest + tl.log(total), mask=row < queries)
    if HAS_VALUE:
        place = output + b * output_b + h * output_h + row[:, None] * output_n + d[None, :] * output_d
        tl.store(place, (mean / total[:, None]).to(output.dtype.element_ty), mask=in_rows)


@triton.jit
def _columns_kernel(
    query, key, bias, weight, own, normaliser, received,
    query_b, query_h, query_n, query_d, key_b, key_h, key_n, key_d, bias_b, bias_n, weight_b, weight_n, own_b, own_n,
    scale, heads, groups, queries, keys, width,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    column = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    d = tl.arange(0, BLOCK_WIDTH)
    in_columns = (column < keys)[:, None] & (d < width)[None, :]
    place = key + b * key_b + (h // groups) * key_h + column[:, None] * key_n + d[None, :] * key_d
    k = tl.load(place, mask=in_columns, other=0.0)
    added = tl.load(bias + b * bias_b + column * bias_n, mask=column < keys, other=float("-inf"))
    sums = tl.zeros([BLOCK_KEYS], tl.float32)
    first = 0
    if CAUSAL:  # the first query that sees any of these keys
        first = tl.maximum(0, tl.program_id(0) * BLOCK_KEYS - (keys - queries)) // BLOCK_QUERIES * BLOCK_QUERIES
    for start in range(first, queries, BLOCK_QUERIES):
        row = start + tl.arange(0, BLOCK_QUERIES)
        in_rows = (row < queries)[:, None] & (d < width)[None, :]
        place = query + b * query_b + h * query_h + row[:, None] * query_n + d[None, :] * query_d
        q = tl.load(place, mask=in_rows, other=0.0)
        of_row = normaliser + tl.program_id(1).to(tl.int64) * queries + row
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + added[None, :]
        if CAUSAL:
            logits = tl.where(column[None, :] <= (row + (keys - queries))[:, None], logits, float("-inf"))
        attention = tl.exp(logits - tl.load(of_row, mask=row < queries, other=0.0)[:, None])
        itself = tl.load(own + b * own_b + row * own_n, mask=row < queries, other=-1)
        attention = tl.where(itself[:, None] == column[None, :], 0.0, attention)
        part = tl.load(weight + b * weight_b + row * weight_n, mask=row < queries, other=0.0)
        sums += tl.sum(attention * part[:, None], 0)
    tl.store(received + tl.program_id(1).to(tl.int64) * keys + column, sums, mask=column < keys)
