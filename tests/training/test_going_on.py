"""A finished run goes on as a run of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from routing_lab.config import ConfigError, Loaded
from routing_lab.runs.folder import RunFolder

Run = Callable[..., dict[str, Any]]


def test_a_run_goes_on_from_another_and_says_so(run: Run) -> None:
    first = run("router=linear")
    source = RunFolder(first["folder"])
    second = run("router=linear", "init=run", f"init.run={source.path}", "train.epochs=0")
    assert second["error"] is None
    assert second["folder"] != source.path
    weights, taken = load_file(source.final), load_file(RunFolder(second["folder"]).final)
    assert all(torch.equal(weights[name], taken[name]) for name in weights)  # routers too
    assert second["record"]["metrics"]["test/acc"] == first["record"]["metrics"]["test/acc"]

    longer = ("router=linear", "init=run", f"init.run={second['folder']}", "train.epochs=1", "train.schedule=constant")
    third = run(*longer)
    ancestry = third["record"]["init"]["ancestry"]
    assert [(one["run_id"], one["epochs"]) for one in ancestry] == [
        (first["record"]["run_id"], 2),
        (second["record"]["run_id"], 0),
    ]
    assert third["record"]["init"]["source"] == second["folder"].name
    assert third["record"]["init"]["hash"] == second["record"]["init"]["hash"]
    again = run(*longer)
    assert (again["status"], again["trained"]) == ("finished", False)


def test_a_change_of_length_goes_on_only_where_it_says_so(run: Run) -> None:
    short, long = run("train.epochs=1"), run("train.epochs=2")
    assert long["record"]["init"].get("ancestry") is None
    assert long["record"]["init"]["hash"] == short["record"]["init"]["hash"]
    longer = run("train.epochs=2", "init=run", "init.epochs=1")
    assert [one["run_id"] for one in longer["record"]["init"]["ancestry"]] == [short["record"]["run_id"]]
    assert longer["record"]["init"]["hash"] != short["record"]["init"]["hash"]
    # Another seed has no shorter run yet: it is trained first.
    other = run("train.epochs=2", "init=run", "init.epochs=1", "seed=1")
    assert (other["folder"].parent / other["record"]["init"]["source"] / "run.json").exists()


def test_a_source_that_is_not_finished_or_has_changed_is_refused(
    run: Run, cell: Callable[..., Loaded], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        cell("init=run", f"init.run={tmp_path}")
    for both in (["init=run"], ["init=run", f"init.run={tmp_path}", "init.epochs=1"]):
        with pytest.raises(ConfigError, match=r"init\.epochs"):
            cell(*both)
    source = RunFolder(run("train.epochs=0")["folder"])
    asked = ("init=run", f"init.run={source.path}", "train.epochs=0", "seed=1")
    assert run(*asked)["status"] == "finished"
    save_file({name: value + 1 for name, value in load_file(source.final).items()}, source.final)
    changed = run(*asked)
    assert (changed["status"], changed["trained"]) == ("failed", False)
    assert "init.run" in changed["error"]
    assert "rerun=true" in changed["error"]
