"""The head in closed form: as scikit-learn predicts, nothing else moved, and what a dense run gives to its arms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import RidgeClassifierCV

from routing_lab.assembly import build_model
from routing_lab.config import ConfigError, Loaded
from routing_lab.runs.folder import RunFolder
from routing_lab.tasks.classification import Classification
from routing_lab.training.readout import STRENGTHS, solve_head

Run = Callable[..., dict[str, Any]]


def weights(cell: Callable[..., Loaded], path: Path) -> Path:
    torch.manual_seed(3)
    save_file(build_model(cell("router=dense").config, 10).backbone.state_dict(), path)
    return path


def test_predicts_as_the_regression_does_and_moves_nothing_else(cell: Callable[..., Loaded]) -> None:
    config = cell("router=amod").config
    data, model = Classification.build_data(config), build_model(config, 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    solved = solve_head(model.train(), data, 128)
    assert model.training
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"head.weight", "head.bias"}

    def features(split: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        images, targets, index = data.examples(data.split[split])
        seen: list[torch.Tensor] = []
        handle = model.backbone.head.register_forward_pre_hook(lambda _, x: seen.append(x[0].double()))
        with torch.no_grad():
            logits = model.eval()(images, sample_ids=index)
        handle.remove()
        return seen[0], targets, logits

    x, y, _ = features("train")
    reference = RidgeClassifierCV(alphas=STRENGTHS).fit(x.numpy(), y.numpy())
    test, targets, logits = features("test")
    assert (logits.argmax(dim=1).numpy() == reference.predict(test.numpy())).mean() > 0.995
    assert (logits.argmax(dim=1) == targets).float().mean() > 0.3  # chance is 0.1
    assert solved == {"penalty": reference.alpha_, "examples": len(y)}


def test_arms_start_from_the_dense_run_with_its_solved_head(
    run: Run, cell: Callable[..., Loaded], tmp_path: Path
) -> None:
    path = weights(cell, tmp_path / "weights.safetensors")
    words = ("train.epochs=0", f"init.path={path}", "init.readout=true")
    dense = run("router=dense", "init=checkpoint", *words)
    arm = run("router=amod", "init=dense", "init.epochs=0", *words)
    every = run("router=amod", "capacity.fraction=1.0", "init=dense", "init.epochs=0", *words)
    assert arm["record"]["init"]["source"] == dense["folder"].name
    assert dense["record"]["init"]["readout"]["examples"] == dense["record"]["data"]["sizes"]["train"]
    head = [load_file(RunFolder(one["folder"]).final)["head.weight"] for one in (dense, arm)]
    assert torch.equal(*head)
    metrics = [one["record"]["metrics"]["test/acc"] for one in (dense, arm, every)]
    assert metrics[0] == metrics[2] != metrics[1]
    assert metrics[0] > 0.3


def test_what_cannot_be_solved_is_refused(cell: Callable[..., Loaded], run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"init\.readout = true: a dense run from random weights learns its head"):
        cell("init=dense", "init.epochs=1", "init.readout=true")
    model = build_model(cell("router=amod").config, 0)
    with pytest.raises(ValueError, match="does not come from one linear head"):
        solve_head(model, None, 1)
