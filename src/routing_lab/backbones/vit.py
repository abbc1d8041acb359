"""Adapter for timm's VisionTransformer: class token or not, registers or a distillation token, any size of image.

Shape legend: B batch, N tokens, H heads, d head width, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.layers import Attention
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from routing_lab.attention import Kernel
from routing_lab.backbones.block import Branch, FusedProjection, called, expect
from routing_lab.routing.model import Backbone
from routing_lab.routing.tokens import Layout, Positioned, Tokens


class VisionTransformerBackbone(Backbone):
    """A timm VisionTransformer with pre-norm blocks."""

    accepts = VisionTransformer
    causal = False

    @property
    def depth(self) -> int:
        return len(self.module.blocks)

    @property
    def width(self) -> int:
        return self.module.embed_dim

    @property
    def heads(self) -> int:
        return self.block(0).heads

    @property
    def prefix(self) -> tuple[str, ...]:
        vit = self.module
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

    def embed(self, inputs: Tensor, layout: Layout | None = None) -> tuple[Tokens, None]:
        if layout is not None:
            raise ValueError("valid, segments: an image has neither padding nor documents")
        vit = self.module
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(inputs))))
        return Tokens(x, num_prefix=len(self.prefix)), None

    def block(self, layer: int) -> ViTBlock:
        block = ViTBlock(self.module.blocks[layer], self.width, f"block {layer}")
        block.recomputed = block.recomputed or self.module.grad_checkpointing
        return block

    def norm(self, x: Tensor) -> Tensor:
        return self.module.norm(x)

    def head(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return timm_head(self.module, self.module.norm(x), valid)


class ViTBlock(FusedProjection):
    """View of one timm block: x + drop_path(ls1(attn(norm1(x)))), then the same with the MLP."""

    def __init__(self, module: nn.Module, width: int, name: str) -> None:
        super().__init__(module, width)
        expect(self.module, (TimmBlock,), name, "routing needs timm's pre-norm Block")
        attn = self.module.attn
        expect(attn, (Attention,), f"{name} is a Block whose attention", "routing needs timm's Attention")
        self.heads = self.kv_heads = attn.num_heads
        self.head_dim = attn.head_dim

    def norm(self, x: Tensor, branch: Branch) -> Tensor:
        return self.module.norm1(x) if branch == "attention" else self.module.norm2(x)

    def projections(self, normed: Tensor) -> Tensor:
        return self.module.attn.qkv(normed)

    def placed(self, x: Tensor, kind: Any, tokens: Positioned, context: Any) -> Tensor:
        return self.module.attn.q_norm(x) if kind == "query" else self.module.attn.k_norm(x)

    def output(self, x: Tensor, normed: Tensor) -> Tensor:
        attn = self.module.attn
        x = attn.norm(x)
        if attn.gate is not None:
            x = x * attn.gate(normed).sigmoid()
        return attn.proj_drop(attn.proj(x))

    def feed_forward(self, normed: Tensor) -> Tensor:
        return self.module.mlp(normed)

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        block = self.module
        return block.drop_path1(block.ls1(x)) if branch == "attention" else block.drop_path2(block.ls2(x))

    @property
    def kernel(self) -> Kernel:
        return timm_kernel(self.module.attn)

    def whole_block(self, tokens: Positioned, context: Any) -> Tensor:
        return self.module(tokens.x)

    def whole_attention(self, normed: Tensor, tokens: Positioned, mask: Tensor | None, context: Any) -> Tensor:
        return self.module.attn(normed, attn_mask=mask)

    def called_attention(self, normed: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return called(self.module.attn, compute, normed)


def timm_kernel(attn: Any) -> Kernel:
    """How a timm attention computes its map."""
    scale = None if attn.scale == attn.head_dim**-0.5 else attn.scale
    return Kernel(scale, attn.attn_drop.p if attn.training else 0.0, attn.fused_attn)


def timm_head(model: Any, x: Tensor, valid: Tensor | None) -> Any:
    """A timm model's output from normed tokens [B, N, D], of which an average leaves out those not valid [B, N]."""
    if valid is None or model.global_pool == "token":
        return model.forward_head(x)
    if model.global_pool != "avg" or getattr(model, "attn_pool", None) is not None:
        raise ValueError(
            f"backbone.pool = {model.global_pool}: samples with different numbers of tokens need pool=token or pool=avg"
        )
    first = 0 if getattr(model, "pool_include_prefix", False) else model.num_prefix_tokens
    weight = valid[:, first:].unsqueeze(-1).to(x.dtype)
    pooled = (x[:, first:] * weight).sum(dim=1) / weight.sum(dim=1).clamp_min(1)
    return model.head(model.head_drop(model.fc_norm(pooled)))
