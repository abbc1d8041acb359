"""Jobs and what becomes of them: one job, many through a launcher, their outcomes and the table of a sweep.

Jobs may run in other processes and on other machines: each leaves its outcome as a file in the sweep's folder, and the
table is made from these files and the records they name. Nothing here imports torch but a job that has to train.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from routing_lab.config import Composer, ConfigError, check, run_folder
from routing_lab.config.hydra_internals import Callbacks
from routing_lab.config.problems import Problem
from routing_lab.data.state import changed_inputs
from routing_lab.evidence import formatting
from routing_lab.interrupts import Interrupted, interruptible
from routing_lab.runs.files import write_json
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.metrics import EFFICIENCIES, QUANTITIES, metric
from routing_lab.runs.records import FAILED, FINISHED, INTERRUPTED, RecordError, is_finished, read_record

OUTCOMES = "cells"
"""Folder inside a sweep's folder with one folder per launch, and in it one JSON file per job."""

TABLE = "sweep.csv"
"""The table of a sweep, in its folder."""

GRACE = 20.0
"""Seconds that jobs in other processes have to write down where they stand before they are killed."""

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Environment variable, 1 for whoever wants to see where an error of a launcher came from."""

HELPERS = ("resource_tracker", "wandb-core")
"""Programs that libraries start beside a process and that end with it: what it writes down at its end needs them."""


def job(config: DictConfig) -> dict[str, Any]:
    """What Hydra runs for each cell: train it, or report it where it has finished; returns its outcome.

    The outcome holds `status`, `folder`, `error`, `trained`, `signal` and `overrides`. An interruption ends the whole
    sweep.
    """
    hydra_config = HydraConfig.get()
    overrides = [text for text in hydra_config.overrides.task if not text.startswith("runtime.threads=")]
    is_sweep = hydra_config.mode == RunMode.MULTIRUN
    sweep_dir = Path(hydra_config.sweep.dir) if is_sweep else None
    try:
        result = _run(config, _command(hydra_config, overrides), sweep_dir.name if sweep_dir else None)
    except ConfigError as error:
        if sweep_dir is None:
            print(error, file=sys.stderr, flush=True)
            sys.exit(2)
        result = {"status": FAILED, "error": "; ".join(str(error).splitlines())}
    except Interrupted as interruption:  # while the cell was checked, or torch loaded
        result = {"status": INTERRUPTED, "error": str(interruption), "signal": interruption.number}
    except Exception as error:  # a broken installation, say: the other cells of a sweep must still be run
        traceback.print_exc()
        result = {"status": FAILED, "error": f"{type(error).__name__}: {error}"}
    outcome = {key: result.get(key) for key in ("status", "error", "trained", "signal", "folder")}
    outcome |= {"folder": str(outcome["folder"] or ""), "overrides": overrides}
    if sweep_dir is None:
        _print_run(outcome)
    else:
        try:
            write_outcome(sweep_dir / hydra_config.sweep.subdir, hydra_config.job.num, outcome)
        except OSError as error:  # as on a full disk: the other cells must still be run
            print(f"{' '.join(overrides)}: its outcome cannot be written: {error}", file=sys.stderr, flush=True)
    if outcome["status"] == INTERRUPTED:
        raise Interrupted(outcome["signal"] or signal.SIGINT, is_told=sweep_dir is None)
    if sweep_dir is None and outcome["status"] != FINISHED:
        sys.exit(1)
    return outcome


class Launch:
    """One launch of jobs into a sweep's folder, told apart from others that use the folder at the same time.

    Args:
        sweep_dir: the sweep's folder.
    """

    def __init__(self, sweep_dir: Path) -> None:
        place = f"{OUTCOMES}/{secrets.token_hex(4)}"
        self.outcome_dir = sweep_dir / place
        self.overrides = [f"hydra.sweep.dir={_quoted(str(sweep_dir))}", f"hydra.sweep.subdir={place}"]

    def __call__(self, launch: Callable[[], object]) -> tuple[int, dict[int, dict[str, Any]]]:
        """Call `launch`, which starts the jobs; the exit code and, by number of the job, the outcomes they left."""
        try:
            code = launched(launch)
            return code, read_outcomes(self.outcome_dir)
        finally:
            shutil.rmtree(self.outcome_dir, ignore_errors=True)
            if self.outcome_dir.parent.is_dir() and not any(self.outcome_dir.parent.iterdir()):
                self.outcome_dir.parent.rmdir()


def launched(launch: Callable[[], object]) -> int:
    """Call `launch`, which starts jobs; its end as an exit code.

    SIGTERM ends it as Ctrl-C does: jobs in other processes are ended too, with time to write down where they stand.
    So are those that are left where a launcher gives up, as when one of its processes was killed.
    """
    before = psutil.Process().children(recursive=True)
    try:
        with interruptible(), _hydra_passes_errors_on():
            launch()
    except KeyboardInterrupt as raised:  # a launcher may raise one of its own
        interruption = raised if isinstance(raised, Interrupted) else Interrupted()
        if not interruption.is_told:
            print(f"interrupted: {interruption}", file=sys.stderr, flush=True)
        _end([process for process in psutil.Process().children(recursive=True) if process not in before])
        return 128 + interruption.number
    except Exception as error:  # of the launcher itself: what a job meets is its outcome
        if os.environ.get(FULL_ERROR) == "1":
            raise
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        _end([process for process in psutil.Process().children(recursive=True) if process not in before])
        return 1
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def launch_cells(
    composer: Composer, cells: Sequence[Sequence[str]], sweep_dir: Path, hydra: Sequence[str] = ()
) -> tuple[int, dict[int, dict[str, Any]]]:
    """Run cells through the launcher that `hydra` chooses, without a sweeper.

    Args:
        composer: finds the configuration files.
        cells: the overrides of each.
        sweep_dir: folder of the sweep.
        hydra: overrides that concern Hydra itself, and those that all cells share.

    Returns:
        The exit code; by number of the cell, the outcome it left.
    """
    launch = Launch(sweep_dir)
    config = composer.multirun_config([*hydra, "hydra.mode=MULTIRUN", *launch.overrides])
    threads, together = shares(config.hydra.launcher, len(cells))
    jobs = [[*cell, *([] if threads is None else [f"runtime.threads={threads}"])] for cell in cells]
    context = HydraContext(config_loader=composer.loader, callbacks=Callbacks(config))
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=job, config=config)

    def start() -> None:
        for first in range(0, len(jobs), together):
            launcher.launch(jobs[first : first + together], initial_job_idx=first)

    return launch(start)


def shares(launcher: Mapping[str, Any], jobs: int) -> tuple[int | None, int]:
    """Threads for each of the jobs that a launcher runs at the same time on this machine, and how many it is given.

    Args:
        launcher: the node `hydra.launcher`.
        jobs: how many jobs there are.

    Returns:
        Threads of a job, None: leave it to torch; and how many jobs to hand over at a time, fewer than all only to a
        launcher that starts at once whatever it is given.
    """
    target = str(launcher.get("_target_", ""))
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if target.endswith("JoblibLauncher"):
        workers = int(launcher["n_jobs"])
        together = min(jobs, workers if workers > 0 else max(1, processors + 1 + workers))
        return max(1, processors // together), jobs
    if target.endswith("submitit_launcher.LocalLauncher"):
        together = min(jobs, processors)
        return max(1, processors // together), together
    return None, jobs


def read_outcomes(folder: Path) -> dict[int, dict[str, Any]]:
    """Number of a job -> the outcome it left in the folder of its launch."""
    return {int(path.stem): json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}


def write_outcome(folder: Path, number: int, outcome: Mapping[str, Any]) -> None:
    """Leave the outcome of a job where the command that launched it finds it, from whichever process and machine."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{number:04d}.json", outcome)


