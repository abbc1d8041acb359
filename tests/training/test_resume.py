"""Interrupted at any moment and started again, a run ends with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routing_lab.runs.folder import RunFolder
from routing_lab.tasks.classification import Classification
from routing_lab.training import callbacks

Run = Callable[..., dict[str, Any]]

EVERYTHING = (
    "router=random",
    "scaling=multiply",
    "capacity.warmup=0.5",
    "backbone.drop_path=0.2",
    "backbone.dropout=0.1",
    "train.epochs=4",
    "train.batch_size=256",
    "train.accumulate=2",
    "train.ema_decay=0.9",
    "train.selection=best",
    "train.mixup=0.8",
    "train.augment=light",
    "train.warmup_epochs=1",
)
"""A run that draws random numbers wherever it can."""

TIMES = ("seconds", "train_seconds", "train_images_per_second")


def traces(result: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on interruptions."""
    folder = RunFolder(result["folder"])
    rows = [line.rsplit(",", 1)[0] for line in folder.history.read_text().splitlines()]
    with np.load(folder.predictions) as arrays:
        predictions = {name: arrays[name].tobytes() for name in arrays}
    record = result["record"]
    return {
        "weights": folder.final.read_bytes(),
        "history": rows,
        "predictions": predictions,
        "metrics": record["metrics"],
        "routing": record["routing"],
        "cost": {key: value for key, value in record["cost"].items() if key not in TIMES},
    }


def stop_at(monkeypatch: pytest.MonkeyPatch, method: str, call: int, action: Callable[[], None]) -> None:
    """Do something at the beginning of the n-th call of a method of the task, once."""
    original = getattr(Classification, method)
    calls = 0

    def counting(self: Classification, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            action()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Classification, method, counting)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], dict[str, Any]]:
    """The uninterrupted run, trained once."""
    runs: Path = tmp_path_factory.mktemp("reference")
    kept: dict[str, Any] = {}

    def get(run: Run) -> dict[str, Any]:
        if not kept:
            kept.update(traces(run(*EVERYTHING, runs=runs)))
        return kept

    return get


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("training_step", 1),
        ("training_step", 17),
        ("validation_step", 2),
        ("configure_optimizers", 1),
        ("test_step", 1),
    ],
)
def test_a_signal_anywhere_and_the_same_command_again(
    run: Run,
    reference: Callable[[Run], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    method: str,
    call: int,
) -> None:
    expected = reference(run)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        stop_at(patch, method, call, send(number))
        stopped = run(*EVERYTHING)
    assert (stopped["status"], stopped["signal"]) == ("interrupted", number)
    assert (RunFolder(stopped["folder"]).read_record() or {})["status"] == "interrupted"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert traces(run(*EVERYTHING)) == expected


def test_a_failure_is_taken_up_again(
    run: Run, reference: Callable[[Run], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    expected = reference(run)
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 20, fail)
        assert run(*EVERYTHING)["error"] == "RuntimeError: out of memory"
    finished = run(*EVERYTHING)
    assert traces(finished) == expected
    assert not RunFolder(finished["folder"]).error_log.exists()


@pytest.mark.parametrize("damaged", [["last"], ["last", "previous"]], ids=["last", "both"])
def test_a_damaged_checkpoint_costs_time_not_the_run(
    run: Run, reference: Callable[[Run], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, damaged: list[str]
) -> None:
    expected = reference(run)
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 22, send(signal.SIGTERM))
        folder = RunFolder(run(*EVERYTHING)["folder"])
    for name in damaged:
        path: Path = getattr(folder, name)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    finished = run(*EVERYTHING)
    assert traces(finished) == expected
    warned = [line for line in finished["record"]["warnings"] if "cannot be read" in line]
    assert len(warned) == len(damaged)


def test_a_foreign_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    import torch

    folder = RunFolder(tmp_path / "cell")
    folder.prepare()
    torch.save({"callbacks": {"Keeper": {"run_id": "other"}}}, folder.last)
    path, warnings = callbacks.resumable(folder, "mine")
    assert path is None
    assert "other" in warnings[0]


def test_an_interrupted_dense_run_interrupts_the_arm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("router=amod", "init=dense")
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 12, send(signal.SIGINT))
        stopped = run(*overrides)
    assert (stopped["status"], stopped["signal"]) == ("interrupted", signal.SIGINT)
    assert run(*overrides)["status"] == "finished"
