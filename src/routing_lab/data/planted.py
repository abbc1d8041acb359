"""Images whose class is spelt by a few known patches: ground truth for "which tokens matter".

The class c of an image is written with K = `num_informative` digits in base m (the smallest m with m^K >= classes).
Digit k chooses one of m patterns that belong to position k of the spelling, and the K chosen patterns are planted at
K random patches, anywhere in the image. All of them are needed: whoever sees each with probability p, and guesses
between m symbols otherwise, is right with probability (p + (1 - p)/m)^K. `num_distractors` further patches carry
patterns of the same strength that occur in every class alike, so conspicuous is not the same as important. The rest
is noise.

That is `form=spelling`: whether a patch matters can be read off the patch, and one attention layer that sees all of
them can collect what they say. Under `form=chain` it cannot. K informative patches form a chain, each with a key in the
first half of its values (channels, then rows) and a pointer in the second: the first patch has the one key that begins
every chain, its pointer is the key of the next one, and so on; the last carries the class instead of a pointer.
Distractors form chains of K - 1 such patches that nothing points to and that end in random classes. Only the beginning
of the chain can be told from a distractor by its content: to know which of the others matter, what was read before has
to be compared with them.

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
    alphabet = patterns(data.num_patterns, data.num_values, stream_seed(data.seed, "synthesis", 0))
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
    write = {"spelling": _spelling, "chain": _chain}[data.form]
    content[rows, informative], content[rows, distracting] = write(data, alphabet, index, generator)

    # Four bytes add up to a nearly normal number of mean 510 and variance 4 (256^2 - 1) / 12.
    octets = generator.random_raw(-(-content.size // 2)).astype("<u8").view(np.uint8)[: 4 * content.size]
    noise = (octets.reshape(*content.shape, 4).sum(axis=-1, dtype=np.int64) - 510) / np.sqrt((256**2 - 1) / 3)
    pixels = np.rint(128 + _AMPLITUDE * (content + data.noise * noise)).clip(0, 255).astype(np.uint8)

    image = pixels.reshape(num, grid, grid, data.channels, size, size).transpose(0, 3, 1, 4, 2, 5)
    mask = np.zeros((num, grid**2), dtype=np.bool_)
    mask[rows, informative] = True
    return image.reshape(num, data.channels, grid * size, grid * size), mask.reshape(num, grid, grid)


def _spelling(
    data: Any, alphabet: NDArray[np.int64], index: NDArray[np.int64], generator: np.random.PCG64
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Contents of the informative and of the distracting patches; block k of m rows of the alphabet is position k's."""
    power = data.num_symbols ** np.arange(data.num_informative)
    digits = (index % data.num_classes)[:, None] // power % data.num_symbols
    half = data.num_patterns // 2
    draws = generator.random_raw(len(index) * data.num_distractors).reshape(len(index), data.num_distractors)
    rows = digits + data.num_symbols * np.arange(data.num_informative)
    return alphabet[rows], alphabet[half + (draws % np.uint64(half)).astype(np.int64)]


def _chain(
    data: Any, alphabet: NDArray[np.int64], index: NDArray[np.int64], generator: np.random.PCG64
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Contents of the chain in its order and of the distracting chains, one after another.

    Rows of the alphabet: the key that begins a chain, the other keys (which are pointers as well), the classes.
    """
    num, links = len(index), data.num_informative - 1
    keys = 1 + generator.random_raw(num * data.num_keys).reshape(num, data.num_keys).argsort(axis=1, kind="stable")
    classes = 1 + data.num_keys
    ends = classes + (generator.random_raw(num * data.num_keys).reshape(num, -1) % np.uint64(data.num_classes)).astype(
        np.int64
    )
    ends[:, links - 1] = classes + index % data.num_classes
    # Every chain has `links` keys; what each points to is the next one, or at its end a class.
    pointers = np.where(np.arange(data.num_keys) % links == links - 1, ends, np.roll(keys, -1, axis=1))
    keys, pointers = np.pad(keys, ((0, 0), (1, 0))), np.concatenate([keys[:, :1], pointers], axis=1)
    content = np.concatenate([alphabet[keys], alphabet[pointers]], axis=-1)
    return content[:, : data.num_informative], content[:, data.num_informative :]
