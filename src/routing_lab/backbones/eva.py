"""Adapter for timm's Eva: EVA, EVA02, DINOv3, Perception Encoder, Sapiens and ViTs with rotary positions.

Shape legend: B batch, N tokens, P patches, H heads, d head width, D width.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from timm.layers import AttentionRope
from timm.models.eva import Eva, EvaAttention
from timm.models.eva import EvaBlock as TimmEvaBlock
from timm.models.eva import EvaBlockPostNorm as TimmEvaBlockPostNorm
from torch import Tensor, nn

from routing_lab.backbones.block import Branch
from routing_lab.backbones.timm_parts import TimmBackbone, TimmBlock, dropped, kind_of, patch_grid, rotated
from routing_lab.routing.tokens import Positioned, Tokens


class EvaBackbone(TimmBackbone):
    """A timm Eva. The context of its blocks are the rotary angles of each patch, or None.

    Angles are [P, 2 d], or [layers, H, P, 2 d] where every layer has its own.
    """

    accepts = Eva

    def embed_images(self, images: Tensor) -> tuple[Tokens, Tensor | None]:
        eva = self.module
        undropped = copy.copy(eva)  # timm drops patches and their angles inside; here positions say which are left
        undropped._modules = {**eva._modules, "patch_drop": None}
        x, rope = undropped._pos_embed(eva.patch_embed(images))
        x, position = dropped(eva.patch_drop, x)
        return Tokens.placed(eva.norm_pre(x), len(self.prefix), position), rope

    def grid(self, inputs: Tensor) -> tuple[int, int]:
        return patch_grid(self.module, inputs)

    def block(self, layer: int) -> Any:
        block = super().block(layer)
        block.layer = layer
        return block

    def view(self, module: nn.Module, name: str) -> EvaBlock:
        view = EvaPostNormBlock if kind_of(module) is TimmEvaBlockPostNorm else EvaBlock
        return view(module, self.width, name)


class EvaBlock(TimmBlock):
    """View of a pre-norm block.

    Attributes:
        layer: the block's index, by which it finds its angles.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (TimmEvaBlock,)
    attentions: ClassVar[tuple[type[nn.Module], ...]] = (EvaAttention, AttentionRope)
    layer: int

    def placed(self, x: Tensor, kind: Any, tokens: Positioned, context: Tensor | None) -> Tensor:
        rope, attn = self._rope(context), self.attn
        placed = super().placed(x, kind, tokens, context)
        if rope is None:
            return placed
        return rotated(placed, rope, attn.num_prefix_tokens, attn.rotate_half, tokens.position).type_as(x)

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        block = self.module
        gamma = block.gamma_1 if branch == "attention" else block.gamma_2
        drop_path = block.drop_path1 if branch == "attention" else block.drop_path2
        return drop_path(x if gamma is None else gamma * x)

    def whole_block(self, tokens: Positioned, context: Tensor | None) -> Tensor | None:
        rope = self._rope(context)
        return None if rope is not None and tokens.position is not None else self.module(tokens.x, rope=rope)

    def whole_attention(
        self, normed: Tensor, tokens: Positioned, mask: Tensor | None, context: Tensor | None
    ) -> Tensor | None:
        rope = self._rope(context)
        if rope is not None and tokens.position is not None:
            return None
        return self.attn(normed, rope=rope, attn_mask=mask)

    def _rope(self, context: Tensor | None) -> Tensor | None:
        return context[self.layer] if context is not None and context.dim() == 4 else context


class EvaPostNormBlock(EvaBlock):
    """View of a block whose branches are normed before they are added: x + drop_path1(norm1(attn(x)))."""

    kinds = (TimmEvaBlockPostNorm,)

    def norm(self, x: Tensor, branch: Branch) -> Tensor:
        return x

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        block = self.module
        return block.drop_path1(block.norm1(x)) if branch == "attention" else block.drop_path2(block.norm2(x))
