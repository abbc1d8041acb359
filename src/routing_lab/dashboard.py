"""`python -m routing_lab.dashboard experiments/<study>.yaml`: the Weights & Biases workspace of a study, from code.

By default the workspace's specification is written to a JSON file, for inspection: no network, no login, no question.
`--push` uploads the finished records of the study, and `--online` saves the workspace and a report page with the same
panels and prints their addresses; both need an API key. The specification is the same bytes for the same study and the
same verdict.

What is shown is decided by `panels`, plain data that knows nothing of Weights & Biases; `workspace` makes its objects
of them (`pip install 'routing_lab[dashboards]'`). Torch is not imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from routing_lab.axes import AXES
from routing_lab.runs.metrics import HEADLINES, SPLITS
from routing_lab.runs.metrics import metric as declared

if TYPE_CHECKING:
    from routing_lab.evidence.study import Study

PROJECT = "routing_lab"
"""Default project, that of `wandb.project`."""

MAX_RUNS = 1000
"""Runs that a panel draws. Weights & Biases draws ten unless told otherwise, and a mean over ten of 42 runs is none."""

TABLE_COLUMNS = (
    *("arm", "seed"),
    *(f"{axis}.name" for axis in AXES),
    *("capacity.fraction", "backbone.name", "data.name", "init.kind"),
)
"""Configuration keys that the table of runs shows, before `TABLE_RESULTS`."""

TABLE_RESULTS = ("val/acc", "test/acc", "cost/macs_measured", "cost/params", "cost/train_seconds")
"""Results that the table of runs shows."""


@dataclass(frozen=True)
class Panel:
    """What one panel shows.

    Args:
        section: heading that the panel stands under.
        kind: `text`; `line`, the mean over the seeds of each arm with a band of one standard deviation; `bar`, the same
            of results; `scatter`, one point per run; `compare`, the keys in which runs differ, side by side.
        title: title of the panel.
        y: metrics drawn, history columns of a `line` and results of the others.
        x: horizontal axis of a `line` (history column) or a `scatter` (result).
        x_title, y_title: axis titles, with the unit.
        text: Markdown of a `text`.
    """

    section: str
    kind: Literal["text", "line", "bar", "scatter", "compare"]
    title: str
    y: tuple[str, ...] = ()
    x: str = ""
    x_title: str = ""
    y_title: str = ""
    text: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 2 where the study, the key or the library is missing."""
    options = _parser().parse_args(arguments)

    from routing_lab.config import ConfigError
    from routing_lab.config.problems import lines_of
    from routing_lab.evidence.study import StudyError, load_study
    from routing_lab.runs.files import json_text, write_text
    from routing_lab.runs.records import RecordError

    try:
        _check_places(options)
        study = load_study(options.study)
        scale = study.scale(options.scale or next(iter(study.scales)))
        if options.online or options.push:
            _require_api_key()
        runs = options.runs or Path("runs")
        shown = panels(study, scale, routed_layers(study, scale), verdict(study, scale, runs))
        if options.push:
            print("\n".join(push(study, scale, runs, options.entity, options.project)))
        built = workspace(study, scale, shown, options.entity, options.project)
        if options.online:
            print(save(built))
            print(save(report_page(study, scale, shown, built.entity or None, options.project)))
            return 0
        path = options.spec or options.study.with_name(f"{study.name}.dashboard.json")
        print(write_text(path, json_text(specification(built, shown)) + "\n"))
    except (StudyError, ConfigError, RecordError, DashboardError, OSError) as error:
        print(lines_of(error), file=sys.stderr)
        return 2
    return 0


class DashboardError(ValueError):
    """A dashboard that cannot be built or saved here."""


