"""The shape of a backbone of transformers: read from its own configuration, built without weights."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from routing_lab.config.problems import Problem, one_line

SHAPE = ("image_size", "patch_size", "channels", "width", "depth", "heads", "class_token", "distilled", "registers")
"""Keys of the group `backbone` that transformers' configuration fills in."""

PLACES = ("folder", "hf_name", "model_type")
"""Keys of which one says what model it is."""


def complete_from_hf(backbone: DictConfig) -> list[Problem]:
    """Fill in, in place, model type, options and shape; the problems where there is no such vision transformer.

    Afterwards the section describes the model without the folder or the cache that it was read from.
    """
    unstated = [key for key in SHAPE if backbone.get(key) is None]
    if not unstated:
        return []
    if find_spec("transformers") is None:
        return [Problem("backbone", str(backbone.get("name")), "needs transformers: pip install 'routing_lab[hf]'")]
    given = [key for key in PLACES if backbone.get(key) is not None]
    if len(given) != 1:
        found = ", ".join(f"backbone.{key}" for key in given) or None
        ways = "backbone.folder=FOLDER, backbone.hf_name=NAME or backbone.model_type=vit backbone.options={...}"
        return [Problem("backbone", found, f"give one of {ways}")]
    key = given[0]
    value = str(backbone[key])
    options: Any = OmegaConf.to_container(backbone.options) if OmegaConf.is_config(backbone.get("options")) else {}
    if backbone.get("image_size") is not None:
        options["image_size"] = backbone.image_size
    try:
        model_type, own = _read(key, value, bool(backbone.get("download")))
        shape = hf_shape(model_type, {**own, **options})
    except ValueError as error:
        return [Problem.from_error(error, f"backbone.{key}") if " = " in str(error) else _problem(key, value, error)]
    problems = []
    for name in SHAPE:
        if name not in unstated and backbone[name] != shape[name]:
            message = f"the model has {shape[name]}; what it is made of is said by backbone.options"
            problems.append(Problem.of(f"backbone.{name}", backbone[name], message))
    backbone.model_type, backbone.options = model_type, {**own, **options}
    for name in unstated:
        backbone[name] = shape[name]
    return problems


def hf_shape(model_type: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of a model, under the keys of the group `backbone`; it is built on the meta device.

    Raises ValueError for a type that is not routed, and for options that it does not have.
    """
    torch, build = import_module("torch"), import_module("routing_lab.backbones.hf_build")
    with torch.device("meta"):
        module = build.build_hf(num_classes=1, model_type=model_type, options=options)
    backbone = import_module("routing_lab.backbones").adapt(module)
    rows, patch, channels = backbone.image_shape
    if rows[0] != rows[1] or patch[0] != patch[1]:
        raise ValueError("does not take square images in square patches")
    return {
        "image_size": rows[0],
        "patch_size": patch[0],
        "channels": channels,
        "width": backbone.width,
        "depth": backbone.depth,
        "heads": backbone.heads,
        "class_token": "class" in backbone.prefix,
        "distilled": "distillation" in backbone.prefix,
        "registers": backbone.prefix.count("registers"),
    }


def _read(key: str, value: str, download: bool) -> tuple[str, dict[str, Any]]:
    if key == "model_type":
        return value, {}
    if key == "hf_name":
        return import_module("routing_lab.backbones.hf_build").read_config(value, download)
    folder = Path(value).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"expected a folder with a config.json (looked at {folder.absolute()})")
    return import_module("routing_lab.backbones.hf_build").read_config(str(folder))


def _problem(key: str, value: str, error: ValueError) -> Problem:
    hint = "; backbone.download=true fetches a name that is not cached" if key == "hf_name" else ""
    return Problem(f"backbone.{key}", value, one_line(str(error)) + hint)
