"""Back ends of attention statistics: all equal the reference, and the reference equals the equation."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.attention.watch import largest_tensor
from torch import Tensor

from routing_lab.attention import AttentionMap, backend, choose
from routing_lab.attention.backends import Backend, Chunked, Eager, fused_attention
from routing_lab.attention.fused import Fused
from routing_lab.attention.literal import Literal
from routing_lab.attention.registry import HAS_TRITON, SMALL

SCALE, HEADS, QUERIES, KEYS = 0.35, 4, 11, 31

SLABS: list[Backend] = [
    Chunked(slab=1),
    Chunked(slab=HEADS * KEYS * 5),
    Chunked(),
    *(Fused(slab) for slab in (1, KEYS, KEYS * 5, KEYS * QUERIES, KEYS * QUERIES * 3)),
    Fused(),
]
"""Slabs of one row, of several, of one head, of several heads; none of them divides the rows evenly."""


def tensors(key_heads: int = HEADS, keys: int = KEYS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, HEADS, QUERIES, 8), (3, key_heads, keys, 8), (3, key_heads, keys, 8))
    return [2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def mask_of(kind: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    if kind == "none":
        return None
    if kind == "sizes":  # log sizes, as proportional attention adds them
        return torch.rand(3, 1, 1, KEYS, generator=generator, dtype=torch.float64)
    shape = (3, 1, 1, KEYS) if kind == "padding" else (3, 1, QUERIES, KEYS)
    mask = torch.rand(shape, generator=generator) > 0.3
    mask[..., 0] = True
    return mask


def weights() -> Tensor:
    return torch.rand(3, 1, QUERIES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def cases() -> list[tuple[AttentionMap, Tensor]]:
    """Maps with masks, causal order, grouped heads, weighted rows and left-out entries, and values."""
    found = []
    own = torch.arange(QUERIES).expand(3, QUERIES)
    for key_heads, causal, kind in product((HEADS, 2), (False, True), ("none", "sizes", "padding", "rows")):
        query, key, value = tensors(key_heads)
        for weight, own_key in ((None, None), (weights(), own)):
            found.append((AttentionMap(query, key, SCALE, mask_of(kind), causal, weight, own_key), value))
    return found


def test_reference_is_the_equation() -> None:
    """Attention received as A-MoD's Eq. 4 writes it, one number at a time, before the mean over heads."""
    query, key, value = tensors()
    output, found = Eager().attend(AttentionMap(query, key, SCALE), value)
    received = torch.zeros(3, HEADS, KEYS, dtype=torch.float64)
    for b, h, j in product(range(3), range(HEADS), range(QUERIES)):
        received[b, h] += torch.softmax(SCALE * key[b, h] @ query[b, h, j], dim=0) / QUERIES
    torch.testing.assert_close(found, received, rtol=0, atol=1e-14)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(3, HEADS, dtype=torch.float64))
    torch.testing.assert_close(output, fused_attention(AttentionMap(query, key, SCALE), value), rtol=0, atol=1e-12)


def test_reference_is_fused_attention() -> None:
    for attention, value in cases():
        expected = fused_attention(attention, value)
        torch.testing.assert_close(Eager().attend(attention, value)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", SLABS, ids=lambda form: f"{form.name}-{form.slab}")
def test_slabs_equal_the_reference(form: Backend) -> None:
    """Output, column means and every gradient."""
    generator = torch.Generator().manual_seed(3)
    towards = torch.randn(3, HEADS, QUERIES, 8, generator=generator, dtype=torch.float64)
    of_means = torch.randn(3, HEADS, KEYS, generator=generator, dtype=torch.float64)
    for attention, value in cases():
        results = []
        for computed in (Eager(), form):
            query, key, values = (x.clone().requires_grad_() for x in (attention.query, attention.key, value))
            given = replace(attention, query=query, key=key)
            output, received = computed.attend(given, values)
            ((output * towards).sum() + (received * of_means).sum()).backward()
            alone = computed.received(given)
            (gradient,) = torch.autograd.grad((alone * of_means).sum(), key)
            results.append((output, received, alone, query.grad, key.grad, values.grad, gradient))
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", [Eager(), Chunked(slab=KEYS * 20), Fused(KEYS * 5)], ids=lambda form: form.name)
def test_half_precision_and_detached_means(form: Backend) -> None:
    """Statistics are float32 whatever comes in, the output has the value's dtype; detached means have no gradient."""
    for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)):
        query, key, value = (x.requires_grad_() for x in tensors(dtype=dtype))
        attention = AttentionMap(query, key, SCALE, detach=True)
        output, received = form.attend(attention, value)
        exact = AttentionMap(query.double(), key.double(), SCALE)
        assert output.dtype == dtype
        assert received.dtype == torch.float32
        assert output.requires_grad
        assert not received.requires_grad
        torch.testing.assert_close(received.double(), Eager().received(exact), rtol=0, atol=1e-6)
        expected = Eager().attend(exact, value.double())[0]
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["chunked", "fused"])
def test_memory_is_linear_in_the_tokens(name: str, grad: bool) -> None:
    """No tensor grows as N x N: the largest is a slab, or as long as the input."""
    slab = 4096
    form = {"chunked": Chunked(slab), "fused": Fused(slab)}[name]
    for tokens in (256, 512, 1024):
        query, key, value = torch.randn(3, 1, 1, tokens, 8, requires_grad=grad).unbind(0)
        with largest_tensor() as seen:
            output, received = form.attend(AttentionMap(query, key, SCALE), value)
            if grad:
                (output.sum() + received.sum()).backward()
        assert seen["numel"] <= max(slab, 3 * query.numel())
    with largest_tensor() as seen:
        Eager().received(AttentionMap(query, key, SCALE))
    assert seen["numel"] == 1024 * 1024


