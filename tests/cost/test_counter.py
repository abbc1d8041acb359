"""Noted work against torch's counter: every preset, router, source, sublayer, bypass, and members of one's own."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.routing.tiny import images, llama, route, token_ids, vit
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from routing_lab.assembly import attach, backbone_facts
from routing_lab.axes.bypasses import BYPASSES
from routing_lab.axes.routers import ROUTERS
from routing_lab.backbones import adapt
from routing_lab.config import Config, conf_path, load
from routing_lab.cost.macs import ModelShape, block_macs, routed_macs
from routing_lab.cost.measure import WorkMeter, decoder_shape, vision_shape
from routing_lab.routing import Bypass, Capacity, Router, Scaling
from routing_lab.routing.backbone import Block
from routing_lab.routing.base import Gates, LayerSpec, RouterInput, RunState
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.tokens import Selection

WIDE = {"img_size": 56, "patch_size": 8, "embed_dim": 192, "num_heads": 3, "mlp_ratio": 4.0}
"""50 tokens of width 192: wide enough for what the convention leaves out to be as small as in a real model."""

FILES = sorted((conf_path() / "method").glob("*.yaml"))
PRESETS = [path.stem for path in FILES if "defaults:" in path.read_text()]
STAGED = [path.stem for path in FILES if "/placement: stages" in path.read_text()]
LARGEST = 0.005


def deviation(model: RoutedModel, shape: ModelShape, inputs: Tensor) -> float:
    """Noted over counted multiply-accumulates, minus one; sample by sample, so that no padding is computed."""
    meter = WorkMeter(shape.depth)
    # The parts of the mathematical kernel are products that the counter sees on every device.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        for sample in inputs.split(1):
            meter.add(model(sample, return_trace=True)[1])
    matrices = [sum(p.numel() for p in layer.router.parameters() if p.ndim == 2) for layer in model.layers.values()]
    routers = sum(n * meter.router()[int(layer)] for n, layer in zip(matrices, model.layers, strict=True))
    noted = routed_macs(shape, meter.mean()).total + block_macs(shape, meter.repeated()) + routers
    return noted / (counter.get_total_flops() / 2 / len(inputs)) - 1


def within(model: RoutedModel, what: str, samples: int = 1) -> None:
    found = deviation(model, vision_shape(model.backbone), images(samples, 56))
    print(f"{what}: {100 * found:+.3f} %")
    assert abs(found) < LARGEST


@pytest.mark.parametrize("method", PRESETS)
def test_every_preset(method: str) -> None:
    given = [f"method={method}", *(["placement.layers=[1,2,3]"] if method in STAGED else [])]
    within(route(vit(**WIDE), given), method)


@cache
def configured(*overrides: str) -> Config:
    return load(overrides, facts=backbone_facts(adapt(vit(**WIDE)))).config


SOURCES = ("previous", "lag", "last_dense", "same")
SOURCED = [("linear", ("same",)), ("amod", SOURCES), ("cls_attention", SOURCES)]


@pytest.mark.parametrize("bypass", BYPASSES)
@pytest.mark.parametrize(("router", "sources"), SOURCED)
def test_every_source_sublayer_and_bypass(router: str, sources: tuple[str, ...], bypass: str) -> None:
    chosen = configured(f"router={router}", "scaling=none", "placement.first=2")
    for source, sublayer in product(sources, BYPASSES[bypass].facts.sublayers):
        placement = chosen.placement.model_copy(update={"attention_source": source, "sublayer": sublayer})
        fate = configured(f"bypass={bypass}", f"placement.sublayer={sublayer}").bypass
        config = chosen.model_copy(update={"placement": placement, "bypass": fate})
        within(attach(adapt(vit(**WIDE)), config), f"{router} {source} {sublayer} {bypass}")


@pytest.mark.parametrize(
    "router", [name for name, m in ROUTERS.items() if m.facts.routes and not m.facts.needs_informative]
)
def test_every_router(router: str) -> None:
    within(route(vit(**WIDE), [f"router={router}", "scaling=none"]), router)


@pytest.mark.parametrize(
    "options",
    [
        ["visibility=all"],
        ["visibility=all", "bypass=drop"],
        ["visibility=all", "placement=every", "placement.attention_fill=mean"],
        ["placement=every", "placement.attention_fill=carry"],
        ["placement=every", "placement.attention_fill=zero", "capacity=threshold", "capacity.threshold=0.02"],
        ["router.attention=random"],
        ["router.attention=random", "placement.attention_source=same"],
        ["placement.active=train"],
        ["router=attention_variance", "router.query=all", "placement.attention_source=same"],
        ["capacity=threshold", "capacity.threshold=0.02", "bypass=fuse"],
        ["router=mlp", "scaling=soft_mix", "scaling.evaluate=soft", "placement.sublayer=attention", "bypass=project"],
        ["capacity.persist=hierarchical"],
    ],
    ids=" ".join,
)
def test_options_that_change_what_is_computed(options: list[str]) -> None:
    within(route(vit(**WIDE), ["method=amod", *options]), " ".join(options), samples=2)


@pytest.mark.parametrize(
    "options", [["method=mod"], ["router=linear", "visibility=all"], ["router=mlp", "capacity=argmax"]]
)
def test_a_decoder(options: list[str]) -> None:
    model = route(llama(), ["scaling=none", *options])
    assert abs(deviation(model, decoder_shape(model.backbone.config, 12), token_ids(2))) < LARGEST


def test_a_map_of_its_own_costs_more_than_one_that_is_there() -> None:
    """What attention_source=same adds is every token's projections once more, and the map."""
    borrowed, own = (
        route(vit(), ["method=amod", f"placement.attention_source={source}"]) for source in ("previous", "same")
    )
    cost = {}
    for name, model in (("borrowed", borrowed), ("own", own)):
        meter = WorkMeter(4)
        meter.add(model(images(), return_trace=True)[1])
        cost[name] = meter.mean()[1]
    assert (cost["borrowed"].queries, cost["borrowed"].map_pairs) == (8, 0)
    assert (cost["own"].queries, cost["own"].keys, cost["own"].values, cost["own"].outputs) == (25, 25, 25, 8)
    assert cost["own"].map_pairs == 17 * 17


