"""The report: everything that a folder of runs, or a study, has to show, as HTML, Markdown, CSV and LaTeX.

A report is a list of sections with text, tables and figures, made from records alone. It carries no time, no machine
and no path, so that the same records give the same bytes. The HTML is one file with its style and figures inside.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routing_lab.evidence import figures, tables
from routing_lab.evidence.arms import Arm
from routing_lab.evidence.claims import Claim, claims_table, judge
from routing_lab.evidence.figures import Drawing, Row
from routing_lab.evidence.pilot import is_pilot
from routing_lab.evidence.registration import Plan
from routing_lab.evidence.study import Study
from routing_lab.evidence.tables import SweepTable, Table, pairwise_table, sweep_table
from routing_lab.evidence.verdict import StudyResult, effects_table, evaluate, verdict_text
from routing_lab.runs.files import write_text
from routing_lab.runs.metrics import HEADLINES, THROUGHPUTS
from routing_lab.runs.records import member_name, tidy_rows

FORMATS = ("html", "md", "csv", "latex")
MAX_PAIRWISE = 8
"""Arms of a study up to which the table of all pairs is shown."""


@dataclass(frozen=True)
class Section:
    """A heading with lines of text, tables and figures, in that order. `name` is unique in the report and safe in
    file names.
    """

    name: str
    title: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table | SweepTable, ...] = ()
    drawings: tuple[Drawing, ...] = ()


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
    claims: Sequence[Claim] = (),
    title: str = "routing_lab report",
) -> Report:
    """Assemble the report of some records.

    Args:
        records: as read by `read_records`.
        plans: planned studies; each is judged by the runs that its plan names.
        studies: studies without a plan, judged by what the records say of study and arm; those without records are
            left out, and so are those that have a plan.
        claims: judged by all these studies.
        title: heading of the report.
    """
    plans = list(plans)
    pilots = [record for record in records if is_pilot(record)]
    records = [record for record in records if not is_pilot(record)]
    results = [evaluate(plan.study, records, plan=plan) for plan in plans]
    planned = {plan.study.name for plan in plans}
    for study in studies:
        if study.name not in planned:
            results += _unplanned(study, records)
    shown = {id(record) for result in results for arm in result.arms.values() for record in arm.cells.values()}
    rest = [record for record in records if id(record) not in shown and record["status"] != "unreadable"]
    sections = [_summary(records, results, len(pilots))]
    if claims:
        sections.append(Section("claims", "Claims", tables=(claims_table(judge(claims, results)),)))
    sections += [_study_section(result) for result in results]
    sections += [_sweep_section(data, group) for data, group in _by_data(rest).items()]
    return Report(title, tuple(_unique(sections)), tuple(records))


def to_html(report: Report) -> str:
    """One self-contained page: style and figures inside, nothing loaded from elsewhere, no script."""
    links = "".join(f'<li><a href="#{s.name}">{html.escape(s.title)}</a></li>' for s in report.sections)
    body = "\n".join(_html_section(section) for section in report.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(report.title)}</title>\n<style>\n{_CSS}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(report.title)}</h1>\n<nav><ul>{links}</ul></nav>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def to_markdown(report: Report) -> str:
    """The text and tables as Markdown; figures are in the HTML."""
    parts = [f"# {report.title}"]
    for section in report.sections:
        parts.append(f"## {section.title}")
        if section.lines:
            parts.append("\n".join(f"{line}  " for line in section.lines))
        parts += [tables.render_markdown(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


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


def _summary(records: Sequence[Mapping[str, Any]], results: Sequence[StudyResult], num_pilots: int) -> Section:
    states = Counter(record["status"] for record in records)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    lines = [f"Runs: {len(records)} ({counts})"]
    lines += [f"Runs of pilots, never counted: {num_pilots}"] if num_pilots else []
    lines += [
        f"Unreadable: {record['name']}: {record['reason']}" for record in records if record["status"] == "unreadable"
    ]
    lines += [f"Study {r.study.name} (scale: {r.scale}): {r.verdict.heading}: {r.verdict.says}" for r in results]
    return Section("summary", "Summary", tuple(lines))


def _study_section(result: StudyResult) -> Section:
    study = result.study
    arms = [arm for arm in result.arms.values() if arm.cells]
    caption = f"{study.metric}, study {study.name}, scale: {result.scale}"
    parts: list[Table | SweepTable] = [effects_table(result)]
    if arms:
        records = [record for arm in arms for record in arm.cells.values()]
        relabelled = [{**record, "arm": arm.label} for arm in arms for record in arm.cells.values()]
        has_reference = any(arm.label == study.reference for arm in arms)
        parts.append(
            sweep_table(
                relabelled if records else [],
                metric=study.metric,
                reference=study.reference if has_reference else None,
                level=study.decision.level,
            )
        )
        if 2 < len(arms) <= MAX_PAIRWISE:
            parts.append(pairwise_table(arms, study.metric, caption, study.decision.level))
    rows = [
        Row(name, c.difference.mean, c.difference.low, c.difference.high)
        for name, c in result.comparisons.items()
        if c.difference is not None
    ]
    drawn = [figures.forest(rows, study.metric, f"Contrasts, {caption}"), *_drawings(arms, study.metric, caption)]
    lines = tuple(verdict_text(result).splitlines())
    name = _slug(f"study-{study.key(result.scale)}")
    return Section(name, f"Study: {study.name}", lines, tuple(parts), tuple(d for d in drawn if d is not None))


def _sweep_section(data: str, records: Sequence[Mapping[str, Any]]) -> Section:
    table = sweep_table(records)
    metric = next((key for key in HEADLINES if figures.has_values(table.members, key)), HEADLINES[-1])
    caption = table.arms.caption.removeprefix("Arms: ")
    rows = [
        Row(f"{c.arm.label}", c.difference.mean, c.difference.low, c.difference.high)
        for c in table.comparisons
        if c.difference is not None
    ]
    drawn = [figures.forest(rows, metric, f"Differences from the reference arm, {caption}")]
    drawn += _drawings(table.members, metric, caption)
    wins = tables.win_counts(table.comparisons, metric)
    lines: tuple[str, ...] = ()
    if sum(wins.values()):
        reference = "against the reference arm, by interval"
        lines = (f"{wins['win']} wins, {wins['tie']} ties, {wins['loss']} losses {reference}",)
    return Section(_slug(f"runs-{data}"), f"Runs on {data}", lines, (table,), tuple(d for d in drawn if d is not None))


def _drawings(arms: Sequence[Arm], metric: str, caption: str) -> list[Drawing | None]:
    validation = metric.replace("test/", "val/", 1)
    drawn = [figures.pareto(arms, metric, "cost/macs_measured", f"Accuracy over measured cost, {caption}")]
    drawn += [
        figures.pareto(arms, metric, throughput, f"Accuracy over throughput, {caption}", "throughput")
        for throughput in THROUGHPUTS
        if figures.has_values(arms, throughput)
    ]
    drawn.append(figures.curves(arms, validation, f"Training curves of {validation}, {caption}"))
    drawn.append(figures.kept_fractions(arms, f"Tokens kept, measured on the test split, {caption}"))
    return drawn


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
        unique.append(Section(name, section.title, section.lines, section.tables, section.drawings))
    return unique


def _html_section(section: Section) -> str:
    parts = [f'<section id="{section.name}">', f"<h2>{html.escape(section.title)}</h2>"]
    parts += [f"<p{_indent(line)}>{html.escape(line.strip())}</p>" for line in section.lines]
    parts += [tables.render_html(table) for table in section.tables]
    for drawing in section.drawings:
        svg = figures.numbered(drawing, f"{section.name}-{drawing.name}").svg
        caption = html.escape(drawing.caption)
        parts.append(f'<figure class="drawing">\n{svg}<figcaption>{caption}</figcaption>\n</figure>')
    return "\n".join([*parts, "</section>"])


def _indent(line: str) -> str:
    return ' class="in"' if line.startswith("  ") else ""


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


_CSS = """\
:root { color-scheme: light; }
body { font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; padding: 0 1rem 3rem;
  max-width: 72rem; }
h1 { font-size: 1.5rem; margin: 1rem 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-bottom: 1px solid #ccc; padding-bottom: .2rem; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1rem; }
a { color: #0057a8; }
p { margin: .2rem 0; overflow-wrap: anywhere; }
p.in { margin-left: 1.2rem; }
figure { margin: 1.2rem 0; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
figure.drawing figcaption { font-weight: 400; font-size: .9rem; max-width: 40rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e2e2e2; }
th { font-weight: 400; }
tbody th { position: sticky; left: 0; background: #fff; min-width: 8rem; max-width: 16rem; overflow-wrap: anywhere; }
thead th { font-weight: 600; border-bottom: 1px solid #888; }
th.n, td.n { text-align: right; white-space: nowrap; }
.notes { font-size: .85rem; color: #444; margin-top: .3rem; max-width: 60rem; }
svg { width: 100%; max-width: 40rem; height: auto; }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  nav { display: none; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .1rem .3rem; }
  th.n, td.n { white-space: normal; }
  tbody th { position: static; min-width: 0; }
}
"""
