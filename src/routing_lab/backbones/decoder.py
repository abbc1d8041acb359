"""Adapters for transformers' Llama, Mistral, Qwen2 and Qwen3: causal attention, rotary positions and grouped queries.

Shape legend: B batch, N tokens, H query heads, G key and value heads, d head width, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from routing_lab.attention import Kernel
from routing_lab.backbones.block import Branch, PreNormBlock, additive, called, expect, unwrapped
from routing_lab.routing.backbone import Backbone
from routing_lab.routing.cache import KVCache
from routing_lab.routing.tokens import Layout, Positioned, Tokens

if TYPE_CHECKING:
    from routing_lab.config.backbones import Rope

LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
ATTENTIONS = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)


@dataclass
class DecoderContext:
    """What all blocks share in one forward.

    Args:
        cosine, sine: [1, N, d], rotary angles of each position.
        mask: the causal mask as transformers' attention takes it, None where the kernel is causal by itself.
        window_mask: the same for layers with a sliding window, which no sequence is longer than.
    """

    cosine: Tensor
    sine: Tensor
    mask: Any
    window_mask: Any = None

    def angles(self, tokens: Positioned) -> tuple[Tensor, Tensor]:
        """[B or 1, N, d] cosine and sine at the tokens' own positions."""
        if tokens.position is None:
            return self.cosine, self.sine
        position = tokens.position.clamp_min(0)  # padding stands nowhere
        return self.cosine[0, position], self.sine[0, position]


class LlamaBackbone(Backbone):
    """A transformers LlamaForCausalLM. Inputs are token ids [B, N]; the output is logits [B, N, V]."""

    accepts: ClassVar[type[nn.Module]] = LlamaForCausalLM
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

    def example(self, batch: int) -> Tensor:
        config = self.module.config
        return torch.randint(config.vocab_size, (batch, min(config.max_position_embeddings, 512)))

    def embed(self, inputs: Tensor, layout: Layout | None = None) -> tuple[Tokens, DecoderContext]:
        model = self.module.model
        x = model.embed_tokens(inputs)
        if layout is not None and layout.cache is not None:
            return self._continued(x, layout, layout.cache)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        common = {"config": model.config, "inputs_embeds": x, "attention_mask": None, "cache": None}
        mask = create_causal_mask(**common, position_ids=positions)
        window_mask = None
        if any(_windowed(layer) for layer in model.layers):
            if x.shape[1] > model.config.sliding_window:
                raise ValueError(
                    f"inputs: {x.shape[1]} tokens are more than the sliding window of {model.config.sliding_window}; "
                    "routing is defined for attention to every earlier token"
                )
            window_mask = create_sliding_window_causal_mask(**common, position_ids=positions)
        cosine, sine = model.rotary_emb(x, position_ids=positions)
        tokens = Tokens(x)
        if layout is not None:
            tokens = replace(tokens, valid=layout.valid, position=layout.position(inputs), segment=layout.segment)
        return tokens, DecoderContext(cosine, sine, mask, window_mask)

    def _continued(self, x: Tensor, layout: Layout, cache: KVCache) -> tuple[Tokens, DecoderContext]:
        """Tokens behind those in a cache, which holds the rotary angles of all positions so far."""
        model, config = self.module.model, self.module.config
        reach = cache.reach + x.shape[1]
        if layout.segment is not None:
            raise ValueError("segments: a cache holds one document a sample")
        if model.rotary_emb.rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"cache: {model.rotary_emb.rope_type} rotary angles change with the length of the text, also those of "
                "keys that are cached; use yarn or linear"
            )
        if any(_windowed(layer) for layer in model.layers) and reach > config.sliding_window:
            raise ValueError(
                f"inputs: {reach} tokens are more than the sliding window of {config.sliding_window}; routing is "
                "defined for attention to every earlier token"
            )
        if cache.shared is None or cache.shared[0].shape[1] < reach:
            positions = torch.arange(max(2 * reach, 64), device=x.device).unsqueeze(0)
            cache.shared = model.rotary_emb(x, position_ids=positions)
        tokens = Tokens(x, position=layout.position(x[..., 0]), valid=layout.valid)
        return tokens, DecoderContext(cache.shared[0], cache.shared[1], None, None)

    def block(self, layer: int) -> LlamaBlock:
        return LlamaBlock(self.module.model.layers[layer], self.width, f"layer {layer}")

    def norm(self, x: Tensor) -> Tensor:
        return self.module.model.norm(x)

    def classify(self, normed: Tensor, valid: Tensor | None = None, pre_logits: bool = False) -> Tensor:
        return normed if pre_logits else self.module.lm_head(normed)


