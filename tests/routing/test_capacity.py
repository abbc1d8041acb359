"""Budgets and rules: how many tokens, and which."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.routing.tiny import images, routed, run_state, spec
from torch import Tensor

from routing_lab.axes.budget import Offer
from routing_lab.axes.capacities import PercentileConfig, TopKConfig
from routing_lab.routing.capacity import Argmax, Entropy, FractionCapacity, Never, Percentile, Threshold, TopK, quantile
from routing_lab.routing.tokens import Selection


def distinct(tokens: int, batch: int = 3, seed: int = 0) -> Tensor:
    """[B, N] distinct scores in random order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(tokens, generator=generator) for _ in range(batch)]) / tokens


def select(capacity: Any, scores: Tensor, **state: Any) -> Selection:
    return capacity(scores, run_state(len(scores), **{"initial_tokens": scores.shape[1], **state}))


@pytest.mark.parametrize(
    ("tokens", "fraction", "compare", "kept"),
    [
        (197, 0.5, "ge", 99),
        (197, 0.5, "gt", 98),
        (197, 0.5, None, 98),
        (197, 0.125, "ge", 25),
        (197, 0.125, None, 24),
        (196, 0.5, "ge", 98),
        (196, 0.5, "gt", 98),
        (196, 0.5, None, 98),
        (65, 0.5, "ge", 33),
        (65, 0.5, "gt", 32),
        (65, 0.5, None, 32),
        (11, 0.7, "ge", 8),
        (11, 0.3, "gt", 3),
        (197, 1.0, "ge", 197),
    ],
)
def test_counts(tokens: int, fraction: float, compare: str | None, kept: int) -> None:
    options = {"fraction": fraction, "protect": "none"}
    capacity = TopK(spec(), **options) if compare is None else Percentile(spec(), compare=compare, **options)
    scores = distinct(tokens)
    selection = select(capacity, scores)
    assert selection.counts().tolist() == [kept] * 3
    best = scores.argsort(dim=1, descending=True)[:, :kept].sort(dim=1).values
    assert torch.equal(selection.padded_index(), best)


def test_percentile_of_every_size_keeps_what_numpy_says() -> None:
    """The comparison is made against a quantile in double precision: no token is lost to rounding."""
    for tokens, fraction in itertools.product(range(2, 60), (0.1, 0.25, 0.3, 0.5, 0.7, 0.9)):
        scores = distinct(tokens, batch=1).float()
        selection = select(Percentile(spec(), fraction=fraction, protect="none"), scores)
        position = round((1 - fraction) * (tokens - 1), 9)
        assert selection.counts().item() == tokens - int(np.ceil(position)), (tokens, fraction)


@pytest.mark.parametrize("interpolation", ["linear", "lower", "higher", "midpoint", "nearest"])
def test_quantile_is_numpys(interpolation: str) -> None:
    for tokens, beta in itertools.product((1, 2, 7, 12, 65), (0.0, 0.1, 0.3, 0.5, 0.875, 1.0)):
        scores = torch.randn(2, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
        expected = np.quantile(scores.numpy(), beta, axis=1, method=interpolation)
        found = quantile(scores, beta, interpolation).squeeze(1).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14, err_msg=f"{tokens} {beta}")


@pytest.mark.parametrize(("rounding", "kept"), [("floor", 8), ("ceil", 9), ("round", 9)])
def test_rounding(rounding: str, kept: int) -> None:
    assert select(TopK(spec(), rounding=rounding), distinct(17)).counts().tolist() == [kept] * 3


def test_products_near_whole_numbers_are_whole() -> None:
    """0.29 * 100 is 28.999999999999996 in binary: floor must not lose a token, ceil must not gain one."""
    assert select(TopK(spec(), fraction=0.29), distinct(100)).counts()[0] == 29
    assert select(TopK(spec(), fraction=0.55, rounding="ceil"), distinct(100)).counts()[0] == 55


def test_at_least_one_token_is_kept() -> None:
    assert select(TopK(spec(), fraction=0.01, protect="none"), distinct(17)).counts().tolist() == [1] * 3


