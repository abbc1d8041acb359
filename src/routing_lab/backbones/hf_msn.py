"""Routes the Masked Siamese Networks' vision transformers of transformers (ViT-MSN, Assran et al. 2022, 2204.07141)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from transformers.models.vit_msn.modeling_vit_msn import ViTMSNAttention, ViTMSNLayer, ViTMSNPreTrainedModel

from routing_lab.backbones.hf_vision import HFViTBlock, ViTBackbone


class ViTMSNBlock(HFViTBlock):
    """View of a layer of ViT-MSN."""

    kinds = ((ViTMSNLayer,), (ViTMSNAttention,))


class ViTMSNBackbone(ViTBackbone):
    """A transformers ViTMSNModel or ViTMSNForImageClassification."""

    accepts: ClassVar[type[nn.Module]] = ViTMSNPreTrainedModel
    view = ViTMSNBlock
