"""Statistics of an attention map, computed from queries and keys beside the block's own output.

The block's output never depends on whether statistics were asked for: it comes from the fused kernel in both cases,
and the statistics from a pass of their own over the same queries and keys.

Shape legend: B batch, H heads, N tokens (queries), M keys, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Elements of a softmax slab. On a CPU the slab should stay in the second-level cache; a GPU wants few, large launches.
_SLAB_ELEMENTS_CPU = 2**19
_SLAB_ELEMENTS_GPU = 2**25


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
        eager: use the reference that holds the whole map.
        detach: no gradient flows from the statistics into queries and keys.
    """

    received: bool = False
    class_row: bool = False
    key_mean: bool = False
    value_norm: bool = False
    skip_queries: tuple[int, ...] = ()
    skip_keys: tuple[int, ...] = ()
    skip_self: bool = False
    eager: bool = False
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
    """The requested statistics of softmax(scale * query key^T + biases).

    Args:
        query: [B, H, N, d]; key, value: [B, H, M, d]. Half precision is raised to float32.
        scale: multiplier of the logits.
        rows: what the rows and columns of the map stand for.
        trained_key: [B, H, M, d], the keys that `key_mean` is of, where `key` are random ones; None: `key`.

    Raises:
        ValueError: if of a whole sequence no query is left to average over, or no key; if the class token's row of a
            causal map is wanted.
    """
    if request.class_row and rows.causal:
        raise ValueError("a causal map has no row of a class token: the first token sees itself alone")
    with torch.set_grad_enabled(torch.is_grad_enabled() and not request.detach):
        if request.detach:
            query, key, value = query.detach(), key.detach(), value.detach()
        keys_counted = _counted(key, request.skip_keys, rows.key_position, rows.key_valid, "exclude_keys")
        bias = _key_bias(key, keys_counted, rows.key_bias)
        result = AttentionStatistics()
        if request.received:
            counted = _counted(query, request.skip_queries, rows.query_position, rows.query_valid, "exclude_queries")
            own = _own_key(query, key, rows) if request.skip_self else None
            compute = received_eager if request.eager else received_chunked
            if rows.causal:
                order = Order(
                    _positions(query, rows.query_position),
                    _positions(key, rows.key_position),
                    rows.query_segment,
                    rows.key_segment,
                )
                present = torch.ones_like(order.query, dtype=torch.bool) if counted is None else counted
                weight = present.unsqueeze(1).to(_raise(query[:0]).dtype)
                total = compute(query, key, scale, weight, bias, own, rows.logit_bias, order)
                result.received = total / order.seen_by(present).clamp_min(1).unsqueeze(1)
            else:
                weight = _query_weight(query, counted)
                result.received = compute(query, key, scale, weight, bias, own, rows.logit_bias)
        if request.class_row:
            result.class_row = _class_row(query, key, scale, bias, rows)
        if request.key_mean:
            result.key_mean = (key if trained_key is None else trained_key.detach()).mean(dim=1)
        if request.value_norm:
            result.value_norm = _raise(value).square().sum(dim=(1, 3)).sqrt()
        return result


@dataclass(frozen=True)
class Order:
    """Positions, and segments, of queries [B, N] and keys [B, M] in a causal map: a query sees keys of its own segment
    that do not come later.
    """

    query: Tensor
    key: Tensor
    query_segment: Tensor | None = None
    key_segment: Tensor | None = None

    def visible(self) -> Tensor:
        """[B, 1, N, M] bool, True where a query sees a key."""
        seen = self.key.unsqueeze(1) <= self.query.unsqueeze(2)
        if self.query_segment is not None and self.key_segment is not None:
            seen = seen & (self.key_segment.unsqueeze(1) == self.query_segment.unsqueeze(2))
        return seen.unsqueeze(1)

    def part(self, sample: slice, row: slice) -> Order:
        """Of some samples and query rows."""
        return Order(
            self.query[sample, row],
            self.key[sample],
            None if self.query_segment is None else self.query_segment[sample, row],
            None if self.key_segment is None else self.key_segment[sample],
        )

    def seen_by(self, counted: Tensor) -> Tensor:
        """[B, M] int64: how many of the counted queries [B, N] bool see each key."""
        seen = _at_least(self.query, self.key, counted)
        if self.query_segment is None or self.key_segment is None:
            return seen
        # Later segments lie behind: their queries come later too, and do not see the key.
        return seen - _at_least(self.query_segment, self.key_segment + 1, counted)


def _at_least(values: Tensor, bounds: Tensor, counted: Tensor) -> Tensor:
    """[B, M] int64: how many of the counted values [B, N] are at least each of the bounds [B, M]."""
    ascending = values.masked_fill(~counted, torch.iinfo(torch.int64).min).sort(dim=1).values
    return values.shape[1] - torch.searchsorted(ascending, bounds.contiguous())


def received_eager(
    query: Tensor,
    key: Tensor,
    scale: float,
    weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    own_key: Tensor | None = None,
    logit_bias: Tensor | None = None,
    order: Order | None = None,
) -> Tensor:
    """Attention received per head, r_hi = mean_j A_h[j, i] (A-MoD, Eq. 4, without the head mean), from the whole map.

    Args:
        query: [B, H, N, d]; key: [B, H, M, d].
        scale: multiplier of the logits.
        weight: [B, 1, N], weight of each query row in the mean; None: 1 / N.
        key_bias: [B, 1, 1, M] added to the logits, -inf at keys that do not count; None: all count.
        own_key: [B, N], index of each query's own key, whose entry is set to zero; None: it counts.
        logit_bias: [B or 1, H or 1, N, M] added to the logits.
        order: positions of a causal map; None: every query sees every key.

    Returns [B, H, M]. O(N M) memory: the reference for the chunked form.
    """
    weight = _query_weight(query, None) if weight is None else weight
    return _column_sum(query, key, scale, weight, key_bias, own_key, logit_bias, order)


