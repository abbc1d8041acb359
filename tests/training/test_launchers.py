"""Cells in other processes, one of them failing: the others finish, and the answer says which failed and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from routing_lab import train
from routing_lab.assembly import build_model
from routing_lab.config import load
from routing_lab.runs.records import read_records

SMALL = ["train.epochs=0", "backbone.depth=2", "backbone.width=16", "backbone.heads=2", "wandb.mode=disabled"]


@pytest.mark.slow
def test_a_failing_cell_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the processes of joblib; `scripts/launchers.py` does it with the others, and more."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    from joblib.externals.loky import get_reusable_executor

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    model = build_model(load(SMALL).config, 10)
    for name in ("first", "third"):
        save_file(dict(model.get_submodule("backbone").state_dict()), tmp_path / f"{name}.safetensors")
    torch.save({"of": "another model"}, tmp_path / "second.pth")
    paths = "init.path=first.safetensors,second.pth,third.safetensors"
    try:
        for _ in range(2):
            with pytest.raises(SystemExit) as left:
                train.main([*SMALL, "init=checkpoint", paths, "hydra/launcher=joblib", "-m"])
            told = capfd.readouterr().out
            assert left.value.code == 1, told
            assert "init.path=second.pth: failed: " in told
            assert "init.path=first.safetensors: failed" not in told
    finally:
        get_reusable_executor().shutdown()
    assert "2 of 3 cells finished, 0 of them trained now" in told  # the same command ran what was missing
    statuses = sorted(record["status"] for record in read_records(tmp_path / "runs"))
    assert statuses == ["failed", "finished", "finished"]
