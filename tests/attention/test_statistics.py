"""Statistics of a block's map: what counts in them, and what asking for them does to the block's output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attention.watch import largest_tensor
from tests.routing.tiny import images, route, vit
from torch import Tensor

from routing_lab.attention import (
    Kernel,
    MapRows,
    StatisticsRequest,
    attention_statistics,
    attention_with_statistics,
)
from routing_lab.backbones import adapt


def test_a_long_sequence_never_holds_a_map() -> None:
    """Statistics of a layer with 1025 tokens: nothing as large as the map of one head is made."""
    backbone = adapt(vit(img_size=64, num_heads=2))
    tokens, context = backbone.embed(images(batch=1, size=64))
    with torch.no_grad(), largest_tensor() as seen:
        backbone.block(0).attend_with_statistics(tokens.side(), context, StatisticsRequest(received=True))
    assert seen["numel"] < 1025 * 1025
    with torch.no_grad(), largest_tensor() as seen:
        backbone.block(0).attend_with_statistics(tokens.side(), context, StatisticsRequest(class_row=True))
    assert seen["numel"] <= 1025 * 3 * 32


def own_map(backbone: Any, x: Tensor, layer: int = 0) -> Tensor:
    """The attention map [B, H, N, N] of a block, from its own weights."""
    module = backbone.block(layer).module
    attn, normed = module.attn, module.norm1(x)
    query, key, _ = attn.qkv(normed).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return (attn.scale * attn.q_norm(query) @ attn.k_norm(key).transpose(-2, -1)).softmax(dim=-1)


def statistics_of(request: StatisticsRequest, options: dict[str, Any] | None = None) -> tuple[Tensor, Any]:
    backbone = adapt(vit(qk_norm=True, reg_tokens=2, **(options or {})).double())
    tokens, context = backbone.embed(images(dtype=torch.float64))
    _, statistics = backbone.block(0).attend_with_statistics(tokens.side(), context, request)
    return own_map(backbone, tokens.x), statistics


@pytest.mark.parametrize("backend", ["eager", "chunked", "fused"])
def test_parts_of_the_map_that_count(backend: str) -> None:
    """Left-out queries, left-out keys (others renormalised) and the token itself, against the whole map."""
    with torch.no_grad():
        attention, plain = statistics_of(StatisticsRequest(received=True, class_row=True, backend=backend))
        close(plain.received, attention.mean(dim=2))
        close(plain.class_row, attention[:, :, 0])

        _, found = statistics_of(StatisticsRequest(received=True, skip_queries=(0, 2), backend=backend))
        rows = [1, *range(3, attention.shape[2])]
        close(found.received, attention[:, :, rows].mean(dim=2))

        _, found = statistics_of(StatisticsRequest(received=True, class_row=True, skip_keys=(0, 1), backend=backend))
        rest = attention.clone()
        rest[..., :2] = 0
        rest = rest / rest.sum(dim=-1, keepdim=True)
        close(found.received, rest.mean(dim=2))
        close(found.class_row, rest[:, :, 0])

        _, found = statistics_of(StatisticsRequest(received=True, skip_self=True, backend=backend))
        others = attention * (1 - torch.eye(attention.shape[2], dtype=attention.dtype))
        close(found.received, others.mean(dim=2))
        assert (found.received.sum(dim=-1) < 1).all()


def test_row_means_say_nothing() -> None:
    """The mean over keys instead of queries is 1/N for every token: the axis of the mean matters."""
    with torch.no_grad():
        attention, found = statistics_of(StatisticsRequest(received=True))
        tokens = attention.shape[2]
        close(attention.mean(dim=3), torch.full_like(attention[..., 0], 1 / tokens))
        assert found.received.std(dim=-1).min() > 1e-3
        close(found.received.sum(dim=-1), torch.ones(3, 4, dtype=torch.float64))


def test_exact_output_does_not_depend_on_statistics() -> None:
    """To the last bit when the request says so, and to rounding when one pass computes both."""
    backbone = adapt(vit(qk_norm=True, init_values=0.5))
    tokens, context = backbone.embed(images())
    x, block = tokens.side(), backbone.block(1)
    received = StatisticsRequest(received=True)
    with torch.no_grad():
        expected = block.attend(x, context)
        for request in (replace(received, exact=True), StatisticsRequest(class_row=True, key_mean=True)):
            assert torch.equal(block.attend_with_statistics(x, context, request)[0], expected)
        for backend in ("eager", "chunked", "fused"):
            output, found = block.attend_with_statistics(x, context, replace(received, backend=backend))
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
            exact = block.statistics(x, context, replace(received, backend="eager"))
            torch.testing.assert_close(found.received, exact.received, rtol=0, atol=1e-6)
        projection = torch.randn(block.query_key_shape)
        output, random = block.attend_with_statistics(x, context, received, projection=projection)
        _, trained = block.attend_with_statistics(x, context, received)
    assert torch.equal(output, expected)
    assert not torch.allclose(random.received, trained.received, atol=1e-3)
    torch.testing.assert_close(random.received.sum(dim=-1), torch.ones(3, 4))


def test_one_pass_and_two_passes_agree() -> None:
    """Output and every statistic, with padding, biases, positions, a left-out query, grouped heads and causal order."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 9, 8, generator=generator)
    key, value = torch.randn(2, 3, 2, 9, 8, generator=generator)
    valid = torch.arange(9) < torch.tensor([[9], [5], [7]])
    padded = MapRows(query_valid=valid, key_valid=valid, key_bias=torch.rand(3, 9, generator=generator))
    placed = MapRows(logit_bias=torch.rand(1, 4, 9, 9, generator=generator))
    position = torch.arange(9).mul(2).add(1).expand(3, 9)
    everything = StatisticsRequest(received=True, class_row=True, key_mean=True, value_norm=True, skip_queries=(1,))
    causal = replace(everything, class_row=False)
    cases = [
        *((rows, replace(everything, skip_self=own)) for rows in (padded, placed, MapRows()) for own in (False, True)),
        *((replace(rows, causal=True), causal) for rows in (padded, placed, MapRows())),
        (replace(padded, causal=True, query_position=position, key_position=position), causal),
        (replace(padded, causal=True, query_segment=position // 8, key_segment=position // 8), causal),
    ]
    for rows, asked in cases:
        output, found = attention_with_statistics(query, key, value, Kernel(0.4), asked, rows)
        wide = (query, *(x.repeat_interleave(2, dim=1) for x in (key, value)))
        slow = replace(asked, exact=True, backend="eager")
        two, other = attention_with_statistics(*wide, Kernel(0.4), slow, rows, mask=mask_of(rows))
        alone = attention_statistics(query, key, value, 0.4, asked, rows)
        torch.testing.assert_close(output, two, rtol=0, atol=1e-6)
        for name in ("received", "class_row", "key_mean", "value_norm"):
            if getattr(asked, name):
                torch.testing.assert_close(getattr(found, name), getattr(other, name), rtol=0, atol=1e-6)
                torch.testing.assert_close(getattr(alone, name), getattr(other, name), rtol=0, atol=1e-6)


def mask_of(rows: MapRows) -> Tensor:
    """What `rows` says as what is added to the logits."""
    allowed = torch.ones(3, 1, 9, 9, dtype=torch.bool)
    if rows.key_valid is not None:
        allowed = allowed & rows.key_valid[:, None, None]
    if rows.causal:
        allowed = allowed & torch.ones(9, 9, dtype=torch.bool).tril()
    if rows.query_segment is not None:
        allowed = allowed & (rows.query_segment.unsqueeze(2) == rows.key_segment.unsqueeze(1)).unsqueeze(1)
        allowed = allowed | ~allowed.any(dim=-1, keepdim=True)
    bias = torch.zeros(3, 4, 9, 9).masked_fill(~allowed, -torch.inf)
    if rows.key_bias is not None:
        bias = bias + rows.key_bias[:, None, None]
    return bias if rows.logit_bias is None else bias + rows.logit_bias


def test_a_causal_mean_is_over_the_queries_that_see_the_key() -> None:
    query, key, value = torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = (query @ key.transpose(-2, -1)).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(dim=-1)
    seen = torch.arange(7, 0, -1)
    for backend in ("eager", "chunked", "fused"):
        request = StatisticsRequest(received=True, backend=backend)
        found = attention_statistics(query, key, value, 1.0, request, MapRows(causal=True)).received
        close(found, weights.sum(dim=2) / seen)
        # The first query sees nothing but a key that is left out: it gives nothing, and is still counted.
        request = replace(request, skip_keys=(0,))
        found = attention_statistics(query, key, value, 1.0, request, MapRows(causal=True)).received
        rest = weights[..., 1:] / weights[..., 1:].sum(dim=-1, keepdim=True)
        close(found[..., 1:], rest.nan_to_num().sum(dim=2) / seen[1:])
        assert (found[..., 0] == 0).all()


def test_dropout_takes_the_output_from_fused_attention() -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    request = StatisticsRequest(received=True)
    torch.manual_seed(3)
    output, found = attention_with_statistics(query, key, value, Kernel(0.4, dropout=0.5), request, MapRows())
    torch.manual_seed(3)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5, scale=0.4)
    assert torch.equal(output, expected)
    torch.testing.assert_close(found.received.sum(dim=-1), torch.ones(2, 4))


def test_autocast_does_not_lower_the_statistics() -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    expected = attention_statistics(query, key, value, 0.4, StatisticsRequest(received=True), MapRows()).received
    for backend in ("eager", "chunked", "fused"):
        request = StatisticsRequest(received=True, backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, found = attention_with_statistics(query, key, value, Kernel(0.4), request, MapRows())
        torch.testing.assert_close(found.received, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "chunked", "fused"])
def test_scores_across_heads_agree(backend: str) -> None:
    """Variance and MedAD across heads are read from statistics per head, which every back end returns alike."""
    model = vit()
    for router in ("attention_variance", "attention_medad"):
        routed = route(model, [f"router={router}", "router.query=gap", "capacity.fraction=0.5"])
        scores = []
        for name in ("eager", backend):
            routed.request = replace(routed.request, backend=name)
            with torch.no_grad():
                scores.append(routed(images(), return_trace=True)[1][1].scores)
        torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("detach", [True, False])
def test_statistics_carry_a_gradient_only_if_asked(detach: bool) -> None:
    backbone = adapt(vit())
    tokens, context = backbone.embed(images())
    request = StatisticsRequest(received=True, class_row=True, detach=detach)
    _, found = backbone.block(0).attend_with_statistics(tokens.side(), context, request)
    assert found.received.requires_grad == found.class_row.requires_grad == (not detach)
    if not detach:
        found.received[..., 3].sum().backward()
        gradient = backbone.module.blocks[0].attn.qkv.weight.grad
        assert gradient[:64].abs().sum() > 0  # queries and keys
        assert gradient[64:].abs().sum() == 0  # values


def test_nothing_left_to_count_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"router\.exclude_keys leaves nothing of 19 tokens"):
        statistics_of(StatisticsRequest(received=True, skip_keys=tuple(range(19))))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
