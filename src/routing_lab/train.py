"""Train one run or a sweep: `python -m routing_lab.train router=amod scaling=multiply seed=0,1,2 -m`.

Hydra composes and launches; before it starts, every cell of the command is checked. This module imports no torch, so
that a mistake, `--help` and a sweep that has already run are answered at once. Jobs may run in other processes: each
leaves its outcome as a file in the sweep's folder, and the table is made from these files and the records they name.

Exit codes: 0 everything finished; 1 a cell failed; 2 the configuration was refused and nothing was written; 130 or 143
interrupted, and the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from routing_lab.config import Composer, ConfigError, check, check_command, conf_path, run_folder
from routing_lab.evidence import formatting
from routing_lab.evidence.records import RecordError, read_record, write_json
from routing_lab.training.store import FAILED, FINISHED, INTERRUPTED, RunFolder

OUTCOMES = "cells"
"""Folder inside a sweep's folder with one JSON file per job."""

TABLE = "sweep.csv"
"""The table of a sweep, in its folder."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves through `sys.exit`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    import_from_here()
    parsed = get_args_parser().parse_intermixed_args(words)
    # Hydra's own parser takes overrides in one piece only, not `router=amod -m seed=0,1`.
    words = [word for word in words if word not in parsed.overrides] + parsed.overrides
    if _is_hydras_own(parsed):
        _hydra(words)
        sys.exit(0)
    try:
        composer = Composer(parsed.config_dir, _own_path(parsed.config_path), parsed.config_name)
        command = check_command(composer, parsed.overrides, parsed.multirun)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for warning in command.warnings:
        print(f"note: {warning}", flush=True)
    if command.is_sweep and command.threads is None:
        threads = shared_threads(command.launcher, len(command.cells))
        words += [] if threads is None else [f"runtime.threads={threads}"]
    if command.sweep_dir is None:
        sys.exit(_launch(words))
    folder = Path(command.sweep_dir)
    sys.exit(report_sweep(folder, command.cells, _launch(words, folder)))


def job(config: DictConfig) -> dict[str, Any]:
    """What Hydra runs for each cell: train it, or report it where it has finished; returns its outcome.

    The outcome holds `status`, `folder`, `error`, `trained` and `overrides`. An interruption ends the whole sweep.
    """
    hydra_config = HydraConfig.get()
    overrides = [text for text in hydra_config.overrides.task if not text.startswith("runtime.threads=")]
    is_sweep = hydra_config.mode == RunMode.MULTIRUN
    sweep_dir = Path(hydra_config.sweep.dir) if is_sweep else None
    try:
        result = _run(config, _command(hydra_config, overrides), sweep_dir.name if sweep_dir else None)
    except Exception as error:  # a broken installation, say: the other cells of a sweep must still be run
        traceback.print_exc()
        result = {"status": FAILED, "error": f"{type(error).__name__}: {error}"}
    outcome = {key: result.get(key) for key in ("status", "error", "trained", "signal", "folder")}
    outcome |= {"folder": str(outcome["folder"] or ""), "overrides": overrides}
    if sweep_dir is None:
        _print_run(outcome)
    else:
        write_outcome(sweep_dir, hydra_config.job.num, outcome)
    if outcome["status"] == INTERRUPTED:
        raise Interrupted(outcome["signal"] or signal.SIGINT)
    if sweep_dir is None and outcome["status"] != FINISHED:
        sys.exit(1)
    return outcome


def import_from_here() -> None:
    """Let `_target_` name modules in the current folder, as `python -m` does; a console script does not."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


class Interrupted(KeyboardInterrupt):
    """A signal ended the command. number: of the signal; the exit code is 128 more."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = int(number)


def shared_threads(launcher: Mapping[str, Any], jobs: int) -> int | None:
    """Threads for each of the jobs that a launcher runs at the same time on this machine; None: leave it to torch.

    Args:
        launcher: the node `hydra.launcher`.
        jobs: how many jobs there are.
    """
    target = str(launcher.get("_target_", ""))
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    together = jobs
    if target.endswith("JoblibLauncher"):
        workers = int(launcher["n_jobs"])
        together = min(together, workers if workers > 0 else max(1, processors + 1 + workers))
    elif not target.endswith("submitit_launcher.LocalLauncher"):
        return None
    return max(1, processors // together)


def launched(launch: Callable[[], object], sweep_dir: Path | None = None) -> int:
    """Call `launch`, which starts jobs; its end as an exit code.

    SIGTERM ends it as Ctrl-C does: jobs in other processes stop. Outcomes of an earlier launch into the same folder are
    cleared first, see `sweep_outcomes`.
    """
    if sweep_dir is not None:
        for outcome in (sweep_dir / OUTCOMES).glob("*.json"):
            outcome.unlink()
    try:
        with _terminable():
            launch()
    except KeyboardInterrupt as interruption:
        return 128 + getattr(interruption, "number", signal.SIGINT)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def sweep_outcomes(sweep_dir: Path) -> dict[int, dict[str, Any]]:
    """Number of a job -> the outcome it left in the sweep's folder."""
    return {int(path.stem): json.loads(path.read_text("utf-8")) for path in (sweep_dir / OUTCOMES).glob("*.json")}


