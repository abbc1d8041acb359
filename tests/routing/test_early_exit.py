"""Halting and early exit, sampling along the scores' distribution, nested selections, and what is measured of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.routing.tiny import DEPTH, PATCHES, images, routed, run_state, spec

from routing_lab.config import ConfigError, load
from routing_lab.routing.base import Capacity
from routing_lab.routing.capacity import Argmax, Gumbel, InverseTransform, Percentile, Threshold, TopK
from routing_lab.routing.losses import halting_means, halting_prior_loss, ponder_loss
from routing_lab.routing.maps import Maps
from routing_lab.routing.measures import ran
from routing_lab.routing.trace import LayerTrace, Trace
from routing_lab.tasks.meters import RoutingMeter

TOKENS = PATCHES + 1
HALTING = ["method=avit", "router.gamma=1", "router.beta=0.5", "bypass.average=all"]

# --- halting ---


@pytest.mark.parametrize(("placement", "gamma"), [("every", 1.0), ("alternate", 8.0)])
def test_output_is_the_mean_of_states_weighted_by_the_mass_spent_before_them(placement: str, gamma: float) -> None:
    """Against one loop over tokens; dense layers between routed ones go on with what is left."""
    given = [*HALTING, f"router.gamma={gamma}", f"placement={placement}", "placement.first=0"]
    model = routed(given, double=True)
    tokens, context = model.embed(images(dtype=torch.float64))
    x = tokens.x
    batch = x.shape[0]
    outputs = torch.zeros_like(x)
    for row in range(batch):
        alive, mass, left = list(range(TOKENS)), torch.ones(TOKENS).double(), torch.ones(TOKENS).double()
        state = x[row].clone()
        for layer in range(DEPTH):
            if layer in model.routed_layers:
                going = [token for token in alive if mass[token] >= 0.01]
                for token in alive:
                    spent = left[token] - mass[token] if token in going else left[token].clone()
                    outputs[row, token] += spent * state[token]
                    left[token] = left[token] - spent
                alive = going
            if not alive:
                break
            state[alive] = model.backbone.blocks[layer](state[alive].unsqueeze(0)).squeeze(0)
            if layer in model.routed_layers:
                mass[alive] = mass[alive] - torch.sigmoid(gamma * state[alive, 0] - 0.5)
        for token in alive:
            outputs[row, token] += left[token] * state[token]
    last, trace = model.forward_tokens(tokens, context, model.run_state(tokens))
    torch.testing.assert_close(last.restored().x, outputs, rtol=0, atol=1e-10)
    assert ran(trace).sum(dim=0).unique().numel() > 1, "tokens differ in depth"


def test_weights_of_a_token_sum_to_one() -> None:
    """States that are all the same leave that state, whenever tokens halt."""
    model = routed(HALTING, double=True)
    tokens, context = model.embed(images(dtype=torch.float64))
    with torch.no_grad():
        for block in model.backbone.blocks:
            for part in (block.attn.proj, block.mlp.fc2):
                part.weight.zero_()
                part.bias.zero_()
    last, _ = model.forward_tokens(tokens, context, model.run_state(tokens))
    torch.testing.assert_close(last.restored().x, tokens.x, rtol=0, atol=1e-12)


def test_patches_keep_their_last_state_when_the_class_token_alone_is_averaged() -> None:
    averaged, class_only = (routed([*HALTING[:3], f"bypass.average={how}"]) for how in ("all", "prefix"))
    found = []
    for model in (averaged, class_only):
        tokens, context = model.embed(images())
        last, trace = model.forward_tokens(tokens, context, model.run_state(tokens))
        found.append(last.restored().x)
    assert torch.equal(found[0][:, 0], found[1][:, 0])
    assert not torch.allclose(found[0][:, 1:], found[1][:, 1:])
    first_layer = averaged.backbone.blocks[0](averaged.embed(images())[0].x)
    halted_after_one = ran(trace).sum(dim=0) == 1
    torch.testing.assert_close(found[1][:, 1:][halted_after_one[:, 1:]], first_layer[:, 1:][halted_after_one[:, 1:]])


@pytest.mark.parametrize("bypass", ["ponder", "ponder_masked"])
def test_everything_may_halt(bypass: str) -> None:
    model = routed([*HALTING, "router.beta=-50", f"bypass={bypass}"]).train()
    logits, trace = model(images(), return_trace=True)
    (logits.sum() + ponder_loss(trace) + halting_prior_loss(trace)).backward()
    centred = halting_prior_loss(trace, center=None)
    assert centred == halting_prior_loss(trace, center=2 / 3 * DEPTH) != halting_prior_loss(trace)
    assert ran(trace).sum(dim=0).eq(1).all()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    assert trace[1].tokens == (0 if bypass == "ponder" else TOKENS)


@pytest.mark.parametrize("router", ["random", "amod", "linear"])
def test_any_score_may_decide_who_exits(router: str) -> None:
    """Without a halting mass a token's output is its last state, and its depth costs one more."""
    for bypass in ("ponder", "ponder_masked"):
        given = [f"router={router}", "placement=every", "placement.attention_source=same", f"bypass={bypass}"]
        _, trace = routed(given)(images(), return_trace=True)
        present = ran(trace)
        assert (present[1:] <= present[:-1]).all(), "halted tokens never return"
        assert present[-1].sum() < present[0].sum()
        torch.testing.assert_close(ponder_loss(trace), ran(trace).sum(dim=0).float().mean() + 1)
        assert len(halting_means(trace)) == 0
        assert halting_prior_loss(trace) == 0


