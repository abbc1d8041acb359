"""The images of one run: splits, loaders and facts for the record. Their order is that of `data.epochs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from routing_lab.data.batches import Batch, BatchBuilder, evaluation_transform
from routing_lab.data.epochs import SeededData
from routing_lab.data.layout import SPLITS, DataProblem
from routing_lab.data.sources import MEMORY_BYTES, ArraySource, FileSource, Source, build_source

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


class VisionData(SeededData[Batch]):
    """Loaders for `train`, `val` and `test`, and what a record says about the data.

    Batches are (images float32 [B, C, H, W], targets int64 [B], indices int64 [B]); with mixup or cutmix the targets of
    training batches are float32 [B, classes]. Indices number the examples of the whole set, over all splits.

    Attributes:
        num_classes, class_names: the classes, in the order of the targets.
        split: ascending indices int64 of `train`, `val` and `test`.
        sizes: number of examples of each split.
        targets: class of every example of the set, int64 [N].
        masks: bool [N, grid, grid], the patches that decide the class; only for `data=planted`, otherwise None. Of
            images that are evaluated `informative` knows more.
    """

    def __init__(self, source: Source, data: Any, train: Any, seed: int, workers: int = 0) -> None:
        super().__init__(
            {name: torch.from_numpy(source.splits[name]) for name in SPLITS},
            (BatchBuilder(source, data, train, seed), BatchBuilder(source, data)),
            train,
            seed,
            workers,
        )
        self.class_names = source.class_names
        self.num_classes = len(source.class_names)
        self.targets = torch.from_numpy(source.targets)
        self.masks = source.masks
        self._source = source
        self._data = data

    @property
    def fingerprint(self) -> str:
        """SHA-256 of content, classes and splits, the same on every machine and wherever the data lies.

        Files enter with relative name, size and, up to 256 MiB in all, their content.
        """
        return self._source.fingerprint

    def informative(self, index: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """[B, rows * columns] bool: the patches that matter of examples [B] as they are evaluated.

        Of planted images those that decide the class, of `data=pets` those at least half of which is the animal's, its
        outline included. None: the data set does not know.

        Raises:
            ValueError: a trimap that cannot be read.
        """
        if self.masks is not None:
            return self.masks[index].flatten(1)
        source = self._source
        if isinstance(source, ArraySource) or source.trimaps is None:
            return None
        transform = evaluation_transform(self._data, "nearest")
        whole = torch.stack([transform(source.foreground(number)) for number in index.tolist()])
        return (adaptive_avg_pool2d(whole / 255, grid) >= 0.5).flatten(1)


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
