from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.offline import read_offline
from tests.training.test_resume import send, stop_at

from routing_lab.config import ConfigError, load
from routing_lab.config.training import WandbConfig
from routing_lab.routing.trace import LayerTrace, Trace
from routing_lab.runs.records import new_record
from routing_lab.training import tracking

Run = Callable[..., dict[str, Any]]

OFFLINE = ("wandb.mode=offline", "train.epochs=3")


class FakeRun:
    """Stands in for a W&B run and notes what it is given."""

    def __init__(self, options: dict[str, Any], step: int = 0) -> None:
        self.options = options
        self.step = step
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None

    def define_metric(self, name: str, **options: Any) -> None:
        assert (name, options["summary"]) == ("*", "none")

    def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
        assert self.exit_code is None
        assert (row["epoch"], True) == (step, commit)
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    import wandb

    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        os.environ["WANDB_MODE"] = options["mode"]  # as the real one may
        there = sum(len(run.rows) for run in runs if options["resume"] and run.options["id"] == options["id"])
        runs.append(FakeRun(options, there))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    return runs


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if somebody had logged in and the server answered."""
    monkeypatch.setattr(tracking, "has_api_key", lambda: True)
    monkeypatch.setattr(tracking, "_unreachable", lambda url: None)


def test_each_cell_is_one_closed_run_that_equals_its_record(run: Run, fake: list[FakeRun]) -> None:
    first = run("wandb.mode=offline", "wandb.tags=[mine]", "study=question")
    run("wandb.mode=offline", "wandb.tags=[mine]", "seed=1")
    assert [each.exit_code for each in fake] == [0, 0]
    each, record = fake[0], first["record"]
    assert each.options["mode"] == "offline"
    assert each.options["id"] == record["run_id"]
    assert each.options["group"] == "question"
    assert each.options["job_type"] == "train"
    assert set(each.options["tags"]) >= {"mine", "vit_micro", "digits"}
    assert each.options["config"]["seed"] == 0
    assert each.options["dir"] == first["folder"]
    assert [row["epoch"] for row in each.rows] == [0, 1]
    assert each.rows[0].keys() >= {"lr", "images_per_second", "train/loss", "val/acc", "val/kept_fraction/1", "routing"}
    for key, value in record["metrics"].items():
        assert each.summary[key] == value
    assert each.summary["cost/params"] == record["cost"]["params"]
    assert each.summary["git/commit"] == record["git"]["commit"]
    assert "WANDB_MODE" not in os.environ


def test_a_run_is_shown_while_it_trains(run: Run, fake: list[FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    stop_at(monkeypatch, "training_step", 12, lambda: seen.append((len(fake[0].rows), fake[0].summary["status"])))
    run("wandb.mode=offline", "train.epochs=2")
    assert seen == [(1, "running")]


@pytest.mark.parametrize(("action", "status"), [(send(signal.SIGTERM), "interrupted"), (lambda: 1 / 0, "failed")])
def test_runs_that_end_early_say_so(
    run: Run, fake: list[FakeRun], monkeypatch: pytest.MonkeyPatch, action: Callable[[], None], status: str
) -> None:
    stop_at(monkeypatch, "training_step", 12, action)
    assert run("wandb.mode=offline")["status"] == status
    assert (len(fake[0].rows), fake[0].summary["status"], fake[0].exit_code) == (1, status, 1)


def test_a_run_that_fails_before_it_trains_is_shown(run: Run, fake: list[FakeRun], tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text("no weights")
    run("wandb.mode=offline", "init=checkpoint", f"init.path={tmp_path / 'weights.pt'}")
    assert [each.summary["status"] for each in fake] == ["failed"]


def test_trouble_with_tracking_is_a_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def init(**options: Any) -> None:
        raise wandb.errors.UsageError("no such entity")

    monkeypatch.setattr(wandb, "init", init)
    result = run("wandb.mode=offline", "tracking=[wandb,csv]")
    assert result["status"] == "finished"
    assert len([line for line in result["record"]["warnings"] if "no such entity" in line]) == 1
    assert (result["folder"] / "csv" / "metrics.csv").exists()


def test_online_without_an_account_is_written_offline(fake: list[FakeRun], tmp_path: Path) -> None:
    record = new_record({"seed": 0}, run_id="abc", name="cell", command="test")
    warning = tracking.mirror(WandbConfig(mode="online"), tmp_path, record, {}, [], None)
    assert fake[0].options["mode"] == "offline"
    assert warning is not None
    assert "wandb login" in warning


def test_a_server_that_cannot_be_reached_leaves_an_offline_run(
    run: Run, fake: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    with socket.socket() as server:  # bound, so that nobody else listens there
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(tracking, "has_api_key", lambda: True)
        monkeypatch.setattr(wandb, "setup", lambda: SimpleNamespace(settings=SimpleNamespace(base_url=url)))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.delenv("http_proxy", raising=False)
        result = run("wandb.mode=online")
    assert (result["status"], fake[0].options["mode"], len(fake[0].rows)) == ("finished", "offline", 2)
    assert [line for line in result["record"]["warnings"] if f"{url} cannot be reached" in line]


@pytest.mark.usefixtures("account")
def test_a_server_that_refuses_leaves_an_offline_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def init(**options: Any) -> FakeRun:
        if options["mode"] == "online":
            raise wandb.errors.CommError("timed out")
        return FakeRun(options)

    monkeypatch.setattr(wandb, "init", init)
    result = run("wandb.mode=online")
    assert result["status"] == "finished"
    assert [line for line in result["record"]["warnings"] if "timed out" in line and "synced later" in line]


@pytest.mark.usefixtures("account")
def test_online_a_resumed_run_goes_on_and_a_repeated_one_begins_again(
    run: Run, fake: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 12, send(signal.SIGTERM))
        run("wandb.mode=online")
    run("wandb.mode=online")
    run("wandb.mode=online", "rerun=true")
    assert len({each.options["id"] for each in fake}) == 1
    assert [each.options["resume"] for each in fake] == [None, "allow", None]
    assert [[row["epoch"] for row in each.rows] for each in fake] == [[0], [1], [0, 1]]


def test_disabled_makes_nothing(fake: list[FakeRun], tmp_path: Path) -> None:
    assert tracking.mirror(WandbConfig(mode="disabled"), tmp_path, {}, {}, [], None) is None
    assert fake == []


KILLED = """
import os, signal, sys, time
from routing_lab.config import load
from routing_lab.tasks.classification import Classification
from routing_lab.training import tracking
from routing_lab.training.run import run_cell

