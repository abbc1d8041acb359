"""Auxiliary losses in the configuration: any number of them, each refused where it cannot mean anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from routing_lab.config import ConfigError, identity, load

LINEAR = ["router=linear", "scaling=multiply"]


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(overrides))
    return str(caught.value)


def test_none_is_the_default_and_any_number_may_be_chosen() -> None:
    assert load([]).resolved["losses"] == {}
    assert list(load([*LINEAR, "losses=ratio"]).config.losses) == ["ratio"]
    two = load([*LINEAR, "losses=[z,ratio]", "losses.z.weight=0.5"]).config.losses
    assert {name: loss.weight for name, loss in two.items()} == {"z": 0.5, "ratio": 2.0}
    assert two["ratio"].options == {"target": None, "over": "sample"}


def test_a_method_chooses_losses_that_a_choice_overrides() -> None:
    method = ["method=dynamicvit", "placement.layers=[1,3,4]"]
    assert list(load(method).config.losses) == ["ratio"]
    assert load([*method, "losses=[]"]).resolved["losses"] == {}
    assert list(load([*method, "losses=[z]"]).config.losses) == ["z"]
    assert load([*method, "losses.ratio.weight=0.1"]).config.losses["ratio"].weight == 0.1


def test_a_coefficient_of_a_users_method_goes_with_its_loss(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /router: linear\n  - override /scaling: multiply\n"
        "  - override /losses: [ratio]\nmethod: mine\nlosses:\n  ratio:\n    weight: 7.0\n"
    )
    assert load(["method=mine"], tmp_path).config.losses["ratio"].weight == 7.0
    assert load(["method=mine", "losses=[]"], tmp_path).resolved["losses"] == {}


def test_a_loss_from_outside_is_a_function_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text("def spread(trace, *, scale=1.0):\n    return scale\n")
    (tmp_path / "losses").mkdir()
    file = tmp_path / "losses" / "spread.yaml"
    file.write_text("spread:\n  _target_: my_losses.spread\n  weight: 0.1\n  schedule: constant\n  scale: 2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load([*LINEAR, "losses=[spread,z]"], tmp_path).config.losses["spread"].options == {"scale": 2.0}
    file.write_text(file.read_text().replace("scale: 2.0", "scales: 2.0"))
    with pytest.raises(ConfigError, match=r"losses.spread.scales = 2.0: my_losses.spread has no such argument"):
        load([*LINEAR, "losses=spread"], tmp_path)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["losses=ratioo"], "losses = ratioo: takes names of members, as losses=[ratio,z]; did you mean ratio?"),
        (["losses=[z,foo]", *LINEAR], "there are bce_auxiliary"),
        (["losses=null"], "losses = null: takes names"),
        (["losses.ratio.weight=1"], "losses=ratio is not chosen; add it, as in losses=[ratio]"),
        (["losses=ratio", "losses.ratio.weight=-1", *LINEAR], "losses.ratio.weight = -1: must be a number at least 0"),
        (
            ["losses=ratio", "losses.ratio.over=all", *LINEAR],
            "losses.ratio.over = all: must be one of sample, batch, layers",
        ),
        (["losses=ratio", "losses.ratio.target=[0.5,0.4]", *LINEAR], "has 2 entries for 3 routed layers"),
        (["losses=z"], "losses = z: reads a learned router's logits, and router=amod has none"),
        (["losses=load", *LINEAR], "losses = load: reads attend probabilities"),
        (["losses=reinforce", *LINEAR], "losses.reinforce = topk: needs decisions that are drawn"),
        (["losses=reinforce", *LINEAR, "capacity=gumbel", "capacity.order=lowest"], "capacity.order = lowest"),
        (["losses=reinforce", *LINEAR, "capacity=gumbel", "capacity.persist=hierarchical"], "use per_layer"),
        (
            ["losses=ratio", "router=mlp", "capacity=argmax"],
            "losses.ratio.target = null: capacity=argmax aims at no fraction",
        ),
        (
            ["method=dynamicvit", "placement.layers=[1,3,4]", "recipe=dynamicvit"],
            "train.distill_teacher = initial: init=scratch starts from random weights",
        ),
    ],
)
def test_what_cannot_mean_anything_is_refused(overrides: list[str], line: str) -> None:
    assert line in problems(*overrides)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["router=dense", "losses=ratio"], "losses=ratio has no effect: router=dense routes nothing"),
        (["losses=ratio"], "losses=ratio adds a constant: the decision of router=amod carries no gradient"),
        (["losses=z", *LINEAR, "train.epochs=0"], "losses=z has no effect without training (train.epochs=0)"),
        (
            ["recipe=dynamicvit", "init=dense", "train.epochs=1"],
            "train.backbone_freeze_epochs=5 lasts as long as training (train.epochs=1): only the routers learn",
        ),
    ],
)
def test_what_changes_nothing_is_said(overrides: list[str], line: str) -> None:
    assert line in load(overrides).warnings


def test_a_loss_is_part_of_the_identity_and_of_no_other_run() -> None:
    plain, with_loss = (load([*LINEAR, *more]).resolved for more in ([], ["losses=z"]))
    assert identity(plain) != identity(with_loss)
    assert plain["losses"] == {}
