"""What must not move: the identity of every preset, golden case and study cell, and the committed study's page.

`python -m tests.config.test_freeze` writes the list anew; a changed line orphans results that exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.golden.cases import OWN, Case
from tests.golden.mapping import vision_overrides

from routing_lab.config import identity, load
from routing_lab.config.compose import conf_path
from routing_lab.runs.records import read_records
from routing_lab.study import plan_study

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).parent / "data" / "identities.json"
COMMITTED = ROOT / "experiments" / "results" / "confound_2x2.toy"


def current() -> dict[str, dict[str, str]]:
    """Identities as the code computes them now: by preset, by golden case, by cell of the committed study."""
    presets = {path.stem: identity(load([f"method={path.stem}", *_needed(path.stem)]).resolved) for path in _presets()}
    cases = {case.name: identity(load(vision_overrides(case)).resolved) for case in _cases()}
    return {"presets": presets, "cases": cases, "cells": _cells()}


def _needed(preset: str) -> list[str]:
    return ["isoflop.tolerance=0.1"] if preset == "isoflop_depth" else []


def _presets() -> list[Path]:
    return sorted((conf_path() / "method").glob("*.yaml"))


def _cases() -> Iterator[Case]:
    for pattern in ("eq_mod_*", "eq_amod_*"):
        yield from (Case(path.parent) for path in sorted(OWN.glob(f"{pattern}/case.json")))


def _cells() -> dict[str, str]:
    return {f"{record['arm']}-s{record['seed']}": record["run_id"] for record in read_records(COMMITTED / "runs")}


@pytest.fixture(scope="module")
def frozen() -> Mapping[str, Mapping[str, str]]:
    return json.loads(FROZEN.read_text())


@pytest.mark.parametrize("kind", ["presets", "cases", "cells"])
def test_identities_are_those_of_the_first_release(frozen: Mapping[str, Mapping[str, str]], kind: str) -> None:
    now = current()[kind]
    assert {name: now.get(name) for name in frozen[kind]} == dict(frozen[kind])


def test_the_committed_runs_are_the_cells_of_their_study_finished() -> None:
    """Every cell of the study as it was registered is found again, by the configuration its record holds."""
    records = read_records(COMMITTED / "runs")
    assert len(records) == 42
    assert {record["status"] for record in records} == {"finished"}
    for record in records:
        assert identity(record["config"]) == record["run_id"]
        assert Path(record["folder"]).name.endswith(record["run_id"])
    planned = plan_study(COMMITTED / "confound_2x2.yaml", [f"paths.runs={COMMITTED / 'runs'}"])
    assert planned.missing() == []


if __name__ == "__main__":
    FROZEN.parent.mkdir(exist_ok=True)
    FROZEN.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")
