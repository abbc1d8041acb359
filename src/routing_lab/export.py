"""Write a finished run's model as one file: `python -m routing_lab.export RUN model.onnx` (or model.pt2).

The model runs without this package, on batches of any size. What was written is loaded again and compared with the
model.

Exit codes: 0 written; 1 the model cannot be exported, and why; 2 the words were refused. Nothing is left of a failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from routing_lab.config import ConfigError
from routing_lab.config.problems import Problem
from routing_lab.runs.records import RecordError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves through `sys.exit`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        sys.exit(0 if words else 2)
    try:
        _check(words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    from routing_lab.exporting import export  # torch: only where something is written
    from routing_lab.training.opening import open_run

    run, target = words
    try:
        difference = export(open_run(run).model, target)
    except (ConfigError, RecordError, ValueError) as error:
        print(f"{run}: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"{target}: {Path(target).stat().st_size / 2**20:.1f} MiB, {difference:.1g} from the model (relative)")
    sys.exit(0)


def _check(words: Sequence[str]) -> None:
    problems = []
    if len(words) != 2:
        problems.append(Problem("words", str(len(words)), "two are expected: a run folder and a file to write"))
    else:
        run, target = words
        if not (Path(run) / "run.json").is_file():
            problems.append(Problem("RUN", run, "is no run folder (it has no run.json)"))
        if Path(target).suffix not in (".onnx", ".pt2"):
            problems.append(Problem("file", target, "must end in .onnx or .pt2"))
    if problems:
        raise ConfigError(problems)


if __name__ == "__main__":
    main()
