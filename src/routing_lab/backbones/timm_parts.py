"""What timm's vision transformers share: the modules of their attention, their tokens, and their heads.

Shape legend: B batch, N tokens, H heads, d head width, D width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from timm.layers import apply_rot_embed_cat
from timm.layers.patch_dropout import patch_dropout_forward
from torch import Tensor, nn

from routing_lab.attention import Kernel
from routing_lab.backbones.block import Branch, FusedProjection, called, expect, unwrapped
from routing_lab.backbones.vision import VisionBackbone, mean_of
from routing_lab.routing.tokens import Positioned


class TimmBackbone(VisionBackbone):
    """A timm vision transformer: patches, prefix tokens, blocks of one width, a norm and a pooling head."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        for name in ("forward", "forward_features"):
            if getattr(type(module), name) is not getattr(self.accepts, name):
                raise ValueError(
                    f"backbone = {type(module).__name__}: it has a {name} of its own, which routing would not call"
                )

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
        registers = getattr(vit, "reg_token", None)
        if registers is not None:
            kinds.extend(["registers"] * registers.shape[1])
        if len(kinds) != vit.num_prefix_tokens:
            raise ValueError(f"backbone has {vit.num_prefix_tokens} prefix tokens, of which only {kinds} are known")
        return tuple(kinds)

    def block(self, layer: int) -> Any:
        block = self.view(self.module.blocks[layer], f"block {layer}")
        block.recomputed = block.recomputed or self.module.grad_checkpointing
        return block

    @abstractmethod
    def view(self, module: nn.Module, name: str) -> Any:
        """The view of one of the model's blocks."""

    def norm(self, x: Tensor) -> Tensor:
        return self.module.norm(x)

    def classify(self, normed: Tensor, valid: Tensor | None = None, pre_logits: bool = False) -> Any:
        model = self.module
        if valid is None or model.global_pool == "token":
            return model.forward_head(normed, pre_logits=pre_logits)
        if model.global_pool != "avg" or getattr(model, "attn_pool", None) is not None:
            raise ValueError(
                f"backbone.pool = {model.global_pool}: samples with different numbers of tokens need pool=token or "
                "pool=avg"
            )
        first = 0 if getattr(model, "pool_include_prefix", False) else model.num_prefix_tokens
        pooled = model.head_drop(model.fc_norm(mean_of(normed, valid, first)))
        return pooled if pre_logits else model.head(pooled)


