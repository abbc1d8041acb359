"""The triton kernels against the reference, on a device or in triton's interpreter.

TRITON_INTERPRET=1 python tests/attention/triton_cases.py cpu
python tests/attention/triton_cases.py cuda
"""

from __future__ import annotations

import sys

import torch

from routing_lab.attention import AttentionMap
from routing_lab.attention.backends import Eager
from routing_lab.attention.triton_kernels import Triton

CASES = (
    (2, 70, 70, False, False),
    (2, 70, 70, True, True),
    (2, 33, 97, True, False),
    (2, 33, 97, False, True),
    (1, 129, 129, True, False),
    (1, 129, 129, False, True),
)
"""Samples, queries, keys, causal, half precision: one to three blocks a side, every pair of choices once."""


def check(device: str) -> int:
    """The number of cases, all of which agree to 1e-5."""
    generator = torch.Generator().manual_seed(0)
    half = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
    for batch, queries, keys, causal, halved in CASES:
        dtype = half if halved else torch.float32
        query = torch.randn(batch, 4, queries, 24, generator=generator).to(device, dtype)
        key, value = (torch.randn(batch, 2, keys, 24, generator=generator).to(device, dtype) for _ in range(2))
        mask = torch.rand(batch, 1, 1, keys, generator=generator) > 0.2
        mask[..., 0] = True
        weight = torch.rand(batch, 1, queries, generator=generator).to(device)
        own = torch.arange(queries, device=device).expand(batch, queries)
        given = [mask.to(device), None] if dtype == torch.float32 else [mask.float().to(device), mask.to(device)]
        for part, own_key in zip(given, (None, own), strict=True):
            attention = AttentionMap(query, key, 0.3, part, causal, weight, own_key)
            expected = AttentionMap(query.float(), key.float(), 0.3, part, causal, weight, own_key)
            output, received = Triton().attend(attention, value)
            exact, means = Eager().attend(expected, value.float())
            torch.testing.assert_close(received, means, rtol=0, atol=1e-5)
            torch.testing.assert_close(Triton().received(attention), means, rtol=0, atol=1e-5)
            rounding = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(output.float(), exact, rtol=0, atol=rounding)
            gradients(attention, expected)
    return len(CASES)


def gradients(attention: AttentionMap, expected: AttentionMap) -> None:
    """Of the column means, where the score is differentiated."""
    found = []
    for form, given in ((Triton(), attention), (Eager(), expected)):
        query, key = given.query.float().requires_grad_(), given.key.float().requires_grad_()
        means = form.received(
            AttentionMap(query, key, given.scale, given.mask, given.causal, given.weight, given.own_key)
        )
        found.append(torch.autograd.grad(means.square().sum(), (query, key)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


if __name__ == "__main__":
    print(check(sys.argv[1]), "cases")
