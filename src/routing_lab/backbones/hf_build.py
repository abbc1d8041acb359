"""Builds transformers' vision transformers with a head for classes, from plain values or with published weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from timm.layers import resample_abs_pos_embed
from torch import nn
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTModel, DINOv3ViTPreTrainedModel
from transformers.utils import logging

from routing_lab.backbones import adapt

MODEL_TYPES = {
    "vit": "ViTForImageClassification",
    "vit_msn": "ViTMSNForImageClassification",
    "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    "dinov3_vit": "DINOv3ForImageClassification",
    "clip_vision_model": "CLIPForImageClassification",
    "siglip_vision_model": "SiglipForImageClassification",
}
"""The class of each model type, as `config.json` has it under `model_type`; of pairs of towers that of the images."""

WHOLE = {"clip_vision_model": "CLIPConfig", "siglip_vision_model": "SiglipConfig"}
"""Configurations that hold the one of the tower of images as `vision_config`."""

NOT_OPTIONS = frozenset(
    ["architectures", "dtype", "id2label", "label2id", "model_type", "num_labels", "transformers_version"]
)
"""What a configuration says besides the model: where it comes from, and its classes, which the data say."""


class DINOv3ForImageClassification(DINOv3ViTPreTrainedModel):
    """DINOv3 with a linear classifier of its class token, which transformers does not have."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dinov3_vit = DINOv3ViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Logits [B, C] of images [B, channels, H, W]."""
        return self.classifier(self.dinov3_vit(pixel_values).pooler_output)


def read_config(place: str, download: bool = False) -> tuple[str, dict[str, Any]]:
    """The model type, and the keys that differ from its defaults, of a folder or of a name of the hub.

    Args:
        place: a folder with `config.json`, or a name of which transformers' cache has it.
        download: whether a name that the cache lacks may be fetched.

    Raises:
        ValueError: none is there, or it is not read.
    """
    try:
        found: Any = transformers.AutoConfig.from_pretrained(place, local_files_only=not download)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and not download:
            raise ValueError("transformers' cache has no such name") from error
        raise ValueError(" ".join(str(error).split())) from error
    found = getattr(found, "vision_config", found)
    options = {key: value for key, value in found.to_diff_dict().items() if key not in NOT_OPTIONS and key[0] != "_"}
    return str(found.model_type), options


def build_hf(
    *,
    num_classes: int,
    pretrained: bool = False,
    model_type: str,
    options: Mapping[str, Any],
    place: str | None = None,
    download: bool = False,
) -> nn.Module:
    """A vision transformer of transformers with a classifier, initialised from torch's global generator, in float32.

    Args:
        num_classes: outputs of the classifier; 0: none.
        pretrained: load the weights at `place`; only the classifier may be missing there or have other classes.
        model_type: a key of `MODEL_TYPES`.
        options: keys of the configuration that differ from transformers' defaults.
        place: folder or name of the weights.
        download: whether a name that the cache lacks may be fetched.

    Raises:
        ValueError: a type that is not routed, options that it does not have, or weights that are missing or another
            model's.
    """
    config = _config(model_type, options, num_classes)
    kind: Any = globals().get(MODEL_TYPES[model_type]) or getattr(transformers, MODEL_TYPES[model_type])
    if not pretrained:
        model: nn.Module = kind(config)
        return model
    if place is None:
        raise ValueError("init = pretrained: needs backbone.folder or backbone.hf_name")
    own = {key: value for key, value in read_config(place, download)[1].items() if key == "image_size"}
    others = {key: value for key, value in options.items() if key != "image_size"}
    native = _config(model_type, others | own, num_classes)
    try:
        with _quiet():
            model, report = kind.from_pretrained(
                place,
                config=native,
                dtype=torch.float32,
                local_files_only=not download,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{place}: pretrained weights could not be loaded: {' '.join(str(error).split())}") from error
    other = [*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])]
    if foreign := sorted(name for name in other if "classifier" not in name):
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise ValueError(f"{place}: its weights are another model's: it lacks {', '.join(foreign[:3])}{more}")
    return _resized(model, kind(config)).train()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports, which are put back afterwards."""
    were_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if were_shown:
            logging.enable_progress_bar()


def _resized(model: Any, target: Any) -> Any:
    """A pretrained model, or, where `target` has the positions of another image size, that with its weights."""
    state, wanted = model.state_dict(), target.state_dict()
    other = [name for name, value in state.items() if value.shape != wanted[name].shape]
    if not other:
        return model
    prefix = sum(kind != "registers" for kind in adapt(model).prefix)  # registers have no position
    for name in other:
        value, shape = state[name], wanted[name].shape
        old, new = (math.isqrt(math.prod(size[:-1]) - prefix) for size in (value.shape, shape))
        positions = value.reshape(1, -1, value.shape[-1])
        resized = resample_abs_pos_embed(
            positions,
            new_size=[new, new],
            old_size=[old, old],
            num_prefix_tokens=prefix,
        )
        state[name] = resized.reshape(shape)
    target.load_state_dict(state)
    return target


def _config(model_type: str, options: Mapping[str, Any], num_classes: int) -> Any:
    if model_type not in MODEL_TYPES:
        raise ValueError(f"backbone.model_type = {model_type}: is not routed; expected one of {', '.join(MODEL_TYPES)}")
    plain: Any = transformers.AutoConfig.for_model(model_type)
    if unknown := sorted(key for key in options if not hasattr(plain, key)):
        known = sorted(key for key in plain.to_dict() if key not in NOT_OPTIONS and key[0] != "_")
        raise ValueError(
            f"backbone.options = {', '.join(unknown)}: {model_type} has no such key; known: {', '.join(known)}"
        )
    try:
        found = transformers.AutoConfig.for_model(model_type, **options)
    except Exception as error:  # transformers checks types with exceptions of its own
        raise ValueError(f"backbone.options = {dict(options)}: {' '.join(str(error).split())}") from error
    if model_type in WHOLE:
        found = getattr(transformers, WHOLE[model_type])(vision_config=found)
    found.num_labels = num_classes
    return found
