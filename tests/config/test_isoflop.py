"""`isoflop.by`: the configuration of the dense baseline at the cost of the arm that the keys describe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.routing.tiny import vit

import routing_lab
from routing_lab.assembly import build_model
from routing_lab.config import Loaded, check, identity, load, run_name
from routing_lab.config.isoflop import full_size
from routing_lab.cost.macs import dense_macs
from routing_lab.cost.measure import vision_shape
from routing_lab.runs.folder import RunFolder
from routing_lab.training.initialisation import initialise


def solved(*overrides: str) -> Loaded:
    return load(overrides)


@pytest.mark.parametrize(
    "arm",
    [
        ["backbone=deit_small", "router=amod", "capacity.fraction=0.125"],
        ["backbone=deit_small", "router=linear", "placement=later"],
        ["method=evit", "backbone=deit_small", "backbone.patch_stride=12"],
        ["method=tome"],
        ["router=mlp", "bypass=project", "placement.sublayer=attention"],
        ["backbone.mlp=swiglu", "backbone.registers=2", "backbone.class_token=false", "backbone.pool=avg"],
        ["backbone.distilled=true"],
    ],
    ids=lambda arm: " ".join(arm),
)
def test_the_model_that_is_built_costs_what_the_arm_does(arm: Sequence[str]) -> None:
    loaded = solved("isoflop.by=width", *arm)
    config = loaded.config
    assert config.router.name == "dense"
    assert config.isoflop.solution is not None
    with torch.device("meta"):
        model = build_model(config, config.data.num_classes)
    macs = dense_macs(vision_shape(model.backbone)).total
    assert macs == config.isoflop.solution.macs
    assert macs / config.isoflop.target_macs == pytest.approx(1, abs=0.005)
    assert f"{config.isoflop.solution.ratio:.4f} of the" in loaded.warnings[0]
    assert run_name(config).startswith(f"isoflop_width{config.backbone.width}-")


def test_a_baseline_stays_what_it_is_when_it_is_read_again() -> None:
    for overrides in (["method=isoflop_width"], ["method=isoflop_depth", "isoflop.tolerance=0.1"]):
        first = load(overrides)
        again = check(first.resolved)
        assert again.resolved == first.resolved
        assert identity(again.resolved) == identity(first.resolved)


def test_the_target_follows_the_arm() -> None:
    half, eighth = (solved("method=isoflop_width", f"capacity.fraction={f}").config for f in (0.5, 0.125))
    assert half.isoflop.target_macs > eighth.isoflop.target_macs
    later = solved("method=isoflop_width", "placement=later").config
    every = solved("method=isoflop_width", "placement=every").config
    assert later.isoflop.target_macs == half.isoflop.target_macs  # three layers of six in both
    assert every.isoflop.target_macs < half.isoflop.target_macs
    linear = solved("method=isoflop_width", "router=linear").config
    assert linear.isoflop.target_macs == half.isoflop.target_macs + 3 * 17 * 64  # the routers' own cost


def test_a_target_may_be_given() -> None:
    config = solved("method=isoflop_width", "router=dense", "isoflop.target_macs=1000000").config
    assert config.isoflop.solution.macs == pytest.approx(1e6, rel=0.005)


REFUSED: list[tuple[list[str], str]] = [
    (["method=isoflop_depth"], r"isoflop.tolerance = 0.02: .* depth 4 of 6, costs 0.914 .* isoflop.tolerance=0.087"),
    (["method=isoflop_width", "isoflop.mlp=keep"], "isoflop.tolerance = 0.02: .* use isoflop.mlp=adjust"),
    (["method=isoflop_width", "capacity=threshold"], "isoflop.target_macs = null: .* depends on the scores"),
    (["method=isoflop_width", "router=dense"], "isoflop.target_macs = null: router=dense routes nothing"),
    (["method=isoflop_width", "init=dense"], "isoflop.by = width: init=dense has weights of another width"),
    (["method=isoflop_width", "isoflop.by=height"], "isoflop.by = height: must be one of none, depth, width"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(given) for given, _ in REFUSED])
def test_what_has_no_baseline_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(overrides)


def test_a_given_model_keeps_its_size() -> None:
    with pytest.raises(ValueError, match=r"isoflop\.by = width: sizes a model to build"):
        routing_lab.route(vit(), ["method=isoflop_width"])


@pytest.mark.parametrize(("rule", "layers"), [("first", [0, 1, 2, 3]), ("uniform", [0, 2, 3, 5])])
def test_layers_that_stay_keep_their_weights(rule: str, layers: list[int], tmp_path: Any) -> None:
    small = load(["method=isoflop_depth", "isoflop.tolerance=0.1", f"isoflop.layers={rule}", "init=dense"])
    assert small.config.isoflop.solution.layers == layers
    whole = check(full_size(small.resolved)).config
    assert (whole.backbone.depth, whole.isoflop.by) == (6, "none")
    torch.manual_seed(1)
    dense = build_model(whole, 10)
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter)
    folder = RunFolder(tmp_path / "run")
    folder.prepare()
    save_file(dense.state_dict(), folder.final)
    model, record, warnings = initialise(small.config, 10, folder)
    assert (record["kind"], warnings) == ("dense", [])
    state, given = model.state_dict(), dense.state_dict()
    assert torch.equal(state["patch_embed.proj.weight"], given["patch_embed.proj.weight"])
    for position, layer in enumerate(layers):
        assert torch.equal(state[f"blocks.{position}.attn.qkv.weight"], given[f"blocks.{layer}.attn.qkv.weight"])
    assert len(model.backbone.blocks) == 4
