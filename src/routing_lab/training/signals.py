"""Stopping on SIGINT and SIGTERM without losing what is on disk."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


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
    """Within the block SIGINT and SIGTERM raise `Stopped` at once; a second signal acts as it did before the block.

    The run's files are replaced atomically, so any moment is a good one. Outside the main thread, where Python delivers
    no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        raise Stopped(number)

    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
