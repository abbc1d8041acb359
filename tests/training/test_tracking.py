from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routing_lab.config.training import WandbConfig
from routing_lab.training import tracking

Run = Callable[..., dict[str, Any]]


class FakeRun:
    """Stands in for a W&B run and notes what it is given."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.finished = False

    def define_metric(self, name: str, **options: Any) -> None:
        assert (name, options["summary"]) == ("*", "none")

    def log(self, row: dict[str, Any]) -> None:
        assert not self.finished
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    import wandb

    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        os.environ["WANDB_MODE"] = options["mode"]  # as the real one may
        runs.append(FakeRun(options))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    return runs


def test_each_cell_is_one_closed_run_that_equals_its_record(run: Run, fake: list[FakeRun]) -> None:
    first = run("wandb.mode=offline", "wandb.tags=[mine]", "study=question")
    run("wandb.mode=offline", "wandb.tags=[mine]", "seed=1")
    assert len(fake) == 2
    assert all(each.finished for each in fake)
    each, record = fake[0], first["record"]
    assert each.options["mode"] == "offline"
    assert each.options["group"] == "question"
    assert each.options["job_type"] == "train"
    assert set(each.options["tags"]) >= {"mine", "vit_micro", "digits"}
    assert each.options["config"]["seed"] == 0
    assert each.options["dir"] == first["folder"]
    assert [row["epoch"] for row in each.rows] == [0, 1]
    for key, value in record["metrics"].items():
        assert each.summary[key] == value
    assert each.summary["cost/params"] == record["cost"]["params"]
    assert "WANDB_MODE" not in os.environ


def test_trouble_with_tracking_is_a_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def init(**options: Any) -> None:
        raise wandb.errors.UsageError("no such entity")

    monkeypatch.setattr(wandb, "init", init)
    result = run("wandb.mode=offline")
    assert result["status"] == "finished"
    assert [line for line in result["record"]["warnings"] if "no such entity" in line]


def test_online_without_an_account_is_written_offline(fake: list[FakeRun], tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "name": "cell",
        "axes": {},
        "metrics": {},
        "cost": {},
        "routing": {},
        "status": "finished",
    }
    warning = tracking.mirror(WandbConfig(mode="online"), tmp_path, record, {}, [], None)
    assert fake[0].options["mode"] == "offline"
    assert warning is not None
    assert "wandb login" in warning


def test_disabled_imports_nothing() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from routing_lab.config.training import WandbConfig\n"
        "from routing_lab.training.tracking import mirror\n"
        "assert mirror(WandbConfig(mode='disabled'), Path(), {}, {}, [], None) is None\n"
        "sys.exit('wandb' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_offline_run_is_written_for_real(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("wandb.mode=offline", "train.epochs=1")
    assert result["record"]["warnings"] == []
    written = list((result["folder"] / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 1
    assert "wandb" not in capfd.readouterr().err