def test_equal_scores() -> None:
    """Top-k takes the first tokens; a percentile cannot tell ties apart and keeps all or none."""
    ties = torch.full((2, 10), 0.3)
    assert select(TopK(spec(), protect="none"), ties).index.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert select(TopK(spec(), protect="none", order="lowest"), ties).index.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert select(Percentile(spec(), protect="none"), ties).counts().tolist() == [10, 10]
    assert select(Percentile(spec(), protect="none", compare="gt"), ties).counts().tolist() == [0, 0]
    partly = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0]])
    assert select(TopK(spec(), protect="none"), partly).index.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("capacity", [TopK, Percentile])
def test_lowest_is_highest_of_the_negative(capacity: type[FractionCapacity]) -> None:
    scores = distinct(17)
    low = select(capacity(spec(), order="lowest", fraction=0.3), scores)
    high = select(capacity(spec(), fraction=0.3), -scores)
    assert torch.equal(low.mask(), high.mask())
    assert not torch.equal(low.mask(), select(capacity(spec(), fraction=0.3), scores).mask())


@pytest.mark.parametrize(("protect", "protected"), [("none", 0), ("class", 1), ("prefix", 3)])
def test_protected_tokens_count_within_the_budget(protect: str, protected: int) -> None:
    layer = spec(prefix=("class", "registers", "registers"))
    scores = distinct(17)
    scores[:, :3] = -1.0
    selection = select(TopK(layer, protect=protect), scores)
    assert selection.counts().tolist() == [8] * 3
    assert selection.mask()[:, :3].sum(dim=1).tolist() == [protected] * 3
    assert torch.equal(selection.mask()[:, 3:].sum(dim=1), torch.full((3,), 8 - protected))
    for rule in (Percentile(layer, protect=protect), Threshold(layer, protect=protect, threshold=9.0)):
        assert select(rule, scores).mask()[:, :protected].all()


HIGH, LOW = [9, 8, 1, 2, 3, 4, 5], [-1, -2, 1, 2, 3, 4, 5]
"""Scores of a class token, a register and five patches."""


@pytest.mark.parametrize(
    ("rule", "scores", "protect", "inside", "beside"),
    [
        ("topk", HIGH, "prefix", [0, 1], [0, 1, 5, 6]),  # 0.4 x 7 = 2.8; 0.4 x 5 = 2, and two
        ("topk", LOW, "prefix", [0, 1], [0, 1, 5, 6]),
        ("topk", HIGH, "class", [0, 1], [0, 1, 6]),  # 0.4 x 6 = 2.4, and one
        ("topk", LOW, "none", [5, 6], [5, 6]),
        ("percentile", HIGH, "prefix", [0, 1, 6], [0, 1, 5, 6]),  # from 4.6 on; from 3.4 on
        ("percentile", LOW, "prefix", [0, 1, 4, 5, 6], [0, 1, 5, 6]),  # from 2.6 on; from 3.4 on
        ("percentile", HIGH, "class", [0, 1, 6], [0, 1, 5, 6]),  # from 4.6 on; from 4 on
        ("percentile", LOW, "none", [4, 5, 6], [4, 5, 6]),
    ],
)
def test_protected_tokens_within_the_budget_or_besides(
    rule: str, scores: list[int], protect: Any, inside: list[int], beside: list[int]
) -> None:
    """Worked out by hand; and besides the budget the number is known before any score is, with either rule."""
    module, config = {"topk": (TopK, TopKConfig), "percentile": (Percentile, PercentileConfig)}[rule]
    given = torch.tensor([scores], dtype=torch.float32)
    for protect_count, kept in (("inside", inside), ("beside", beside)):
        options: dict[str, Any] = {"fraction": 0.4, "protect": protect, "protect_count": protect_count}
        capacity = module(spec(prefix=("class", "registers")), **options)
        assert select(capacity, given).padded_index().tolist() == [kept]
        ragged = capacity(given, run_state(1, initial_tokens=7), torch.ones_like(given, dtype=torch.bool))
        assert torch.equal(ragged.mask(), select(capacity, given).mask())
        if protect_count == "beside" or rule == "topk":
            assert config(**options).num_kept(Offer(7, 7, 2, rank=0, num_routed=1)) == len(kept)
    assert select(module(spec(), fraction=0.4, protect_count="beside"), given[:, :1]).padded_index().tolist() == [[0]]


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 1.0])
def test_a_protected_prefix_besides_the_budget_is_what_leaving_the_prefix_out_means(fraction: float) -> None:
    scores, layer = distinct(17), spec(prefix=("class", "registers"))
    beside = select(TopK(layer, fraction=fraction, protect_count="beside"), scores)
    assert torch.equal(beside.mask(), select(TopK(layer, fraction=fraction, count_prefix=False), scores).mask())