def write_outcome(sweep_dir: Path, number: int, outcome: Mapping[str, Any]) -> None:
    """Leave the outcome of a job where the command that launched it finds it, from whichever process and machine."""
    folder = sweep_dir / OUTCOMES
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{number:04d}.json", outcome)


def report_sweep(folder: Path, cells: Sequence[Sequence[str]], code: int = 0) -> int:
    """Print the table of a sweep's cells, write it as `sweep.csv`, and say which cells failed and why.

    Args:
        folder: the sweep's folder, with the outcomes of its jobs.
        cells: overrides of the jobs that were to run.
        code: exit code of the launcher.

    Returns:
        The exit code of the command: `code`, or 1 where it is 0 and a cell did not finish.
    """
    outcomes = sweep_outcomes(folder)
    given = [outcomes[number]["overrides"] if number in outcomes else cell for number, cell in enumerate(cells)]
    labels = [label or "the run" for label in _labels(given)]
    arms = _labels([[text for text in cell if not text.startswith("seed=")] for cell in given])
    records, failed = [], []
    for number, label in enumerate(labels):
        outcome = outcomes.get(number)
        if outcome is None:
            failed.append(f"  {label}: did not run to its end" if code else f"  {label}: left no outcome")
        elif outcome["status"] != FINISHED:
            where = f" ({outcome['folder']})" if outcome["folder"] else ""
            failed.append(f"  {label}: {outcome['status']}: {outcome['error']}{where}")
        else:
            try:
                record = read_record(outcome["folder"])
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


# --- one job ---


def _run(config: DictConfig, command: str, group: str | None) -> dict[str, Any]:
    loaded = check(config)
    folder = RunFolder(run_folder(loaded.config, loaded.resolved))
    if not loaded.config.rerun and folder.finished_record() is not None:
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
    for key in ("val/acc", "val/loss", "test/acc", "test/loss"):
        if key in record["metrics"]:
            metric = formatting.metric(key)
            unit = " %" if metric.kind == "percent" else ""
            print(f"  {key:<10} {formatting.number(record['metrics'][key], metric.kind)}{unit}")
    _print_notes([record])
    print(f"run folder: {folder}", flush=True)


# --- the table ---


def _print_table(records: Sequence[dict[str, Any]], path: Path) -> None:
    from rich.console import Console

    from routing_lab.evidence.tables import render_plain, render_rich, sweep_table, write_csv

    table = sweep_table(records)
    write_csv(table, path)
    console = Console()
    print()
    if console.is_terminal:
        for part in render_rich(table):
            console.print(part)
    else:
        print(render_plain(table))
    print()
    _print_notes(records)
    print(f"table: {path}")


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


# --- Hydra ---


def _is_hydras_own(parsed: argparse.Namespace) -> bool:
    """Whether the command asks Hydra for information and runs nothing."""
    asked = (
        parsed.help,
        parsed.hydra_help,
        parsed.shell_completion,
        parsed.cfg,
        parsed.info,
        parsed.experimental_rerun,
    )
    return any(value not in (None, False) for value in asked)


def _hydra(arguments: Sequence[str]) -> None:
    command = hydra.main(version_base="1.3", config_path=str(conf_path()), config_name="train")(job)
    given, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        command()
    finally:
        sys.argv = given


def _launch(arguments: Sequence[str], sweep_dir: Path | None = None) -> int:
    return launched(lambda: _hydra(arguments), sweep_dir)


def _own_path(config_path: str | None) -> Path | None:
    """`--config-path` as Hydra takes it: absolute, or relative to this file."""
    return None if config_path is None else Path(__file__).parent / config_path


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: jobs in other processes stop, and what is done is reported."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    # Jobs in other processes unpickle `job` by its module: it must not be `__main__`.
    from routing_lab.train import main as importable_main

    importable_main()
