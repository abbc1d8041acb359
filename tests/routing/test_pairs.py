"""Every pair of members of two axes, on a tiny model: it trains one step, or it is refused with a reason."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf, open_dict
from tests.routing.tiny import DEPTH, HEADS, WIDTH, images, vit

from routing_lab.assembly import attach
from routing_lab.axes import AXES, MEMBERS
from routing_lab.axes.bypasses import BYPASSES
from routing_lab.axes.capacities import CAPACITIES
from routing_lab.axes.facts import SUBLAYERS
from routing_lab.axes.routers import ROUTERS
from routing_lab.axes.scalings import SCALINGS
from routing_lab.backbones import adapt
from routing_lab.config import Composer, Config, ConfigError, check
from routing_lab.routing.model import RoutedModel

Cell = dict[str, str]
Pair = frozenset[tuple[str, str]]

VARIED = {"protect_count": ("inside", "beside")}
"""Keys of the capacity whose values take part like the members of an axis; a capacity without the key ignores it."""

REGISTRIES: dict[str, Collection[str]] = {axis: MEMBERS[axis] for axis in AXES} | VARIED

BACKBONE = [f"backbone.width={WIDTH}", f"backbone.depth={DEPTH}", f"backbone.heads={HEADS}"]
NEEDED = {
    ("placement", "list"): ["placement.layers=[1,2]"],
}
"""What a member cannot do without, or what a model of four layers asks for."""

USUAL = {
    "router": "mlp",
    "scaling": "none",
    "capacity": "topk",
    "placement": "alternate",
    "bypass": "skip",
    "visibility": "kept",
    "protect_count": "inside",
}
"""Members that go with nearly every other: a router that decides, gives probabilities and is never negative."""

DRAWN = 40
"""Completions of a pair, of which the one with most new pairs is tried."""


@cache
def composed(*overrides: str) -> dict[str, Any]:
    """A configuration as plain values, without Hydra's own part."""
    config = Composer().compose([*BACKBONE, *overrides])[0]
    with open_dict(config):
        config.pop("hydra")
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return plain


def node(axis: str, name: str, **values: Any) -> dict[str, Any]:
    """The part of the configuration that belongs to one axis, when its member is chosen."""
    return composed(f"{axis}={name}", *NEEDED.get((axis, name), []))[axis] | values


def checked(cell: Cell) -> Config:
    """The configuration of a cell; the routed part of a layer is one that scaling and bypass are defined for."""
    config = composed() | {axis: node(axis, cell[axis]) for axis in AXES}
    config["capacity"] |= {key: cell[key] for key in VARIED if key in config["capacity"]}
    scaling, bypass = SCALINGS[cell["scaling"]].facts, BYPASSES[cell["bypass"]].facts
    shared = [part for part in SUBLAYERS if part in scaling.sublayers and part in bypass.sublayers]
    config["placement"] |= {"sublayer": shared[0] if shared else "block", "attention_source": "last_dense"}
    return check(config).config


def pairs_of(cell: Cell) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(sorted(cell.items()), 2)}


def covering() -> Iterator[tuple[Cell, Config | ConfigError]]:
    """Cells in which every pair occurs; a pair that can be configured occurs in a cell that can be."""
    missing: set[Pair] = set()
    for one, other in combinations(sorted(REGISTRIES), 2):
        missing |= {frozenset(((one, a), (other, b))) for a, b in product(REGISTRIES[one], REGISTRIES[other])}
    refused: set[Pair] = set()
    draw = random.Random(0)
    while missing:
        pair = dict(max(missing, key=sorted))
        drawn = [pair_completed(pair, draw) for _ in range(DRAWN)]
        drawn = [cell for cell in drawn if not pairs_of(cell) & refused]
        cell, outcome = attempt(USUAL | pair)
        if isinstance(outcome, ConfigError):
            refused.add(frozenset(pair.items()))
        elif drawn:
            found = attempt(max(drawn, key=lambda cell: len(pairs_of(cell) & missing)))
            cell, outcome = found if isinstance(found[1], Config) else (cell, outcome)
        missing -= pairs_of(cell) if isinstance(outcome, Config) else {frozenset(pair.items())}
        yield cell, outcome


