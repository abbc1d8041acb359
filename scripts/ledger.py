"""Write docs/ledger.md and docs/paper_map.md from docs/ledger.csv and the study files: `python scripts/ledger.py`.

The pages are never edited by hand. A study says which rows it tests, under `tests`; docs/ledger.csv which tests hold a
row, and what lacks.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from routing_lab.evidence.study import Study, load_study

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COLUMNS = ("row", "title", "checks", "state", "why")
STATES = ("done", "partly", "not")
PARTS: Mapping[str, str] = {
    "A": "A-MoD and Mixture-of-Depths: what they compute",
    "B": "A-MoD: results, tables and figures",
    "C": "A-MoD: what reviewers ask",
    "D": "Attention-variance pruning",
    "E": "DTRNet",
    "F": "Methods compared with",
    "G": "Methods built on",
    "H": "Experiments, records and reports",
}
MAP = """\
# Which study tests what

Every equation, table, figure and reviewer's request that this project set itself to test, with the study that asks it,
the contrasts that decide it, and the scales at which it can be run; where none does, why. What a study has found stands
in the report of its records. Where the papers are in the code: [code_map.md](code_map.md). Written by `make ledger`
from the study files and [ledger.csv](ledger.csv).
"""
LEDGER = """\
# What is done, and what shows it

The rows of [paper_map.md](paper_map.md) with the tests that hold them and the studies that ask them. *Done*: the tests
pass and, where a study is named, it can be run; what was found, and at which scale, is no part of the state. Written by
`make ledger` from [ledger.csv](ledger.csv).
"""


def read(path: Path = DOCS / "ledger.csv") -> list[dict[str, str]]:
    """The rows, in order.

    Raises:
        ValueError: other columns than `COLUMNS`, a row that comes twice or in another order, a state that is none of
            `STATES`, or one that is not done without a reason.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path.name}: columns {reader.fieldnames}; expected {', '.join(COLUMNS)}")
    names = [row["row"] for row in rows]
    if names != sorted(set(names)) or {name[0] for name in names} - set(PARTS):
        raise ValueError(f"{path.name}: expected every row once and in order, of {', '.join(PARTS)}")
    for row in rows:
        if row["state"] not in STATES or (row["state"] == "done") == bool(row["why"]):
            raise ValueError(f"{path.name}, {row['row']}: expected one of {', '.join(STATES)}, and why it is not done")
    return rows


def studies(folder: Path = ROOT / "experiments") -> list[Study]:
    """The study files, by name."""
    return [load_study(path) for path in sorted(folder.glob("*.yaml")) if path.stem != "claims"]


def tested(found: Sequence[Study]) -> dict[str, list[Study]]:
    """Row -> the studies that test it."""
    rows: dict[str, list[Study]] = {}
    for study in found:
        for row in study.tests:
            rows.setdefault(row, []).append(study)
    return rows


def paper_map(rows: Sequence[Mapping[str, str]], found: Sequence[Study]) -> str:
    """docs/paper_map.md.

    Raises:
        ValueError: a study names a row that is not there, or a row has neither study, nor reason, nor tests.
    """
    by_row = tested(found)
    if unknown := sorted(set(by_row) - {row["row"] for row in rows}):
        raise ValueError(f"tests: no such row in ledger.csv: {', '.join(unknown)}")
    lines = [MAP]
    for part, title in PARTS.items():
        lines += [
            f"## {title}\n",
            "| row | what is said or asked | study and contrasts | scales |",
            "|---|---|---|---|",
        ]
        for row in (row for row in rows if row["row"].startswith(part)):
            asked = by_row.get(row["row"], [])
            cells = [_contrasts(study, row["row"]) for study in asked]
            scales = "; ".join(dict.fromkeys(", ".join(study.scales) for study in asked))
            told = "<br>".join([*cells, row["why"]] if row["why"] else cells) or _without_study(row)
            lines.append(f"| {row['row']} | {row['title']} | {told} | {scales} |")
        lines.append("")
    return "\n".join(lines)


def ledger(rows: Sequence[Mapping[str, str]], found: Sequence[Study]) -> str:
    """docs/ledger.md."""
    by_row = tested(found)
    counts = Counter(row["state"] for row in rows)
    lines = [LEDGER, ", ".join(f"{counts[state]} {state}" for state in STATES) + ".\n"]
    for part, title in PARTS.items():
        lines += [f"## {title}\n", "| row | what | checked by | state |", "|---|---|---|---|"]
        for row in (row for row in rows if row["row"].startswith(part)):
            checks = [f"`{check}`" for check in row["checks"].split()]
            checks += [f"`experiments/{study.name}.yaml`" for study in by_row.get(row["row"], [])]
            state = f"{row['state']}: {row['why']}" if row["why"] else row["state"]
            lines.append(f"| {row['row']} | {row['title']} | {'<br>'.join(checks)} | {state} |")
        lines.append("")
    return "\n".join(lines)


def _contrasts(study: Study, row: str) -> str:
    return f"[{study.name}](../experiments/{study.name}.yaml): {', '.join(study.tests[row])}"


def _without_study(row: Mapping[str, str]) -> str:
    if not row["checks"]:
        raise ValueError(f"ledger.csv, {row['row']}: expected a study, a reason, or tests that hold it")
    return "a property of the code, not of results: [its tests](ledger.md) hold it"


if __name__ == "__main__":
    stated, shipped = read(), studies()
    (DOCS / "paper_map.md").write_text(paper_map(stated, shipped), encoding="utf-8")
    (DOCS / "ledger.md").write_text(ledger(stated, shipped), encoding="utf-8")
