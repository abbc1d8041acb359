"""The routed layer: the one place where router, capacity, scaling, bypass and visibility meet.

    y_i = x_i + g(r_i) u_i(x_kept)     for kept tokens
    y_i = bypass(x_i)                  for the others, unless the bypass removes them

with u the update of the routed sub-layer (the whole block, its attention or its MLP).

Shape legend: B batch, N tokens that entered the layer, K kept tokens, H heads, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from routing_lab.attention import AttentionStatistics, StatisticsRequest
from routing_lab.axes.facts import SubLayer
from routing_lab.routing.backbone import Block
from routing_lab.routing.base import Bypass, Capacity, Gates, Masking, Reduction, Router, RouterInput, RunState, Scaling
from routing_lab.routing.counted import CountedBlock
from routing_lab.routing.maps import Maps, Statistics
from routing_lab.routing.routers import Corruption
from routing_lab.routing.tokens import Selection, Tokens
from routing_lab.routing.trace import LayerTrace
from routing_lab.routing.visibility import Visibility
from routing_lab.routing.work import Work

Execution = Literal["gather", "mask"]
HIDDEN_LOGIT = -1000.0
"""Added to the logits of a hidden token's key: nothing is left of it after the softmax, while one token is visible."""

SelectionEdit = Callable[[Tensor, Selection], Selection]
"""Replaces the selection made from scores [B, N]."""

Branch = Callable[[Tensor, CountedBlock, bool], Tensor]
"""The routed branch of the kept tokens, or of every token if the last argument says so."""


@dataclass
class Choice:
    """What a layer decided about the tokens that entered it.

    Args:
        tokens: those it chose from.
        scores: [B, N]. logits: [B, N, E] behind them, see `Router.read`.
        selection: the tokens it keeps.
        gates: how scores enter the output.
        fraction: what the capacity aims at.
    """

    tokens: Tokens
    scores: Tensor
    selection: Selection
    gates: Gates
    logits: Tensor | None
    predicted: Tensor | None
    fraction: float | None