class MistralBackbone(LlamaBackbone):
    """A transformers MistralForCausalLM, for sequences within its sliding window."""

    accepts = MistralForCausalLM


class Qwen2Backbone(LlamaBackbone):
    """A transformers Qwen2ForCausalLM, for sequences within its sliding window, if it has one."""

    accepts = Qwen2ForCausalLM


class Qwen3Backbone(LlamaBackbone):
    """A transformers Qwen3ForCausalLM, for sequences within its sliding window, if it has one."""

    accepts = Qwen3ForCausalLM


@contextmanager
def stretched(model: Any, rope: Rope, factor: float) -> Iterator[None]:
    """Within it, rotary angles reach texts `factor` times as long as those that a decoder was trained on.

    Args:
        model: a decoder of `LlamaBackbone` and its kin.
        rope: `plain`: they go on as they are. `linear`: positions are divided by the factor s (Chen et al. 2023).
            `ntk`: the base is multiplied by s^(d / (d - 2)), which leaves the fastest rotation alone. `yarn`: between
            the two, by wavelength, with a temperature (Peng et al. 2023), as transformers has it.
        factor: at least 1, at which all are plain.
    """
    decoder = model.model
    trained = decoder.rotary_emb
    if rope == "plain" or factor == 1:
        yield
        return
    config = copy.deepcopy(trained.config)
    parameters: dict[str, Any] = dict(config.rope_parameters)
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(f"eval_rope={rope}: the backbone's rotary angles are stretched already; use plain")
    if rope == "ntk":
        width = decoder.layers[0].self_attn.head_dim
        parameters["rope_theta"] *= factor ** (width / (width - 2))
    else:
        trained_on = config.max_position_embeddings
        parameters |= {"rope_type": rope, "factor": factor, "original_max_position_embeddings": trained_on}
    config.rope_parameters = parameters
    decoder.rotary_emb = type(trained)(config).to(trained.inv_freq.device)
    try:
        yield
    finally:
        decoder.rotary_emb = trained


class LlamaBlock(PreNormBlock):
    """View of one decoder layer. A query attends to keys at its own and earlier positions."""

    causal = True

    def __init__(self, module: nn.Module, width: int, name: str) -> None:
        super().__init__(module, width)
        expect(self.module, LAYERS, name, "routing needs a decoder layer of Llama, Mistral, Qwen2 or Qwen3")
        attention = self.module.self_attn
        expect(attention, ATTENTIONS, f"{name}'s attention", "routing needs that of Llama, Mistral, Qwen2 or Qwen3")
        self.windowed = _windowed(self.module)
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
        norm = getattr(self.module.self_attn, "q_norm" if kind == "query" else "k_norm", None)  # Qwen3 has them
        x = x if norm is None else norm(x)
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
        if tokens.position is not None or tokens.segment is not None:
            return None
        # Past the layer's own checkpointing: `recomputed` says it, and the routed model does it.
        return nn.Module.__call__(
            self.module, tokens.x, attention_mask=self._mask(context), position_embeddings=context.angles(tokens)
        )

    def whole_attention(
        self, normed: Tensor, tokens: Positioned, mask: Tensor | None, context: DecoderContext
    ) -> Tensor | None:
        own = self._mask(context)
        if mask is None and tokens.position is not None and own is not None:
            return None
        if mask is not None and self.module.self_attn.config._attn_implementation != "sdpa":
            mask = additive(mask, normed.dtype)
        # Tokens come in the order of their positions, so that a kernel that is causal by itself stays right.
        return self.module.self_attn(
            normed,
            attention_mask=own if mask is None else mask,
            position_embeddings=context.angles(tokens),
        )[0]

    def called_attention(self, normed: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return called(self.module.self_attn, lambda x: (compute(x), None), normed)[0]

    def _mask(self, context: DecoderContext) -> Any:
        return context.window_mask if self.windowed else context.mask

    def _heads(self, x: Tensor) -> Tensor:
        """[B, N, heads d] as [B, heads, N, d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _windowed(layer: Any) -> bool:
    """Whether a decoder layer's attention ends at a sliding window: Qwen says it by layer, Mistral for all."""
    attention: Any = unwrapped(layer).self_attn
    everywhere = getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", everywhere) is not None
