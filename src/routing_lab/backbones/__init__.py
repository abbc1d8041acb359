"""Adapters from outside models to the routing core."""

from __future__ import annotations

from torch import nn

from routing_lab.routing.model import Backbone


def adapt(module: nn.Module) -> Backbone:
    """The adapter for a timm VisionTransformer or a transformers LlamaForCausalLM.

    Raises:
        ValueError: for any other module, saying what is supported.
    """
    if any(cls.__module__.startswith("transformers.") and cls.__name__ == "LlamaForCausalLM" for cls in type(module).__mro__):
        from routing_lab.backbones.decoder import LlamaBackbone

        return LlamaBackbone(module)
    from routing_lab.backbones.vit import VisionTransformerBackbone

    return VisionTransformerBackbone(module)
