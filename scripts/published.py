"""Write docs/published.md from docs/published.csv: `python scripts/published.py`. The page is never edited by hand."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = ("method", "model", "setting", "accuracy", "gmacs", "recipe", "source")
HEAD = """\
# What others published

Accuracy in per cent on the test images of the data set, cost in billions of multiply-accumulates for one image, as
the source gives them: **published, other recipe**. No number here was measured by this project, and none stands in a
table of runs: recipes, epochs, teachers and checkpoints differ between the rows, so that a difference between two of
them is not the effect of the method. ImageNet-1k where the recipe names no other set. A source that is a review or a
reply reports the paper at second hand. Written by `scripts/published.py` from [published.csv](published.csv).
"""


def read(path: Path = DOCS / "published.csv") -> list[dict[str, str]]:
    """The rows, each with a source and an accuracy.

    Raises:
        ValueError: other columns than `COLUMNS`, or a row without method, accuracy or source.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path.name}: columns {reader.fieldnames}; expected {', '.join(COLUMNS)}")
    for line, row in enumerate(rows, start=2):
        if not (row["method"] and row["source"] and 0 < float(row["accuracy"]) < 100):
            raise ValueError(f"{path.name}, line {line}: expected a method, an accuracy in per cent and a source")
    return rows


def page(rows: Sequence[Mapping[str, str]]) -> str:
    """The page in Markdown."""
    names = ("method", "model", "setting", "accuracy, %", "GMACs", "recipe", "source")
    lines = [HEAD, "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(row[column] for column in COLUMNS) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "published.md").write_text(page(read()), encoding="utf-8")
