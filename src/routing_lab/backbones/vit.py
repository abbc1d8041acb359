"""Adapter for timm's VisionTransformer: class token or not, registers or a distillation token, any size of image.

Blocks are pre-norm or post-norm, with attention in parallel or not, differential or not.

Shape legend: B batch, N tokens, M keys, H heads, d head width, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from timm.layers import Attention, AttentionRope, DiffAttention
from timm.models.vision_transformer import Block as TimmPreNormBlock
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import Tensor, nn

from routing_lab.attention import AttentionStatistics, MapRows, StatisticsRequest, attention
from routing_lab.backbones.block import Branch, called, unwrapped
from routing_lab.backbones.timm_parts import TimmBackbone, TimmBlock, dropped, kind_of, patch_grid
from routing_lab.routing.backbone import Block, MapWatch
from routing_lab.routing.cache import LayerCache
from routing_lab.routing.tokens import Positioned, Tokens


class VisionTransformerBackbone(TimmBackbone):
    """A timm VisionTransformer."""

    accepts = VisionTransformer

    def embed_images(self, images: Tensor) -> tuple[Tokens, None]:
        vit = self.module
        x, position = dropped(vit.patch_drop, vit._pos_embed(vit.patch_embed(images)))
        return Tokens.placed(vit.norm_pre(x), len(self.prefix), position), None

    def grid(self, inputs: Tensor) -> tuple[int, int]:
        return patch_grid(self.module, inputs)

    def view(self, module: nn.Module, name: str) -> Any:
        view = VIEWS.get((kind_of(module), type(getattr(unwrapped(module), "attn", None))), ViTBlock)
        return view(module, self.width, name)


class ViTBlock(TimmBlock):
    """View of a pre-norm block."""

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (TimmPreNormBlock,)
    attentions: ClassVar[tuple[type[nn.Module], ...]] = (Attention, AttentionRope)

    def whole_block(self, tokens: Positioned, context: Any) -> Tensor:
        return self.module(tokens.x)

    def whole_attention(self, normed: Tensor, tokens: Positioned, mask: Tensor | None, context: Any) -> Tensor:
        return self.attn(normed, attn_mask=mask)


class PostNormBlock(ViTBlock):
    """View of a block whose branches are normed before they are added: x + drop_path1(norm1(attn(x)))."""

    kinds = (ResPostBlock,)

    def norm(self, x: Tensor, branch: Branch) -> Tensor:
        return x

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        block = self.module
        return block.drop_path1(block.norm1(x)) if branch == "attention" else block.drop_path2(block.norm2(x))


class Differential(TimmBlock):
    """Attention as the difference of two maps, A1 - lambda A2, each of half a head's queries and keys (2410.05258).

    The difference is no distribution over keys, so that no score is made of it.
    """

    one_map = False

    def __init__(self, module: nn.Module, width: int, name: str) -> None:
        super().__init__(module, width, name)
        self.heads = self.kv_heads = 2 * self.attn.num_heads

    def query_key_value(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._split(self.projections(normed))

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        halves = zip(query.unflatten(1, (-1, 2)).unbind(2), key.unflatten(1, (-1, 2)).unbind(2), strict=True)
        first, second = (
            attention(q, k, value, self.kernel, mask=mask, policy=self._policy, causal=causal) for q, k in halves
        )
        return self._normed_heads(first - self.attn._compute_lambda().type_as(query) * second)

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
        return self.attention(query, key, value, mask), self.map_statistics(query, key, value, request, rows, other)

    def alone(self, value: Tensor) -> Tensor:
        return self._normed_heads(value - self.attn._compute_lambda().type_as(value) * value)

    def _normed_heads(self, x: Tensor) -> Tensor:
        return self.attn.sub_norm(x) * (1 - self.attn.lambda_init)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, 2 H, N, d], values [B, H, N, 2 d]."""
        query, key, value = projected.chunk(3, dim=-1)
        wide = value.unflatten(-1, (-1, 2 * self.head_dim)).transpose(1, 2)
        return self._heads(query), self._heads(key), wide


class DifferentialBlock(Differential, ViTBlock):
    """View of a pre-norm block with differential attention."""

    attentions = (DiffAttention,)


