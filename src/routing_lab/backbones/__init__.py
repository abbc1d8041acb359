"""Adapters from outside models to the routing core."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from routing_lab.routing.model import Backbone

FAMILIES = {
    ("timm", "VisionTransformer"): "vit.VisionTransformerBackbone",
    ("transformers", "LlamaForCausalLM"): "decoder.LlamaBackbone",
    ("transformers", "MistralForCausalLM"): "decoder.MistralBackbone",
    ("transformers", "Qwen2ForCausalLM"): "decoder.Qwen2Backbone",
    ("transformers", "Qwen3ForCausalLM"): "decoder.Qwen3Backbone",
}
"""The adapter of each class of models, by package and name, so that a library is imported only where it is used."""


def adapt(module: Any) -> Backbone:
    """The adapter for a model.

    Raises:
        ValueError: for a model or a kind of block that no adapter is for, saying what is supported.
    """
    for kind in type(module).__mro__:
        family = FAMILIES.get((kind.__module__.split(".")[0], kind.__name__))
        if family is not None:
            file, name = family.split(".")
            backbone: Backbone = getattr(import_module(f"{__name__}.{file}"), name)(module)
            for layer in range(backbone.depth):
                backbone.block(layer)
            return backbone
    known = [f"a {library} {name}" for library, name in FAMILIES]
    raise ValueError(f"backbone = {type(module).__name__}: expected {', '.join(known[:-1])} or {known[-1]}")
