"""Tables of arms and of their differences, and how tables are written: plain lines, rich, CSV, Markdown, LaTeX, HTML.

A table keeps raw values; text is made when it is rendered, so that every form of it agrees to the digit and CSV keeps
full precision. Differences are computed here from the raw values of the runs, never typed in.
"""

from __future__ import annotations

import csv
import io
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routing_lab.evidence import formatting
from routing_lab.evidence.arms import Arm, group_arms, metric_of
from routing_lab.evidence.formatting import Kind
from routing_lab.evidence.templates import template
from routing_lab.runs.files import natural, write_text
from routing_lab.runs.metrics import EFFICIENCIES, HEADLINES
from routing_lab.runs.records import member_name, scale_label

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from routing_lab.evidence.statistics import Difference


MAX_CELLS_SHOWN = 24
"""A sweep of more cells is shown by its arms alone."""


@dataclass(frozen=True)
class Shown:
    """A value of another kind than its column's, where the rows of a table measure different things."""

    value: Any
    kind: Kind
    is_signed: bool = False


@dataclass(frozen=True)
class Column:
    """One column: its key in CSV, its heading for people, and what kind of number it holds.

    A column of kind `interval` holds pairs (low, high) of numbers of kind `ends`, and becomes two columns in CSV. A
    detail is left out on terminals, which are narrow.
    """

    key: str
    heading: str
    kind: Kind = "text"
    ends: Kind = "number"
    is_signed: bool = False
    is_detail: bool = False

    @property
    def is_text(self) -> bool:
        """Whether the column is set flush left."""
        return self.kind == "text"

    def text(self, value: Any) -> str:
        """A value of this column as text."""
        kind, is_signed = (self.ends if self.kind == "interval" else self.kind), self.is_signed
        if isinstance(value, Shown):
            value, kind, is_signed = value.value, value.kind, value.is_signed
        if self.kind == "interval":
            low, high = value if value is not None else (None, None)
            return formatting.interval(low, high, kind, signed=is_signed)
        return formatting.number(value, kind, signed=is_signed)