class ParallelBlock(TimmBlock):
    """View of a block that computes attention and MLP beside each other, from one norm and one projection.

    Both together are the attention branch, and the MLP branch is nothing: such a block is routed as a whole.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (ParallelScalingBlock,)
    sublayers = ("block",)

    def __init__(self, module: nn.Module, width: int, name: str) -> None:
        super().__init__(module, width, name)
        self.projects_together = True
        self._projected_mlp: tuple[Tensor, Tensor] | None = None

    @property
    def attn(self) -> Any:
        return self.module

    def norm(self, x: Tensor, branch: Branch) -> Tensor:
        return self.module.in_norm(x)

    def projections(self, normed: Tensor) -> Tensor:
        block = self.module
        hidden, rest = block.in_proj(normed).split([block.in_split[0], 3 * self.width], dim=-1)
        self._projected_mlp = (normed, hidden)  # `output` of the same tokens needs it
        return rest

    def output(self, x: Tensor, normed: Tensor) -> Tensor:
        block = self.module
        if self._projected_mlp is None or self._projected_mlp[0] is not normed:
            self.projections(normed)
        assert self._projected_mlp is not None
        hidden = self._projected_mlp[1]
        if block.mlp_bias is not None:
            hidden = hidden + block.mlp_bias
        hidden = block.mlp_drop(block.mlp_act(hidden))
        if block.out_proj is not None:
            return block.out_proj(torch.cat((x, hidden), dim=-1))
        return block.attn_out_proj(x) + block.mlp_out_proj(hidden)

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        return self.module.drop_path(self.module.ls(x))

    def mlp(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def whole_block(self, tokens: Positioned, context: Any) -> Tensor:
        return self.module(tokens.x)

    def called_attention(self, normed: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return compute(normed)  # there is no attention module


class DifferentialParallelBlock(Differential, ParallelBlock):
    """View of a parallel block with differential attention."""

    kinds = (DiffParallelScalingBlock,)


class Things(Block):
    """View of a block with several attentions beside each other, and then several MLPs (2203.09795): both are sums.

    A token's map has the heads of all its attentions.
    """

    def __init__(self, module: nn.Module, width: int, name: str, views: tuple[Thing, ...] | None = None) -> None:
        self.module: Any = unwrapped(module)
        self.recomputed = self.module is not module
        block: Any = self.module
        parts = zip(block.attns, block.ffns, strict=True)
        self.views = views or tuple(Thing(attn, ffn, width, name) for attn, ffn in parts)
        self.projects_together = True
        self.heads = sum(view.heads for view in self.views)
        rows, columns = self.views[0].query_key_shape
        self.query_key_shape = (len(self.views) * rows, columns)

    def dense(self, tokens: Positioned, context: Any) -> Tensor:
        if all(view.plain for view in self.views):
            return self.module(tokens.x)

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
        return _sum(view.attend(queries, context, keys, visible=visible, stays=stays) for view in self.views)

    def attend_with_statistics(
        self, tokens: Positioned, context: Any, request: StatisticsRequest, *, projection: Tensor | None = None
    ) -> tuple[Tensor, AttentionStatistics]:
        found = [
            view.attend_with_statistics(tokens, context, request, projection=part)
            for view, part in zip(self.views, self._parts(projection), strict=True)
        ]
        return _sum(update for update, _ in found), _together([statistics for _, statistics in found])

    def statistics(
        self,
        queries: Positioned,
        context: Any,
        request: StatisticsRequest,
        keys: Positioned | None = None,
        *,
        projection: Tensor | None = None,
    ) -> AttentionStatistics:
        found = [
            view.statistics(queries, context, request, keys, projection=part)
            for view, part in zip(self.views, self._parts(projection), strict=True)
        ]
        return _together(found)

    def mlp(self, x: Tensor) -> Tensor:
        return _sum(view.mlp(x) for view in self.views)

    def project(self, x: Tensor) -> Tensor:
        return _sum(view.project(x) for view in self.views)

    def called(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return called(self.module, compute, x)

    def weighing(self, policy: Tensor) -> Things:
        return self._of(view.weighing(policy) for view in self.views)

    def caching(self, cache: LayerCache) -> Things:
        return self._of(view.caching(cache) for view in self.views)

    def hiding(self, mask: Tensor) -> Things:
        return self._of(view.hiding(mask) for view in self.views)

    def watched(self, watch: MapWatch, part: int = 0) -> Things:
        return self._of(view.watched(watch, part + number) for number, view in enumerate(self.views))

    def _of(self, views: Any) -> Things:
        twin = Things(self.module, self.views[0].width, "block", tuple(views))
        twin.recomputed = self.recomputed
        return twin

    def _parts(self, projection: Tensor | None) -> Any:
        return [None] * len(self.views) if projection is None else projection.chunk(len(self.views))


class Thing(ViTBlock):
    """View of one attention and one MLP of a `Things` block."""

    kinds = (nn.Sequential,)

    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int, name: str) -> None:
        super().__init__(attention, width, name)
        self.second: Any = mlp

    @property
    def plain(self) -> bool:
        """Whether nothing is weighed or watched."""
        return self._policy is None and self._watch is None

    def norm(self, x: Tensor, branch: Branch) -> Tensor:
        return self._branch(branch).norm(x)

    def feed_forward(self, normed: Tensor) -> Tensor:
        return self.second.mlp(normed)

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        part = self._branch(branch)
        return part.drop_path(part.ls(x))

    def _branch(self, branch: Branch) -> Any:
        return self.module if branch == "attention" else self.second


VIEWS: dict[tuple[type, type], Callable[[nn.Module, int, str], Block]] = {
    (TimmPreNormBlock, DiffAttention): DifferentialBlock,
    (ResPostBlock, Attention): PostNormBlock,
    (ResPostBlock, AttentionRope): PostNormBlock,
    (ParallelScalingBlock, type(None)): ParallelBlock,
    (DiffParallelScalingBlock, type(None)): DifferentialParallelBlock,
    (ParallelThingsBlock, type(None)): Things,
}
"""The view of each kind of block and attention; of all others `ViTBlock`, which refuses what it is not for."""


def _sum(parts: Any) -> Tensor:
    return torch.stack(list(parts)).sum(dim=0)


def _together(found: list[AttentionStatistics]) -> AttentionStatistics:
    """Statistics of several attentions as those of one with all their heads."""
    result = AttentionStatistics()
    for item in fields(AttentionStatistics):
        values = [getattr(statistics, item.name) for statistics in found]
        if values[0] is None:
            continue
        if item.name == "key_mean":
            value = torch.cat(values, dim=-1)
        elif item.name == "value_norm":
            value = torch.stack(values).square().sum(dim=0).sqrt()
        else:
            value = torch.cat(values, dim=1)
        setattr(result, item.name, value)
    return result
