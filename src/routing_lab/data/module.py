"""The data of one run: splits, loaders and facts for the record.

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
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from routing_lab.data.batches import Batch, BatchBuilder, Loader, Request, evaluation_transform
from routing_lab.data.layout import SPLITS, DataProblem, Split
from routing_lab.data.sources import MEMORY_BYTES, ArraySource, FileSource, Source, build_source
from routing_lab.streams import stream_seed

_SMALL_IMAGE = 64  # pixels; the largest image_size that data.memory=null keeps in memory


def build_data(data: Any, train: Any, seed: int, runtime: Any) -> VisionData:
    """The data module of a run.

    Args:
        data: a validated `data` node (`routing_lab.data.schema`).
        train: the `train` node; `batch_size`, `eval_batch_size`, `accumulate`, `augment`, `erasing`, `mixup`, `cutmix`
            and `mixup_prob` are read.
        seed: the run's seed; it sets order, augmentation and mixing, never the splits.
        runtime: the `runtime` node; `workers` is read.

    Raises:
        DataProblem: a `ValueError` that names the key, its value and what would be accepted.
    """
    if data.name == "planted" and train.augment not in ("none", "light"):
        raise DataProblem(
            "train.augment",
            train.augment,
            "moves and recolours patches, and the mask of data=planted would no longer hold; expected none or light",
        )
    source = build_source(data)
    if isinstance(source, FileSource) and _fits_memory(source, data):
        source = _in_memory(source, data)
    return VisionData(source, data, train, seed, runtime.workers)


class VisionData(LightningDataModule):
    """Loaders for `train`, `val` and `test`, and what a record says about the data.

    Batches are (images float32 [B, C, H, W], targets int64 [B], indices int64 [B]); with mixup or cutmix the targets of
    training batches are float32 [B, classes]. Indices number the examples of the whole set, over all splits.

    Attributes:
        num_classes, class_names: the classes, in the order of the targets.
        split: ascending indices int64 of `train`, `val` and `test`.
        sizes: number of examples of each split.
        targets: class of every example of the set, int64 [N].
        masks: bool [N, grid, grid], the patches that decide the class; only for `data=planted`, otherwise None.
    """

    def __init__(self, source: Source, data: Any, train: Any, seed: int, workers: int = 0) -> None:
        super().__init__()
        self.class_names = source.class_names
        self.num_classes = len(source.class_names)
        self.split: dict[Split, Tensor] = {name: torch.from_numpy(source.splits[name]) for name in SPLITS}
        self.sizes: dict[str, int] = {name: len(indices) for name, indices in self.split.items()}
        self.targets = torch.from_numpy(source.targets)
        self.masks = source.masks
        self.seed = seed
        self._source = source
        self._workers = workers
        self._epoch = 0
        self._batch_size, self._accumulate = train.batch_size, train.accumulate
        self._eval_batch_size = train.eval_batch_size
        self._train = BatchBuilder(source, data, train, seed)
        self._eval = BatchBuilder(source, data)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of content, classes and splits, the same on every machine and wherever the data lies.

        Files enter with relative name, size and, up to 256 MiB in all, their content.
        """
        return self._source.fingerprint

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one epoch."""
        return max(1, self.sizes["train"] // self._batch_size)

    @property
    def epoch(self) -> int:
        """The epoch the next pass over the training split belongs to: the trainer's while it fits."""
        if self.trainer is not None and self.trainer.training:
            return int(self.trainer.current_epoch)
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, where no Lightning trainer does."""
        self._epoch = epoch

    def train_dataloader(self) -> Loader:
        """Augmented training batches, `steps_per_epoch * train.accumulate` a process.

        Raises:
            DataProblem: the batch cannot be divided over processes and accumulation, or cannot be mixed.
        """
        self._share()
        return Loader(self._train, self._train_requests, self.steps_per_epoch * self._accumulate, self._workers)

    def val_dataloader(self) -> Loader:
        """The validation split: for choices during training."""
        return self.loader("val")

    def test_dataloader(self) -> Loader:
        """The test split: for the final figure, once."""
        return self.loader("test")

    def loader(self, split: Split) -> Loader:
        """Any split as it is evaluated: every example once over all processes, without augmentation."""
        requests = self._eval_requests(split)
        return Loader(self._eval, lambda: requests, len(requests), self._workers)

    def examples(self, indices: Tensor) -> Batch:
        """A batch of chosen examples as they are evaluated."""
        return self._eval(Request(indices))

    def mask(self, index: int) -> Tensor:
        """Which patches decide the class of an example, bool [grid, grid].

        Raises:
            ValueError: the data set has no mask.
        """
        if self.masks is None:
            raise ValueError("this data set does not know which patches matter; data=planted does")
        return self.masks[index]

    def _share(self) -> int:
        """Examples of one batch of one process."""
        parts = self._accumulate * _rank()[1]
        pairs = 2 if self._train.mixup is not None else 1
        if self.sizes["train"] < self._batch_size:
            share = self.sizes["train"] // parts // pairs * pairs
            if share:
                return share
        elif self._batch_size % (parts * pairs) == 0:
            return self._batch_size // parts
        raise DataProblem(
            "train.batch_size",
            self._batch_size,
            f"{self.sizes['train']} training examples cannot be divided into such batches for {self._accumulate}"
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


def _rank() -> tuple[int, int]:
    """This process and the number of processes of a distributed run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _fits_memory(source: FileSource, data: Any) -> bool:
    memory = getattr(data, "memory", False)
    if memory is None:
        return data.image_size <= _SMALL_IMAGE and 3 * data.image_size**2 * len(source.places) <= MEMORY_BYTES
    return bool(memory)


def _in_memory(source: FileSource, data: Any) -> ArraySource:
    """Decode every image to image_size once."""
    transform = evaluation_transform(data)
    images = torch.empty(len(source.places), 3, data.image_size, data.image_size, dtype=torch.uint8)
    for index in range(len(images)):
        images[index] = transform(source.open(index))
    return ArraySource(images, source.targets, source.class_names, source.splits, content=source.content)
