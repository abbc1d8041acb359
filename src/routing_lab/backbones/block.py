"""The algebra of a pre-norm block, once for all families: h = x + a(x), y = h + m(h).

A family gives a view of its own modules through six hooks: the norms, the queries, the keys and values, the output
projection, the MLP and what scales a branch before it is added. Modules are called, never taken apart: where one module
projects queries, keys and values together, what is not needed is left out of its result. So adapters, quantised modules
and forward hooks that stand in their place have their effect.

Shape legend: B batch, N tokens, K queries, M keys, H query heads, G key and value heads, d head width, D width.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from routing_lab.attention import (
    AttentionStatistics,
    Kernel,
    MapRows,
    StatisticsRequest,
    attention,
    attention_map,
    attention_with_statistics,
    in_one_pass,
    map_statistics,
)
from routing_lab.routing.backbone import Block, MapWatch
from routing_lab.routing.cache import LayerCache
from routing_lab.routing.tokens import Positioned

Branch = Literal["attention", "mlp"]


class PreNormBlock(Block):
    """A view of one block's modules, made for one forward.

    Args:
        module: the block; a wrapper of torch's activation checkpointing is looked through.
        width: D.

    Attributes:
        heads, kv_heads, head_dim: H, G and d.
        causal: a query sees keys at its own and earlier positions only.
    """

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False

    def __init__(self, module: nn.Module, width: int) -> None:
        self.module: Any = unwrapped(module)  # parts of outside models are typed as Tensor | Module
        self.width = width
        self.recomputed = self.module is not module
        self._policy: Tensor | None = None
        self._shown: Tensor | None = None
        self._cache: LayerCache | None = None
        self._watch: tuple[MapWatch, int] | None = None

    # --- what a family states: the six hooks, and the calls of whole modules ---

    @abstractmethod
    def norm(self, x: Tensor, branch: Branch) -> Tensor:
        """What enters a branch, from the residual stream [B, N, D]."""

    @abstractmethod
    def query(self, normed: Tensor) -> Tensor:
        """[B, H, N, d] queries, as projected."""

    @abstractmethod
    def key_value(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """[B, G, N, d] keys and values, as projected."""

    def query_key_value(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same tokens."""
        return self.query(normed), *self.key_value(normed)

    def placed(self, x: Tensor, kind: Literal["query", "key"], tokens: Positioned, context: Any) -> Tensor:
        """Queries or keys [B, H or G, N, d], normalised and rotated to the positions of their tokens."""
        return x

    def logit_bias(self, queries: Positioned, keys: Positioned, context: Any) -> Tensor | None:
        """[B or 1, H, K, M] added to the logits for where query and key stand; None: nothing."""
        return None

    @abstractmethod
    def output(self, x: Tensor, normed: Tensor) -> Tensor:
        """The attention module's output [B, N, D] from what its heads put together [B, N, H d] for tokens `normed`."""

    @abstractmethod
    def feed_forward(self, normed: Tensor) -> Tensor:
        """The MLP's output [B, N, D]."""

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        """What is added to the stream of a branch's output: after layer scale and stochastic depth."""
        return x

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """How the attention module computes its map."""

    @abstractmethod
    def whole_block(self, tokens: Positioned, context: Any) -> Tensor | None:
        """The block's own call; None: it cannot take these tokens, for instance at positions of their own."""

    def whole_attention(self, normed: Tensor, tokens: Positioned, mask: Tensor | None, context: Any) -> Tensor | None:
        """The attention module's own call, for tokens that attend to each other; None: it cannot take them."""
        return None

    def called_attention(self, normed: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """compute(normed), the attention module's output, with the module's forward hooks."""
        return compute(normed)

    # --- the algebra ---

    @property
    def query_key_shape(self) -> tuple[int, int]:  # type: ignore[override]
        """Shape of the joint query and key projection."""
        return ((self.heads + self.kv_heads) * self.head_dim, self.width)

    def dense(self, tokens: Positioned, context: Any) -> Tensor:
        if self._policy is None and self._cache is None and self._watch is None:
            whole = self.whole_block(tokens, context)
            if whole is not None:
                return whole

        def parts(x: Tensor) -> Tensor:
            h = x + self.attend(replace(tokens, x=x), context)
            return h + self.mlp(h)

        return self.called(tokens.x, parts)

    def attend(
        self,
        queries: Positioned,
        context: Any,
        keys: Positioned | None = None,
        *,
        visible: Tensor | None = None,
        stays: Tensor | None = None,
    ) -> Tensor:
        normed = self._normed(queries.x, "attention")
        if self._cache is not None:
            seen = partial(self._attend_cached, self._cache, queries, context, keys, visible, stays)
            return self.residual(self.called_attention(normed, seen), "attention")
        mask = _mask(queries, keys or queries, visible, self.causal)
        if keys is None and self._policy is None and self._watch is None:
            whole = self.whole_attention(normed, queries, mask, context)
            if whole is not None:
                return self.residual(whole, "attention")
        if mask is None and self.causal:
            mask = _later_hidden(queries, keys or queries)

        def parts(normed: Tensor) -> Tensor:
            query, key, value = self._projected(normed, queries, keys, context)
            full = self._biased(mask, queries, keys or queries, context, query.dtype)
            self._show(query, key, full, queries, keys or queries)
            return self._finish(self.attention(query, key, value, full), normed)

        return self.residual(self.called_attention(normed, parts), "attention")

    def attend_with_statistics(
        self, tokens: Positioned, context: Any, request: StatisticsRequest, *, projection: Tensor | None = None
    ) -> tuple[Tensor, AttentionStatistics]:
        mask = _mask(tokens, tokens, None, self.causal)
        if mask is None and self.causal:
            mask = _later_hidden(tokens, tokens)
        found: list[AttentionStatistics] = []

        def parts(normed: Tensor) -> Tensor:
            query, key, value = self._projected(normed, tokens, None, context)
            full = self._biased(mask, tokens, tokens, context, query.dtype)
            self._show(query, key, full, tokens, tokens)
            other = self._random_map(normed, normed, projection, tokens, tokens, context)
            rows = self._rows(tokens, None, context)
            x, statistics = self.attention_with_statistics(query, key, value, full, request, rows, other)
            found.append(statistics)
            return self._finish(x, normed)

        output = self.called_attention(self._normed(tokens.x, "attention"), parts)
        return self.residual(output, "attention"), found[0]

    def attends_in_one_pass(self, request: StatisticsRequest, projection: Tensor | None = None) -> bool:
        return in_one_pass(self.kernel, request, policy=self._policy, other_map=projection)

    def statistics(
        self,
        queries: Positioned,
        context: Any,
        request: StatisticsRequest,
        keys: Positioned | None = None,
        *,
        projection: Tensor | None = None,
    ) -> AttentionStatistics:
        normed = self._normed(queries.x, "attention")
        query, key, value = self._projected(normed, queries, keys, context)
        normed_keys = normed if keys is None else self._normed(keys.x, "attention")
        other = self._random_map(normed, normed_keys, projection, queries, keys or queries, context)
        return self.map_statistics(query, key, value, request, self._rows(queries, keys, context), other)

    def mlp(self, x: Tensor) -> Tensor:
        return self.residual(self.feed_forward(self._normed(x, "mlp")), "mlp")

    def project(self, x: Tensor) -> Tensor:
        normed = self._normed(x, "attention")
        value = self._repeated(self.key_value(normed)[1])
        return self.residual(self._finish(self.alone(value), normed), "attention")

    def called(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return called(self.module, compute, x)

    def weighing(self, policy: Tensor) -> Self:
        if self.causal:
            raise ValueError("bypass.train = mask: is defined for backbones in which every token sees every other")
        twin = copy.copy(self)
        twin._policy = policy
        return twin

    def caching(self, cache: LayerCache) -> Self:
        twin = copy.copy(self)
        twin._cache = cache
        return twin

    def hiding(self, mask: Tensor) -> Self:
        twin = copy.copy(self)
        twin._shown = mask.unsqueeze(-1)
        return twin

    def watched(self, watch: MapWatch, part: int = 0) -> Self:
        twin = copy.copy(self)
        twin._watch = (watch, part)
        return twin

    # --- what a family overrides whose map is not one softmax ---

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """[B, H, N, d] what the heads put together, keys and values repeated for the query heads of each group."""
        return attention(query, key, value, self.kernel, mask=mask, policy=self._policy, causal=causal)

    def alone(self, value: Tensor) -> Tensor:
        """`attention` of tokens that see themselves alone, from their values."""
        return value

    def attention_with_statistics(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        request: StatisticsRequest,
        rows: MapRows,
        other: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, AttentionStatistics]:
        """`attention`, and the requested statistics of its map."""
        return attention_with_statistics(
            query, key, value, self.kernel, request, rows, mask=mask, policy=self._policy, other_map=other
        )

    def map_statistics(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        request: StatisticsRequest,
        rows: MapRows,
        other: tuple[Tensor, Tensor] | None,
    ) -> AttentionStatistics:
        """The requested statistics of the map."""
        return map_statistics(query, key, value, self.kernel, request, rows, other_map=other)

    # --- private ---

    def _normed(self, x: Tensor, branch: Branch) -> Tensor:
        if self._shown is None:
            return self.norm(x, branch)
        return self.norm(x * self._shown, branch) * self._shown

    def _projected(
        self, normed: Tensor, queries: Positioned, keys: Positioned | None, context: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, K, d], keys and values [B, H, M, d], where they stand."""
        query, key, value, _ = self._placed(normed, queries, keys, context)
        return query, self._repeated(key), self._repeated(value)

    def _placed(
        self, normed: Tensor, queries: Positioned, keys: Positioned | None, context: Any
    ) -> tuple[Tensor, Tensor, Tensor, Positioned]:
        """Queries [B, H, K, d], keys and values [B, G, M, d], where they stand, and whose keys they are."""
        if keys is None:
            query, key, value = self.query_key_value(normed)
        else:
            query = self.query(normed)
            key, value = self.key_value(self._normed(keys.x, "attention"))
        side = keys or queries
        query = self.placed(query, "query", queries, context)
        return query, self.placed(key, "key", side, context), value, side

    def _show(self, query: Tensor, key: Tensor, mask: Tensor | None, queries: Positioned, keys: Positioned) -> None:
        """Gives the map to whoever watches."""
        if self._watch is not None:
            watch, part = self._watch
            watch(part, attention_map(query, key, self.kernel, mask), queries, keys)

    def _attend_cached(
        self,
        cache: LayerCache,
        queries: Positioned,
        context: Any,
        keys: Positioned | None,
        visible: Tensor | None,
        stays: Tensor | None,
        normed: Tensor,
    ) -> Tensor:
        """The attention module's output for queries that see the keys of earlier calls besides those of this one."""
        query, key, value, side = self._placed(normed, queries, keys, context)
        seen = cache.extend(key, value, side.positions(), side.valid, stays)
        past = Positioned(seen.key, seen.position, seen.valid)
        number, known = query.shape[2], seen.position.shape[1]
        if visible is not None:
            everything = visible.new_ones(*visible.shape[:2], known - visible.shape[2])
            visible = torch.cat([everything, visible], dim=2)
        alone = keys is None and visible is None and seen.valid is None and queries.valid is None
        if alone and (number == 1 or number == known):
            mask, causal = None, number > 1  # the last token sees all; tokens without a past see each other
        else:
            mask, causal = _mask(queries, past, visible, True), False
        if number == 1 and self.kv_heads != self.heads:
            # The heads that share a key are its queries, so that nothing is repeated.
            grouped = query.unflatten(1, (self.kv_heads, -1)).squeeze(3)
            out = self.attention(grouped, seen.key, seen.value, mask).flatten(1, 2).unsqueeze(2)
        else:
            out = self.attention(query, self._repeated(seen.key), self._repeated(seen.value), mask, causal)
        return self._finish(out, normed)

    def _repeated(self, x: Tensor) -> Tensor:
        """[B, G, N, d] repeated for the query heads of each group: [B, H, N, d]."""
        return x if self.kv_heads == self.heads else x.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def _finish(self, x: Tensor, normed: Tensor) -> Tensor:
        """The attention module's output from the heads' [B, H, N, d]."""
        return self.output(x.transpose(1, 2).flatten(2), normed)

    def _biased(
        self, mask: Tensor | None, queries: Positioned, keys: Positioned, context: Any, dtype: torch.dtype
    ) -> Tensor | None:
        bias = self.logit_bias(queries, keys, context)
        if bias is None:
            return mask
        return bias.to(dtype) if mask is None else additive(mask, dtype) + bias.to(dtype)

    def _rows(self, queries: Positioned, keys: Positioned | None, context: Any) -> MapRows:
        side = keys or queries
        present = side.valid
        if self._policy is not None:
            weighed = self._policy.detach() > 0.5
            present = weighed if present is None else weighed & present
        return MapRows(
            query_position=queries.position,
            key_position=side.position,
            query_valid=present if keys is None else queries.valid,
            key_valid=present,
            key_bias=side.bias,
            query_segment=queries.segment,
            key_segment=side.segment,
            logit_bias=self.logit_bias(queries, side, context),
            same=keys is None,
            causal=self.causal,
        )

    def _random_map(
        self,
        normed_queries: Tensor,
        normed_keys: Tensor,
        projection: Tensor | None,
        queries: Positioned,
        keys: Positioned,
        context: Any,
    ) -> tuple[Tensor, Tensor] | None:
        """Queries and keys by `projection`, with the spread of the trained weights."""
        if projection is None:
            return None
        found: list[Tensor] = []
        sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim]
        weights = projection.to(normed_queries.dtype).split(sizes)
        for weight, spread, normed in zip(
            weights, self._spreads(normed_queries), (normed_queries, normed_keys), strict=True
        ):
            heads = nn.functional.linear(normed, weight * spread).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            found.append(heads)
        query = self.placed(found[0], "query", queries, context)
        return query, self._repeated(self.placed(found[1], "key", keys, context))

    @torch.no_grad()
    def _spreads(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Standard deviation of the trained query and key weights, read from what they do to the unit vectors."""
        with torch.autocast(like.device.type, enabled=False):
            units = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).unsqueeze(0)
            query, key, _ = self.query_key_value(nn.functional.pad(units, (0, 0, 0, 1)))  # and the origin, for biases
        return (query[:, :, :-1] - query[:, :, -1:]).std(), (key[:, :, :-1] - key[:, :, -1:]).std()


class FusedProjection(PreNormBlock):
    """A block whose attention projects queries, keys and values by one module."""

    projects_together = True

    @abstractmethod
    def projections(self, normed: Tensor) -> Tensor:
        """[B, N, 3 H d]: queries, keys and values side by side."""

    def query_key_value(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = self.projections(normed).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        return query, key, value

    def query(self, normed: Tensor) -> Tensor:
        return self.query_key_value(normed)[0]

    def key_value(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_key_value(normed)[1:]


def called(module: nn.Module, compute: Callable[[Tensor], Any], x: Tensor) -> Any:
    """compute(x) as the call of `module`: with its forward and backward hooks, if it has any."""
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return compute(x)
    stand_in = copy.copy(module)  # shares parameters, modules and hooks
    stand_in.forward = compute
    return stand_in(x)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a wrapper of torch's activation checkpointing, or the module itself."""
    return module._checkpoint_wrapped_module if hasattr(module, "checkpoint_fn") else module  # type: ignore[return-value]


def expect(module: nn.Module, kinds: tuple[type[nn.Module], ...], where: str, why: str) -> None:
    """Refuse a module that is not of one of these classes, or whose own call was replaced.

    Subclasses may compute something else, so that they are refused too.
    """
    if type(module) not in kinds:
        raise ValueError(f"{where} is a {type(module).__name__}: {why}")
    if "forward" in vars(module):
        raise ValueError(
            f"{where}: the forward of this {type(module).__name__} was replaced; routing would not call it"
        )


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to logits; another one as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))