def pair_completed(pair: Cell, draw: random.Random) -> Cell:
    return {axis: draw.choice(sorted(registry)) for axis, registry in REGISTRIES.items()} | pair


def attempt(cell: Cell) -> tuple[Cell, Config | ConfigError]:
    try:
        return cell, checked(cell)
    except ConfigError as error:
        return cell, error


@cache
def cells() -> list[tuple[Cell, Config | ConfigError]]:
    return list(covering())


def test_refusals_state_a_reason() -> None:
    refused = [(cell, outcome) for cell, outcome in cells() if isinstance(outcome, ConfigError)]
    for cell, error in refused:
        assert error.problems, cell
        for problem in error.problems:
            axis = problem.key.split(".")[0]
            assert axis in AXES, problem
            assert len(problem.message) > 20, problem


def test_every_member_is_trained_somewhere() -> None:
    trained = {item for cell, outcome in cells() if isinstance(outcome, Config) for item in cell.items()}
    everything = {(axis, name) for axis, registry in REGISTRIES.items() for name in registry}
    assert everything - trained <= {
        ("router", name) for name, router in ROUTERS.items() if router.facts.needs_informative
    }


def test_accepted_cells_train_one_step() -> None:
    failed = []
    for cell, config in cells():
        if isinstance(config, Config):
            try:
                trains_one_step(cell, attach(adapt(vit()), config))
            except Exception as error:  # all cells are tried, and all that fail are named
                failed.append(f"{' '.join(cell.values())}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def trains_one_step(cell: Cell, model: RoutedModel) -> None:
    model.train()
    labels = torch.tensor([0, 1, 2, 3])
    logits, trace = model(images(batch=4), return_trace=True, progress=0.5, step=1)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    assert logits.isfinite().all()

    idle = {layer for layer in model.routed_layers if int(trace[layer].counts.sum()) == 0}
    for name, parameter in model.backbone.named_parameters():
        if not any(name.startswith(f"blocks.{layer}.") for layer in idle):
            assert parameter.grad is not None, name
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    scaling = SCALINGS[cell["scaling"]].facts
    for name, parameter in model.layers.named_parameters():
        if not scaling.gives_router_gradient and BYPASSES[cell["bypass"]].facts.removes:
            continue  # the weights of fused tokens may be made of scores
        if not scaling.gives_router_gradient:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        layer = int(name.split(".")[0])
        busy = layer not in idle and decides(cell, layer)
        assert bool(parameter.grad.any()) or not busy or name.endswith("bias"), name

    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.eval()
    with torch.no_grad():
        assert model(images(batch=4)).isfinite().all()


def decides(cell: Cell, layer: int) -> bool:
    """Whether a decision reaches the head: after the last layer it reads the class token alone, which a drawn decision
    spares and which, where all are seen, is what it is whatever the others are."""
    return layer < DEPTH - 1 or cell["visibility"] == "kept" or not CAPACITIES[cell["capacity"]].facts.relaxes


@pytest.mark.parametrize("form", ["value", "mask", "stop_gradient"])
@pytest.mark.parametrize("router", [name for name, member in ROUTERS.items() if member.facts.learned])
def test_forms_of_the_straight_through_gradient(router: str, form: str) -> None:
    config = composed() | {
        "router": node("router", router),
        "scaling": node("scaling", "straight_through", form=form),
    }
    model = attach(adapt(vit()), check(config).config).train()
    model(images(batch=4)).square().sum().backward()
    for name, parameter in model.layers.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if not name.endswith("bias"):
            assert bool(parameter.grad.any()) == (form != "stop_gradient"), name
