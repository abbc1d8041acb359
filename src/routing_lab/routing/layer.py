"""The routed layer: the one place where router, capacity, scaling, bypass and visibility meet.

    y_i = x_i + g(r_i) u_i(x_kept)     for kept tokens
    y_i = bypass(x_i)                  for the others

with u the update of the routed sub-layer (the whole block, its attention or its MLP).

Shape legend: B batch, N tokens that entered the layer, K kept tokens, H heads, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from routing_lab.attention import AttentionStatistics, StatisticsRequest
from routing_lab.routing.base import Block, Bypass, Capacity, Gates, LayerTrace, Router, RouterInput, RunState, Scaling
from routing_lab.routing.members import SubLayer
from routing_lab.routing.routers import Corruption
from routing_lab.routing.tokens import Selection, Tokens
from routing_lab.routing.visibility import Visibility

Execution = Literal["gather", "mask"]
SelectionEdit = Callable[[Tensor, Selection], Selection]
"""Replaces the selection made from scores [B, N]."""


class RoutedLayer(nn.Module):
    """Routes the tokens of one block.

    Args:
        router, capacity, scaling, bypass: the axes of this layer.
        visibility: which keys a kept token attends to.
        sublayer: what is routed: the whole `block`, its `attention` (the MLP then runs on every token) or its `mlp` (attention
            runs on every token, and tokens are selected after it).
        corruption: spoils the router's scores; None: they are used as they are.
        execution: `gather` computes kept tokens only; `mask` computes every token and discards, the slow reference.
    """

    def __init__(
        self,
        router: Router,
        capacity: Capacity,
        scaling: Scaling,
        bypass: Bypass,
        visibility: Visibility,
        sublayer: SubLayer = "block",
        corruption: Corruption | None = None,
        execution: Execution = "gather",
    ) -> None:
        super().__init__()
        self.router = router
        self.capacity = capacity
        self.scaling = scaling
        self.bypass = bypass
        self.corruption = corruption
        self.sublayer = sublayer
        self.all_keys = visibility.traits.all_keys
        self.execution = execution

    def forward(
        self,
        tokens: Tokens,
        block: Block,
        context: Any,
        attention: AttentionStatistics | None,
        state: RunState,
        request: StatisticsRequest | None = None,
        projection: Tensor | None = None,
        own_attention: bool = False,
        edit: SelectionEdit | None = None,
    ) -> tuple[Tokens, LayerTrace, Statistics | None]:
        """One routed layer.

        Args:
            tokens: what enters.
            block: the backbone's block.
            context: what the backbone's blocks share in this forward (rotary angles, masks).
            attention: statistics of the source layer's map, aligned with `tokens`.
            state: the run's state.
            request: statistics of this layer's own map that are needed, here or in a later layer.
            projection: random queries and keys for these statistics, see `Block.attend_with_statistics`.
            own_attention: this layer is its own source (sublayer=mlp).
            edit: replaces the selection that the capacity makes.

        Returns the tokens that leave, the trace, and the requested statistics of this layer's map.
        """
        if self.sublayer == "mlp":
            h, statistics = _attend_all(tokens, block, context, request, projection)
            seen = tokens.with_x(h)
            if own_attention and statistics is not None:
                attention = statistics.values
            scores, selection = self._select(seen, attention, state, edit)
            gates = self.scaling(scores, selection)
            y = self._route(seen, selection, gates, lambda x, _: block.mlp(x), block)
            return seen.with_x(y), self._trace(seen, scores, selection, gates), statistics

        scores, selection = self._select(tokens, attention, state, edit)
        gates = self.scaling(scores, selection)
        statistics = None
        if request is not None:
            statistics = self._own_statistics(tokens, selection, block, context, request, projection)

        def attend(x_kept: Tensor, everyone: bool) -> Tensor:
            return self._attend(tokens.x, x_kept, selection, block, context, everyone)

        if self.sublayer == "attention":
            h = self._route(tokens, selection, gates, attend, block)
            y = h + block.mlp(h)
        else:
            y = self._route(tokens, selection, gates, attend, block, then_mlp=True)
        return tokens.with_x(y), self._trace(tokens, scores, selection, gates), statistics

    def _select(
        self, tokens: Tokens, attention: AttentionStatistics | None, state: RunState, edit: SelectionEdit | None
    ) -> tuple[Tensor, Selection]:
        inputs = RouterInput(tokens, attention, state)
        scores = self.router(inputs)
        if self.corruption is not None:
            scores = self.corruption(scores, inputs)
        selection = self.capacity(scores, state)
        return scores, selection if edit is None else edit(scores, selection)

    def _route(
        self,
        tokens: Tokens,
        selection: Selection,
        gates: Gates,
        branch: Any,
        block: Block,
        then_mlp: bool = False,
    ) -> Tensor:
        """x with `branch` (and with `then_mlp` the MLP after it) applied to kept tokens, and the bypass to the others."""
        x = tokens.x
        if gates.every_token or self.execution == "mask":
            return self._route_masked(x, selection, gates, branch, block, then_mlp)
        y = x
        if selection.index.shape[1] > 0:
            kept = selection.gather(x)
            gate = None if gates.kept is None else selection.gather(gates.kept)
            y = selection.scatter(x, self._combine(kept, branch(kept, False), gate, block, then_mlp))
        if self.bypass.identity or selection.keeps_all:
            return y
        rest = selection.complement()
        x_rest = rest.gather(x)
        gate = None if gates.bypassed is None else rest.gather(gates.bypassed)
        return rest.scatter(y, x_rest + _times(self.bypass.update(x_rest, block), gate))

    def _route_masked(
        self, x: Tensor, selection: Selection, gates: Gates, branch: Any, block: Block, then_mlp: bool
    ) -> Tensor:
        y = self._combine(x, branch(x, True), gates.kept, block, then_mlp)
        rest = x
        if not self.bypass.identity:
            update = _times(self.bypass.update(x, block), gates.bypassed)
            if gates.every_token:
                return y + update
            rest = x + update
        return y if gates.every_token else torch.where(selection.mask().unsqueeze(-1), y, rest)

    def _combine(self, x: Tensor, update: Tensor, gate: Tensor | None, block: Block, then_mlp: bool) -> Tensor:
        """x + g (update [+ MLP]), or with target=output x + g (x + update [+ MLP])."""
        if gate is None and self.scaling.target == "update":
            h = x + update  # the dense block's own order of additions, so that keeping everything is the dense block
            return h + block.mlp(h) if then_mlp else h
        if then_mlp:
            update = update + block.mlp(x + update)
        if self.scaling.target == "output":
            update = x + update
        return x + _times(update, gate)

    def _attend(
        self, x: Tensor, queries: Tensor, selection: Selection, block: Block, context: Any, everyone: bool
    ) -> Tensor:
        """The attention branch of `queries`: the kept tokens, or every token (`everyone`)."""
        if self.all_keys or selection.keeps_all:
            if everyone or selection.keeps_all:
                return block.attend(queries, context)
            return block.attend(queries, context, keys=x, query_index=selection.index)
        if everyone:
            # A token that is not kept sees itself besides, so that no row of the map is empty.
            own = torch.eye(selection.num_tokens, dtype=torch.bool, device=x.device)
            return block.attend(queries, context, key_mask=selection.mask().unsqueeze(1) | own)
        mask = None if selection.valid is None else _never_empty(selection.valid)
        return block.attend(queries, context, query_index=selection.index, key_index=selection.index, key_mask=mask)

    def _own_statistics(
        self,
        tokens: Tokens,
        selection: Selection,
        block: Block,
        context: Any,
        request: StatisticsRequest,
        projection: Tensor | None,
    ) -> Statistics:
        """Statistics of this routed layer's map; with visibility=kept it lacks the tokens that were not kept."""
        kept, index = selection.gather(tokens.x), selection.index
        if self.all_keys:
            values = block.statistics(
                kept,
                context,
                request,
                keys=tokens.x,
                query_index=index,
                valid=selection.valid,
                projection=projection,
            )
            return Statistics(values, None)
        values = block.statistics(
            kept,
            context,
            request,
            query_index=index,
            key_index=index,
            valid=selection.valid,
            projection=projection,
        )
        return Statistics(values, None if selection.keeps_all else selection)

    def _trace(self, tokens: Tokens, scores: Tensor, selection: Selection, gates: Gates) -> LayerTrace:
        return LayerTrace(
            scores=scores,
            kept=selection.padded_index(),
            counts=selection.counts(),
            tokens=tokens.x.shape[1],
            origin=tokens.origins(),
            gate=None if gates.kept is None else selection.gather(gates.kept),
        )