def report_sweep(
    folder: Path, cells: Sequence[Sequence[str]], outcomes: Mapping[int, Mapping[str, Any]], code: int = 0
) -> int:
    """Print the table of a sweep's cells, write it as `sweep.csv`, and say which cells failed and why.

    Args:
        folder: the sweep's folder.
        cells: overrides of the jobs that were to run.
        outcomes: by number of the job, what it left.
        code: exit code of the launcher.

    Returns:
        The exit code of the command: `code`, or 1 where it is 0 and a cell did not finish.
    """
    given = [outcomes[number]["overrides"] if number in outcomes else cell for number, cell in enumerate(cells)]
    labels = [label or "the run" for label in _labels(given)]
    arms = _labels([[text for text in cell if not text.startswith("seed=")] for cell in given])
    records, failed = [], []
    for number, label in enumerate(labels):
        line = failure(label, outcomes.get(number), code)
        if line is not None:
            failed.append(line)
            continue
        try:
            record = read_record(outcomes[number]["folder"])
            records.append(record | {"arm": record["arm"] or arms[number] or None})
        except RecordError as error:
            failed.append(f"  {label}: {error}")
    if records:
        _print_table(records, folder / TABLE)
    trained = sum(bool(outcome["trained"]) for outcome in outcomes.values())
    print(f"{len(records)} of {len(cells)} cells finished, {trained} of them trained now; sweep folder: {folder}")
    if failed:
        print("not finished:", *failed, "The same command runs what is missing.", sep="\n", flush=True)
    return code or int(bool(failed))


