"""Statistics of an attention map, alone or beside the attention output.

A layer whose map somebody reads computes its output and the statistics in one pass over the map, by the back end that
suits the device (`registry`). The output then agrees with that of fused attention to rounding, about 1e-7, but not to
the last bit. Where bits matter, `StatisticsRequest.exact` leaves the output to fused attention, as without statistics,
and the statistics to a pass of their own. Statistics of a single row, of keys or of values need no map.

Shape legend: B batch, H heads, G key heads, N tokens (queries), M keys, d head width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from routing_lab.attention.maps import AttentionMap, raised
from routing_lab.attention.registry import AUTO, choose


@dataclass(frozen=True)
class StatisticsRequest:
    """Which statistics of an attention map are wanted, and which part of the map counts.

    Args:
        received: attention received, the mean over queries of each key's column (A-MoD, Eq. 4 before the head mean);
            of a causal map the mean over those queries that see the key.
        class_row: attention of the class token (query 0) to every key (EViT); zero where it is not among the queries.
        key_mean: keys averaged over heads (ToMe's metric).
        value_norm: norm of each token's value, over all heads together (ATS).
        skip_queries: sequence positions whose rows do not count.
        skip_keys: sequence positions left out as keys: the other keys of a row are renormalised to sum to one, the
            left-out ones get zero.
        skip_self: a token's attention to itself does not count; rows are not renormalised.
        backend: how columns are summed, see `registry`; `auto`: what suits device, dtype and length.
        exact: the attention output is to the last bit what it is without statistics, which then take a second pass.
        detach: no gradient flows from the statistics into queries and keys.
    """

    received: bool = False
    class_row: bool = False
    key_mean: bool = False
    value_norm: bool = False
    skip_queries: tuple[int, ...] = ()
    skip_keys: tuple[int, ...] = ()
    skip_self: bool = False
    backend: str = AUTO
    exact: bool = False
    detach: bool = True

    def joined(self, other: StatisticsRequest | None) -> StatisticsRequest:
        """What either of two requests wants; everything else as in this one."""
        if other is None:
            return self
        return replace(
            self,
            received=self.received or other.received,
            class_row=self.class_row or other.class_row,
            key_mean=self.key_mean or other.key_mean,
            value_norm=self.value_norm or other.value_norm,
        )


@dataclass
class AttentionStatistics:
    """Statistics of one layer's map, aligned with the tokens that entered that layer.

    Args:
        received: [B, H, M], at least float32; sums to 1 over M when every query counts and sees every key.
        class_row: [B, H, M], at least float32.
        key_mean: [B, M, d].
        value_norm: [B, M].
    """

    received: Tensor | None = None
    class_row: Tensor | None = None
    key_mean: Tensor | None = None
    value_norm: Tensor | None = None


@dataclass(frozen=True)
class MapRows:
    """What the rows and columns of an attention map stand for.

    Args:
        query_position: [B, N], key_position: [B, M], positions in the sequence; None: 0, 1, ...
        query_valid: [B, N], key_valid: [B, M] bool, False at padding; None: all are tokens.
        key_bias: [B, M] added to the logits of each key.
        query_segment: [B, N], key_segment: [B, M] int64, ascending with the position: a query of a causal map sees keys
            of its own segment only; None: there is one.
        logit_bias: [B or 1, H or 1, N, M] added to the logits.
        same: queries and keys are the same tokens in the same order.
        causal: a query sees keys at its own and earlier positions only.
    """

    query_position: Tensor | None = None
    key_position: Tensor | None = None
    query_valid: Tensor | None = None
    key_valid: Tensor | None = None
    key_bias: Tensor | None = None
    query_segment: Tensor | None = None
    key_segment: Tensor | None = None
    logit_bias: Tensor | None = None
    same: bool = True
    causal: bool = False


def attention_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    request: StatisticsRequest,
    rows: MapRows,
    *,
    trained_key: Tensor | None = None,
) -> AttentionStatistics:
    """The requested statistics of softmax(scale * query key^T + biases), from a pass of their own.

    Args:
        query: [B, H, N, d]; key, value: [B, G, M, d], see `AttentionMap`. Half precision is raised to float32.
        scale: multiplier of the logits.
        rows: what the rows and columns of the map stand for.
        trained_key: [B, G, M, d], the keys that `key_mean` is of, where `key` are random ones; None: `key`.

    Raises:
        ValueError: if of a whole sequence no query is left to average over, or no key; if the class token's row of a
            causal map is wanted.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not request.detach), _full_precision(query):
        if request.detach:
            query, key, value = query.detach(), key.detach(), value.detach()
        columns = _columns(query, key, scale, request, rows)
        result = _without_whole_map(columns, value, request, rows, trained_key)
        if request.received:
            result.received = columns.mean(choose(columns.map, request.backend).received(columns.map))
        return result


