"""routing_lab: controlled multi-seed experiments on how transformers route their tokens.

Importing the package is cheap: torch is loaded when `route` or `open_run` is first used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routing_lab.assembly import route
    from routing_lab.training.opening import open_run

if sys.argv[:1] == ["-m"] and any(word.startswith("routing_lab.") for word in sys.orig_argv):
    # `python -m routing_lab.COMMAND` loads the package before the command itself.
    from routing_lab.interrupts import speak_when_interrupted

    speak_when_interrupted()

__version__ = "0.1.0"
__all__ = ["__version__", "open_run", "route"]


def __getattr__(name: str) -> Any:
    if name == "route":
        from routing_lab.assembly import route

        return route
    if name == "open_run":
        from routing_lab.training.opening import open_run

        return open_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
