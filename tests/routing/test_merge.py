"""Merging: what is conserved, where tokens went, samples of different lengths, any pruning before it."""

from __future__ import annotations

import pytest
import torch
from tests.routing.tiny import images, routed, spec, vit
from torch import Tensor

from routing_lab.attention import AttentionStatistics
from routing_lab.axes.budget import merge_count, merge_schedule
from routing_lab.routing.merge import Merge, bipartite_matching, merge
from routing_lab.routing.tokens import Selection, Tokens, unmerge


def tokens_of(batch: int = 3, number: int = 11, num_prefix: int = 1, valid: Tensor | None = None) -> Tokens:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, number, 4, dtype=torch.float64, generator=generator)
    size = torch.randint(1, 5, (batch, number), generator=generator).double()
    return Tokens(x, num_prefix, size=size, valid=valid)


def keys_of(tokens: Tokens) -> Tensor:
    return torch.randn(*tokens.x.shape[:2], 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("num_prefix", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 3])
def test_the_weighted_sum_is_conserved(num_prefix: int, count: int) -> None:
    tokens = tokens_of(num_prefix=num_prefix)
    left = merge(tokens, bipartite_matching(keys_of(tokens), count, num_prefix))
    assert left.x.shape[1] == 11 - count
    assert torch.equal(left.sizes().sum(dim=1), tokens.sizes().sum(dim=1))

    def total(part: Tokens) -> Tensor:
        return (part.x * part.sizes().unsqueeze(-1)).sum(dim=1)

    torch.testing.assert_close(total(left), total(tokens))
    assert torch.equal(left.x[:, :num_prefix], tokens.x[:, :num_prefix])
    assert torch.equal(left.origins()[:, :num_prefix], torch.full((3, num_prefix), -1))


def test_source_says_what_stands_for_what() -> None:
    tokens = tokens_of()
    left = merge(tokens, bipartite_matching(keys_of(tokens), 4, 1))
    counts = torch.zeros_like(left.sizes()).scatter_add(1, left.sources(), tokens.sizes())
    assert torch.equal(counts, left.sizes())
    back = unmerge(left.x, left.source)
    assert back.shape == tokens.x.shape
    for sample in range(3):
        for position in range(7):
            members = (left.sources()[sample] == position).nonzero().flatten()
            weight = tokens.sizes()[sample, members]
            mean = (tokens.x[sample, members] * weight.unsqueeze(1)).sum(dim=0) / weight.sum()
            torch.testing.assert_close(back[sample, members[0]], mean)


def test_tokens_without_a_place_get_what_is_missing() -> None:
    tokens = tokens_of(batch=1, number=4)
    left = tokens.keep(Selection(torch.tensor([[0, 2]]), None, 4))
    assert torch.equal(unmerge(left.x, left.source)[:, [0, 2]], tokens.x[:, [0, 2]])
    assert (unmerge(left.x, left.source)[:, [1, 3]] == 0).all()
    restored = unmerge(left.x + 1, left.source, missing=tokens.x)
    assert torch.equal(restored[:, [1, 3]], tokens.x[:, [1, 3]])
    assert torch.equal(restored[:, [0, 2]], tokens.x[:, [0, 2]] + 1)
    assert unmerge(tokens.x, None) is tokens.x


def test_samples_of_different_lengths_are_merged_as_if_alone() -> None:
    lengths = [11, 7, 2, 4]
    valid = torch.arange(11) < torch.tensor(lengths).unsqueeze(1)
    tokens = tokens_of(batch=4, valid=valid)
    keys = keys_of(tokens)
    left = merge(tokens, bipartite_matching(keys, merge_count(3, 11, 1), 1, valid))
    for sample, length in enumerate(lengths):
        alone = Tokens(tokens.x[sample : sample + 1, :length], 1, size=tokens.sizes()[sample : sample + 1, :length])
        count = merge_count(3, length, 1)
        expected = merge(alone, bipartite_matching(keys[sample : sample + 1, :length], count, 1)) if count else alone
        number = expected.x.shape[1]
        assert left.counts()[sample] == number
        torch.testing.assert_close(left.x[sample, :number], expected.x[0])
        assert torch.equal(left.sizes()[sample, :number], expected.sizes()[0])
        assert torch.equal(left.origins()[sample, :number], expected.origins()[0])
        assert torch.equal(left.sources()[sample, :length], expected.sources()[0])
    assert left.x.isfinite().all()
    assert (left.sizes() > 0).all()


@pytest.mark.parametrize("capacity", ["percentile", "threshold"])
def test_any_capacity_may_prune_before(capacity: str) -> None:
    model = routed(
        [
            *("method=prune_then_merge", "router=attention_variance", "placement.layers=[1,2]", f"capacity={capacity}"),
            *("bypass.merged=2", *(["capacity.threshold=0.002"] if capacity == "threshold" else [])),
        ],
        double=True,
    )
    pictures = images(dtype=torch.float64)
    together, trace = model(pictures, return_trace=True)
    for sample in range(3):
        alone, part = model(pictures[sample : sample + 1], return_trace=True)
        torch.testing.assert_close(together[sample : sample + 1], alone)
        assert [int(t.treated[sample]) for t in trace.layers] == [int(t.treated[0]) for t in part.layers]


def test_matching_carries_no_gradient_and_the_mean_does() -> None:
    tokens = tokens_of()
    keys = keys_of(tokens).requires_grad_()
    tokens.x.requires_grad_()
    member = Merge(spec(), merged=3)
    left = member.reduce(
        tokens, Selection.first(3, 11, 11, tokens.x.device), tokens.sizes(), AttentionStatistics(key_mean=keys)
    )
    left.x.sum().backward()
    assert keys.grad is None
    assert (tokens.x.grad != 0).all()
    assert left.proportional


