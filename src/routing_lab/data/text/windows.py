"""Windows of a token stream: a function of (seed, epoch, index).

A window of C tokens predicts C next ones. In training the windows of an epoch lie side by side from an offset that is
drawn from the stream (seed, "augmentation", epoch), so that every epoch cuts elsewhere; in evaluation they lie side by
side from the first token, and the last one is moved back to end with the text: every token but the first is predicted
exactly once.

Documents follow each other in the stream. With `data.documents=separate` a batch says which document every token
belongs to, attention stays within it, and no token predicts the first one of the next document.

Shape legend: B batch, N tokens of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routing_lab.data.batches import Request
from routing_lab.data.text import IGNORED
from routing_lab.streams import stream_seed


class TextBatch(NamedTuple):
    """Tokens and what they are to predict.

    Args:
        ids: [B, N] int64.
        targets: [B, N] int64, the next token; -100 where it does not count.
        indices: [B] int64, the windows, numbered over all splits.
        num_bytes: [B] int64, bytes of text that the targets which count stand for.
        segments: [B, N] int64, the document of each token; None: all tokens of a window may see each other.
    """

    ids: Tensor
    targets: Tensor
    indices: Tensor
    num_bytes: Tensor
    segments: Tensor | None = None


@dataclass(frozen=True)
class Stream:
    """The tokens of one split.

    Args:
        tokens: [T].
        starts: ascending, where each document begins.
    """

    tokens: NDArray[np.int64] | NDArray[np.uint16] | NDArray[np.uint32]
    starts: NDArray[np.int64]

    def num_windows(self, context: int, moving: bool) -> int:
        """Windows of a pass; `moving`: one fewer than fit, so that they can begin at an offset."""
        targets = len(self.tokens) - 1
        return max(1, (targets + 1 - context) // context) if moving else -(-targets // context)


class Windows:
    """Makes batches of windows.

    Args:
        streams: those of the splits, in the order in which windows are numbered.
        counts: windows of each split.
        context: C.
        separate: documents do not see each other.
        token_bytes: [V] bytes of text that each token stands for.
        moving: the split whose windows begin at an offset; None: those that are evaluated.
        seed: the run's seed.
    """

    is_per_image = False

    def __init__(
        self,
        streams: Sequence[Stream],
        counts: Sequence[int],
        context: int,
        separate: bool,
        token_bytes: NDArray[np.int64],
        moving: int | None = None,
        seed: int = 0,
    ) -> None:
        self.streams = list(streams)
        self.context = context
        self.separate = separate and any(len(stream.starts) > 1 for stream in streams)
        self.token_bytes = token_bytes
        self.moving = moving
        self.seed = seed
        self._ends = np.cumsum(counts)
        self._counts = list(counts)

    def __call__(self, request: Request) -> TextBatch:
        """The batch of a request."""
        indices = torch.as_tensor(request.indices, dtype=torch.int64)
        parts = [self._window(int(index), request.epoch) for index in indices]
        ids, targets, segments = (torch.from_numpy(np.stack(part)) for part in zip(*parts, strict=True))
        num_bytes = torch.from_numpy(np.stack([self._bytes_of(targets) for _, targets, _ in parts]))
        return TextBatch(ids, targets, indices, num_bytes, segments if self.separate else None)

    def _bytes_of(self, targets: NDArray[np.int64]) -> np.int64:
        return self.token_bytes[targets[targets != IGNORED]].sum()

    def _window(self, index: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        split = int(np.searchsorted(self._ends, index, side="right"))
        number = index - (int(self._ends[split - 1]) if split else 0)
        stream, context = self.streams[split], self.context
        wanted = number * context
        if split == self.moving:
            wanted += self._offset(epoch, len(stream.tokens) - 1 - self._counts[split] * context)
        start = min(wanted, len(stream.tokens) - 1 - context)
        tokens = stream.tokens[start : start + context + 1].astype(np.int64)
        document = np.searchsorted(stream.starts, np.arange(start, start + context + 1), side="right")
        targets = tokens[1:].copy()
        targets[: wanted - start] = IGNORED
        if self.separate:
            targets[document[1:] != document[:-1]] = IGNORED
        return tokens[:-1], targets, document[:-1]

    def _offset(self, epoch: int, slack: int) -> int:
        return stream_seed(self.seed, "augmentation", epoch) % (min(slack, self.context - 1) + 1)


class Sequences:
    """Makes batches of sequences that are there already, with targets of their own; a token is a byte."""

    is_per_image = False

    def __init__(self, tokens: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self._tokens, self._targets = torch.from_numpy(tokens), torch.from_numpy(targets)

    def __call__(self, request: Request) -> TextBatch:
        """The batch of a request."""
        indices = torch.as_tensor(request.indices, dtype=torch.int64)
        targets = self._targets[indices]
        return TextBatch(self._tokens[indices], targets, indices, (targets != IGNORED).sum(dim=1))
