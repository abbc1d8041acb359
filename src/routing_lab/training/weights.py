"""Weights from files as people have them: read without unpickling anything, named as the model names them, and loaded.

Files come from training scripts that keep arguments and statistics beside the weights, from compiled, distributed and
wrapped models, and from models of other image sizes and other heads. What was taken, what was missing and what was left
over is counted, so that a file that fits by accident is not taken for one that fits.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from routing_lab.config.problems import one_line
from routing_lab.routing.names import is_of_axis

ENTRIES = ("state_dict_ema", "state_dict", "model")
"""Where a file holds the weights unless `init.entry` says so, in order of preference."""

AVERAGES = ("state_dict_ema", "model_ema", "ema")

WRAPPERS = ("module", "model", "backbone", "net", "encoder")
"""What distribution and other models put in front of names, in any order and number."""

MARKS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What compilation and sharding put anywhere into names."""

HEADS = ("head", "head_dist", "classifier", "cls_classifier", "distillation_classifier")
"""Modules of timm's and transformers' models that give an output for every class."""

_DTYPES = [type(np.dtype(kind)) for kind in "?bhilqBHILQefd"]

SAFE: list[Any] = [
    argparse.Namespace,
    np.dtype,
    *dict.fromkeys(_DTYPES),
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("_core", "core")),
]
"""Types beside tensors and plain values that a torch file may hold: the arguments of a training script, and numpy's
numbers. None of them runs anything when it is made."""


@dataclass(frozen=True)
class Fit:
    """What became of a checkpoint in a model.

    taken: number of tensors that the model has from the file. fresh: names that kept their random weights. left_over:
    names of the file that the model has no place for. reshaped: names that were resized to another image or patch size.
    warnings: what of this a person should know.
    """

    taken: int
    fresh: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Counts for the record, with the names where there are few; the same for all arms of one backbone."""
        lists = {
            "fresh": [name for name in self.fresh if not is_of_axis(name)],
            "left_over": self.left_over,
            "reshaped": self.reshaped,
        }
        return {"taken": self.taken, **{name: _some(names, 20) for name, names in lists.items()}}

    def __str__(self) -> str:
        parts = [f"{self.taken} tensors taken"]
        parts += [f"{len(self.fresh)} missing ({_listed(self.fresh)})"] if self.fresh else []
        parts += [f"{len(self.left_over)} left over ({_listed(self.left_over)})"] if self.left_over else []
        parts += [f"{len(self.reshaped)} reshaped ({_listed(self.reshaped)})"] if self.reshaped else []
        return ", ".join(parts)


def read_weights(path: Path, entry: str | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of a safetensors file, or of a torch file; nothing is unpickled but tensors, plain values and `SAFE`.

    Args:
        path: the file.
        entry: which entry of the file holds the weights, such as `model_ema`; None: the first of `ENTRIES`, or the
            file itself.

    Returns:
        Tensors by the names of the file, and remarks.

    Raises:
        ValueError: no such file, one that is damaged or holds anything else, or no such entry.
    """
    try:
        state: Any
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            with torch.serialization.safe_globals(SAFE):
                state = torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"init.path={path}: there is no such file") from None
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = one_line(str(error).splitlines()[0]) if str(error) else type(error).__name__
        raise ValueError(
            f"init.path={path}: expected a safetensors file, or a torch file of plain tensors ({reason})"
        ) from error
    except Exception as error:  # the restricted unpickler of a damaged file may meet anything
        raise ValueError(
            f"init.path={path}: expected a safetensors file, or a torch file of plain tensors ({type(error).__name__})"
        ) from error
    remarks: list[str] = []
    there = _entries(state)
    if entry is not None:
        if entry not in there:
            known = f"there are {', '.join(there)}" if there else "the file holds the weights themselves; leave it out"
            raise ValueError(f"init.entry={entry}: {path} has no such entry; {known}")
        chosen: str | None = entry
    else:
        chosen = next((name for name in ENTRIES if name in there), None)
        averages = [name for name in AVERAGES if name in there]
        if chosen is not None and averages and len(there) > 1:
            other = "; init.entry=model takes the weights themselves" if chosen in averages and "model" in there else ""
            other = f"; init.entry={averages[0]} takes their moving average" if chosen not in averages else other
            remarks.append(f"init.path={path}: the weights under {chosen!r} are taken{other}")
    state = state if chosen is None else state[chosen]
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"init.path={path}: expected names and tensors, a model's state")
    return {str(name): value for name, value in state.items()}, remarks


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> Fit:
    """Load a checkpoint into a routed model, strictly for the backbone.

    A head for another number of classes, or none, leaves the fresh head in place with a warning. Routers that the
    checkpoint lacks stay fresh; routers that the model lacks are left out with a warning. Position embeddings of
    another image size are resized (timm). What else the file holds is left over.

    Raises:
        ValueError: nothing of the file belongs to the backbone, or a backbone parameter is missing, unknown, or of
            another shape.
    """
    own = model.state_dict()
    routers = {name for name in own if is_of_axis(name)}
    given = _as_named_by(state, own)
    backbone_names = [name for name in own if name not in routers and not _is_head(name)]
    if not any(name in given for name in backbone_names):
        raise ValueError(
            f"the checkpoint has nothing to do with this model: of its {len(state)} tensors"
            f" ({_listed(list(state))}) none is one of the backbone's ({_listed(backbone_names)})"
        )
    warnings: list[str] = []
    foreign = sorted(name for name in given if is_of_axis(name) and name not in routers)
    if foreign:
        warnings.append(f"the checkpoint has router weights that this model has no place for: {_listed(foreign)}")
    loaded = {name: value for name, value in given.items() if is_of_axis(name) and name in routers}
    given = {name: value for name, value in given.items() if not is_of_axis(name)}
    before = {name: value.shape for name, value in given.items()}
    backbone: Any = model.backbone
    if hasattr(backbone, "patch_embed") and "pos_embed" in own:
        _check_tokens(given, own)
        try:
            given = checkpoint_filter_fn(given, backbone)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            raise ValueError(f"the checkpoint does not fit the backbone: {one_line(str(error))}") from error
    head = [name for name in own if _is_head(name)]
    refit = [name for name in head if name not in given or given[name].shape != own[name].shape]
    if refit:
        classes = [len(given[name]) for name in refit if name in given]
        has = f"a head for {classes[0]} classes" if classes else "no head"
        warnings.append(f"the checkpoint has {has}: this model's head ({', '.join(refit)}) starts from random weights")
        given = {name: value for name, value in given.items() if name not in refit}
    given |= _tied(own, given)
    parts = {name.split(".")[0] for name in backbone_names}
    left_over = [name for name in given if name not in own and name.split(".")[0] not in parts]
    given = {name: value for name, value in given.items() if name not in left_over}
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
        raise ValueError(f"the checkpoint does not fit the backbone: {one_line('; '.join(problems[:5]))}{more}")
    taken = given | loaded
    model.load_state_dict(own | taken)
    return Fit(
        taken=len(taken),
        fresh=sorted(name for name in own if name not in taken),
        left_over=sorted([*left_over, *foreign]),
        reshaped=sorted(name for name, value in given.items() if before.get(name, value.shape) != value.shape),
        warnings=warnings,
    )


