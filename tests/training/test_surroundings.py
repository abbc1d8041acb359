"""What only the machine can refuse is refused before a run folder is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from routing_lab.config import ConfigError, load
from routing_lab.training import surroundings
from routing_lab.training.run import run_cell


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.precision=16-mixed"], "train.precision = 16-mixed: needs an accelerator"),
        (["runtime.strategy=teleport"], "runtime.strategy = teleport: Lightning has no such strategy"),
        (["runtime.strategy=dp"], "did you mean ddp?"),
        (["train.optimizer=adamm"], "train.optimizer = 'adamm': expected a timm optimiser"),
        (["runtime.accelerator=gpu"], "runtime.accelerator = gpu: there is none here; use auto, cpu"),
        (["runtime.accelerator=mps"], "runtime.accelerator = mps: there is none here"),
    ],
)
def test_refused_before_anything_is_written(
    overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "_accelerators", dict)
    loaded = load([*overrides, f"paths.runs={tmp_path}/runs"])
    with pytest.raises(ConfigError) as refused:
        run_cell(loaded.config, loaded.resolved)
    assert said in str(refused.value)
    assert not any(tmp_path.iterdir())


def test_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_accelerators", lambda: {"auto": 2, "gpu": 2})
    surroundings.check_surroundings(load(["runtime.devices=2", "train.precision=16-mixed"]).config)
    with pytest.raises(ConfigError, match=r"runtime\.devices = 4: there are 2 here"):
        surroundings.check_surroundings(load(["runtime.devices=4"]).config)
