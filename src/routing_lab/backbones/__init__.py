"""Adapters from outside models to the routing core."""

from __future__ import annotations

from typing import Any

from routing_lab.routing.model import Backbone


def adapt(module: Any) -> Backbone:
    """The adapter for a model, a timm VisionTransformer or a transformers LlamaForCausalLM.

    Raises:
        ValueError: for any other module, saying what is supported.
    """
    # By name, so that transformers is imported only where it is used.
    if any(
        kind.__module__.startswith("transformers.") and kind.__name__ == "LlamaForCausalLM"
        for kind in type(module).__mro__
    ):
        from routing_lab.backbones.decoder import LlamaBackbone

        return LlamaBackbone(module)
    from routing_lab.backbones.vit import VisionTransformerBackbone

    return VisionTransformerBackbone(module)
