"""What a report says and shows, section by section: of a folder, of claims, of a study, of runs that belong to none.

A section of a study begins with its verdict and what it must not be read without: amendments, missing cells, in what
its cells differ. Then come the registration, the rules as registered with what was observed, the effects, and how it
was run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from routing_lab.evidence import figures, formatting, tables
from routing_lab.evidence.arms import Arm, without_followers
from routing_lab.evidence.claims import ClaimFinding, claims_table
from routing_lab.evidence.effects import Effect, outcome_text
from routing_lab.evidence.figures import Drawing, Measure, Row
from routing_lab.evidence.power import rule_powers
from routing_lab.evidence.study import SAVING, Study
from routing_lab.evidence.tables import Column, SweepTable, Table, pairwise_table, sweep_table
from routing_lab.evidence.verdict import StudyResult, design_lines, effects_table, role
from routing_lab.runs.metrics import ATTENDED, DYNAMICS, HEADLINES, THROUGHPUTS
from routing_lab.runs.records import member_name

MAX_PAIRWISE = 12
"""Arms of a study up to which the table of all pairs is shown."""


@dataclass(frozen=True)
class Headline:
    """A verdict in large letters: its word, what it says, and what it must not be read without."""

    word: str
    heading: str
    says: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A heading with a verdict, lines of text, and tables and figures in reading order. `name` is unique in the report
    and safe in file names.
    """

    name: str
    title: str
    lines: tuple[str, ...] = ()
    parts: tuple[Table | SweepTable | Drawing, ...] = ()
    headline: Headline | None = None

    @property
    def tables(self) -> tuple[Table | SweepTable, ...]:
        """Its tables."""
        return tuple(part for part in self.parts if not isinstance(part, Drawing))

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        """Its figures."""
        return tuple(part for part in self.parts if isinstance(part, Drawing))


def summary_section(
    records: Sequence[Mapping[str, Any]], results: Sequence[StudyResult], num_pilots: int = 0
) -> Section:
    """How many runs there are, in which state, and the verdict of every study."""
    states = Counter(record["status"] for record in records)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    lines = [f"Runs: {len(records)} ({counts})"]
    lines += [f"Runs of pilots, never counted: {num_pilots}"] if num_pilots else []
    lines += [
        f"Unreadable: {record['name']}: {record['reason']}" for record in records if record["status"] == "unreadable"
    ]
    lines += [f"Study {r.study.name} (scale: {r.scale}): {r.verdict.heading}: {r.verdict.says}" for r in results]
    return Section("summary", "Summary", tuple(lines))


def claims_section(findings: Sequence[ClaimFinding]) -> Section:
    """Every claim with its verdict, once, and the effects that test it."""
    return Section("claims", "Claims", parts=(claims_table(findings),))


def study_section(result: StudyResult) -> Section:
    """Everything that a study has to show."""
    study = result.study
    arms = [arm for arm in result.arms.values() if arm.cells]
    caption = f"{study.metric}, study {study.name}, scale: {result.scale}"
    parts: list[Table | SweepTable | Drawing | None] = [
        registration_table(result),
        rules_table(result),
        _controls_table(result),
        effects_table(result),
        *_forests(result),
        _design_table(result),
        facts_table(result),
        _trouble_table(result),
    ]
    if arms:
        of_arms = {arm.label: without_followers(list(arm.cells.values())) for arm in arms}
        relabelled = [{**record, "arm": label} for label, records in of_arms.items() for record in records]
        has_reference = any(arm.label == study.reference for arm in arms)
        reference = study.reference if has_reference else None
        parts.append(sweep_table(relabelled, metric=study.metric, reference=reference, level=study.decision.level))
        if 2 < len(arms) <= MAX_PAIRWISE:
            parts.append(pairwise_table(arms, study.metric, caption, study.decision.level))
    parts += _over_lengths(arms, f"study {study.name}, scale: {result.scale}", study.decision.level)
    parts += _drawings(arms, study.metric, caption)
    return Section(
        slug(f"study-{study.key(result.scale)}"),
        f"Study: {study.name}",
        (f"Question: {study.question}", f"Hypothesis: {study.hypothesis.statement}"),
        tuple(part for part in parts if part is not None and (not isinstance(part, Table) or part.rows)),
        _headline(result),
    )


