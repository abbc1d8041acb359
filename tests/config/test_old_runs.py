"""Runs that the first release wrote load, build, and are found again as finished.

`data/old_runs` is what commit 670ffef wrote, configuration and record of each run, as it wrote them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from routing_lab.assembly import build_model
from routing_lab.axes import AXES, MEMBERS
from routing_lab.config import Loaded, check, identity, run_folder, run_name
from routing_lab.runs.records import is_finished, read_records
from routing_lab.training.run import run_cell

OLD = Path(__file__).parent / "data" / "old_runs"
FOLDERS = sorted(path.name for path in OLD.iterdir())


def stored(folder: str, **paths: str) -> Loaded:
    config = OmegaConf.load(OLD / folder / "config.yaml")
    return check(OmegaConf.merge(config, {"paths": paths}))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_configuration_loads_as_the_same_run(folder: str) -> None:
    loaded = stored(folder)
    assert f"{run_name(loaded.config)}-{identity(loaded.resolved)}" == folder
    with torch.device("meta"):
        assert build_model(loaded.config, 10).layers.keys() == {
            str(layer) for layer in loaded.config.placement.routed(6) if loaded.config.router.traits.routes
        }


def test_a_record_is_that_of_a_finished_run() -> None:
    records = read_records(OLD)
    assert sorted(Path(record["folder"]).name for record in records) == FOLDERS
    for record in records:
        assert is_finished(record)
        assert identity(record["config"]) == record["run_id"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_command_reports_it_and_trains_nothing(folder: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(OLD / folder, runs / folder)
    loaded = stored(folder, runs=str(runs))
    assert run_folder(loaded.config, loaded.resolved) == runs / folder
    result = run_cell(loaded.config, loaded.resolved)
    assert (result["status"], result["trained"], result["error"]) == ("finished", False, None)
    assert {path.name for path in (runs / folder).iterdir()} == {"config.yaml", "run.json"}
    assert (runs / folder / "run.json").read_bytes() == (OLD / folder / "run.json").read_bytes()


def test_members_of_every_axis_are_among_them() -> None:
    """The paths that these runs wrote as `_target_` are those that runs write now."""
    for axis in AXES:
        nodes = [OmegaConf.load(OLD / folder / "config.yaml")[axis] for folder in FOLDERS]
        assert len({node.name for node in nodes}) >= (1 if axis == "visibility" else 4), axis
        for node in nodes:
            assert node["_target_"] == MEMBERS[axis][node.name].shipped_path()
