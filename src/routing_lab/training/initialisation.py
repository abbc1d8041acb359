"""The weights a run starts from: random, published, from a file, from the dense run of the same seed, or any run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from routing_lab.assembly import build_model
from routing_lab.data.state import file_state
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import is_finished, read_record
from routing_lab.training.weights import load_weights, read_weights

if TYPE_CHECKING:
    from routing_lab.config import Config


def initialise(
    config: Config, num_classes: int, trained: RunFolder | None = None
) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """Build the routed model and give it its initial weights.

    Args:
        config: the run's configuration.
        num_classes: outputs of the head.
        trained: the run that this one starts from, for `init=dense` and `init=run`.

    Returns:
        The model; the record's `init` section (`kind`, `hash` of the backbone's initial weights, the source, of a file
        its state and what was taken from it; with `init=run` also `ancestry`, the runs before this one, oldest first);
        warnings.

    Raises:
        ValueError: weights that are missing, unreadable or of another architecture.
    """
    start = config.init
    warnings: list[str] = []
    model: Any = _published(config, num_classes) if start.is_published else build_model(config, num_classes)
    source = config.backbone.published if start.is_published else None
    named = start.file()
    file = None
    if trained is not None:
        source, file = trained.path.name, trained.final
    elif named is not None:
        _, source, file = named
    found: dict[str, Any] = {}
    if file is not None:
        state, warnings = read_weights(file, start.file_entry)
        fit = load_weights(model, _layers_that_stay(state, config))
        warnings += fit.warnings
        if trained is None:
            warnings.append(f"init.path={source}: {fit}")
        found = {"file": file_state(file), "tensors": fit.summary()}
    init = {"kind": start.kind, "source": source, "hash": weights_hash(model.backbone), **found}
    if start.goes_on:
        assert trained is not None
        init["ancestry"] = _ancestry(trained)
    return model, init, warnings


def _ancestry(run: RunFolder) -> list[dict[str, Any]]:
    """A run and those it went on from, oldest first: name, identity and epochs of each.

    Raises:
        ValueError: it has not finished.
    """
    record = read_record(run.path)
    if not is_finished(record):
        raise ValueError(f"init.run={run.path}: the run is {record['status']}, not finished")
    epochs = record["config"].get("train", {}).get("epochs")
    one = {"name": record["name"], "run_id": record["run_id"], "epochs": epochs}
    return [*record["init"].get("ancestry", []), one]


def weights_hash(module: nn.Module) -> str:
    """sha256 over names, types, shapes and values of a module's state."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _published(config: Config, num_classes: int) -> nn.Module:
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
