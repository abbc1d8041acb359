"""One tiny model of every family and kind of block that is routed: depth 4, two to four heads, patches of 2 pixels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
from tests.routing.tiny import decoder, images, stirred, token_ids
from timm.models.beit import Beit
from timm.models.eva import Eva
from torch import Tensor, nn

SIZE = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5}


def from_timm(name: str, **options: Any) -> nn.Module:
    """timm's model of this name, made small."""
    torch.manual_seed(0)
    return stirred(timm.create_model(name, **{**SIZE, **options}))


def built(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return stirred(kind(**{**SIZE, **options}))


TIMM: dict[str, Callable[[], Any]] = {
    "vit": partial(from_timm, "vit_small_patch16_224"),
    "vit-registers": partial(from_timm, "vit_base_patch14_reg4_dinov2"),
    "vit-gap": partial(from_timm, "vit_base_patch16_siglip_gap_224"),
    "deit-distilled": partial(from_timm, "deit_tiny_distilled_patch16_224"),
    "post-norm": partial(from_timm, "vit_base_patch16_rpn_224"),
    "parallel": partial(from_timm, "vit_base_patch16_xp_224"),
    "parallel-things": partial(from_timm, "vit_small_patch16_18x2_224"),
    "differential": partial(from_timm, "vit_dwee_patch16_reg1_gap_256"),
    "differential-parallel": partial(from_timm, "vit_dpwee_patch16_reg1_gap_256"),
    "eva": partial(from_timm, "eva_giant_patch14_224"),
    "eva-post-norm": partial(from_timm, "eva02_enormous_patch14_clip_224"),
    "eva02": partial(from_timm, "eva02_base_patch14_224"),
    "eva-gated": partial(built, Eva, attn_type="rope", use_rot_pos_emb=True, qkv_fused=False),
    "dinov3": partial(from_timm, "vit_small_patch16_dinov3"),
    "perception": partial(from_timm, "vit_pe_spatial_base_patch16_512"),
    "rope": partial(from_timm, "vit_small_patch16_rope_ape_224"),
    "rope-mixed": partial(from_timm, "vit_small_patch16_rope_mixed_224"),
    "sapiens": partial(from_timm, "vit_base_patch16_sapiens2", num_kv_heads=(2, 1, 1, 2)),
    "beit": partial(from_timm, "beit_base_patch16_224"),
    "beit-shared": partial(built, Beit, use_rel_pos_bias=True, use_shared_rel_pos_bias=True),
}


def from_transformers(kind: str, config: str, **options: Any) -> nn.Module:
    """A vision model of transformers, made small."""
    import transformers

    torch.manual_seed(0)
    vision = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 8, "patch_size": 2}
    vision |= {"intermediate_size": 64, **options}
    made = getattr(transformers, config)
    if config in ("CLIPConfig", "SiglipConfig"):
        made = made(vision_config=vision, num_labels=5)
    else:
        made = made(**vision, num_labels=5)
    return stirred(getattr(transformers, kind)(made))


HF: dict[str, Callable[[], Any]] = {
    "hf-vit": partial(from_transformers, "ViTForImageClassification", "ViTConfig"),
    "hf-vit-model": partial(from_transformers, "ViTModel", "ViTConfig", pooler_output_size=32),
    "hf-msn": partial(from_transformers, "ViTMSNForImageClassification", "ViTMSNConfig"),
    "hf-deit": partial(from_transformers, "DeiTForImageClassification", "DeiTConfig"),
    "hf-deit-teacher": partial(from_transformers, "DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    "hf-dinov2": partial(from_transformers, "Dinov2ForImageClassification", "Dinov2Config", use_swiglu_ffn=True),
    "hf-dinov2-model": partial(from_transformers, "Dinov2Model", "Dinov2Config"),
    "hf-dinov2-registers": partial(
        from_transformers, "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig"
    ),
    "hf-dinov3": partial(from_transformers, "DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=2),
    "hf-clip": partial(from_transformers, "CLIPForImageClassification", "CLIPConfig"),
    "hf-clip-vision": partial(from_transformers, "CLIPVisionModel", "CLIPVisionConfig"),
    "hf-clip-projected": partial(
        from_transformers, "CLIPVisionModelWithProjection", "CLIPVisionConfig", projection_dim=5
    ),
    "hf-siglip": partial(from_transformers, "SiglipForImageClassification", "SiglipConfig"),
    "hf-siglip-vision": partial(from_transformers, "SiglipVisionModel", "SiglipVisionConfig"),
}
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": partial(decoder, "Llama"),
    "mistral": partial(decoder, "Mistral"),
    "qwen2": partial(decoder, "Qwen2"),
    "qwen3": partial(decoder, "Qwen3"),
}
FAMILIES = {**TIMM, **HF, **DECODERS}
ROTARY = ("eva02", "eva-gated", "dinov3", "perception", "rope", "rope-mixed", "sapiens", "hf-dinov3", *DECODERS)


def inputs_of(name: str, batch: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """Images, or token ids of a decoder."""
    return token_ids(batch) if name in DECODERS else images(batch, dtype=dtype)


def output_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """What the original model says: a tensor, or what transformers wraps."""
    found = model(inputs)
    if isinstance(found, Tensor):
        return found
    return next(found[key] for key in ("logits", "image_embeds", "pooler_output") if found.get(key) is not None)
