from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from routing_lab.config import load
from routing_lab.config.training import TrainConfig
from routing_lab.routing.trace import LayerTrace
from routing_lab.tasks.base import build_optimizer, build_scheduler
from routing_lab.tasks.classification import Classification, classification_loss, distilled_loss
from routing_lab.tasks.meters import RoutingMeter


def recipe(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(load([]).resolved["train"] | changes)


def routed(*overrides: str) -> Any:
    from routing_lab.assembly import build_model

    small = ["backbone.width=16", "backbone.depth=4", "backbone.heads=2"]
    return build_model(load([*small, *overrides]).config, 10)


def test_label_smoothing_of_classes_and_of_probabilities_is_the_same() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    one_hot = F.one_hot(target, 4).float()
    smoothed = 0.9 * one_hot + 0.1 / 4
    expected = -(smoothed * F.log_softmax(logits, 1)).sum(1).mean()
    torch.testing.assert_close(classification_loss(logits, target, 0.1), expected)
    torch.testing.assert_close(classification_loss(logits, one_hot, 0.1), expected)


def test_soft_distillation_is_the_scaled_divergence() -> None:
    torch.manual_seed(0)
    student, teacher, loss = torch.randn(6, 3), torch.randn(6, 3), torch.tensor(2.0)
    train = recipe(distill="soft", distill_alpha=0.3, distill_temperature=2.0)
    p, q = F.softmax(teacher / 2, 1), F.softmax(student / 2, 1)
    divergence = (p * (p.log() - q.log())).sum(1).mean()
    torch.testing.assert_close(distilled_loss(loss, student, teacher, train), 0.7 * loss + 0.3 * 4 * divergence)


def test_hard_distillation_follows_the_decision() -> None:
    torch.manual_seed(0)
    student, teacher, loss = torch.randn(6, 3), torch.randn(6, 3), torch.tensor(2.0)
    train = recipe(distill="hard", distill_alpha=0.3)
    expected = 0.7 * loss + 0.3 * F.cross_entropy(student, teacher.argmax(1))
    torch.testing.assert_close(distilled_loss(loss, student, teacher, train), expected)


def test_a_teacher_is_given_exactly_when_one_is_used() -> None:
    with pytest.raises(ValueError, match="needs a teacher"):
        Classification(nn.Linear(1, 1), recipe(distill="soft"), 0, 10)
    with pytest.raises(ValueError, match="takes no teacher"):
        Classification(nn.Linear(1, 1), recipe(), 0, 10, nn.Linear(1, 1))


def test_a_teacher_is_not_part_of_the_state() -> None:
    model = routed("router=dense")
    task = Classification(model, recipe(distill="soft"), 0, 10, routed("router=dense"))
    assert {name.removeprefix("model.") for name in task.state_dict()} == set(model.state_dict())


def test_biases_norms_and_embeddings_are_not_decayed() -> None:
    model = routed("router=linear")
    optimizer = build_optimizer(model, recipe(weight_decay=0.1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {
        names[id(parameter)]
        for group in optimizer.param_groups
        if group["weight_decay"] > 0
        for parameter in group["params"]
    }
    assert all(parameter.ndim > 1 for name, parameter in model.named_parameters() if name in decayed)
    assert not [name for name in decayed if "pos_embed" in name or "cls_token" in name]
    assert {
        name for name, parameter in model.named_parameters() if name.endswith(("qkv.weight", "fc1.weight"))
    } <= decayed
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


def test_layer_decay_lowers_the_rate_towards_the_input_and_spares_routers() -> None:
    model = routed("router=linear")
    optimizer = build_optimizer(model, recipe(layer_decay=0.5))
    build_scheduler(optimizer, recipe(layer_decay=0.5, warmup_epochs=0.0), 10)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {names[id(parameter)]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    blocks = [rates[f"backbone.blocks.{layer}.attn.qkv.weight"] for layer in range(4)]
    assert [later / earlier for earlier, later in itertools.pairwise(blocks)] == pytest.approx([2, 2, 2])
    routers = {rate for name, rate in rates.items() if name.startswith("layers.")}
    assert routers == {rates["backbone.head.weight"]}
    assert len(rates) == len(names)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "lamb"])
def test_timm_optimisers_by_name(name: str) -> None:
    model = routed("router=dense")
    optimizer = build_optimizer(model, recipe(optimizer=name))
    model(torch.zeros(2, 3, 8, 8)).sum().backward()
    optimizer.step()


def test_an_unknown_optimiser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="adamw"):
        build_optimizer(nn.Linear(1, 1), recipe(optimizer="adamm"))


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("step", 0.1, 0.01), ("constant", 1.0, 1.0)],
)
def test_schedules_warm_up_and_come_down(schedule: str, middle: float, end: float) -> None:
    train = recipe(
        schedule=schedule, epochs=20, lr=1.0, min_lr=0.0, warmup_epochs=2.0, warmup_lr=0.0, decay_epochs=10.0
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = build_scheduler(optimizer, train, 10)

    def rate(step: int) -> float:
        scheduler.step_update(num_updates=step)
        return float(optimizer.param_groups[0]["lr"])

    assert optimizer.param_groups[0]["lr"] == 0.0
    assert rate(10) == pytest.approx(0.5)
    assert rate(100) == pytest.approx(middle, abs=1e-6)
    assert rate(200) == pytest.approx(end, abs=1e-6)


def test_the_meter_counts_what_was_kept_and_multiplied() -> None:
    origin = torch.zeros(2, 4, dtype=torch.int64)
    kept = torch.tensor([[0, 1, 2], [0, -1, -1]])
    gate = torch.tensor([[0.5, -0.5, 0.2], [0.4, 9.0, 9.0]])
    ragged = LayerTrace(None, kept, torch.tensor([3, 1]), 4, origin, gate)
    plain = LayerTrace(None, kept[:, :1], torch.tensor([1, 1]), 4, origin)
    meter = RoutingMeter([1, 3])
    meter.update({1: ragged, 3: plain})
    meter.update({1: ragged, 3: plain})
    assert meter.kept_fraction() == {1: 0.5, 3: 0.25}
    assert meter.update_ratio() == pytest.approx({1: 1.6 / 4, 3: 1.0})
    meter.reset()
    assert meter.kept_fraction() == {}


def test_nothing_kept_has_no_ratio() -> None:
    meter = RoutingMeter([0])
    empty = LayerTrace(None, torch.full((2, 0), -1), torch.zeros(2, dtype=torch.int64), 4, torch.zeros(2, 4))
    meter.update({0: empty})
    assert meter.kept_fraction() == {0: 0.0}
    assert meter.update_ratio() == {}
