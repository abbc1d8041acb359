"""Ctrl-C and SIGTERM at a command: one sentence and exit code 130 or 143, at any moment, and at once the second time.

A signal ends the process on the spot while modules are loaded, and by an exception afterwards, so that what is being
written is finished or removed. Nothing slow is imported here: it is in force before the rest of the package is there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal ended the command.

    Args:
        number: of the signal; the exit code is 128 more.
        is_told: whether the sentence has been printed.
    """

    def __init__(self, number: int = signal.SIGINT, is_told: bool = False) -> None:
        super().__init__(number, is_told)  # as it is pickled on the way from a worker
        self.number = int(number)
        self.is_told = is_told

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


def speak_when_interrupted() -> None:
    """From now on a signal ends this process, a command, with a sentence; one that is ignored stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end_command)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block a signal raises `Interrupted`; after one, a second ends the process at once, also later on."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is _interrupt:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def after_the_first(handler: Any) -> Any:
    """What a second signal does, given the handler of the first: it ends a command at once, and elsewhere the same."""
    if handler is _interrupt:
        return _end_at_once
    return signal.SIG_DFL if handler is None else handler


# --- handlers ---


def _end_command(number: int, frame: FrameType | None) -> NoReturn:
    _arm(_end_at_once)
    _say(f"interrupted: stopped by {signal.Signals(number).name}")
    if _is_importing(frame):
        os._exit(128 + number)
    raise SystemExit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    if _is_importing(frame):
        _say(f"interrupted: stopped by {signal.Signals(number).name}")
        _leave(number)
    _arm(_end_at_once)
    raise Interrupted(number)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    _say(f"stopped at once by {signal.Signals(number).name}; every file is whole, as after a kill")
    _leave(number)


def _arm(handler: Callable[[int, FrameType | None], Any]) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _leave(number: int) -> NoReturn:
    """End the processes that this one started, and it, without waiting for anything."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(128 + number)


def _say(line: str) -> None:
    # Past Python's buffers, which the signal may have found half written.
    with suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being loaded: native code then turns any exception into an error of its own."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
