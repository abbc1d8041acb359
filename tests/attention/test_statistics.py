"""Attention statistics: the chunked form equals the reference, in bounded memory, and disturbs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.routing.tiny import images, vit
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from routing_lab.attention import StatisticsRequest, received_chunked, received_eager
from routing_lab.backbones import adapt

SCALE = 0.35


def queries_and_keys(
    batch: int = 3, heads: int = 2, tokens: int = 23, keys: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, tokens, 8, generator=generator)
    key = torch.randn(batch, heads, keys or tokens, 8, generator=generator)
    return 2 * query.to(dtype), 2 * key.to(dtype)


def triple_loop(query: Tensor, key: Tensor) -> Tensor:
    """Attention received as A-MoD's Eq. 4 writes it, one number at a time, before the mean over heads."""
    batch, heads, tokens, _ = query.shape
    received = torch.zeros(batch, heads, key.shape[2], dtype=query.dtype)
    for b in range(batch):
        for h in range(heads):
            for j in range(tokens):
                row = torch.softmax(SCALE * key[b, h] @ query[b, h, j], dim=0)
                received[b, h] += row / tokens
    return received


def test_reference_is_the_equation() -> None:
    query, key = queries_and_keys(dtype=torch.float64)
    found = received_eager(query, key, SCALE)
    torch.testing.assert_close(found, triple_loop(query, key), rtol=0, atol=1e-14)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("slab", [1, 23, 23 * 5, 23 * 23, 23 * 23 * 2, 23 * 23 * 4, None])
@pytest.mark.parametrize("keys", [23, 31])
def test_chunks_equal_the_reference(slab: int | None, keys: int) -> None:
    """Slabs of rows of one head, of several rows, of whole samples; none of them divides the tokens evenly."""
    query, key = queries_and_keys(keys=keys)
    weight = torch.rand(3, 1, 23, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(3, 1, 1, keys).masked_fill(torch.arange(keys) % 7 == 3, float("-inf"))
    own = torch.arange(23).flip(0).expand(3, 23)
    for options in ((None, None, None), (weight, None, None), (None, bias, None), (weight, bias, own)):
        found = received_chunked(query, key, SCALE, *options, slab=slab)
        torch.testing.assert_close(found, received_eager(query, key, SCALE, *options), rtol=0, atol=1e-6)


@pytest.mark.parametrize("slab", [23 * 5, 23 * 23 * 2])
def test_gradients_are_the_references(slab: int) -> None:
    towards = torch.randn(3, 2, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = []
    for compute, options in ((received_eager, {}), (received_chunked, {"slab": slab})):
        query, key = (x.requires_grad_() for x in queries_and_keys(dtype=torch.float64))
        (compute(query, key, SCALE, **options) * towards).sum().backward()
        gradients.append((query.grad, key.grad))
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert expected.abs().max() > 1e-3


def test_half_precision_is_raised() -> None:
    query, key = queries_and_keys(dtype=torch.bfloat16)
    found = received_chunked(query, key, SCALE)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, received_eager(query.float(), key.float(), SCALE), rtol=0, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
def test_memory_is_linear_in_the_tokens(grad: bool) -> None:
    """No tensor of the chunked form grows as N x N: the largest is a slab, what it keeps is O(N)."""
    slab, largest, kept = 4096, {}, {}
    for tokens in (256, 512, 1024):
        query, key = (x.requires_grad_(grad) for x in queries_and_keys(batch=1, heads=1, tokens=tokens))
        with largest_tensor() as seen:
            result = received_chunked(query, key, SCALE, slab=slab)
            if grad:
                result.sum().backward()
        largest[tokens] = seen["numel"]
        kept[tokens] = result.numel()
    assert max(largest.values()) <= max(slab, query.numel())
    assert kept == {tokens: tokens for tokens in kept}
    with largest_tensor() as seen:
        received_eager(query, key, SCALE)
    assert seen["numel"] == 1024 * 1024


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


@pytest.mark.parametrize("eager", [False, True])
def test_parts_of_the_map_that_count(eager: bool) -> None:
    """Left-out queries, left-out keys (others renormalised) and the token itself, against the whole map."""
    with torch.no_grad():
        attention, plain = statistics_of(StatisticsRequest(received=True, class_row=True, eager=eager))
        close(plain.received, attention.mean(dim=2))
        close(plain.class_row, attention[:, :, 0])

        _, found = statistics_of(StatisticsRequest(received=True, skip_queries=(0, 2), eager=eager))
        rows = [1, *range(3, attention.shape[2])]
        close(found.received, attention[:, :, rows].mean(dim=2))

        _, found = statistics_of(StatisticsRequest(received=True, class_row=True, skip_keys=(0, 1), eager=eager))
        rest = attention.clone()
        rest[..., :2] = 0
        rest = rest / rest.sum(dim=-1, keepdim=True)
        close(found.received, rest.mean(dim=2))
        close(found.class_row, rest[:, :, 0])

        _, found = statistics_of(StatisticsRequest(received=True, skip_self=True, eager=eager))
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


def test_output_does_not_depend_on_statistics() -> None:
    backbone = adapt(vit(qk_norm=True, init_values=0.5))
    tokens, context = backbone.embed(images())
    x = tokens.side()
    block = backbone.block(1)
    with torch.no_grad():
        expected = block.attend(x, context)
        for request in (
            StatisticsRequest(received=True),
            StatisticsRequest(received=True, eager=True),
            StatisticsRequest(class_row=True),
        ):
            assert torch.equal(block.attend_with_statistics(x, context, request)[0], expected)
        projection = torch.randn(block.query_key_shape)
        output, random = block.attend_with_statistics(
            x, context, StatisticsRequest(received=True), projection=projection
        )
        _, trained = block.attend_with_statistics(tokens.side(), context, StatisticsRequest(received=True))
    assert torch.equal(output, expected)
    assert not torch.allclose(random.received, trained.received, atol=1e-3)
    torch.testing.assert_close(random.received.sum(dim=-1), torch.ones(3, 4))


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


@contextmanager
def largest_tensor() -> Iterator[dict[str, int]]:
    """The number of elements of the largest tensor that any operation returns."""
    seen = {"numel": 0}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else (out,):
                # An expanded view holds fewer elements than it shows.
                if isinstance(value, Tensor):
                    seen["numel"] = max(seen["numel"], value.untyped_storage().size() // value.element_size())
            return out

    with Watch():
        yield seen
