"""Run a study: `python -m routing_lab.study experiments/confound.yaml [scale=toy] [overrides] [hydra/launcher=joblib]`.

The study file is checked, then every arm is composed and checked, and contrasts that are not controlled are refused.
The plan, with hypothesis and decision rule, is written before the first cell trains; cells that have finished are not
run again. The missing ones go through Hydra's launchers, and the verdict is computed from the records. `--plan` lists
the cells, their state and what they are expected to cost, and runs nothing.

Exit codes: 0 every cell finished and the verdict stands; 1 a cell failed; 2 the study was refused and nothing was
written; 130 or 143 interrupted, and the same command runs what is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from routing_lab.config import Composer, ConfigError, Loaded, check_overrides, identity, run_folder
from routing_lab.evidence.study import Cell, Plan, Study, StudyError, check_arms, load_study, plan_path, read_plan
from routing_lab.runs.files import write_json
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import FINISHED, RecordError, read_record
from routing_lab.sweeps import failure, launch_cells
from routing_lab.train import import_from_here


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves through `sys.exit`."""
    options = _parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    import_from_here()
    try:
        planned = plan_study(Path(options.study), options.overrides, options.config_dir)
    except (StudyError, ConfigError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if options.plan:
        print(describe(planned))
        sys.exit(0)
    sys.exit(run(planned))


@dataclass(frozen=True)
class PlannedStudy:
    """A checked study at one scale.

    Args:
        plan: its cells.
        folders: the run folder of each cell, in the order of `plan.cells`.
        jobs: the overrides of each cell, in the same order.
        hydra: overrides that concern Hydra itself (launcher, ...).
        runs: folder of the runs.
        composer: finds the configuration files.
    """

    plan: Plan
    folders: list[Path]
    jobs: list[list[str]]
    hydra: list[str]
    runs: Path
    composer: Composer

    def missing(self) -> list[int]:
        """Positions of the cells that have not finished."""
        return [i for i, folder in enumerate(self.folders) if RunFolder(folder).finished_record() is None]


def plan_study(path: Path, overrides: Sequence[str] = (), config_dir: str | None = None) -> PlannedStudy:
    """Read a study file and check it, every arm and every contrast.

    Args:
        path: the study file.
        overrides: `scale=...` (default: the first scale of the file), overrides of every arm, and Hydra's own.
        config_dir: folder with further members, as for training.

    Raises:
        StudyError: the file, a contrast or a factor is not sound.
        ConfigError: arms cannot be composed; each line says which.
    """
    study = load_study(path)
    scale = study.scale(_taken("scale", overrides) or next(iter(study.scales)))
    hydra = [text for text in overrides if text.lstrip("+~").startswith("hydra")]
    extra = [text for text in overrides if text not in hydra and not text.startswith("scale=")]
    composer = Composer(config_dir)
    loaded = _checked_arms(study, scale, extra, hydra, composer)
    check_arms(study, {arm: arm_loaded.resolved for arm, arm_loaded in loaded.items()})
    cells, folders, jobs = [], [], []
    for seed in study.seeds:
        for arm, arm_loaded in loaded.items():
            resolved = {**arm_loaded.resolved, "seed": seed}
            cells.append(Cell(arm, seed, identity(resolved)))
            folders.append(run_folder(arm_loaded.config.model_copy(update={"seed": seed}), resolved))
            jobs.append(
                [*study.overrides(arm, scale, extra), f"study={study.key(scale)}", f"arm={arm}", f"seed={seed}"]
            )
    runs = Path(next(iter(loaded.values())).config.paths.runs)
    return PlannedStudy(Plan(study, scale, tuple(cells)), folders, jobs, hydra, runs, composer)


def describe(planned: PlannedStudy) -> str:
    """The cells of a study, their state and expected cost, as plain lines."""
    plan, settings = planned.plan, planned.plan.study.scales[planned.plan.study.scale(planned.plan.scale)]
    states = [_state(folder) for folder in planned.folders]
    width = max(len(cell.arm) for cell in plan.cells)
    lines = [
        f"{plan.study.name} (scale: {plan.scale}): {plan.study.question}",
        f"{len(plan.study.arms)} arms x {len(plan.study.seeds)} seeds = {len(plan.cells)} cells",
        "",
        *(
            f"  {cell.arm:<{width}}  seed {cell.seed:<3} {state:<12} {folder}"
            for cell, state, folder in zip(plan.cells, states, planned.folders, strict=True)
        ),
        "",
    ]
    left = sum(state != FINISHED for state in states)
    seconds = left * settings.seconds_per_cell
    lines.append(f"{left} cells to run, about {_duration(seconds)} one after the other on {settings.machine}")
    return "\n".join(lines + [f"note: {warning}" for warning in plan.study.warnings])


def run(planned: PlannedStudy) -> int:
    """Launch the missing cells, print the verdict; returns the exit code."""
    plan, missing = planned.plan, planned.missing()
    _note_changed_study(planned)
    plan.write(planned.runs)
    print(f"{plan.study.key(plan.scale)}: {len(plan.cells) - len(missing)} of {len(plan.cells)} cells have finished")
    code, failed = 0, list[str]()
    if missing:
        code, failed = _launch(planned, missing)
    _print_verdict(planned)
    if failed:
        print("not finished:", *failed, "The same command runs what is missing.", sep="\n")
    return code or int(bool(failed))


# --- checking ---


def _checked_arms(
    study: Study, scale: str, extra: Sequence[str], hydra: Sequence[str], composer: Composer
) -> dict[str, Loaded]:
    loaded: dict[str, Loaded] = {}
    lines, problems = [], []
    for arm in study.arms:
        overrides = [*study.overrides(arm, scale, extra), f"seed={study.seeds[0]}"]
        try:
            loaded[arm] = check_overrides(composer, [*hydra, *overrides])
        except ConfigError as error:
            problems += error.problems
            lines += [f"[{arm}] {line}" for line in str(error).splitlines()]
    if problems:
        raise StudyError(study.name, lines)
    return loaded


def _note_changed_study(planned: PlannedStudy) -> None:
    """Say so when the study was planned before with another text: its rule may have been written after its results."""
    path = plan_path(planned.runs, planned.plan.study.name, planned.plan.scale)
    if not path.exists():
        return
    try:
        before = read_plan(path)
    except StudyError:
        return
    if before.study != planned.plan.study:
        print(f"note: {planned.plan.study.name} has changed since it was planned ({path}); it is planned anew")


# --- launching ---


def _launch(planned: PlannedStudy, missing: Sequence[int]) -> tuple[int, list[str]]:
    """Run cells through Hydra's launcher; returns the exit code and a line for each that did not finish."""
    cells = [planned.jobs[i] for i in missing]
    folder = planned.runs / "sweeps" / planned.plan.study.key(planned.plan.scale)
    code, outcomes = launch_cells(planned.composer, cells, folder, [*planned.hydra, f"paths.runs={planned.runs}"])
    labels = [f"{planned.plan.cells[i].arm} seed={planned.plan.cells[i].seed}" for i in missing]
    lines = [failure(label, outcomes.get(number), code) for number, label in enumerate(labels)]
    return code, [line for line in lines if line is not None]


# --- telling ---


def _print_verdict(planned: PlannedStudy) -> None:
    from routing_lab.evidence.tables import render_plain
    from routing_lab.evidence.verdict import effects_table, evaluate, verdict_record, verdict_text

    records = []
    for folder in planned.folders:
        try:
            records.append(read_record(folder))
        except RecordError:
            continue
    result = evaluate(planned.plan.study, records, plan=planned.plan)
    path = plan_path(planned.runs, planned.plan.study.name, planned.plan.scale).with_suffix(".verdict.json")
    write_json(path, verdict_record(result))
    print()
    print(render_plain(effects_table(result)))
    print()
    print(verdict_text(result))
    print(f"verdict: {path}")
    print(f"report: python -m routing_lab.report {planned.runs}", flush=True)


def _state(folder: Path) -> str:
    try:
        return str(read_record(folder)["status"])
    except RecordError:
        return "missing"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _taken(key: str, overrides: Sequence[str]) -> str | None:
    values = [text.removeprefix(f"{key}=") for text in overrides if text.startswith(f"{key}=")]
    return values[-1] if values else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m routing_lab.study", description="Run the missing cells of a study and compute its verdict."
    )
    parser.add_argument("study", help="study file, experiments/<name>.yaml")
    parser.add_argument(
        "overrides", nargs="*", help="scale=toy|small|paper, overrides of every arm, hydra/launcher=... and the like"
    )
    parser.add_argument(
        "--plan", action="store_true", help="list the cells, their state and expected cost; run nothing"
    )
    parser.add_argument("--config-dir", help="folder with members of your own, as for training")
    return parser


if __name__ == "__main__":
    main()
