"""The map from papers to studies and the ledger are made of the study files and one table, and name what exists."""

from __future__ import annotations

import ast
import runpy
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "ledger.py"))
HEAD = "row,title,checks,state,why\n"


@pytest.mark.parametrize("page", ["paper_map", "ledger"])
def test_pages_are_written_from_the_studies_and_the_table(page: str) -> None:
    written = SCRIPT[page](SCRIPT["read"](), SCRIPT["studies"]())
    assert (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") == written


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_test_that_is_named_exists() -> None:
    for row in SCRIPT["read"]():
        for check in row["checks"].split():
            path, _, name = check.partition("::")
            assert name in functions(ROOT / path), f"{row['row']}: {check}"


def test_every_row_is_asked_by_a_study_held_by_tests_or_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    path.write_text(f"{HEAD}A01,a score,,done,\n")
    with pytest.raises(ValueError, match="A01: expected a study, a reason, or tests"):
        SCRIPT["paper_map"](SCRIPT["read"](path), [])
    with pytest.raises(ValueError, match=r"tests: no such row in ledger.csv: .*C01"):
        SCRIPT["paper_map"](SCRIPT["read"](path), SCRIPT["studies"]())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("row,title\nA01,a score\n", "columns"),
        (f"{HEAD}A02,a,t,done,\nA01,b,t,done,\n", "every row once and in order"),
        (f"{HEAD}A01,a,t,done,\nA01,b,t,done,\n", "every row once and in order"),
        (f"{HEAD}A01,a,t,perhaps,\n", "A01: expected one of done, partly, not"),
        (f"{HEAD}A01,a,t,partly,\n", "and why it is not done"),
        (f"{HEAD}A01,a,t,done,a reason\n", "and why it is not done"),
    ],
)
def test_a_table_that_does_not_say_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ledger.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        SCRIPT["read"](path)
