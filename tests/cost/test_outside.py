"""Members from a user's own file: their budget in the run's name, and their cost, beforehand where they say it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.routing.tiny import images

from routing_lab.assembly import build_model
from routing_lab.config import Config, ConfigError, load, run_name
from routing_lab.cost.measure import vision_shape
from routing_lab.training.costs import CostMeter

OWN = """
import torch
from routing_lab.routing import Bypass, Capacity, Gates, Router, Scaling, Selection
from routing_lab.routing.members import BypassTraits, CapacityTraits, RouterTraits, ScalingTraits


def best(scores, kept):
    return Selection(scores.argsort(dim=1, descending=True)[:, :kept].sort(dim=1).values, None, scores.shape[1])


class Share(Capacity):
    traits = CapacityTraits(budget="share", compares=True)

    def __init__(self, spec, *, share=0.25, **common):
        super().__init__(spec, **common)
        self.share = share

    @staticmethod
    def nominal_kept(offer, *, share, **common):
        return int(share * offer.tokens)

    def select(self, scores, state):
        return best(scores, int(self.share * scores.shape[1]))


class Silent(Share):
    nominal_kept = None


class Everywhere(Scaling):
    traits = ScalingTraits(every_token=True)

    def gates(self, scores, selection):
        return Gates(kept=scores.sigmoid(), every_token=True)


class Mute(Scaling):
    def gates(self, scores, selection):
        return Gates(kept=scores.sigmoid(), every_token=True)


class Projecting(Bypass):
    traits = BypassTraits(sublayers=("attention",), projects=True)

    def update(self, x, block):
        return block.project(x)


class Norm(Router):
    traits = RouterTraits(positive=True)

    def score(self, inputs):
        return inputs.tokens.x.norm(dim=-1)
"""

Write = Callable[..., None]


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_axes.py").write_text(OWN)
    members = {"capacity": ["Share", "Silent"], "scaling": ["Everywhere", "Mute"], "bypass": ["Projecting"]}
    for axis, names in (members | {"router": ["Norm"]}).items():
        (tmp_path / "conf" / axis).mkdir(parents=True)
        for name in names:
            more = "share: 0.25\n" if axis == "capacity" else ""
            content = f"name: {name.lower()}\n_target_: own_axes.{name}\n{more}"
            (tmp_path / "conf" / axis / f"{name.lower()}.yaml").write_text(content)
    return tmp_path / "conf"


SIZE = ["backbone.image_size=8", "backbone.channels=3", "backbone.depth=4", "data=planted"]


def costs(config: Config) -> dict[str, float]:
    model = build_model(config, 10).eval()
    meter = CostMeter(model, config, vision_shape(model.backbone))
    meter.add(model(images(2, 8), return_trace=True)[1], torch.arange(2))
    return meter.section()


@pytest.mark.parametrize(
    "given",
    [
        ["capacity=share"],
        ["router=norm", "capacity=share", "capacity.share=0.5"],
        ["router=linear", "capacity=share", "scaling=everywhere"],
        ["router=linear", "capacity=share", "bypass=projecting", "placement.sublayer=attention"],
        ["capacity=share", "bypass=drop"],
        ["scaling=everywhere"],
    ],
    ids=" ".join,
)
def test_what_a_member_says_beforehand_is_what_a_run_measures(given: list[str], conf: Path) -> None:
    found = costs(load([*SIZE, *given], conf).config)
    assert found["macs_nominal"] == found["macs_measured"]


@pytest.mark.parametrize("given", [["capacity=silent"], ["scaling=mute"]], ids=" ".join)
def test_what_is_not_said_is_not_guessed(given: list[str], conf: Path) -> None:
    found = costs(load([*SIZE, *given], conf).config)
    assert found["macs_nominal"] is None
    assert found["macs_measured"] > 0
    with pytest.raises(ConfigError, match=r"isoflop\.target_macs"):
        load([*given, "isoflop.by=width"], conf)


def test_a_budget_stands_in_the_runs_name(conf: Path) -> None:
    def name(*given: str) -> str:
        return run_name(load(given, conf).config)

    assert name("capacity=share") == "amod-none-share0.25-vit_micro-digits-s0"
    assert name("router=norm", "capacity=share", "capacity.share=0.5").startswith("norm-none-share0.5-")
    assert name("capacity=silent", "seed=2") == "amod-none-silent0.25-vit_micro-digits-s2"
    assert name("capacity=threshold", "capacity.threshold=[0.1,0.2,0.3]").startswith("amod-none-threshold0.1to0.3-")
    assert name("router=linear", "capacity=topk").startswith("linear-none-topk0.5-")
    assert name("router=mlp", "capacity=argmax").startswith("mlp-none-argmax-vit")
    assert name("router=dense") == "dense-vit_micro-digits-s0"


def test_a_baseline_can_be_made_of_what_is_said(conf: Path) -> None:
    quarter, half = (
        load(["capacity=share", f"capacity.share={share}", "isoflop.by=width"], conf).config for share in (0.25, 0.5)
    )
    assert quarter.isoflop.target_macs < half.isoflop.target_macs
