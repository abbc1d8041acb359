"""Images whose class is spelt by a few known patches: ground truth for "which tokens matter".

The class c of an image is written with K = `num_informative` digits in base m (the smallest m with m^K >= classes).
Digit k chooses one of m patterns that belong to position k of the spelling, and the K chosen patterns are planted at
K random patches, anywhere in the image. All of them are needed: whoever sees each with probability p, and guesses
between m symbols otherwise, is right with probability (p + (1 - p)/m)^K. `num_distractors` further patches carry
patterns of the same strength that occur in every class alike, so conspicuous is not the same as important. The rest
is noise.

Everything is drawn from raw 64-bit output of PCG64, whose stream is fixed by definition, and only combined by
integer and exactly rounded operations: the images are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_lab.streams import stream_seed

_AMPLITUDE = 48  # grey levels between the background and a pattern's pixel; 127 / 48 standard deviations to the edge
_CHUNK = 64  # images generated from one seed, few enough to bound memory


@dataclass(frozen=True, slots=True)
class Planted:
    """Images uint8 [N, C, H, W], classes int64 [N], and masks bool [N, grid, grid] of the informative patches."""

    images: NDArray[np.uint8]
    targets: NDArray[np.int64]
    masks: NDArray[np.bool_]


def plant(data: Any) -> Planted:
    """Generate all `num_train + num_val + num_test` images of a `PlantedData` node, in that order."""
    total = data.num_train + data.num_val + data.num_test
    alphabet = patterns(data.num_patterns, data.channels * data.patch_size**2, stream_seed(data.seed, "synthesis", 0))
    parts = [
        _chunk(
            data, alphabet, np.arange(start, min(start + _CHUNK, total)), stream_seed(data.seed, "synthesis", 1, start)
        )
        for start in range(0, total, _CHUNK)
    ]
    targets = np.arange(total) % data.num_classes
    return Planted(np.concatenate([p[0] for p in parts]), targets, np.concatenate([p[1] for p in parts]))


def patterns(count: int, values: int, seed: int) -> NDArray[np.int64]:
    """`count` different patterns of +1 and -1, [count, values], picked greedily for small absolute correlation."""
    pool = 4 * max(count, 256)
    if 2**values <= pool:
        bits = np.arange(2**values)[:, None] >> np.arange(values) & 1
    else:
        bits = (np.random.PCG64(seed).random_raw(pool * values) >> np.uint64(63)).astype(np.int64).reshape(pool, values)
    candidates = np.unique(bits * 2 - 1, axis=0)
    chosen = [0]
    worst = np.zeros(len(candidates), dtype=np.int64)
    while len(chosen) < count:
        correlation = candidates @ candidates[chosen[-1]]
        worst = np.maximum(worst, np.abs(correlation))
        worst[chosen] = values + 1
        chosen.append(int(worst.argmin()))
    return candidates[chosen]


def _chunk(
    data: Any, alphabet: NDArray[np.int64], index: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    size, patch, grid, num = data.patch_size, data.channels * data.patch_size**2, data.grid, len(index)
    generator = np.random.PCG64(seed)
    places = generator.random_raw(num * grid**2).reshape(num, grid**2).argsort(axis=1, kind="stable")
    informative = places[:, : data.num_informative]
    distracting = places[:, data.num_informative :][:, : data.num_distractors]

    rows = np.arange(num)[:, None]
    content = np.zeros((num, grid**2, patch), dtype=np.int64)
    content[rows, informative] = alphabet[_spelling(data, index)]
    half = data.num_patterns // 2
    draws = generator.random_raw(num * data.num_distractors).reshape(num, data.num_distractors)
    content[rows, distracting] = alphabet[half + (draws % np.uint64(half)).astype(np.int64)]

    # Four bytes add up to a nearly normal number of mean 510 and variance 4 (256^2 - 1) / 12.
    octets = generator.random_raw(-(-content.size // 2)).astype("<u8").view(np.uint8)[: 4 * content.size]
    noise = (octets.reshape(*content.shape, 4).sum(axis=-1, dtype=np.int64) - 510) / np.sqrt((256**2 - 1) / 3)
    pixels = np.rint(128 + _AMPLITUDE * (content + data.noise * noise)).clip(0, 255).astype(np.uint8)

    image = pixels.reshape(num, grid, grid, data.channels, size, size).transpose(0, 3, 1, 4, 2, 5)
    mask = np.zeros((num, grid**2), dtype=np.bool_)
    mask[rows, informative] = True
    return image.reshape(num, data.channels, grid * size, grid * size), mask.reshape(num, grid, grid)


def _spelling(data: Any, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row of the alphabet for every informative patch, [N, K]: block k of m rows serves position k."""
    power = data.num_symbols ** np.arange(data.num_informative)
    digits = (index % data.num_classes)[:, None] // power % data.num_symbols
    return digits + data.num_symbols * np.arange(data.num_informative)
