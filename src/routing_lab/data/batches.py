"""Batches of images: fetched, augmented, mixed and normalised as a function of (seed, epoch, index) and nothing else.

The order of an epoch comes from the stream (seed, "data", epoch), the augmentation of an example from
(seed, "augmentation", epoch, index), the mixing of a batch from (seed, "mixing", epoch, step, rank). No generator
state is kept, so resuming at an epoch needs none; workers, batch size and the global generators change nothing.

Two ways lead to a batch. Images in memory are indexed, shifted and mirrored as one tensor, which costs microseconds.
Files, and images under timm's augmentations, go through PIL one by one; timm draws from the global generators of
Python, NumPy and torch, which are seeded for each image and put back afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import Mixup, create_transform, rand_augment_transform
from timm.data.transforms import str_to_pil_interp
from torch import Tensor
from torchvision.transforms.functional import rgb_to_grayscale

from routing_lab.data.sources import ArraySource, Source
from routing_lab.streams import stream_seed

Batch = tuple[Tensor, Tensor, Tensor]
"""Images float32 [B, C, H, W], targets int64 [B] or float32 [B, classes] when mixed, indices int64 [B]."""

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
"""What `train.augment=randaugment` asks of timm: two operations of magnitude 9 with noise 0.5, as DeiT trains."""

_ERASED_AREA = (0.02, 1 / 3)  # Zhong et al., Random Erasing Data Augmentation (2020), table 1
_ERASED_LOG_ASPECT = (float(np.log(0.3)), float(np.log(1 / 0.3)))


BatchT = TypeVar("BatchT", covariant=True)


class Request(NamedTuple):
    """Which examples make a batch, and when: the seeds of augmentation and mixing follow from it."""

    indices: Tensor
    epoch: int = 0
    step: int = 0
    rank: int = 0


class Builder(Protocol[BatchT]):
    """Makes the batch of a request."""

    @property
    def is_per_image(self) -> bool:
        """Whether examples are made one by one, which is what worker processes are for."""

    def __call__(self, request: Request) -> BatchT: ...


class BatchBuilder:
    """Makes a batch from a request. `train=None` gives the evaluation view: no augmentation, no mixing.

    Args:
        source: where images come from.
        data: the `data` node.
        train: the `train` node (`augment`, `erasing`, `mixup`, `cutmix`, `mixup_prob` are read).
        seed: the run's seed.
    """

    def __init__(self, source: Source, data: Any, train: Any = None, seed: int = 0) -> None:
        self.source = source
        self.seed = seed
        self.size = data.image_size
        self.channels = data.channels
        self.interpolation = data.interpolation
        self.flip, self.shift = data.flip, data.shift
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
        self._scale, self._offset = 1 / (255 * std), -mean / std
        self._targets = torch.from_numpy(source.targets)

        augment = "none" if train is None else train.augment
        self.erasing = 0.0 if train is None else train.erasing
        self.moves = isinstance(source, ArraySource) and augment != "none"
        self.transform = _transform(source, data, augment)
        self.mixup: Mixup | None = None
        if train is not None and (train.mixup or train.cutmix):
            self.mixup = Mixup(
                mixup_alpha=train.mixup,
                cutmix_alpha=train.cutmix,
                prob=train.mixup_prob,
                label_smoothing=0.0,
                num_classes=len(source.class_names),
            )
        self._draws: tuple[int, Tensor] | None = None

    @property
    def is_per_image(self) -> bool:
        """Whether images pass through PIL one by one, which is what worker processes are for."""
        return self.transform is not None

    def __call__(self, request: Request) -> Batch:
        """The batch of a request."""
        indices = torch.as_tensor(request.indices, dtype=torch.int64)
        images = self._finish(self._fetch(indices, request.epoch), indices, request.epoch)
        targets = self._targets[indices]
        if self.mixup is not None:
            with seeded(stream_seed(self.seed, "mixing", request.epoch, request.step, request.rank)):
                images, targets = self.mixup(images, targets)
        return images, targets, indices

    __getitems__ = __call__  # a DataLoader's worker hands over what the batch sampler yields

    def _fetch(self, indices: Tensor, epoch: int) -> Tensor:
        """Pixels uint8 [B, C, h, w], augmented except for erasing."""
        if self.transform is not None:
            pixels = torch.stack([self._one(int(index), epoch) for index in indices])
        else:
            assert isinstance(self.source, ArraySource)
            pixels = self.source.images[indices]
        return self._moved(pixels, self._uniform(epoch)[indices]) if self.moves else pixels

    def _one(self, index: int, epoch: int) -> Tensor:
        """One image, [C, h, w] uint8, through timm's transform."""
        assert self.transform is not None
        with seeded(stream_seed(self.seed, "augmentation", epoch, index)):
            if not isinstance(self.source, ArraySource):
                return self.transform(self.source.open(index))
            pixels = self.source.images[index]
            image = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy())
            return self.transform(image)[: len(pixels)]

    def _uniform(self, epoch: int) -> Tensor:
        """Uniform numbers [N, 8] in [0, 1): a row for every example of the set in this epoch."""
        if self._draws is None or self._draws[0] != epoch:
            generator = torch.Generator().manual_seed(stream_seed(self.seed, "augmentation", epoch))
            self._draws = epoch, torch.rand(len(self._targets), 8, generator=generator)
        return self._draws[1]

    def _moved(self, pixels: Tensor, uniform: Tensor) -> Tensor:
        """Shift every image by up to `shift` of its side, filling with zeros, and mirror every second one."""
        reach = round(self.shift * pixels.shape[-1])
        if reach:
            top, left = (uniform[:, :2].T * (2 * reach + 1)).long()
            windows = F.pad(pixels, (reach,) * 4).unfold(2, pixels.shape[2], 1).unfold(3, pixels.shape[3], 1)
            pixels = windows[torch.arange(len(pixels)), :, top, left]
        if self.flip:
            pixels = torch.where((uniform[:, 2] < 0.5).view(-1, 1, 1, 1), pixels.flip(3), pixels)
        return pixels

    def _finish(self, pixels: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Pixels to the float images the backbone takes."""
        if pixels.shape[1] > self.channels:
            pixels = rgb_to_grayscale(pixels)
        images = pixels.float()
        if images.shape[-2:] != (self.size, self.size):
            images = F.interpolate(images, (self.size, self.size), mode=self.interpolation, antialias=True).clamp_(
                0, 255
            )
        # A grey image of a colour backbone is repeated here, by broadcasting.
        images = (images * self._scale + self._offset).expand(-1, self.channels, -1, -1).contiguous()
        if self.erasing:
            _erase(images, self._uniform(epoch)[indices], self.erasing)
        return images


class Loader(Generic[BatchT]):
    """An iterable of batches with a length. Plain, so that Lightning neither wraps nor replaces its sampling.

    Args:
        build: makes a batch from a request.
        requests: called at the start of every pass; the requests of that pass, in order.
        length: number of batches of a pass.
        workers: processes that make batches ahead of time; 0 makes them here. Images in memory that pass through no
            PIL are always made here, which is faster than handing them over.
    """

    def __init__(
        self, build: Builder[BatchT], requests: Callable[[], Sequence[Request]], length: int, workers: int = 0
    ) -> None:
        self._build = build
        self._requests = requests
        self._length = length
        self._processes: Any = None
        if workers and build.is_per_image:
            self._processes = torch.utils.data.DataLoader(
                build,  # type: ignore[arg-type]
                batch_sampler=_Requests(requests, length),  # type: ignore[arg-type]
                num_workers=workers,
                collate_fn=_unchanged,
                persistent_workers=True,
                # The loader draws a seed for its workers: from this generator, not from the global one.
                generator=torch.Generator(),
            )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[BatchT]:
        if self._processes is not None:
            yield from self._processes
        else:
            for request in self._requests():
                yield self._build(request)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of Python, NumPy and torch, and put their states back afterwards."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(pytorch)


class _Requests:
    """A batch sampler that asks for the requests of the current epoch whenever it is iterated."""

    def __init__(self, requests: Callable[[], Sequence[Request]], length: int) -> None:
        self._requests = requests
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests())


def _transform(source: Source, data: Any, augment: str) -> Callable[[Image.Image], Tensor] | None:
    """PIL RGB -> uint8 [3, h, w] by timm; None where images in memory need no PIL."""
    in_memory = isinstance(source, ArraySource)
    if augment == "none" or (augment == "light" and in_memory):
        return None if in_memory else evaluation_transform(data)
    size = source.images.shape[-1] if isinstance(source, ArraySource) else data.image_size
    # standard: timm's ImageNet defaults. light: mild crops only. randaugment: timm switches colour jitter off as well.
    options: dict[str, Any] = {"standard": {}, "randaugment": {"color_jitter": None}}.get(
        augment, {"scale": (0.64, 1.0), "ratio": (0.9, 1 / 0.9), "color_jitter": None}
    )
    crop, colour, final = create_transform(
        size,
        is_training=True,
        hflip=0.5 if data.flip else 0.0,
        interpolation=data.interpolation,
        normalize=False,
        separate=True,
        **options,
    )
    if augment == "randaugment":
        mean = data.mean * (3 // len(data.mean))
        colour = rand_augment_transform(
            RAND_AUGMENT,
            {
                "translate_const": int(size * 0.45),
                "img_mean": tuple(min(255, round(255 * value)) for value in mean),
                "interpolation": str_to_pil_interp(data.interpolation),
                # At magnitude 10 exactly, timm asks Pillow to keep 0 bits, which Pillow may refuse.
                "magnitude_max": 9.99,
            },
        )
    # Images in memory are small and already of their final size: shifts stand in for timm's random crop.
    return _Chain([colour, final] if in_memory else [crop, colour, final])


def evaluation_transform(data: Any, interpolation: str | None = None) -> Callable[[Image.Image], Tensor]:
    """PIL image -> uint8 [C, image_size, image_size]: resize the shorter side, crop the centre.

    interpolation: as in `data.interpolation`, which None stands for, or `nearest`.
    """
    transform: Callable[[Image.Image], Tensor] = create_transform(
        data.image_size, interpolation=interpolation or data.interpolation, crop_pct=data.crop_pct, normalize=False
    )
    return transform


class _Chain:
    """Transforms one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self._transforms = transforms

    def __call__(self, image: Image.Image) -> Tensor:
        result: Any = image
        for transform in self._transforms:
            result = transform(result)
        assert isinstance(result, Tensor)
        return result


def _erase(images: Tensor, uniform: Tensor, probability: float) -> None:
    """Random erasing in place (Zhong et al., 2020): a rectangle of 2 % to 33 % of the image becomes the mean."""
    height, width = images.shape[-2:]
    # Columns 0 to 2 belong to the shift and the mirror.
    area = torch.lerp(torch.tensor(_ERASED_AREA[0]), torch.tensor(_ERASED_AREA[1]), uniform[:, 4]) * height * width
    low, high = _ERASED_LOG_ASPECT
    aspect = (low + (high - low) * uniform[:, 5]).exp()
    rows = (area * aspect).sqrt().round().clamp(max=height - 1)
    columns = (area / aspect).sqrt().round().clamp(max=width - 1)
    top, left = (uniform[:, 6] * (height - rows + 1)).floor(), (uniform[:, 7] * (width - columns + 1)).floor()
    y, x = torch.arange(height), torch.arange(width)
    inside_y = (y >= top[:, None]) & (y < (top + rows)[:, None])
    inside_x = (x >= left[:, None]) & (x < (left + columns)[:, None])
    inside = inside_y[:, :, None] & inside_x[:, None, :] & (uniform[:, 3] < probability)[:, None, None]
    images.masked_fill_(inside[:, None], 0.0)


def _unchanged(batch: Any) -> Any:
    return batch