def panels(study: Study, scale: str, layers: Sequence[int] = (), verdict: str | None = None) -> list[Panel]:
    """The panels of a study's workspace, in reading order.

    Args:
        study: the study.
        scale: the scale whose runs are shown.
        layers: zero-based routed layers of its arms.
        verdict: text of the verdict, None where there are no records.
    """
    metric = study.metric
    quantity = metric.partition("/")[2] if metric.partition("/")[0] in SPLITS else HEADLINES[-1].partition("/")[2]
    validation = f"val/{quantity}"
    curves = dict.fromkeys((validation, "val/loss", "train/loss", f"train/{quantity}"))
    found = [
        Panel("Verdict", "text", "Question and verdict", text=_text(study, scale, verdict)),
        _bars("Results", f"{metric} by arm", [metric], _axis(metric)),
        _bars("Results", f"{validation} by arm, of the evaluated weights", [validation], _axis(validation)),
        *(_curve("Training" if key != validation else "Results", key, _axis(key)) for key in curves),
    ]
    if layers:
        numbers = list(layers)
        kept = [f"routing/kept_fraction/{layer}" for layer in numbers]
        ratios = [f"routing/update_ratio/{layer}" for layer in numbers]
        found += [
            _bars("Routing", "Tokens kept per routed layer, test split", kept, "fraction of the entering tokens"),
            _bars("Routing", "Update ratio per routed layer, test split", ratios, "mean multiplier of kept updates"),
            *(_curve("Routing", f"val/kept_fraction/{layer}", "fraction") for layer in numbers),
        ]
    macs, speed = "cost/macs_measured", "cost/train_images_per_second"
    found += [
        _scatter("Cost", f"{metric} over measured multiply-accumulates", macs, metric, "MACs of one example"),
        _scatter("Cost", f"{metric} over training throughput", speed, metric, "images / s, its own machine"),
        _bars("Cost", "Training throughput by arm", [speed], "images / s, its own machine"),
        _bars("Cost", "Measured multiply-accumulates by arm", [macs], "MACs of one example"),
        Panel("Runs", "compare", "Configurations side by side"),
    ]
    return found


def routed_layers(study: Study, scale: str) -> list[int]:
    """Zero-based layers that some arm of the study routes.

    Raises:
        ConfigError: an arm cannot be composed.
    """
    from routing_lab.config import load
    from routing_lab.config.match import with_target

    found: set[int] = set()
    arms = {arm: study.overrides(arm, scale) for arm in study.arms}
    for arm in study.arms:
        config = load(with_target(arm, arms, lambda overrides: load(overrides).config)).config
        if config.router.traits.routes:
            found.update(config.placement.routed(config.backbone.depth))
    return sorted(found)


def verdict(study: Study, scale: str, runs: Path) -> str | None:
    """The verdict's text by the records in a folder, or None where no run of the study has finished there."""
    from routing_lab.evidence.registration import find_plan
    from routing_lab.evidence.verdict import evaluate, verdict_text
    from routing_lab.runs.records import read_records

    if not runs.is_dir():
        return None
    plan = find_plan(runs, study.name, scale)
    result = evaluate(plan.study if plan else study, read_records(runs), scale=scale, plan=plan)
    return verdict_text(result) if any(arm.finished for arm in result.arms.values()) else None


def report_page(study: Study, scale: str, shown: Sequence[Panel], entity: str | None, project: str) -> Any:
    """A report page of Weights & Biases with the same verdict and panels, not yet saved.

    Args:
        study, scale, entity, project: as for `workspace`.
        shown: the panels.

    Raises:
        DashboardError: wandb-workspaces is not installed.
    """
    _, wr, expr = _library()
    runs = wr.Runset(
        entity=entity or "",
        project=project,
        name=study.key(scale),
        filters=expr.And(expr.Config("study").isin([study.key(scale), study.name])),
        groupby=["arm"],
    )
    told = [wr.MarkdownBlock(panel.text) for panel in shown if panel.kind == "text"]
    blocks = [wr.H1(f"{study.name}, scale: {scale}"), *told]
    for section in dict.fromkeys(panel.section for panel in shown if panel.kind != "text"):
        drawn = [_panel(wr, panel) for panel in shown if panel.section == section and panel.kind != "text"]
        blocks += [wr.H2(section), wr.PanelGrid(runsets=[runs], panels=drawn)]
    return wr.Report(
        project=project, entity=entity or "", title=study.key(scale), description=study.question, blocks=blocks
    )