def sweep_section(data: str, records: Sequence[Mapping[str, Any]]) -> Section:
    """Runs on one data set that belong to no study."""
    table = sweep_table(records)
    metric = next((key for key in HEADLINES if figures.has_values(table.members, key)), HEADLINES[-1])
    caption = table.arms.caption.removeprefix("Arms: ")
    rows = [
        Row(f"{c.arm.label}", c.difference.mean, c.difference.low, c.difference.high)
        for c in table.comparisons
        if c.difference is not None
    ]
    forest = figures.forest(rows, Measure.of_difference(metric), f"Differences from each arm's reference, {caption}")
    wins = tables.win_counts(table.comparisons, metric)
    lines: tuple[str, ...] = ()
    if sum(wins.values()):
        reference = "against the reference arm, by interval"
        lines = (f"{wins['win']} wins, {wins['tie']} ties, {wins['loss']} losses {reference}",)
    parts = [table, forest, *_over_lengths(table.members, caption), *_drawings(table.members, metric, caption)]
    return Section(slug(f"runs-{data}"), f"Runs on {data}", lines, tuple(part for part in parts if part is not None))


def slug(text: str) -> str:
    """A text as it may stand in identifiers and file names."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def registration_table(result: StudyResult) -> Table:
    """The registration and its amendments, an entry a row."""
    rows = [
        (
            entry.event,
            entry.date,
            entry.finished,
            " ".join(entry.overrides) or "none",
            "; ".join(entry.difference),
            entry.reason,
            entry.hash[:12],
        )
        for entry in (result.plan.entries if result.plan else ())
    ]
    columns = (
        Column("event", "event"),
        Column("date", "date"),
        Column("finished", "cells finished before", "count"),
        Column("overrides", "overrides"),
        Column("difference", "what changed"),
        Column("reason", "why"),
        Column("hash", "hash"),
    )
    return Table("registration", f"Registration of {_where(result)}", columns, tuple(rows))


def rules_table(result: StudyResult) -> Table:
    """The decision rules as registered, a condition a row, with what was observed and how often each rule would be met
    if exactly what it says were true.
    """
    study = result.study
    powers = _powers(result)
    rows: list[tuple[Any, ...]] = []
    for number, (rule, branch) in enumerate(zip(study.decision.rules, study.branches, strict=True)):
        taken = "met" if result.verdict.rule == number else "not met"
        head = (f"{number + 1}: {taken}", rule.verdict, rule.says, powers.get(number))
        texts = [(name, text, "") for name, text in rule.when.items()]
        texts += [(name, text, "or: " if rule.when_any else "") for name, text in rule.when_any.items()]
        for (name, text, joined), (_, condition) in zip(texts, branch.conditions, strict=True):
            effect = result.effects[name]
            is_known = effect.state_text not in ("unknown", "insensitive")
            holds = ("yes" if condition.holds(effect.evidence) else "no") if is_known else "not known"
            rows.append((*head, f"{joined}{name}: {text}", outcome_text(effect), holds))
    if (otherwise := study.decision.otherwise) is not None:
        is_taken = result.verdict.rule == len(study.decision.rules)
        head = (f"otherwise: {'met' if is_taken else 'not met'}", otherwise.verdict, otherwise.says, None)
        rows.append((*head, "every effect decided, and no rule met", None, "yes" if is_taken else "no"))
    columns = (
        Column("rule", "rule"),
        Column("verdict", "verdict"),
        Column("says", "says"),
        Column("power", "power"),
        Column("asks", "asks"),
        Column("observed", "observed"),
        Column("holds", "shown"),
    )
    notes = [f"tried in this order; the first that is met gives the verdict; {study.family.text()}"]
    if study.decision.order:
        notes.append(f"order: {study.decision.order}")
    if powers:
        settings = study.scales[study.scale(_scale(result))]
        seeds = ", ".join(str(len(found)) for found in study.looks(_scale(result)))
        notes.append(
            f"power: how often the rule is met when exactly what it says is true, with {seeds} seeds at a spread of "
            f"{settings.spread:.3g} ({settings.spread_from})"
        )
    return Table("rules", f"Decision rules of {_where(result)}", columns, tuple(rows), tuple(notes), once=4)


def facts_table(result: StudyResult) -> Table:
    """How the study was run: seeds, recipe, data, commit, versions, machines, training time, dates."""
    records = [record for arm in result.arms.values() for record in arm.finished.values()]
    times = sorted(float(r["cost"]["train_seconds"]) for r in records if r["cost"].get("train_seconds"))
    ends = sorted(str(r["heartbeat"]["time"]) for r in records if (r.get("heartbeat") or {}).get("time"))
    sizes = {
        split: _values([(r["data"].get("sizes") or {}).get(split) for r in records]) for split in ("train", "test")
    }
    recipe = [
        f"{key} {found}"
        for key in ("epochs", "lr", "batch_size", "selection")
        if (found := _values([(r["config"].get("train") or {}).get(key) for r in records]))
    ]
    software = [
        f"{name} {found}"
        for name in ("routing_lab", "torch", "timm", "lightning", "python")
        if (found := _values([r["environment"].get(name) for r in records]))
    ]
    machine = [
        found if key == "cpu" else f"{key.replace('_', ' ')} {found}"
        for key in ("cpu", "device", "num_cpus", "threads")
        if (found := _values([r["environment"].get(key) for r in records]))
    ]
    hosts = _values([(r.get("heartbeat") or {}).get("host") for r in records])
    rows = [
        ("seeds", f"{formatting.runs_of(list(result.look.seeds))} ({len(result.look.seeds)} an arm)"),
        ("cells", f"{len(records)} finished"),
        ("data", _values([member_name(r, "data") for r in records])),
        ("test set", f"{sizes['test']} examples" if sizes["test"] else ""),
        ("training set", f"{sizes['train']} examples" if sizes["train"] else ""),
        ("backbone", _values([member_name(r, "backbone") for r in records])),
        ("recipe", ", ".join([_values([(r["config"].get("train") or {}).get("name") for r in records]), *recipe])),
        ("commit", _values([str(r["git"].get("commit") or "unknown")[:10] for r in records])),
        ("uncommitted changes", _values(["yes" if r["git"].get("dirty") else "no" for r in records])),
        ("versions", ", ".join(software)),
        ("machine", ", ".join([*machine, *([f"host {hosts}"] if hosts else [])])),
        ("training", _times(times)),
        ("finished", f"{ends[0]} to {ends[-1]}" if ends else ""),
    ]
    shown = tuple(row for row in rows if row[1].strip(", "))
    columns = (Column("what", "what"), Column("value", "value"))
    return Table("facts", f"How {_where(result)} was run", columns, shown if records else ())


def _headline(result: StudyResult) -> Headline:
    verdict = result.verdict
    notes = [f"Exploratory: {reason}" for reason in verdict.exploratory]
    if result.plan is None:
        notes.append("Not registered: nothing shows that the rules stood before the results")
    notes += [f"Missing: {text}" for text in result.missing]
    notes += [f"Because: {reason}" for reason in verdict.reasons]
    notes += [line[0].upper() + line[1:] for line in result.provenance]
    if result.scale != "paper":
        notes.append(
            f"Scale {result.scale}: a finding about these models and data, no reproduction of a paper's number"
        )
    return Headline(verdict.name, verdict.heading, verdict.says, tuple(notes))


def _where(result: StudyResult) -> str:
    return f"study {result.study.name}, scale: {result.scale}"


def _scale(result: StudyResult) -> str:
    """The scale whose settings the study was run with."""
    if result.plan is not None:
        return result.plan.scale
    return result.scale if result.scale in result.study.scales else next(iter(result.study.scales))


def _powers(result: StudyResult) -> dict[int, str]:
    study, scale = result.study, _scale(result)
    spread = study.scales[study.scale(scale)].spread
    if spread is None or study.margin is None:
        return {}
    return {
        rule.number: rule.why if math.isnan(rule.power) else f"{100 * rule.power:.0f} %"
        for rule in rule_powers(study, scale, spread)
    }


def _controls_table(result: StudyResult) -> Table:
    rows = [
        (
            control.name,
            "positive" if control.is_positive else "negative",
            control.expected,
            outcome_text(result.effects[control.name]),
            {None: "not known", True: "yes", False: "no"}[control.passes],
        )
        for control in result.controls
    ]
    columns = (
        Column("control", "control"),
        Column("kind", "kind"),
        Column("expected", "expected"),
        Column("observed", "observed"),
        Column("passes", "as expected"),
    )
    notes = (
        "a positive control must come out, or the study could not have seen anything; a negative one must not, or no "
        "effect of it can be trusted",
    )
    return Table("controls", f"Controls of {_where(result)}", columns, tuple(rows), notes)


def _design_table(result: StudyResult) -> Table:
    rows = [tuple(line.split(": ", 1)) for line in design_lines(result)]
    notes = tuple(result.study.warnings(_scale(result)))
    columns = (Column("what", "what"), Column("value", "value"))
    return Table("design", f"Design of {_where(result)}", columns, tuple(rows), notes)


def _trouble_table(result: StudyResult) -> Table:
    """Cells that did not finish, with the end of their log, and what the runs warned of."""
    found: dict[tuple[str, str], list[str]] = {}
    for arm in result.arms.values():
        for seed, record in sorted(arm.cells.items()):
            cell = f"{arm.label} seed {seed}"
            if record["status"] != "finished":
                found.setdefault((str(record["status"]), _failure(record)), []).append(cell)
            for warning in record.get("warnings") or ():
                # Warnings that differ in their numbers only are told once.
                alike = re.sub(r"\d[\d.]*", "#", warning)
                key = next((k for k in found if k[0] == "warning" and re.sub(r"\d[\d.]*", "#", k[1]) == alike), None)
                found.setdefault(key or ("warning", warning), []).append(cell)
    rows = [
        (kind, text, len(cells), ", ".join(cells[:4]) + (f" and {len(cells) - 4} more" if len(cells) > 4 else ""))
        for (kind, text), cells in found.items()
    ]
    columns = (
        Column("kind", "what"),
        Column("text", "text"),
        Column("count", "cells", "count"),
        Column("cells", "which"),
    )
    return Table("trouble", f"Warnings and failures of {_where(result)}", columns, tuple(rows))


def _failure(record: Mapping[str, Any]) -> str:
    """The last line of a run's error log, where it left one."""
    path = Path(str(record.get("folder", ""))) / "error.log"
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1] if lines else ""