class RoutedLayer(nn.Module):
    """Routes the tokens of one block.

    Args:
        router, capacity, scaling, bypass: the axes of this layer.
        visibility: which keys a kept token attends to.
        sublayer: what is routed: the whole `block`, its `attention` (the MLP then runs on every token) or its `mlp`
            (attention runs on every token, and tokens are selected after it).
        corruption: spoils the router's scores; None: they are used as they are.
        execution: `gather` computes kept tokens only; `mask` computes every token and discards, the slow reference. A
            bypass that removes tokens always gathers.
    """

    def __init__(
        self,
        router: Router,
        capacity: Capacity,
        scaling: Scaling,
        bypass: Bypass | Reduction | Masking,
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
        self.nested = capacity.persist == "hierarchical" or bypass.traits.final
        self.execution = execution

    @property
    def looks_ahead(self) -> list[str]:
        """What makes a token's fate depend on later tokens in evaluation, in words."""
        router, normalize = self.router, getattr(self.scaling, "normalize", None)
        found = []
        if router.traits.sees_later:
            found.append(f"{type(router).__name__} scores a token by later ones")
        if self.corruption is not None and self.corruption.phase != "train":
            found.append("scores are spoilt over the whole sequence")
        if self.capacity.compares:
            found.append(f"{type(self.capacity).__name__} compares a token's score with those of later ones")
        if normalize in self.scaling.traits.over_sequence:
            found.append(f"{type(self.scaling).__name__} divides by what the whole sequence has ({normalize})")
        if not isinstance(self.bypass, Bypass):
            found.append(f"{type(self.bypass).__name__} takes tokens out of the sequence")
        return found

    def forward(
        self,
        tokens: Tokens,
        block: Block,
        context: Any,
        maps: Maps,
        state: RunState,
        edit: SelectionEdit | None = None,
        traced: bool = True,
    ) -> tuple[Tokens, LayerTrace | None, Statistics | None]:
        """One routed layer.

        Args:
            tokens: what enters.
            block: the backbone's block.
            context: what the backbone's blocks share in this forward (rotary angles, masks).
            maps: attention maps.
            state: the run's state.
            edit: replaces the selection that the capacity makes.
            traced: whether a trace is wanted.

        Returns the tokens that leave, the trace if wanted, and the requested statistics of this layer's map.
        """
        route = self._route_mlp if self.sublayer == "mlp" else self._route_attention
        work = Work(router=tokens.number())
        left, choice, statistics = route(tokens, CountedBlock(block, work, tokens.valid), context, maps, state, edit)
        halting = self.router.halting(left)
        if halting is not None:
            left = replace(left, mass=left.masses() - halting)
        return left, _trace(left, choice, halting, work) if traced else None, statistics

    def _route_attention(
        self,
        tokens: Tokens,
        block: CountedBlock,
        context: Any,
        maps: Maps,
        state: RunState,
        edit: SelectionEdit | None,
    ) -> tuple[Tokens, Choice, Statistics | None]:
        """Selection, then attention and the MLP."""
        attention = maps.source
        statistics = None
        if maps.own:
            statistics = Statistics(_statistics(tokens, block, context, maps), None)
            attention = statistics.values
        choice = self._choose(tokens, attention, state, edit)
        scores, selection, gates = choice.scores, choice.selection, choice.gates
        if maps.request is not None and statistics is None:
            statistics = self._own_statistics(tokens, selection, block, context, maps)

        if tokens.policy is not None:
            left = self._taken_out(tokens, selection)
            seen = block.weighing(left.policy if left.policy is not None and not self.all_keys else tokens.policy)
            update = seen.attend(tokens.side(), context)
            y = self._combine(tokens.x, update, gates.kept, block, then_mlp=True)
            return left.with_x(y), choice, statistics
        if isinstance(self.bypass, Reduction):
            left = self.bypass.reduce(tokens, selection, scores, attention)
            block = block.of(left.valid, tokens.valid)
            update = block.attend(left.side(), context, tokens.side() if self.all_keys else None)
            y = self._combine(left.x, update, _gate_of_reduced(gates, selection, tokens, left), block, then_mlp=True)
            return left.with_x(y), choice, statistics
        if isinstance(self.bypass, Masking):
            left = self._nest(self._masked(tokens, selection, gates, block, context), selection)
            return left, choice, statistics

        def attend(x_kept: Tensor, here: CountedBlock, everyone: bool) -> Tensor:
            return self._attend(tokens, x_kept, selection, here, context, everyone)

        if self.sublayer == "attention":
            h = self._route(tokens.x, selection, gates, attend, block)
            y = h + block.mlp(h)
        else:
            y = self._route(tokens.x, selection, gates, attend, block, then_mlp=True)
        left = self._nest(tokens.with_x(y), selection)
        return left, choice, statistics

    def _route_mlp(
        self,
        tokens: Tokens,
        block: CountedBlock,
        context: Any,
        maps: Maps,
        state: RunState,
        edit: SelectionEdit | None,
    ) -> tuple[Tokens, Choice, Statistics | None]:
        """Attention on every token, then selection, then the MLP."""
        h, statistics = attend_all(tokens, block, context, maps.request, maps.projection)
        seen = tokens.with_x(h)
        attention = statistics.values if maps.own and statistics is not None else maps.source
        choice = self._choose(seen, attention, state, edit)
        scores, selection, gates = choice.scores, choice.selection, choice.gates
        if tokens.policy is not None:
            left = self._taken_out(seen, selection)
            y = self._combine(h, block.mlp(h), gates.kept, block)
        elif isinstance(self.bypass, Reduction):
            left = self.bypass.reduce(seen, selection, scores, statistics.values if statistics is not None else None)
            gate = _gate_of_reduced(gates, selection, seen, left)
            y = self._combine(left.x, block.of(left.valid).mlp(left.x), gate, block)
        else:
            left = self._nest(seen, selection)
            y = self._route(h, selection, gates, lambda x, here, _: here.mlp(x), block)
        return left.with_x(y), choice, statistics

    def _choose(
        self, tokens: Tokens, attention: AttentionStatistics | None, state: RunState, edit: SelectionEdit | None
    ) -> Choice:
        inputs = RouterInput(tokens, attention, state)
        scores, logits = self.router.read(inputs)
        if self.corruption is not None:
            scores = self.corruption(scores, inputs)
        predicted = self.router.predicted(inputs)
        ranked = scores if predicted is None or state.training else predicted
        eligible = tokens.eligible
        if eligible is None:
            selection = self.capacity(ranked, state, tokens.valid)
        elif tokens.policy is not None and self.capacity.traits.relaxes:
            # Also tokens that are gone decide: their decision weighs the gradient of the one that took them out.
            selection = self.capacity(ranked, state, eligible.mask())
        else:
            selection = self.capacity(eligible.gather(ranked), state, eligible.valid).within(eligible)
        if self.capacity.reserve:
            position = tokens.positions()
            selection = selection.including((position >= 0) & (position < self.capacity.reserve))
        if edit is not None:
            selection = edit(scores, selection)
        if tokens.policy is not None:
            selection = selection.times(tokens.policy)
        fraction = self.capacity.aimed_fraction(state.progress)
        return Choice(tokens, scores, selection, self.scaling(scores, selection), logits, predicted, fraction)

    def _taken_out(self, tokens: Tokens, selection: Selection) -> Tokens:
        """The tokens, of which those that were not kept are no keys any more, and are never kept again."""
        return replace(tokens, policy=selection.relaxed, eligible=selection)

    def _nest(self, tokens: Tokens, selection: Selection) -> Tokens:
        """The tokens, of which later layers may keep those selected here alone, if selections are to be nested."""
        return replace(tokens, eligible=selection) if self.nested else tokens

    def _masked(self, tokens: Tokens, selection: Selection, gates: Gates, block: CountedBlock, context: Any) -> Tokens:
        """Every token through the block, those that were not kept hidden."""
        assert isinstance(self.bypass, Masking)
        left = self.bypass.hide(tokens, selection)
        kept = selection.mask()
        block = block.hiding(kept)
        side = left.side()
        if not self.all_keys:
            hidden = HIDDEN_LOGIT * (~kept).to(left.x.dtype)
            side = replace(side, bias=hidden if side.bias is None else side.bias + hidden)
        update = block.attend(side, context)
        return left.with_x(self._combine(left.x, update, gates.kept, block, then_mlp=True))

    def _route(
        self,
        x: Tensor,
        selection: Selection,
        gates: Gates,
        branch: Branch,
        block: CountedBlock,
        then_mlp: bool = False,
    ) -> Tensor:
        """x with `branch` (and with `then_mlp` the MLP) applied to kept tokens, and the bypass to the others."""
        assert isinstance(self.bypass, Bypass)
        if gates.every_token and gates.straight_through:
            assert gates.kept is not None
            y = self._route(x, selection, Gates(), branch, block, then_mlp)
            with torch.no_grad():  # the factor below is exactly zero: only the router gets a gradient from this
                rest = x if self.bypass.identity else x + self.bypass.update(x, block)
                difference = self._combine(x, branch(x, block, True), None, block, then_mlp) - rest
            return y + _times(difference, gates.kept - gates.kept.detach())
        if gates.every_token or self.execution == "mask":
            return self._route_masked(x, selection, gates, branch, block, then_mlp)
        y = x
        if selection.index.shape[1] > 0:
            kept = selection.gather(x)
            gate = None if gates.kept is None else selection.gather(gates.kept)
            here = block.of(selection.valid, block.valid)
            update = self._combine(kept, branch(kept, here, False), gate, here, then_mlp, gates.straight_through)
            y = selection.scatter(x, update)
        if self.bypass.identity or selection.keeps_all:
            return y
        others = selection.complement()
        x_rest = others.gather(x)
        gate = None if gates.bypassed is None else others.gather(gates.bypassed)
        return others.scatter(y, x_rest + _times(self.bypass.update(x_rest, block.of(others.valid)), gate))

    def _route_masked(
        self,
        x: Tensor,
        selection: Selection,
        gates: Gates,
        branch: Branch,
        block: CountedBlock,
        then_mlp: bool,
    ) -> Tensor:
        assert isinstance(self.bypass, Bypass)
        y = self._combine(x, branch(x, block, True), gates.kept, block, then_mlp, gates.straight_through)
        rest = x
        if not self.bypass.identity:
            update = _times(self.bypass.update(x, block), gates.bypassed)
            if gates.every_token:
                return y + update
            rest = x + update
        return y if gates.every_token else torch.where(selection.mask().unsqueeze(-1), y, rest)

    def _combine(
        self,
        x: Tensor,
        update: Tensor,
        gate: Tensor | None,
        block: CountedBlock,
        then_mlp: bool = False,
        straight_through: bool = False,
    ) -> Tensor:
        """x + g (update [+ MLP]), or with target=output x + g (x + update [+ MLP])."""
        if self.scaling.target == "update" and (gate is None or straight_through):
            h = x + update  # the dense block's own order of additions, so that keeping everything is the dense block
            y = h + block.mlp(h) if then_mlp else h
            return y if gate is None else y + _times(y - x, gate - gate.detach())
        if then_mlp:
            update = update + block.mlp(x + update)
        if self.scaling.target == "output":
            update = x + update
        return x + _times(update, gate)

    def _attend(
        self, tokens: Tokens, queries: Tensor, selection: Selection, block: CountedBlock, context: Any, everyone: bool
    ) -> Tensor:
        """The attention branch of `queries`: the kept tokens, or every token (`everyone`)."""
        side = tokens.side()
        if selection.keeps_all or (everyone and self.all_keys):
            return block.attend(replace(side, x=queries), context)
        if everyone:
            # A token that is not kept sees itself besides, so that no row of the map is empty.
            own = torch.eye(selection.num_tokens, dtype=torch.bool, device=queries.device)
            kept = selection.mask()
            return block.attend(replace(side, x=queries), context, visible=kept.unsqueeze(1) | own, stays=kept)
        return block.attend(side.take(selection, queries), context, side if self.all_keys else None)

    def _own_statistics(
        self, tokens: Tokens, selection: Selection, block: CountedBlock, context: Any, maps: Maps
    ) -> Statistics:
        """Statistics of this routed layer's map; with visibility=kept it lacks the tokens that were not kept."""
        assert maps.request is not None
        side = tokens.side()
        kept = side.take(selection)
        block = block.of(selection.valid, tokens.valid).repeating()
        if self.all_keys:
            values = block.statistics(kept, context, maps.request, side, projection=maps.projection)
            return Statistics(values, None)
        if tokens.policy is not None:
            block = block.weighing(selection.gather(tokens.policy))
        values = block.statistics(kept, context, maps.request, projection=maps.projection)
        return Statistics(values, None if selection.keeps_all else selection)


def attend_all(
    tokens: Tokens, block: Block, context: Any, request: StatisticsRequest | None, projection: Tensor | None = None
) -> tuple[Tensor, Statistics | None]:
    """x + a(x) for every token, and the requested statistics of the map."""
    if request is None:
        return tokens.x + block.attend(tokens.side(), context), None
    update, values = block.attend_with_statistics(tokens.side(), context, request, projection=projection)
    return tokens.x + update, Statistics(values, None)


def _statistics(tokens: Tokens, block: CountedBlock, context: Any, maps: Maps) -> AttentionStatistics:
    assert maps.request is not None
    return block.statistics(tokens.side(), context, maps.request, projection=maps.projection)


def _trace(left: Tokens, choice: Choice, halting: Tensor | None, work: Work) -> LayerTrace:
    entered, selection, gates = choice.tokens, choice.selection, choice.gates
    return LayerTrace(
        scores=choice.scores,
        kept=selection.padded_index(),
        counts=selection.counts(),
        tokens=left.x.shape[1],
        origin=entered.origins(),
        gate=None if gates.kept is None else selection.gather(gates.kept),
        source=left.source,
        size=left.size,
        halting=halting,
        valid=entered.valid,
        predicted=choice.predicted,
        logits=choice.logits,
        relaxed=selection.relaxed,
        fraction=choice.fraction,
        remaining=None if left.source is entered.source else left.counts(),
        work=work,
    )


def _gate_of_reduced(gates: Gates, selection: Selection, entered: Tokens, left: Tokens) -> Tensor | None:
    """[B, N'] the gate of each remaining token: the mean over what it stands for; tokens not kept count as one."""
    if gates.kept is None:
        return None
    gate = gates.kept.where(selection.mask(), 1.0)
    if left is entered:
        return gate
    batch, number = left.x.shape[:2]
    source = left.sources()
    slot = torch.where(source < 0, number, source)
    of_first = gate.gather(1, entered.sources().clamp_min(0))
    total = gate.new_zeros(batch, number + 1).scatter_add(1, slot, of_first)
    count = gate.new_zeros(batch, number + 1).scatter_add(1, slot, torch.ones_like(of_first))
    return (total / count.clamp_min(1))[:, :number]


def _times(update: Tensor, gate: Tensor | None) -> Tensor:
    return update if gate is None else update * gate.unsqueeze(-1).to(update.dtype)
