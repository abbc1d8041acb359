"""The report: from records to files, with the same bytes every time and without torch."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.evidence.synthetic import STORED, write_arms, write_run
from tests.evidence.test_study import CONTENT, content, write_study

from routing_lab import report as command
from routing_lab.evidence import claims, figures
from routing_lab.evidence.arms import group_arms
from routing_lab.evidence.registration import Cell, append, read_plans, register
from routing_lab.evidence.report import build_report, to_html, to_latex, to_markdown, write_report
from routing_lab.evidence.study import StudyError, parse_study
from routing_lab.evidence.tables import SweepTable, pairwise_table, sweep_table
from routing_lab.evidence.verdict import evaluate
from routing_lab.runs.records import read_records

ARMS: dict[str, Any] = {
    "amod": ({"router": "amod"}, 0.95),
    "dense": ({"router": "dense"}, 0.96),
    "linear": ({"router": "linear", "capacity.fraction": 0.25}, 0.93),
}

SHIPPED = Path(__file__).parents[2] / "experiments" / "results" / "confound_2x2.toy" / "runs"
MARGIN_RULES: dict[str, Any] = {
    "decision__rules": [
        {"verdict": "supports", "says": "better", "when": {"source at none": "superior"}},
        {"verdict": "contradicted", "says": "no better", "when": {"source at none": "non-superior"}},
    ]
}


class Page(HTMLParser):
    """Collects what a test asks of a page: unclosed elements, identifiers, references, table cells."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    write_arms(root, ARMS, range(4), epochs=5)
    write_study(root, {"amod_none": 0.93, "amod_multiply": 0.92, "linear_none": 0.91}, epochs=3)
    write_run(root, {"router": "random"}, 0, 0.0, status="failed")
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{")
    return root


def study_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "confound.yaml"
    path.write_text(json.dumps(content(**changes)))
    return path


def test_report_of_a_folder(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_file(tmp_path / "experiments")
    found = ["--experiments", str(tmp_path / "experiments")]
    assert command.main([str(runs), "--html", "--md", "--csv", "--latex", *found]) == 0
    printed = capsys.readouterr().out
    assert "Runs: 44 (1 failed, 42 finished, 1 unreadable)" in printed
    assert "Study confound (scale: toy): supports: it is the source" in printed
    names = sorted(path.name for path in (runs / "report").iterdir())
    assert names == [
        "report.html",
        "report.md",
        "report.tex",
        "runs-digits-sweep.csv",
        "runs.csv",
        "study-confound-toy-design.csv",
        "study-confound-toy-effects.csv",
        "study-confound-toy-facts.csv",
        "study-confound-toy-pairs.csv",
        "study-confound-toy-rules.csv",
        "study-confound-toy-sweep.csv",
    ]
    page = (runs / "report" / "report.html").read_text()
    for text in (
        "failed: seed 0",
        "Unreadable: broken",
        'Verdict: <span class="word supports">supports</span> it is the source',
        "Not registered: nothing shows that the rules stood before the results",
        "1: met",
        "scale: toy",
    ):
        assert text in page
    assert page.count("<svg") == 8
    with open(runs / "report" / "runs.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 44


def test_page_is_whole_self_contained_and_has_unique_identifiers(runs: Path) -> None:
    page = Page(to_html(build_report(read_records(runs), studies=[parse_study(CONTENT)])))
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not page.tags & {"script", "img", "link", "iframe"}
    assert {"figcaption", "svg", "table", "nav"} <= page.tags


def test_the_same_records_give_the_same_bytes_wherever_they_stand(runs: Path, tmp_path: Path) -> None:
    study = parse_study(CONTENT)
    formats = ("html", "md", "csv", "latex")
    first = write_report(build_report(read_records(runs), studies=[study]), tmp_path / "one", formats)
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(runs, moved)
    second = write_report(build_report(read_records(moved), studies=[study]), tmp_path / "two", formats)
    assert [p.name for p in first] == [p.name for p in second]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()


def stored_report() -> str:
    return to_markdown(build_report(read_records(STORED), studies=[parse_study(content(seeds=[0, 1, 2, 3]))]))


def test_stored_runs_give_the_stored_report() -> None:
    # Written by: python -m tests.evidence.test_report, and checked by eye.
    assert stored_report() == (STORED.parent / "report.md").read_text(encoding="utf-8")


def test_a_study_begins_with_its_verdict_and_shows_registration_rules_and_how_it_was_run(runs: Path) -> None:
    records = [record for record in read_records(runs) if record["study"]]
    cells = [Cell(record["arm"], record["seed"], record["run_id"]) for record in records]
    study = parse_study(content(scales__toy__spread=0.01, margin={"size": 0.01, "because": "b"}, **MARGIN_RULES))
    options: dict[str, Any] = {"versions": {}, "now": datetime(2026, 12, 1, tzinfo=UTC)}
    first = register(None, study, "toy", cells, **options)
    changed = study.model_copy(update={"reference": "amod_none"})
    done = {cell.run_id for cell in cells}
    amended = register(first, changed, "toy", cells, finished=done, reason="we looked", **options)
    records[0]["warnings"] = ["layer 3 is idle"]
    records[1] |= {"status": "failed"}
    Path(records[1]["folder"], "error.log").write_text("Traceback\nValueError: boom\n")
    (section,) = [s for s in build_report(records, plans=[amended]).sections if s.headline]
    assert section.headline is not None
    notes = "\n".join(section.headline.notes)
    assert "Missing: " in notes
    by_name = {table.name: table for table in section.tables if not isinstance(table, SweepTable)}
    assert by_name["registration"].column("event") == ["registered", "amended"]
    assert by_name["registration"].column("reason") == ["", "we looked"]
    assert list(by_name)[:3] == ["registration", "rules", "effects"]
    assert by_name["rules"].column("verdict") == ["supports", "contradicted"]
    assert by_name["rules"].column("power")[0].endswith(" %")
    facts = dict(by_name["facts"].rows)
    assert facts["cells"] == "29 finished"
    assert {"seeds", "data", "recipe", "commit"} <= facts.keys()
    assert [row[:2] for row in by_name["trouble"].rows] == [
        ("warning", "layer 3 is idle"),
        ("failed", "ValueError: boom"),
    ]


def test_every_figure_is_drawn_from_the_shipped_records() -> None:
    records = read_records(SHIPPED)
    (plan,) = read_plans(SHIPPED)
    report = build_report(records, plans=[plan])
    drawn = [drawing for section in report.sections for drawing in section.drawings]
    assert [drawing.name for drawing in drawn] == ["forest-differences", "pareto", "speed", "curves", "kept"]
    forest, pareto, speed, _, kept = drawn
    for words in ("lines: intervals", "dots: one a seed", "triangles: smallest effect", "grey: read by no rule"):
        assert words in forest.caption
    assert all(f">{name}<" in forest.svg for name in plan.study.read_effects)
    assert "over training throughput" in speed.caption
    assert "training throughput, " in speed.svg
    assert "Arms of equal MACs are drawn side by side" in pareto.caption
    assert "Arms are drawn side by side at every layer" in kept.caption


def test_report_html_markdown_latex_and_csv_agree_to_the_digit(runs: Path, tmp_path: Path) -> None:
    report = build_report(read_records(runs), studies=[parse_study(CONTENT)])
    write_report(report, tmp_path / "out", ("html", "md", "csv", "latex"))
    cells = set(Page((tmp_path / "out" / "report.html").read_text()).cells)
    markdown, latex = to_markdown(report), to_latex(report)
    with open(tmp_path / "out" / "runs-digits-sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    for row in rows:
        for key in ("mean", "sd", "difference", "difference_interval_low"):
            if row[key]:
                shown = f"{100 * float(row[key]):{'+' if 'difference' in key else ''}.2f}"
                if key == "difference_interval_low":
                    assert any(cell.startswith(f"[{shown}, ") for cell in cells)
                else:
                    assert shown in cells
                assert shown in markdown
                assert shown in latex
        if row["difference"]:
            recomputed = float(row["mean"]) - float(row["reference_mean"])
            assert float(row["difference"]) == pytest.approx(recomputed, abs=1e-12)


def test_every_table_has_the_scale_in_its_caption(runs: Path) -> None:
    report = build_report(read_records(runs), studies=[parse_study(CONTENT)])
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", to_html(report))
    assert len(captions) > 10
    assert all("scale: toy" in caption for caption in captions)


def test_report_of_a_study_takes_its_runs_alone(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study_file(tmp_path / "experiments")
    assert command.main([str(path), "--runs", str(runs), "--md"]) == 0
    assert "Runs: 30 (30 finished)" in capsys.readouterr().out
    text = (tmp_path / "experiments" / "confound.report" / "report.md").read_text()
    assert "Study: confound" in text
    assert "Runs on digits" not in text


def test_planned_study_is_judged_by_its_plan(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record for record in read_records(runs) if record["study"]]
    cells = tuple(Cell(record["arm"], record["seed"], record["run_id"]) for record in records)
    plan = register(None, parse_study(CONTENT), "toy", cells, versions={}, now=datetime(2026, 12, 1, tzinfo=UTC))
    append(plan, runs)
    (runs / "studies" / "confound.toy.verdict.json").write_text("{}")
    assert command.main([str(runs), "--csv", "--experiments", str(tmp_path / "none")]) == 0
    assert "Study confound (scale: toy): supports" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["absent"], ["empty"], ["bad.yaml"], ["confound.yaml", "--runs", "empty"]])
def test_nothing_to_report_is_one_line_and_exit_code_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.yaml").write_text("question: x\n")
    study_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "Traceback" not in streams.err
    assert streams.err.strip()


def test_claims_are_judged_by_their_studies(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    effect = {"study": "confound", "effect": "source: attention - linear"}
    entries = [
        {"claim": "Attention routes better.", "source": "a paper", "tests": [effect | {"expected": "superior"}]},
        {"claim": "It routes worse.", "source": "a review", "tests": [effect | {"expected": "inferior"}]},
        {
            "claim": "Both.",
            "source": "x",
            "tests": [effect | {"expected": "superior"}, effect | {"study": "other", "expected": "< 0.001"}],
        },
        {"claim": "Untested.", "source": "y", "tests": [effect | {"study": "never", "expected": "superior"}]},
    ]
    path.write_text(json.dumps({"claims": entries}))
    loaded = claims.load_claims(path)
    records = read_records(runs)
    study = parse_study(CONTENT)
    other = parse_study(content(name="other"))
    records += [{**record, "study": "other"} for record in records if record["study"]]
    results = [evaluate(study, records), evaluate(other, records)]
    findings = claims.judge(loaded, results)
    assert [finding.verdict for finding in findings] == ["supports", "contradicted", "mixed", "not run"]
    table = claims.claims_table(findings)
    assert table.column("study") == ["confound", "confound", "confound", "other", "never"]
    assert table.column("reading") == ["supports", "contradicted", "supports", "contradicted", "not run"]
    assert "Attention routes better." in to_html(build_report(records, studies=[study], claims=loaded))


@pytest.mark.parametrize("text", ["claims: 3\n", "other: []\n", "claims: [{claim: x}]\n", "a: [\n"])
def test_claims_that_cannot_be_read_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(StudyError, match=r"claims\.yaml"):
        claims.load_claims(tmp_path / "claims.yaml")


def test_pairwise_intervals_mirror_each_other(runs: Path) -> None:
    records = [record for record in read_records(runs) if record["status"] == "finished" and not record["study"]]
    table = pairwise_table(group_arms(records), "test/acc", "x, scale: toy")
    low, high = table.rows[0][2]
    assert table.rows[1][1] == (pytest.approx(-high), pytest.approx(-low))
    assert table.rows[0][1] is None


def test_figures_say_what_they_leave_out_and_draw_single_runs_without_interval(tmp_path: Path) -> None:
    nan = float("nan")
    rows = [figures.Row(f"arm {i}", 0.001 * i, 0.0, 0.002 * i) for i in range(50)] + [
        figures.Row("single", 0.9, nan, nan)
    ]
    accuracy = figures.Measure.of_difference("test/acc")
    drawing = figures.forest(rows, accuracy, "Differences")
    assert drawing is not None
    assert drawing.caption == "Differences (lines: intervals). The 40 largest of 51 effects; the table has all"
    assert "arm 49" in drawing.svg
    assert ">arm 3<" not in drawing.svg
    assert "single" in drawing.svg
    assert figures.forest([], accuracy, "none") is None

    write_arms(tmp_path, {"a": ({"router": "amod"}, 0.9)}, [0], epochs=3)
    arms = group_arms(read_records(tmp_path))
    assert figures.pareto(arms, "test/acc", "cost/macs_measured", "one point") is None
    assert figures.curves(arms, "val/acc", "curve") is not None
    assert figures.curves(arms, "val/other", "curve") is None
    write_arms(
        tmp_path, {f"{i}": ({"router": "amod", "capacity.fraction": i / 20}, 0.9) for i in range(1, 15)}, [0], epochs=2
    )
    arms = group_arms(read_records(tmp_path))
    for drawing in (
        figures.curves(arms, "val/acc", "curves"),
        figures.kept_fractions(arms, "kept"),
    ):
        assert drawing is not None
        assert "The first 12 of 14" in drawing.caption
    assert figures.pareto(arms, "test/acc", "cost/macs_measured", "many") is not None


def test_captions_and_labels_are_escaped_in_figures() -> None:
    row = figures.Row("a<b> & $x_1$", 0.1, 0.0, 0.2)
    drawing = figures.forest([row], figures.Measure.of_difference("test/acc"), 'A <b> & "c"')
    assert drawing is not None
    assert "<title>A &lt;b&gt; &amp; &quot;c&quot; (lines: intervals)</title>" in drawing.svg
    assert "<b>" not in drawing.svg


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format='pdf'"):
        write_report(build_report([]), tmp_path, ["pdf"])


def test_wins_are_counted_by_interval(runs: Path) -> None:
    records = [record for record in read_records(runs) if not record["study"]]
    text = to_markdown(build_report(records))
    assert "0 wins, 0 ties, 2 losses against the reference arm, by interval" in text
    assert sweep_table(records).differences is not None


def test_report_loads_no_torch(runs: Path) -> None:
    code = (
        "import sys\nfrom routing_lab.report import main\n"
        f"main([{str(runs)!r}, '--html'])\n"
        "print([m for m in ('torch', 'timm', 'lightning', 'hydra', 'scipy.stats') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


if __name__ == "__main__":
    (STORED.parent / "report.md").write_text(stored_report(), encoding="utf-8")
