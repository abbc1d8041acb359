"""Adapter for transformers' LlamaForCausalLM: causal attention, rotary positions and grouped queries.

Shape legend: B batch, N tokens, H query heads, G key and value heads, d head width, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, apply_rotary_pos_emb

from routing_lab.attention import Kernel
from routing_lab.backbones.block import Branch, PreNormBlock, additive, called, expect
from routing_lab.routing.model import Backbone
from routing_lab.routing.tokens import Positioned, Tokens


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

    def angles(self, tokens: Positioned) -> tuple[Tensor, Tensor]:
        """[B or 1, N, d] cosine and sine at the tokens' own positions."""
        if tokens.position is None:
            return self.cosine, self.sine
        position = tokens.position.clamp_min(0)  # padding stands nowhere
        return self.cosine[0, position], self.sine[0, position]


class LlamaBackbone(Backbone):
    """A transformers LlamaForCausalLM. Inputs are token ids [B, N] without padding; the output is logits [B, N, V]."""

    accepts = LlamaForCausalLM
    causal = True
    prefix: tuple[str, ...] = ()

    @property
    def depth(self) -> int:
        return len(self.module.model.layers)

    @property
    def width(self) -> int:
        return self.module.config.hidden_size

    @property
    def heads(self) -> int:
        return self.module.config.num_attention_heads

    def embed(self, inputs: Tensor) -> tuple[Tokens, DecoderContext]:
        model = self.module.model
        x = model.embed_tokens(inputs)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        mask = create_causal_mask(
            config=model.config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=positions
        )
        cosine, sine = model.rotary_emb(x, position_ids=positions)
        return Tokens(x), DecoderContext(cosine, sine, mask)

    def block(self, layer: int) -> LlamaBlock:
        return LlamaBlock(self.module.model.layers[layer], self.width, f"layer {layer}")

    def norm(self, x: Tensor) -> Tensor:
        return self.module.model.norm(x)

    def head(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.module.lm_head(self.module.model.norm(x))


class LlamaBlock(PreNormBlock):
    """View of one Llama decoder layer. A query attends to keys at its own and earlier positions."""

    causal = True

    def __init__(self, module: nn.Module, width: int, name: str) -> None:
        super().__init__(module, width)
        expect(self.module, (LlamaDecoderLayer,), name, "routing needs transformers' LlamaDecoderLayer")
        attention = self.module.self_attn
        expect(attention, (LlamaAttention,), f"{name}'s attention", "routing needs transformers' LlamaAttention")
        self.head_dim = attention.head_dim
        self.heads = attention.config.num_attention_heads
        self.kv_heads = self.heads // attention.num_key_value_groups
        self.recomputed = self.recomputed or self.module.gradient_checkpointing

    def norm(self, x: Tensor, branch: Branch) -> Tensor:
        return self.module.input_layernorm(x) if branch == "attention" else self.module.post_attention_layernorm(x)

    def query(self, normed: Tensor) -> Tensor:
        return self._heads(self.module.self_attn.q_proj(normed))

    def key_value(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        attention = self.module.self_attn
        return self._heads(attention.k_proj(normed)), self._heads(attention.v_proj(normed))

    def placed(self, x: Tensor, kind: Any, tokens: Positioned, context: DecoderContext) -> Tensor:
        return apply_rotary_pos_emb(x, x, *context.angles(tokens))[0]

    def output(self, x: Tensor, normed: Tensor) -> Tensor:
        return self.module.self_attn.o_proj(x)

    def feed_forward(self, normed: Tensor) -> Tensor:
        return self.module.mlp(normed)

    @property
    def kernel(self) -> Kernel:
        attention = self.module.self_attn
        return Kernel(attention.scaling, attention.attention_dropout if attention.training else 0.0)

    def whole_block(self, tokens: Positioned, context: DecoderContext) -> Tensor | None:
        if tokens.position is not None:
            return None
        # Past the layer's own checkpointing: `recomputed` says it, and the routed model does it.
        return nn.Module.__call__(
            self.module, tokens.x, attention_mask=context.mask, position_embeddings=context.angles(tokens)
        )

    def whole_attention(
        self, normed: Tensor, tokens: Positioned, mask: Tensor | None, context: DecoderContext
    ) -> Tensor | None:
        if mask is None and tokens.position is not None and context.mask is not None:
            return None
        if mask is not None and self.module.self_attn.config._attn_implementation != "sdpa":
            mask = additive(mask, normed.dtype)
        # Tokens come in the order of their positions, so that a kernel that is causal by itself stays right.
        return self.module.self_attn(
            normed,
            attention_mask=context.mask if mask is None else mask,
            position_embeddings=context.angles(tokens),
        )[0]

    def called_attention(self, normed: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return called(self.module.self_attn, lambda x: (compute(x), None), normed)[0]

    def _heads(self, x: Tensor) -> Tensor:
        """[B, N, heads d] as [B, heads, N, d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
