from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from routing_lab.assembly import build_model
from routing_lab.axes.losses import LossConfig
from routing_lab.config import load
from routing_lab.config.training import TrainConfig
from routing_lab.routing.losses import ratio_loss, z_loss
from routing_lab.routing.tokens import Tokens
from routing_lab.tasks.auxiliary import AuxiliaryLosses, weight_at
from routing_lab.tasks.base import build_optimizer, build_scheduler, freeze
from routing_lab.tasks.classification import Classification, distilled_loss
from routing_lab.tasks.distillation import logit_divergence, token_loss

SMALL = ["backbone.width=16", "backbone.depth=4", "backbone.heads=2"]


def recipe(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate(load([]).resolved["train"] | changes)


def losses(*overrides: str) -> dict[str, LossConfig]:
    return load(["router=linear", "scaling=multiply", *overrides]).config.losses


def test_losses_are_added_with_their_weights_and_told_without() -> None:
    model = build_model(load([*SMALL, "router=linear", "scaling=multiply"]).config, 10)
    _, trace = model(torch.randn(2, 3, 8, 8), return_trace=True)
    chosen = AuxiliaryLosses(
        losses("losses=[ratio,z]", "losses.ratio.weight=3", "losses.ratio.target=0.9", "losses.z.weight=0.5")
    )
    total, values = chosen(trace, 0.2)
    assert chosen.names == list(values) == ["ratio", "z"]
    torch.testing.assert_close(values["ratio"], ratio_loss(trace, target=0.9))
    torch.testing.assert_close(total, 3 * ratio_loss(trace, target=0.9) + 0.5 * z_loss(trace))


def test_a_weight_of_zero_switches_a_loss_off() -> None:
    assert AuxiliaryLosses(losses("losses=[ratio,z]", "losses.ratio.weight=0")).names == ["z"]
    assert AuxiliaryLosses({}).names == []


def test_reinforce_trains_a_router_that_no_gradient_reaches() -> None:
    config = load([*SMALL, "method=linear_reinforce", "losses=reinforce"]).config
    torch.manual_seed(0)
    model = build_model(config, 10)
    found = []
    for chosen in (config.losses, {}):
        task = Classification(model, config.train, 0, 10, None, chosen)
        task.objective((torch.randn(8, 3, 8, 8), torch.arange(8), torch.arange(8)))[0].backward()
        found.append([parameter.grad for name, parameter in model.named_parameters() if ".router." in name])
        model.zero_grad()
    assert all(gradient.abs().max() > 0 for gradient in found[0])
    assert found[1] == [None] * len(found[0])


@pytest.mark.parametrize(("schedule", "half"), [("constant", 1.0), ("linear", 0.5), ("sine", math.sin(math.pi / 4))])
def test_a_coefficient_grows_to_its_value(schedule: str, half: float) -> None:
    loss = losses("losses=ratio", f"losses.ratio.schedule={schedule}")["ratio"]
    assert weight_at(loss, 0.5) == pytest.approx(2 * half)
    assert weight_at(loss, 1.0) == pytest.approx(2.0)


def some_tokens(x: Tensor, **options: Tensor) -> Tokens:
    return Tokens(x, num_prefix=1, **options)


def test_tokens_are_compared_where_they_are_left() -> None:
    teacher = some_tokens(torch.randn(2, 4, 6))
    x = torch.randn(2, 3, 6)
    # In the first sample patch 1 is gone, and 2 is token 2; in the second, patches 1 and 2 share token 2.
    student = some_tokens(x, source=torch.tensor([[0, 1, -1, 2], [0, 1, 2, 2]]))
    pairs = [(x[0, 1], 0, 1), (x[0, 2], 0, 3), (x[1, 1], 1, 1), (x[1, 2], 1, 2), (x[1, 2], 1, 3)]
    squares = torch.stack([(found - teacher.x[row, column]).square().mean() for found, row, column in pairs]).mean()
    torch.testing.assert_close(token_loss(student, teacher), squares)
    found, wanted = (torch.stack(values) for values in zip(*[(f, teacher.x[r, c]) for f, r, c in pairs], strict=True))
    divergence = (wanted.softmax(-1) * (wanted.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean()
    torch.testing.assert_close(token_loss(student, teacher, "kl"), divergence)


def test_tokens_that_a_decision_took_out_are_not_compared() -> None:
    teacher, x = some_tokens(torch.randn(1, 3, 4)), torch.randn(1, 3, 4)
    policy = torch.tensor([[1.0, 0.0, 1.0]])
    expected = (x[0, 2] - teacher.x[0, 2]).square().mean()
    torch.testing.assert_close(token_loss(some_tokens(x, policy=policy), teacher), expected)
    assert token_loss(some_tokens(x, policy=torch.tensor([[1.0, 0.0, 0.0]])), teacher).item() == 0


def test_the_weight_of_the_labels_can_be_given() -> None:
    student, teacher, loss = torch.randn(4, 3), torch.randn(4, 3), torch.tensor(2.0)
    both = distilled_loss(loss, student, teacher, recipe(distill="soft", distill_alpha=0.5, distill_labels=1.0))
    torch.testing.assert_close(both, loss + 0.5 * logit_divergence(student, teacher))
    tokens_alone = recipe(distill="none", distill_tokens="mse")
    assert tokens_alone.distils
    assert distilled_loss(loss, student, teacher, tokens_alone) is loss


def test_the_backbone_learns_slower_than_the_routers() -> None:
    model = build_model(load([*SMALL, "method=dynamicvit", "placement.layers=[1,2]"]).config, 10)
    train = recipe(lr=1e-3, backbone_lr_factor=0.01, warmup_epochs=0, weight_decay=0.1)
    optimizer = build_optimizer(model, train)
    build_scheduler(optimizer, train, 5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {names[id(parameter)]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert set(rates) == set(names.values())
    for name, rate in rates.items():
        assert rate == pytest.approx(1e-3 if name.startswith("layers.") else 1e-5), name
    decayed = {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert not [name for name in decayed if name.endswith((".bias", "pos_embed", "cls_token")) or "norm" in name]
    assert [name for name in decayed if name.startswith("layers.1.router.out_fc")]


def test_frozen_parts_are_constants_and_no_parameters_of_the_optimiser() -> None:
    model = build_model(load([*SMALL, "router=linear"]).config, 10)
    freeze(model, ["cls_token", "patch_embed"])
    constant = {name for name, parameter in model.backbone.named_parameters() if not parameter.requires_grad}
    assert constant == {"cls_token", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    for factor in (1.0, 0.1):
        optimizer = build_optimizer(model, recipe(backbone_lr_factor=factor))
        counted = sum(len(group["params"]) for group in optimizer.param_groups)
        assert counted == sum(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"train.frozen='patch': .*patch_embed"):
        freeze(model, ["patch"])
