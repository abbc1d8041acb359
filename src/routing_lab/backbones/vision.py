"""What adapters of all vision transformers share: images have a grid of patches, and neither padding nor documents."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from routing_lab.routing.backbone import Backbone
from routing_lab.routing.tokens import Layout, Tokens


class VisionBackbone(Backbone):
    """A vision transformer: images [B, C, H, W] become prefix tokens and the patches of a grid, row by row."""

    causal = False

    def example(self, batch: int) -> Tensor:
        embed = self.module.patch_embed
        return torch.randn(batch, embed.proj.in_channels, *embed.img_size)

    def embed(self, inputs: Tensor, layout: Layout | None = None) -> tuple[Tokens, Any]:
        if layout is not None:
            raise ValueError("valid, segments: an image has neither padding nor documents")
        return self.embed_images(inputs)

    @abstractmethod
    def embed_images(self, images: Tensor) -> tuple[Tokens, Any]:
        """`embed` of images."""

    @abstractmethod
    def grid(self, inputs: Tensor) -> tuple[int, int]:
        """Rows and columns of the patches that images are made into."""


def mean_of(x: Tensor, valid: Tensor | None, first: int) -> Tensor:
    """[B, D] the mean over the tokens x [B, N, D] from `first` on, without those that are not valid [B, N]."""
    if valid is None:
        return x[:, first:].mean(dim=1)
    weight = valid[:, first:].unsqueeze(-1).to(x.dtype)
    return (x[:, first:] * weight).sum(dim=1) / weight.sum(dim=1).clamp_min(1)
