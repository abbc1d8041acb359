"""A registration stands before its results; what changes after them is listed, and nothing is changed in silence."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.evidence.test_study import content

from routing_lab.evidence.registration import Cell, Plan, append, find_plan, plan_path, register
from routing_lab.evidence.study import StudyError, parse_study

NOW = datetime(2026, 12, 1, tzinfo=UTC)
COMMITTED = Path(__file__).parents[2] / "experiments" / "results" / "confound_2x2.toy" / "runs"


def registered(plan: Plan | None = None, finished: tuple[str, ...] = (), reason: str = "", **changes: Any) -> Plan:
    overrides = changes.pop("overrides", ())
    study = parse_study(content(**changes))
    cells = [Cell(arm, seed, f"{arm}-{seed}") for arm in study.arms for seed in study.planned_seeds("toy")]
    return register(
        plan, study, "toy", cells, overrides=overrides, versions={}, finished=finished, reason=reason, now=NOW
    )


@pytest.mark.parametrize(
    "change",
    [
        {"decision__adjust": "none"},
        {"seeds": [1, 3, 5]},
        {"overrides": ("train.lr=0.1",)},
        {"decision__rules": [{"verdict": "supports", "says": "s", "when": {"papers": "positive"}}]},
    ],
)
def test_a_change_after_the_first_cell_is_an_amendment_or_refused(change: dict[str, Any], tmp_path: Path) -> None:
    first = registered()
    append(first, tmp_path)
    with pytest.raises(StudyError, match="since then it has changed"):
        registered(first, ("dense-1",), **change)
    amended = registered(first, ("dense-1",), "we looked", **change)
    append(amended, tmp_path)
    found = find_plan(tmp_path, "confound", "toy")
    assert found is not None
    assert [entry.event for entry in found.entries] == ["registered", "amended"]
    assert "amended on 2026-12-01" in found.exploratory[0]
    assert any("because: we looked" in line for line in found.lines())
    assert registered(first, **change).entries[-1].event == "revised"


def test_words_and_volatile_overrides_change_nothing() -> None:
    first = registered()
    assert registered(first, ("dense-0",), notes="more words", overrides=("wandb.mode=disabled",)) is first


def test_an_edited_entry_is_noticed(tmp_path: Path) -> None:
    append(registered(), tmp_path)
    path = plan_path(tmp_path, "confound", "toy")
    path.write_text(path.read_text().replace("it is the source", "it is the rule"))
    with pytest.raises(StudyError, match="has been changed since it was written"):
        find_plan(tmp_path, "confound", "toy")


def test_the_committed_study_is_found_with_all_its_cells() -> None:
    plan = find_plan(COMMITTED, "confound_2x2", "toy")
    assert plan is not None
    folders = {path.name.rsplit("-", 1)[-1] for path in COMMITTED.iterdir()}
    assert len(plan.cells) == 42
    assert {cell.run_id for cell in plan.cells} <= folders
