"""Output rules: what the score does to a kept token's update, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.routing.tiny import images, routed, vit
from torch import Tensor

from routing_lab.routing.model import RoutedModel
from routing_lab.routing.scaling import normalized
from routing_lab.routing.tokens import Selection

NORMALIZATIONS = ("raw", "sigmoid", "tanh", "unit_mean", "unit_max", "softmax_kept")
X = images(dtype=torch.float64)
ONE_LAYER = ["placement=list", "placement.layers=[1]"]


def expected_gate(scores: Tensor, mask: Tensor, how: str) -> Tensor:
    """The normalisations once more, token by token."""
    gate = torch.zeros_like(scores)
    for b, row in enumerate(scores):
        kept = mask[b]
        size = row.abs()
        for i in range(len(row)):
            gate[b, i] = {
                "raw": row[i],
                "sigmoid": 1 / (1 + torch.exp(-row[i])),
                "tanh": torch.tanh(row[i]),
                "unit_mean": row[i] / size.mean(),
                "unit_max": row[i] / size.max(),
                "softmax_kept": torch.exp(row[i]) / torch.exp(row[kept]).sum() * kept[i],
            }[how]
    return gate


@pytest.mark.parametrize("how", NORMALIZATIONS)
def test_normalisations(how: str) -> None:
    scores = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    found = normalized(scores, Selection.from_mask(mask), how)
    torch.testing.assert_close(found, expected_gate(scores, mask, how), rtol=0, atol=1e-14)


@pytest.mark.parametrize("how", NORMALIZATIONS)
def test_normalisations_of_zero_scores_are_finite(how: str) -> None:
    scores = torch.zeros(2, 5, requires_grad=True)
    nothing = Selection.from_mask(torch.zeros(2, 5, dtype=torch.bool))
    gate = normalized(scores, nothing, how)
    gate.sum().backward()
    assert gate.isfinite().all()
    assert scores.grad.isfinite().all()


def test_unit_mean_has_mean_one() -> None:
    scores = torch.rand(4, 9)
    gate = normalized(scores, Selection.first(4, 3, 9, scores.device), "unit_mean")
    torch.testing.assert_close(gate.mean(dim=1), torch.ones(4))


def before_and_after(model: RoutedModel, x: Tensor, layer: int = 1) -> tuple[Tensor, Tensor, Any]:
    """The residual stream around one routed layer, and its trace."""
    seen = {}
    handle = model.layers[str(layer)].register_forward_hook(
        lambda module, args, output: seen.update(before=args[0].x, after=output[0].x)
    )
    _, trace = model(x, return_trace=True)
    handle.remove()
    return seen["before"], seen["after"], trace[layer]


def update_of(model: RoutedModel, x: Tensor, part: Any, sublayer: str) -> Tensor:
    """u(x) of the kept tokens among each other, from the backbone's own modules."""
    block = model.backbone.blocks[1]
    out = torch.zeros_like(x)
    for b in range(len(x)):
        kept = part.kept[b][part.kept[b] >= 0]
        tokens = x[b : b + 1, kept]
        if sublayer == "block":
            out[b, kept] = (block(tokens) - tokens)[0]
        else:
            out[b, kept] = block.attn(block.norm1(tokens))[0]
    return out


@pytest.mark.parametrize("execution", ["gather", "mask"])
@pytest.mark.parametrize("router", ["linear", "amod"])
@pytest.mark.parametrize("how", NORMALIZATIONS)
def test_multiply_is_the_equation(how: str, router: str, execution: str) -> None:
    """Mixture-of-Depths, Eq. 2: x + g(r) u(x) for kept tokens, x for the others, bit by bit."""
    model = routed([*ONE_LAYER, f"router={router}", "scaling=multiply", f"scaling.normalize={how}"], double=True)
    model.set_execution(execution)
    with torch.no_grad():
        before, after, part = before_and_after(model, X)
        gate = expected_gate(
            part.scores, torch.zeros_like(part.scores, dtype=torch.bool).scatter(1, part.kept, True), how
        )
        update = update_of(model, before, part, "block")
    torch.testing.assert_close(after, before + gate.unsqueeze(-1) * update, rtol=0, atol=1e-12)
    bypassed = torch.ones_like(part.scores, dtype=torch.bool).scatter(1, part.kept, False)
    assert torch.equal(after[bypassed], before[bypassed])
    torch.testing.assert_close(part.gate, gate.gather(1, part.kept))