def test_protection_does_not_move_the_percentile() -> None:
    scores = distinct(17)
    open_, protected = (select(Percentile(spec(), protect=name), scores).mask() for name in ("none", "class"))
    assert torch.equal(open_[:, 1:], protected[:, 1:])


def test_argmax_forces_some_tokens_where_a_batch_would_keep_none_and_only_in_training() -> None:
    rule = Argmax(spec(), boundary=0.5, protect="none", force=0.15)
    none, one = torch.zeros(3, 20), torch.zeros(3, 20)
    one[1, 7] = 0.9
    forced = select(rule, none, training=True)
    assert forced.counts().tolist() == [3, 3, 3]
    assert not torch.equal(forced.mask()[0], forced.mask()[1])
    assert select(rule, none).counts().tolist() == [0, 0, 0]
    assert select(rule, one, training=True).counts().tolist() == [0, 1, 0]


def test_never_keeps_the_protected_tokens_alone() -> None:
    scores = torch.rand(2, 5)
    assert select(Never(spec(), protect="none"), scores).counts().tolist() == [0, 0]
    assert select(Never(spec(prefix=("class",))), scores).padded_index().tolist() == [[0], [0]]


@pytest.mark.parametrize(
    "fate", [["bypass=skip"], ["bypass=project", "placement.sublayer=attention"]], ids=lambda fate: fate[0]
)
def test_a_layer_that_keeps_nothing_runs_backward(fate: list[str]) -> None:
    model = routed(["router=random", "scaling=none", "capacity=never", "capacity.protect=none", *fate]).train()
    model(images(), step=1).square().sum().backward()
    model.eval()
    _, trace = model(images(), return_trace=True)
    assert {trace[layer].kept.shape[1] for layer in model.routed_layers} == {0}


def test_threshold_is_inclusive_and_argmax_is_not() -> None:
    scores = torch.tensor([[0.2, 0.5, 0.7], [0.1, 0.1, 0.4]])
    assert select(Threshold(spec(), threshold=0.5, protect="none"), scores).padded_index().tolist() == [
        [1, 2],
        [-1, -1],
    ]
    low = select(Threshold(spec(), threshold=0.2, order="lowest", protect="none"), scores)
    assert low.padded_index().tolist() == [[0, -1], [0, 1]]
    assert select(Argmax(spec(), boundary=0.5, protect="none"), scores).padded_index().tolist() == [[2], [-1]]
    low = select(Argmax(spec(), boundary=0.2, order="lowest", protect="none"), scores)
    assert low.padded_index().tolist() == [[-1, -1], [0, 1]]


def test_one_value_per_routed_layer() -> None:
    counts = [
        select(TopK(spec(rank=rank, num_routed=3), fraction=[0.75, 0.5, 0.25]), distinct(16)).counts()[0].item()
        for rank in range(3)
    ]
    assert counts == [12, 8, 4]
    scores = distinct(16)
    kept = [select(Threshold(spec(rank=r, num_routed=2), threshold=[0.2, 0.8]), scores).mask().sum() for r in range(2)]
    assert kept[0] > kept[1]
    with pytest.raises(ValueError, match=r"capacity\.fraction = \[0\.5, 0\.5\]: 2 entries for 3 routed layers"):
        TopK(spec(rank=0, num_routed=3), fraction=[0.5, 0.5])


