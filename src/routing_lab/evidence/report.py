"""The report: everything that a folder of runs, or a study, has to show, as HTML, Markdown, CSV and LaTeX.

A report is a list of sections with text, tables and figures, made from records alone. It says nothing of the time and
place at which it is made, so that the same records give the same bytes. The HTML is one file with its style and
figures inside.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from routing_lab.evidence import figures, tables
from routing_lab.evidence.claims import Claim, judge
from routing_lab.evidence.figures import Drawing
from routing_lab.evidence.pilot import is_pilot
from routing_lab.evidence.registration import Plan
from routing_lab.evidence.sections import Section, claims_section, study_section, summary_section, sweep_section
from routing_lab.evidence.study import Study
from routing_lab.evidence.tables import SweepTable, Table
from routing_lab.evidence.templates import template
from routing_lab.evidence.verdict import StudyResult, evaluate
from routing_lab.runs.files import write_text
from routing_lab.runs.records import member_name, tidy_rows

FORMATS = ("html", "md", "csv", "latex")


@dataclass(frozen=True)
class Report:
    """Sections in reading order, and the records that they were made from."""

    title: str
    sections: tuple[Section, ...]
    records: tuple[Mapping[str, Any], ...]


def build_report(
    records: Sequence[Mapping[str, Any]],
    *,
    plans: Iterable[Plan] = (),
    studies: Iterable[Study] = (),
    results: Sequence[StudyResult] = (),
    claims: Sequence[Claim] = (),
    title: str = "routing_lab report",
) -> Report:
    """Assemble the report of some records.

    Args:
        records: as read by `read_records`.
        plans: planned studies; each is judged by the runs that its plan names.
        studies: studies without a plan, judged by what the records say of study and arm; those without records are
            left out, and so are those that have a plan.
        results: studies that have been judged by these records, in the place of their plans.
        claims: judged by all these studies.
        title: heading of the report.
    """
    pilots = [record for record in records if is_pilot(record)]
    records = [record for record in records if not is_pilot(record)]
    results = [*results, *(evaluate(plan.study, records, plan=plan) for plan in plans)]
    planned = {result.study.name for result in results}
    for study in studies:
        if study.name not in planned:
            results += _unplanned(study, records)
    shown = {id(record) for result in results for arm in result.arms.values() for record in arm.cells.values()}
    rest = [record for record in records if id(record) not in shown and record["status"] != "unreadable"]
    sections = [summary_section(records, results, len(pilots))]
    sections += [study_section(result) for result in results]
    if claims:
        sections.append(claims_section(judge(claims, results)))
    sections += [sweep_section(data, group) for data, group in _by_data(rest).items()]
    return Report(title, tuple(_unique(sections)), tuple(records))


def to_html(report: Report) -> str:
    """One self-contained page: style and figures inside, nothing loaded from elsewhere, no script."""
    return template("report.html.j2").render(report=report, is_drawing=_is_drawing, table=_table_html, svg=_svg) + "\n"


def to_markdown(report: Report) -> str:
    """The text and tables as Markdown; figures are in the HTML."""
    return template("report.md.j2").render(report=report, table=tables.render_markdown).rstrip() + "\n"


def to_latex(report: Report) -> str:
    """The tables as LaTeX, for `\\input`; they need the package booktabs."""
    return "\n\n".join(tables.render_latex(table) for section in report.sections for table in section.tables) + "\n"


def to_csv(report: Report) -> dict[str, str]:
    """File name to CSV text: one file per table with raw values, and `runs.csv` with one row per run."""
    files = {"runs.csv": _runs_csv(report.records)}
    for section in report.sections:
        for table in section.tables:
            name = "sweep" if isinstance(table, SweepTable) else table.name
            files[f"{section.name}-{name}.csv"] = tables.csv_text(table)
    return files


def write_report(report: Report, folder: Path | str, formats: Iterable[str] = ("html", "md", "csv")) -> list[Path]:
    """Write the report into `folder` (created if need be); returns the files written.

    Raises:
        ValueError: a format other than `FORMATS`.
    """
    wanted = list(dict.fromkeys(formats))
    unknown = [name for name in wanted if name not in FORMATS]
    if unknown:
        raise ValueError(f"format={unknown[0]!r}: one of {', '.join(FORMATS)} is expected")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in wanted:
        if name == "html":
            written.append(write_text(folder / "report.html", to_html(report)))
        elif name == "md":
            written.append(write_text(folder / "report.md", to_markdown(report)))
        elif name == "latex":
            written.append(write_text(folder / "report.tex", to_latex(report)))
        else:
            written += [write_text(folder / file, text) for file, text in to_csv(report).items()]
    return written


def _runs_csv(records: Sequence[Mapping[str, Any]]) -> str:
    rows = tidy_rows(records)
    # Where the folders stand would make the file differ between machines.
    keys = dict.fromkeys(key for row in rows for key in row if key != "folder")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(keys), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _unplanned(study: Study, records: Sequence[Mapping[str, Any]]) -> list[StudyResult]:
    """A result per scale of which there are records; records that carry the bare name count for every scale at once."""
    present = {record["study"] for record in records if record["study"]}
    if study.name in present:
        return [evaluate(study, records)]
    return [evaluate(study, records, scale=scale) for scale in study.scales if study.key(scale) in present]


def _by_data(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(member_name(record, "data") or "unknown data", []).append(record)
    return groups


def _unique(sections: Iterable[Section]) -> list[Section]:
    taken: Counter[str] = Counter()
    unique = []
    for section in sections:
        taken[section.name] += 1
        name = section.name if taken[section.name] == 1 else f"{section.name}-{taken[section.name]}"
        unique.append(replace(section, name=name))
    return unique


def _is_drawing(part: object) -> bool:
    return isinstance(part, Drawing)


def _table_html(part: Table | SweepTable) -> Markup:
    return Markup(tables.render_html(part))


def _svg(section: Section, drawing: Drawing) -> Markup:
    return Markup(figures.numbered(drawing, f"{section.name}-{drawing.name}").svg)
