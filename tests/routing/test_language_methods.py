"""What the methods for decoders bring: remedies for a top-k, a controlled threshold, reserved tokens, placements."""

from __future__ import annotations

import pytest
import torch

from routing_lab.assembly import build_model
from routing_lab.axes.layers import bilayer
from routing_lab.config import ConfigError, load
from routing_lab.routing.losses import bce_auxiliary_loss
from routing_lab.routing.model import RoutedModel

SMALL = ["task=language", "backbone.width=16", "backbone.depth=5", "backbone.heads=2", "backbone.kv_heads=1"]
IDS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))


def a_model(*overrides: str) -> RoutedModel:
    return build_model(load([*SMALL, "backbone.mlp_width=16", *overrides]).config, 256)


def test_the_released_list_of_layers_routes_the_ends() -> None:
    assert bilayer(32, ends="routed") == [0, 1, *range(3, 32, 2)]
    assert bilayer(8, ends="routed") == [0, 1, 3, 5, 7]
    assert not {0, 7} & set(bilayer(8))


def test_an_auxiliary_predictor_chooses_in_evaluation_alone() -> None:
    model = a_model("method=mod_lm", "capacity.fraction=0.25")
    trace = model.train()(IDS, return_trace=True)[1]
    assert trace[1].counts.tolist() == [6, 6, 6]
    trace = model.eval()(IDS, return_trace=True)[1]
    assert torch.equal(trace[1].counts, (trace[1].predicted > 0).sum(dim=1))
    bce_auxiliary_loss(trace).backward()
    learned = {
        name for name, value in model.named_parameters() if value.grad is not None and value.grad.abs().sum() > 0
    }
    assert learned == {f"layers.{i}.router.auxiliary.{part}" for i in (1, 3) for part in ("weight", "bias")}


def test_a_choice_needs_a_router_that_decides() -> None:
    with pytest.raises(ConfigError, match="follows the router's own decision"):
        load(["task=language", "method=mod_lm", "router=random", "losses=[]", "capacity.evaluate=choice"])


@pytest.mark.parametrize("order", ["highest", "lowest"])
def test_the_controlled_threshold_meets_its_target(order: str) -> None:
    model = a_model("router=random", "capacity=controlled", "capacity.rate=0.1", f"capacity.order={order}")
    model.train()
    for step in range(40):
        model(IDS, step=step)
    kept = torch.stack([model(IDS, step=100 + s, return_trace=True)[1][1].counts.float() for s in range(10)])
    assert kept.mean().item() / 24 == pytest.approx(0.1, abs=0.05)
    state = {name: value for name, value in model.state_dict().items() if name.startswith("capacity.")}
    assert set(state) == {"capacity.1.threshold", "capacity.3.threshold"}
    before = model.layers["1"].capacity.threshold.clone()
    model.eval()(IDS)
    assert torch.equal(model.layers["1"].capacity.threshold, before)


def test_reserved_tokens_are_kept_in_every_padded_text() -> None:
    model = a_model("method=random_lm", "capacity.threshold=2.0", "capacity.reserve=2").eval()
    valid = torch.ones_like(IDS, dtype=torch.bool)
    valid[1, :5] = False
    trace = model(IDS, valid=valid, return_trace=True)[1]
    assert trace[1].kept.tolist() == [[0, 1], [5, 6], [0, 1]]


@pytest.mark.parametrize("mode", ["iid", "fixed", "strided"])
def test_chance_keeps_a_tenth_and_belongs_to_the_place_in_the_text(mode: str) -> None:
    model = a_model("method=random_lm", f"router.mode={mode}").eval()
    long = IDS.repeat(1, 20)
    trace = model(long, return_trace=True)[1]
    assert trace[1].counts.float().mean().item() / 480 == pytest.approx(0.1, abs=0.03)
    valid = torch.ones(3, 484, dtype=torch.bool)
    valid[:, :4] = False
    padded = model(torch.cat([IDS[:, :4], long], 1), valid=valid, return_trace=True)[1]
    assert torch.equal(padded[1].kept[padded[1].kept >= 0] - 4, trace[1].kept[trace[1].kept >= 0])


def test_never_attending_takes_the_linear_path_alone() -> None:
    model = a_model("method=never").eval()
    trace = model(IDS, return_trace=True)[1]
    assert trace[1].counts.tolist() == [0, 0, 0]
    changed = IDS.clone()
    changed[:, 0] += 1
    assert trace[1].work.pairs == 0
    assert not torch.equal(model(changed)[:, 1:], model(IDS)[:, 1:])  # by way of the dense layers


def test_received_attention_of_a_causal_map_is_a_mean_over_the_queries_that_see_the_key() -> None:
    model = a_model("method=amod_lm").eval()
    trace = model(IDS, return_trace=True)[1]
    block = model.adapter.block(0)
    tokens, context = model.embed(IDS)
    normed = block.norm(tokens.x, "attention")
    query, key = (
        block.placed(x, "key", tokens.side(), context) for x in (block.query(normed), block.key_value(normed)[0])
    )
    logits = query @ key.repeat_interleave(2, dim=1).transpose(-2, -1) * block.kernel.scale
    map_ = logits.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    expected = (map_.sum(dim=2) / torch.arange(24, 0, -1)).mean(dim=1)
    torch.testing.assert_close(trace[1].scores, expected, atol=1e-6, rtol=1e-5)