class TimmBlock(FusedProjection):
    """View of a pre-norm block of timm: x + drop_path1(attn(norm1(x))), then the same with the MLP.

    Attributes:
        kinds: classes of blocks that the view is for. attentions: classes of their attention modules.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]]
    attentions: ClassVar[tuple[type[nn.Module], ...]]

    def __init__(self, module: nn.Module, width: int, name: str) -> None:
        super().__init__(module, width)
        expect(self.module, self.kinds, name, f"routing needs {_listed(self.kinds)}")
        attn = self.attn
        if attn is not self.module:
            kind = type(self.module).__name__
            expect(
                attn,
                self.attentions,
                f"{name} is a {kind} whose attention",
                f"routing needs {_listed(self.attentions)}",
            )
        _refuse_read_weights(attn, name)
        self.heads = attn.num_heads
        self.kv_heads = getattr(attn, "num_kv_heads", attn.num_heads)
        self.head_dim = getattr(attn, "head_dim", width // attn.num_heads)
        self.projects_together = getattr(attn, "qkv", None) is not None

    @property
    def attn(self) -> Any:
        """The attention module."""
        return self.module.attn

    def norm(self, x: Tensor, branch: Branch) -> Tensor:
        return self.module.norm1(x) if branch == "attention" else self.module.norm2(x)

    def projections(self, normed: Tensor) -> Tensor:
        attn = self.attn
        if getattr(attn, "q_bias", None) is None:
            return attn.qkv(normed)
        bias = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
        if attn.qkv_bias_separate:
            return attn.qkv(normed) + bias
        return nn.functional.linear(normed, attn.qkv.weight, bias)  # as timm does, see `_refuse_read_weights`

    def query(self, normed: Tensor) -> Tensor:
        return super().query(normed) if self.projects_together else self._heads(self.attn.q_proj(normed))

    def key_value(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        if self.projects_together:
            return super().key_value(normed)
        return self._heads(self.attn.k_proj(normed)), self._heads(self.attn.v_proj(normed))

    def query_key_value(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.projects_together:
            return super().query_key_value(normed)
        return self.query(normed), *self.key_value(normed)

    def placed(self, x: Tensor, kind: Any, tokens: Positioned, context: Any) -> Tensor:
        norm = getattr(self.attn, "q_norm" if kind == "query" else "k_norm", None)
        return x if norm is None else norm(x)

    def output(self, x: Tensor, normed: Tensor) -> Tensor:
        attn = self.attn
        if hasattr(attn, "norm"):
            x = attn.norm(x)
        if getattr(attn, "gate", None) is not None:
            x = x * attn.gate(normed).sigmoid()
        return attn.proj_drop(attn.proj(x))

    def feed_forward(self, normed: Tensor) -> Tensor:
        return self.module.mlp(normed)

    def residual(self, x: Tensor, branch: Branch) -> Tensor:
        block = self.module
        return block.drop_path1(block.ls1(x)) if branch == "attention" else block.drop_path2(block.ls2(x))

    @property
    def kernel(self) -> Kernel:
        attn = self.attn
        scale = None if attn.scale == self.head_dim**-0.5 else attn.scale
        return Kernel(scale, attn.attn_drop.p if attn.training else 0.0, attn.fused_attn)

    def called_attention(self, normed: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return called(self.attn, compute, normed)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, N, heads d] as [B, heads, N, d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def dropped(patch_drop: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The embedded tokens [B, N, D] after timm's patch drop, and where each stood [B, K] int64; None: all are left."""
    if patch_drop is None or not hasattr(patch_drop, "prob"):
        return x, None
    prefix = patch_drop.num_prefix_tokens
    x, kept = patch_dropout_forward(x, patch_drop.prob, prefix, patch_drop.ordered, patch_drop.training)
    if kept is None:
        return x, None
    first = torch.arange(prefix, device=x.device).expand(len(x), prefix)
    return x, torch.cat([first, kept + prefix], dim=1)


def rotated(x: Tensor, rope: Tensor, prefix: int, half: bool, position: Tensor | None) -> Tensor:
    """Queries or keys [B, H, N, d] rotated to where their tokens stand; prefix tokens stand nowhere.

    Args:
        rope: [P, 2 d] or [H, P, 2 d], sine and cosine of each patch.
        prefix: number of prefix tokens, which come first.
        half: pairs lie half a head apart instead of side by side.
        position: [B, N] int64, see `Positioned`; None: tokens stand in order.
    """
    if position is None:
        patches = apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)
        return torch.cat([x[:, :, :prefix], patches], dim=2).type_as(x)
    index = (position - prefix).clamp_min(0)
    angles = rope[index].unsqueeze(1) if rope.dim() == 2 else rope[:, index].transpose(0, 1)
    is_patch = (position >= prefix)[:, None, :, None]
    return torch.where(is_patch, apply_rot_embed_cat(x, angles, half=half), x).type_as(x)


def patch_grid(module: Any, inputs: Tensor) -> tuple[int, int]:
    """Rows and columns of the patches that a timm model makes of images [B, C, H, W]."""
    embed = module.patch_embed
    if getattr(module, "dynamic_img_size", False):
        rows, columns = embed.dynamic_feat_size(tuple(inputs.shape[-2:]))
    else:
        rows, columns = embed.grid_size
    return rows, columns


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a block, inside a wrapper of activation checkpointing."""
    return type(unwrapped(module))


def _refuse_read_weights(attn: Any, name: str) -> None:
    """timm adds some biases by reading the projection's weight: what stands in its place would be passed over."""
    if getattr(attn, "q_bias", None) is None or attn.qkv_bias_separate:
        return
    if type(attn.qkv) is not nn.Linear or attn.qkv._forward_hooks or attn.qkv._forward_pre_hooks:
        raise ValueError(
            f"{name}: timm's {type(attn).__name__} reads the weight of qkv and would pass over this "
            f"{type(attn.qkv).__name__} and its hooks; set attn.qkv_bias_separate=True, so that it is called"
        )


def _listed(kinds: tuple[type[nn.Module], ...]) -> str:
    return "timm's " + " or ".join(kind.__name__ for kind in kinds)