@dataclass(frozen=True)
class Table:
    """Raw values in rows, with a caption above and notes below.

    Where rows belong together, the first `once` columns are shown in the first of them alone; CSV has them in all.
    """

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    once: int = 0

    def texts(self) -> list[list[str]]:
        """Every cell as text, row by row."""
        texts = [[column.text(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]
        heads = [row[: self.once] for row in texts]
        for before, head, row in zip([[], *heads], heads, texts, strict=False):
            if before == head:
                row[: self.once] = [""] * self.once
        return texts

    def used(self, *, details: bool = True) -> list[int]:
        """Numbers of the columns in which something stands; those without a single value are not printed."""
        wanted = [i for i, column in enumerate(self.columns) if details or not column.is_detail]
        texts = self.texts()
        return [i for i in wanted if not texts or any(row[i] not in ("", formatting.MISSING) for row in texts)]

    def column(self, key: str) -> list[Any]:
        """Raw values of one column."""
        index = [column.key for column in self.columns].index(key)
        return [row[index].value if isinstance(row[index], Shown) else row[index] for row in self.rows]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return render_html(self)


@dataclass(frozen=True)
class Comparison:
    """An arm against its reference: the difference by seed, or why there is none."""

    arm: Arm
    reference: Arm
    difference: Difference | None
    p_sign_flip: float
    detectable: float
    refusal: str = ""


@dataclass(frozen=True)
class SweepTable:
    """The cells of a sweep, its arms and, where there are several, their differences from the reference arm."""

    cells: Table
    arms: Table
    differences: Table | None
    comparisons: tuple[Comparison, ...]
    members: tuple[Arm, ...]

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables to read, in order; the cells are among them where they fit on a page."""
        tables = [self.cells] if len(self.cells.rows) <= MAX_CELLS_SHOWN else []
        tables.append(self.arms)
        if self.differences is not None:
            tables.append(self.differences)
        return tuple(tables)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return render_html(self)

    def joined(self) -> Table:
        """Both in one table: a row per arm, the difference beside it."""
        if self.differences is None:
            return self.arms
        taken = {column.key for column in self.arms.columns}
        extra = [i for i, column in enumerate(self.differences.columns) if column.key not in taken]
        by_arm = {row[0]: tuple(row[i] for i in extra) for row in self.differences.rows}
        empty = (None,) * len(extra)
        return replace(
            self.arms,
            columns=self.arms.columns + tuple(self.differences.columns[i] for i in extra),
            rows=tuple(row + by_arm.get(row[0], empty) for row in self.arms.rows),
        )


def sweep_table(
    records: Sequence[Mapping[str, Any]],
    *,
    metric: str | None = None,
    reference: str | None = None,
    level: float = 0.95,
) -> SweepTable:
    """One row per arm over its seeds, and the paired differences from the reference arm.

    Args:
        records: what `read_records` or `read_record` gave, in the order in which the arms are to appear.
        metric: key of a metric, the first of `HEADLINES` that there is by default.
        reference: label of the reference arm. By default each arm is compared with the dense arm of the same data
            that differs in the fewest keys; without a dense arm, with the first arm of the same data.
        level: of the intervals.
    """
    arms = group_arms(records)
    shown = formatting.metric(metric or present_metric(arms))
    seeds = sorted({seed for arm in arms for seed in arm.cells})
    references, notes = _references(arms, reference)
    comparisons = tuple(
        compare(arm, references[arm.label], shown.key, level)
        for arm in arms
        if references.get(arm.label, arm) is not arm
    )
    broken = [
        f"unreadable: {record['name']} ({record['reason']})" for record in records if record["status"] == "unreadable"
    ]
    caption = _caption(records, shown.key)
    arms_table = _arms_table(arms, shown, seeds, level, caption, (*notes, *broken))
    differences = difference_table(comparisons, shown.key, caption, level) if comparisons else None
    return SweepTable(_cells_table(arms, shown, caption), arms_table, differences, comparisons, tuple(arms))


def present_metric(arms: Sequence[Arm]) -> str:
    """The metric that is shown of arms where none is asked for: the first headline that some of them have."""
    return next((key for key in HEADLINES if any(arm.values(key) for arm in arms)), HEADLINES[-1])


def factor_table(arms: Sequence[Arm], metric: str, factors: Sequence[str], level: float = 0.95) -> Table:
    """Every arm with its factors beside its mean, ordered by them; arms that agree in all factors stay rows of their
    own, told apart by their label, so that no spread is pooled over configurations.

    Args:
        arms: as grouped by `group_arms`.
        metric: key of a metric or cost.
        factors: keys of the configuration, as `router.name`; an arm without a key has nothing there.
        level: of the intervals.
    """
    from routing_lab.evidence.statistics import summarize

    shown = formatting.metric(metric)
    rows = []
    for arm in arms:
        summary = summarize(list(arm.values(metric).values()), level, formatting.bounds(shown))
        values = [formatting.value_text(arm.config[key]) if key in arm.config else None for key in factors]
        rows.append((*values, arm.label, summary.n, summary.mean, summary.sd, (summary.low, summary.high)))
    rows.sort(key=lambda row: [natural(str(value)) for value in row[: len(factors) + 1]])
    columns = (
        *(Column(key, key) for key in factors),
        Column("arm", "arm"),
        Column("n", "n", "count"),
        Column("mean", shown.heading, shown.kind),
        Column("sd", "sd", shown.kind),
        Column("interval", _level(level), "interval", shown.kind),
    )
    notes = ("one arm a row: no two configurations share a spread",)
    return Table("factors", f"{shown.label} by {', '.join(factors) or 'arm'}", columns, tuple(rows), notes)


def lengths_table(arms: Sequence[Arm], caption: str, level: float = 0.95) -> Table | None:
    """Quality, attended fraction, cached keys and cost of every arm at every length of text that it was tested at.

    None where no run was tested at another length than that of its training.
    """
    from routing_lab.evidence.statistics import summarize

    metric = present_metric(arms)
    if not any(len(arm.lengths(metric)) > 1 for arm in arms):
        return None
    shown = formatting.metric(metric)
    saved = [formatting.metric(key) for key in EFFICIENCIES]
    rows = []
    for arm in arms:
        for length, suffix in arm.lengths(metric).items():
            values = list(arm.values(metric + suffix).values())
            summary = summarize(values, level, formatting.bounds(shown))
            numbers = (summary.n, summary.mean, summary.sd, (summary.low, summary.high))
            rows.append((arm.label, length, *numbers, *(arm.mean(column.key + suffix) for column in saved)))
    columns = (
        Column("arm", "arm"),
        Column("length", "tokens", "count"),
        Column("n", "n", "count"),
        Column("mean", shown.heading, shown.kind),
        Column("sd", "sd", shown.kind),
        Column("interval", _level(level), "interval", shown.kind),
        *(Column(column.key.removeprefix("cost/"), column.label, column.kind) for column in saved),
    )
    notes = ("an arm's first length is that of its training; attended: share of the tokens, mean over routed layers",)
    return Table("lengths", f"By length of text: {caption}", columns, tuple(rows), notes, once=1)


def compare(arm: Arm, reference: Arm, metric: str, level: float = 0.95) -> Comparison:
    """`arm - reference` in `metric`, paired by seed; refused with the seeds that differ where the seeds are not the
    same.
    """
    from routing_lab.evidence import statistics

    a, b = arm.values(metric), reference.values(metric)
    nan = math.nan
    if not a or not b:
        empty = " and ".join(side.label for side, values in ((arm, a), (reference, b)) if not values)
        return Comparison(arm, reference, None, nan, nan, f"no results of {empty}")
    only_arm, only_reference = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
    if only_arm or only_reference:
        sides = [(only_arm, "this arm"), (only_reference, "the reference")]
        parts = [f"{formatting.runs_of(only)} only in {side}" for only, side in sides if only]
        return Comparison(arm, reference, None, nan, nan, f"not compared: seeds differ ({'; '.join(parts)})")
    difference = statistics.paired_by_seed(a, b, level)
    p_sign = nan
    if 1 < difference.n <= statistics.MAX_EXACT_SIGNS:
        p_sign = statistics.sign_flip([a[seed] - b[seed] for seed in sorted(a)]).p_two_sided
    detectable = nan if difference.is_degenerate else statistics.minimum_detectable_effect(difference.sd, difference.n)
    return Comparison(arm, reference, difference, p_sign, detectable)


def difference_table(
    comparisons: Sequence[Comparison], metric: str, caption: str, level: float = 0.95, name: str = "differences"
) -> Table:
    """Paired differences with interval, p values (t, exact sign flip, Holm over the table), detectable effect and
    outcome.
    """
    from routing_lab.evidence import statistics

    shown = formatting.metric(metric)
    holm = statistics.adjust([c.difference.p if c.difference else math.nan for c in comparisons]).tolist()
    rows = []
    for comparison, adjusted in zip(comparisons, holm, strict=True):
        d = comparison.difference
        means = (comparison.arm.mean(metric), comparison.reference.mean(metric))
        if d is None:
            numbers: tuple[Any, ...] = (None, None, None, 0, None, None, None, None)
        else:
            outcome = "" if d.stamp else statistics.outcome(d, higher_is_better=shown.higher_is_better)
            numbers = (
                outcome,
                d.mean,
                (d.low, d.high),
                d.n,
                d.p,
                comparison.p_sign_flip,
                adjusted,
                comparison.detectable,
            )
        rows.append((comparison.arm.label, comparison.reference.label, *means, *numbers, difference_note(comparison)))
    columns = (
        Column("arm", "arm"),
        Column("reference", "against"),
        Column("mean", f"{shown.heading}", shown.kind, is_detail=True),
        Column("reference_mean", "of reference", shown.kind, is_detail=True),
        Column("outcome", "outcome"),
        Column("difference", "difference", shown.kind, is_signed=True),
        Column("difference_interval", _level(level), "interval", shown.kind, is_signed=True),
        Column("pairs", "pairs", "count"),
        Column("p", "p (t)", "p"),
        Column("p_sign_flip", "p (signs)", "p", is_detail=True),
        Column("p_holm", "p (Holm)", "p"),
        Column("detectable", "detectable", shown.kind),
        Column("difference_note", "note"),
    )
    unit = " in percentage points" if shown.kind == "percent" else ""
    notes = (
        f"difference = arm - reference{unit}, paired by seed; outcome by the interval; detectable = smallest true "
        "difference found with probability 0.8; n.s. = the interval contains 0 or the difference is below that one",
    )
    return Table(name, f"Differences: {caption}", columns, tuple(rows), notes)


def difference_note(comparison: Comparison) -> str:
    """What a reader must know of one difference: refusals, `single run`, `n.s.`, differences without spread."""
    d = comparison.difference
    if d is None:
        return comparison.refusal
    if d.stamp:
        return d.stamp
    if d.is_degenerate:
        return "n.s., identical results" if d.mean == 0 else "equal under all seeds: no estimate of noise"
    if d.sign == 0:
        return "n.s."
    return "n.s., below the detectable effect" if abs(d.mean) < comparison.detectable else ""


def pairwise_table(arms: Sequence[Arm], metric: str, caption: str, level: float = 0.95) -> Table:
    """Intervals of the difference of every two arms, row minus column, paired by seed; empty where two cannot be
    compared.
    """
    shown = formatting.metric(metric)
    rows, findings = [], []
    for i, arm in enumerate(arms):
        cells: list[Any] = []
        for k, other in enumerate(arms):
            d = compare(arm, other, metric, level).difference if other is not arm else None
            cells.append(d.interval if d is not None else None)
            if d is not None and k > i and d.sign and not d.stamp:
                better, worse = (arm, other) if (d.sign > 0) == shown.higher_is_better else (other, arm)
                size = formatting.number(abs(d.mean), shown.kind)
                findings.append(f"{better.label} better than {worse.label} by {size}")
        rows.append((arm.label, *cells))
    columns = [Column("arm", "row - column")]
    columns += [Column(arm.label, arm.label, "interval", shown.kind, is_signed=True) for arm in arms]
    count = len(arms) * (len(arms) - 1) // 2
    notes = [f"{_level(level)} of the difference, paired by seed, not adjusted for their number: exploratory"]
    if findings:
        notes.append(
            f"exploratory findings, {len(findings)} of {count} pairs where luck alone gives about "
            f"{(1 - level) * count:.1f}: {'; '.join(findings)}"
        )
    return Table("pairs", f"All pairs (exploratory): {caption}", tuple(columns), tuple(rows), tuple(notes))


def win_counts(comparisons: Sequence[Comparison], metric: str) -> dict[str, int]:
    """Wins, ties and losses by interval over the comparisons that could be made with at least three seeds."""
    from routing_lab.evidence import statistics

    higher = formatting.metric(metric).higher_is_better
    made = [c.difference for c in comparisons if c.difference is not None and not c.difference.stamp]
    outcomes = [statistics.outcome(d, higher_is_better=higher) for d in made]
    return {"win": outcomes.count("win"), "tie": outcomes.count("tie"), "loss": outcomes.count("loss")}


def render_plain(table: Table | SweepTable) -> str:
    """Aligned lines of plain text, without colours or box drawing."""
    if isinstance(table, SweepTable):
        return "\n\n".join(render_plain(part) for part in table.tables)
    body = _tabulated(table, "simple", details=False)
    return "\n".join([table.caption, *(line.rstrip() for line in body.splitlines()), *table.notes])


def render_rich(table: Table | SweepTable) -> list[RichTable]:
    """The same for a terminal: rich tables, to be printed one after the other."""
    from rich.table import Table as RichTable
    from rich.text import Text

    rendered = []
    for part in table.tables if isinstance(table, SweepTable) else (table,):
        used = part.used(details=False)
        notes = Text("\n".join(part.notes), justify="left") if part.notes else None
        rich = RichTable(title=Text(part.caption), caption=notes, title_justify="left", caption_justify="left")
        for i in used:
            column = part.columns[i]
            rich.add_column(Text(column.heading), justify="left" if column.is_text else "right", overflow="fold")
        for row in part.texts():
            rich.add_row(*(Text(row[i]) for i in used))
        rendered.append(rich)
    return rendered


def render_markdown(table: Table | SweepTable) -> str:
    """A GitHub table with the caption above and the notes below."""
    if isinstance(table, SweepTable):
        return "\n\n".join(render_markdown(part) for part in table.tables)
    lines = [f"**{_escape_markdown(table.caption)}**", "", _tabulated(table, "pipe", _escape_markdown)]
    for note in table.notes:
        lines += ["", _escape_markdown(note)]
    return "\n".join(lines)


def render_latex(table: Table | SweepTable) -> str:
    """A `table` environment with booktabs rules."""
    if isinstance(table, SweepTable):
        return "\n\n".join(render_latex(part) for part in table.tables)
    caption = ". ".join([table.caption, *table.notes])
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape_latex(caption)}}}",
            rf"\label{{tab:{_escape_label(table.name)}}}",
            _tabulated(table, "latex_booktabs"),
            r"\end{table}",
        ]
    )


def render_html(table: Table | SweepTable) -> str:
    """A `<figure>` with the caption above and the notes below; details have one of their own, so that neither is wider
    than a window. Rows become blocks where it is narrow.
    """
    if isinstance(table, SweepTable):
        return "\n".join(render_html(part) for part in table.tables)
    parts = [(table.caption, table.used(details=False))]
    if details := [i for i in table.used() if table.columns[i].is_detail]:
        parts.append((f"Details. {table.caption}", [0, *details]))
    return template("table.html.j2").render(table=table, parts=parts, missing=formatting.MISSING)


def write_csv(table: Table | SweepTable, path: Path | str) -> Path:
    """Raw values, one row per arm; floats with the digits that give the same float back, empty cells where nothing is
    known.
    """
    return write_text(path, csv_text(table))


def csv_text(table: Table | SweepTable) -> str:
    """What `write_csv` writes."""
    table = table.joined() if isinstance(table, SweepTable) else table
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([key for column in table.columns for key in _csv_keys(column)])
    for row in table.rows:
        writer.writerow(
            [cell for column, value in zip(table.columns, row, strict=True) for cell in _csv_cells(column, value)]
        )
    return text.getvalue()


def _arms_table(
    arms: Sequence[Arm],
    shown: formatting.Metric,
    seeds: Sequence[int],
    level: float,
    caption: str,
    notes: Sequence[str],
) -> Table:
    from routing_lab.evidence.statistics import summarize

    validation = formatting.metric(shown.key.replace("test/", "val/", 1))
    saved = [formatting.metric(key) for key in EFFICIENCIES if any(arm.values(key) for arm in arms)]
    rows = []
    for arm in arms:
        summary = summarize(list(arm.values(shown.key).values()), level, formatting.bounds(shown))
        note = "; ".join(part for part in (summary.stamp, arm.missing(seeds)) if part)
        scale = ", ".join(sorted({scale_label(record) for record in arm.cells.values()}))
        row = [arm.label, summary.n, summary.mean, summary.sd, (summary.low, summary.high)]
        if validation.key != shown.key:
            row.append(arm.mean(validation.key))
        row += [arm.mean(column.key) for column in saved]
        rows.append((*row, arm.mean("cost/macs_measured"), arm.mean_kept_fraction, scale, note))
    columns = [
        Column("arm", "arm"),
        Column("n", "n", "count"),
        Column("mean", shown.heading, shown.kind),
        Column("sd", "sd", shown.kind),
        Column("interval", _level(level), "interval", shown.kind),
    ]
    if validation.key != shown.key:
        columns.append(Column("val_mean", validation.heading, validation.kind))
    columns += [Column(column.key.removeprefix("cost/"), column.label, column.kind) for column in saved]
    columns += [
        Column("macs_measured", "MACs", "macs"),
        Column("kept_fraction", "kept", "fraction"),
        Column("scale", "scale"),
        Column("note", "note"),
    ]
    notes = ("mean over n seeds, sd with ddof 1, t interval", *notes)
    return Table("arms", f"Arms: {caption}", tuple(columns), tuple(rows), notes)


def _cells_table(arms: Sequence[Arm], shown: formatting.Metric, caption: str) -> Table:
    keys = dict.fromkeys((shown.key, shown.key.replace("test/", "val/", 1), "cost/train_seconds"))
    shown_metrics = [formatting.metric(key) for key in keys]
    rows = []
    for arm in arms:
        for seed, record in sorted(arm.cells.items()):
            values = [metric_of(record, column.key) for column in shown_metrics]
            rows.append((arm.label, seed, record["status"], *values, record["name"]))
    columns = (
        Column("arm", "arm"),
        Column("seed", "seed", "count"),
        Column("status", "status"),
        *(Column(column.key, column.heading, column.kind) for column in shown_metrics),
        Column("run", "run", is_detail=True),
    )
    return Table("cells", f"Cells: {caption}", columns, tuple(rows))


def _references(arms: Sequence[Arm], label: str | None) -> tuple[dict[str, Arm], list[str]]:
    """For each arm the one that it is compared with (itself for a reference), and what has to be said about the
    choice.
    """
    if label is not None:
        chosen = [arm for arm in arms if arm.label == label]
        if not chosen:
            known = ", ".join(arm.label for arm in arms)
            raise ValueError(f"reference={label!r}: no such arm; one of {known} is expected")
        return {arm.label: chosen[0] for arm in arms}, []
    by_data: dict[str, list[Arm]] = {}
    for arm in arms:
        data = {key: value for key, value in arm.config.items() if key.startswith("data.")}
        by_data.setdefault(repr(sorted(data.items(), key=lambda item: item[0])), []).append(arm)
    references: dict[str, Arm] = {}
    notes = []
    for group in by_data.values():
        dense = [arm for arm in group if arm.is_dense]
        if not dense and len(group) > 1:
            notes.append(f"the dense arm (router=dense) is missing here: differences are against {group[0].label}")
        nearest = _Nearest(dense, group)
        for arm in group:
            references[arm.label] = arm if arm.is_dense else nearest.to(arm) if dense else group[0]
    return references, notes


class _Nearest:
    """The dense arm that differs from an arm in the fewest keys."""

    def __init__(self, dense: Sequence[Arm], group: Sequence[Arm]) -> None:
        self._dense = dense
        keys = dict.fromkeys(key for arm in group for key in arm.config)
        self._varying = [key for key in keys if len({repr(arm.config.get(key)) for arm in group}) > 1]
        self._values = [self._of(arm) for arm in dense]

    def to(self, arm: Arm) -> Arm:
        own = self._of(arm)
        differing = [sum(map(operator.ne, own, values)) for values in self._values]
        return self._dense[differing.index(min(differing))]

    def _of(self, arm: Arm) -> tuple[Any, ...]:
        return tuple(arm.config.get(key) for key in self._varying)


def _caption(records: Sequence[Mapping[str, Any]], metric: str) -> str:
    def names(axis: str) -> str:
        return ", ".join(dict.fromkeys(name for record in records if (name := member_name(record, axis)))) or "unknown"

    known = [record for record in records if record["status"] != "unreadable"]
    scales = ", ".join(dict.fromkeys(scale_label(record) for record in known)) or "unknown"
    return f"{metric}, {names('backbone')} on {names('data')}, scale: {scales}"


def _level(level: float) -> str:
    return f"{100 * level:g} % interval"


def _csv_keys(column: Column) -> list[str]:
    return [f"{column.key}_low", f"{column.key}_high"] if column.kind == "interval" else [column.key]


def _csv_cells(column: Column, value: Any) -> list[str]:
    value = value.value if isinstance(value, Shown) else value
    values = (value or (None, None)) if column.kind == "interval" else (value,)
    return ["" if v is None or (isinstance(v, float) and math.isnan(v)) else _exact(v) for v in values]


def _exact(value: Any) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


def _tabulated(table: Table, form: str, escape: Callable[[str], str] = str, *, details: bool = True) -> str:
    from tabulate import tabulate

    used = table.used(details=details)
    rows = [[escape(row[i]) for i in used] for row in table.texts()] or [[formatting.MISSING] * len(used)]
    return tabulate(
        rows,
        headers=[escape(table.columns[i].heading) for i in used],
        tablefmt=form,
        colalign=["left" if table.columns[i].is_text else "right" for i in used],
        disable_numparse=True,
    )


def _escape_markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "$": r"\$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _escape_label(text: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in text)
