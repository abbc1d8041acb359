"""The run folder: where everything one run leaves behind is kept, and who may write there.

    <paths.runs>/<name>-<hash>/
        config.yaml         the resolved configuration
        run.json            the record: status, metrics, cost, routing, environment, ...
        history.csv         one row per epoch
        predictions.npz     one row per test example, sorted by index
        error.log           the traceback of the last failure
        checkpoints/        last.ckpt, previous.ckpt (to resume), best.safetensors, final.safetensors

Every file is replaced as a whole (`runs.files`). One process trains at a time: it holds an operating system lock, which
a killed process releases by dying. No torch here: a finished run is reported without it.
"""

from __future__ import annotations

import csv
import io
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from routing_lab.runs.files import replacing, write_json, write_text
from routing_lab.runs.records import RecordError, is_finished, read_record

if TYPE_CHECKING:
    import numpy as np


class RunFolder:
    """Paths, record and lock of one run. Creating the object touches nothing on disk.

    Args:
        path: the folder.
        writes: False in the further processes of a multi-device run: every writing method then does nothing, and the
            lock is left to the first process.
    """

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path = Path(path)
        self.writes = writes
        self.config = self.path / "config.yaml"
        self.record = self.path / "run.json"
        self.history = self.path / "history.csv"
        self.predictions = self.path / "predictions.npz"
        self.error_log = self.path / "error.log"
        self.checkpoints = self.path / "checkpoints"
        self.last = self.checkpoints / "last.ckpt"
        self.previous = self.checkpoints / "previous.ckpt"
        self.best = self.checkpoints / "best.safetensors"
        self.final = self.checkpoints / "final.safetensors"

    def read_record(self) -> dict[str, Any] | None:
        """The record as it is on disk; None where there is none or it cannot be read."""
        try:
            return read_record(self.path)
        except RecordError:
            return None

    def finished_record(self) -> dict[str, Any] | None:
        """The record of a finished run, None for any other state."""
        record = self.read_record()
        return record if record is not None and is_finished(record) else None

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Replace run.json, with a fresh heartbeat (time, process, host)."""
        if not self.writes:
            return
        stamped = {**record, "heartbeat": heartbeat()}
        stamped.pop("folder", None)  # where the folder stands is not part of the record
        write_json(self.record, stamped)

    def write_config(self, resolved: Mapping[str, Any]) -> None:
        """Replace config.yaml."""
        if self.writes:
            write_text(self.config, OmegaConf.to_yaml(OmegaConf.create(dict(resolved))))

    def write_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace history.csv; the columns are the union of the rows' keys in order of appearance."""
        if not self.writes:
            return
        columns = list(dict.fromkeys(key for row in rows for key in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.history, text.getvalue())

    def write_predictions(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace predictions.npz."""
        import numpy as np

        if self.writes:
            with replacing(self.predictions) as temporary, open(temporary, "wb") as stream:
                np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]

    def write_error(self, text: str) -> None:
        """Replace error.log."""
        if self.writes:
            write_text(self.error_log, text)

    def drop_resume_state(self) -> None:
        """Remove the checkpoints that only an unfinished run needs, and the log of a failure that was overcome."""
        if self.writes:
            for path in (self.last, self.previous, self.error_log):
                path.unlink(missing_ok=True)

    def prepare(self) -> None:
        """Create the folder and remove what an interrupted writer left under a temporary name."""
        if not self.writes:
            return
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.checkpoints):
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)

    def require(self) -> None:
        """Raise FileNotFoundError where somebody has removed the folder since its configuration was written."""
        if self.writes and not self.config.exists():
            raise FileNotFoundError(f"the run folder {self.path} was removed while the run trained")

    def set_aside(self) -> Path | None:
        """Move an existing run to `<paths.runs>/.replaced/<folder>-<time>`, where no report looks; the new place."""
        if not self.writes or not self.path.exists():
            return None
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        aside = self.path.parent / ".replaced" / f"{self.path.name}-{stamp}"
        aside.parent.mkdir(exist_ok=True)
        os.rename(self.path, aside)
        return aside

    @contextmanager
    def lock(self, announce: Callable[[str], None]) -> Iterator[None]:
        """Hold the run for this process, waiting for another one that has it.

        Args:
            announce: called once with a line that says who has it, if this process has to wait.
        """
        if not self.writes:
            yield
            return
        # Beside the folders, not inside: the folder itself may be moved aside while the lock is held.
        locks = self.path.parent / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{self.path.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            announce(f"{self.path.name}: {self._holder()} is working on this run; waiting for it")
            lock.acquire(poll_interval=0.2)
        try:
            yield
        finally:
            lock.release()

    def _holder(self) -> str:
        beat = (self.read_record() or {}).get("heartbeat")
        if not isinstance(beat, dict):
            return "another process"
        return f"process {beat.get('pid')} on {beat.get('host')} (last heard of at {beat.get('time')})"


def heartbeat() -> dict[str, Any]:
    """Time (UTC, ISO 8601), process and host of this moment."""
    return {"time": datetime.now(UTC).isoformat(timespec="seconds"), "pid": os.getpid(), "host": socket.gethostname()}


def folders_by_run(runs: Path) -> dict[str, Path]:
    """Run id -> its folder, whatever it is called."""
    if not runs.is_dir():
        return {}
    with os.scandir(runs) as entries:
        return {entry.name.rsplit("-", 1)[-1]: runs / entry.name for entry in entries if entry.is_dir()}
