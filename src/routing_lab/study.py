"""Run a study: `python -m routing_lab.study experiments/confound.yaml [scale=toy] [overrides] [hydra/launcher=joblib]`.

The study file is checked, then every arm is composed and checked, and contrasts that are not controlled are refused.
The study is registered before the first cell trains: its text, overrides, seeds, cells and versions, dated, in a file
that is only ever added to. Cells that have finished are not run again. The missing ones go through Hydra's launchers,
look by look where the study has several, and the verdict is computed from the records. `--plan` lists the cells, their
state and what they are expected to cost, and runs nothing; data and weights need not be on this machine for that.

`--pilot` runs every arm under a few seeds set apart, which never count, and tells what the planned seeds can find at
the spread that it measures, and how long they take; `--plan` tells it again from the pilot's records.

Once a cell has finished, a changed file, other overrides or seeds are refused; `--amend 'why'` lists the change beside
the verdict, which is then exploratory. In place of the study file its registration may be given, to go on with what
was registered.

Cells that were run over data or weights that have changed since are refused; `rerun=true` trains those, and no others,
afresh.

Exit codes: 0 every cell finished and the verdict stands; 1 a cell failed; 2 the study was refused and nothing was
written; 130 or 143 interrupted, and the same command runs what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from routing_lab.config import Composer, Config, ConfigError, Loaded, check_overrides, identity, run_folder
from routing_lab.config.match import given, told, with_target
from routing_lab.config.nominal import placed_lines
from routing_lab.config.probing import probe_settings
from routing_lab.config.problems import Problem, alternatives, lines_of
from routing_lab.data.state import WAYS_ON_IN_A_STUDY, changed_inputs
from routing_lab.evidence import formatting
from routing_lab.evidence.pilot import pilot_folder, pilot_key, pilot_lines, read_pilot
from routing_lab.evidence.power import power_lines
from routing_lab.evidence.registration import Cell, Plan, append, find_plan, plan_path, read_plan, register
from routing_lab.evidence.study import PILOT_SEEDS, Study, StudyError, check_arms, load_study
from routing_lab.places import unwritable
from routing_lab.runs.files import write_json
from routing_lab.runs.findings import PREFIX
from routing_lab.runs.folder import RunFolder, folders_by_run
from routing_lab.runs.metrics import COSTS, QUANTITIES, is_declared
from routing_lab.runs.records import FINISHED, RecordError, read_records, read_run
from routing_lab.runs.source import git_state
from routing_lab.sweeps import failure, launch_cells
from routing_lab.train import import_from_here

if TYPE_CHECKING:
    from routing_lab.evidence.verdict import StudyResult

NUM_PILOT_SEEDS = 6
"""Seeds of a pilot, if not told otherwise: the spread is then known to about a third."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves through `sys.exit`."""
    options = _parser().parse_intermixed_args(sys.argv[1:] if arguments is None else list(arguments))
    import_from_here()
    try:
        planned = plan_study(
            Path(options.study), options.overrides, options.config_dir, options.amend, here=not options.plan
        )
    except (StudyError, ConfigError, RecordError) as error:
        print(lines_of(error), file=sys.stderr)
        sys.exit(2)
    if options.plan:
        print(describe(planned))
        sys.exit(0)
    sys.exit(run_pilot(planned, options.pilot_seeds) if options.pilot else run(planned))


@dataclass(frozen=True)
class PlannedStudy:
    """A checked study at one scale.

    Args:
        plan: its cells and its registration, of which the last entries may not be written yet.
        folders: the run folder of each cell, in the order of `plan.cells`.
        jobs: the overrides of each cell, in the same order.
        hydra: overrides that concern Hydra itself (launcher, ...).
        runs: folder of the runs.
        composer: finds the configuration files.
        arms: the checked configuration of each arm.
        overrides: of every arm, as typed.
        rerun: whether cells are trained afresh whose data or weights have changed since.
    """

    plan: Plan
    folders: list[Path]
    jobs: list[list[str]]
    hydra: list[str]
    runs: Path
    composer: Composer
    arms: Mapping[str, Loaded]
    overrides: list[str]
    rerun: bool = False

    def missing(self) -> list[int]:
        """Positions of the cells that have not finished, or are to be trained afresh."""
        return [
            i
            for i, folder in enumerate(self.folders)
            if RunFolder(folder).finished_record() is None or (self.rerun and self.changed(i))
        ]

    def changed(self, position: int) -> list[Problem]:
        """The data and weights of a cell that are no longer those it was run over, as far as they are here."""
        loaded = self.arms.get(self.plan.cells[position].arm)
        record = RunFolder(self.folders[position]).read_record()
        if loaded is None or loaded.absent or record is None:
            return []
        return [Problem.of(*problem) for problem in changed_inputs(record, loaded.config, WAYS_ON_IN_A_STUDY)]

    def job(self, position: int) -> list[str]:
        """The overrides of a cell; one without a record may need another run that is to be trained afresh."""
        is_afresh = self.rerun and (RunFolder(self.folders[position]).read_record() is None or self.changed(position))
        return [*self.jobs[position], *(["rerun=true"] if is_afresh else [])]