def _mask(queries: Positioned, keys: Positioned, visible: Tensor | None, causal: bool) -> Tensor | None:
    """[B, 1, K, M], boolean or added to the logits; None: every query sees every key, or every one that is not later.

    Rows that would be left without a key see all: their result is discarded, but it must be finite.
    """
    allowed = visible
    if keys.valid is not None:
        allowed = keys.valid.unsqueeze(1) if visible is None else visible & keys.valid.unsqueeze(1)
    if causal and (allowed is not None or keys.bias is not None or keys.segment is not None or keys is not queries):
        order = keys.positions().unsqueeze(1) <= queries.positions().unsqueeze(2)
        allowed = order if allowed is None else allowed & order
    if queries.segment is not None and keys.segment is not None:
        together = keys.segment.unsqueeze(1) == queries.segment.unsqueeze(2)
        allowed = together if allowed is None else allowed & together
    if allowed is not None:
        allowed = allowed | ~allowed.any(dim=-1, keepdim=True)
        allowed = allowed.expand(-1, queries.x.shape[1], -1).unsqueeze(1)
    if keys.bias is None:
        return allowed
    bias = keys.bias.to(queries.x.dtype)[:, None, None].expand(-1, 1, queries.x.shape[1], -1)
    return bias if allowed is None else bias.masked_fill(~allowed, float("-inf"))


def _later_hidden(queries: Positioned, keys: Positioned) -> Tensor:
    """[B, 1, K, M] bool, True where a key does not come after the query."""
    allowed = keys.positions().unsqueeze(1) <= queries.positions().unsqueeze(2)
    return (allowed | ~allowed.any(dim=-1, keepdim=True)).unsqueeze(1)