@pytest.mark.parametrize("scaling", ["none", "multiply", "straight_through"])
def test_target_output_counts_the_residual_twice(scaling: str) -> None:
    """y = x + g (x + u(x)), what several public codes compute instead of y = x + g u(x)."""
    arm = [*ONE_LAYER, "router=linear", f"scaling={scaling}"]
    model = routed([*arm, "scaling.target=output"], double=True)
    for execution in ("gather", "mask"):
        model.set_execution(execution)
        with torch.no_grad():
            before, after, part = before_and_after(model, X)
            update = update_of(model, before, part, "block")
        mask = torch.zeros_like(part.scores).scatter(1, part.kept, 1.0)
        gate = mask if part.gate is None else mask.scatter(1, part.kept, part.gate)
        torch.testing.assert_close(after, before + gate.unsqueeze(-1) * (before + update), rtol=0, atol=1e-12)


def test_raw_attention_scores_leave_little_of_the_update() -> None:
    """Scores that sum to one over N tokens multiply the update by about 1/N."""
    with torch.no_grad():
        raw, unit = (
            routed([*ONE_LAYER, "router=amod", "scaling=multiply", f"scaling.normalize={how}"], double=True)
            for how in ("raw", "unit_mean")
        )
        ratios = []
        for model in (raw, unit):
            before, after, part = before_and_after(model, X)
            full = update_of(model, before, part, "block").norm(dim=-1)
            ratios.append(((after - before).norm(dim=-1).sum() / full.sum()).item())
    assert 1 / 17 < ratios[0] < 2 / 17
    assert ratios[1] == pytest.approx(17 * ratios[0])


def test_project_and_two_way_rules() -> None:
    """DTRNet: hard, soft and probability-weighted paths, from the backbone's own modules."""
    arm = [
        *ONE_LAYER,
        "router=mlp",
        "capacity=argmax",
        "placement.sublayer=attention",
        "bypass=project",
        "visibility=all",
    ]
    block = vit().double().blocks[1]
    for scaling, training in (
        *((["none"], False), (["soft_mix"], True), (["soft_mix"], False)),
        *((["soft_mix", "scaling.evaluate=soft"], False), (["top1_probability"], False), (["top1_probability"], True)),
    ):
        model = routed([*arm, f"scaling={scaling[0]}", *scaling[1:]], double=True).train(training)
        with torch.no_grad():
            before, after, part = before_and_after(model, X)
            normed = block.norm1(before)
            attention = block.attn(normed)
            value = torch.nn.functional.linear(normed, block.attn.qkv.weight[64:], block.attn.qkv.bias[64:])
            projected = block.attn.proj(value)
            p = part.scores.unsqueeze(-1)
            kept = (p > 0.5) | (torch.arange(17).view(1, -1, 1) == 0)
            soft = scaling[0] == "soft_mix" and (training or len(scaling) > 1)
            if soft:
                h = before + p * attention + (1 - p) * projected
            elif scaling[0] == "top1_probability":
                h = before + torch.where(kept, p * attention, (1 - p) * projected)
            else:
                h = before + torch.where(kept, attention, projected)
            expected = h + block.mlp(block.norm2(h))
        assert torch.equal(part.counts, kept.squeeze(-1).sum(dim=1))
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)


# --- straight-through gradients ---


def gradients(overrides: list[str], x: Tensor = X) -> tuple[Tensor, dict[str, Tensor]]:
    model = routed([*ONE_LAYER, "router=linear", *overrides], double=True).train()
    output = model(x)
    output.square().sum().backward()
    zero = torch.zeros((), dtype=torch.float64)
    return output.detach(), {name: zero if p.grad is None else p.grad for name, p in model.named_parameters()}


ROUTER_WEIGHT = "layers.1.router.weight"


@pytest.mark.parametrize("form", ["value", "stop_gradient"])
@pytest.mark.parametrize("how", NORMALIZATIONS)
def test_straight_through_is_none_in_the_forward_pass(form: str, how: str) -> None:
    plain, plain_gradients = gradients(["scaling=none"])
    found, grads = gradients(["scaling=straight_through", f"scaling.form={form}", f"scaling.normalize={how}"])
    assert torch.equal(found, plain)
    assert plain_gradients[ROUTER_WEIGHT].abs().sum() == 0
    if form == "stop_gradient":
        assert (grads[ROUTER_WEIGHT] == 0).all()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, plain_gradients[name].expand_as(grad), rtol=0, atol=1e-10)
    else:
        assert grads[ROUTER_WEIGHT].abs().sum() > 0


