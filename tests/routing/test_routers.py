"""Score sources, their corruption and the random numbers behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attention.test_statistics import own_map
from tests.routing.tiny import HEADS, WIDTH, images, routed, run_state, spec, vit
from torch import Tensor

from routing_lab.backbones import adapt
from routing_lab.routing.base import RouterInput
from routing_lab.routing.measures import informative_kept
from routing_lab.routing.noise import NoiseSource
from routing_lab.routing.routers import (
    ConstantRouter,
    Corruption,
    LinearRouter,
    MLPRouter,
    OracleRouter,
    RandomRouter,
    SubspaceRouter,
    reduce_heads,
)
from routing_lab.routing.tokens import Tokens

REGISTERS = {"reg_tokens": 2}


def scores_of(overrides: list[str], x: Tensor, layer: int = 1, module: Any = None, **run: Any) -> Tensor:
    """Scores of one routed layer in a double precision model."""
    model = routed(overrides, module, double=True)
    model.train(run.pop("training", False))
    with torch.no_grad():
        return model(x, return_trace=True, **run)[1][layer].scores


def source_map(x: Tensor, layer: int = 0, **options: Any) -> Tensor:
    """[B, H, N, N] the attention map of a dense layer of the same model."""
    backbone = adapt(vit(**options).double())
    with torch.no_grad():
        tokens, context = backbone.embed(x)
        for below in range(layer):
            tokens = tokens.with_x(backbone.block(below).dense(tokens.side(), context))
        return own_map(backbone, tokens.x, layer)


def inputs(x: Tensor, training: bool = False, step: int = 0, prefix: int = 1) -> RouterInput:
    return RouterInput(Tokens(x, num_prefix=prefix), None, run_state(len(x), step=step, training=training))


X = images(dtype=torch.float64)


def test_attention_received_is_the_column_mean() -> None:
    """A-MoD, Eq. 4: r_i = 1/(HN) sum_h sum_j A_h[j, i], by loops over heads, queries and keys."""
    attention = source_map(X)
    batch, heads, tokens, _ = attention.shape
    expected = torch.zeros(batch, tokens, dtype=torch.float64)
    for head in range(heads):
        for j in range(tokens):
            for i in range(tokens):
                expected[:, i] += attention[:, head, j, i] / (heads * tokens)
    found = scores_of(["router=amod"], X)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(batch, dtype=torch.float64))
    assert not torch.allclose(found, attention.mean(dim=(1, 3)), atol=1e-3)


def test_class_attention_is_the_first_row() -> None:
    found = scores_of(["router=cls_attention"], X)
    torch.testing.assert_close(found, source_map(X)[:, :, 0].mean(dim=1), rtol=0, atol=1e-13)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "reduce"),
    [
        (["router.head_reduction=max"], lambda heads: heads.amax(dim=1)),
        (["router.head_reduction=median"], lambda heads: heads.sort(dim=1).values[:, 1]),
        (["router.head_reduction=head", "router.head=2"], lambda heads: heads[:, 2]),
    ],
    ids=["max", "median", "head"],
)
def test_head_reductions(options: list[str], reduce: Any) -> None:
    attention = source_map(X)
    for router, statistic in (("amod", attention.mean(dim=2)), ("cls_attention", attention[:, :, 0])):
        torch.testing.assert_close(scores_of([f"router={router}", *options], X), reduce(statistic), rtol=0, atol=1e-13)


def test_one_head_must_exist() -> None:
    with pytest.raises(ValueError, match=r"router\.head = 4: head_reduction=head needs one of 0 to 3"):
        reduce_heads(torch.zeros(1, HEADS, 3), "head", 4)


@pytest.mark.parametrize("kind", ["class", "registers", "prefix", "self"])
def test_excluded_queries_and_keys(kind: str) -> None:
    attention = source_map(X, **REGISTERS)
    tokens = attention.shape[-1]
    left_out = {"class": [0], "registers": [1, 2], "prefix": [0, 1, 2], "self": []}[kind]
    rest = [i for i in range(tokens) if i not in left_out]
    others = attention * (1 - torch.eye(tokens, dtype=torch.float64)) if kind == "self" else attention

    found = scores_of(["router=amod", f"router.exclude_queries=[{kind}]"], X, module=vit(**REGISTERS))
    torch.testing.assert_close(found, others[:, :, rest].mean(dim=(1, 2)), rtol=0, atol=1e-13)

    found = scores_of(["router=amod", f"router.exclude_keys=[{kind}]"], X, module=vit(**REGISTERS))
    kept = others.clone()
    kept[..., left_out] = 0
    if left_out:
        kept = kept / kept.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(found, kept.mean(dim=(1, 2)), rtol=0, atol=1e-13)


def test_linear_and_two_way_scores() -> None:
    x = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    linear = LinearRouter(spec(), bias=True)
    with torch.no_grad():
        linear.bias += 0.5
        torch.testing.assert_close(linear(inputs(x)), (x @ linear.weight[0]) + 0.5)
        normed = LinearRouter(spec(), normalize_input=True)
        expected = torch.nn.functional.layer_norm(x, (WIDTH,)) @ normed.weight[0]
        torch.testing.assert_close(normed(inputs(x)), expected)
        two_way = MLPRouter(spec())
        assert two_way.fc1.out_features == WIDTH // 2
        logits = two_way.fc2(torch.nn.functional.silu(two_way.fc1(x)))
        torch.testing.assert_close(two_way(inputs(x)), logits.softmax(dim=-1)[..., 0])
        assert MLPRouter(spec(), hidden=5).fc1.out_features == 5


def test_half_precision_models_score_in_single_precision() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, WIDTH).bfloat16()
    for router in (LinearRouter(spec()), MLPRouter(spec()), SubspaceRouter(spec()), ConstantRouter(spec())):
        router = router.bfloat16()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            scores = router(inputs(x))
        assert scores.dtype == torch.float32
        with torch.no_grad():
            torch.testing.assert_close(scores, router.float()(inputs(x.float())), rtol=0, atol=1e-6)


def test_subspace_and_constant() -> None:
    x = torch.randn(2, 7, WIDTH)
    torch.testing.assert_close(SubspaceRouter(spec(), dims=[3, 5])(inputs(x)), x[..., [3, 5]].mean(dim=-1))
    assert (ConstantRouter(spec(), value=0.25)(inputs(x)) == 0.25).all()


def test_wrong_shape_is_named() -> None:
    class Broken(ConstantRouter):
        def score(self, inputs: RouterInput) -> Tensor:
            return torch.zeros(2)

    with pytest.raises(ValueError, match=r"Broken\.score returned shape \(2,\); one score per token, \(2, 7\)"):
        Broken(spec())(inputs(torch.zeros(2, 7, WIDTH)))


def test_ends_of_the_mix_are_its_parts_bit_by_bit() -> None:
    mix = ["router=mix", "router.init_std=0.1", "runtime.attention=exact"]
    attention = scores_of(["router=amod", "runtime.attention=exact"], X)
    learned = scores_of(["router=linear", "router.init_std=0.1"], X)
    assert torch.equal(scores_of([*mix, "router.alpha=0"], X), attention)
    assert torch.equal(scores_of([*mix, "router.alpha=1"], X), learned)
    half = scores_of([*mix, "router.alpha=0.25"], X)
    torch.testing.assert_close(half, 0.75 * attention + 0.25 * learned, rtol=0, atol=1e-14)


def test_mix_can_learn_its_weight() -> None:
    model = routed(["router=mix", "router.learn_alpha=true", "scaling=multiply"]).train()
    model(images()).square().sum().backward()
    assert set(dict(model.layers.named_parameters())) == {
        f"{layer}.router.{name}" for layer in (1, 3) for name in ("alpha", "linear.weight")
    }
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.layers.parameters())


# --- random scores ---


def random_scores(
    mode: str, batch: int = 4, tokens: int = 17, step: int = 0, training: bool = True, **where: Any
) -> Tensor:
    router = RandomRouter(spec(**{"seed": 11, **where}), mode=mode)
    return router(inputs(torch.zeros(batch, tokens, WIDTH), training, step))


def test_iid_scores_are_new_for_every_step_sample_layer_and_seed() -> None:
    base = random_scores("iid")
    assert torch.equal(base, random_scores("iid"))
    assert len({tuple(row.tolist()) for row in base}) == 4
    for other in (random_scores("iid", step=1), random_scores("iid", layer=2), random_scores("iid", seed=12)):
        assert not torch.isclose(base, other).any(dim=1).all()
        assert (base - other).abs().mean() > 0.2


def test_iid_scores_are_fixed_per_sample_in_evaluation() -> None:
    first = random_scores("iid", training=False, step=0)
    assert torch.equal(first, random_scores("iid", training=False, step=9))
    assert not torch.equal(first, random_scores("iid", training=True))
    assert not torch.equal(first[0], first[1])


def test_noise_belongs_to_the_sample_not_to_the_batch() -> None:
    model = routed(["router=random"])
    x = images(batch=6)
    for training in (False, True):
        model.train(training)
        ids = torch.tensor([50, 3, 17, 4, 99, 0])
        _, whole = model(x, return_trace=True, step=5, sample_ids=ids)
        _, part = model(x[[4, 1]], return_trace=True, step=5, sample_ids=ids[[4, 1]])
        assert torch.equal(part[1].scores, whole[1].scores[[4, 1]])
        assert torch.equal(part[3].kept, whole[3].kept[[4, 1]])


def test_fixed_scores_differ_between_layers_only() -> None:
    base = random_scores("fixed")
    assert (base == base[0]).all()
    assert torch.equal(base, random_scores("fixed", step=3))
    assert torch.equal(base, random_scores("fixed", training=False))
    assert not torch.equal(base, random_scores("fixed", layer=3))
    assert not torch.equal(base, random_scores("fixed", seed=3))


@pytest.mark.parametrize("kept", [2, 4, 8])
def test_strided_scores_keep_evenly_spaced_patches(kept: int) -> None:
    scores = random_scores("strided")
    assert (scores == scores[0]).all()
    patches = scores[0, 1:].argsort(descending=True, stable=True)[:kept].sort().values
    assert patches.tolist() == list(range(0, 16, 16 // kept))
    assert (scores[:, 0] >= scores.amax(dim=1)).all()


@pytest.mark.parametrize("mode", ["iid", "fixed", "strided"])
def test_random_keeps_the_exact_fraction(mode: str) -> None:
    _, trace = routed(["router=random", f"router.mode={mode}", "capacity.fraction=0.3"])(images(), return_trace=True)
    assert trace[1].counts.tolist() == trace[3].counts.tolist() == [5, 5, 5]


def test_global_generator_is_left_alone() -> None:
    arms = ["router=random", "router.corrupt=noise"], ["router=amod", "router.attention=random"]
    for overrides in arms:
        model = routed(overrides).train()
        before = torch.get_rng_state()
        model(images(), step=3)
        assert torch.equal(torch.get_rng_state(), before)


def test_uniform_numbers_are_uniform() -> None:
    source = NoiseSource(0, torch.arange(400))
    numbers = source.uniform(250, seed=1, layer=2)
    assert 0 < numbers.min() < numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.004)
    assert numbers.std().item() == pytest.approx(12**-0.5, abs=0.004)
    histogram = torch.histc(numbers, bins=20, min=0, max=1) / numbers.numel()
    assert (histogram - 0.05).abs().max() < 0.005
    for one, other in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.01
    assert numbers.unique().numel() > 0.98 * numbers.numel()


def test_normal_numbers_are_normal() -> None:
    numbers = NoiseSource(0, torch.arange(400)).normal(250, seed=1, layer=2)
    assert numbers.isfinite().all()
    assert numbers.mean().item() == pytest.approx(0, abs=0.01)
    assert numbers.std().item() == pytest.approx(1, abs=0.01)
    assert (numbers.abs() > 1.96).float().mean().item() == pytest.approx(0.05, abs=0.003)


# --- corruption ---


def corrupted(scores: Tensor, training: bool = True, step: int = 0, **options: Any) -> Tensor:
    x = torch.zeros(*scores.shape, WIDTH)
    return Corruption(spec(seed=5), **options)(scores, inputs(x, training, step))


SCORES = torch.rand(4, 17, generator=torch.Generator().manual_seed(3))


def test_shuffle_keeps_the_multiset_and_the_protected() -> None:
    found = corrupted(SCORES, kind="shuffle", num_protected=1)
    assert torch.equal(found[:, 0], SCORES[:, 0])
    assert torch.equal(found.sort(dim=1).values, SCORES.sort(dim=1).values)
    assert (found[:, 1:] != SCORES[:, 1:]).any(dim=1).all()
    assert not torch.equal(found, corrupted(SCORES, kind="shuffle", num_protected=1, step=1))
    assert torch.equal(found, corrupted(SCORES, kind="shuffle", num_protected=1))
    assert (corrupted(SCORES, kind="shuffle")[:, 0] != SCORES[:, 0]).any()


def test_shuffle_of_some_samples() -> None:
    scores = torch.rand(400, 9)
    share = (corrupted(scores, kind="shuffle", strength=0.3) != scores).any(dim=1).float().mean()
    assert share.item() == pytest.approx(0.3, abs=0.08)
    assert torch.equal(corrupted(scores, kind="shuffle", strength=0.0), scores)


def test_sink_draws_its_share_of_the_total() -> None:
    found = corrupted(SCORES, kind="sink", strength=0.4, token=2)
    torch.testing.assert_close(found.sum(dim=1), SCORES.sum(dim=1))
    torch.testing.assert_close(found[:, 3], 0.6 * SCORES[:, 3] + 0.4 * SCORES.sum(dim=1))
    others = [i for i in range(17) if i != 3]
    torch.testing.assert_close(found[:, others], 0.6 * SCORES[:, others])
    with pytest.raises(ValueError, match=r"router\.corrupt_token = 16: the layer has 16 patches, 0 to 15"):
        corrupted(SCORES, kind="sink", token=16)


def test_noise_has_the_stated_spread() -> None:
    scores = torch.rand(300, 50)
    added = (corrupted(scores, kind="noise", strength=0.5) - scores) / scores.std(dim=1, keepdim=True)
    assert added.std().item() == pytest.approx(0.5, abs=0.01)
    assert added.mean().item() == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("kind", ["shuffle", "sink", "noise"])
@pytest.mark.parametrize(("phase", "train", "evaluate"), [("train", 1, 0), ("eval", 0, 1), ("both", 1, 1)])
def test_phases(kind: str, phase: str, train: int, evaluate: int) -> None:
    for training, acts in ((True, train), (False, evaluate)):
        assert torch.equal(corrupted(SCORES, training, kind=kind, phase=phase), SCORES) == (not acts)


@pytest.mark.parametrize("kind", ["shuffle", "sink", "noise"])
def test_corruption_keeps_the_budget(kind: str) -> None:
    _, clean = routed(["router=linear"])(images(), return_trace=True)
    _, spoiled = routed(["router=linear", f"router.corrupt={kind}"])(images(), return_trace=True)
    assert torch.equal(clean[1].counts, spoiled[1].counts)
    assert not torch.equal(clean[1].scores, spoiled[1].scores)
    assert (spoiled[1].kept[:, 0] == 0).all()  # the class token stays protected


# --- random attention ---


def test_random_attention_scores_change_and_outputs_do_not() -> None:
    backbone = vit()
    trained, random = (routed(["router=amod", f"router.attention={kind}"], backbone) for kind in ("trained", "random"))
    _, expected = trained(images(), return_trace=True)
    _, found = random(images(), return_trace=True)
    assert not torch.allclose(found[1].scores, expected[1].scores, atol=1e-3)
    torch.testing.assert_close(found[1].scores.sum(dim=1), torch.ones(3))
    assert set(random.state_dict()) == set(trained.state_dict())
    again = routed(["router=amod", "router.attention=random"], backbone)
    assert torch.equal(again(images()), random(images()))
    other = routed(["router=amod", "router.attention=random", "seed=1"], backbone)
    assert not torch.equal(other(images()), random(images()))
    full = ["router=amod", "router.attention=random", "capacity.fraction=1"]
    assert torch.equal(routed(full, backbone)(images()), backbone(images()))


@pytest.mark.parametrize("detach", [True, False])
def test_gradient_into_the_attention_behind_the_scores(detach: bool) -> None:
    """With detach the source's queries and keys get no gradient through the scores."""

    def gradient(scaling: str) -> Tensor:
        model = routed(["router=amod", f"router.detach={detach}", f"scaling={scaling}"], double=True).train()
        _, trace = model(X, return_trace=True)
        if not trace[1].scores.requires_grad:
            return torch.zeros(())
        trace[1].scores[:, 3].sum().backward()
        return model.backbone.blocks[0].attn.qkv.weight.grad[: 2 * WIDTH].abs().sum()

    assert (gradient("multiply") > 0) == (not detach)


