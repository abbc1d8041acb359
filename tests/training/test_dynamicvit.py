"""DynamicViT trained end to end: its recipe, its losses in the history, its backbone at rest and then slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import read_history

Run = Callable[..., dict[str, Any]]
METHOD = ("method=dynamicvit", "backbone.depth=4", "placement.layers=[1,2]")
RECIPE = (
    "recipe=dynamicvit",
    "init=dense",
    "init.epochs=1",
    "train.precision=32",
    "train.mixup=0",
    "train.cutmix=0",
    "train.augment=light",
)


def test_the_preset_trains_from_scratch_and_tells_its_ratio_loss(run: Run) -> None:
    result = run(*METHOD)
    assert result["status"] == "finished", result["error"]
    history = read_history({"folder": result["folder"]})
    assert all(0 < value < 1 for value in history["train/loss_ratio"])
    assert "train/loss_tokens" not in history
    # Of 16 patches floor(0.7 x 16) = 11, then floor(0.49 x 16) = 7 are kept, besides the class token.
    assert result["record"]["routing"]["kept_fraction"] == pytest.approx({1: 12 / 17, 2: 8 / 12})
    assert result["record"]["warnings"] == []


def test_the_recipe_holds_the_backbone_and_learns_from_where_it_started(run: Run) -> None:
    result = run(*METHOD, *RECIPE, "train.epochs=2", "train.backbone_freeze_epochs=2")
    assert result["status"] == "finished", result["error"]
    history = read_history({"folder": result["folder"]})
    assert {"train/loss_ratio", "train/loss_tokens"} <= set(history)
    dense = result["folder"].parent / result["record"]["init"]["source"]
    start, end = (load_file(RunFolder(folder).final) for folder in (dense, result["folder"]))
    assert all(torch.equal(start[name], end[name]) for name in start)
    routers = [name for name in end if name.startswith("router.")]
    assert set(end) == {*start, *routers}

    moved = run(*METHOD, *RECIPE, "train.epochs=2", "train.backbone_freeze_epochs=1")
    end = load_file(RunFolder(moved["folder"]).final)
    still = {name for name in start if torch.equal(start[name], end[name])}
    assert still == {"cls_token", "pos_embed"}


def test_a_loss_can_be_added_and_taken_away(run: Run) -> None:
    both = run(*METHOD, "losses=[ratio,z]", "train.epochs=1")
    history = read_history({"folder": both["folder"]})
    assert {"train/loss_ratio", "train/loss_z"} <= set(history)
    none = run(*METHOD, "losses=[]", "train.epochs=1")
    assert not [name for name in read_history({"folder": none["folder"]}) if name.startswith("train/loss_")]
    off = run(*METHOD, "losses.ratio.weight=0", "train.epochs=1")
    same = [load_file(RunFolder(result["folder"]).final) for result in (none, off)]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])


def test_tokens_are_learned_by_methods_that_remove_or_keep_them(run: Run) -> None:
    tokens = ("train.distill_tokens=mse", "train.epochs=1", "backbone.depth=4", "placement.layers=[1,2]")
    for method in ("method=evit", "method=amod"):
        placed = tokens if method == "method=evit" else tokens[:-1]
        result = run(method, *placed)
        assert result["status"] == "finished", result["error"]
        assert read_history({"folder": result["folder"]})["train/loss_tokens"][0] > 0
