"""Adapter for timm's BEiT: biases for relative positions, shared by all blocks or each block's own.

Shape legend: B batch, N tokens, K queries, M keys, P embedded tokens, H heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.models.beit import Attention, Beit
from timm.models.beit import Block as TimmBeitBlock
from torch import Tensor, nn

from routing_lab.backbones.block import Branch
from routing_lab.backbones.timm_parts import TimmBackbone, TimmBlock, patch_grid
from routing_lab.routing.tokens import Positioned, Tokens


class BeitBackbone(TimmBackbone):
    """A timm BEiT. The context of its blocks is the shared bias [H, P, P], or None."""

    accepts = Beit

    def embed_images(self, images: Tensor) -> tuple[Tokens, Tensor | None]:
        beit = self.module
        x = beit.patch_embed(images)
        x = torch.cat((beit.cls_token.expand(len(x), -1, -1), x), dim=1)
        x = beit.pos_drop(x if beit.pos_embed is None else x + beit.pos_embed)
        return Tokens(x, num_prefix=1), None if beit.rel_pos_bias is None else beit.rel_pos_bias()

    def grid(self, inputs: Tensor) -> tuple[int, int]:
        return patch_grid(self.module, inputs)

    def view(self, module: nn.Module, name: str) -> BeitBlock:
        return BeitBlock(module, self.width, name)


class BeitBlock(TimmBlock):
    """View of a block of BEiT. A token without a place of its own has no bias."""

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (TimmBeitBlock,)
    attentions: ClassVar[tuple[type[nn.Module], ...]] = (Attention,)

    def logit_bias(self, queries: Positioned, keys: Positioned, context: Tensor | None) -> Tensor | None:
        bias = context
        if self.attn.relative_position_bias_table is not None:
            own = self.attn._get_rel_pos_bias()[0]
            bias = own if bias is None else own + bias
        if bias is None or (queries.position is None and keys.position is None):
            return None if bias is None else bias.unsqueeze(0)
        rows, columns = queries.positions().unsqueeze(2), keys.positions().unsqueeze(1)
        found = bias[:, rows.clamp_min(0), columns.clamp_min(0)].transpose(0, 1)
        return found * ((rows >= 0) & (columns >= 0)).unsqueeze(1)

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        block = self.module
        gamma = block.gamma_1 if branch == "attention" else block.gamma_2
        drop_path = block.drop_path1 if branch == "attention" else block.drop_path2
        return drop_path(x if gamma is None else gamma * x)

    def whole_block(self, tokens: Positioned, context: Tensor | None) -> Tensor | None:
        return None if tokens.position is not None else self.module(tokens.x, shared_rel_pos_bias=context)

    def whole_attention(self, normed: Tensor, tokens: Positioned, mask: Tensor | None, context: Any) -> Tensor | None:
        if mask is not None or tokens.position is not None:
            return None
        return self.attn(normed, shared_rel_pos_bias=context)
