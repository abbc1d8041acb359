"""Adapter for timm's VisionTransformer: the routing core sees its tokens, blocks and head.

Whole modules of the model are called wherever they compute what is needed. Only the attention of a layer whose map is
read, or whose queries and keys are different tokens, is put together from timm's own parts here.

Shape legend: B batch, N tokens, K queries, M keys, H heads, d head width, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from routing_lab.attention import AttentionStatistics, StatisticsRequest, attention_statistics, policy_softmax
from routing_lab.routing.base import Block
from routing_lab.routing.model import Backbone


class VisionTransformerBackbone(Backbone):
    """A timm VisionTransformer with standard pre-norm blocks, class token or not, registers or a distillation token.

    Raises:
        ValueError: for another kind of model, block or attention, naming it.
    """

    causal = False

    def __init__(self, module: VisionTransformer) -> None:
        if not isinstance(module, VisionTransformer):
            raise ValueError(
                f"backbone = {type(module).__name__}: expected a timm VisionTransformer or a transformers "
                "LlamaForCausalLM"
            )
        self.module: Any = module  # timm's parts are typed as Tensor | Module
        self.depth = len(module.blocks)
        self.width = module.embed_dim
        self.prefix = _prefix_kinds(module)
        self._blocks = [ViTBlock(block, index) for index, block in enumerate(module.blocks)]
        self.heads = self._blocks[0].heads

    def embed(self, inputs: Tensor) -> tuple[Tensor, None]:
        vit = self.module
        return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(inputs)))), None

    def block(self, layer: int) -> ViTBlock:
        return self._blocks[layer]

    def norm(self, x: Tensor) -> Tensor:
        return self.module.norm(x)

    def head(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        vit = self.module
        x = vit.norm(x)
        if valid is None or vit.global_pool == "token":
            return vit.forward_head(x)
        if vit.global_pool != "avg" or vit.attn_pool is not None:
            raise ValueError(
                f"backbone.pool = {vit.global_pool}: samples with different numbers of tokens need pool=token or "
                "pool=avg"
            )
        first = 0 if vit.pool_include_prefix else len(self.prefix)
        weight = valid[:, first:].unsqueeze(-1).to(x.dtype)
        pooled = (x[:, first:] * weight).sum(dim=1) / weight.sum(dim=1).clamp_min(1)
        return vit.head(vit.head_drop(vit.fc_norm(pooled)))


class ViTBlock(Block):
    """View of one timm block: x + drop_path(ls1(attn(norm1(x)))), then the same with the MLP."""

    def __init__(self, module: Any, index: int) -> None:
        if type(module) is not TimmBlock or type(module.attn) is not Attention:
            raise ValueError(
                f"block {index} is a {type(module).__name__} with {type(getattr(module, 'attn', None)).__name__}: "
                "routing needs timm's pre-norm Block with Attention"
            )
        self.module: Any = module
        self.heads = module.attn.num_heads
        self.query_key_shape = (2 * module.attn.attn_dim, module.attn.qkv.in_features)

    def dense(self, x: Tensor, context: Any) -> Tensor:
        return self.module(x)

    def attend(
        self,
        queries: Tensor,
        context: Any,
        *,
        keys: Tensor | None = None,
        query_index: Tensor | None = None,
        key_index: Tensor | None = None,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> Tensor:
        block = self.module
        mask = _attention_mask(key_mask, key_bias, queries)
        if keys is None:
            return block.drop_path1(block.ls1(block.attn(self._norm1(queries), attn_mask=mask)))
        normed = self._norm1(queries)
        query = self._split(self._linear(normed, 0, 1))
        key, value = self._split(self._linear(self._norm1(keys), 1, 3), 2)
        return self._output(block.attn.q_norm(query), block.attn.k_norm(key), value, normed, mask)

    def attend_with_statistics(
        self,
        x: Tensor,
        context: Any,
        request: StatisticsRequest,
        *,
        valid: Tensor | None = None,
        key_bias: Tensor | None = None,
        projection: Tensor | None = None,
    ) -> tuple[Tensor, AttentionStatistics]:
        attn = self.module.attn
        normed = self.module.norm1(x)
        query, key, value = self._split(attn.qkv(normed), 3)
        query, key = attn.q_norm(query), attn.k_norm(key)
        output = self._output(query, key, value, normed, _attention_mask(valid, key_bias, x))
        trained_key = key
        if projection is not None:
            query, key = self._random_query_key(normed, normed, projection)
        statistics = attention_statistics(
            query,
            key,
            value,
            attn.scale,
            request,
            query_valid=valid,
            key_valid=valid,
            key_bias=key_bias,
            trained_key=trained_key,
        )
        return output, statistics

    def statistics(
        self,
        queries: Tensor,
        context: Any,
        request: StatisticsRequest,
        *,
        keys: Tensor | None = None,
        query_index: Tensor | None = None,
        key_index: Tensor | None = None,
        query_valid: Tensor | None = None,
        key_valid: Tensor | None = None,
        key_bias: Tensor | None = None,
        projection: Tensor | None = None,
    ) -> AttentionStatistics:
        attn = self.module.attn
        normed_queries = self.module.norm1(queries)
        normed_keys = normed_queries if keys is None else self.module.norm1(keys)
        query = attn.q_norm(self._split(self._linear(normed_queries, 0, 1)))
        key, value = self._split(self._linear(normed_keys, 1, 3), 2)
        key = attn.k_norm(key)
        trained_key = key
        if projection is not None:
            query, key = self._random_query_key(normed_queries, normed_keys, projection)
        return attention_statistics(
            query,
            key,
            value,
            attn.scale,
            request,
            query_index=query_index,
            key_index=key_index,
            query_valid=query_valid,
            key_valid=query_valid if keys is None else key_valid,
            key_bias=key_bias,
            trained_key=trained_key,
        )

    def mlp(self, x: Tensor) -> Tensor:
        block = self.module
        return block.drop_path2(block.ls2(block.mlp(self._norm2(x))))

    def project(self, x: Tensor) -> Tensor:
        normed = self.module.norm1(x)
        return self._project_out(self._linear(normed, 2, 3), normed)

    def weighing(self, policy: Tensor) -> ViTBlock:
        return _WeighingBlock(self.module, policy)

    def hiding(self, mask: Tensor) -> ViTBlock:
        return _HidingBlock(self.module, mask)

    def _norm1(self, x: Tensor) -> Tensor:
        return self.module.norm1(x)

    def _norm2(self, x: Tensor) -> Tensor:
        return self.module.norm2(x)

    def _linear(self, x: Tensor, first: int, last: int) -> Tensor:
        """Parts `first` to `last` of (query, key, value), side by side: [B, N, (last - first) H d]."""
        qkv = self.module.attn.qkv
        rows = slice(first * self.module.attn.attn_dim, last * self.module.attn.attn_dim)
        return F.linear(x, qkv.weight[rows], None if qkv.bias is None else qkv.bias[rows])

    def _split(self, x: Tensor, parts: int = 1) -> Any:
        """[B, N, parts H d] as `parts` tensors [B, H, N, d], or as the one."""
        split = x.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return split[0] if parts == 1 else split.unbind(0)

    def _output(self, query: Tensor, key: Tensor, value: Tensor, normed: Tensor, mask: Tensor | None) -> Tensor:
        attn = self.module.attn
        dropout = attn.attn_drop.p if attn.training else 0.0
        if attn.fused_attn:
            x = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        else:
            logits = (query * attn.scale) @ key.transpose(-2, -1)
            if mask is not None:
                logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
            x = attn.attn_drop(logits.softmax(dim=-1)) @ value
        return self._project_out(x.transpose(1, 2).flatten(2), normed)

    def _project_out(self, x: Tensor, normed: Tensor) -> Tensor:
        block, attn = self.module, self.module.attn
        x = attn.norm(x)
        if attn.gate is not None:
            x = x * attn.gate(normed).sigmoid()
        return block.drop_path1(block.ls1(attn.proj_drop(attn.proj(x))))

    def _random_query_key(self, queries: Tensor, keys: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
        attn = self.module.attn
        trained = attn.qkv.weight[: 2 * attn.attn_dim].detach()
        spread = trained.unflatten(0, (2, attn.attn_dim)).std(dim=(1, 2))
        query_weight, key_weight = projection.to(trained.dtype).chunk(2)
        query = self._split(F.linear(queries, query_weight * spread[0]))
        key = self._split(F.linear(keys, key_weight * spread[1]))
        return attn.q_norm(query), attn.k_norm(key)


class _HidingBlock(ViTBlock):
    """A block whose branches get norm(x m) m; mask m [B, N] bool."""

    def __init__(self, module: TimmBlock, mask: Tensor) -> None:
        super().__init__(module, 0)
        self.mask = mask.unsqueeze(-1)

    def _norm1(self, x: Tensor) -> Tensor:
        return self.module.norm1(x * self.mask) * self.mask

    def _norm2(self, x: Tensor) -> Tensor:
        return self.module.norm2(x * self.mask) * self.mask


class _WeighingBlock(ViTBlock):
    """A block whose attention weighs every key by policy [B, N]; all tokens attend to all."""

    def __init__(self, module: TimmBlock, policy: Tensor) -> None:
        super().__init__(module, 0)
        self.policy = policy

    def dense(self, x: Tensor, context: Any) -> Tensor:
        h = x + self.attend(x, context)
        return h + self.mlp(h)

    def attend(self, queries: Tensor, context: Any, *, key_bias: Tensor | None = None, **options: Any) -> Tensor:
        assert all(value is None for value in options.values())  # no token is missing
        attn, normed = self.module.attn, self._norm1(queries)
        query, key, value = self._split(attn.qkv(normed), 3)
        mask = _attention_mask(None, key_bias, queries)
        return self._output(attn.q_norm(query), attn.k_norm(key), value, normed, mask)

    def attend_with_statistics(
        self,
        x: Tensor,
        context: Any,
        request: StatisticsRequest,
        *,
        valid: Tensor | None = None,
        key_bias: Tensor | None = None,
        projection: Tensor | None = None,
    ) -> tuple[Tensor, AttentionStatistics]:
        present = self.policy.detach() > 0.5
        statistics = self.statistics(x, context, request, query_valid=present, key_bias=key_bias, projection=projection)
        return self.attend(x, context, key_bias=key_bias, key_mask=valid), statistics

    def _output(self, query: Tensor, key: Tensor, value: Tensor, normed: Tensor, mask: Tensor | None) -> Tensor:
        attn = self.module.attn
        logits = (query * attn.scale) @ key.transpose(-2, -1)
        attention = policy_softmax(logits if mask is None else logits + mask, self.policy)
        x = attn.attn_drop(attention.to(value.dtype)) @ value
        return self._project_out(x.transpose(1, 2).flatten(2), normed)


def _attention_mask(key_mask: Tensor | None, key_bias: Tensor | None, queries: Tensor) -> Tensor | None:
    """[B, 1, K, M] as timm's attention takes it, boolean or additive.

    key_mask: [B, M] or [B, K, M]. key_bias: [B, M].
    """
    if key_mask is not None:
        if key_mask.dim() == 2:
            key_mask = key_mask.unsqueeze(1).expand(-1, queries.shape[1], -1)
        key_mask = key_mask.unsqueeze(1)
    if key_bias is None:
        return key_mask
    bias = key_bias.to(queries.dtype)[:, None, None].expand(-1, 1, queries.shape[1], -1)
    return bias if key_mask is None else bias.masked_fill(~key_mask, float("-inf"))


def _prefix_kinds(vit: VisionTransformer) -> tuple[str, ...]:
    kinds: list[str] = []
    if vit.cls_token is not None:
        kinds.append("class")
    if getattr(vit, "dist_token", None) is not None:
        kinds.append("distillation")
    if vit.reg_token is not None:
        kinds.extend(["registers"] * vit.reg_token.shape[1])
    if len(kinds) != vit.num_prefix_tokens:
        raise ValueError(f"backbone has {vit.num_prefix_tokens} prefix tokens, of which only {kinds} are known")
    return tuple(kinds)
