"""Dynamics of training: hand cases, rows of the history, the same when resumed, and nothing where not asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.routing.tiny import images, routed

from routing_lab.config import Loaded
from routing_lab.evidence import figures
from routing_lab.evidence.arms import group_arms
from routing_lab.routing.measures import jaccard
from routing_lab.routing.trace import LayerTrace
from routing_lab.runs.records import read_history
from routing_lab.training.dynamics import is_spike, spread, undecided


def layer(scores: list[float], logits: list[float] | None = None) -> LayerTrace:
    """One example, of which the first token is no patch."""
    tokens = len(scores)
    return LayerTrace(
        torch.tensor([scores]),
        kept=torch.tensor([[0]]),
        counts=torch.tensor([1]),
        tokens=tokens,
        origin=torch.arange(-1, tokens - 1)[None],
        logits=None if logits is None else torch.tensor(logits)[None, :, None],
    )


def test_spread_and_indecision_of_hand_made_scores() -> None:
    assert spread(layer([9.0, 1.0, 3.0])).item() == 1
    even, certain = layer([9.0, 0.2, 0.2, 0.2]), layer([9.0, 0.0, 1.0, 0.0])
    assert undecided(even).item() == pytest.approx(1)
    assert undecided(certain).item() == pytest.approx(0)
    assert math.isnan(undecided(layer([0.0, -1.0, 1.0])).item())
    assert undecided(layer([9.0, 0.0, 0.0], [5.0, 0.0, 0.0])).item() == pytest.approx(1)
    assert undecided(layer([9.0, 0.0, 0.0], [5.0, 60.0, -60.0])).item() == pytest.approx(0)
    half = undecided(layer([9.0, 0.0, 0.0], [5.0, 0.0, 90.0])).item()
    assert half == pytest.approx(0.5)
    padded = replace(even, valid=torch.tensor([[True, True, True, False]]))
    assert undecided(padded).item() == pytest.approx(1)


def test_overlap_of_hand_made_choices() -> None:
    before = torch.tensor([[[1, 1, 0, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 0]]]).bool()
    now = torch.tensor([[[1, 0, 1, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 0]]]).bool()
    assert jaccard(before, now).tolist() == [[pytest.approx(1 / 3)], [1], [1]]


def test_a_leap_of_the_loss_is_a_spike_and_noise_is_none() -> None:
    calm = [1.0, 1.1, 0.9, 1.05] * 8
    assert is_spike(2.0, calm)
    assert not is_spike(1.15, calm)
    assert not is_spike(0.1, calm)
    assert not is_spike(9.0, calm[:10])


def test_scores_of_a_model_are_read_as_they_are() -> None:
    with torch.no_grad():
        _, attention = routed(["router=amod"])(images(), return_trace=True)
        _, learned = routed(["router=linear"])(images(), return_trace=True)
    for trace in (attention, learned):
        found = undecided(trace[1])
        assert found.shape == (3,)
        assert ((found > 0) & (found <= 1)).all()


ASKED = (
    "train.dynamics=48",
    "train.epochs=3",
    "train.batch_size=64",
    "data=planted",
    "data.num_train=640",
    "data.num_val=96",
    "data.num_test=32",
    "placement=list",
    "placement.layers=[0,1]",
    "router=linear",
)


def test_every_epoch_has_its_dynamics_and_a_resumed_run_the_same(
    cell: Callable[..., Loaded], run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routing_lab.training import callbacks

    whole = run(*ASKED)
    history = read_history(whole["record"] | {"folder": whole["folder"]})
    found = {key.removeprefix("dynamics/") for key in history if key.startswith("dynamics/")}
    named = {"dead", "grad_norm", "grad_norm_max", "spikes", "overlap", "spread", "entropy"}
    assert found == named | {f"{name}/{layer}" for name in ("overlap", "spread", "entropy") for layer in (0, 1)}
    assert math.isnan(history["dynamics/overlap"][0])
    assert all(0 <= value <= 1 for value in history["dynamics/overlap"][1:])
    norms = zip(history["dynamics/grad_norm"], history["dynamics/grad_norm_max"], strict=True)
    assert all(0 < mean <= most for mean, most in norms)
    assert all(0 <= value <= 1 for key in ("dead", "entropy") for value in history[f"dynamics/{key}"])

    drawn = figures.curves(group_arms([whole["record"] | {"folder": whole["folder"]}]), "dynamics/overlap", "overlap")
    assert drawn is not None

    write = callbacks.RunFolder.write_history

    def interrupted(self: Any, rows: Any) -> None:
        write(self, rows)
        if len(rows) == 2:
            raise RuntimeError("pulled the plug")

    monkeypatch.setattr(callbacks.RunFolder, "write_history", interrupted)
    assert run(*ASKED, runs=tmp_path / "other")["status"] == "failed"
    monkeypatch.setattr(callbacks.RunFolder, "write_history", write)
    resumed = run(*ASKED, runs=tmp_path / "other")
    again = read_history(resumed["record"] | {"folder": resumed["folder"]})
    for key, values in history.items():
        if key != "seconds":
            assert again[key] == pytest.approx(values, nan_ok=True, rel=0, abs=0), key


def test_it_changes_nothing_and_a_run_without_it_is_the_run_it_was(
    cell: Callable[..., Loaded], run: Callable[..., dict[str, Any]]
) -> None:
    from routing_lab.config import identity

    plain, watched = run("train.epochs=1"), run("train.epochs=1", "train.dynamics=8")
    assert plain["record"]["metrics"] == watched["record"]["metrics"]
    assert plain["folder"] != watched["folder"]
    resolved = dict(cell().resolved)
    assert resolved["train"]["dynamics"] == 0
    older = resolved | {"train": {key: value for key, value in resolved["train"].items() if key != "dynamics"}}
    assert identity(older) == identity(resolved)
    history = read_history(plain["record"] | {"folder": plain["folder"]})
    assert not any(key.startswith("dynamics/") for key in history)