def test_depth_schedules() -> None:
    def fractions(schedule: str, num_routed: int = 5) -> list[float]:
        return [
            TopK(
                spec(rank=rank, num_routed=num_routed), fraction=0.9, fraction_last=0.1, depth_schedule=schedule
            ).current_fraction(1.0)
            for rank in range(num_routed)
        ]

    assert fractions("linear") == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])
    half_cosine = [0.1 + 0.8 * (1 + np.cos(np.pi * p)) / 2 for p in (0, 0.25, 0.5, 0.75, 1)]
    assert fractions("cosine") == pytest.approx(half_cosine)
    assert fractions("linear", num_routed=1) == pytest.approx([0.9])
    with pytest.raises(ValueError, match=r"capacity\.depth_schedule = linear: needs capacity\.fraction_last"):
        TopK(spec(), depth_schedule="linear")


def test_warm_up_follows_progress() -> None:
    linear = TopK(spec(), fraction=0.5, warmup=0.4)
    assert [linear.current_fraction(p) for p in (0, 0.1, 0.2, 0.4, 1)] == pytest.approx([1, 0.875, 0.75, 0.5, 0.5])
    cosine = TopK(spec(), fraction=0.5, warmup=0.4, warmup_start=0.8, warmup_shape="cosine")
    expected = [0.8, 0.5 + 0.3 * (1 + np.cos(np.pi / 4)) / 2, 0.65, 0.5, 0.5]
    assert [cosine.current_fraction(p) for p in (0, 0.1, 0.2, 0.4, 1)] == pytest.approx(expected)
    assert select(linear, distinct(16), progress=0.0).counts()[0] == 16
    assert select(linear, distinct(16), progress=0.2).counts()[0] == 12


def test_warm_up_acts_in_training_only() -> None:
    model = routed(["router=random", "capacity.fraction=0.25", "capacity.warmup=0.5"])
    _, trace = model(images(), return_trace=True, progress=0.0)
    assert trace[1].counts.tolist() == [4] * 3
    model.train()
    for progress, kept in ((0.0, 17), (0.25, 10), (1.0, 4)):
        _, trace = model(images(), return_trace=True, progress=progress)
        assert trace[1].counts.tolist() == [kept] * 3


def test_batch_scope_shares_the_budget() -> None:
    scores = distinct(17, batch=4) + torch.arange(4).unsqueeze(1) * 0.2
    selection = select(TopK(spec(), scope="batch", protect="none"), scores)
    counts = selection.counts()
    assert counts.sum() == 4 * 8
    assert counts[0] < counts[3]
    lowest = scores.flatten().sort(descending=True).values[31]
    assert torch.equal(selection.mask(), scores >= lowest)
    quantiles = select(Percentile(spec(), scope="batch", protect="none"), scores)
    assert torch.equal(quantiles.mask(), scores >= np.quantile(scores.numpy(), 0.5))


def test_counting_initial_tokens() -> None:
    state = {"initial_tokens": 30}
    assert select(TopK(spec(), fraction=0.5, count="initial"), distinct(17), **state).counts()[0] == 15
    assert select(TopK(spec(), fraction=0.9, count="initial"), distinct(17), **state).counts()[0] == 17
    assert select(TopK(spec(), fraction=0.5), distinct(17), **state).counts()[0] == 8


def test_a_budget_by_entropy_is_a_share_of_the_tokens_that_scores_are_spread_over() -> None:
    equal, one = torch.full((1, 12), 0.25), torch.eye(12)[5:6]
    for share, kept in [(0.5, 6), (1.0, 12), (0.25, 3), (3.0, 12)]:
        assert select(Entropy(spec(), share=share, protect="none"), equal).counts().tolist() == [kept]
    assert select(Entropy(spec(), share=1.0, protect="none"), one).padded_index().tolist() == [[5]]
    assert select(Entropy(spec(), share=1.0, protect="none", at_least=3), one).counts().tolist() == [3]
    scores = distinct(40, batch=5).double()
    p = (scores / scores.sum(dim=1, keepdim=True)).numpy()
    wanted = np.round(0.4 * np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum(axis=1))).astype(int)
    found = select(Entropy(spec(), share=0.4, protect="none"), scores)
    assert found.counts().tolist() == wanted.tolist()
    for row, mask in zip(scores, found.mask(), strict=True):
        assert row[mask].min() > row[~mask].max()