def _forests(result: StudyResult) -> list[Drawing | None]:
    """Forest plots of every effect, one for each unit: differences, speed-ups, areas, savings."""
    study = result.study
    groups: dict[str, tuple[Measure, list[Row]]] = {}
    for effect in result.effects.values():
        name, measure = _measure(study, effect)
        reads = role(study, effect.name) != "exploratory"
        row = Row(
            effect.name,
            effect.estimate,
            effect.low,
            effect.high,
            tuple(effect.values.values()),
            effect.detectable,
            reads,
        )
        groups.setdefault(name, (measure, []))[1].append(row)
    caption = f"study {study.name}, scale: {result.scale}"
    return [
        figures.forest(rows, measure, f"Effects ({name.replace('-', ' ')}), {caption}", f"forest-{name}")
        for name, (measure, rows) in groups.items()
    ]


def _measure(study: Study, effect: Effect) -> tuple[str, Measure]:
    if effect.name in study.weights:
        return "differences", Measure.of_difference(study.metric, study.margin_size)
    if effect.name == SAVING:
        return "saving", Measure("share of the cost saved, %", 100.0)
    assert study.convergence is not None
    if effect.name in study.neutrals:
        return "speed-ups", Measure("epochs of the second arm over those of the first", 1.0, 1.0)
    return "areas", Measure.of_difference(study.convergence.metric)