def plan_study(
    path: Path,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    reason: str = "",
    *,
    here: bool = True,
) -> PlannedStudy:
    """Read a study file and check it, every arm and every contrast; compare it with its registration, if it has one.

    Args:
        path: the study file, or a registration, whose study is then gone on with.
        overrides: `scale=...` (default: the first scale of the file), overrides of every arm, and Hydra's own.
        config_dir: folder with further members, as for training.
        reason: why the study is changed after cells have finished.
        here: it is to run here, so that data and weights must be on this machine.

    Raises:
        StudyError: the file, a contrast or a factor is not sound, or the study differs from what was registered.
        ConfigError: arms cannot be composed; each line says which.
    """
    if path.suffix == ".jsonl":
        registered = read_plan(path)
        study, scale = registered.study, registered.study.scale(registered.scale)
        overrides = [*registered.overrides, f"paths.runs={path.parent.parent}", *overrides]
    else:
        study = load_study(path)
        scale = study.scale(given("scale", overrides) or next(iter(study.scales)))
    hydra = [text for text in overrides if text.lstrip("+~").startswith("hydra")]
    extra = [text for text in overrides if text not in hydra and not text.startswith("scale=")]
    _refuse_own_keys(study, extra)
    reruns = [text for text in extra if text.startswith("rerun=")]
    extra = [text for text in extra if text not in reruns]
    composer = Composer(config_dir)
    compose = partial(_composed, study, scale, [*extra, *reruns], hydra, composer, here)
    loaded = _checked_arms(study, scale, compose)
    _check_metric(study, loaded)
    check_arms(study, {arm: arm_loaded.resolved for arm, arm_loaded in loaded.items()})
    planned = study.planned_cells(scale)
    cells, folders, jobs = _cells(study, scale, planned, loaded, compose, [*extra, f"study={study.key(scale)}"])
    runs = Path(next(iter(loaded.values())).config.paths.runs)
    if (obstacle := unwritable(runs)) is not None:
        raise ConfigError([Problem("paths.runs", str(runs), obstacle)])
    before = find_plan(runs, study.name, scale)
    found = folders_by_run(runs)
    plan = register(
        before,
        study,
        scale,
        cells,
        overrides=extra,
        versions=_versions(),
        finished={cell.run_id for cell in (*cells, *(before.cells if before else ())) if _is_finished(found, cell)},
        reason=reason,
        now=datetime.now(UTC),
    )
    # A cell that finished under the identity that its registration names stays that run.
    folders = [found.get(cell.run_id, folder) for cell, folder in zip(plan.cells, folders, strict=True)]
    rerun = any(arm.config.rerun for arm in loaded.values())
    found_plan = PlannedStudy(plan, folders, jobs, hydra, runs, composer, loaded, extra, rerun)
    if not rerun:
        _check_inputs(found_plan)
    return found_plan


def pilot_of(planned: PlannedStudy, seeds: Sequence[int]) -> PlannedStudy:
    """The cells of a study's pilot, in a folder of their own and with seeds that no verdict counts."""
    study, scale, runs = planned.plan.study, planned.plan.scale, pilot_folder(planned.runs)
    overrides = [*planned.overrides, f"study={pilot_key(study, scale)}", f"paths.runs={runs}"]
    compose = partial(_composed, study, scale, planned.overrides, planned.hydra, planned.composer, False)
    pairs = list(product(seeds, study.arms))
    cells, folders, jobs = _cells(study, scale, pairs, planned.arms, compose, overrides)
    plan = Plan(study, scale, tuple(cells))
    return replace(planned, plan=plan, folders=[runs / folder.name for folder in folders], jobs=jobs, runs=runs)