# --- members of a user's own ---


class TwoMatrices(Router):
    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.into = nn.Linear(spec.width, 3 * spec.width)
        self.out = nn.Linear(3 * spec.width, 1)

    def score(self, inputs: RouterInput) -> Tensor:
        x = inputs.tokens.x.to(self.into.weight.dtype)
        return self.out(self.into(x).tanh()).squeeze(-1)


class Weighted(Scaling):
    """Computes every token."""

    def gates(self, scores: Tensor, selection: Selection) -> Gates:
        return Gates(kept=scores.sigmoid(), every_token=True)


class AboveMean(Capacity):
    def select(self, scores: Tensor, state: RunState) -> Selection:
        return Selection.from_mask(scores >= scores.mean(dim=1, keepdim=True))


class Projected(Bypass):
    """What the attention makes of a token alone, and the MLP of a few."""

    def update(self, x: Tensor, block: Block) -> Tensor:
        return block.project(x) + block.mlp(x[:, :2]).mean(dim=1, keepdim=True)


MEMBERS = {"router": TwoMatrices, "scaling": Weighted, "capacity": AboveMean, "bypass": Projected}


@pytest.mark.parametrize(
    "axes", [("router",), ("scaling",), ("capacity",), ("bypass",), ("capacity", "bypass"), tuple(MEMBERS)]
)
def test_members_of_ones_own(axes: tuple[str, ...], tmp_path: Path) -> None:
    for axis in axes:
        (tmp_path / axis).mkdir()
        target = f"{__name__}.{MEMBERS[axis].__name__}"
        (tmp_path / axis / "own.yaml").write_text(f"name: own\n_target_: {target}\n")
    adapted = adapt(vit(**WIDE))
    given = ["router=linear", "scaling=none", *(f"{axis}=own" for axis in axes)]
    model = attach(adapted, load(given, tmp_path, facts=backbone_facts(adapted)).config)
    within(model, f"own {' '.join(axes)}", samples=2)
