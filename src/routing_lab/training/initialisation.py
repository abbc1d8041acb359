"""The weights a run starts from: random, published, from a file, or from the dense run of the same seed."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from routing_lab.assembly import build_model
from routing_lab.config.training import CheckpointInit, DenseInit, PretrainedInit
from routing_lab.routing.model import AXIS_MODULES

if TYPE_CHECKING:
    from routing_lab.config import Config


def initialise(
    config: Config, num_classes: int, dense: Path | None = None
) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """Build the routed model and give it its initial weights.

    Args:
        config: the run's configuration.
        num_classes: outputs of the head.
        dense: weights of the dense run, for `init=dense`.

    Returns:
        The model; the record's `init` section (`kind`, `hash` of the backbone's initial weights, the source); warnings.

    Raises:
        ValueError: weights that are missing, unreadable or of another architecture.
    """
    warnings: list[str] = []
    source: str | None = None
    if isinstance(config.init, PretrainedInit):
        source = getattr(config.backbone, "timm_name", None)
        model: Any = _published(config, num_classes)
    else:
        model = build_model(config, num_classes)
    if isinstance(config.init, CheckpointInit):
        source = config.init.path
        warnings = load_weights(model, _layers_that_stay(read_weights(Path(source)), config))
    elif isinstance(config.init, DenseInit):
        assert dense is not None, "init=dense needs the dense run's weights"
        source = dense.parent.parent.name
        warnings = load_weights(model, _layers_that_stay(read_weights(dense), config))
    return model, {"kind": config.init.kind, "source": source, "hash": weights_hash(model.backbone)}, warnings


def weights_hash(module: nn.Module) -> str:
    """sha256 over names, types, shapes and values of a module's state."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, or of a torch file of plain tensors.

    A torch file may hold them under `model`, `state_dict` or `state_dict_ema`, with names that begin with `module.` or
    `model.`.

    Raises:
        ValueError: no such file, or one that is damaged or holds anything but tensors and plain values.
    """
    try:
        state: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"init.path={path}: there is no such file") from None
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"init.path={path}: expected a safetensors file, or a torch file of plain tensors ({reason})"
        ) from error
    for key in ("state_dict_ema", "state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
            break
    for prefix in ("module.", "model."):
        if isinstance(state, Mapping) and state and all(str(name).startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"init.path={path}: expected names and tensors, a model's state")
    return dict(state)


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Load a checkpoint into a routed model, strictly for the backbone; returns warnings.

    A head for another number of classes, or none, leaves the fresh head in place with a warning. Routers that the
    checkpoint lacks stay fresh; routers that the model lacks are left out with a warning. Position embeddings of
    another image size are resized (timm).

    Raises:
        ValueError: a backbone parameter that is missing, unknown, or of another shape.
    """
    warnings: list[str] = []
    own = model.state_dict()
    routers = {name for name in own if _is_router(name)}
    foreign = sorted(name for name in state if _is_router(name) and name not in routers)
    if foreign:
        warnings.append(f"the checkpoint has router weights that this model has no place for: {', '.join(foreign)}")
    loaded = {name: value for name, value in state.items() if _is_router(name) and name in routers}
    backbone: Any = model.backbone
    given = {name: value for name, value in state.items() if not _is_router(name)}
    if hasattr(backbone, "patch_embed") and "pos_embed" in own:
        given = checkpoint_filter_fn(given, backbone)
    head = [name for name in own if _is_head(name)]
    refit = [name for name in head if name not in given or given[name].shape != own[name].shape]
    if refit:
        classes = [len(given[name]) for name in refit if name in given]
        has = f"a head for {classes[0]} classes" if classes else "no head"
        warnings.append(f"the checkpoint has {has}: this model's head ({', '.join(refit)}) starts from random weights")
        given = {name: value for name, value in given.items() if name not in refit}
    problems = [
        *(f"{name} is missing" for name in own if name not in given and name not in routers and name not in refit),
        *(f"{name} is unknown" for name in given if name not in own),
        *(
            f"{name} has shape {tuple(value.shape)}, expected {tuple(own[name].shape)}"
            for name, value in (given | loaded).items()
            if name in own and value.shape != own[name].shape
        ),
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the checkpoint does not fit the backbone: {'; '.join(problems[:5])}{more}")
    model.load_state_dict(own | given | loaded)
    return warnings


def _published(config: Config, num_classes: int) -> nn.Module:
    if getattr(config.backbone, "timm_name", None) is None:
        raise ValueError(
            f"init.kind=pretrained: no published weights belong to backbone={config.backbone.name}, which has no"
            " backbone.timm_name; choose one that has, or init=checkpoint init.path=<file>"
        )
    try:
        return _published_model(config, num_classes)
    except ValueError as error:
        raise ValueError(
            f"init.kind=pretrained: {error}. Published weights are downloaded once and cached; without a network use"
            " init=checkpoint init.path=<file>"
        ) from error


def _published_model(config: Config, num_classes: int) -> nn.Module:
    solution = config.isoflop.solution
    if solution is None:
        return build_model(config, num_classes, pretrained=True)
    full = config.backbone.model_copy(update=solution.full.model_dump())
    whole = build_model(config.model_copy(update={"backbone": full}), num_classes, pretrained=True)
    model = build_model(config, num_classes)
    load_weights(model, _layers_that_stay(whole.state_dict(), config))
    return model


def _layers_that_stay(state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Weights of a whole backbone, of whose layers those of `isoflop.solution.layers` are left and numbered anew."""
    solution = config.isoflop.solution
    blocks = {int(name.split(".")[1]) for name in state if name.startswith("blocks.")}
    if solution is None or solution.layers is None or len(blocks) != solution.full.depth:
        return dict(state)
    place = {str(layer): str(position) for position, layer in enumerate(solution.layers)}
    left = {}
    for name, value in state.items():
        group, *rest = name.split(".")
        if group != "blocks":
            left[name] = value
        elif rest[0] in place:
            left[".".join([group, place[rest[0]], *rest[1:]])] = value
    return left


def _is_router(name: str) -> bool:
    axis, layer, *rest = [*name.split("."), "", ""]
    return axis in AXIS_MODULES and layer.isdigit() and bool(rest)


def _is_head(name: str) -> bool:
    return name.split(".")[0] in ("head", "head_dist")
