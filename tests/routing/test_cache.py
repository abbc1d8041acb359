"""Decoding from cached keys and values equals the forward over the whole text; no method that decodes looks ahead."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from routing_lab.assembly import build_model
from routing_lab.config import Config, load
from routing_lab.routing.generation import choose, to_the_right
from routing_lab.routing.model import RoutedModel

SMALL = ["task=language", "backbone.width=16", "backbone.depth=5", "backbone.heads=4", "backbone.kv_heads=2"]
IDS = torch.randint(0, 256, (64, 16), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.arange(64) % 9 + 1

DECODING = [
    "router=dense",
    "method=dtrnet",
    "method=dtrnet visibility=all",
    "method=dtrnet scaling.evaluate=soft",
    "method=dtrnet_code",
    "method=dllm",
    "method=mod_lm",
    "method=random_lm",
    "method=random_lm router.mode=strided",
    "method=never",
    "method=no_projection",
    "method=dtrnet placement.sublayer=mlp bypass=skip scaling=none losses=[]",
    "router=linear scaling=multiply capacity=controlled capacity.start=0.0 visibility=all",
]
LOOKING_AHEAD = [
    "method=amod_lm scaling=multiply",
    "method=mod",
    "method=mod_lm scaling.normalize=unit_mean",
    "method=hierarchical",
]


@cache
def a_config(overrides: str) -> Config:
    return load([*SMALL, "backbone.mlp_width=16", *overrides.split()]).config


def a_model(overrides: str) -> RoutedModel:
    """A model whose tokens differ enough for its routers to disagree about them."""
    model = build_model(a_config(overrides), 256).eval()
    with torch.no_grad():
        model.backbone.model.embed_tokens.weight.mul_(50)
        for layer in model.layers.values():
            for name, value in layer.router.named_parameters():
                if name in ("fc2.bias", "auxiliary.bias"):
                    value.zero_()
    return model


@pytest.mark.parametrize("overrides", DECODING)
@torch.no_grad()
def test_decoding_equals_the_whole_forward_on_either_side_of_padding(overrides: str) -> None:
    model = a_model(overrides)
    whole, trace = model(IDS, return_trace=True)
    row = torch.arange(64)
    for side in ("left", "right"):
        place = torch.arange(9)
        valid = place < LENGTHS.unsqueeze(1)
        prompts = IDS[:, :9]
        if side == "left":
            prompts, valid = to_the_right(prompts, valid)
        held_keys = model.new_cache()
        found = model(prompts, valid=valid, cache=held_keys)
        expected = whole[:, :9][place < LENGTHS.unsqueeze(1)]
        torch.testing.assert_close(found[valid], expected, atol=2e-5, rtol=1e-4)
        for step in range(7):
            at = LENGTHS + step
            found = model(IDS[row, at].unsqueeze(1), cache=held_keys)
            torch.testing.assert_close(found[:, 0], whole[row, at], atol=2e-5, rtol=1e-4)
        held = torch.stack(
            [torch.zeros(64) if part.counts is None else part.counts.float() for part in held_keys.layers]
        )
        read = (LENGTHS + 7).float()
        assert held_keys.seen is not None
        assert torch.equal(held_keys.seen.float(), read)
        dense = [index for index in range(5) if index not in model.routed_layers]
        assert all(torch.equal(held[index], read) for index in dense)
        routed = model.layers[str(model.routed_layers[0])] if model.routed_layers else None
        if routed is not None and not routed.all_keys and routed.sublayer != "mlp":
            for index in model.routed_layers:
                kept = torch.zeros(64, 17).scatter(1, trace[index].kept.masked_fill(trace[index].kept < 0, 16), 1)
                assert torch.equal(held[index], (kept[:, :16] * (torch.arange(16) < read.unsqueeze(1))).sum(1))
        assert held_keys.logical_bytes == int(held.sum()) * 2 * 2 * 4 * 4
        assert held_keys.allocated_bytes >= held_keys.logical_bytes


@pytest.mark.parametrize("overrides", DECODING)
@torch.no_grad()
def test_later_tokens_change_nothing_before_them(overrides: str) -> None:
    model = a_model(overrides)
    changed = IDS.clone()
    changed[:, 10:] = (changed[:, 10:] + 7) % 256
    torch.testing.assert_close(model(changed)[:, :10], model(IDS)[:, :10], atol=1e-5, rtol=1e-4)
    assert model.looks_ahead == []


@pytest.mark.parametrize("overrides", LOOKING_AHEAD)
@torch.no_grad()
def test_methods_that_look_ahead_say_so_and_have_no_cache(overrides: str) -> None:
    model = a_model(overrides)
    changed = IDS.clone()
    changed[:, 10:] = (changed[:, 10:] + 7) % 256
    # What is computed for the same tokens has the same bits, so that any difference comes from the later ones.
    assert not torch.equal(model(changed)[:, :10], model(IDS)[:, :10])
    assert any("later ones" in line for line in load([*SMALL, *overrides.split()]).warnings)
    with pytest.raises(ValueError, match="this model reads whole texts"):
        model.new_cache()
    assert model.generate(IDS[:2], 2, use_cache=False).shape == (2, 2)


@torch.no_grad()
def test_generation_with_and_without_a_cache_is_the_same_text() -> None:
    model = a_model("method=dtrnet")
    valid = torch.arange(9) < LENGTHS[:8].unsqueeze(1)
    given = {"valid": valid, "temperature": 0.9, "top_p": 0.8, "seed": 3}
    cached = model.generate(IDS[:8, :9], 6, **given)
    assert torch.equal(cached, model.generate(IDS[:8, :9], 6, use_cache=False, **given))
    assert not torch.equal(cached, model.generate(IDS[:8, :9], 6, **given | {"seed": 4}))
    alone = model.generate(IDS[:1, :1], 6)
    assert torch.equal(alone[0], model.generate(IDS[:8, :9], 6, valid=valid)[0])
    assert model.generate(IDS[:1], 6, end=int(model.generate(IDS[:1], 1)[0, 0])).shape == (1, 1)


def test_the_likeliest_tokens_alone_are_drawn() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(500, 3)
    generator = torch.Generator().manual_seed(0)
    assert set(choose(logits, 1.0, 0.6, generator).tolist()) == {0, 1}
    assert set(choose(logits, 1.0, 0.4, generator).tolist()) == {0}
    assert set(choose(logits, 1.0, 1.0, generator).tolist()) == {0, 1, 2}
    assert choose(logits, 0.0, 1.0, generator).unique().tolist() == [0]


@pytest.mark.parametrize("threshold", [0.0, 2.0], ids=["every token", "no token"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_edges_run_forward_backward_and_decode(threshold: float, tokens: int) -> None:
    model = a_model(f"method=random_lm capacity.threshold={threshold}")
    ids = IDS[:3, :tokens]
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1] = False  # all padding
    logits = model.train()(ids, valid=valid)
    assert logits.isfinite().all()
    logits[valid].sum().backward()
    assert all(value.grad is None or value.grad.isfinite().all() for value in model.parameters())
    model.eval()
    held_keys = model.new_cache()
    found = [model(ids[:, step : step + 1], cache=held_keys) for step in range(tokens)]
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found, 1), model(ids), atol=1e-5, rtol=1e-4)


def test_a_cache_is_refused_where_it_cannot_be_right() -> None:
    model = a_model("method=dtrnet")
    with pytest.raises(ValueError, match="in training mode"):
        model.train().new_cache()
    model.eval()
    with pytest.raises(ValueError, match="one document a sample"):
        model(IDS, segments=torch.zeros_like(IDS), cache=model.new_cache())
    with pytest.raises(ValueError, match="every prompt needs a token"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), 1)
    model.backbone.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(ValueError, match="angles change with the length"):
        model(IDS, cache=model.new_cache())