class Statistics:
    """Statistics of one layer's map and the tokens they cover.

    Args:
        values: per head, aligned with the covered tokens.
        covered: the tokens that took part in attention; None: all.
    """

    def __init__(self, values: AttentionStatistics, covered: Selection | None) -> None:
        self.values = values
        self.covered = covered

    def filled(self, policy: str, previous: AttentionStatistics | None) -> AttentionStatistics:
        """The statistics aligned with all tokens.

        Tokens that took no part get zero (`zero`), the mean over those that did (`mean`), or the value they had in the
        latest map that covered them (`carry`; zero before there is one).
        """
        if self.covered is None:
            return self.values
        return AttentionStatistics(
            received=_filled(self.values.received, self.covered, policy, previous and previous.received),
            class_row=_filled(self.values.class_row, self.covered, policy, previous and previous.class_row),
        )


def _filled(value: Tensor | None, covered: Selection, policy: str, previous: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    rows = value.transpose(1, 2)  # [B, K, H]
    shape = (rows.shape[0], covered.num_tokens, rows.shape[2])
    if policy == "carry" and previous is not None:
        base = previous.transpose(1, 2)
    elif policy == "mean":
        weight = torch.ones_like(rows[..., :1]) if covered.valid is None else covered.valid.unsqueeze(-1).to(rows.dtype)
        base = ((rows * weight).sum(dim=1, keepdim=True) / weight.sum(dim=1, keepdim=True).clamp_min(1)).expand(shape)
    else:
        base = rows.new_zeros(shape)
    return covered.scatter(base.contiguous(), rows).transpose(1, 2)


def _attend_all(
    tokens: Tokens, block: Block, context: Any, request: StatisticsRequest | None, projection: Tensor | None
) -> tuple[Tensor, Statistics | None]:
    if request is None:
        return tokens.x + block.attend(tokens.x, context), None
    update, values = block.attend_with_statistics(tokens.x, context, request, projection)
    return tokens.x + update, Statistics(values, None)


def _times(update: Tensor, gate: Tensor | None) -> Tensor:
    return update if gate is None else update * gate.unsqueeze(-1).to(update.dtype)


def _never_empty(mask: Tensor) -> Tensor:
    """Samples without any kept token attend to all keys: their result is discarded, but it must be finite."""
    return mask | ~mask.any(dim=-1, keepdim=True)