def test_hidden_tokens_reach_nobody() -> None:
    """Whatever hidden tokens hold, visible ones and the output do not change."""
    model = routed([*HALTING, "bypass=ponder_masked"], double=True)
    tokens, context = model.embed(images(dtype=torch.float64))
    entering, _ = model.forward_tokens(tokens, context, model.run_state(tokens))
    layer, block = model.layers["1"], model.adapter.block(1)
    hidden = torch.arange(TOKENS) % 3 == 1
    mass = torch.where(hidden, 0.0, 1.0).double().expand(3, TOKENS)
    results = []
    for noise in (0.0, 5.0):
        x = entering.x + noise * hidden.unsqueeze(-1) * torch.randn_like(entering.x)
        given = type(tokens)(x, num_prefix=1, mass=mass)
        results.append(layer(given, block, context, Maps(), model.run_state(tokens))[0].x)
    assert torch.equal(results[0][:, ~hidden], results[1][:, ~hidden])


def test_removal_must_leave_what_the_head_reads() -> None:
    for method in ("evit", "received_pruning", "ats"):
        with pytest.raises(ConfigError, match=r"capacity.protect = none: .*the head reads the class token"):
            load([f"method={method}", "capacity.protect=none", "backbone=deit_tiny"])
    with pytest.raises(ConfigError, match=r"capacity.protect = none: .*router=cls_attention reads the class token"):
        load(["method=avit", "router=cls_attention", "backbone=deit_tiny"])


# --- sampling ---


def sampled(scores: np.ndarray, points: int, how: str, sort: bool) -> list[int]:
    """ATS by its description, one image, one point at a time: indices of the kept patches."""
    order = sorted(range(len(scores)), key=lambda patch: scores[patch]) if sort else list(range(len(scores)))
    summed = np.cumsum([float(scores[patch]) for patch in order])
    summed = (summed - summed[0]) / (summed[-1] - summed[0])
    start = min(value for value in summed if value > 0)
    hit = set()
    for number in range(points):
        at = (2 * number + 1) / (2 * points) if how == "middles" else start + (1 - start) * number / max(points - 1, 1)
        hit.add(order[min(range(len(summed)), key=lambda place: abs(summed[place] - at))])
    return sorted(hit)


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("how", ["ends", "middles"])
@pytest.mark.parametrize("fraction", [0.3, 0.7, 1.0])
def test_inverse_transform_hits_what_a_loop_hits(fraction: float, how: str, sort: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(6, TOKENS, generator=generator).double() ** 4
    capacity = InverseTransform(spec(), fraction=fraction, points=how, sort=sort, at_least=2)
    selection = capacity(scores, run_state(6))
    points = max(2, round(fraction * PATCHES))
    for row, kept in enumerate(selection.padded_index().tolist()):
        expected = sampled(scores[row, 1:].numpy(), points, how, sort)
        assert [token - 1 for token in kept if token > 0] == expected
        assert kept[0] == 0, "the protected token is kept besides"
    if fraction == 1.0:
        assert selection.counts().unique().numel() > 1, "the number kept depends on the scores"


def test_sampling_ignores_padding() -> None:
    scores = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(5))
    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    valid[1, 12:] = False
    scores[1, 12:] = 50.0
    capacity = InverseTransform(spec(), fraction=0.6, at_least=1)
    both = capacity(scores, run_state(2), valid)
    alone = capacity(scores[1:, :12], run_state(1))
    assert torch.equal(both.mask()[1, :12], alone.mask()[0])
    assert not both.mask()[1, 12:].any()