def test_a_budget_by_entropy_leaves_out_protected_tokens_and_padding() -> None:
    capacity, scores = Entropy(spec(prefix=("class", "registers")), share=0.5), distinct(20).double()
    valid = torch.arange(20) < torch.tensor([[20], [13], [8]])
    padded = capacity(scores, run_state(3, initial_tokens=20), valid)
    for sample, count in enumerate((20, 13, 8)):
        alone = select(Entropy(spec(), share=0.5, protect="none"), scores[sample : sample + 1, 2:count])
        assert padded.counts()[sample] == alone.counts()[0] + 2
        assert torch.equal(padded.mask()[sample, 2:count], alone.mask()[0])
        assert padded.mask()[sample, :2].all()
        assert not padded.mask()[sample, count:].any()


RAGGED = {
    "entropy": ["router=amod", "capacity=entropy", "capacity.share=0.9"],
    "ties-keep-all": ["router=constant", "capacity=percentile"],
    "some-keep-none": ["router=linear", "capacity=threshold", "capacity.threshold=6", "capacity.protect=none"],
    "none-kept": ["router=linear", "capacity=threshold", "capacity.threshold=1e9", "capacity.protect=none"],
    "none-kept-strictly": ["router=constant", "capacity=percentile", "capacity.compare=gt", "capacity.protect=none"],
    "choice": ["router=mlp", "capacity=argmax", "capacity.protect=none"],
    "batch": ["router=linear", "capacity.scope=batch", "capacity.protect=none"],
    "attention-scores": [
        *("router=amod", "capacity=threshold", "capacity.threshold=0.07", "capacity.protect=none"),
        *("placement=every", "placement.attention_source=previous", "placement.attention_fill=carry"),
    ],
    "attention-scores-none-kept": [
        *("router=amod", "capacity=threshold", "capacity.threshold=2", "capacity.protect=none"),
        *("placement=every", "placement.attention_source=previous", "placement.attention_fill=mean"),
    ],
}


@pytest.mark.parametrize("visibility", ["kept", "all"])
@pytest.mark.parametrize("arm", RAGGED)
def test_ragged_selections_run_forward_and_backward(arm: str, visibility: str) -> None:
    model = routed([*RAGGED[arm], f"visibility={visibility}", "scaling=straight_through"], double=True)
    x = images(batch=4, dtype=torch.float64)
    with torch.no_grad():
        gathered, trace = model(x, return_trace=True)
        model.set_execution("mask")
        torch.testing.assert_close(model(x), gathered, rtol=0, atol=1e-12)
    assert torch.equal((trace[1].kept >= 0).sum(dim=1), trace[1].counts)
    for execution in ("gather", "mask"):
        model.set_execution(execution)
        model.train().zero_grad()
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name
        assert model.backbone.patch_embed.proj.weight.grad.abs().sum() > 0


def test_arms_above_are_ragged() -> None:
    """The arms do what their names say, so that the test above has met those cases."""
    with torch.no_grad():
        _, trace = routed(RAGGED["some-keep-none"], double=True)(
            images(batch=40, dtype=torch.float64), return_trace=True
        )
        assert (trace[1].counts == 0).any()
        assert (trace[1].counts > 0).any()
        _, trace = routed(RAGGED["none-kept"], double=True)(images(batch=4, dtype=torch.float64), return_trace=True)
        assert trace[1].kept.shape == (4, 0)
        _, trace = routed(RAGGED["ties-keep-all"])(images(batch=4), return_trace=True)
        assert trace[1].counts.tolist() == [17] * 4