def received_chunked(
    query: Tensor,
    key: Tensor,
    scale: float,
    weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    own_key: Tensor | None = None,
    logit_bias: Tensor | None = None,
    order: Order | None = None,
    slab: int | None = None,
) -> Tensor:
    """`received_eager` in slabs of query rows: the map is never held.

    A slab has at most `slab` elements (default: what stays in cache): whole samples while they fit, else rows of one
    head. Extra memory is O(slab), also under autograd, where each slab is recomputed in the backward pass.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    slab = slab or (_SLAB_ELEMENTS_CPU if query.device.type == "cpu" else _SLAB_ELEMENTS_GPU)
    weight = _query_weight(query, None) if weight is None else weight
    with_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)

    def column_sum(sample: slice, head: slice, row: slice) -> Tensor:
        parts = (
            query[sample, head, row],
            key[sample, head],
            scale,
            weight[sample, :, row],
            None if key_bias is None else key_bias[sample],
            None if own_key is None else own_key[sample, row],
            None if logit_bias is None else _slab(logit_bias, sample, head)[:, :, row],
            None if order is None else order.part(sample, row),
        )
        return checkpoint(_column_sum, *parts, use_reentrant=False) if with_grad else _column_sum(*parts)

    everything = slice(None)
    samples = slab // max(heads * queries * keys, 1)
    if samples >= 1:
        return _concatenated([column_sum(part, everything, everything) for part in _slices(batch, samples)], 0)
    rows = max(1, slab // keys)
    return _concatenated(
        [
            _concatenated(
                [
                    sum((column_sum(sample, head, row) for row in _slices(queries, rows)), torch.zeros(()).to(weight))
                    for head in _slices(heads, 1)
                ],
                1,
            )
            for sample in _slices(batch, 1)
        ],
        0,
    )


def _class_row(
    query: Tensor,
    key: Tensor,
    scale: float,
    key_bias: Tensor | None,
    rows: MapRows,
) -> Tensor:
    """[B, H, M] the row of the token at position 0, which comes first; zero where it is not among the queries."""
    logits = scale * (_raise(query[:, :, :1]) @ _raise(key).transpose(-2, -1))
    if rows.logit_bias is not None:
        logits = logits + rows.logit_bias[:, :, :1]
    row = _softmax(logits, key_bias)
    if rows.query_position is not None:
        present = rows.query_position[:, :1] == 0
        if rows.query_valid is not None:
            present = present & rows.query_valid[:, :1]
        row = row * present[:, None, :, None]
    return row.sum(dim=2)  # of one row, or of none


def _column_sum(
    query: Tensor,
    key: Tensor,
    scale: float,
    weight: Tensor,
    key_bias: Tensor | None,
    own_key: Tensor | None,
    logit_bias: Tensor | None,
    order: Order | None,
) -> Tensor:
    """[B, H, M] the weighted sum over query rows of the attention map; a product with a vector is its fastest form."""
    # Scaling the query instead of the logits saves one pass over the slab.
    logits = (scale * _raise(query)) @ _raise(key).transpose(-2, -1)
    if logit_bias is not None:
        logits = logits + logit_bias
    if order is None:
        attention = _softmax(logits, key_bias)
    else:
        # Finite, because a row may have no other key that counts; what such a row holds is taken out behind.
        hidden = ~order.visible()
        attention = _softmax(logits.masked_fill(hidden, torch.finfo(logits.dtype).min), key_bias)
        attention = attention.masked_fill(hidden, 0)
    if own_key is not None:
        own = own_key[:, None, :, None].expand(*attention.shape[:-1], 1)
        attention = attention.scatter(-1, own, 0)
    return (weight.unsqueeze(2) @ attention).squeeze(2)


def _raise(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _softmax(logits: Tensor, bias: Tensor | None) -> Tensor:
    return torch.softmax(logits if bias is None else logits + bias, dim=-1)


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _concatenated(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _slab(bias: Tensor, sample: slice, head: slice) -> Tensor:
    """The part of a bias [B or 1, H or 1, N, M] for some samples and heads."""
    bias = bias if bias.shape[0] == 1 else bias[sample]
    return bias if bias.shape[1] == 1 else bias[:, head]


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


def _query_weight(query: Tensor, counted: Tensor | None) -> Tensor:
    """[B, 1, N] equal weights of the counted rows, summing to one."""
    batch, _, queries, _ = query.shape
    dtype = _raise(query[:0]).dtype
    if counted is None:
        return torch.full((batch, 1, queries), 1 / max(queries, 1), dtype=dtype, device=query.device)
    weight = counted.to(dtype)
    return (weight / weight.sum(dim=1, keepdim=True).clamp_min(1)).unsqueeze(1)


def _key_bias(key: Tensor, counted: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """[B, 1, 1, M] additive bias, -inf at keys that do not count; None when all do and none is given."""
    if bias is not None:
        bias = bias.to(_raise(key[:0]).dtype)
    if counted is not None:
        # A row without any key would be NaN; such samples hold padding only, and their rows have weight zero.
        counted = counted | ~counted.any(dim=1, keepdim=True)
        if bias is None:
            bias = torch.zeros(counted.shape, dtype=_raise(key[:0]).dtype, device=key.device)
        bias = bias.masked_fill(~counted, float("-inf"))
    return None if bias is None else bias[:, None, None]


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