def describe(planned: PlannedStudy) -> str:
    """The cells of a study, their state and expected cost, as plain lines."""
    plan, settings = planned.plan, planned.plan.study.scales[planned.plan.study.scale(planned.plan.scale)]
    states = [_state(folder) for folder in planned.folders]
    width = max(len(cell.arm) for cell in plan.cells)
    lines = [
        f"{plan.study.name} (scale: {plan.scale}): {plan.study.question}",
        f"{len(plan.study.arms)} arms x {_seeds_text(plan)} = {len(plan.cells)} cells",
        "",
        *(
            f"  {cell.arm:<{width}}  seed {cell.seed:<3} {state:<12} {folder}"
            for cell, state, folder in zip(plan.cells, states, planned.folders, strict=True)
        ),
        "",
    ]
    matched = {arm: loaded.config.match for arm, loaded in planned.arms.items()}
    if costs := [f"  {arm}: {told(match)}" for arm, match in matched.items() if match.solution is not None]:
        lines += ["matched by cost:", *costs, ""]
    placed = {arm: ", ".join(placed_lines(loaded.config)) for arm, loaded in planned.arms.items()}
    if told_layers := [f"  {arm:<{width}}  {line}" for arm, line in placed.items() if line]:
        lines += [*told_layers, ""]
    left = sum(state != FINISHED for state in states)
    seconds = left * settings.seconds_per_cell
    lines.append(f"{left} cells to run, about {formatting.duration(seconds)} one after the other on {settings.machine}")
    if seeds := _piloted(planned):
        lines += ["", *_pilot_lines(pilot_of(planned, seeds)), ""]
    elif settings.spread is not None and plan.study.margin is not None:
        lines += power_lines(plan.study, plan.scale, settings.spread, settings.spread_from)
    lines += plan.lines() if plan_path(planned.runs, plan.study.name, plan.scale).exists() else []
    absent = dict.fromkeys(problem for loaded in planned.arms.values() for problem in loaded.absent)
    lines += [f"note: not on this machine: {problem}" for problem in absent]
    return "\n".join(lines + [f"note: {warning}" for warning in plan.study.warnings(plan.scale)])


def run(planned: PlannedStudy) -> int:
    """Register the study, launch the missing cells of each look until the verdict is reached, print it; returns the
    exit code.
    """
    plan = planned.plan
    append(plan, planned.runs)
    left = len(planned.missing())
    print(f"{plan.study.key(plan.scale)}: {len(plan.cells) - left} of {len(plan.cells)} cells have finished")
    code, failed = 0, list[str]()
    for seeds in plan.study.looks(plan.scale):
        missing = [
            i for i in planned.missing() if plan.cells[i].seed in {*seeds, *plan.study.extra_seeds(plan.cells[i].arm)}
        ]
        if missing:
            code, failed = _launch(planned, missing)
        failed = failed or _probe(planned)
        result = _judge(planned)
        if code or failed or result.verdict.ends_looks:
            break
    _print_verdict(planned, result)
    if failed:
        print("not finished:", *failed, "The same command runs what is missing.", sep="\n")
    return code or int(bool(failed))


def run_pilot(planned: PlannedStudy, num_seeds: int = NUM_PILOT_SEEDS) -> int:
    """Run the missing cells of a study's pilot and print what they say; registers nothing. Returns the exit code."""
    pilot = pilot_of(planned, range(PILOT_SEEDS, PILOT_SEEDS + num_seeds))
    missing = pilot.missing()
    finished = len(pilot.folders) - len(missing)
    print(f"{pilot_key(pilot.plan.study, pilot.plan.scale)}: {finished} of {len(pilot.folders)} cells have finished")
    code, failed = _launch(pilot, missing) if missing else (0, [])
    print("", *_pilot_lines(pilot), sep="\n")
    if failed:
        print("not finished:", *failed, "The same command runs what is missing.", sep="\n")
    return code or int(bool(failed))


def _probe(planned: PlannedStudy) -> list[str]:
    """Run the study's probes on the cells that have finished; returns a line for each that could not be measured."""
    if not planned.plan.study.probes:
        return []
    from routing_lab.probes.opening import build, run_on

    asked = [build(probe_settings([f"probe={name}", *words])) for name, words in planned.plan.study.probes.items()]
    failed = []
    for folder in planned.folders:
        if RunFolder(folder).finished_record() is None:
            continue
        for probe in asked:
            try:
                run_on(probe, folder)
            except ValueError as error:
                failed.append(f"  {folder.name}: probe={probe.name}: {error}")
    return failed


# --- checking ---

OWN_KEYS: Mapping[str, str] = {
    "seed": "the study file says which seeds are run",
    "arm": "the study sets it; its file says which arms are run",
    "study": "the study sets it",
}