@pytest.mark.parametrize(
    "capacity",
    [
        Threshold(spec(), threshold=0.4),
        Argmax(spec(), boundary=0.5),
        TopK(spec(), fraction=0.4),
        TopK(spec(prefix=("class", "registers")), fraction=0.3, rounding="ceil", count="initial", count_prefix=False),
        Percentile(spec(), fraction=0.4, interpolation="linear"),
        Percentile(spec(prefix=("class", "registers")), fraction=0.4, compare="gt", interpolation="higher"),
        Percentile(spec(prefix=("class", "registers")), fraction=0.4, protect_count="beside"),
        Gumbel(spec(), fraction=0.6, scale="probability"),
    ],
    ids=lambda capacity: type(capacity).__name__,
)
def test_rules_treat_ragged_samples_at_once(capacity: Capacity) -> None:
    """As each by itself: with ties, with scores that no padding may win against, and with samples that have nothing."""
    scores = torch.rand(6, TOKENS, generator=torch.Generator().manual_seed(6)).mul(20).round() / 20
    scores[1, 3:6] = -torch.inf
    valid = torch.arange(TOKENS) < torch.tensor([[TOKENS], [9], [4], [1], [2], [0]])
    valid[0, 5] = False
    scores[~valid] = 5.0
    state = run_state(6, training=False, initial_tokens=TOKENS)
    found = capacity(scores, state, valid)
    by_sample = Capacity.select_ragged(capacity, scores, valid, state)
    assert torch.equal(found.mask(), by_sample.mask())


def test_sampling_needs_scores_to_sample_by() -> None:
    with pytest.raises(ConfigError, match=r"capacity = inverse_transform: goes in proportion .* router=linear"):
        load(["router=linear", "capacity=inverse_transform"])
    with pytest.raises(ConfigError, match=r"capacity.order = lowest"):
        load(["capacity=inverse_transform", "capacity.order=lowest"])


def test_value_attention_and_the_layers_own_map() -> None:
    """ATS in one layer from its definition: class attention times value norm, kept queries over all keys."""
    model = routed(["method=ats", "placement.first=2", "capacity.fraction=0.5"], double=True)
    backbone = model.backbone
    tokens, context = model.embed(images(dtype=torch.float64))
    _, trace = model.forward_tokens(tokens, context, model.run_state(tokens))
    x = backbone.blocks[1](backbone.blocks[0](tokens.x))
    block = backbone.blocks[2]
    qkv = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    attention = (qkv[0] @ qkv[1].transpose(-2, -1) * block.attn.scale).softmax(dim=-1)
    weight = attention[:, :, 0].mean(dim=1) * qkv[2].transpose(1, 2).flatten(2).norm(dim=-1)
    expected = weight / weight[:, 1:].sum(dim=1, keepdim=True)
    torch.testing.assert_close(trace[2].scores, expected, rtol=0, atol=1e-12)

    update = block.attn.proj((attention @ qkv[2]).transpose(1, 2).flatten(2))
    after = x + update
    after = after + block.mlp(block.norm2(after))
    layer = model.layers["2"]
    maps = Maps(own=True, request=layer.router.request())
    left, part, _ = layer(tokens.with_x(x), model.adapter.block(2), context, maps, model.run_state(tokens))
    for row, kept in enumerate(part.kept):
        kept = kept[kept >= 0]
        torch.testing.assert_close(left.x[row, : len(kept)], after[row, kept], rtol=0, atol=1e-10)