def test_merged_tokens_are_gated_by_the_mean_of_what_they_stand_for() -> None:
    given = ["method=tome", "router=random", "placement=list", "placement.layers=[1]", "bypass.merged=4"]
    plain, gated = (routed([*given, f"scaling={rule}"], vit(), double=True) for rule in ("none", "multiply"))
    pictures = images(dtype=torch.float64)
    x, context = gated.embed(pictures)
    state = gated.run_state(x)
    _, trace = gated.forward_tokens(x, context, state)
    source, scores, size = trace[1].source, trace[1].scores, trace[1].size
    mean = torch.zeros_like(size).scatter_add(1, source, scores.double()) / size
    seen = {}
    for name, model in (("plain", plain), ("gated", gated)):
        hook = model.layers["1"].register_forward_hook(lambda m, a, o, name=name: seen.update({name: (a[0].x, o[0].x)}))
        model(pictures)
        hook.remove()
    block = plain.backbone.blocks[1]
    entered, left = seen["plain"]
    h = entered + block.attn(block.norm1(entered))
    merged_h = torch.zeros_like(left).scatter_add(1, source.unsqueeze(-1).expand_as(h), h) / size.unsqueeze(-1)
    expected = merged_h + mean.unsqueeze(-1) * (left - merged_h)
    torch.testing.assert_close(seen["gated"][1], expected)


def test_random_attention_scores_tokens_and_leaves_the_matching_alone() -> None:
    rule = ["method=tome", "router=cls_attention", "bypass.merged=3"]
    trained, random = (routed([*rule, f"router.attention={kind}"]) for kind in ("trained", "random"))
    (logits, trace), (other, other_trace) = (model(images(), return_trace=True) for model in (trained, random))
    assert not torch.equal(trace[0].scores, other_trace[0].scores)
    assert torch.equal(trace[3].source, other_trace[3].source)  # nothing is pruned
    assert torch.equal(logits, other)


def test_half_precision_and_autocast() -> None:
    model = routed(["method=tome", "bypass.merged=3"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, trace = model(images(), return_trace=True)
    assert logits.isfinite().all()
    assert [part.tokens for part in trace.layers] == [14, 11, 8, 5]
    assert model.to(torch.bfloat16)(images(dtype=torch.bfloat16)).isfinite().all()


def test_exports_and_compiles_to_one_graph() -> None:
    model = routed(["method=prune_then_merge", "bypass.merged=3", "placement.layers=[0]"], vit(depth=2))
    pictures = images()
    expected = model(pictures)
    torch.testing.assert_close(torch.export.export(model, (pictures,)).module()(pictures), expected)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(pictures), expected)
    torch.compiler.reset()


def test_schedules() -> None:
    assert merge_schedule(8, 0.0, 197, 3) == [8, 8, 8]
    assert merge_schedule(4, -1.0, 65, 12) == [8, 7, 6, 5, 5, 4, 3, 2, 2, 1, 0, 0]
    assert merge_schedule(4, 1.0, 65, 12) == [0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8]
    assert merge_schedule(0.066, 0.0, 197, 2) == [13, 13]
    assert merge_schedule([3, 0], 1.0, 17, 2) == [3, 0]
    assert merge_schedule(5, 1.0, 17, 1) == [0]
    with pytest.raises(ValueError, match=r"bypass.merged = \[1, 2\]: 2 entries for 3 routed layers"):
        merge_schedule([1, 2], 0.0, 17, 3)
    assert [merge_count(5, tokens, 2) for tokens in (1, 2, 3, 4, 12, 13)] == [0, 0, 0, 1, 5, 5]


def test_a_threshold_merges_what_is_similar_enough() -> None:
    generator = torch.Generator().manual_seed(4)
    metric = torch.randn(3, 17, 6, generator=generator)
    even, odd = (torch.nn.functional.normalize(part, dim=-1) for part in (metric[:, 2::2], metric[:, 1::2]))
    best = (even @ odd.transpose(1, 2)).amax(dim=2)
    threshold = 0.6
    expected = (best >= threshold).sum(dim=1)
    assert len(set(expected.tolist())) > 1
    tokens = Tokens(torch.randn(3, 17, 8, generator=generator), num_prefix=1)
    matching = bipartite_matching(metric, 8, 1, threshold=threshold)
    merged = merge(tokens, matching)
    assert torch.equal(merged.counts(), 17 - expected)
    assert torch.equal((merged.sizes() * merged.valid).sum(dim=1), torch.full((3,), 17.0))
    for sample in range(3):
        alone = merge(
            Tokens(tokens.x[sample : sample + 1], num_prefix=1),
            bipartite_matching(metric[sample : sample + 1], 8, 1, threshold=threshold),
        )
        torch.testing.assert_close(merged.x[sample, : 17 - expected[sample]], alone.x[0, : 17 - expected[sample]])


def test_a_threshold_is_an_option_of_the_bypass() -> None:
    arm = ["method=tome", "bypass.merged=0.5"]
    with torch.no_grad():
        everything = routed([*arm, "bypass.threshold=-1"])(images())
        torch.testing.assert_close(everything, routed(arm)(images()), rtol=0, atol=1e-5)
        nothing = routed([*arm, "bypass.threshold=1.0"])(images())
        torch.testing.assert_close(nothing, routed(["router=dense"])(images()), rtol=0, atol=1e-5)
        _, trace = routed([*arm, "bypass.threshold=0.5"])(images(), return_trace=True)
    assert trace[0].remaining is not None
    assert 9 < trace[0].remaining.float().mean() < 17
