"""A routed model: a backbone of which some layers choose the tokens that they process.

Shape legend: B batch, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from routing_lab.attention import StatisticsRequest
from routing_lab.axes.layers import layer_string
from routing_lab.routing.backbone import Backbone, Block, LayerWatch
from routing_lab.routing.base import Reduction, RunState
from routing_lab.routing.cache import KVCache
from routing_lab.routing.counted import CountedBlock
from routing_lab.routing.features import Features, as_map, at_every_position, layers_of
from routing_lab.routing.generation import stream
from routing_lab.routing.layer import Execution, RoutedLayer, SelectionEdit, attend_all
from routing_lab.routing.maps import Entering, Maps, Statistics, follow_statistics
from routing_lab.routing.names import from_public, to_public
from routing_lab.routing.noise import NoiseSource
from routing_lab.routing.tokens import Layout, Tokens
from routing_lab.routing.trace import LayerTrace, Trace
from routing_lab.routing.work import Work

Active = Literal["both", "train", "eval"]
AttentionMode = Literal["fast", "exact"]


class RoutedModel(nn.Module):
    """A backbone whose routed layers process the tokens they keep.

    The state dict has the backbone's own names, and the parameters of the axes beside them as `router.<layer>.*`: a
    dense checkpoint loads strictly into a model whose router has no parameters.

    Args:
        backbone: adapter of the model.
        layers: the routed layer at each zero-based index.
        sources: for each routed layer the layer whose attention map its score is made of; empty: no map is needed.
        request: what the routers need of a source's map.
        fill: what stands in for tokens that a routed source did not attend to, see `Statistics.filled`.
        active: when layers route: in training, in evaluation or in `both`; otherwise they are dense.
        random_attention: seed of random queries and keys from which the maps are taken instead of the trained ones; the
            attention outputs are untouched. None: trained attention.

    Attributes:
        backbone: the module that was passed in.
        routed_layers: zero-based indices, ascending.
        num_router_parameters: parameters beside the backbone's.
    """

    def __init__(
        self,
        backbone: Backbone,
        layers: Mapping[int, RoutedLayer],
        sources: Mapping[int, int] | None = None,
        request: StatisticsRequest | None = None,
        fill: str = "none",
        random_attention: int | None = None,
        active: Active = "both",
    ) -> None:
        super().__init__()
        outside = [layer for layer in layers if not 0 <= layer < backbone.depth]
        if outside:
            raise ValueError(f"routed layers {outside}: the backbone has layers 0 to {backbone.depth - 1}")
        self.backbone = backbone.module
        self.layers = nn.ModuleDict({str(layer): layers[layer] for layer in sorted(layers)})
        self.routed_layers = sorted(layers)
        self.hides = any(isinstance(layer.bypass, Reduction) and layer.bypass.hides for layer in layers.values())
        self.sources = dict(sorted((sources or {}).items()))
        self.request = request
        self.fill = fill
        self.active = active
        self._family = type(backbone)
        self.random_attention = random_attention is not None
        if random_attention is not None:
            for source in set(self.sources.values()):
                generator = torch.Generator().manual_seed(random_attention + source)
                shape = backbone.block(source).query_key_shape
                # Rebuilt from the seed, so it stays out of the state dict.
                self.register_buffer(
                    f"random_projection_{source}", torch.randn(shape, generator=generator), persistent=False
                )
        self.register_state_dict_post_hook(to_public)
        self.register_load_state_dict_pre_hook(from_public)

    def forward(
        self,
        inputs: Tensor,
        *,
        valid: Tensor | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
        return_trace: bool = False,
        return_tokens: bool = False,
        progress: float = 1.0,
        step: int = 0,
        sample_ids: Tensor | None = None,
        noise: NoiseSource | None = None,
        informative: Tensor | None = None,
    ) -> Any:
        """The backbone's output, with routing.

        Args:
            inputs: what the backbone takes: images [B, C, H, W] or token ids [B, N].
            valid: [B, N] bool, False at padding, which may lie on either side of a text; None: there is none.
            segments: [B, N] int64, the document of each token, ascending: texts packed into one sequence do not see
                each other; None: all tokens are of one.
            cache: keys and values of the tokens that came before these, to which these are added, see `new_cache`.
            return_trace: return (output, `Trace`) instead of the output.
            return_tokens: return the `Tokens` behind the output as well, last: those that left the last layer, after
                the backbone's final norm.
            progress: how far training has come, in [0, 1]; a capacity warm-up reads it.
            step: optimiser step; routing noise differs between steps in training and ignores it in evaluation.
            sample_ids: [B] int64, index of each sample in its data set; routing noise belongs to it. None: 0 .. B - 1.
            noise: source of the routing noise; None: the one that `step` and `sample_ids` say.
            informative: [B, P] bool, the patches that decide the class, where the data know; for `router=oracle`.
        """
        plain = valid is None and segments is None and cache is None
        tokens, context = self.embed(inputs, None if plain else Layout(valid, segments, cache))
        state = self.run_state(tokens, progress, step, sample_ids, noise, informative)
        if cache is not None:
            state = replace(state, cache=cache)
        tokens, trace = self.forward_tokens(tokens, context, state, traced=return_trace)
        if cache is not None:
            cache.advance(inputs.shape[0], inputs.shape[1], valid, inputs.device)
        found = [self.head(tokens)]
        if return_trace:
            found.append(trace)
        if return_tokens:
            tokens = tokens.restored()
            found.append(tokens.with_x(self.adapter.norm(tokens.x)))
        return found[0] if len(found) == 1 else tuple(found)

    def features(self, inputs: Tensor, **run: Any) -> Features:
        """The last state at every position, for heads that read all of them; run: keywords of `forward`.

        Where a bypass puts halted tokens back (`ponder`), their output is taken.
        """
        states = self._states(inputs, None, run)
        last = states[-1].restored() if states[-1].halted is not None else None
        x = at_every_position(states)[-1] if last is None else last.x
        return Features(self.adapter.norm(x), states[0].num_prefix, self.adapter.grid(inputs))

    def forward_features(self, x: Tensor, **run: Any) -> Tensor:
        """The tokens that are left in the end, after the final norm, for `forward_head`; run: keywords of `forward`.

        Raises:
            ValueError: samples are left with different numbers of tokens, of which a tensor cannot tell.
        """
        tokens = self._states(x, None, run)[-1].restored()
        if tokens.valid is not None or tokens.policy is not None:
            raise ValueError(
                "forward_features: samples are left with different numbers of tokens; call the model, or its `features`"
            )
        return self.adapter.norm(tokens.x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        """The output from `forward_features`, or what enters its last linear module."""
        return self.adapter.classify(x, pre_logits=pre_logits)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
        **run: Any,
    ) -> Any:
        """States after some layers at every position, as timm's models give them.

        Args:
            indices: the last so many layers, or these zero-based ones, from the end where negative; None: all.
            return_prefix_tokens: pairs of a state of the patches and one of the prefix tokens, where there are any.
            norm: after the final norm.
            stop_early: layers after the last one wanted are not computed.
            output_fmt: NCHW: [B, D, rows, columns]; NLC: [B, patches, D].
            intermediates_only: the list of states instead of (the final norm's output [B, N0, D], states).
            run: keywords of `forward`.
        """
        adapter = self.adapter
        taken = layers_of(indices, adapter.depth)
        tokens = self._states(x, max(taken) + 1 if stop_early else None, run)
        num_prefix, grid = tokens[0].num_prefix, adapter.grid(x)
        states = at_every_position(tokens)
        found = []
        for layer in sorted(set(taken)):
            state = adapter.norm(states[layer]) if norm else states[layer]
            patches = as_map(state, num_prefix, grid) if output_fmt == "NCHW" else state[:, num_prefix:]
            found.append((patches, state[:, :num_prefix]) if return_prefix_tokens and num_prefix else patches)
        return found if intermediates_only else (adapter.norm(states[-1]), found)

    def _states(self, inputs: Tensor, stop: int | None, run: Mapping[str, Any]) -> list[Tokens]:
        """The tokens that enter the first layer, and those that leave each."""
        tokens, context = self.embed(inputs)
        seen: list[Entering] = []
        state = self.run_state(tokens, **run)
        left, _ = self.forward_from(Entering(0, tokens), context, state, traced=False, seen=seen, stop=stop)
        return [*(entering.tokens for entering in seen), left]

    @property
    def looks_ahead(self) -> list[str]:
        """What lets later tokens have a say in evaluation, in words; empty: every token's output is known with it."""
        if not self.adapter.causal:
            return ["in this backbone every token sees every other"]
        found: dict[str, None] = {}
        for layer in self.layers.values() if self.is_active(training=False) else ():
            assert isinstance(layer, RoutedLayer)
            found |= dict.fromkeys(layer.looks_ahead)
        return list(found)

    def new_cache(self) -> KVCache:
        """An empty cache for `forward`: a text is read in parts, each seeing those before, as if read at once.

        Raises:
            ValueError: the model is in training mode, or what becomes of a token depends on later ones.
        """
        if self.training:
            raise ValueError("cache: the model is in training mode; call eval() first")
        if reasons := self.looks_ahead:
            raise ValueError(f"cache: {'; '.join(reasons)}: this model reads whole texts")
        return KVCache(self.adapter.depth)

    def generate(self, ids: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """[B, at most max_new_tokens] int64: tokens that follow ids [B, N]; options as for `generation.stream`."""
        return torch.stack(list(stream(self, ids, max_new_tokens, **options)), dim=1)

    def embed(self, inputs: Tensor, layout: Layout | None = None) -> tuple[Tokens, Any]:
        """The tokens that enter the first layer, and the backbone's context for `forward_tokens`."""
        return self.adapter.embed(inputs, layout)

    def head(self, tokens: Tokens) -> Any:
        """The backbone's output from the tokens that left the last layer, and those that halted before."""
        tokens = tokens.restored()
        return self.adapter.head(tokens.x, tokens.valid if tokens.policy is None else tokens.policy)

    def run_state(
        self,
        tokens: Tokens,
        progress: float = 1.0,
        step: int = 0,
        sample_ids: Tensor | None = None,
        noise: NoiseSource | None = None,
        informative: Tensor | None = None,
    ) -> RunState:
        """What the layers are told about the run; arguments as for `forward`."""
        if sample_ids is None:
            sample_ids = torch.arange(tokens.x.shape[0], device=tokens.x.device)
        noise = noise or NoiseSource(step if self.training else -1, sample_ids)
        return RunState(progress if self.training else 1.0, noise, self.training, tokens.x.shape[1], informative)

    def forward_tokens(
        self,
        tokens: Tokens,
        context: Any,
        state: RunState,
        edits: Mapping[int, SelectionEdit] | None = None,
        traced: bool = True,
        watch: LayerWatch | None = None,
    ) -> tuple[Tokens, Trace]:
        """All layers, from the tokens that enter the first to those that leave the last.

        Args:
            edits: for some routed layers a function that replaces the selection made there, (scores, selection) ->
                selection; a probe's way to force a token in or out.
            traced: whether a trace is wanted; without, the one that is returned is empty.
            watch: is shown every attention map.
        """
        return self.forward_from(Entering(0, tokens), context, state, edits, traced, watch=watch)

    def forward_from(
        self,
        entering: Entering,
        context: Any,
        state: RunState,
        edits: Mapping[int, SelectionEdit] | None = None,
        traced: bool = True,
        seen: list[Entering] | None = None,
        stop: int | None = None,
        watch: LayerWatch | None = None,
    ) -> tuple[Tokens, Trace]:
        """`forward_tokens` from a layer on.

        Args:
            entering: what enters that layer.
            seen: what enters each layer is appended to it, so that another forward can begin there.
            stop: the layer before which it ends; None: all are computed.

        The trace begins with that layer.
        """
        tokens, maps, latest = entering.tokens, dict(entering.maps), entering.latest
        last_use = {source: layer for layer, source in self.sources.items()} if self.is_active(state.training) else {}
        trace = Trace()
        routed = self.routed_layers if self.is_active(state.training) else []
        if routed and state.training and self.hides:
            dtype = torch.promote_types(tokens.x.dtype, torch.float32)
            tokens = replace(tokens, policy=tokens.x.new_ones(tokens.x.shape[:2], dtype=dtype))
        adapter = self.adapter
        for index in range(entering.layer, adapter.depth if stop is None else stop):
            if seen is not None:
                seen.append(Entering(index, tokens, dict(maps), latest))
            block = adapter.block(index)
            if tokens.policy is not None:
                block = block.weighing(tokens.policy)
            if state.cache is not None:
                block = block.caching(state.cache.layers[index])
            if watch is not None:
                block = block.watched(partial(watch, index))
            request = self.request if index in last_use else None
            projection = getattr(self, f"random_projection_{index}") if request and self.random_attention else None
            entered = tokens
            source = self.sources.get(index)
            known = Maps(None if source is None else maps.get(source), source == index, request, projection)
            common = (index, index in routed, block, context, known, state, edits, traced)
            if block.recomputed and torch.is_grad_enabled():
                step = partial(self._layer, *common)
                tokens, part, statistics = checkpoint(step, tokens, use_reentrant=False)
            else:
                tokens, part, statistics = self._layer(*common, tokens)
            if statistics is not None:
                maps[index] = latest = statistics.filled(self.fill, latest)
            if tokens.source is not entered.source:
                maps = {source: follow_statistics(values, entered, tokens) for source, values in maps.items()}
                latest = None if latest is None else follow_statistics(latest, entered, tokens)
            for source in [source for source, user in last_use.items() if user == index]:
                maps.pop(source, None)
            if traced and part is not None:
                trace.layers.append(part)
        return tokens, trace

    def _layer(
        self,
        index: int,
        routed: bool,
        block: Block,
        context: Any,
        maps: Maps,
        state: RunState,
        edits: Mapping[int, SelectionEdit] | None,
        traced: bool,
        tokens: Tokens,
    ) -> tuple[Tokens, LayerTrace | None, Statistics | None]:
        """One layer: the tokens that leave it, its part of the trace, and the statistics of its map that are wanted."""
        work = Work()
        if traced and not routed:
            block = CountedBlock(block, work, tokens.valid)
        if not routed and maps.request is None and tokens.valid is None and tokens.key_bias() is None:
            left = tokens.with_x(block.dense(tokens.side(), context))
            return left, LayerTrace.dense(tokens, left, work) if traced else None, None
        found: list[tuple[Tokens, LayerTrace | None, Statistics | None]] = []

        def compute(x: Tensor) -> Tensor:
            entering = tokens.with_x(x)
            if routed:
                layer = self.layers[str(index)]
                wanted = maps
                if isinstance(layer.bypass, Reduction):
                    needed = layer.bypass.request()
                    wanted = replace(maps, request=needed if maps.request is None else maps.request.joined(needed))
                edit = edits.get(index) if edits else None
                found.append(layer(entering, block, context, wanted, state, edit, traced))
            else:
                h, statistics = attend_all(entering, block, context, maps.request, maps.projection)
                left = entering.with_x(h + block.mlp(h))
                found.append((left, LayerTrace.dense(entering, left, work) if traced else None, statistics))
            return found[-1][0].x

        x = block.called(tokens.x, compute)
        left, part, statistics = found[-1]
        return left.with_x(x), part, statistics

    @property
    def adapter(self) -> Backbone:
        """The adapter of the backbone as it is now."""
        return self._family(self.backbone)

    def is_active(self, training: bool) -> bool:
        """Whether the routed layers route, in training or in evaluation."""
        return self.active == "both" or (self.active == "train") == training

    @property
    def num_router_parameters(self) -> int:
        """Number of parameters beside the backbone's."""
        return sum(parameter.numel() for parameter in self.layers.parameters())

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay leaves alone: the backbone's own list."""
        own = getattr(self.backbone, "no_weight_decay", None)
        return {f"backbone.{name}" for name in own()} if callable(own) else set()

    def set_execution(self, execution: Execution) -> None:
        """`gather` (default) computes kept tokens only; `mask` computes all and discards, the slow reference."""
        if execution not in ("gather", "mask"):
            raise ValueError(f"execution = {execution}: expected gather or mask")
        for layer in self.layers.values():
            assert isinstance(layer, RoutedLayer)
            layer.execution = execution

    def set_attention(self, mode: AttentionMode) -> None:
        """How layers whose map is read attend.

        `fast` (default) computes output and statistics in one pass: 1e-6 from the untouched backbone's output. `exact`
        takes two, and leaves the output as it is to the last bit.
        """
        if mode not in ("fast", "exact"):
            raise ValueError(f"attention = {mode}: expected fast or exact")
        if self.request is not None:
            self.request = replace(self.request, exact=mode == "exact")

    def extra_repr(self) -> str:
        pattern = layer_string(self.routed_layers, self.adapter.depth)
        return f"routed_layers={self.routed_layers} (zero-based), {pattern} (T dense, D routed)"
