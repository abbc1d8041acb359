"""Routing in training only, in evaluation only, or in both, from one checkpoint."""

from __future__ import annotations

import pytest
import torch
from tests.routing.tiny import images, vit

import routing_lab
from routing_lab.config import ConfigError, load

ARMS = (
    ["router=amod"],
    ["method=evit", "placement.layers=[1,3]"],
    ["router=linear", "scaling=multiply"],
    ["router=predictor", "capacity=gumbel", "bypass=drop", "bypass.train=mask"],
)


@pytest.mark.parametrize("arm", ARMS, ids=" ".join)
@pytest.mark.parametrize("training", [True, False])
def test_a_phase_without_routing_is_the_dense_model(arm: list[str], training: bool) -> None:
    acting, resting = ("train", "eval") if training else ("eval", "train")
    pictures = images()
    dense = vit().train(training)(pictures)
    both = routing_lab.route(vit(), arm).train(training)(pictures)
    acts = routing_lab.route(vit(), [*arm, f"placement.active={acting}"]).train(training)
    rests = routing_lab.route(vit(), [*arm, f"placement.active={resting}"]).train(training)
    assert torch.equal(acts(pictures), both)
    assert not torch.equal(both, dense)
    logits, trace = rests(pictures, return_trace=True)
    assert torch.equal(logits, dense)
    assert all(layer.scores is None for layer in trace.layers)


def test_what_nothing_reads_is_said() -> None:
    assert any("evaluation only" in line for line in load(["router=linear", "placement.active=eval"]).warnings)
    with pytest.raises(ConfigError, match=r"placement.active = eval: nothing is routed in training"):
        load(["method=dynamicvit", "placement.active=eval"])
    with pytest.raises(ConfigError, match=r"placement.active = later: must be one of both, train, eval"):
        load(["placement.active=later"])


def test_cost_is_that_of_evaluation() -> None:
    from routing_lab.config.nominal import nominal_counts

    kept = {
        active: nominal_counts(load([f"placement.active={active}"]).config, [1, 3, 5], 6, 17, 1)
        for active in ("both", "eval", "train")
    }
    assert kept["both"] == kept["eval"]
    assert [layer.treated for layer in kept["train"]] == [17] * 6