original = Classification.training_step

def step(self, batch, batch_idx):
    if self.current_epoch == 2:
        time.sleep(1.5 * tracking.FLUSH)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch, batch_idx)

Classification.training_step = step
loaded = load(sys.argv[1:])
run_cell(loaded.config, loaded.resolved, loaded.warnings, command="test", group="sweep")
"""


def test_an_offline_run_that_is_killed_shows_its_epochs_and_goes_on_as_one_run(
    run: Run, cell: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tests.training.conftest import SMALL

    keys = {text.partition("=")[0]: text for text in (*SMALL, *OFFLINE, f"paths.runs={tmp_path / 'runs'}")}
    killed = subprocess.run([sys.executable, "-c", KILLED, *keys.values()], check=False)
    assert killed.returncode == -signal.SIGKILL
    (folder,) = (path.parent for path in (tmp_path / "runs").glob("*/run.json"))
    (shown,) = read_offline(folder)
    assert [row["epoch"] for row in shown.rows] == [0, 1]
    assert (shown.summary["status"], shown.group, shown.exit_code) == ("running", "sweep", None)

    record = run(*OFFLINE)["record"]
    assert record["warnings"] == []
    (shown,) = read_offline(folder)
    assert shown.run_id == record["run_id"]
    assert [row["epoch"] for row in shown.rows] == [0, 1, 2]
    assert {"lr", "images_per_second", "val/kept_fraction/1"} <= shown.rows[0].keys()
    assert shown.rows[2]["_timestamp"] >= shown.rows[0]["_timestamp"]
    assert (shown.summary["status"], shown.exit_code) == ("finished", 0)
    assert shown.summary["test/acc"] == record["metrics"]["test/acc"]
    assert len(list(folder.glob("wandb/offline-run-*/files/media/images/*.png"))) == 1  # of the epoch that was left
    assert "wandb" not in capfd.readouterr().err


def test_tensorboard_and_csv_hold_every_epoch_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    asked = ("tracking=[tensorboard,csv]", "wandb.mode=offline", "train.epochs=3")
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 24, send(signal.SIGTERM))
        run(*asked)
    result = run(*asked)
    assert result["record"]["warnings"] == []
    assert not (result["folder"] / "wandb").exists()
    events = EventAccumulator(str(result["folder"] / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("epoch")] == [0, 1, 2]
    assert {"val/acc", "lr", "images_per_second", "val/kept_fraction/1"} <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["routing"]
    with open(result["folder"] / "csv" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", ""]
    assert rows[-1]["status"] == "finished"
    assert float(rows[-1]["test/acc"]) == result["record"]["metrics"]["test/acc"]


def test_trackers_are_chosen_by_name_and_are_no_part_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from routing_lab.config import identity

    asked = {"wandb": ["wandb"], "none": [], "[]": [], "[wandb,csv]": ["wandb", "csv"], "[csv,csv]": ["csv"]}
    loaded = {choice: load([f"tracking={choice}"]) for choice in asked}
    assert {choice: one.config.trackers() for choice, one in loaded.items()} == asked
    assert len({identity(one.resolved) for one in loaded.values()}) == 1
    assert load(["tracking=[wandb,csv]", "wandb.mode=disabled"]).config.trackers() == ["csv"]
    with pytest.raises(ConfigError, match="tracking"):
        load(["tracking=mlflow"])
    monkeypatch.setattr("routing_lab.config.refusals.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"routing_lab\[tensorboard\]"):
        load(["tracking=[csv,tensorboard]"])


def test_the_picture_shows_the_share_that_keeps_each_token() -> None:
    origin = torch.tensor([[-1, 0, 1, 2], [-1, 0, 1, 2]])
    kept = torch.tensor([[0, 1, 3], [0, 3, -1]])
    dense = LayerTrace(None, origin.argsort(), torch.tensor([4, 4]), 4, origin)
    trace = Trace([dense, LayerTrace(None, kept, torch.tensor([3, 2]), 4, origin)])
    picture = tracking.routing_picture(trace, [1])
    assert picture is not None
    assert picture[:: tracking.PIXELS, :: tracking.PIXELS].tolist() == [[128, 0, 255]]
    assert tracking.routing_picture(trace, []) is None
    assert [epoch for epoch in range(10) if tracking.is_pictured(epoch, 10)] == [0, 1, 3, 7, 9]
