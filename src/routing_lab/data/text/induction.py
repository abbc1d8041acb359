"""Sequences that spell which tokens must be attended to: planted pairs of a key and its value, and keys that ask.

The first half of a sequence holds `num_pairs` pairs, a key directly followed by its value, at random places; in the
second half `num_queries` of the keys come again, each directly followed by its value. Predicting that value takes
attention from the second key to the pair: whoever does not see the pair guesses between `num_values`. Everything else
is filling, drawn evenly. Only the answers count in the loss; the ground truth for routing is the tokens of the pairs
that are asked for and the keys that ask.

Drawn from raw 64-bit output of PCG64, so that the sequences are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_lab.data.text import IGNORED
from routing_lab.streams import stream_seed


@dataclass(frozen=True, slots=True)
class Induction:
    """Tokens int64 [N, context], the targets of each, and masks bool [N, context] of the tokens that matter.

    Tokens: keys 0 .. num_keys - 1, then values, then filling.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    masks: NDArray[np.bool_]


def induce(data: Any) -> Induction:
    """All `num_train + num_val + num_test` sequences of an `InductionData` node, in that order."""
    total, length = data.num_train + data.num_val + data.num_test, data.context + 1
    generator = np.random.PCG64(stream_seed(data.seed, "synthesis"))

    def draw(*shape: int) -> NDArray[np.uint64]:
        return generator.random_raw(int(np.prod(shape))).reshape(shape)

    rows = np.arange(total)[:, None]
    filling = data.vocab_size - data.num_keys - data.num_values
    tokens = (draw(total, length) % np.uint64(filling)).astype(np.int64) + data.num_keys + data.num_values
    keys = draw(total, data.num_keys).argsort(axis=1, kind="stable")[:, : data.num_pairs]
    values = (draw(total, data.num_pairs) % np.uint64(data.num_values)).astype(np.int64) + data.num_keys

    # Places are pairs of positions, so that no two pairs overlap.
    first = length // 2 // 2
    places = 2 * draw(total, first).argsort(axis=1, kind="stable")[:, : data.num_pairs]
    tokens[rows, places], tokens[rows, places + 1] = keys, values
    start = 2 * first
    asked = start + 2 * draw(total, (length - start) // 2).argsort(axis=1, kind="stable")[:, : data.num_queries]
    tokens[rows, asked], tokens[rows, asked + 1] = keys[:, : data.num_queries], values[:, : data.num_queries]

    targets = np.full((total, length), IGNORED, dtype=np.int64)
    targets[rows, asked] = values[:, : data.num_queries]
    mask = np.zeros((total, length), dtype=np.bool_)
    needed = places[:, : data.num_queries]
    mask[rows, needed] = mask[rows, needed + 1] = mask[rows, asked] = True
    return Induction(tokens[:, :-1], targets[:, :-1], mask[:, :-1])
