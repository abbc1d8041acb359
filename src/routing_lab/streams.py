"""Named seed streams: every purpose that draws random numbers gets its own seed, derived from the run's `seed` alone.

No arm, listing order or global generator enters, so two arms with the same seed see the same initial backbone,
the same batches and the same augmentations, and their differences pair. A seed belongs to (seed, stream, indices),
for instance the order of epoch 3 is `stream_seed(seed, "data", 3)`: resuming needs no generator state.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

Stream = Literal["initialisation", "data", "augmentation", "mixing", "routing", "dropout", "split", "synthesis"]

STREAMS: tuple[str, ...] = get_args(Stream)


def stream_seed(seed: int, stream: Stream, *indices: int) -> int:
    """Seed of one named stream, in [0, 2**63).

    Args:
        seed: the run's seed, an integer >= 0 (0 is a seed like any other).
        stream: what the random numbers are for.
        indices: which draw within the stream (epoch, step, example, ...).

    The value is the first 63 bits of BLAKE2b over the decimal text `seed/stream/index/...`, so it is the same on every
    machine and in every version of Python.

    Raises:
        ValueError: a negative seed or an unknown stream.
    """
    if seed < 0:
        raise ValueError(f"seed={seed}: expected an integer >= 0")
    if stream not in STREAMS:
        raise ValueError(f"stream={stream!r}: expected one of {', '.join(STREAMS)}")
    text = "/".join([str(int(seed)), stream, *(str(int(index)) for index in indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
