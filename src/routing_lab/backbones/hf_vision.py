"""Adapters for transformers' ViT, DeiT, Dinov2 (with and without registers), DINOv3 ViT, CLIP and SigLIP vision towers.

A model with a classifier gives logits [B, C], another what transformers calls `pooler_output` or `image_embeds`.

Shape legend: B batch, N tokens, P patches, H heads, d head width, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPAttention, CLIPEncoderLayer, CLIPPreTrainedModel
from transformers.models.deit.modeling_deit import DeiTAttention, DeiTLayer, DeiTPreTrainedModel
from transformers.models.dinov2.modeling_dinov2 import Dinov2Attention, Dinov2Layer, Dinov2PreTrainedModel
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersAttention,
    Dinov2WithRegistersLayer,
    Dinov2WithRegistersPreTrainedModel,
)
from transformers.models.dinov3_vit.modeling_dinov3_vit import (
    DINOv3ViTAttention,
    DINOv3ViTLayer,
    DINOv3ViTPreTrainedModel,
    rotate_half,
)
from transformers.models.siglip.modeling_siglip import SiglipAttention, SiglipEncoderLayer, SiglipPreTrainedModel
from transformers.models.vit.modeling_vit import ViTAttention, ViTLayer, ViTPreTrainedModel

from routing_lab.attention import Kernel
from routing_lab.backbones.block import Branch, PreNormBlock, additive, called, expect
from routing_lab.backbones.vision import VisionBackbone, mean_of
from routing_lab.routing.tokens import Positioned, Tokens


class HFVisionBackbone(VisionBackbone):
    """A vision transformer of transformers.

    Attributes:
        encoder_name: where a model with a head keeps the encoder. view: of its layers.
        resizes: whether embeddings of other image sizes are asked for by an argument.
    """

    encoder_name: ClassVar[str]
    view: ClassVar[type[HFBlock]]
    resizes: ClassVar[bool] = True

    @property
    def encoder(self) -> Any:
        """The model without its classifier."""
        return getattr(self.module, self.encoder_name, self.module)

    @property
    def layers(self) -> Any:
        """The layers, in order."""
        return self.encoder.encoder.layer

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        return self.encoder.config.hidden_size

    @property
    def heads(self) -> int:
        return self.encoder.config.num_attention_heads

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("class",)

    @property
    def image_shape(self) -> tuple[tuple[int, int], tuple[int, int], int]:
        """Height and width of the images that the model was built for, those of a patch, and the channels."""
        config = self.encoder.config
        return _pair(config.image_size), _pair(config.patch_size), config.num_channels

    def example(self, batch: int) -> Tensor:
        size, _, channels = self.image_shape
        return torch.randn(batch, channels, *size)

    def grid(self, inputs: Tensor) -> tuple[int, int]:
        patch = self.image_shape[1]
        return inputs.shape[-2] // patch[0], inputs.shape[-1] // patch[1]

    def embed_images(self, images: Tensor) -> tuple[Tokens, Any]:
        encoder = self.encoder
        images = images.to(next(encoder.parameters()).dtype)
        other_size = tuple(images.shape[-2:]) != self.image_shape[0]
        options = {"interpolate_pos_encoding": True} if self.resizes and other_size else {}
        return Tokens(encoder.embeddings(images, **options), num_prefix=len(self.prefix)), None

    def block(self, layer: int) -> HFBlock:
        return self.view(self.layers[layer], self.width, f"layer {layer}")

    def norm(self, x: Tensor) -> Tensor:
        return self.encoder.layernorm(x)

    def classify(self, normed: Tensor, valid: Tensor | None = None, pre_logits: bool = False) -> Any:
        pooled = self.pooled(normed, valid)
        classifier = getattr(self.module, "classifier", None)
        return pooled if pre_logits or classifier is None else classifier(pooled)

    def pooled(self, normed: Tensor, valid: Tensor | None) -> Tensor:
        """What the classifier reads, or without one the model's output."""
        return normed[:, 0]


Kinds: TypeAlias = tuple[tuple[type[nn.Module], ...], tuple[type[nn.Module], ...]]
"""Classes of layers, and of attention modules."""


