"""Splits, order, augmentation and loaders of the data module."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from routing_lab.data import VisionData, build_data, epochs
from routing_lab.data.batches import seeded
from routing_lab.data.layout import DataProblem

Build = Callable[..., VisionData]


@pytest.fixture
def build(node: Callable[..., Any], recipe: Callable[..., Any], runtime: Callable[..., Any]) -> Build:
    def make(
        name: str = "digits", values: dict[str, Any] | None = None, seed: int = 0, workers: int = 0, **train: Any
    ) -> VisionData:
        return build_data(node(name, **(values or {})), recipe(**train), seed, runtime(workers))

    return make


def by_index(data: VisionData, epoch: int = 0) -> dict[int, Tensor]:
    """Training images of an epoch by index."""
    data.set_epoch(epoch)
    return {
        int(i): image for images, _, index in data.train_dataloader() for i, image in zip(index, images, strict=True)
    }


def order(data: VisionData, epoch: int = 0) -> list[int]:
    data.set_epoch(epoch)
    return torch.cat([index for _, _, index in data.train_dataloader()]).tolist()


def generators() -> tuple[Any, ...]:
    state = np.random.get_state()  # noqa: NPY002
    return random.getstate(), state[1].tolist(), state[2], torch.get_rng_state().tolist()


def test_digits_are_split_once_and_for_all(build: Build) -> None:
    data, other = build(seed=0), build(seed=7)
    assert data.sizes == {"train": 1257, "val": 180, "test": 360}
    assert (data.num_classes, data.class_names) == (10, tuple("0123456789"))
    assert all(torch.equal(data.split[name], other.split[name]) for name in data.sizes)
    assert torch.cat(list(data.split.values())).sort().values.tolist() == list(range(1797))
    for indices in data.split.values():
        share = data.targets[indices].bincount(minlength=10) / len(indices)
        torch.testing.assert_close(share, data.targets.bincount() / 1797, atol=0.01, rtol=0)
    assert data.fingerprint == other.fingerprint
    assert data.fingerprint == "05e28346ee969d657b992fcc32db30e25123f9665bef424c1a0f0458e1c47b45"


def test_batches_have_the_promised_types(build: Build) -> None:
    data = build()
    images, targets, index = next(iter(data.train_dataloader()))
    assert (images.shape, images.dtype) == ((64, 3, 8, 8), torch.float32)
    assert (targets.shape, targets.dtype) == ((64,), torch.int64)
    assert (index.shape, index.dtype) == ((64,), torch.int64)
    assert torch.equal(targets, data.targets[index])
    assert set(index.tolist()) <= set(data.split["train"].tolist())
    everything = data.examples(data.split["train"])[0]
    assert abs(everything.mean()) < 0.05
    assert abs(everything.std() - 1) < 0.05


def test_size_and_channels_follow_the_configuration(build: Build) -> None:
    small = build(values={"channels": 1}).examples(torch.arange(4))[0]
    large = build(values={"image_size": 32}).examples(torch.arange(4))[0]
    assert small.shape == (4, 1, 8, 8)
    assert large.shape == (4, 3, 32, 32)
    assert torch.equal(large[:, 0], large[:, 2])
    assert large.amax() <= (1 - 0.305) / 0.376 + 1e-5


def test_an_epoch_has_whole_batches_in_its_own_order(build: Build) -> None:
    data = build()
    assert (data.steps_per_epoch, len(data.train_dataloader())) == (19, 19)
    first, second = order(data, 0), order(data, 1)
    assert len(first) == len(set(first)) == 19 * 64
    assert first != second
    assert order(build(), 0) == first
    assert order(build(seed=1), 0) != first


def test_a_split_smaller_than_a_batch_is_one_batch(build: Build) -> None:
    data = build(batch_size=5000, accumulate=2)
    assert data.steps_per_epoch == 1
    assert [len(index) for _, _, index in data.train_dataloader()] == [628, 628]


@pytest.mark.parametrize("augment", ["light", "standard", "randaugment"])
def test_augmentation_depends_on_seed_epoch_and_index_alone(build: Build, augment: str) -> None:
    settings: dict[str, Any] = {"augment": augment, "erasing": 0.5}
    plain = by_index(build(**settings))
    random.seed(9)
    np.random.seed(9)  # noqa: NPY002
    torch.manual_seed(9)
    before = generators()
    again = by_index(build(batch_size=31, workers=0, **settings))
    assert generators() == before
    common = plain.keys() & again.keys()
    assert len(common) > 1100
    assert all(torch.equal(plain[i], again[i]) for i in common)
    for other in (by_index(build(**settings), epoch=1), by_index(build(seed=1, **settings))):
        same = [torch.equal(plain[i], other[i]) for i in plain.keys() & other.keys()]
        assert sum(same) < len(same) / 5


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_change_neither_batches_nor_generators(build: Build) -> None:
    here, there = (
        build(augment="randaugment", erasing=0.5, mixup=0.2, batch_size=400, workers=workers) for workers in (0, 2)
    )
    loaders = here.train_dataloader(), there.train_dataloader()
    for epoch in (0, 3):
        for data in (here, there):
            data.set_epoch(epoch)
        before = generators()
        pairs = list(zip(*loaders, strict=True))
        assert generators() == before
        assert len(pairs) == len(loaders[1]) == 3
        for one, two in pairs:
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_light_augmentation_shifts_with_zeros_and_mirrors_when_it_may(build: Build) -> None:
    values = {"mean": [0.0], "std": [1.0], "channels": 1}
    plain = by_index(build(values=values))
    shifted = by_index(build(values=values, augment="light"))
    offsets = []
    for index, image in shifted.items():
        padded = torch.nn.functional.pad(plain[index][0], (1, 1, 1, 1))
        found = [(y, x) for y in range(3) for x in range(3) if torch.equal(padded[y : y + 8, x : x + 8], image[0])]
        assert found
        offsets.append(found[0])
    assert len(set(offsets)) == 9
    mirrored = by_index(build(values={**values, "flip": True, "shift": 0.0}, augment="light"))
    turned = [not torch.equal(image, plain[i]) for i, image in mirrored.items()]
    assert all(torch.equal(image, plain[i]) or torch.equal(image.flip(2), plain[i]) for i, image in mirrored.items())
    assert 0.4 < np.mean(turned) < 0.6


def test_erasing_sets_a_rectangle_of_the_stated_size_to_the_mean(build: Build) -> None:
    values = {"image_size": 32, "channels": 1, "mean": [0.5]}
    plain, erased = by_index(build(values=values)), by_index(build(values=values, erasing=0.25))
    areas = []
    for index, image in erased.items():
        hole = (image[0] == 0) & (plain[index][0] != 0)
        if hole.any():
            assert torch.equal(image[0][~hole], plain[index][0][~hole])
            rows, columns = hole.any(1).nonzero(), hole.any(0).nonzero()
            assert hole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].float().mean() > 0.9
            areas.append(hole.float().mean().item())
    assert 0.2 < len(areas) / len(erased) < 0.3
    assert 0.01 < min(areas) < 0.06
    assert 0.28 < max(areas) < 0.36


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixing_gives_soft_targets_from_its_own_stream(build: Build, kind: str) -> None:
    data, plain = build(**{kind: 1.0}), build()
    for (images, targets, index), (_, labels, same) in zip(
        data.train_dataloader(), plain.train_dataloader(), strict=True
    ):
        assert torch.equal(index, same)
        assert (targets.shape, targets.dtype) == ((64, 10), torch.float32)
        torch.testing.assert_close(targets.sum(1), torch.ones(64))
        assert ((targets.gather(1, labels[:, None]) > 0).all()) or kind == "cutmix"
        assert images.shape == (64, 3, 8, 8)
    again = build(**{kind: 1.0})
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    for one, two in zip(data.train_dataloader(), again.train_dataloader(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(torch.equal(targets, data.targets[index]) for _, targets, index in data.val_dataloader())
    assert torch.equal(
        torch.stack([t for _, t, _ in build(mixup=0.2, mixup_prob=0.0).train_dataloader()]).amax(2), torch.ones(19, 64)
    )


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_evaluation_sees_every_example_once_in_a_mixed_order(build: Build, split: Any) -> None:
    data = build(augment="light", erasing=1.0, mixup=1.0)
    batches = list(data.loader(split))
    index = torch.cat([batch[2] for batch in batches])
    assert index.sort().values.tolist() == data.split[split].tolist()
    assert index.tolist() != data.split[split].tolist()
    assert max(len(batch[2]) for batch in batches) <= 100
    assert torch.equal(batches[0][0], build(seed=3).examples(batches[0][2])[0])
    assert len(batches) == len(data.loader(split))


def processes(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[int]:
    for rank in range(number):
        monkeypatch.setattr(epochs, "_rank", lambda rank=rank: (rank, number))
        yield rank


@pytest.mark.parametrize("accumulate", [1, 2])
def test_processes_share_the_steps_of_one(build: Build, monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    data = build(accumulate=accumulate, augment="light")
    alone = list(data.train_dataloader())
    shares = [list(data.train_dataloader()) for _ in processes(monkeypatch, 2)]
    assert len(alone) == 19 * accumulate
    for whole, *parts in zip(alone, *shares, strict=True):
        assert [len(part[2]) for part in parts] == [32 // accumulate] * 2
        assert all(torch.equal(whole[i], torch.cat([part[i] for part in parts])) for i in range(3))


@pytest.mark.parametrize("number", [2, 3, 7])
def test_processes_evaluate_every_example_once(build: Build, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    data = build(eval_batch_size=13)
    shares = [list(data.test_dataloader()) for _ in processes(monkeypatch, number)]
    assert len({len(share) for share in shares}) == 1
    index = torch.cat([batch[2] for share in shares for batch in share])
    assert index.sort().values.tolist() == data.split["test"].tolist()


def test_batches_that_cannot_be_divided_are_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build(batch_size=63)
    for _ in processes(monkeypatch, 2):
        with pytest.raises(DataProblem, match=r"train.batch_size=63: .* multiple of 2"):
            data.train_dataloader()
    for _ in processes(monkeypatch, 1):
        with pytest.raises(DataProblem, match="pairs to mix"):
            build(batch_size=63, cutmix=1.0).train_dataloader()


def test_seeded_puts_the_generators_back_after_an_error() -> None:
    before = generators()
    with pytest.raises(ZeroDivisionError), seeded(3):
        torch.rand(1 // 0)
    assert generators() == before


def test_other_sets_do_not_know_which_patches_matter(build: Build) -> None:
    assert build().informative(torch.arange(2), (2, 2)) is None


class Recorder(pl.LightningModule):
    """Writes down the epoch and the examples of every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[int, list[int]] = {}

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.seen.setdefault(self.current_epoch, []).extend(batch[2].tolist())
        return self.weight * batch[0].sum()

    def validation_step(self, batch: Any, _: int) -> None:
        assert batch[1].dtype == torch.int64

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
def test_a_trainer_sets_the_epoch_also_when_it_resumes(build: Build, tmp_path: Path) -> None:
    def fit(epochs: int, checkpoint: Path | None = None) -> tuple[Recorder, pl.Trainer]:
        model = Recorder()
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, datamodule=build(batch_size=600), ckpt_path=checkpoint)
        return model, trainer

    whole, _ = fit(3)
    assert whole.seen == {epoch: order(build(batch_size=600), epoch) for epoch in range(3)}
    first, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    rest, _ = fit(3, tmp_path / "last.ckpt")
    assert first.seen | rest.seen == whole.seen
    assert sorted(rest.seen) == [1, 2]
