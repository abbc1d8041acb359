"""Adapter for transformers' LlamaForCausalLM: causal attention, rotary positions and grouped queries.

Shape legend: B batch, N tokens, K queries, M keys, H query heads, G key and value heads, d head width, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from routing_lab.attention import AttentionStatistics, StatisticsRequest
from routing_lab.routing.base import Block
from routing_lab.routing.model import Backbone


@dataclass
class DecoderContext:
    """What all blocks share in one forward.

    Args:
        cosine, sine: [1, N, d], rotary angles of each position.
        mask: the causal mask as transformers' attention takes it, None where the kernel is causal by itself.
    """

    cosine: Tensor
    sine: Tensor
    mask: Any


class LlamaBackbone(Backbone):
    """A transformers LlamaForCausalLM. Inputs are token ids [B, N] without padding; the output is logits [B, N, V]."""

    causal = True
    prefix: tuple[str, ...] = ()

    def __init__(self, module: LlamaForCausalLM) -> None:
        self.module: Any = module  # transformers' parts are typed as Tensor | Module
        config = module.config
        self.depth = config.num_hidden_layers
        self.width = config.hidden_size
        self.heads = config.num_attention_heads
        self._blocks = [LlamaBlock(layer) for layer in module.model.layers]

    def embed(self, inputs: Tensor) -> tuple[Tensor, DecoderContext]:
        model = self.module.model
        x = model.embed_tokens(inputs)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        mask = create_causal_mask(
            config=model.config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=positions
        )
        cosine, sine = model.rotary_emb(x, position_ids=positions)
        return x, DecoderContext(cosine, sine, mask)

    def block(self, layer: int) -> LlamaBlock:
        return self._blocks[layer]

    def norm(self, x: Tensor) -> Tensor:
        return self.module.model.norm(x)

    def head(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.module.lm_head(self.module.model.norm(x))


class LlamaBlock(Block):
    """View of one Llama decoder layer. A query attends to keys at its own and earlier positions."""

    def __init__(self, module: Any) -> None:
        self.module: Any = module
        attention = module.self_attn
        self.query_key_shape = (
            attention.q_proj.out_features + attention.k_proj.out_features,
            attention.q_proj.in_features,
        )

    def dense(self, x: Tensor, context: DecoderContext) -> Tensor:
        return self.module(x, attention_mask=context.mask, position_embeddings=(context.cosine, context.sine))

    def attend(
        self,
        queries: Tensor,
        context: DecoderContext,
        *,
        keys: Tensor | None = None,
        query_index: Tensor | None = None,
        key_index: Tensor | None = None,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> Tensor:
        assert key_bias is None  # tokens of a decoder are never merged
        layer, attention = self.module, self.module.self_attn
        normed_queries = layer.input_layernorm(queries)
        if keys is None and query_index is None and key_mask is None:
            return attention(
                normed_queries, attention_mask=context.mask, position_embeddings=(context.cosine, context.sine)
            )[0]
        normed_keys = normed_queries if keys is None else layer.input_layernorm(keys)
        query_position = _positions(queries, query_index)
        key_position = query_position if keys is None else _positions(keys, key_index)
        allowed = key_position.unsqueeze(1) <= query_position.unsqueeze(2)
        if key_mask is not None:
            allowed = allowed & (key_mask if key_mask.dim() == 3 else key_mask.unsqueeze(1))
            # Rows of padding may be left without a key; their result is discarded, but it must be finite.
            allowed = allowed | ~allowed.any(dim=-1, keepdim=True)
        query = _rotate(self._heads(attention.q_proj(normed_queries)), context, query_position)
        key = _rotate(self._heads(attention.k_proj(normed_keys)), context, key_position)
        value = self._heads(attention.v_proj(normed_keys))
        x = F.scaled_dot_product_attention(
            query,
            self._repeat(key),
            self._repeat(value),
            attn_mask=allowed.unsqueeze(1),
            dropout_p=attention.attention_dropout if attention.training else 0.0,
            scale=attention.scaling,
        )
        return attention.o_proj(x.transpose(1, 2).flatten(2))

    def attend_with_statistics(
        self, x: Tensor, context: Any, request: StatisticsRequest, **options: Any
    ) -> tuple[Tensor, AttentionStatistics]:
        raise ValueError(_NO_STATISTICS)

    def statistics(
        self, queries: Tensor, context: Any, request: StatisticsRequest, **options: Any
    ) -> AttentionStatistics:
        raise ValueError(_NO_STATISTICS)

    def mlp(self, x: Tensor) -> Tensor:
        return self.module.mlp(self.module.post_attention_layernorm(x))

    def project(self, x: Tensor) -> Tensor:
        attention = self.module.self_attn
        value = self._heads(attention.v_proj(self.module.input_layernorm(x)))
        return attention.o_proj(self._repeat(value).transpose(1, 2).flatten(2))

    def weighing(self, policy: Tensor) -> LlamaBlock:
        raise ValueError("bypass.train = mask: is defined for vision transformers only")

    def hiding(self, mask: Tensor) -> LlamaBlock:
        raise ValueError("bypass = ponder_masked: is defined for vision transformers only")

    def _heads(self, x: Tensor) -> Tensor:
        """[B, N, heads d] as [B, heads, N, d]."""
        return x.unflatten(-1, (-1, self.module.self_attn.head_dim)).transpose(1, 2)

    def _repeat(self, x: Tensor) -> Tensor:
        """[B, G, N, d] repeated for the query heads of each group: [B, H, N, d]."""
        return x.repeat_interleave(self.module.self_attn.num_key_value_groups, dim=1)


_NO_STATISTICS = (
    "a causal decoder has no attention statistics: attention received counts queries that a token's own position does "
    "not see; use a router that needs no attention map"
)


def _positions(x: Tensor, index: Tensor | None) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0).expand(x.shape[0], -1) if index is None else index


def _rotate(x: Tensor, context: DecoderContext, position: Tensor) -> Tensor:
    cosine, sine = context.cosine[0, position], context.sine[0, position]
    return apply_rotary_pos_emb(x, x, cosine, sine)[0]
