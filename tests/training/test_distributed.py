"""Two processes on a CPU train one model."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import read_history, read_record

SCRIPT = """
import sys
from routing_lab.config import load
from routing_lab.training.run import run_cell

if __name__ == "__main__":
    loaded = load(sys.argv[1:])
    result = run_cell(loaded.config, loaded.resolved, loaded.warnings, command="test")
    print(result["status"], result["error"], result["folder"], sep="|")
"""


@pytest.mark.slow
def test_two_processes_train_as_one(
    run: Callable[..., dict[str, Any]], cell: Callable[..., Any], tmp_path: Path
) -> None:
    overrides = [
        "router=amod",
        "scaling=none",
        "train.batch_size=256",
        "runtime.accelerator=cpu",
        "train.ema_decay=0.5",
    ]
    single = run(*overrides)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    small = [f"{key}={value}" for key, value in SMALL_KEYS]
    done = subprocess.run(
        [sys.executable, script, *small, *overrides, f"paths.runs={tmp_path / 'two'}", *TWO],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    status, error, path = done.stdout.strip().splitlines()[-1].split("|")
    assert (status, error) == ("finished", "None")
    record, folder = read_record(path), RunFolder(path)
    assert record["run_id"] == single["record"]["run_id"]
    history, alone = read_history({"folder": folder.path}), read_history({"folder": single["folder"]})
    assert history["epoch"] == [0, 1]
    with open(folder.path / "csv" / "metrics.csv", newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", ""]
    # The same examples share a step, so that sums over the processes differ by rounding only.
    np.testing.assert_allclose(history["train/loss"], alone["train/loss"], rtol=1e-3)
    np.testing.assert_allclose(history["val/loss"], alone["val/loss"], rtol=1e-3)
    with np.load(folder.predictions) as saved:
        assert len(np.unique(saved["index"])) == record["data"]["sizes"]["test"]


TWO = ("runtime.devices=2", "runtime.strategy=ddp", "tracking=csv")

SMALL_KEYS = [
    ("train.epochs", 2),
    ("train.warmup_epochs", 0),
    ("backbone.width", 16),
    ("backbone.depth", 2),
    ("backbone.heads", 2),
    ("wandb.mode", "disabled"),
    ("runtime.progress", "none"),
]