def _check_tokens(given: Mapping[str, Tensor], own: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a model with other prefix tokens, whose position embeddings mean other positions."""
    for name in ("cls_token", "dist_token", "reg_token"):
        if (name in given) != (name in own):
            has, wants = ("has", "has none") if name in given else ("has no", "has one")
            article = " a" if name in given else ""
            raise ValueError(f"the checkpoint does not fit the backbone: it {has}{article} {name}, the model {wants}")


def _tied(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights that a file leaves out because they are those of another name, as of a head tied to the embedding."""
    places = {own[name].data_ptr(): name for name in own if name in given}
    missing = [name for name in own if name not in given and own[name].data_ptr() in places]
    return {name: given[places[own[name].data_ptr()]] for name in missing}


def _entries(state: Any) -> list[str]:
    """Names under which a file holds a mapping of tensors."""
    if not isinstance(state, Mapping):
        return []
    return [
        str(name)
        for name, value in state.items()
        if isinstance(value, Mapping) and value and all(isinstance(item, Tensor) for item in value.values())
    ]


def _as_named_by(state: Mapping[str, Tensor], own: Mapping[str, Any]) -> dict[str, Tensor]:
    """`state` with the wrappers in front of its names taken off: those under which most names are the model's own."""
    names = {}
    for name in state:
        bare = name
        for mark in MARKS:
            bare = bare.replace(mark, "")
        names[name] = bare
    fronts = {_front(bare) for bare in names.values()} | {""}

    def known(front: str) -> int:
        return sum(bare.startswith(front) and bare.removeprefix(front) in own for bare in names.values())

    # Of fronts that explain equally many names the shortest.
    best = max(sorted(fronts, key=lambda front: (len(front), front)), key=known)
    if not known(best):  # no name is known as it stands, as in older layouts that timm renames
        best = min(fronts - {""}, default="", key=len) if "" not in {_front(bare) for bare in names.values()} else ""
    found = {bare.removeprefix(best): state[name] for name, bare in names.items() if bare.startswith(best)}
    others = {bare: state[name] for name, bare in names.items() if not bare.startswith(best)}
    return {**others, **found}


def _front(name: str) -> str:
    """The wrappers that a name begins with."""
    parts = name.split(".")
    depth = 0
    while depth < len(parts) - 1 and parts[depth] in WRAPPERS:
        depth += 1
    return "".join(f"{part}." for part in parts[:depth])


def _is_head(name: str) -> bool:
    return name.split(".")[0] in HEADS


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return one_line(", ".join(names[:3])) + more


def _some(names: list[str], most: int) -> list[str] | int:
    return names if len(names) <= most else len(names)
