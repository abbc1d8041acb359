"""The routed layer: what is skipped is skipped, who sees whom, and what the trace says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.routing.tiny import DEPTH, images, llama, routed, token_ids, vit
from torch import Tensor

from routing_lab.axes.bypasses import BYPASSES
from routing_lab.axes.facts import SUBLAYERS

X = images(dtype=torch.float64)
SAMPLES = {
    "amod": ["router=amod"],
    "mod": ["router=linear", "scaling=multiply"],
    "ragged": ["router=linear", "capacity=threshold", "capacity.threshold=0"],
    "all-keys": ["router=random", "visibility=all"],
    "ragged-all-keys": ["router=linear", "capacity=threshold", "capacity.threshold=0.5", "visibility=all"],
    "lowest-batch": ["router=subspace", "capacity.order=lowest", "capacity.scope=batch"],
    "every": ["router=random", "placement=every"],
    "corrupt": ["router=linear", "router.corrupt=shuffle", "scaling=straight_through"],
}


@pytest.mark.parametrize("sublayer", SUBLAYERS)
@pytest.mark.parametrize("arm", SAMPLES)
def test_gathering_equals_masking(arm: str, sublayer: str) -> None:
    for bypass in ("skip", "project"):
        if sublayer not in BYPASSES[bypass].facts.sublayers:
            continue
        overrides = [*SAMPLES[arm], f"placement.sublayer={sublayer}", f"bypass={bypass}"]
        for double, bound in ((True, 1e-12), (False, 1e-5)):
            model = routed(overrides, double=double)
            x = X if double else X.float()
            with torch.no_grad():
                gathered, trace = model(x, return_trace=True)
                model.set_execution("mask")
                masked, mask_trace = model(x, return_trace=True)
            torch.testing.assert_close(masked, gathered, rtol=0, atol=bound)
            if double:
                assert all(torch.equal(trace[layer].kept, mask_trace[layer].kept) for layer in range(DEPTH))


@pytest.mark.parametrize("visibility", ["kept", "all"])
@pytest.mark.parametrize("sublayer", ["block", "attention"])
def test_gathering_equals_masking_in_a_decoder(sublayer: str, visibility: str) -> None:
    for bypass in ("skip", "project"):
        if sublayer not in BYPASSES[bypass].facts.sublayers:
            continue
        for router in (["router=random"], ["router=linear", "capacity=threshold", "capacity.threshold=0"]):
            model = routed(
                [*router, f"placement.sublayer={sublayer}", f"bypass={bypass}", f"visibility={visibility}"],
                llama(),
                double=True,
            )
            with torch.no_grad():
                gathered = model(token_ids())
                model.set_execution("mask")
                torch.testing.assert_close(model(token_ids()), gathered, rtol=0, atol=1e-12)


def streams(overrides: list[str], x: Tensor = X, module: Any = None) -> list[tuple[Tensor, Tensor, Any]]:
    """(before, after, trace) of every routed layer."""
    model = routed(overrides, module, double=True)
    seen: list[tuple[Tensor, Tensor]] = []
    for layer in model.layers.values():
        layer.register_forward_hook(lambda module, args, output: seen.append((args[0].x, output[0].x)))
    with torch.no_grad():
        _, trace = model(x, return_trace=True)
    return [(*pair, trace[layer]) for pair, layer in zip(seen, model.routed_layers, strict=True)]


def kept_mask(part: Any) -> Tensor:
    mask = torch.zeros(len(part.kept), part.origin.shape[1] + 1, dtype=torch.bool)
    return mask.scatter(1, part.kept.where(part.kept >= 0, mask.shape[1] - 1), True)[:, :-1]


@pytest.mark.parametrize("arm", SAMPLES)
def test_skipped_tokens_leave_bit_identical(arm: str) -> None:
    for module in (None, llama()):
        if module is not None and arm == "amod":
            continue
        x = X if module is None else token_ids()
        for before, after, part in streams(SAMPLES[arm], x, module):
            kept = kept_mask(part)
            assert torch.equal(after[~kept], before[~kept])
            assert (after[kept] != before[kept]).any(dim=-1).all()


def test_skipped_tokens_may_come_back() -> None:
    first, second = streams(["router=random", "placement=list", "placement.layers=[1,2]"])
    assert (~kept_mask(first[2]) & kept_mask(second[2])).any()


@pytest.mark.parametrize(("visibility", "seen"), [("kept", False), ("all", True)])
@pytest.mark.parametrize("capacity", ["topk", "percentile"])
def test_who_sees_bypassed_tokens(visibility: str, capacity: str, seen: bool) -> None:
    """Kept tokens depend on bypassed ones only with visibility=all: their weight on them is exactly zero otherwise."""
    model = routed(["router=random", f"visibility={visibility}", f"capacity={capacity}"], double=True)
    with torch.no_grad():
        tokens, context = model.embed(X)
        state = model.run_state(tokens)
        block = model.adapter.block(1)
        layer = model.layers["1"]
        maps = _no_maps()
        left, part, _ = layer(tokens, block, context, maps, state)
        kept = kept_mask(part)
        moved = tokens.with_x(torch.where(kept.unsqueeze(-1), tokens.x, tokens.x + 1000.0))
        moved_left, moved_part, _ = layer(moved, block, context, maps, state)
    assert torch.equal(part.kept, moved_part.kept)
    assert torch.equal(left.x[kept], moved_left.x[kept]) == (not seen)


def _no_maps() -> Any:
    from routing_lab.routing.maps import Maps

    return Maps()


@pytest.mark.parametrize("arm", SAMPLES)
def test_trace(arm: str) -> None:
    registers = vit(reg_tokens=2)
    model = routed(SAMPLES[arm], registers, double=True)
    with torch.no_grad():
        logits, trace = model(X, return_trace=True)
        assert torch.equal(logits, model(X))
    assert len(trace) == DEPTH
    patches = [[-1, -1, -1, *range(16)]] * 3
    for layer in range(DEPTH):
        part = trace[layer]
        assert part.origin.tolist() == patches
        assert part.origin.dtype == part.kept.dtype == part.counts.dtype == torch.int64
        assert part.tokens == 19
        if layer not in model.routed_layers:
            assert part.scores is None
            assert part.kept.tolist() == [list(range(19))] * 3
            continue
        assert part.scores.shape == (3, 19)
        assert torch.equal((part.kept >= 0).sum(dim=1), part.counts)
        assert part.kept.shape == (3, part.counts.max())
        for row, count in zip(part.kept.tolist(), part.counts.tolist(), strict=True):
            assert row[:count] == sorted(set(row[:count]))
            assert set(row[count:]) <= {-1}
            assert row[:3] == [0, 1, 2]  # the prefix is protected
        assert part.gate is None or part.gate.shape == part.kept.shape
    if arm.startswith("ragged"):
        assert any((trace[layer].kept == -1).any() for layer in model.routed_layers)


def test_scores_are_single_precision_in_single_precision_models() -> None:
    for overrides in (["router=amod"], ["router=linear"], ["router=random"]):
        _, trace = routed(overrides)(images(), return_trace=True)
        assert trace[1].scores.dtype == torch.float32


def test_dense_router_routes_nothing() -> None:
    model = routed(["router=dense"])
    assert model.routed_layers == []
    assert model.num_router_parameters == 0
    _, trace = model(images(), return_trace=True)
    assert all(trace[layer].scores is None and trace[layer].tokens == 17 for layer in range(DEPTH))


def test_mlp_sublayer_selects_after_attention() -> None:
    model = routed(["router=linear", "placement.sublayer=mlp", "placement=list", "placement.layers=[1]"], double=True)
    block = model.backbone.blocks[1]
    with torch.no_grad():
        (before, after, part) = streams(
            ["router=linear", "placement.sublayer=mlp", "placement=list", "placement.layers=[1]"]
        )[0]
        h = before + block.attn(block.norm1(before))
        scores = h @ model.layers["1"].router.weight[0]
        kept = kept_mask(part)
        expected = torch.where(kept.unsqueeze(-1), h + block.mlp(block.norm2(h)), h)
    torch.testing.assert_close(part.scores, scores, rtol=0, atol=1e-12)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)
    assert torch.equal(after[~kept], h[~kept])


def test_mlp_own_map_scores() -> None:
    """With placement.attention_source=same the layer's own attention, complete in this case, scores its tokens."""
    from tests.routing.test_routers import source_map

    overrides = ["router=amod", "placement=list", "placement.layers=[2]", "placement.sublayer=mlp"]
    part = streams([*overrides, "placement.attention_source=same"])[0][2]
    torch.testing.assert_close(part.scores, source_map(X, layer=2).mean(dim=(1, 2)), rtol=0, atol=1e-12)


def test_unknown_execution_is_refused() -> None:
    with pytest.raises(ValueError, match="execution = fast: expected gather or mask"):
        routed(["router=random"]).set_execution("fast")
