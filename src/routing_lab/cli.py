"""The console script `routing-lab COMMAND ...`, the same as `python -m routing_lab.COMMAND ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import routing_lab
from routing_lab.interrupts import speak_when_interrupted

COMMANDS = {
    "train": "train one run or a sweep",
    "study": "run the missing cells of a study and compute its verdict",
    "benchmark": "time a routed model beside the dense one",
    "export": "a finished run's model as one ONNX file or torch program",
    "generate": "text from a finished run or a decoder on disk, token by token",
    "probe": "measure finished runs: agreement, selection, capacity",
    "diff": "what differs between two runs",
    "look": "a page that shows what every layer of some runs kept",
    "report": "tables, figures and verdicts from records",
    "dashboard": "the Weights & Biases workspace of a study",
}
"""Command -> what it does; the module of the same name has a `main(arguments)`."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Dispatch to a command; leaves through `sys.exit`."""
    speak_when_interrupted()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    first = arguments[0] if arguments else "--help"
    if first in COMMANDS:
        sys.exit(import_module(f"routing_lab.{first}").main(arguments[1:]))
    if first == "--version":
        print(f"routing_lab {routing_lab.__version__}")
    elif first in ("--help", "-h"):
        print(_usage())
    else:
        print(f"routing-lab {first}: no such command\n{_usage()}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _usage() -> str:
    lines = [f"  {name:<12} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: routing-lab COMMAND ...", "", *lines, "", "routing-lab COMMAND --help says more."])
