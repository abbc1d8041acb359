"""What differs between two runs: `python -m routing_lab.diff RUN RUN [--only router.name ...]`.

Configuration, code, versions, data, initial weights, routing, metrics and costs, from the records alone: nothing is
opened but `run.json`, and torch is not imported.

Exit codes: 0 shown; 1 with --only: the runs differ in something else; 2 a run cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what differs; returns the exit code."""
    options = _parser().parse_args(arguments)

    from routing_lab.evidence.between import runs_table, uncontrolled
    from routing_lab.evidence.tables import render_plain
    from routing_lab.runs.records import RecordError, read_record

    try:
        first, second = (read_record(folder) for folder in options.runs)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    print(render_plain(runs_table(first, second)))
    problems = [] if options.only is None else uncontrolled(first, second, options.only)
    if problems:
        print("not controlled:", *(f"  {problem}" for problem in problems), sep="\n", file=sys.stderr)
    return int(bool(problems))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m routing_lab.diff", description="What differs between two runs, from their records."
    )
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--only", nargs="+", metavar="KEY", help="what may differ, a key or a group: exit code 1 if anything else does"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