class HFBlock(PreNormBlock):
    """View of a pre-norm layer with separate projections.

    Attributes:
        kinds: classes of layers and of attention modules that the view is for.
        names: of the two norms, the attention module and its output projection.
    """

    kinds: ClassVar[Kinds]
    names: ClassVar[tuple[str, str, str, str]]

    def __init__(self, module: nn.Module, width: int, name: str) -> None:
        super().__init__(module, width)
        layers, attentions = self.kinds
        expect(self.module, layers, name, f"routing needs transformers' {layers[0].__name__}")
        expect(self.attn, attentions, f"{name}'s attention", f"routing needs transformers' {attentions[0].__name__}")
        self.head_dim = self.attn.head_dim
        self.heads = self.kv_heads = self.attn.config.num_attention_heads
        self.recomputed = self.recomputed or self.module.gradient_checkpointing

    @property
    def attn(self) -> Any:
        """The attention module."""
        return getattr(self.module, self.names[2])

    def norm(self, x: Tensor, branch: Branch) -> Tensor:
        return getattr(self.module, self.names[0 if branch == "attention" else 1])(x)

    def query(self, normed: Tensor) -> Tensor:
        return self._heads(self.attn.q_proj(normed))

    def key_value(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        return self._heads(self.attn.k_proj(normed)), self._heads(self.attn.v_proj(normed))

    def output(self, x: Tensor, normed: Tensor) -> Tensor:
        return getattr(self.attn, self.names[3])(x)

    def feed_forward(self, normed: Tensor) -> Tensor:
        return self.module.mlp(normed)

    @property
    def kernel(self) -> Kernel:
        attn = self.attn
        dropout = getattr(attn, "attention_dropout", getattr(attn, "dropout", 0.0))
        scale = getattr(attn, "scaling", getattr(attn, "scale", None))
        return Kernel(scale, dropout if attn.training else 0.0, attn.config._attn_implementation != "eager")

    def whole_block(self, tokens: Positioned, context: Any) -> Tensor | None:
        # Past the layer's own checkpointing: `recomputed` says it, and the routed model does it.
        return nn.Module.__call__(self.module, tokens.x, attention_mask=None)

    def whole_attention(self, normed: Tensor, tokens: Positioned, mask: Tensor | None, context: Any) -> Tensor | None:
        return self.attn(normed, attention_mask=self._own(mask, normed.dtype))[0]

    def called_attention(self, normed: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return called(self.attn, lambda x: (compute(x), None), normed)[0]

    def _own(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """A mask as the attention module takes it."""
        return mask if mask is None or self.kernel.fused else additive(mask, dtype)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, N, H d] as [B, H, N, d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class HFViTBlock(HFBlock):
    """View of a layer of ViT or DeiT."""

    kinds: ClassVar[Kinds] = ((ViTLayer, DeiTLayer), (ViTAttention, DeiTAttention))
    names = ("layernorm_before", "layernorm_after", "attention", "o_proj")

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        return self.module.dropout(x)


class ViTBackbone(HFVisionBackbone):
    """A transformers ViTModel or ViTForImageClassification."""

    accepts: ClassVar[type[nn.Module]] = ViTPreTrainedModel
    encoder_name = "vit"
    view = HFViTBlock

    @property
    def layers(self) -> Any:
        return self.encoder.layers

    def pooled(self, normed: Tensor, valid: Tensor | None) -> Tensor:
        pooler = getattr(self.encoder, "pooler", None)
        return normed[:, 0] if pooler is None else pooler(normed)


class DeiTBackbone(ViTBackbone):
    """A transformers DeiTModel or DeiTForImageClassification, with or without the teacher's classifier."""

    accepts: ClassVar[type[nn.Module]] = DeiTPreTrainedModel
    encoder_name = "deit"

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("class", "distillation")

    def classify(self, normed: Tensor, valid: Tensor | None = None, pre_logits: bool = False) -> Any:
        distilled = getattr(self.module, "distillation_classifier", None)
        if distilled is None or pre_logits:
            return super().classify(normed, valid, pre_logits)
        return (self.module.cls_classifier(normed[:, 0]) + distilled(normed[:, 1])) / 2


class Dinov2Block(HFBlock):
    """View of a layer of Dinov2 or DINOv3."""

    kinds: ClassVar[Kinds] = ((Dinov2Layer, Dinov2WithRegistersLayer), (Dinov2Attention, Dinov2WithRegistersAttention))
    names = ("norm1", "norm2", "attention", "o_proj")

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        layer = self.module
        return layer.drop_path(layer.layer_scale1(x) if branch == "attention" else layer.layer_scale2(x))


class Dinov2Backbone(HFVisionBackbone):
    """A transformers Dinov2Model or Dinov2ForImageClassification."""

    accepts: ClassVar[type[nn.Module]] = Dinov2PreTrainedModel
    encoder_name = "dinov2"
    view = Dinov2Block
    resizes = False  # it does so by itself

    def pooled(self, normed: Tensor, valid: Tensor | None) -> Tensor:
        first = normed[:, 0]
        if self.module is self.encoder:
            return first
        return torch.cat([first, mean_of(normed, valid, len(self.prefix))], dim=1)


class Dinov2WithRegistersBackbone(Dinov2Backbone):
    """A transformers Dinov2WithRegistersModel or Dinov2WithRegistersForImageClassification."""

    accepts = Dinov2WithRegistersPreTrainedModel
    encoder_name = "dinov2_with_registers"

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("class", *["registers"] * self.encoder.config.num_register_tokens)


@dataclass
class PatchAngles:
    """Rotary angles of the patches: cosine and sine [P, d]; num_prefix tokens before them are not rotated."""

    cosine: Tensor
    sine: Tensor
    num_prefix: int


class DINOv3Block(Dinov2Block):
    """View of a layer of DINOv3."""

    kinds = ((DINOv3ViTLayer,), (DINOv3ViTAttention,))

    def placed(self, x: Tensor, kind: Literal["query", "key"], tokens: Positioned, context: PatchAngles) -> Tensor:
        first = context.num_prefix
        if tokens.position is None:
            patches = x[:, :, first:]
            patches = (patches * context.cosine) + (rotate_half(patches) * context.sine)
            return torch.cat((x[:, :, :first], patches), dim=2)
        index = (tokens.position - first).clamp_min(0)
        cosine, sine = context.cosine[index].unsqueeze(1), context.sine[index].unsqueeze(1)
        is_patch = (tokens.position >= first)[:, None, :, None]
        return torch.where(is_patch, (x * cosine) + (rotate_half(x) * sine), x)

    def whole_block(self, tokens: Positioned, context: PatchAngles) -> Tensor | None:
        if tokens.position is not None:
            return None
        angles = (context.cosine, context.sine)
        return nn.Module.__call__(self.module, tokens.x, attention_mask=None, position_embeddings=angles)

    def whole_attention(
        self, normed: Tensor, tokens: Positioned, mask: Tensor | None, context: PatchAngles
    ) -> Tensor | None:
        if tokens.position is not None:
            return None
        angles = (context.cosine, context.sine)
        return self.attn(normed, attention_mask=self._own(mask, normed.dtype), position_embeddings=angles)[0]


class DINOv3Backbone(HFVisionBackbone):
    """A transformers DINOv3ViTModel, with or without the classifier of `hf_build`."""

    accepts = DINOv3ViTPreTrainedModel
    encoder_name = "dinov3_vit"
    view = DINOv3Block
    resizes = False  # rotary positions fit any size

    @property
    def layers(self) -> Any:
        return self.encoder.model.layer

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("class", *["registers"] * self.encoder.config.num_register_tokens)

    def embed_images(self, images: Tensor) -> tuple[Tokens, PatchAngles]:
        tokens, _ = super().embed_images(images)
        encoder = self.encoder
        cosine, sine = encoder.rope_embeddings(images.to(encoder.embeddings.patch_embeddings.weight.dtype))
        return tokens, PatchAngles(cosine, sine, tokens.num_prefix)

    def norm(self, x: Tensor) -> Tensor:
        return self.encoder.norm(x)


class CLIPBlock(HFBlock):
    """View of a layer of CLIP or SigLIP."""

    kinds = ((CLIPEncoderLayer, SiglipEncoderLayer), (CLIPAttention, SiglipAttention))
    names = ("layer_norm1", "layer_norm2", "self_attn", "out_proj")


class CLIPBackbone(HFVisionBackbone):
    """A transformers CLIPVisionModel, with or without projection, or CLIPForImageClassification."""

    accepts = CLIPPreTrainedModel
    encoder_name = "vision_model"
    view = CLIPBlock

    @property
    def layers(self) -> Any:
        return self.encoder.encoder.layers

    def embed_images(self, images: Tensor) -> tuple[Tokens, None]:
        tokens, _ = super().embed_images(images)
        return tokens.with_x(self.encoder.pre_layrnorm(tokens.x)), None

    def norm(self, x: Tensor) -> Tensor:
        return x  # only the pooled class token is normed

    def pooled(self, normed: Tensor, valid: Tensor | None) -> Tensor:
        if hasattr(self.module, "classifier"):
            return mean_of(normed, valid, 1)
        pooled = self.encoder.post_layernorm(normed[:, 0])
        projection = getattr(self.module, "visual_projection", None)
        return pooled if projection is None else projection(pooled)


class SiglipBackbone(HFVisionBackbone):
    """A transformers SiglipVisionModel or SiglipForImageClassification."""

    accepts = SiglipPreTrainedModel
    encoder_name = "vision_model"
    view = CLIPBlock

    @property
    def layers(self) -> Any:
        return self.encoder.encoder.layers

    @property
    def prefix(self) -> tuple[str, ...]:
        return ()

    def norm(self, x: Tensor) -> Tensor:
        return self.encoder.post_layernorm(x)

    def pooled(self, normed: Tensor, valid: Tensor | None) -> Tensor:
        if hasattr(self.module, "classifier") or not self.encoder.use_head:
            return mean_of(normed, valid, 0)
        if valid is not None:
            raise ValueError(
                "backbone: SigLIP's attention pooling takes samples of one length; route it with a capacity that keeps "
                "as many tokens of each, or use SiglipForImageClassification"
            )
        return self.encoder.head(normed)


def _pair(size: Any) -> tuple[int, int]:
    rows, columns = size if isinstance(size, (list, tuple)) else (size, size)
    return rows, columns
