"""`match`: the number that makes a run cost what it should, and what is said where none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.routing.tiny import vit

import routing_lab
from routing_lab.assembly import build_model
from routing_lab.config import check, identity, load
from routing_lab.config.isoflop import full_size
from routing_lab.config.match import with_target
from routing_lab.config.nominal import nominal_macs
from routing_lab.runs.records import comparable
from routing_lab.training.costs import CostMeter

SMALL = "backbone=deit_small"


def cost(overrides: Sequence[str]) -> float:
    config = load(overrides).config
    shape = config.backbone.shape(config.data.num_classes)
    return nominal_macs(config, shape)


@pytest.mark.parametrize(
    ("arm", "target"),
    [
        (["method=evit", "match.key=capacity.fraction", "match.to=amod"], ["method=amod"]),
        (["method=dynamicvit", "match.key=capacity.fraction", "match.to=evit"], ["method=evit"]),
        (["method=mod", "match.key=capacity.fraction", "match.to=amod"], ["method=amod"]),
        (["router=dense", "match.key=backbone.width", "match.to=amod"], ["method=amod"]),
        (["method=evit", "match.key=backbone.depth", "match.to=dense"], ["router=dense"]),
        (["method=tome", f"bypass.merged={[8] * 12}", "match.key=bypass.merged", "match.to=evit"], ["method=evit"]),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_a_run_costs_what_it_is_matched_to(arm: list[str], target: list[str]) -> None:
    loaded = load([SMALL, *arm])
    match = loaded.config.match
    wanted = cost([SMALL, *target])
    assert match.macs == wanted
    assert match.solution.macs == pytest.approx(wanted, rel=0.01)
    assert match.solution.ratio == pytest.approx(match.solution.macs / wanted)
    axis, _, key = match.key.partition(".")
    assert loaded.resolved[axis][key] == match.solution.value
    # The number alone, without the search, costs the same.
    assert cost([SMALL, *arm[:1], f"{match.key}={match.solution.value}"]) == match.solution.macs
    assert any(f"match.key={match.key}: at {match.solution.value} the run costs" in text for text in loaded.warnings)


def test_no_other_share_comes_closer_and_a_shorter_one_is_taken() -> None:
    found = load(["method=evit", SMALL, "match.key=capacity.fraction", "match.to=dense", "match.share=0.6"]).config
    gap = abs(found.match.solution.ratio - 1)
    target = 0.6 * found.match.macs
    shape = found.backbone.shape(found.data.num_classes)
    others = []
    for thousandths in range(1, 1001):
        capacity = found.capacity.model_copy(update={"fraction": thousandths / 1000})
        others.append(abs(nominal_macs(found.model_copy(update={"capacity": capacity}), shape) / target - 1))
    assert gap <= min(others)
    assert len(str(found.match.solution.value)) <= len("0.000")


def test_a_matched_run_is_the_same_when_it_is_read_again_and_its_dense_run_is_matched_to_nothing() -> None:
    first = load(["method=evit", "match.key=capacity.fraction", "match.to=amod", "match.tolerance=0.02"])
    again = check(first.resolved)
    assert again.resolved == first.resolved
    assert identity(again.resolved) == identity(first.resolved)
    assert full_size(first.resolved)["match"] == load().resolved["match"]
    assert identity(load(["match.tolerance=0.02"]).resolved) == identity(load().resolved)
    unmatched = {key: value for key, value in load().resolved.items() if key != "match"}
    assert identity(unmatched) == identity(load().resolved)
    assert check(unmatched).resolved == load().resolved


def test_arms_of_one_cost_differ_in_what_costs_it_and_not_in_how_many_tokens_pay() -> None:
    every = ["placement=every", "placement.first=0", "placement.attention_source=same", "match.key=capacity.fraction"]
    match = [*every, "match.to=dense", "match.share=0.5", "match.tolerance=0.05"]
    amod, random = (load([f"router={router}", *match]).resolved for router in ("amod", "random"))
    assert amod["capacity"]["fraction"] < random["capacity"]["fraction"]
    keys = {key for key, value in comparable(amod).items() if comparable(random).get(key, value) != value}
    assert keys == {"router.name"}
    assert comparable(amod)["capacity.fraction"] == f"0.5 of {amod['match']['macs']:.0f} MACs"
    wide = load(["router=dense", "match.key=backbone.width", "match.to=amod", "match.tolerance=0.06"]).resolved
    assert comparable(wide)["backbone.width"] == wide["backbone"]["width"]


def test_the_record_says_how_near_the_measured_cost_came() -> None:
    loaded = load(["method=evit", "match.key=capacity.fraction", "match.to=amod", "match.tolerance=0.02"])
    config = loaded.config
    model = build_model(config, 10).eval()
    meter = CostMeter(model, config, config.backbone.shape(10))
    _, trace = model(torch.zeros(2, 3, 8, 8), return_trace=True)
    meter.add(trace, torch.arange(2))
    section = meter.section()
    assert section["match_target"] == config.match.macs
    assert section["match_ratio"] == pytest.approx(config.match.solution.ratio)


KEY = "match.key=capacity.fraction"
REFUSED: list[tuple[list[str], str]] = [
    ([KEY], "match.to = null: name the dense model, a method or an arm"),
    ([KEY, "match.to=nothing"], "match.to = nothing: no such member; there are amod"),
    ([KEY, "match.to=ats"], "match.to = ats: .* depends on the scores; give match.macs"),
    (
        [KEY, "match.to=evit", "match.tolerance=0.0"],
        "match.tolerance = 0.0: the closest, .* costs 0.99",
    ),
    ([KEY, "match.to=dense", "match.share=0.1"], r"costs [\d.]+ of the target .* allow the gap with match.tolerance="),
    (["match.key=capacity.tau", "match.to=dense"], "match.key = capacity.tau: no such key; known: "),
    (["match.key=data.noise", "match.to=dense"], "match.key = data.noise: must be backbone.depth"),
    (["match.key=backbone.heads", "match.to=dense"], "match.key = backbone.heads: no such key; known: depth, width"),
    (["match.key=capacity.rounding", "match.to=dense"], "capacity.rounding = floor: is not searched"),
    (["match.key=scaling.target", "match.to=dense"], "scaling.target = update: is not searched"),
    (["match.key=placement.first", "placement=stages", "match.to=dense"], "match.key = placement.first: no such key"),
    (["method=dynamicvit", "match.key=capacity.temperature", "match.to=dense"], "has no effect on the nominal cost"),
    (["capacity=threshold", "match.key=capacity.threshold", "match.to=dense"], "match.key = .*depends on the scores"),
    (["isoflop.by=width", KEY, "match.to=dense"], "match.key = capacity.fraction: isoflop sizes a dense model already"),
    (["task=language", KEY, "match.to=dense"], "backbone = llama_micro: match needs a vision transformer of timm"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(given) for given, _ in REFUSED])
def test_what_cannot_be_matched_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(overrides)


def test_a_given_model_is_matched_to_nothing() -> None:
    with pytest.raises(ValueError, match=r"match\.key = capacity\.fraction: sizes a model to build"):
        routing_lab.route(vit(), [KEY, "match.to=dense"])


ARMS = {
    "half": ["router=amod", "capacity.fraction=0.5"],
    "other": ["router=amod", "capacity.fraction=0.25"],
    "matched": ["router=linear", KEY, "match.to=half"],
    "twice": ["router=random", KEY, "match.to=matched"],
    "unknown": ["router=random", KEY, "match.to=learned"],
    "learned": ["capacity=threshold"],
}


def test_in_a_study_an_arm_is_matched_to_another() -> None:
    def compose(overrides: Sequence[str]) -> Any:
        return load(overrides).config

    assert with_target("half", ARMS, compose) == ARMS["half"]
    words = with_target("matched", ARMS, compose)
    assert words == [*ARMS["matched"], f"match.macs={cost(ARMS['half'])}"]
    assert load(words).config.match.solution.value == 0.5
    assert with_target("matched", {**ARMS, "matched": words}, compose) == words
    for arm, message in (("twice", "that arm is matched itself"), ("unknown", "depends on the scores")):
        with pytest.raises(ValueError, match=f"match.to = .*: .*{message}"):
            with_target(arm, ARMS, compose)
