"""Drawn decisions, and training in which they take tokens out of the keys instead of removing them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.routing.tiny import PATCHES, WIDTH, images, llama, routed, run_state, spec, token_ids, vit
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

import routing_lab
from routing_lab.attention import policy_softmax
from routing_lab.config import ConfigError, load
from routing_lab.routing.capacity import Gumbel, TopK
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.tokens import Selection
from routing_lab.routing.trace import LayerTrace

STAGES = ["placement=stages", "placement.layers=[1,2]"]
MASKED = [*STAGES, "bypass=drop", "bypass.train=mask"]
DYNAMICVIT = ["method=dynamicvit", "placement.layers=[1,2]"]
LEARNED = ["linear", "mlp", "mix", "predictor"]
VARIANTS: dict[str, dict[str, Any]] = {
    "class": {},
    "registers": {"reg_tokens": 2},
    "distilled": {"kind": VisionTransformerDistilled},
    "layer_scale": {"init_values": 0.5, "qk_norm": True},
    "average": {"class_token": False, "global_pool": "avg"},
}


def gumbel(scale: str = "logit", **options: Any) -> Gumbel:
    return Gumbel(spec(seed=5), scale=scale, **options)  # type: ignore[arg-type]


def kept_patches(layer: LayerTrace) -> list[list[int]]:
    """For each sample the kept tokens' patches."""
    return [[int(origin[i]) for i in kept if i >= 0] for origin, kept in zip(layer.origin, layer.kept, strict=True)]


# --- the decision ---


def test_a_token_is_kept_as_often_as_its_probability_says() -> None:
    odds = torch.tensor([-2.0, 0.0, 1.0]).repeat(4000, 100)
    state = run_state(batch=4000, training=True)
    kept = gumbel(protect="none")(odds, state).mask().float().view(-1, 3).mean(dim=0)
    torch.testing.assert_close(kept, torch.tensor([-2.0, 0.0, 1.0]).sigmoid(), atol=0.004, rtol=0)


def test_the_draw_belongs_to_step_and_sample_and_to_nothing_else() -> None:
    scores = torch.zeros(4, 30)
    rule = gumbel()
    first = rule(scores, run_state(batch=4, step=3, training=True)).mask()
    torch.manual_seed(99)
    again = rule(scores, run_state(batch=4, step=3, training=True)).mask()
    other = rule(scores, run_state(batch=4, step=4, training=True)).mask()
    one = rule(scores[:2], run_state(batch=2, step=3, training=True)).mask()
    assert torch.equal(first, again)
    assert torch.equal(first[:2], one)
    assert not torch.equal(first, other)


def test_the_decision_is_exactly_zero_or_one_with_the_gradient_of_the_relaxed_one() -> None:
    odds = torch.randn(3, PATCHES + 1, requires_grad=True)
    state = run_state(training=True)
    selection = gumbel(temperature=2.0)(odds, state)
    assert selection.relaxed is not None
    assert torch.equal(selection.relaxed.detach(), selection.mask().float())
    selection.relaxed.sum().backward()
    noise = state.noise.gumbel(PATCHES + 1, 5, 1)
    soft = ((odds.detach() + noise[..., 0] - noise[..., 1]) / 2).sigmoid()
    expected = soft * (1 - soft) / 2
    expected[:, 0] = 0  # the class token is protected
    torch.testing.assert_close(odds.grad, expected)
    assert (selection.relaxed[:, 0] == 1).all()


@pytest.mark.parametrize("scale", ["probability", "log_probability"])
def test_the_draw_follows_the_probability_on_every_scale(scale: str) -> None:
    odds = torch.randn(3, PATCHES + 1)
    scores = odds.sigmoid() if scale == "probability" else odds.sigmoid().log()
    state = run_state(training=True)
    assert torch.equal(gumbel(scale)(scores, state).mask(), gumbel()(odds, state).mask())


def test_the_lowest_are_kept_when_asked() -> None:
    odds = torch.tensor([[0.0, 50.0, -50.0]])
    rule = gumbel(order="lowest", protect="none")
    assert rule(odds, run_state(batch=1, training=True)).mask()[0, 1:].tolist() == [False, True]


