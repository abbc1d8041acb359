"""The order of a run's examples, whatever they are: batches of a training epoch, passes over a split.

How a training epoch is made. The training split is put in the order of the stream (seed, "data", epoch) and cut into
optimiser batches of `train.batch_size`; what does not fill one is left out of this epoch (another part every epoch),
so that every step weighs the same and the number of steps is fixed. A split smaller than one batch is one batch. Each
optimiser batch is divided into `train.accumulate` batches, and each of these into equal parts for the processes of a
distributed run, so that the number of processes does not change which examples share an optimiser step.

How a split is evaluated. Every example once, in a fixed order that mixes the classes; process r of R takes every R-th,
and all processes have the same number of batches where there are enough examples. Results belong to examples through
the batch's indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from routing_lab.data.batches import Builder, Loader, Request
from routing_lab.data.layout import DataProblem, Split
from routing_lab.streams import stream_seed

BatchT = TypeVar("BatchT")


class SeededData(LightningDataModule, Generic[BatchT]):
    """Loaders for `train`, `val` and `test`.

    Args:
        split: ascending indices int64 of the examples of each split, numbered over all splits.
        build: makes a training batch, and one that is evaluated.
        train: the `train` node; `batch_size`, `eval_batch_size`, `accumulate` and `mixup` are read.
        seed: the run's seed; it sets the order, never the splits.
        workers: processes that make batches.
        epoch_size: training examples of one epoch; None: the whole split.

    Attributes:
        split: as given.
        sizes: number of examples of each split.
    """

    def __init__(
        self,
        split: Mapping[Split, Tensor],
        build: tuple[Builder[BatchT], Builder[BatchT]],
        train: Any,
        seed: int,
        workers: int = 0,
        epoch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.split: dict[Split, Tensor] = dict(split)
        self.sizes: dict[str, int] = {name: len(indices) for name, indices in split.items()}
        self.seed = seed
        self._train, self._eval = build
        self._workers = workers
        self._epoch = 0
        self._epoch_size = min(self.sizes["train"], epoch_size or self.sizes["train"])
        self._batch_size, self._accumulate = train.batch_size, train.accumulate
        self._eval_batch_size = train.eval_batch_size
        self._pairs = 2 if train.mixup or train.cutmix else 1

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one epoch."""
        return max(1, self._epoch_size // self._batch_size)

    @property
    def epoch(self) -> int:
        """The epoch the next pass over the training split belongs to: the trainer's while it fits."""
        if self.trainer is not None and self.trainer.training:
            return int(self.trainer.current_epoch)
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, where no Lightning trainer does."""
        self._epoch = epoch

    def train_dataloader(self) -> Loader[BatchT]:
        """Training batches, `steps_per_epoch * train.accumulate` a process.

        Raises:
            DataProblem: the batch cannot be divided over processes and accumulation, or cannot be mixed.
        """
        self._share()
        return Loader(self._train, self._train_requests, self.steps_per_epoch * self._accumulate, self._workers)

    def val_dataloader(self) -> Loader[BatchT]:
        """The validation split: for choices during training."""
        return self.loader("val")

    def test_dataloader(self) -> Loader[BatchT]:
        """The test split: for the final figure, once."""
        return self.loader("test")

    def loader(self, split: Split) -> Loader[BatchT]:
        """Any split as it is evaluated: every example once over all processes, without augmentation."""
        requests = self._eval_requests(split)
        return Loader(self._eval, _always(requests), len(requests), self._workers)

    def examples(self, indices: Tensor) -> BatchT:
        """A batch of chosen examples as they are evaluated."""
        return self._eval(Request(indices))

    def _share(self) -> int:
        """Examples of one batch of one process."""
        parts = self._accumulate * _rank()[1]
        pairs = self._pairs
        if self._epoch_size < self._batch_size:
            share = self._epoch_size // parts // pairs * pairs
            if share:
                return share
        elif self._batch_size % (parts * pairs) == 0:
            return self._batch_size // parts
        raise DataProblem(
            "train.batch_size",
            self._batch_size,
            f"{self._epoch_size} training examples cannot be divided into such batches for {self._accumulate}"
            f" accumulated batches and {_rank()[1]} processes{' of pairs to mix' if pairs == 2 else ''}; expected a"
            f" multiple of {parts * pairs}",
        )

    def _train_requests(self) -> list[Request]:
        epoch, share = self.epoch, self._share()
        rank, processes = _rank()
        batches = self.steps_per_epoch * self._accumulate
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "data", epoch))
        order = self.split["train"][torch.randperm(self.sizes["train"], generator=generator)]
        mine = order[: batches * processes * share].view(batches, processes, share)[:, rank]
        return [Request(indices, epoch, step, rank) for step, indices in enumerate(mine)]

    def _eval_requests(self, split: Split) -> list[Request]:
        rank, processes = _rank()
        generator = torch.Generator().manual_seed(stream_seed(0, "data"))
        order = self.split[split][torch.randperm(self.sizes[split], generator=generator)]
        mine = order[rank::processes]
        batches = math.ceil(math.ceil(len(order) / processes) / self._eval_batch_size)
        return [Request(indices) for indices in mine.tensor_split(batches) if len(indices)]


def _always(requests: list[Request]) -> Callable[[], list[Request]]:
    return lambda: requests


def _rank() -> tuple[int, int]:
    """This process and the number of processes of a distributed run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