def failure(label: str, outcome: Mapping[str, Any] | None, code: int = 0) -> str | None:
    """A line that says why a cell did not finish; None where it did.

    Args:
        label: what tells the cell from the others.
        outcome: what it left, None for nothing.
        code: exit code of the launcher.
    """
    if outcome is None:
        return f"  {label}: did not run to its end" if code else f"  {label}: left no outcome"
    if outcome["status"] == FINISHED:
        return None
    where = f" ({outcome['folder']})" if outcome["folder"] else ""
    return f"  {label}: {outcome['status']}: {outcome['error']}{where}"


# --- one job ---


def _run(config: DictConfig, command: str, group: str | None) -> dict[str, Any]:
    loaded = check(config)
    folder = RunFolder(run_folder(loaded.config, loaded.resolved))
    record = None if loaded.config.rerun else folder.read_record()
    if record is not None:
        if changed := changed_inputs(record, loaded.config):
            raise ConfigError(Problem.of(*problem) for problem in changed)
        if is_finished(record):
            return {"status": FINISHED, "folder": folder.path, "error": None, "trained": False, "signal": None}
    from routing_lab.training.run import run_cell  # torch: only where something is trained

    return run_cell(loaded.config, loaded.resolved, loaded.warnings, command=command, group=group)


def _command(hydra_config: HydraConf, overrides: Sequence[str]) -> str:
    """The command that runs this cell alone."""
    folders = [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]
    options = [word for folder in folders for word in ("--config-dir", os.path.relpath(folder))]
    return shlex.join(["python", "-m", "routing_lab.train", *options, *overrides])


def _print_run(outcome: Mapping[str, Any]) -> None:
    folder = outcome["folder"]
    if outcome["status"] != FINISHED:
        hint = "; the same command resumes it" if outcome["status"] == INTERRUPTED else ""
        where = f" ({folder})" if folder else ""
        print(f"{outcome['status']}: {outcome['error']}{where}{hint}", file=sys.stderr, flush=True)
        return
    record = read_record(folder)
    print(f"{record['name']}: {'finished' if outcome['trained'] else 'had finished, nothing was trained'}")
    for key in (f"{split}/{name}" for split in ("val", "test") for name in QUANTITIES):
        if key in record["metrics"]:
            shown = metric(key)
            print(f"  {key:<10} {formatting.number(record['metrics'][key], shown.kind)} {shown.unit}".rstrip())
    for key in EFFICIENCIES:
        if (value := record["cost"].get(key.removeprefix("cost/"))) is not None:
            print(f"  {metric(key).label}: {formatting.number(value, metric(key).kind)}")
    _print_notes([record])
    print(f"run folder: {folder}", flush=True)


# --- the table ---


def _print_table(records: Sequence[dict[str, Any]], path: Path) -> None:
    from rich.console import Console

    from routing_lab.evidence.tables import render_plain, render_rich, sweep_table, write_csv

    table = sweep_table(records)
    written = f"table: {path}"
    try:
        write_csv(table, path)
    except OSError as error:
        written = f"table: cannot be written: {error}"
    console = Console()
    print()
    if console.is_terminal:
        for part in render_rich(table):
            console.print(part)
    else:
        print(render_plain(table))
    print()
    _print_notes(records)
    print(written)


def _print_notes(records: Sequence[Mapping[str, Any]]) -> None:
    """Warnings of the records, once for those that differ in their numbers only."""
    alike: dict[str, list[str]] = {}
    for record in records:
        for warning in record["warnings"]:
            alike.setdefault(re.sub(r"\d[\d.]*", "#", warning), []).append(warning)
    for warnings in alike.values():
        more = f" (and {len(warnings) - 1} more like it)" if len(warnings) > 1 else ""
        print(f"note: {warnings[0]}{more}")


def _labels(cells: Sequence[Sequence[str]]) -> list[str]:
    """Each cell by the overrides that not all cells share; empty where there are none."""
    shared = set.intersection(*(set(cell) for cell in cells)) if len(cells) > 1 else set()
    return [" ".join(text for text in cell if text not in shared) for cell in cells]


# --- processes ---


@contextmanager
def _hydra_passes_errors_on() -> Iterator[None]:
    """Within the block Hydra raises what a launcher raises, instead of printing a traceback and leaving."""
    asked = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        del os.environ[FULL_ERROR]
        if asked is not None:
            os.environ[FULL_ERROR] = asked


def _end(processes: Sequence[psutil.Process]) -> None:
    """End processes: SIGTERM first, so that a run says where it stands, and SIGKILL after a while."""
    asked = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if not any(helper in word for helper in HELPERS for word in process.cmdline()):
                process.terminate()
                asked.append(process)
    _, alive = psutil.wait_procs(asked, timeout=GRACE)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE)


def _quoted(text: str) -> str:
    """A value as Hydra's grammar takes it, whatever characters it holds."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
