"""Builds backbones from plain values."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import timm
import torch
from timm.layers import Mlp, SwiGLUPacked, resample_abs_pos_embed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

MLP_LAYERS = {"gelu": Mlp, "swiglu": SwiGLUPacked}


def build_vit(
    *,
    num_classes: int,
    timm_name: str | None = None,
    pretrained: bool = False,
    patch_stride: int | None = None,
    distilled: bool = False,
    mlp: str | None = None,
    **options: Any,
) -> nn.Module:
    """A timm VisionTransformer, initialised from torch's global generator.

    Args:
        num_classes: outputs of the head; 0: no head.
        timm_name: build timm's model of this name; None: build one from the options.
        pretrained: load timm's pretrained weights.
        patch_stride: distance of neighbouring patches in pixels; None: the patch size.
        distilled: with a distillation token and head; a named model decides that itself.
        mlp: `gelu` or `swiglu`; None: what the named model has.
        options: keyword arguments of timm's VisionTransformer; None: what the named model has, or timm's default.

    Raises:
        ValueError: if timm has no such model, cannot build it with these options or has no weights at hand.
    """
    model: Any
    options = {key: value for key, value in options.items() if value is not None}
    if mlp is not None:
        options["mlp_layer"] = MLP_LAYERS[mlp]
    if timm_name is not None:
        model = _create(timm_name, num_classes, pretrained, options)
    elif pretrained:
        raise ValueError(
            "init = pretrained: a backbone built from its fields has no pretrained weights; set backbone.timm_name"
        )
    else:
        kind = VisionTransformerDistilled if distilled else VisionTransformer
        model = kind(num_classes=num_classes, qkv_bias=True, **options)
    if patch_stride is not None and (patch_stride, patch_stride) != model.patch_embed.patch_size:
        set_patch_stride(model, patch_stride)
    return model


def build_llama(
    *,
    num_classes: int = 0,
    pretrained: bool = False,
    vocab_size: int,
    width: int,
    mlp_width: int,
    depth: int,
    heads: int,
    kv_heads: int,
    context: int,
    rope_theta: float = 10000.0,
    norm_eps: float = 1e-6,
    tie_embeddings: bool = False,
) -> nn.Module:
    """A transformers LlamaForCausalLM, initialised from torch's global generator.

    Args:
        num_classes: has no effect, the head has an output for every token of the vocabulary.

    Raises:
        ValueError: pretrained weights, of which there are none.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if pretrained:
        raise ValueError("init = pretrained: a decoder built from its fields has no pretrained weights")
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=mlp_width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=context,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            rms_norm_eps=norm_eps,
            tie_word_embeddings=tie_embeddings,
        )
    )


def set_patch_stride(vit: VisionTransformer, stride: int) -> None:
    """Overlapping patches: moves the patch window by `stride` pixels and resamples the position embedding to the new
    grid.

    Weights keep their shapes except the position embedding, which is interpolated (bicubic, antialiased).
    """
    embed = vit.patch_embed
    old_grid = embed.grid_size
    embed.proj.stride = (stride, stride)
    embed.grid_size = tuple(
        (size - patch) // stride + 1 for size, patch in zip(embed.img_size, embed.patch_size, strict=True)
    )
    embed.num_patches = embed.grid_size[0] * embed.grid_size[1]
    if vit.pos_embed is not None:
        prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
        resampled = resample_abs_pos_embed(
            vit.pos_embed.detach(), new_size=list(embed.grid_size), old_size=list(old_grid), num_prefix_tokens=prefix
        )
        vit.pos_embed = nn.Parameter(resampled)


def _create(name: str, num_classes: int, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    if not timm.is_model(name.split(".")[0]):
        known = timm.list_models(module=["vision_transformer", "deit"])
        close = get_close_matches(name.split(".")[0], known, n=5)
        raise ValueError(f"backbone.timm_name = {name}: timm has no such model; similar: {', '.join(close) or 'none'}")
    try:
        return timm.create_model(
            name, pretrained=pretrained, num_classes=num_classes, **_taken(name.split(".")[0], options)
        )
    except Exception as error:
        what = "pretrained weights could not be loaded" if pretrained else "cannot be built with these fields"
        raise ValueError(f"backbone.timm_name = {name}: {what}: {error}") from error


def _taken(architecture: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that its class does not take and that say what it has anyway."""
    with torch.device("meta"):
        model: Any = timm.create_model(architecture)
    if isinstance(model, VisionTransformer):
        return options
    registers = getattr(model, "reg_token", None)
    own = {"class_token": model.cls_token is not None, "reg_tokens": 0 if registers is None else registers.shape[1]}
    return {key: value for key, value in options.items() if key not in own or value != own[key]}