def workspace(study: Study, scale: str, shown: Iterable[Panel], entity: str | None, project: str) -> Any:
    """The `wandb_workspaces` workspace of some panels, not yet saved.

    Args:
        study, scale: name the runs that it shows.
        shown: its panels; sections stand in the order of their first panel.
        entity: user or team; None is left open until it is saved, and then the account's own.
        project: project of the runs.

    Raises:
        DashboardError: wandb-workspaces is not installed.
    """
    ws, wr, expr = _library()
    sections: dict[str, list[Any]] = {}
    for panel in shown:
        built = _panel(wr, panel)
        # Random otherwise, and the specification would differ from call to call.
        built._id = hashlib.sha256(f"{panel.section}/{panel.title}".encode()).hexdigest()[:12]
        sections.setdefault(panel.section, []).append(built)
    columns = [f"config:{_nested(key)}" for key in TABLE_COLUMNS] + [f"summary:{key}" for key in TABLE_RESULTS]
    return ws.Workspace(
        entity=entity or "",
        project=project,
        name=study.key(scale),
        sections=[ws.Section(name=name, panels=panels, is_open=True) for name, panels in sections.items()],
        settings=ws.WorkspaceSettings(x_axis="epoch", smoothing_type="none", max_runs=MAX_RUNS),
        runset_settings=ws.RunsetSettings(
            filters=expr.And(expr.Config("study").isin([study.key(scale), study.name])),
            groupby=[expr.Config("arm")],
            order=[expr.Ordering(expr.Config("arm")), expr.Ordering(expr.Config("seed"))],
            pinned_columns=columns,
        ),
    )


def specification(built: Any, shown: Iterable[Panel]) -> dict[str, Any]:
    """A workspace as plain data: `panels` as decided here, and under `workspace` what would be sent."""
    view = json.loads(built._to_model().model_dump_json(by_alias=True, exclude_none=True))
    return {"panels": [asdict(panel) for panel in shown], "workspace": view}


def save(built: Any) -> str:
    """Save a workspace or a report page at Weights & Biases; returns its address. Every call makes a new one.

    Raises:
        DashboardError: whatever the server or the network has against it.
    """
    import wandb

    try:
        if not built.entity:
            built.entity = wandb.Api().default_entity
        return str(built.save().url)
    except Exception as error:
        raise DashboardError(f"{built.project}: {type(error).__name__}: {error}") from error


def push(study: Study, scale: str, runs: Path, entity: str | None, project: str) -> list[str]:
    """Upload the finished records of a study as runs, one line for each.

    A record that was uploaded before is uploaded again; whoever reads them takes the last one.

    Raises:
        RecordError: `runs` is not a folder.
    """
    from routing_lab.config.training import WandbConfig
    from routing_lab.evidence.verdict import study_arms
    from routing_lab.runs.records import is_finished, read_history, read_records
    from routing_lab.training.tracking import mirror

    target = WandbConfig(mode="online", project=project, entity=entity)
    lines = []
    arms = study_arms(study, [record for record in read_records(runs) if is_finished(record)], scale=scale)
    for record in (record for arm in arms.values() for record in arm.finished.values()):
        trouble = mirror(
            target, Path(record["folder"]), record, record["config"], _rows(read_history(record)), record["study"]
        )
        lines.append(f"{record['name']}: {trouble or 'uploaded'}")
    return lines or [f"{runs}: no finished run of {study.key(scale)} to upload"]


# --- what is shown ---


def _axis(key: str) -> str:
    """Title of an axis: what is uploaded is what records hold, of accuracies the fraction."""
    shown = declared(key)
    return f"{shown.label}, fraction" if shown.kind == "percent" else shown.heading


def _bars(section: str, title: str, metrics: Sequence[str], unit: str) -> Panel:
    return Panel(section, "bar", title, y=tuple(metrics), x_title=unit, y_title="arm")


def _curve(section: str, metric: str, unit: str) -> Panel:
    return Panel(section, "line", metric, y=(metric,), x="epoch", x_title="epoch (from 0)", y_title=unit)


def _scatter(section: str, title: str, x: str, y: str, unit: str) -> Panel:
    return Panel(section, "scatter", title, y=(y,), x=x, x_title=unit, y_title=y)


