"""The notebook: paired with its script, stored without results, and running on a small stored set of records."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
import numpy as np
import pytest
from tests.evidence.synthetic import STORED
from tests.evidence.test_study import CONTENT

from routing_lab.evidence import formatting
from routing_lab.evidence.tables import factor_table, sweep_table
from routing_lab.runs.records import read_records

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(autouse=True)
def _quiet_kernel() -> Iterator[None]:
    """Kernel and event loop are other projects' code; their warnings are not ours to answer for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        asyncio.set_event_loop(None)


def test_notebook_and_script_are_the_same_and_carry_no_results() -> None:
    notebook = jupytext.read(NOTEBOOKS / "aggregate_results.ipynb")
    script = jupytext.read(NOTEBOOKS / "aggregate_results.py")
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in script.cells]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def test_notebook_runs_on_stored_records_and_agrees_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "confound.yaml").write_text(json.dumps(CONTENT | {"seeds": [0, 1, 2, 3]}))
    notebook = nbformat.read(NOTEBOOKS / "aggregate_results.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source += f"\nruns = {str(STORED)!r}\nexperiments = {str(tmp_path)!r}"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()

    shown = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    table = sweep_table(read_records(STORED))
    for mean in table.arms.column("mean")[:5]:
        assert f">{formatting.number(mean, 'percent')}<" in shown
    assert "Study confound (scale: toy)" in shown
    assert "Verdict: " in shown
    assert shown.count('"image/svg+xml"') == 4


def run_script(**parameters: object) -> dict[str, Any]:
    """The notebook's cells in this process, without a kernel; what they leave behind."""
    script = jupytext.read(NOTEBOOKS / "aggregate_results.py")
    left: dict[str, Any] = {}
    for cell in script.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "aggregate_results.py", "exec"), left)
        if "parameters" in cell.metadata.get("tags", []):
            left |= parameters
    return left


def test_an_empty_folder_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = run_script(runs=str(tmp_path), experiments=str(EXPERIMENTS))
    assert f"{tmp_path}: no runs there yet" in capsys.readouterr().out
    assert left["results"] == []


def test_metric_and_factors_are_chosen_and_no_spread_is_pooled(capsys: pytest.CaptureFixture[str]) -> None:
    committed = EXPERIMENTS / "results" / "confound_2x2.toy" / "runs"
    factors = ["router.name", "capacity.fraction"]
    left = run_script(
        runs=str(committed), experiments=str(EXPERIMENTS), metric="test/loss", factors=factors, reference="dense"
    )
    table = factor_table(left["table"].members, "test/loss", factors)
    # Three linear and three attention routers under other output rules agree in both factors, and stay apart.
    assert [row[0] for row in table.rows].count("amod") == 3
    assert table.column("n") == [6] * 7
    for arm, sd in zip(table.column("arm"), table.column("sd"), strict=True):
        (member,) = [member for member in left["table"].members if member.label == arm]
        assert sd == pytest.approx(np.std(list(member.values("test/loss").values()), ddof=1))
    assert {c.reference.label for c in left["table"].comparisons} == {"dense"}
    assert "Verdict: inconclusive" in capsys.readouterr().out
    assert len(left["rows"][0].points) == 6
