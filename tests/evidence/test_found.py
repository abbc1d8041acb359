"""What we found is what the committed records say: pages, tables and the README's section are written from them."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.evidence.test_sensitivity import MARGIN, WHOLE
from tests.evidence.test_study import content, write_study

from routing_lab.evidence.effects import Effect
from routing_lab.evidence.found import (
    BEGIN,
    END,
    Committed,
    committed,
    found_section,
    sentence,
    with_section,
    write_evidence,
)
from routing_lab.evidence.registration import Cell, append, register
from routing_lab.evidence.study import StudyError, parse_study
from routing_lab.runs.records import read_records

ROOT = Path(__file__).parents[2]
MARKED = f"# x\n{BEGIN}\nold\n{END}\nrest\n"


def test_what_is_committed_is_what_the_records_say(tmp_path: Path) -> None:
    """Everything that `make evidence` writes stands in the repository as it writes it.

    Figures are drawn by a library whose releases round differently, and CSV has every digit that a sum has: pages are
    compared without the one, numbers of the other to nine digits.
    """
    experiments = tmp_path / "experiments"
    shutil.copytree(ROOT / "experiments", experiments)
    shutil.copy(ROOT / "README.md", tmp_path)
    for path in experiments.glob("results/*/report.*"):
        path.unlink()
    for path in write_evidence(experiments, tmp_path / "README.md"):
        stored, written = (ROOT / path.relative_to(tmp_path)).read_text("utf-8"), path.read_text("utf-8")
        if path.suffix == ".csv":
            assert numbers(stored) == numbers(written), path.name
        else:
            assert without_figures(stored) == without_figures(written), path.name


def numbers(text: str) -> list[list[object]]:
    return [
        [pytest.approx(float(cell), rel=1e-9) if is_number(cell) else cell for cell in row]
        for row in csv.reader(text.splitlines())
    ]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def without_figures(text: str) -> str:
    return re.sub(r"<svg.*?</svg>", "<svg>", text, flags=re.DOTALL)


def with_effect(study: Committed, effect: Effect) -> Committed:
    """A committed study one of whose effects is another one."""
    (result,) = study.results
    return replace(study, results=(replace(result, effects={**result.effects, effect.name: effect}),))


def commit(results: Path, name: str, accuracy: dict[str, float]) -> None:
    """A registered study with its runs, as it would be committed."""
    runs = results / f"{name}.toy" / "runs"
    study = parse_study(content(name=name, margin=MARGIN, decision={"rules": WHOLE}))
    write_study(runs, accuracy)
    cells = [Cell(record["arm"], record["seed"], record["run_id"]) for record in read_records(runs)]
    append(register(None, study, "toy", cells, versions={}, now=datetime(2026, 12, 1, tzinfo=UTC)), runs)


def test_no_study_one_or_several(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(MARKED)
    test = {"study": "one", "effect": "source at none", "expected": "superior"}
    claims = [{"claim": "Attention is better.", "source": "a paper", "tests": [test]}]
    (tmp_path / "claims.yaml").write_text(json.dumps({"claims": claims}))
    write_evidence(tmp_path, readme)
    assert readme.read_text() == f"# x\n{BEGIN}\nNo study has been committed yet.\n{END}\nrest\n"
    page = (tmp_path / "results" / "README.md").read_text()
    assert "No study has been committed yet." in page
    assert "- Attention is better. (a paper; one)" in page

    commit(tmp_path / "results", "one", {"amod_none": 0.93})
    commit(tmp_path / "results", "two", {})
    shutil.copytree(tmp_path / "results" / "one.toy" / "runs", tmp_path / "results" / "sweep" / "runs")
    shutil.rmtree(tmp_path / "results" / "sweep" / "runs" / "studies")
    written = write_evidence(tmp_path, readme)
    assert {path.parent.name for path in written} == {"one.toy", "two.toy", "sweep", "results", tmp_path.name}
    page, section = (tmp_path / "results" / "README.md").read_text(), readme.read_text()
    assert "| [one.toy](one.toy/report.md) | one | toy | supports | better |" in page
    assert "| [sweep](sweep/report.md) | - | - | no study | 30 runs and their tables |" in page
    assert "**Supports**: Attention is better. (a paper)" in page
    assert 'Claim "Attention is better." (a paper): **supports**, at toy scale only' in section
    assert section.startswith(f"# x\n{BEGIN}\n- **[one]")
    assert section.endswith(f"{END}\nrest\n")
    # Twice is the same.
    before = {path: path.read_bytes() for path in written}
    assert {path: path.read_bytes() for path in write_evidence(tmp_path, readme)} == before


def test_every_sentence_says_where_it_holds_and_what_is_excluded(tmp_path: Path) -> None:
    commit(tmp_path, "one", {"amod_none": 0.93})
    commit(tmp_path, "two", {})
    study, other = committed(tmp_path)
    (result,) = study.results
    for effect in result.effects.values():
        text = sentence(result, effect)
        assert "toy scale, vit_micro on digits, 6 seeds" in text
        assert text.endswith(".")
    assert "superior, +3.0" in sentence(result, result.effects["source at none"])
    equal = other.results[0].effects["source at none"]
    assert "within the margin of 1.00 points" in sentence(other.results[0], equal)
    assert "toy scale" in found_section([study], [])
    dearer = replace(result.effects["source at none"], unequal="cost 2.12 times")
    assert sentence(result, dearer).endswith("; not at equal cost: cost 2.12 times.")
    assert "n=6 (cost 2.12 times)" in found_section([with_effect(study, dearer)], [])


def test_a_readme_without_the_lines_is_refused() -> None:
    with pytest.raises(StudyError, match="are expected"):
        with_section("# x\n", "y\n")
    assert with_section(MARKED, "new\n") == f"# x\n{BEGIN}\nnew\n{END}\nrest\n"
