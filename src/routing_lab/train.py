"""Train one run or a sweep: `python -m routing_lab.train router=amod scaling=multiply seed=0,1,2 -m`.

Hydra composes and launches; before it starts, every cell of the command is checked. This module imports no torch, so
that a mistake, `--help` and a sweep that has already run are answered at once.

Exit codes: 0 everything finished; 1 a cell failed; 2 the configuration was refused and nothing was written; 130 or 143
interrupted, and the same command resumes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hydra

from routing_lab.config import Composer, ConfigError, check_command, check_overrides, conf_path
from routing_lab.config.hydra_internals import get_args_parser
from routing_lab.config.nominal import placed_lines
from routing_lab.sweeps import Launch, job, launched, report_sweep, shares


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves through `sys.exit`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    import_from_here()
    parsed = get_args_parser().parse_intermixed_args(words)
    # Hydra's own parser takes overrides in one piece only, not `router=amod -m seed=0,1`.
    words = [word for word in words if word not in parsed.overrides] + parsed.overrides
    if _is_hydras_own(parsed):
        _hydra(words)
        if parsed.cfg == "job" and parsed.package is None:
            print(*_placed(parsed), sep="\n")
        sys.exit(0)
    try:
        composer = Composer(parsed.config_dir, _own_path(parsed.config_path), parsed.config_name)
        command = check_command(composer, parsed.overrides, parsed.multirun)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for warning in command.warnings:
        print(f"note: {warning}", flush=True)
    if command.sweep_dir is None:
        sys.exit(launched(lambda: _hydra(words)))
    threads, together = shares(command.launcher, len(command.cells))
    if threads is not None and command.threads is None:
        words.append(f"runtime.threads={threads}")
    if together < len(command.cells):
        words.append(f"hydra.sweeper.max_batch_size={together}")
    folder = Path(command.sweep_dir)
    launch = Launch(folder)
    code, outcomes = launch(lambda: _hydra([*words, *launch.overrides]))
    sys.exit(report_sweep(folder, command.cells, outcomes, code))


def import_from_here() -> None:
    """Let `_target_` name modules in the current folder, as `python -m` does; a console script does not."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


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


def _placed(parsed: argparse.Namespace) -> list[str]:
    """Comments behind a printed configuration: its layers, where it is one that can be run."""
    try:
        composer = Composer(parsed.config_dir, _own_path(parsed.config_path), parsed.config_name)
        return [f"# {line}" for line in placed_lines(check_overrides(composer, parsed.overrides, here=False).config)]
    except ConfigError:
        return []


def _hydra(arguments: Sequence[str]) -> None:
    command = hydra.main(version_base="1.3", config_path=str(conf_path()), config_name="train")(job)
    given, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        command()
    finally:
        sys.argv = given


def _own_path(config_path: str | None) -> Path | None:
    """`--config-path` as Hydra takes it: absolute, or relative to this file."""
    return None if config_path is None else Path(__file__).parent / config_path


if __name__ == "__main__":
    main()
