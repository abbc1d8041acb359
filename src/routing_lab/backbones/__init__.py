"""Adapters from outside models to the routing core."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from routing_lab.routing.backbone import Backbone

FAMILIES = {
    ("timm", "VisionTransformer"): "vit.VisionTransformerBackbone",
    ("timm", "Eva"): "eva.EvaBackbone",
    ("timm", "Beit"): "beit.BeitBackbone",
    ("transformers", "ViTModel"): "hf_vision.ViTBackbone",
    ("transformers", "ViTForImageClassification"): "hf_vision.ViTBackbone",
    ("transformers", "ViTMSNModel"): "hf_msn.ViTMSNBackbone",
    ("transformers", "ViTMSNForImageClassification"): "hf_msn.ViTMSNBackbone",
    ("transformers", "DeiTModel"): "hf_vision.DeiTBackbone",
    ("transformers", "DeiTForImageClassification"): "hf_vision.DeiTBackbone",
    ("transformers", "DeiTForImageClassificationWithTeacher"): "hf_vision.DeiTBackbone",
    ("transformers", "Dinov2Model"): "hf_vision.Dinov2Backbone",
    ("transformers", "Dinov2ForImageClassification"): "hf_vision.Dinov2Backbone",
    ("transformers", "Dinov2WithRegistersModel"): "hf_vision.Dinov2WithRegistersBackbone",
    ("transformers", "Dinov2WithRegistersForImageClassification"): "hf_vision.Dinov2WithRegistersBackbone",
    ("transformers", "DINOv3ViTModel"): "hf_vision.DINOv3Backbone",
    ("routing_lab", "DINOv3ForImageClassification"): "hf_vision.DINOv3Backbone",
    ("transformers", "CLIPVisionModel"): "hf_vision.CLIPBackbone",
    ("transformers", "CLIPVisionModelWithProjection"): "hf_vision.CLIPBackbone",
    ("transformers", "CLIPForImageClassification"): "hf_vision.CLIPBackbone",
    ("transformers", "SiglipVisionModel"): "hf_vision.SiglipBackbone",
    ("transformers", "SiglipForImageClassification"): "hf_vision.SiglipBackbone",
    ("transformers", "LlamaForCausalLM"): "decoder.LlamaBackbone",
    ("transformers", "MistralForCausalLM"): "decoder.MistralBackbone",
    ("transformers", "Qwen2ForCausalLM"): "decoder.Qwen2Backbone",
    ("transformers", "Qwen3ForCausalLM"): "decoder.Qwen3Backbone",
}
"""The adapter of each class of models, by package and name, so that a library is imported only where it is used."""


REFUSED = {
    ("timm", "SwinTransformer"): "attends inside shifted windows of a fixed grid that is halved between stages",
    ("timm", "SwinTransformerV2"): "attends inside shifted windows of a fixed grid that is halved between stages",
    ("timm", "Xcit"): "attends between channels, so that there is no map between tokens, and convolves the grid",
    ("timm", "Cait"): "mixes the maps of its heads, and adds the class token in separate blocks at the end",
    ("timm", "NaFlexVit"): "takes images as padded sequences of patches with coordinates beside them",
    ("timm", "VisionTransformerSAM"): "attends inside windows of a fixed grid",
}
"""Why some classes of transformers are not routed: a token cannot be taken out of them, or they have no map."""


def adapt(module: Any) -> Backbone:
    """The adapter for a model.

    Raises:
        ValueError: for a model or a kind of block that no adapter is for, saying what is supported.
    """
    for kind in type(module).__mro__:
        known = (kind.__module__.split(".")[0], kind.__name__)
        if known in REFUSED:
            raise ValueError(f"backbone = {type(module).__name__}: it {REFUSED[known]}; that is not routed")
        family = FAMILIES.get(known)
        if family is not None:
            file, name = family.split(".")
            backbone: Backbone = getattr(import_module(f"{__name__}.{file}"), name)(module)
            for layer in range(backbone.depth):
                backbone.block(layer)
            return backbone
    accepted = [f"a {library} {name}" for library, name in FAMILIES]
    raise ValueError(f"backbone = {type(module).__name__}: expected {', '.join(accepted[:-1])} or {accepted[-1]}")
