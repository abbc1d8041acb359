"""The shape of a backbone that is only named: read from timm's own model, built without weights."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf

from routing_lab.config.problems import Problem, one_line

SHAPE = ("image_size", "patch_size", "width", "depth", "heads", "class_token", "distilled", "registers", "pool")
"""Keys of the group `backbone` that timm fills in where they are null."""


def complete_from_timm(backbone: DictConfig) -> list[Problem]:
    """Fill in, in place, what `backbone.timm_name` implies; the problems if timm has no such vision transformer."""
    unstated = [key for key in SHAPE if key in backbone and backbone.get(key) is None]
    name = None if OmegaConf.is_missing(backbone, "timm_name") else backbone.get("timm_name")
    if not unstated:
        return []
    if not isinstance(name, str):
        return [
            Problem("backbone.timm_name", None, "must be given: backbone.timm_name=... (a vision transformer of timm)")
        ]
    given = {"img_size": backbone.get("image_size"), "patch_size": backbone.get("patch_size")}
    try:
        shape = timm_shape(name, **{key: value for key, value in given.items() if value is not None})
    except ValueError as error:
        return [Problem("backbone.timm_name", name, str(error))]
    for key in unstated:
        backbone[key] = shape[key]
    return []


def timm_shape(name: str, **given: Any) -> dict[str, Any]:
    """The shape of timm's model `name`, under the keys of the group `backbone`.

    The model is built on the meta device: no weights, no memory. Raises ValueError for an unknown name and for a model
    that is not a vision transformer.
    """
    # By name: only a backbone that states no shape needs timm, and with it torch, before a run starts.
    timm, torch = import_module("timm"), import_module("torch")
    architecture = name.split(".")[0].removeprefix("timm/")
    if not timm.is_model(architecture):
        close = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"timm {timm.__version__} has no such model{hint}")
    try:
        with torch.device("meta"):
            model = timm.create_model(architecture, pretrained=False, **given)
    except (TypeError, RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"timm cannot build it: {one_line(str(error))}") from None
    adapters = import_module("routing_lab.backbones")
    try:
        backbone = adapters.adapt(model)
    except ValueError:
        kind = type(model).__name__
        reason = adapters.REFUSED.get(("timm", kind))
        needed = "a timm VisionTransformer, Eva or Beit is needed"
        raise ValueError(f"is a {kind}; {f'it {reason}' if reason else needed}") from None
    image, patch = model.patch_embed.img_size, model.patch_embed.patch_size
    if image is None or image[0] != image[1] or patch[0] != patch[1]:
        raise ValueError("does not take square images in square patches")
    return {
        "image_size": image[0],
        "patch_size": patch[0],
        "width": model.embed_dim,
        "depth": backbone.depth,
        "heads": backbone.heads,
        "class_token": "class" in backbone.prefix,
        "distilled": "distillation" in backbone.prefix,
        "registers": backbone.prefix.count("registers"),
        "pool": model.global_pool if model.global_pool in ("token", "avg") else None,
    }
