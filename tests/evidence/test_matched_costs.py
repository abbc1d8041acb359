"""Studies that compare methods compare them at one cost: every arm that says its cost beforehand lies within 1 %."""

from __future__ import annotations

from pathlib import Path

import pytest

from routing_lab.config import Composer, check_overrides
from routing_lab.config.nominal import layer_tokens, nominal_counts, routing_rules
from routing_lab.cost.macs import routed_macs
from routing_lab.evidence.study import load_study

STUDY = load_study(Path(__file__).parents[2] / "experiments" / "token_reduction.yaml")
MATCHED = ("mod", "random", "shuffled", "evit", "attention_variance", "tome", "dynamicvit")
BY_SCORES = ("avit", "ats")
COMPOSER = Composer()


def cost(arm: str, scale: str) -> float | None:
    """Multiply-accumulates of an arm's blocks without its router; None: they depend on the scores."""
    stand_in = ["data=planted", "recipe=quick"] if scale == "paper" else []
    config = check_overrides(COMPOSER, [*STUDY.overrides(arm, scale), "seed=0", *stand_in]).config
    shape = config.backbone.shape(10)
    assert shape is not None
    routed = config.placement.routed(shape.depth)
    counts = nominal_counts(config, routed, shape.depth, shape.tokens, shape.prefix)
    if counts is None:
        return None
    return routed_macs(shape, layer_tokens(routing_rules(config, routed, shape.depth), counts)).total


@pytest.mark.parametrize("scale", STUDY.scales)
def test_token_reduction_compares_at_the_cost_of_amod(scale: str) -> None:
    target = cost("amod", scale)
    assert target is not None
    gaps = {arm: (cost(arm, scale) or 0) / target - 1 for arm in MATCHED}
    assert {arm: gap for arm, gap in gaps.items() if abs(gap) > 0.01} == {}
    assert {arm: cost(arm, scale) for arm in BY_SCORES} == dict.fromkeys(BY_SCORES)