def one_pass_answers(request: StatisticsRequest) -> bool:
    """Whether the map of the output is the one whose columns are summed, and its bits do not matter."""
    return request.received and not request.exact and not request.skip_keys


def one_pass(
    query: Tensor, key: Tensor, value: Tensor, scale: float, request: StatisticsRequest, rows: MapRows
) -> tuple[Tensor, AttentionStatistics]:
    """softmax(scale * query key^T + biases) value, [B, H, N, d], and the statistics of `attention_statistics`.

    Arguments as there; the request must be one that `one_pass_answers`.
    """
    with _full_precision(query):
        columns = _columns(query, key, scale, request, rows)
        output, received = choose(columns.map, request.backend).attend(columns.map, value)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not request.detach), _full_precision(query):
        result = _without_whole_map(columns, value, request, rows, None)
        result.received = columns.mean(received)
    return output, result


@dataclass(frozen=True)
class _Columns:
    """A map whose columns are summed, and what the sums are divided by.

    Args:
        map: the map, with the weight of each row.
        seen: [B, 1, M], the queries that see each key of a causal map; None: the weights sum to one.
    """

    map: AttentionMap
    seen: Tensor | None

    def mean(self, total: Tensor) -> Tensor:
        """[B, H, M] the column means, from the sums."""
        return total if self.seen is None else total / self.seen


def _columns(query: Tensor, key: Tensor, scale: float, request: StatisticsRequest, rows: MapRows) -> _Columns:
    """The map with what counts in its column means."""
    if request.class_row and rows.causal:
        raise ValueError("a causal map has no row of a class token: the first token sees itself alone")
    counted_keys = _counted(key, request.skip_keys, rows.key_position, rows.key_valid, "exclude_keys")
    counted = None
    if request.received:
        counted = _counted(query, request.skip_queries, rows.query_position, rows.query_valid, "exclude_queries")
    own = _own_key(query, key, rows) if request.received and request.skip_self else None
    bias = _bias(rows, raised(query.dtype))
    shared = AttentionMap(query, key, scale, own_key=own, detach=request.detach)
    if not rows.causal:
        if counted_keys is not None:
            # A row without any key would be NaN; such samples hold padding only, and their rows have weight zero.
            counted_keys = (counted_keys | ~counted_keys.any(dim=1, keepdim=True))[:, None, None]
        weight = None if counted is None else _mean_weight(counted, shared.dtype)
        return _Columns(replace(shared, mask=_both(counted_keys, bias), weight=weight), None)

    query_position, key_position = _positions(query, rows.query_position), _positions(key, rows.key_position)
    counted = torch.ones_like(query_position, dtype=torch.bool) if counted is None else counted
    seen = _at_least(query_position, key_position, counted)
    visible = None
    if rows.query_segment is not None and rows.key_segment is not None:
        # Later segments lie behind: their queries come later too, and do not see the key.
        seen = seen - _at_least(rows.query_segment, rows.key_segment + 1, counted)
        visible = rows.key_segment.unsqueeze(1) == rows.query_segment.unsqueeze(2)
    seen = seen.clamp_min(1).unsqueeze(1)
    in_order = rows.query_position is None and rows.key_position is None and query.shape[2] == key.shape[2]
    if in_order and visible is None and counted_keys is None and bias is None:
        return _Columns(replace(shared, causal=True, weight=counted.unsqueeze(1).to(shared.dtype)), seen)
    earlier = key_position.unsqueeze(1) <= query_position.unsqueeze(2)
    visible = earlier if visible is None else visible & earlier
    if counted_keys is not None:
        visible = visible & counted_keys.unsqueeze(1)
    empty = ~visible.any(dim=2, keepdim=True)
    weight = (counted & ~empty.squeeze(2)).unsqueeze(1).to(shared.dtype)
    return _Columns(replace(shared, mask=_both((visible | empty).unsqueeze(1), bias), weight=weight), seen)