def _text(study: Study, scale: str, verdict: str | None) -> str:
    """Markdown: the verdict, or the question with the rule that will decide it."""
    if verdict is not None:
        lines = verdict.splitlines()
    else:
        lines = [
            f"Study {study.name} (scale: {scale})",
            f"Question: {study.question}",
            f"Hypothesis: {study.hypothesis.statement}",
            "Verdict: none yet, no run has finished",
        ]
    lines += [f"Rule: {rule.verdict}: {rule.says} ({_conditions(rule.conditions)})" for rule in study.decision.rules]
    lines.append(f"Bands are one standard deviation over seeds; intervals and tests: routing_lab.report, {study.name}")
    return "\n".join(f"{'- ' if line.startswith('  ') else ''}{line.strip()}  " for line in lines)


def _conditions(conditions: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {condition}" for name, condition in conditions)


# --- with Weights & Biases ---


def _library() -> tuple[Any, Any, Any]:
    try:
        with warnings.catch_warnings():
            # Its models still use validators that pydantic has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            import wandb_workspaces.expr
            import wandb_workspaces.reports.v2
            import wandb_workspaces.workspaces
    except ImportError as error:
        raise DashboardError(f"{error}; pip install 'routing_lab[dashboards]'") from error
    return wandb_workspaces.workspaces, wandb_workspaces.reports.v2, wandb_workspaces.expr


def _panel(wr: Any, panel: Panel) -> Any:
    by_arm = {"groupby": wr.Config("arm"), "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    titles = {"title": panel.title, "title_x": panel.x_title, "title_y": panel.y_title}
    if panel.kind == "text":
        return wr.MarkdownPanel(markdown=panel.text)
    if panel.kind == "line":
        return wr.LinePlot(x=panel.x, y=list(panel.y), max_runs_to_show=MAX_RUNS, **by_arm, **titles)
    if panel.kind == "bar":
        return wr.BarPlot(metrics=list(panel.y), max_runs_to_show=MAX_RUNS, **by_arm, **titles)
    if panel.kind == "scatter":
        x, y = wr.SummaryMetric(panel.x), wr.SummaryMetric(panel.y[0])
        return wr.ScatterPlot(title=f"{panel.title} ({panel.x_title})", x=x, y=y)
    return wr.RunComparer(diff_only="split")


def _nested(key: str) -> str:
    """A configuration key as Weights & Biases addresses it: `router.name` is `router.value.name`."""
    first, _, rest = key.partition(".")
    return f"{first}.value.{rest}" if rest else f"{first}.value"


def _check_places(options: argparse.Namespace) -> None:
    from routing_lab.places import unwritable

    if options.runs is not None and not options.runs.is_dir():
        raise DashboardError(f"--runs = {options.runs}: not a folder")
    if options.spec is not None:
        reason = "is a folder" if options.spec.is_dir() else None
        if not options.spec.parent.is_dir():
            reason = f"{options.spec.parent}: no such folder"
        if reason := reason or unwritable(options.spec.parent):
            raise DashboardError(f"--spec = {options.spec}: {reason}")


def _require_api_key() -> None:
    from routing_lab.evidence.wandb_source import NO_API_KEY, has_api_key

    if not has_api_key():
        raise DashboardError(NO_API_KEY)


def _rows(columns: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """A history's columns as rows, without empty cells."""
    length = max(map(len, columns.values()), default=0)
    return [{name: values[i] for name, values in columns.items() if not math.isnan(values[i])} for i in range(length)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m routing_lab.dashboard",
        description="The Weights & Biases workspace of a study. Offline, its specification is written for inspection.",
    )
    parser.add_argument("study", type=Path, help="study file (experiments/<name>.yaml)")
    parser.add_argument("--scale", help="scale whose runs are shown (default: the first of the study)")
    parser.add_argument("--runs", type=Path, help="runs that the verdict is of (default: runs)")
    parser.add_argument("--entity", help="user or team at Weights & Biases (default: the account's own)")
    parser.add_argument("--project", default=PROJECT, help=f"project (default: {PROJECT})")
    parser.add_argument("--push", action="store_true", help="upload the study's finished records first")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--spec", type=Path, help="file to write to (default: <study>.dashboard.json)")
    where.add_argument("--online", action="store_true", help="save the workspace and print its address")
    return parser


if __name__ == "__main__":
    sys.exit(main())
