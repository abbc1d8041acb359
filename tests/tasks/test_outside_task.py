from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from routing_lab.config import load
from routing_lab.runs.folder import RunFolder
from routing_lab.training.run import run_cell


def test_a_task_of_ones_own_is_one_file(tmp_path: Path) -> None:
    small = ["backbone.width=16", "backbone.depth=2", "backbone.heads=2", "train.warmup_epochs=0", "train.epochs=1"]
    own = ["task.name=parity", "task._target_=tests.tasks.parity.Parity", "+task.weight=2.0"]
    quiet = ["tracking=none", "runtime.progress=none", f"paths.runs={tmp_path}"]
    loaded = load([*small, *own, *quiet])
    result: dict[str, Any] = run_cell(loaded.config, loaded.resolved)
    assert result["error"] is None
    record = result["record"]
    assert record["data"]["num_classes"] == 2
    with np.load(RunFolder(result["folder"]).predictions) as saved:
        assert set(saved["target"]) == {0, 1}
        assert record["metrics"]["test/acc"] == np.mean(saved["prediction"] == saved["target"])
    assert record["metrics"].keys() >= {"train/acc", "val/acc", "val/loss", "test/loss"}
