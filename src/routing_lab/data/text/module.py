"""The text of one run: tokens, windows, loaders and facts for the record. Their order is that of `data.epochs`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routing_lab.data.batches import Builder, Loader
from routing_lab.data.epochs import SeededData
from routing_lab.data.layout import SPLITS, DataProblem, Split
from routing_lab.data.text.corpus import read_corpus
from routing_lab.data.text.induction import induce
from routing_lab.data.text.tokenizers import ByteEncoding, Encoding, build_encoding
from routing_lab.data.text.windows import Sequences, Stream, TextBatch, Windows


def build_text(data: Any, train: Any, seed: int) -> TextData:
    """The text module of a run.

    Args:
        data: a validated `data` node of text.
        train: the `train` node; batch sizes are read.
        seed: the run's seed; it sets order and windows, never the splits.

    Raises:
        DataProblem: a `ValueError` that names the key, its value and what would be accepted.
    """
    return _planted(data, train, seed) if data.name == "induction" else _windowed(data, train, seed)


class TextData(SeededData[TextBatch]):
    """Windows of a text.

    Attributes:
        vocab_size: number of tokens that a model has to know.
        encoding: from text to tokens and back.
        token_bytes: [vocab_size] int64, bytes of text that each token stands for.
        masks: [N, context] bool, tokens that the answers of planted sequences depend on; None for other texts.
        fingerprint: SHA-256 of content, encoding, windows and splits, the same on every machine.
    """

    def __init__(
        self,
        split: dict[Split, Tensor],
        build: tuple[Builder[TextBatch], Builder[TextBatch]],
        data: Any,
        train: Any,
        seed: int,
        encoding: Encoding,
        content: str,
        masks: Tensor | None = None,
        lengths: Callable[[int], Loader[TextBatch]] | None = None,
    ) -> None:
        super().__init__(split, build, train, seed, epoch_size=data.epoch_windows)
        self.encoding = encoding
        self.vocab_size = encoding.size
        self.token_bytes = torch.from_numpy(encoding.lengths())
        self.context = data.context
        self.masks = masks
        self._lengths = lengths
        digest = hashlib.sha256(json.dumps([content, encoding.fingerprint, data.context]).encode())
        for name in SPLITS:
            digest.update(split[name].numpy().astype("<i8").tobytes())
        self.fingerprint = digest.hexdigest()

    def informative(self, index: Tensor, grid: tuple[int, int] | None = None) -> Tensor | None:
        """[B, N] bool: the tokens that matter of windows [B]; None: the data set does not know. Texts have no grid."""
        return None if self.masks is None else self.masks[index]

    def at_length(self, length: int) -> Loader[TextBatch]:
        """The test split in windows of another length, as many tokens a batch and, to a window, of the same text.

        Raises:
            DataProblem: no window of that length fits into the split.
        """
        assert self._lengths is not None, "planted sequences have one length"
        return self._lengths(length)


def _planted(data: Any, train: Any, seed: int) -> TextData:
    planted = induce(data)
    build = Sequences(planted.tokens, planted.targets)
    counts = [data.num_train, data.num_val, data.num_test]
    content = hashlib.sha256(planted.tokens.astype("<i8").tobytes() + planted.targets.astype("<i8").tobytes())
    masks = torch.from_numpy(planted.masks)
    return TextData(
        _split(counts, data.eval_windows), (build, build), data, train, seed, ByteEncoding(), content.hexdigest(), masks
    )


def _windowed(data: Any, train: Any, seed: int) -> TextData:
    corpus = read_corpus(data)
    encoding = build_encoding(data, corpus.documents["train"])
    separate = data.documents == "separate"
    streams = {split: _stream(corpus.documents[split], encoding) for split in SPLITS}
    for split, stream in streams.items():
        if len(stream.tokens) <= data.context:
            raise DataProblem(
                "data.context",
                data.context,
                f"the {split} split has {len(stream.tokens)} tokens; expected fewer tokens a window",
            )
    counts = [streams[split].num_windows(data.context, split == "train") for split in SPLITS]
    content = hashlib.sha256(data.documents.encode())
    for split in SPLITS:
        for document in corpus.documents[split]:
            content.update(split.encode() + hashlib.sha256(document).digest())
    ordered = [streams[split] for split in SPLITS]
    build = (
        Windows(ordered, counts, data.context, separate, encoding.lengths(), moving=0, seed=seed),
        Windows(ordered, counts, data.context, separate, encoding.lengths()),
    )
    digest = content.hexdigest()

    def at_length(length: int) -> Loader[TextBatch]:
        test = streams["test"]
        if len(test.tokens) <= length:
            raise DataProblem(
                "task.eval_lengths", length, f"the test split has {len(test.tokens)} tokens; expected fewer a window"
            )
        count = test.num_windows(length, moving=False)
        most = None if data.eval_windows is None else max(1, data.eval_windows * data.context // length)
        windows = Windows([test], [count], length, separate, encoding.lengths())
        split: dict[Split, Tensor] = {**dict.fromkeys(SPLITS, torch.arange(0)), "test": _evaluated(count, most)}
        batch = max(1, train.eval_batch_size * data.context // length)
        fewer = train.model_copy(update={"eval_batch_size": batch})
        return SeededData(split, (windows, windows), fewer, seed).test_dataloader()

    return TextData(_split(counts, data.eval_windows), build, data, train, seed, encoding, digest, lengths=at_length)


def _split(counts: list[int], eval_windows: int | None) -> dict[Split, Tensor]:
    """Numbers of the windows of each split, of those that are evaluated `eval_windows` at even distances."""
    split: dict[Split, Tensor] = {}
    start = 0
    for name, count in zip(SPLITS, counts, strict=True):
        split[name] = start + (torch.arange(count) if name == "train" else _evaluated(count, eval_windows))
        start += count
    return split


def _evaluated(count: int, most: int | None) -> Tensor:
    """Numbers of at most so many of `count` windows, at even distances."""
    if most is None or most >= count:
        return torch.arange(count)
    return torch.arange(most) * count // most


def _stream(documents: list[bytes], encoding: Encoding) -> Stream:
    """The tokens of documents, one after the other."""
    tail = np.array([] if encoding.end is None else [encoding.end], dtype=np.int64)
    parts: list[NDArray[np.int64]] = [np.concatenate([encoding.encode(document), tail]) for document in documents]
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])]).astype(np.int64)
    tokens = np.concatenate(parts)
    return Stream(tokens.astype(np.uint16) if encoding.size <= 2**16 else tokens.astype(np.uint32), starts)