def test_the_oracle_keeps_what_it_is_told_and_fills_up_at_random() -> None:
    informative = torch.zeros(3, 16, dtype=torch.bool)
    informative[0, [3, 7]] = informative[1, :6] = True
    model = routed(["router=oracle", "placement=every", "capacity.fraction=0.3", "bypass=drop"])
    with torch.no_grad():
        _, trace = model(images(), return_trace=True, informative=informative)
    found = informative_kept(trace, informative)
    # Of 17 tokens 5 are kept, one of them the class token; then 1 of those 5 beside it is not kept, and so on.
    assert found[0].tolist() == [2, 4, 0]
    kept = trace[1].kept
    assert kept[0].tolist()[0] == 0
    assert {4, 8} <= set(kept[0].tolist())
    assert set(kept[1].tolist()[1:]) <= set(range(1, 7))
    assert not torch.equal(kept[0], kept[2])
    assert (found.diff(dim=0) <= 0).all()


def test_an_oracle_that_is_told_nothing_says_so() -> None:
    with pytest.raises(ValueError, match=r"router=oracle has to be told"):
        routed(["router=oracle"])(images())
    router = OracleRouter(spec())
    state = replace(run_state(2), informative=torch.ones(2, 4, dtype=torch.bool))
    scores = router(RouterInput(Tokens(torch.zeros(2, 5, WIDTH), num_prefix=1), None, state))
    assert (scores[:, 0] < 1).all()
    assert (scores[:, 1:] > 1).all()
