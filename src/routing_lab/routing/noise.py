"""Random numbers for routing, computed from counters instead of drawn from a generator.

A number depends on (seed, layer, purpose, step, sample, token) alone, so routing noise leaves every other random stream
untouched, does not depend on batch composition or worker count, needs no state in a checkpoint, and is the same on
every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Odd multipliers of the 64-bit finaliser "splitmix64" (Steele, Lea and Flood 2014), as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


@dataclass
class NoiseSource:
    """Uniform and normal numbers for the tokens of one batch.

    Args:
        step: optimiser step; -1 in evaluation, where noise depends on the sample alone.
        sample_ids: [B] int64, index of each sample in its data set.
    """

    step: int
    sample_ids: Tensor

    def uniform(self, tokens: int | Tensor, seed: int, layer: int, purpose: int = 0) -> Tensor:
        """[B, N] float32 in (0, 1), new at every step and sample.

        tokens: N, or [B, N] the number of each token.
        """
        return _uniform(self.sample_ids + 1, self.step + 1, tokens, _combine(seed, layer, purpose))

    def fixed(self, tokens: int | Tensor, seed: int, layer: int, purpose: int = 0) -> Tensor:
        """[B, N] float32 in (0, 1), the same at every step and for every sample; tokens as for `uniform`."""
        return _uniform(torch.zeros_like(self.sample_ids), 0, tokens, _combine(seed, layer, purpose))

    def gumbel(self, num_tokens: int, seed: int, layer: int) -> Tensor:
        """[B, N, 2] float32, standard Gumbel: perturbs a choice between two, the first of them to keep."""
        return torch.stack([-(-self.uniform(num_tokens, seed, layer, 4 + way).log()).log() for way in (0, 1)], dim=-1)

    def normal(self, num_tokens: int, seed: int, layer: int, purpose: int = 0) -> Tensor:
        """[B, N] float32, standard normal."""
        return math.sqrt(2) * torch.erfinv(2 * self.uniform(num_tokens, seed, layer, purpose) - 1)


def _combine(seed: int, layer: int, purpose: int) -> int:
    """A signed 63-bit base for one stream; plain integers, so that it is a constant to a compiler."""
    value = (seed * 0x9E3779B97F4A7C15 + layer * 0xD1B54A32D192ED03 + purpose * 0x8CB92BA72F3D8DD7) & (2**64 - 1)
    value = ((value ^ (value >> 31)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (value >> 1) & (2**63 - 1)


def _uniform(ids: Tensor, step: int, tokens: int | Tensor, base: int) -> Tensor:
    token = torch.arange(tokens, device=ids.device) if isinstance(tokens, int) else tokens
    row = _mix(_mix(ids + base) ^ (torch.full_like(ids, step) * _GOLDEN))
    bits = _mix(row.unsqueeze(1) + (token + 1) * _GOLDEN)
    # 23 bits and a half fill a float32 significand exactly and keep both ends open.
    return (_shift(bits, 41).to(torch.float32) + 0.5) * 2.0**-23


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MULTIPLIER_1
    z = (z ^ _shift(z, 27)) * _MULTIPLIER_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