@pytest.mark.parametrize("form", [Eager(), Chunked(), Fused()], ids=lambda form: form.name)
def test_no_query_gives_nothing(form: Backend) -> None:
    query, key, value = tensors()
    for keys in (KEYS, 0):
        output, received = form.attend(AttentionMap(query[:, :, :0], key[:, :, :keys], SCALE), value[:, :, :keys])
        assert output.shape == (3, HEADS, 0, 8)
        assert torch.equal(received, torch.zeros(3, HEADS, keys, dtype=torch.float64))


def test_long_sequences() -> None:
    """8192 tokens, whose map would take 256 MiB a head."""
    query, key, value = torch.randn(3, 1, 1, 8192, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    attention = AttentionMap(query, key, SCALE)
    with torch.no_grad(), largest_tensor() as seen:
        output, received = choose(attention).attend(attention, value)
    assert seen["numel"] <= 2**19
    torch.testing.assert_close(output, fused_attention(attention, value), rtol=0, atol=1e-6)
    torch.testing.assert_close(received.sum(dim=-1), torch.ones(1, 1))


def test_algorithm_1_as_printed_is_another_score() -> None:
    """With one tile of keys it is Eq. 4; with several it divides early keys by normalisers that are not final."""
    query, key, _ = tensors()
    attention = AttentionMap(query, key, SCALE)
    exact = Eager().received(attention)
    torch.testing.assert_close(Literal(tile=KEYS).received(attention), exact, rtol=0, atol=1e-12)
    printed = Literal(tile=8).received(attention)
    last = slice(KEYS - KEYS % 8, KEYS)
    torch.testing.assert_close(printed[..., last], exact[..., last], rtol=0, atol=1e-12)
    assert (printed[..., :8] > 1.2 * exact[..., :8]).all()
    assert (printed.sum(dim=-1) > 1.2).all()
    kept, printed_kept = (x.mean(dim=1).topk(KEYS // 2).indices.sort().values for x in (exact, printed))
    assert not torch.equal(kept, printed_kept)


def test_registry() -> None:
    query, key, _ = tensors(dtype=torch.float32)
    attention = AttentionMap(query, key, SCALE)
    assert choose(attention).name == "chunked"  # too small for a slab of its own for each sample
    long = torch.zeros(1, 2, SMALL // 128, 4)
    assert choose(AttentionMap(long, long, SCALE)).name == "fused"
    assert choose(attention, "literal").name == "literal"
    on_meta = AttentionMap(query.to("meta"), key.to("meta"), SCALE)
    assert choose(on_meta).name == "chunked"
    with_gradient = replace(attention, mask=torch.zeros(3, 1, 1, KEYS, requires_grad=True))
    assert choose(with_gradient).name == "chunked"
    with pytest.raises(ValueError, match=r"attention back end = flash: expected one of auto, eager, chunked"):
        backend("flash")
    if HAS_TRITON:
        assert backend("triton").name == "triton"
    else:
        with pytest.raises(ValueError, match="the package triton is not installed"):
            backend("triton")


def test_triton_kernels_in_the_interpreter() -> None:
    """The kernels on a CPU; triton decides when it is imported whether it interprets, hence a process of its own."""
    if not HAS_TRITON:
        return
    script = Path(__file__).parent / "triton_cases.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, str(script), "cpu"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 cases" in done.stdout


@pytest.mark.gpu
def test_triton_kernels_on_the_gpu() -> None:
    from tests.attention.triton_cases import check

    assert check("cuda") == 6
