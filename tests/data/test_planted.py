"""Planted images: the mask is where the class is, and nowhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from routing_lab.data import VisionData, build_data
from routing_lab.data.layout import DataProblem
from routing_lab.data.planted import patterns, plant

VALUES = {"image_size": 32, "patch_size": 4, "num_train": 1024, "num_val": 64, "num_test": 512}


@pytest.fixture(scope="module")
def planted(node: Callable[..., Any], recipe: Callable[..., Any], runtime: Callable[..., Any]) -> VisionData:
    return build_data(node("planted", **VALUES), recipe(augment="light"), 0, runtime())


def patches(images: Tensor) -> Tensor:
    """[N, 3, 32, 32] -> [N, 64, 48]."""
    return torch.nn.functional.unfold(images, 4, stride=4).transpose(1, 2)


def accuracy(data: VisionData, masks: Tensor) -> float:
    """Test accuracy of the nearest class mean of what the masked patches contain on average."""
    features = {}
    for split in ("train", "test"):
        images, targets, index = data.examples(data.split[split])
        mask = masks[index].flatten(1)[..., None].float()
        features[split] = (patches(images) * mask).sum(1) / mask.sum(1), targets
    centroids = torch.stack([features["train"][0][features["train"][1] == c].mean(0) for c in range(data.num_classes)])
    found = torch.cdist(features["test"][0], centroids).argmin(1)
    return (found == features["test"][1]).float().mean().item()


def test_masked_patches_decide_the_class_and_random_ones_do_not(planted: VisionData) -> None:
    assert planted.masks is not None
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(len(planted.masks), 64, generator=generator).argsort(1)
    assert accuracy(planted, planted.masks) >= 0.99
    assert accuracy(planted, (ranks < 3).view(-1, 8, 8)) < 0.3
    assert accuracy(planted, ~planted.masks) < 0.25
    # One patch in two: (p + (1 - p)/2)^3 with p = 1/2 is 42 %.
    assert 0.25 < accuracy(planted, (ranks < 32).view(-1, 8, 8)) < 0.6


def test_every_informative_patch_is_needed(planted: VisionData) -> None:
    assert planted.masks is not None
    masks = planted.masks.clone().flatten(1)
    masks[torch.arange(len(masks)), masks.int().argmax(1)] = False
    assert 0.35 < accuracy(planted, masks.view_as(planted.masks)) < 0.65


def test_mask_is_given_for_every_example(planted: VisionData) -> None:
    mask = planted.mask(int(planted.split["test"][5]))
    assert (mask.shape, mask.dtype, int(mask.sum())) == ((8, 8), torch.bool, 3)
    assert planted.masks is not None
    assert planted.masks.flatten(1).sum(1).eq(3).all()
    share = planted.masks.float().mean(0) * 64 / 3
    assert 0.5 < share.min() < share.max() < 1.6
    assert planted.sizes == {"train": 1024, "val": 64, "test": 512}


def test_images_are_the_same_on_every_machine(node: Callable[..., Any]) -> None:
    made = plant(node("planted", num_train=100, num_val=1, num_test=1))
    digest = hashlib.sha256(made.images.tobytes() + made.masks.tobytes() + made.targets.astype("<i8").tobytes())
    assert digest.hexdigest() == "0050fe686ca5d077569655cc481fabea40a600bd32ec8197c534198e70c4f652"


def test_only_its_own_seed_changes_the_images(node: Callable[..., Any]) -> None:
    one, two, other = (plant(node("planted", **{**VALUES, "seed": seed})) for seed in (0, 0, 1))
    assert np.array_equal(one.images, two.images)
    assert np.array_equal(one.targets, other.targets)
    assert not np.array_equal(one.masks, other.masks)


def test_distractors_are_as_conspicuous_as_what_matters(node: Callable[..., Any]) -> None:
    made = plant(node("planted", **{**VALUES, "noise": 0.0, "num_distractors": 5}))
    blank = (patches(torch.from_numpy(made.images).float()) == 128).all(2).view(-1, 8, 8).numpy()
    assert ((~blank).sum((1, 2)) == 8).all()
    assert not blank[made.masks].any()
    assert set(np.unique(made.images)) == {80, 128, 176}


@pytest.mark.parametrize(("count", "values"), [(12, 48), (12, 4), (16, 4), (2000, 13), (60, 12)])
def test_patterns_are_different(count: int, values: int) -> None:
    made = patterns(count, values, 0)
    assert made.shape == (count, values)
    assert len(np.unique(made, axis=0)) == count
    assert set(np.unique(made)) == {-1, 1}
    if count < values:
        correlation = np.abs(made @ made.T - values * np.eye(count))
        assert correlation.max() <= values / 3


def test_augmentation_that_moves_patches_is_refused(
    node: Callable[..., Any], recipe: Callable[..., Any], runtime: Callable[..., Any]
) -> None:
    with pytest.raises(DataProblem, match=r"train.augment=randaugment: .* expected none or light"):
        build_data(node("planted"), recipe(augment="randaugment"), 0, runtime())
