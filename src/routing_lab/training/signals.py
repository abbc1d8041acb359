"""Stopping on SIGINT and SIGTERM without losing what is on disk."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from routing_lab.interrupts import SIGNALS, after_the_first


class Stopped(BaseException):
    """The process was asked to stop. Not an `Exception`, so that nothing on the way takes it for a failure.

    Attributes:
        signal: the signal's number; the exit code is by custom 128 more.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block SIGINT and SIGTERM raise `Stopped`; a second signal ends a command at once.

    Elsewhere, as in a notebook, the second acts as it did before the block.

    The run's files are replaced atomically, so any moment is a good one. Outside the main thread, where Python delivers
    no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    is_stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        for each, handler in previous.items():
            signal.signal(each, after_the_first(handler))
        if is_stopped:  # Lightning puts back the handlers that it found, this one again
            signal.raise_signal(number)
            return
        is_stopped = True
        raise Stopped(number)

    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            then = after_the_first(handler) if is_stopped else handler
            signal.signal(number, signal.SIG_DFL if then is None else then)