@pytest.mark.parametrize("form", ["value", "mask", "stop_gradient"])
@pytest.mark.parametrize("bypass", ["skip", "project"])
@pytest.mark.parametrize("capacity", ["topk", "percentile"])
def test_straight_through_with_every_bypass(form: str, bypass: str, capacity: str) -> None:
    sublayer = "attention" if bypass == "project" else "block"
    arm = [f"bypass={bypass}", f"placement.sublayer={sublayer}", f"capacity={capacity}"]
    plain, _ = gradients([*arm, "scaling=none"])
    found, grads = gradients([*arm, "scaling=straight_through", f"scaling.form={form}"])
    assert torch.equal(found, plain)
    assert bool(grads[ROUTER_WEIGHT].abs().sum() > 0) == (form != "stop_gradient")


@pytest.mark.parametrize("target", ["update", "output"])
def test_mask_gradient_is_that_of_its_surrogate(target: str) -> None:
    """d/dw with m + p(w) - p(w0) between the paths of every token, by finite differences."""
    arm = [
        "scaling.normalize=raw",
        "bypass=project",
        "placement.sublayer=attention",
        "visibility=all",
        f"scaling.target={target}",
    ]
    model = routed([*ONE_LAYER, "router=linear", "scaling=straight_through", "scaling.form=mask", *arm], double=True)
    weight = model.layers["1"].router.weight
    output = model.train()(X)
    (gradient,) = torch.autograd.grad(output.square().sum(), weight)

    with torch.no_grad():
        before, _, part = before_and_after(model, X)
        block = model.backbone.blocks[1]
        normed = block.norm1(before)
        attention = block.attn(normed) + (before if target == "output" else 0)
        value = torch.nn.functional.linear(normed, block.attn.qkv.weight[64:], block.attn.qkv.bias[64:])
        projected = block.attn.proj(value)
        mask = torch.zeros_like(part.scores).scatter(1, part.kept, 1.0)

        def loss(value: Tensor) -> Tensor:
            choice = (mask + before @ value[0] - before @ weight[0]).unsqueeze(-1)
            h = before + choice * attention + (1 - choice) * projected
            y = h + block.mlp(block.norm2(h))
            for later in model.backbone.blocks[2:]:
                y = later(y)
            return model.backbone.forward_head(model.backbone.norm(y)).square().sum()

        for coordinate in range(0, 32, 5):
            step = torch.zeros_like(weight)
            step[0, coordinate] = 1e-6
            slope = (loss(weight + step) - loss(weight - step)) / 2e-6
            assert gradient[0, coordinate].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-6)


def test_value_gradient_is_that_of_its_surrogate() -> None:
    """d/dw of the output with gate 1 + r(w) - r(w0) at the selection of w0, by finite differences."""
    model = routed(
        [*ONE_LAYER, "router=linear", "scaling=straight_through", "scaling.normalize=raw"], double=True
    ).train()
    weight = model.layers["1"].router.weight
    output = model(X)
    (gradient,) = torch.autograd.grad(output.square().sum(), weight)

    with torch.no_grad():
        before, _, part = before_and_after(model, X)
        update = update_of(model, before, part, "block")
        mask = torch.zeros_like(part.scores).scatter(1, part.kept, 1.0)

        def loss(value: Tensor) -> Tensor:
            gate = mask * (1 + before @ value[0] - before @ weight[0])
            y = before + gate.unsqueeze(-1) * update
            for block in model.backbone.blocks[2:]:
                y = block(y)
            return model.backbone.forward_head(model.backbone.norm(y)).square().sum()

        for coordinate in range(0, 32, 5):
            step = torch.zeros_like(weight)
            step[0, coordinate] = 1e-6
            slope = (loss(weight + step) - loss(weight - step)) / 2e-6
            assert gradient[0, coordinate].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("form", "reaches"), [("value", False), ("mask", True)])
def test_only_the_mask_form_asks_bypassed_tokens(form: str, reaches: bool) -> None:
    """Whether a bypassed token's own score receives a gradient."""
    model = routed([*ONE_LAYER, "router=linear", "scaling=straight_through", f"scaling.form={form}"]).train()
    output, trace = model(images(), return_trace=True)
    (gradient,) = torch.autograd.grad(output.square().sum(), trace[1].scores)
    kept = torch.zeros_like(gradient, dtype=torch.bool).scatter(1, trace[1].kept, True)
    assert (gradient[kept] != 0).any()
    assert bool((gradient[~kept] != 0).any()) == reaches


def test_evaluation_multiplies_nothing() -> None:
    for form in ("value", "mask", "stop_gradient"):
        model = routed(["router=linear", "scaling=straight_through", f"scaling.form={form}"])
        _, trace = model(images(), return_trace=True)
        assert trace[1].gate is None
        assert torch.equal(model(images()), routed(["router=linear"])(images()))