def _over_lengths(arms: Sequence[Arm], caption: str, level: float = 0.95) -> list[Table | Drawing | None]:
    """What runs that were tested at several lengths of text show there."""
    quality = tables.present_metric(arms)
    drawn = [
        figures.over_lengths(arms, quality, key, f"{formatting.metric(key).label} by length of text, {caption}", name)
        for key, name in ((quality, "lengths-quality"), (ATTENDED, "lengths-attended"))
    ]
    return [tables.lengths_table(arms, caption, level), *drawn]


def _drawings(arms: Sequence[Arm], metric: str, caption: str) -> list[Drawing | None]:
    shown = formatting.metric(metric)
    validation = metric.replace("test/", "val/", 1)
    drawn = [figures.pareto(arms, metric, "cost/macs_measured", f"{shown.label} over measured cost, {caption}")]
    drawn += [
        figures.pareto(arms, metric, speed, f"{shown.label} over {formatting.metric(speed).label}, {caption}", "speed")
        for speed in THROUGHPUTS
        if figures.has_values(arms, speed)
    ]
    drawn.append(figures.curves(arms, validation, f"Training curves of {validation}, {caption}"))
    drawn += [
        figures.curves(arms, key, f"Training dynamics: {declared.label}, {caption}", key.replace("/", "-"))
        for key, declared in DYNAMICS.items()
    ]
    drawn.append(figures.kept_fractions(arms, f"Tokens kept, measured on the test split, {caption}"))
    return drawn


def _values(values: Iterable[Any]) -> str:
    """The values that occur, with their counts where there are several; empty where nothing is known."""
    counts = Counter(formatting.value_text(value) for value in values if value is not None)
    if len(counts) < 2:
        return "".join(counts)
    return ", ".join(f"{value} ({count})" for value, count in sorted(counts.items()))


def _times(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    median = float(np.median(seconds))
    return (
        f"{median:.1f} s a cell (median; {seconds[0]:.1f} to {seconds[-1]:.1f}), "
        f"{formatting.duration(math.fsum(seconds))} in all"
    )