def _refuse_own_keys(study: Study, extra: Sequence[str]) -> None:
    """Refuse overrides of what the study itself sets, which would have no effect."""
    lines = []
    for text in extra:
        key, _, value = text.lstrip("+~").partition("=")
        if key in OWN_KEYS:
            lines.append(str(Problem(key, value, OWN_KEYS[key])))
    if lines:
        raise StudyError(study.name, lines)


def _check_metric(study: Study, loaded: Mapping[str, Loaded]) -> None:
    """Refuse a metric that no record of the shipped tasks can have, or a finding of a probe that is not run."""
    if study.metric.startswith(PREFIX):
        probe = study.metric.removeprefix(PREFIX).partition("/")[0]
        if probe not in study.probes:
            raise StudyError(study.name, [f"metric={study.metric!r}: name the probe under probes: ({probe})"])
        return
    are_shipped = all(arm.config.task.class_path.startswith("routing_lab.") for arm in loaded.values())
    if are_shipped and not is_declared(study.metric):
        hint = alternatives(study.metric, [*(f"test/{name}" for name in QUANTITIES), *COSTS], "known: ")
        raise StudyError(study.name, [f"metric={study.metric!r}: no run records it; {hint}"])


def _checked_arms(study: Study, scale: str, compose: Callable[[str, int], Loaded]) -> dict[str, Loaded]:
    loaded: dict[str, Loaded] = {}
    lines, problems = [], []
    for arm in study.arms:
        try:
            loaded[arm] = compose(arm, study.planned_seeds(scale)[0])
        except ConfigError as error:
            problems += error.problems
            lines += [f"[{arm}] {line}" for line in str(error).splitlines()]
    if problems:
        raise StudyError(study.name, lines)
    return loaded


def _composed(
    study: Study,
    scale: str,
    extra: Sequence[str],
    hydra: Sequence[str],
    composer: Composer,
    here: bool,
    arm: str,
    seed: int,
) -> Loaded:
    own = [f"study={study.key(scale)}", f"arm={arm}", f"seed={seed}"]

    arms = {name: [*hydra, *study.overrides(name, scale, extra)] for name in study.arms}
    words = with_target(arm, arms, lambda overrides: _target(composer, tuple(overrides), here))
    return check_overrides(composer, [*words, *own], here=here)


@lru_cache(maxsize=8)
def _target(composer: Composer, overrides: tuple[str, ...], here: bool) -> Config:
    """The configuration that other arms are matched to, many of them to the same one."""
    return check_overrides(composer, overrides, here=here).config


def _cells(
    study: Study,
    scale: str,
    planned: Sequence[tuple[int, str]],
    arms: Mapping[str, Loaded],
    compose: Callable[[str, int], Loaded],
    overrides: Sequence[str],
) -> tuple[list[Cell], list[Path], list[list[str]]]:
    """The cells of (seed, arm) pairs, their run folders and their overrides."""
    seeds = list(dict.fromkeys(seed for seed, _ in planned))
    found = {arm: _under_seeds(seeds, loaded, partial(compose, arm)) for arm, loaded in arms.items()}
    cells, folders, jobs = [], [], []
    for seed, arm in planned:
        config, resolved = found[arm][seed]
        cells.append(Cell(arm, seed, identity(resolved)))
        folders.append(run_folder(config, resolved))
        macs = config.match.macs
        target = [] if macs is None else [f"match.macs={macs}"]
        jobs.append([*study.overrides(arm, scale, overrides), *target, f"arm={arm}", f"seed={seed}"])
    return cells, folders, jobs


def _under_seeds(
    seeds: Sequence[int], loaded: Loaded, compose: Callable[[int], Loaded]
) -> dict[int, tuple[Config, Mapping[str, Any]]]:
    """The configuration of an arm under each seed: composed anew where more than `seed` follows the seed, as in
    `data.split_seed=${seed}`.
    """
    first = loaded.config.seed
    other = next((seed for seed in seeds if seed != first), first)
    if other != first and {**compose(other).resolved, "seed": first} != loaded.resolved:
        composed = {seed: compose(seed) for seed in seeds}
        return {seed: (of_seed.config, of_seed.resolved) for seed, of_seed in composed.items()}
    return {
        seed: (loaded.config.model_copy(update={"seed": seed}), {**loaded.resolved, "seed": seed}) for seed in seeds
    }


def _versions() -> dict[str, Any]:
    """What the registration says of the code that it was made with."""
    return {**{name: version(name) for name in ("routing_lab", "torch", "timm", "lightning")}, "git": git_state()}


def _is_finished(found: Mapping[str, Path], cell: Cell) -> bool:
    return cell.run_id in found and RunFolder(found[cell.run_id]).finished_record() is not None


