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
from routing_lab.data.planted import Planted, patterns, plant

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
    assert planted.masks is not None
    some = planted.split["test"][5:7]
    found = planted.informative(some, (8, 8))
    assert found is not None
    assert torch.equal(found, planted.masks[some].flatten(1))
    assert found.dtype == torch.bool
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


CHAIN = {**VALUES, "form": "chain", "num_informative": 3, "num_distractors": 6, "noise": 0.0, "num_classes": 5}


def halves(made: Planted) -> tuple[np.ndarray, np.ndarray]:
    """Key and pointer of every patch, as the bytes of its two halves: [N, 64] each."""
    content = patches(torch.from_numpy(made.images).float())
    content = content.byte().numpy()
    first, second = (np.ascontiguousarray(part).view("V24")[..., 0] for part in np.split(content, 2, axis=2))
    return first, second


def test_the_chain_alone_leads_from_its_beginning_to_the_class(node: Callable[..., Any]) -> None:
    """Followed by keys and pointers: three patches, those of the mask, and their end tells the class."""
    made = plant(node("planted", **CHAIN))
    keys, pointers = halves(made)
    masks = made.masks.reshape(len(made.masks), -1)
    # The one key that every image has at exactly one patch of its mask begins the chain.
    shared = set.intersection(*({key.tobytes() for key in row[mask]} for row, mask in zip(keys, masks, strict=True)))
    ends: dict[bytes, set[int]] = {}
    for row, pointer, mask, target in zip(keys, pointers, masks, made.targets, strict=True):
        place = next(index for index in np.flatnonzero(mask) if row[index].tobytes() in shared)
        visited = [place]
        while (found := np.flatnonzero(row == pointer[place])).size:
            assert found.size == 1
            place = int(found[0])
            visited.append(place)
        assert sorted(visited) == np.flatnonzero(mask).tolist()
        ends.setdefault(pointer[place].tobytes(), set()).add(int(target))
    assert sorted(map(sorted, ends.values())) == [[0], [1], [2], [3], [4]]


def test_no_patch_of_a_chain_tells_the_class_by_itself(node: Callable[..., Any]) -> None:
    """Every class occurs at the ends of distracting chains as often, whatever the class of the image is."""
    made = plant(node("planted", **CHAIN))
    _, pointers = halves(made)
    masks = made.masks.reshape(len(made.masks), -1)
    blank = pointers[0][[key.tobytes() == bytes([128] * 24) for key in pointers[0]]][0]
    others = (pointers != blank) & ~masks
    assert (others.sum(1) == 6).all()
    names, codes = np.unique(pointers[others], return_inverse=True)
    table = np.zeros((5, len(names)))
    np.add.at(table, (np.repeat(made.targets, 6), codes), 1)
    shares = table / table.sum(1, keepdims=True)
    assert np.abs(shares - shares.mean(0)).max() < 0.05


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_informative": 1}, "a chain needs at least 2 patches"),
        ({"num_distractors": 5}, "expected a multiple of 2"),
        (
            {"num_distractors": 6, "num_classes": 60, "patch_size": 2, "image_size": 16},
            "half a patch of 6 values has 64",
        ),
    ],
)
def test_a_chain_that_cannot_be_planted_is_refused(
    node: Callable[..., Any], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        node("planted", **{**CHAIN, **values})
