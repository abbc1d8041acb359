"""Attention from queries, keys and values, with the statistics of its map where they are wanted.

Shape legend: B batch, H heads, N tokens (queries), M keys, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from routing_lab.attention.maps import AttentionMap
from routing_lab.attention.policy import policy_softmax
from routing_lab.attention.statistics import (
    AttentionStatistics,
    MapRows,
    StatisticsRequest,
    attention_statistics,
    one_pass,
    one_pass_answers,
)


@dataclass(frozen=True)
class Kernel:
    """How an attention module computes its map.

    Args:
        scale: multiplier of the logits; None: 1 / sqrt(d).
        dropout: of the map's entries, 0 in evaluation.
        fused: through torch's fused kernels, else entry by entry.
    """

    scale: float | None = None
    dropout: float = 0.0
    fused: bool = True


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    *,
    mask: Tensor | None = None,
    policy: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """softmax(scale * query key^T + mask) value, [B, H, N, d].

    Args:
        query: [B, H, N, d]; key, value: [B, H, M, d].
        mask: [B, 1 or H, N, M] boolean, True where a query may attend, or added to the logits.
        policy: [B, M], weight of each key, see `policy_softmax`; None: all one.
        causal: instead of a mask, query n sees the keys up to n.
    """
    if kernel.fused and policy is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=kernel.dropout, scale=kernel.scale, is_causal=causal
        )
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    logits = (query * _scale(query, kernel)) @ key.transpose(-2, -1)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(dim=-1) if policy is None else policy_softmax(logits, policy).to(value.dtype)
    return F.dropout(weights, kernel.dropout) @ value


def attention_with_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    request: StatisticsRequest,
    rows: MapRows,
    *,
    mask: Tensor | None = None,
    policy: Tensor | None = None,
    other_map: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, AttentionStatistics]:
    """`attention`, and the requested statistics of its map: from one pass where one map holds both.

    The output then agrees with `attention` to rounding. It does so to the last bit if `request.exact` says so, under
    dropout and a policy, where keys are left out of the statistics or these are of another map, and where no column of
    the map is summed.

    Args:
        rows: which queries and keys count, and where they stand; says again what `mask` says of padding, of later
            positions and of biases.
        other_map: queries and keys [B, H, N, d] whose map the statistics are of instead, while those of keys and values
            stay those of `key` and `value`.
    """
    if in_one_pass(kernel, request, policy=policy, other_map=other_map):
        return one_pass(query, key, value, _scale(query, kernel), request, rows)
    output = attention(query, key, value, kernel, mask=mask, policy=policy)
    return output, map_statistics(query, key, value, kernel, request, rows, other_map=other_map)


def attention_map(query: Tensor, key: Tensor, kernel: Kernel, mask: Tensor | None = None) -> AttentionMap:
    """The map of `attention` without dropout and policy."""
    return AttentionMap(query, key, _scale(query, kernel), mask)


def in_one_pass(
    kernel: Kernel,
    request: StatisticsRequest,
    *,
    policy: Tensor | None = None,
    other_map: object = None,
) -> bool:
    """Whether `attention_with_statistics` makes one map for both."""
    plain = kernel.fused and kernel.dropout == 0 and policy is None and other_map is None
    return plain and one_pass_answers(request)


def map_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    request: StatisticsRequest,
    rows: MapRows,
    *,
    other_map: tuple[Tensor, Tensor] | None = None,
) -> AttentionStatistics:
    """The statistics of `attention_with_statistics` without its output."""
    map_query, map_key = other_map or (query, key)
    return attention_statistics(map_query, map_key, value, _scale(query, kernel), request, rows, trained_key=key)


def _scale(query: Tensor, kernel: Kernel) -> float:
    return float(query.shape[-1] ** -0.5) if kernel.scale is None else kernel.scale
