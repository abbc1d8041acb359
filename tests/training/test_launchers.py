"""Cells in other processes, one of them failing: the others finish, and the answer says which failed and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from routing_lab.assembly import build_model
from routing_lab.config import load
from routing_lab.runs.records import read_records

SMALL = ["train.epochs=0", "backbone.depth=2", "backbone.width=16", "backbone.heads=2", "wandb.mode=disabled"]


@pytest.mark.slow
def test_a_failing_cell_leaves_the_others_alone(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    model = build_model(load(SMALL).config, 10)
    for name in ("first", "third"):
        save_file(dict(model.get_submodule("backbone").state_dict()), tmp_path / f"{name}.safetensors")
    torch.save({"of": "another model"}, tmp_path / "second.pth")
    paths = "init.path=first.safetensors,second.pth,third.safetensors"
    command = [sys.executable, "-m", "routing_lab.train", *SMALL, "init=checkpoint", paths, "-m"]
    for _ in range(2):
        done = subprocess.run(
            [*command, "hydra/launcher=joblib"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 1, done.stdout + done.stderr
        assert "init.path=second.pth: failed: " in done.stdout
        assert "init.path=first.safetensors: failed" not in done.stdout
    assert "2 of 3 cells finished, 0 of them trained now" in done.stdout  # the same command ran what was missing
    statuses = sorted(record["status"] for record in read_records(tmp_path / "runs"))
    assert statuses == ["failed", "finished", "finished"]