def _check_inputs(planned: PlannedStudy) -> None:
    """Refuse cells that were run over data or weights that have changed since."""
    lines = [
        f"[{cell.arm} seed={cell.seed}] {problem}"
        for position, cell in enumerate(planned.plan.cells)
        for problem in planned.changed(position)
    ]
    if lines:
        raise StudyError(planned.plan.study.name, lines)


# --- launching ---


def _launch(planned: PlannedStudy, missing: Sequence[int]) -> tuple[int, list[str]]:
    """Run cells through Hydra's launcher; returns the exit code and a line for each that did not finish."""
    cells = [planned.job(i) for i in missing]
    folder = planned.runs / "sweeps" / planned.plan.study.key(planned.plan.scale)
    code, outcomes = launch_cells(planned.composer, cells, folder, [*planned.hydra, f"paths.runs={planned.runs}"])
    labels = [f"{planned.plan.cells[i].arm} seed={planned.plan.cells[i].seed}" for i in missing]
    lines = [failure(label, outcomes.get(number), code) for number, label in enumerate(labels)]
    return code, [line for line in lines if line is not None]


# --- telling ---


def _judge(planned: PlannedStudy) -> StudyResult:
    from routing_lab.evidence.verdict import evaluate

    return evaluate(planned.plan.study, _records(planned), plan=planned.plan)


def _records(planned: PlannedStudy) -> list[dict[str, Any]]:
    return [record for folder in planned.folders if (record := RunFolder(folder).read_record()) is not None]


def _piloted(planned: PlannedStudy) -> list[int]:
    """Seeds of the pilot that this study has had."""
    runs = pilot_folder(planned.runs)
    key = pilot_key(planned.plan.study, planned.plan.scale)
    found = read_records(runs) if runs.is_dir() else []
    return sorted({record["seed"] for record in found if record["study"] == key})


def _pilot_lines(pilot: PlannedStudy) -> list[str]:
    return pilot_lines(read_pilot(pilot.plan, _records(pilot)))


def _print_verdict(planned: PlannedStudy, result: StudyResult) -> None:
    from routing_lab.evidence.tables import render_plain
    from routing_lab.evidence.verdict import effects_table, verdict_record, verdict_text

    plan = planned.plan
    path = planned.runs / "studies" / f"{plan.study.key(plan.scale)}.verdict.json"
    print()
    print(render_plain(effects_table(result)))
    print()
    print(verdict_text(result))
    if not result.verdict.is_complete and _holds_verdict(path):
        print(f"note: {path} holds a verdict from more cells and is left as it is")
    else:
        write_json(path, verdict_record(result))
        print(f"verdict: {path}")
    print(f"report: python -m routing_lab.report {planned.runs}", flush=True)


def _holds_verdict(path: Path) -> bool:
    """Whether a verdict from all its cells stands there."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8"))["is_complete"])
    except (OSError, ValueError, KeyError):
        return False


def _seeds_text(plan: Plan) -> str:
    looks = plan.study.looks(plan.scale)
    sizes = ", ".join(str(len(seeds)) for seeds in looks)
    text = f"{sizes} seeds" if len(looks) == 1 else f"{len(looks[-1])} seeds (looks at {sizes})"
    variate = plan.study.control_variate
    return text if variate is None else f"{text}, {variate.arm} {variate.seeds} seeds,"


def _state(folder: Path) -> str:
    try:
        return str(read_run(folder)["status"])
    except RecordError:
        return "missing"


def _at_least_two(text: str) -> int:
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError("at least 2 are needed to see a spread")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m routing_lab.study", description="Run the missing cells of a study and compute its verdict."
    )
    parser.add_argument("study", help="study file, experiments/<name>.yaml, or a registration")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="scale=toy|small|real|paper, overrides of every arm, hydra/launcher=... and the like",
    )
    parser.add_argument(
        "--plan", action="store_true", help="list the cells, their state and expected cost; run nothing"
    )
    parser.add_argument(
        "--pilot", action="store_true", help="run seeds set apart that never count, and tell what the study can find"
    )
    parser.add_argument(
        "--pilot-seeds",
        metavar="N",
        type=_at_least_two,
        default=NUM_PILOT_SEEDS,
        help="how many (default: %(default)s)",
    )
    parser.add_argument(
        "--amend", metavar="WHY", default="", help="go on with a study that was changed after cells had finished"
    )
    parser.add_argument("--config-dir", help="folder with members of your own, as for training")
    return parser


if __name__ == "__main__":
    main()