def _without_whole_map(
    columns: _Columns, value: Tensor, request: StatisticsRequest, rows: MapRows, trained_key: Tensor | None
) -> AttentionStatistics:
    """The statistics for which one row of the map, the keys or the values are enough."""
    attention = columns.map
    key = attention.key
    if request.detach:
        attention = replace(attention, query=attention.query.detach(), key=key.detach())
        key, value = key.detach(), value.detach()
    result = AttentionStatistics()
    if request.class_row:
        result.class_row = _class_row(attention, rows)
    if request.key_mean:
        result.key_mean = (key if trained_key is None else trained_key.detach()).mean(dim=1)
    if request.value_norm:
        value = value.to(raised(value.dtype))
        result.value_norm = (value.square().sum(dim=(1, 3)) * attention.groups).sqrt()
    return result


def _class_row(attention: AttentionMap, rows: MapRows) -> Tensor:
    """[B, H, M] the row of the token at position 0, which comes first; zero where it is not among the queries."""
    row = attention.rows(slice(0, 1))
    if rows.query_position is not None:
        present = rows.query_position[:, :1] == 0
        if rows.query_valid is not None:
            present = present & rows.query_valid[:, :1]
        row = row * present[:, None, :, None]
    return row.sum(dim=2)  # of one row, or of none


def _full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Products of raised tensors are not lowered again by autocast."""
    kind = x.device.type
    lowered = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if lowered else nullcontext()


def _at_least(values: Tensor, bounds: Tensor, counted: Tensor) -> Tensor:
    """[B, M] int64: how many of the counted values [B, N] are at least each of the bounds [B, M]."""
    ascending = values.masked_fill(~counted, torch.iinfo(torch.int64).min).sort(dim=1).values
    return values.shape[1] - torch.searchsorted(ascending, bounds.contiguous())


def _counted(
    x: Tensor, skipped: tuple[int, ...], index: Tensor | None, valid: Tensor | None, key_name: str
) -> Tensor | None:
    """[B, N] bool, True at positions that count; None when all do."""
    if not skipped:
        return valid
    tokens = x.shape[2]
    positions = _positions(x, index)
    counted = torch.ones_like(positions, dtype=torch.bool) if valid is None else valid
    for position in skipped:
        counted = counted & (positions != position)
    if index is None and tokens <= len(skipped):
        raise ValueError(f"router.{key_name} leaves nothing of {tokens} tokens")
    return counted


def _mean_weight(counted: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, N] equal weights of the counted rows [B, N], summing to one."""
    weight = counted.to(dtype)
    return (weight / weight.sum(dim=1, keepdim=True).clamp_min(1)).unsqueeze(1)


def _bias(rows: MapRows, dtype: torch.dtype) -> Tensor | None:
    """[B or 1, H or 1, N or 1, M] what is added to the logits; None: nothing."""
    bias = rows.logit_bias
    if rows.key_bias is not None:
        of_keys = rows.key_bias[:, None, None]
        bias = of_keys if bias is None else bias + of_keys
    return None if bias is None else bias.to(dtype)


def _both(allowed: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A mask of both kinds as `AttentionMap` takes it."""
    if bias is None or allowed is None:
        return allowed if bias is None else bias
    return bias.masked_fill(~allowed, -torch.inf)


def _own_key(query: Tensor, key: Tensor, rows: MapRows) -> Tensor:
    """[B, N] for each query the index of its own key among the keys."""
    if rows.same:
        return _positions(query, None)
    position = _positions(query, rows.query_position)
    if rows.key_position is None:
        return position
    return (position.unsqueeze(2) == rows.key_position.unsqueeze(1)).to(torch.uint8).argmax(dim=2)


def _positions(x: Tensor, position: Tensor | None) -> Tensor:
    """[B, N] the positions of queries or keys x [B, H, N, d]."""
    if position is not None:
        return position
    return torch.arange(x.shape[2], device=x.device).expand(x.shape[0], x.shape[2])