def test_evaluation_keeps_a_fixed_number_of_the_initial_patches() -> None:
    scores = torch.randn(3, 9)  # 8 patches are left of 16
    state = run_state(initial_tokens=PATCHES + 1)
    found = gumbel(fraction=0.4)(scores, state)
    assert found.relaxed is None
    same = TopK(spec(), fraction=0.4, count="initial", count_prefix=False)(scores, state)
    assert torch.equal(found.index, same.index)
    assert found.index.shape == (3, 1 + 6)


def test_the_power_schedule_is_a_power() -> None:
    aimed = [
        Gumbel(spec(rank=rank, num_routed=3), scale="logit", fraction=0.7, depth_schedule="power").fraction
        for rank in range(3)
    ]
    assert aimed == [0.7, 0.7**2, 0.7**3]


def test_a_decision_among_some_lies_among_all() -> None:
    outer = Selection.from_mask(torch.tensor([[True, False, True, True]]))
    inner = Selection(torch.tensor([[0, 2]]), None, 3, torch.tensor([[1.0, 0.0, 1.0]]))
    found = inner.within(outer)
    assert found.index.tolist() == [[0, 3]]
    assert found.relaxed is not None
    assert found.relaxed.tolist() == [[1.0, 0.0, 0.0, 1.0]]


# --- attention weighed by it ---


def test_policy_softmax_hides_keys_but_never_a_token_from_itself() -> None:
    logits = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    policy = torch.tensor([[1.0, 0, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.float64)
    found = policy_softmax(logits, policy)
    allowed = (policy.bool().unsqueeze(1) | torch.eye(5, dtype=torch.bool)).unsqueeze(1)
    expected = logits.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 3, 5, dtype=torch.float64))


@pytest.mark.parametrize("variant", VARIANTS)
def test_keeping_all_in_training_is_the_dense_model_up_to_epsilon(variant: str) -> None:
    backbone = vit(**VARIANTS[variant])
    model = routed([*MASKED, "router=linear", "capacity.fraction=1.0"], backbone)
    torch.testing.assert_close(model.train()(images()), backbone.eval()(images()), atol=2e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "overrides",
    [
        ["router=predictor", "capacity.count_prefix=false", "capacity.count=initial"],
        ["router=amod", "placement.attention_source=previous", "placement.attention_fill=zero"],
        ["router=linear", "visibility=all"],
        ["router=amod", "placement.sublayer=mlp", "placement.attention_source=same"],
        ["router=linear", "scaling=multiply", "scaling.normalize=sigmoid"],
        ["router=linear", "capacity=percentile"],
    ],
    ids=["predictor", "amod", "all_keys", "mlp", "multiply", "percentile"],
)
def test_masking_and_dropping_agree_but_for_the_draw(overrides: list[str], variant: str) -> None:
    model = routed([*MASKED, "capacity.fraction=0.6", *overrides], vit(**VARIANTS[variant]))
    x = images()
    logits, dropped = model.eval()(x, return_trace=True)
    masked_logits, masked = model.train()(x, return_trace=True)
    for layer in (1, 2):
        assert kept_patches(masked[layer]) == kept_patches(dropped[layer])
        assert masked[layer].tokens == dropped[0].tokens
    torch.testing.assert_close(masked_logits, logits, atol=1e-4, rtol=0)


def test_masking_is_of_no_account_in_evaluation() -> None:
    masked = routed([*MASKED, "router=linear"])
    dropped = routed([*STAGES, "router=linear", "bypass=drop"])
    assert torch.equal(masked(images()), dropped(images()))


# --- training ---


def grown(model: RoutedModel, x: Tensor) -> dict[str, Tensor | None]:
    """Gradients of the axes' parameters after one step of training."""
    model.train()(x, step=1).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.layers.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_predictor_parameter_gets_a_gradient(variant: str) -> None:
    gradients = grown(routed(DYNAMICVIT, vit(**VARIANTS[variant])), images())
    assert gradients
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert torch.isfinite(gradient).all(), name
        assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("router", LEARNED)