# --- nested selections ---


@pytest.mark.parametrize("capacity", ["topk", "percentile", "threshold"])
def test_hierarchical_selections_are_nested_and_per_layer_ones_are_not(capacity: str) -> None:
    given = ["router=random", "placement=every", f"capacity={capacity}"]
    if capacity == "threshold":
        given.append("capacity.threshold=0.5")
    kept = {}
    for persist in ("per_layer", "hierarchical"):
        _, trace = routed([*given, f"capacity.persist={persist}"])(images(), return_trace=True)
        kept[persist] = ran(trace)[1:]
    nested = kept["hierarchical"]
    assert (nested[1:] <= nested[:-1]).all()
    assert torch.equal(nested[0], kept["per_layer"][0])
    assert (kept["per_layer"][1:] > kept["per_layer"][:-1]).any(), "some token returns"


def test_hierarchical_budgets_count_eligible_or_initial_tokens() -> None:
    given = ["router=random", "placement=every", "capacity.persist=hierarchical", "capacity.fraction=0.5"]
    counts = {}
    for count in ("current", "initial"):
        _, trace = routed([*given, f"capacity.count={count}"])(images(), return_trace=True)
        counts[count] = [int(layer.counts[0]) for layer in trace.layers[1:]]
    assert counts == {"current": [8, 4, 2], "initial": [8, 8, 8]}


def test_hierarchical_leaves_bypassed_tokens_bit_identical() -> None:
    model = routed(["method=hierarchical", "placement=every"])
    tokens, context = model.embed(images())
    x = model.backbone.blocks[0](tokens.x)
    left, trace = model.forward_tokens(tokens, context, model.run_state(tokens))
    never = ~ran(trace)[1:].any(dim=0)
    assert never.any()
    assert torch.equal(left.x[never], x[never])


# --- measures ---


def trace_of(*kept: list[list[int]]) -> Trace:
    """One dense layer, then routed ones that keep these of a class token and four patches."""
    origin = torch.tensor([[-1, 0, 1, 2, 3]]).expand(len(kept[0]), 5)
    everything = torch.arange(5).expand(len(kept[0]), 5)
    layers = [LayerTrace(None, everything, torch.full((len(kept[0]),), 5), 5, origin)]
    for rows in kept:
        width = max(len(row) for row in rows)
        index = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
        layers.append(LayerTrace(torch.zeros(len(rows), 5), index, (index >= 0).sum(dim=1), 5, origin))
    return Trace(layers)


def sharing(*traces: Trace) -> dict[str, float]:
    meter = RoutingMeter([index for index, layer in enumerate(traces[0].layers) if layer.scores is not None])
    for trace in traces:
        meter.update(trace)
    return meter.sharing()


def test_sharing_on_traces_counted_by_hand() -> None:
    trace = trace_of([[0, 1, 2], [0, 1]], [[0, 1], [0, 3]])
    found = sharing(trace)
    assert found["dead_token_ratio"] == pytest.approx(4 / 8)  # two of four patches in either image
    assert found["maximum_violation"] == pytest.approx(3 / 2.5 - 1)  # three patches, then two
    several = sharing(trace, trace_of([[4]], [[1, 2]]))
    assert several["dead_token_ratio"] == pytest.approx(5 / 12)
    assert several["maximum_violation"] == pytest.approx(0)  # four patches each
    assert sharing(Trace(trace.layers[:1])) == {}


def test_sharing_follows_removed_tokens() -> None:
    _, trace = routed(["method=evit_no_fusion", "placement.layers=[1,2]", "capacity.fraction=0.5"])(
        images(), return_trace=True
    )
    found = sharing(trace)
    assert found["dead_token_ratio"] == pytest.approx(1 - 8 / PATCHES)
    assert found["maximum_violation"] == pytest.approx(8 / 6 - 1)
