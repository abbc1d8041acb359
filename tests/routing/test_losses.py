"""Auxiliary losses: each against its formula, written out again."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.routing.tiny import DEPTH, PATCHES, images, llama, routed, token_ids
from torch import Tensor

from routing_lab.routing.base import log_odds
from routing_lab.routing.losses import (
    LOSSES,
    bce_auxiliary_loss,
    decision,
    hinge_loss,
    l1_target_loss,
    load_loss,
    ratio_loss,
    reinforce_loss,
    z_loss,
)
from routing_lab.routing.trace import LayerTrace, Trace

THRESHOLD = ["placement=list", "placement.layers=[1,2]", "capacity=threshold", "capacity.threshold=0.5"]


def trace_of(*overrides: str, train: bool = True) -> Trace:
    model = routed(overrides).train(train)
    return model(images(), return_trace=True)[1]


def patch_mask(layer: LayerTrace) -> Tensor:
    """[B, patches] 0 or 1: the kept patches of a layer that every patch enters."""
    mask = torch.zeros(len(layer.kept), PATCHES + 1)
    for row, kept in enumerate(layer.kept):
        mask[row, kept[kept >= 0]] = 1
    return mask[:, 1:]


@pytest.mark.parametrize("router", ["linear", "mlp"])
def test_ratio_is_the_squared_distance_of_the_mean_decision(router: str) -> None:
    trace = trace_of(f"router={router}", "scaling=multiply", *THRESHOLD)
    shares = torch.stack([patch_mask(trace[layer]).mean(1) for layer in (1, 2)])
    targets = torch.tensor([[0.6], [0.3]])
    close = torch.testing.assert_close
    close(ratio_loss(trace, target=[0.6, 0.3]).detach(), (shares - targets).square().mean())
    close(ratio_loss(trace, target=[0.6, 0.3], over="batch").detach(), (shares.mean(1) - targets[:, 0]).square().mean())
    close(ratio_loss(trace, target=0.4, over="layers").detach(), (shares.mean() - 0.4).square())


def test_ratio_pulls_towards_the_capacity_by_default() -> None:
    trace = trace_of(
        "router=linear", "scaling=multiply", "capacity.fraction=[0.25,0.75]", "placement=list", "placement.layers=[1,2]"
    )
    assert [trace[layer].fraction for layer in range(DEPTH)] == [None, 0.25, 0.75, None]
    torch.testing.assert_close(ratio_loss(trace), ratio_loss(trace, target=[0.25, 0.75]))


def test_ratio_without_a_target_or_with_too_many_is_refused() -> None:
    trace = trace_of("router=mlp", "scaling=multiply", *THRESHOLD)
    with pytest.raises(ValueError, match="aims at no fraction"):
        ratio_loss(trace)
    with pytest.raises(ValueError, match="3 entries for 2 routed layers"):
        ratio_loss(trace, target=[0.1, 0.2, 0.3])


def test_hinge_charges_an_overrun_alone() -> None:
    trace = trace_of("router=mlp", "scaling=multiply", *THRESHOLD)
    shares = [patch_mask(trace[layer]).mean().item() for layer in (1, 2)]
    assert hinge_loss(trace, target=1.0).item() == 0
    expected = sum(max(0.0, share - 0.2) for share in shares) / 2
    assert hinge_loss(trace, target=0.2).item() == pytest.approx(expected, abs=1e-6)


def test_l1_target_counts_the_layers_that_each_token_passes() -> None:
    trace = trace_of("router=mlp", "scaling=multiply", *THRESHOLD)
    passed = patch_mask(trace[1]) + patch_mask(trace[2])
    expected = ((passed + DEPTH - 2) / DEPTH - 0.5).abs().mean().item()
    assert l1_target_loss(trace, target=0.5).item() == pytest.approx(expected, abs=1e-6)
    routed_alone = (passed / 2 - 0.5).abs().mean().item()
    assert l1_target_loss(trace, target=0.5, layers="routed").item() == pytest.approx(routed_alone, abs=1e-6)
    weight = torch.zeros(3, PATCHES + 1)
    weight[:, 3] = 1
    chosen = ((passed[:, 2] + DEPTH - 2) / DEPTH - 0.5).abs().mean().item()
    assert l1_target_loss(trace, target=0.5, weight=weight).item() == pytest.approx(chosen, abs=1e-6)


def test_l1_target_needs_every_token_in_every_layer() -> None:
    trace = trace_of("router=linear", "scaling=multiply", "bypass=drop", "placement=list", "placement.layers=[1,2]")
    with pytest.raises(ValueError, match="removes tokens"):
        l1_target_loss(trace)


def test_z_is_the_mean_squared_log_sum_exp() -> None:
    one = trace_of("router=linear", "scaling=multiply")
    expected = torch.stack([one[layer].scores.square().mean() for layer in (1, 3)]).mean()
    torch.testing.assert_close(z_loss(one), expected)

    model = routed(["router=mlp", "scaling=multiply"])
    seen: list[Tensor] = []
    _, two = model(images(), return_trace=True)
    for layer in (1, 3):
        part, router = two[layer], model.layers[str(layer)].router
        probabilities = part.logits.softmax(dim=-1)
        torch.testing.assert_close(probabilities[..., 0], part.scores)
        assert part.logits.shape == (3, PATCHES + 1, 2)
        assert router.fc2.out_features == 2
        seen.append(part.logits.logsumexp(dim=-1).square().mean())
    torch.testing.assert_close(z_loss(two), torch.stack(seen).mean())


@pytest.mark.parametrize("router", ["linear", "mlp", "predictor"])
def test_bce_compares_the_keep_probability_with_the_selection(router: str) -> None:
    trace = trace_of(f"router={router}", "scaling=multiply")
    terms = []
    for layer in (1, 3):
        part = trace[layer]
        kept = torch.zeros(3, PATCHES + 1).scatter(1, part.kept, 1.0)
        scale = {"linear": "logit", "mlp": "probability", "predictor": "log_probability"}[router]
        terms.append(F.binary_cross_entropy(log_odds(part.scores, scale).sigmoid(), kept))
    torch.testing.assert_close(bce_auxiliary_loss(trace), torch.stack(terms).mean(), rtol=1e-4, atol=1e-5)


def test_load_weighs_mean_probabilities_by_loads() -> None:
    trace = trace_of("router=mlp", "scaling=multiply", *THRESHOLD)
    loads = torch.stack([trace[layer].counts.sum() / (3 * (PATCHES + 1)) for layer in (1, 2)])
    means = torch.stack([trace[layer].scores.mean() for layer in (1, 2)])
    torch.testing.assert_close(load_loss(trace), (loads * means).sum() / loads.sum())


def test_a_hard_decision_has_the_gradient_of_the_keep_probability() -> None:
    model = routed(["router=mlp", "scaling=multiply", *THRESHOLD]).train()
    _, trace = model(images(), return_trace=True)
    part = trace[1]
    found = decision(part)
    assert torch.equal(found[:, 1:].detach(), patch_mask(part))
    weight = model.layers["1"].router.fc2.weight
    straight = torch.autograd.grad(found.sum(), weight, retain_graph=True)[0]
    torch.testing.assert_close(straight, torch.autograd.grad(part.scores.sum(), weight, retain_graph=True)[0])
    for loss in (ratio_loss(trace, target=0.9), hinge_loss(trace, target=0.01), l1_target_loss(trace)):
        assert torch.autograd.grad(loss, weight, retain_graph=True)[0].abs().sum() > 0


def test_padding_does_not_count() -> None:
    overrides = ["router=mlp", "scaling=multiply", *THRESHOLD, "bypass=drop", "capacity.protect=prefix"]
    model = routed(overrides)
    _, trace = model(images(), return_trace=True)
    part = trace[2]
    assert part.valid is not None
    present = part.valid
    expected = [trace[1].logits.logsumexp(-1).square().mean(), part.logits.logsumexp(-1).square()[present].mean()]
    torch.testing.assert_close(z_loss(trace), torch.stack(expected).mean())
    share = (part.counts - 1) / PATCHES
    assert ratio_loss(trace, target=0.5).item() == pytest.approx(
        torch.stack([((trace[1].counts - 1) / PATCHES - 0.5).square().mean(), (share - 0.5).square().mean()])
        .mean()
        .item()
    )


def drawn(odds: Tensor, decisions: Tensor) -> Trace:
    """One routed layer of a class token and patches, of which these [B, P] 0 or 1 were kept with log odds [B, P]."""
    mask = F.pad(decisions, (1, 0), value=1).bool()
    kept = torch.stack([F.pad(row.nonzero()[:, 0], (0, int((~row).sum())), value=-1) for row in mask])
    origin = torch.arange(-1, odds.shape[1]).expand(len(odds), -1)
    logits = F.pad(odds, (1, 0)).unsqueeze(-1)
    return Trace([LayerTrace(logits[..., 0], kept, mask.sum(1), mask.shape[1], origin, logits=logits)])


def test_reinforce_has_the_gradient_of_the_expected_loss() -> None:
    """Summed over all draws of two images with two patches, whose losses are any function of what was kept."""
    odds = torch.tensor([[0.3, -1.2], [0.8, 0.1]], dtype=torch.float64, requires_grad=True)
    losses = torch.tensor([[0.5, 2.0, 1.1, 0.2], [3.0, 0.1, 0.7, 1.9]], dtype=torch.float64)
    draws = torch.tensor(list(itertools.product((0, 1), repeat=2)))
    signs = 2 * draws - 1
    probability = (odds.unsqueeze(1) * signs).sigmoid().prod(dim=2)  # [image, draw]
    expected = torch.autograd.grad((probability * losses).sum() / 2, odds, retain_graph=True)[0]
    total = torch.zeros_like(odds)
    for first, second in itertools.product(range(4), repeat=2):
        alone = torch.stack([losses[0, first], losses[1, second]])
        loss = reinforce_loss(drawn(odds, draws[[first, second]]), example_losses=alone)
        total += (probability[0, first] * probability[1, second]).detach() * torch.autograd.grad(loss, odds)[0]
    torch.testing.assert_close(total, expected)


def test_reinforce_needs_others_to_compare_with_and_sends_nothing_into_the_losses() -> None:
    odds, losses = torch.zeros(1, 2, requires_grad=True), torch.ones(1, requires_grad=True)
    loss = reinforce_loss(drawn(odds, torch.tensor([[1, 0]])), example_losses=losses)
    loss.backward()
    assert loss == 0
    assert losses.grad is None
    assert odds.grad.abs().max() == 0


def test_losses_are_finite_on_a_decoder() -> None:
    model = routed(["router=mlp", "scaling=multiply"], module=llama())
    _, trace = model(token_ids(), return_trace=True)
    for name in set(LOSSES) - {"ponder", "halting_prior"}:
        given = {"example_losses": torch.rand(len(trace[0].counts))} if name == "reinforce" else {}
        assert torch.isfinite(LOSSES[name](trace, **given)), name


def test_an_unlearned_router_has_no_logits_and_a_dense_model_no_loss() -> None:
    with pytest.raises(ValueError, match="no logits"):
        z_loss(trace_of("router=random"))
    with pytest.raises(ValueError, match="no routed layer"):
        ratio_loss(trace_of("router=dense"))


@pytest.mark.parametrize("scale", ["logit", "probability", "log_probability"])
def test_log_odds_are_those_of_the_score(scale: Any) -> None:
    odds = torch.tensor([-30.0, -3.0, 0.0, 0.5, 8.0], dtype=torch.float64, requires_grad=True)
    scores = {"logit": odds, "probability": odds.sigmoid(), "log_probability": F.logsigmoid(odds)}[scale]
    found = log_odds(scores, scale)
    torch.testing.assert_close(found, odds, rtol=1e-6, atol=1e-9)
    found.sum().backward()
    torch.testing.assert_close(odds.grad, torch.ones(5, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_a_certain_log_probability_keeps_its_odds_in_single_precision() -> None:
    odds = torch.tensor([20.0, 60.0])
    torch.testing.assert_close(log_odds(F.logsigmoid(odds), "log_probability"), odds, rtol=1e-4, atol=0)
    assert math.isfinite(log_odds(torch.zeros(1), "log_probability").item())