@pytest.mark.parametrize(
    "fate",
    [
        ["bypass=drop", "bypass.train=mask", "scaling=none"],
        ["bypass=drop", "scaling=straight_through"],
        ["bypass=skip", "scaling=straight_through", "scaling.form=mask"],
        ["bypass=skip", "scaling=straight_through", "scaling.form=value", "capacity.persist=hierarchical"],
        ["bypass=skip", "scaling=multiply", "placement.sublayer=mlp"],
        ["bypass=project", "scaling=straight_through", "scaling.form=mask", "placement.sublayer=attention"],
    ],
    ids=["mask", "drop", "skip_mask", "nested", "mlp", "project"],
)
def test_any_learned_score_can_be_drawn_by(router: str, fate: list[str]) -> None:
    source = ["placement.attention_source=0"] if router == "mix" else []
    model = routed([*STAGES, f"router={router}", "capacity=gumbel", *fate, *source])
    gradients = grown(model, images())
    assert gradients
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert torch.isfinite(gradient).all(), name
    if fate[0] != "bypass=drop" or len(fate) > 2:  # no patch may be left
        assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())


def test_decisions_only_ever_take_away() -> None:
    model = routed(DYNAMICVIT)
    _, trace = model.train()(images(), return_trace=True)
    first, second = trace[1].relaxed, trace[2].relaxed
    assert first is not None
    assert second is not None
    assert (second <= first).all()
    assert torch.equal(trace[2].counts, second.sum(dim=1).long())
    assert trace[2].tokens == PATCHES + 1


def test_a_patch_that_was_taken_out_changes_no_other() -> None:
    model = routed([*MASKED, "router=random", "router.mode=fixed"]).train()
    tokens, context = model.embed(images())
    state = model.run_state(tokens)
    left, trace = model.forward_tokens(tokens, context, state)
    gone = torch.tensor([i for i in range(PATCHES + 1) if i not in trace[1].kept[0]])

    def emptied(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0].with_x(args[0].x.index_fill(1, gone, 0.0)), *args[1:]

    handle = model.layers["1"].register_forward_pre_hook(emptied)
    other, _ = model.forward_tokens(tokens, context, state)
    handle.remove()
    kept = trace[2].kept[0]
    torch.testing.assert_close(other.x[:, kept], left.x[:, kept], atol=1e-4, rtol=0)
    assert not torch.allclose(other.x[:, gone], left.x[:, gone], atol=1e-2)


def test_the_tokens_behind_the_output_come_along() -> None:
    model = routed(DYNAMICVIT)
    logits, trace, tokens = model(images(), return_trace=True, return_tokens=True)
    assert tokens.x.shape == (3, trace[2].tokens, WIDTH)
    torch.testing.assert_close(model.backbone.forward_head(tokens.x), logits)
    again, same = model(images(), return_tokens=True)
    assert torch.equal(again, logits)
    assert torch.equal(same.x, tokens.x)


def test_a_trained_dense_checkpoint_loads_beside_the_predictors() -> None:
    model = routing_lab.route(vit(), DYNAMICVIT)
    names = [name for name in model.state_dict() if name.startswith("router.")]
    assert {name.split(".")[1] for name in names} == {"1", "2"}
    assert {name.split(".", 2)[2] for name in names} == {
        f"{part}.{kind}"
        for part in ("in_norm", "in_fc", "out_fc1", "out_fc2", "out_fc3")
        for kind in ("weight", "bias")
    }
    assert isinstance(model.layers["1"].router.in_norm, nn.LayerNorm)
    assert model.layers["1"].router.in_norm.eps == 1e-5


def test_half_precision_scores_are_single_precision() -> None:
    model = routed(DYNAMICVIT).to(torch.bfloat16).train()
    logits, trace = model(images(dtype=torch.bfloat16), return_trace=True)
    assert trace[1].scores.dtype == torch.float32
    assert torch.isfinite(logits).all()


# --- configuration ---


def test_a_score_that_is_not_learned_is_not_drawn_by() -> None:
    with pytest.raises(ConfigError, match="draws decisions by a learned score"):
        load(["router=amod", "capacity=gumbel"])


def test_the_preset_fits_any_depth() -> None:
    assert load(["method=dynamicvit"]).warnings == []


def test_a_decoder_is_not_masked() -> None:
    with pytest.raises(ConfigError, match="bypass"):
        routing_lab.route(llama(), ["router=linear", "capacity=gumbel", "bypass=drop", "bypass.train=mask"])
    model = routing_lab.route(
        llama(), ["router=linear", "capacity=gumbel", "scaling=straight_through", "scaling.form=mask"]
    )
    assert torch.isfinite(model.train()(token_ids())).all()
