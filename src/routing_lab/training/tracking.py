"""Showing a run while it trains: Weights & Biases, TensorBoard and CSV, any number of them.

The record on disk is the truth and a tracker only mirrors it, so nothing here can make a run fail: a tracker that fails
is left out with a warning. A tracker is opened when training begins, gets every epoch as it ends, and at the end the
status and the whole record. What it keeps in the run folder is written anew from the history whenever the run is taken
up, so that every epoch stands in it once. `evidence.wandb_source` reads records back.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import lightning.pytorch as pl
import numpy as np

from routing_lab.evidence.wandb_source import NO_API_KEY, RECORD_KEY, has_api_key
from routing_lab.runs.files import json_text
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import FINISHED, INTERRUPTED, RUNNING, flatten, read_history
from routing_lab.tasks.base import Task

if TYPE_CHECKING:
    from routing_lab.config import Config
    from routing_lab.config.training import WandbConfig

PATIENCE = 1.0
"""Seconds in which a server must answer before a run is written offline instead."""

TIMEOUT = 10.0
"""Seconds that opening and closing an online run may take once its server has answered."""

FLUSH = 1.0
"""Seconds after which what was logged is on disk, also where the process is killed."""

PIXELS = 8
"""Side of one cell in the picture of the routing."""

Row = Mapping[str, Any]
"""One epoch: metrics, kept fractions per layer, learning rate, throughput, seconds."""


@dataclass(frozen=True)
class Described:
    """The run that is tracked: its folder, record, resolved configuration, and the study or sweep it belongs to."""

    folder: RunFolder
    record: Mapping[str, Any]
    resolved: Mapping[str, Any]
    group: str | None


class Tracker(ABC):
    """A place where a run is shown. Any method may raise: the tracker is then left out."""

    name: ClassVar[str]

    @abstractmethod
    def open(self, run: Described, rows: Sequence[Row]) -> str | None:
        """Begin, with the epochs so far; returns a remark where the run is not shown as asked."""

    @abstractmethod
    def log(self, row: Row, picture: np.ndarray | None = None) -> None:
        """Add an epoch, and grey values [H, W] uint8 of what was kept in it."""

    @abstractmethod
    def close(self, record: Mapping[str, Any]) -> None:
        """End, with the record as it is now."""


class Tracking(pl.Callback):
    """Keeps the configured trackers up to date.

    Args:
        config: the run's configuration.
        run: what is tracked.

    Attributes:
        warnings: what did not work, once for each tracker.
    """

    def __init__(self, config: Config, run: Described) -> None:
        self.run = run
        self.warnings: list[str] = []
        self.rows: Callable[[], Sequence[Row]] = list
        self._trackers = [KINDS[name](config) for name in config.trackers()]
        self._is_open = False
        self._process = os.getpid()
        self._picture: np.ndarray | None = None

    def __call__(self, row: Row) -> None:
        """Show an epoch that has ended."""
        picture, self._picture = self._picture, None
        self._each(lambda tracker: tracker.log(row, picture))

    def end(self, record: Mapping[str, Any]) -> None:
        """Show how the run ended; one that was not shown yet is shown now, unless somebody waits for it to stop."""
        if not self._is_open:
            if record["status"] == INTERRUPTED:
                return
            columns = read_history({"folder": self.run.folder.path})
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            self._open([row | {name: int(row[name]) for name in ("epoch", "step")} for row in rows])
        self._each(lambda tracker: tracker.close(record))
        self._is_open = False

    # --- hooks ---

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self._open(self.rows())

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_open and batch_idx == 0 and is_pictured(trainer.current_epoch, trainer.max_epochs or 1):
            assert isinstance(pl_module, Task)
            self._picture = routing_picture(outputs["trace"], pl_module.routing.layers)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_open and os.getpid() != self._process:  # the process that goes on will open its own
            self._each(lambda tracker: tracker.close({**self.run.record, "status": RUNNING}))

    # --- trackers ---

    def _open(self, rows: Sequence[Row]) -> None:
        self._is_open = True

        def begin(tracker: Tracker) -> None:
            remark = tracker.open(self.run, rows)
            self.warnings += [remark] if remark else []

        self._each(begin)

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                with _environment_restored():
                    act(tracker)
            except Exception as error:  # whatever a tracker may raise, the run goes on and its record is on disk
                self._trackers.remove(tracker)
                self.warnings.append(_trouble(tracker, error))


class Wandb(Tracker):
    """Weights & Biases: one run there per run, named by its identity, so that a resumed or repeated one is the same.

    Offline by default: no account, no prompt, no network. Online, a server that cannot be reached costs `PATIENCE`
    seconds and the run is written offline.
    """

    name = "Weights & Biases"

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None

    def open(self, run: Described, rows: Sequence[Row], goes_on: bool = True) -> str | None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        for old in (run.folder.path / "wandb").glob("offline-run-*"):
            shutil.rmtree(old)
        reason: str | None = None
        if self._config.mode == "online":
            reason = None if has_api_key() else NO_API_KEY
            reason = reason or _unreachable(wandb.setup().settings.base_url)
            if reason is None:
                try:
                    self._run = self._init(run, "online", goes_on and bool(rows))
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
        if self._run is None:
            self._run = self._init(run, "offline", False)
        # The summary is the record's alone, not the last row of the history.
        self._run.define_metric("*", step_metric="epoch", summary="none")
        git = flatten({"git": run.record["git"]}, separator="/")
        self._run.summary.update({"status": RUNNING, **git})
        for row in rows:
            if row["epoch"] >= self._run.step:  # of a run that goes on the server has the others
                self.log(row)
        return reason and f"wandb.mode=online: {reason}. The run is written offline and can be synced later"

    def log(self, row: Row, picture: np.ndarray | None = None) -> None:
        import wandb

        shown = {} if picture is None else {"routing": wandb.Image(picture, caption=CAPTION)}
        self._run.log({**row, **shown}, step=row["epoch"], commit=True)

    def close(self, record: Mapping[str, Any]) -> None:
        self._run.summary.update(summary(record))
        self._run.finish(exit_code=int(record["status"] not in (FINISHED, RUNNING)))

    def _init(self, run: Described, mode: Literal["online", "offline"], goes_on: bool) -> Any:
        import wandb

        axes = run.record["axes"].values()
        return wandb.init(
            mode=mode,
            id=run.record["run_id"],
            # Without it a run of this identity, as before rerun=true, is replaced.
            resume="allow" if goes_on else None,
            project=self._config.project,
            entity=self._config.entity,
            dir=run.folder.path,
            name=run.record["name"],
            group=run.group,
            job_type="train",
            tags=[*self._config.tags, *sorted({axis["name"] for axis in axes if "name" in axis})],
            config=dict(run.resolved),
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                disable_code=True,
                init_timeout=TIMEOUT,
                finish_timeout=TIMEOUT,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=FLUSH,
            ),
        )


class TensorBoard(Tracker):
    """Event files in `tensorboard/` inside the run folder, over optimiser steps."""

    name = "TensorBoard"

    def __init__(self) -> None:
        self._logger: Any = None
        self._described: Described | None = None

    def open(self, run: Described, rows: Sequence[Row]) -> None:
        from lightning.pytorch.loggers import TensorBoardLogger

        shutil.rmtree(run.folder.path / "tensorboard", ignore_errors=True)
        self._described = run
        self._logger = TensorBoardLogger(run.folder.path, name="tensorboard", version="", default_hp_metric=False)
        for row in rows:
            self.log(row)

    def log(self, row: Row, picture: np.ndarray | None = None) -> None:
        self._logger.log_metrics({key: value for key, value in row.items() if key != "step"}, row["step"])
        if picture is not None:
            self._logger.experiment.add_image("routing", picture, row["step"], dataformats="HW")
        self._logger.experiment.flush()

    def close(self, record: Mapping[str, Any]) -> None:
        assert self._described is not None
        self._logger.experiment.add_text("status", record["status"])
        keys = flatten(self._described.resolved)
        self._logger.log_hyperparams({key: str(value) for key, value in keys.items()}, _numbers(record["metrics"]))
        self._logger.experiment.close()


class Csv(Tracker):
    """Lightning's `csv/metrics.csv` inside the run folder: a row per epoch, and a last one for the end."""

    name = "CSV"

    def __init__(self) -> None:
        self._logger: Any = None
        self._step = 0

    def open(self, run: Described, rows: Sequence[Row]) -> None:
        from lightning.pytorch.loggers import CSVLogger

        shutil.rmtree(run.folder.path / "csv", ignore_errors=True)
        self._logger = CSVLogger(run.folder.path, name="csv", version="")
        for row in rows:
            self.log(row)

    def log(self, row: Row, picture: np.ndarray | None = None) -> None:
        self._step = row["step"]
        self._logger.log_metrics(dict(row), self._step)
        self._logger.save()

    def close(self, record: Mapping[str, Any]) -> None:
        self._logger.log_metrics({"status": record["status"], **_numbers(record["metrics"])}, self._step)
        self._logger.save()


KINDS: dict[str, Callable[[Config], Tracker]] = {
    "wandb": lambda config: Wandb(config.wandb),
    "tensorboard": lambda config: TensorBoard(),
    "csv": lambda config: Csv(),
}
"""Member of `tracking` -> what shows the run."""

CAPTION = "share of the first validation batch that keeps a token; down the routed layers, across the positions"


def mirror(
    wandb_config: WandbConfig,
    folder: Path,
    record: Mapping[str, Any],
    resolved: Mapping[str, Any],
    history: Sequence[Row],
    group: str | None,
) -> str | None:
    """Write a record that is there to Weights & Biases, in place of what stands there of this run; what went wrong.

    Args:
        wandb_config: mode, project, entity and tags; `disabled` does nothing.
        folder: the run folder.
        record: the finished record; its metrics, cost and routing become the summary, which holds it whole as well.
        resolved: the resolved configuration.
        history: one row per epoch.
        group: name of the study or sweep.
    """
    if wandb_config.mode == "disabled":
        return None
    tracker, trouble = Wandb(wandb_config), None
    try:
        with _environment_restored():
            trouble = tracker.open(Described(RunFolder(folder), record, resolved, group), history, goes_on=False)
            tracker.close(record)
    except Exception as error:
        return _trouble(tracker, error)
    return trouble


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The flat numbers of a record: metrics under their own names, cost, routing and git with the section in front; and
    the whole of it as JSON under `record`, so that it can be restored.
    """
    sections = {f"{name}/{key}": value for name in ("cost", "routing", "git") for key, value in record[name].items()}
    kept = {key: value for key, value in record.items() if key not in _OF_THE_FOLDER}
    return {
        **record["metrics"],
        **flatten(sections, separator="/"),
        "status": record["status"],
        RECORD_KEY: json_text(kept),
    }


def is_pictured(epoch: int, epochs: int) -> bool:
    """Whether the routing of an epoch is drawn: of the 1st, 2nd, 4th, 8th, ... and of the last."""
    done = epoch + 1
    return done == epochs or done & (done - 1) == 0


def routing_picture(trace: Any, layers: Sequence[int]) -> np.ndarray | None:
    """Grey values [len(layers) * PIXELS, N * PIXELS] uint8: the share of a batch's examples that keep a token.

    Args:
        trace: of one batch.
        layers: the routed ones, drawn from the top.

    Returns:
        Positions are those of the N tokens that entered the model, prefix tokens left out; None without routed layers.
    """
    if not layers:
        return None
    positions = int(trace[0].origin.max()) + 1
    rows = np.zeros((len(layers), positions))
    for row, layer in zip(rows, layers, strict=True):
        kept, origin = trace[layer].kept, trace[layer].origin
        patches = origin.gather(1, kept.clamp_min(0)).masked_fill(kept < 0, -1)
        found = patches[patches >= 0].cpu().numpy()
        row += np.bincount(found, minlength=positions)[:positions] / len(kept)
    grey = np.rint(255 * rows.clip(0, 1)).astype(np.uint8)
    return np.kron(grey, np.ones((PIXELS, PIXELS), np.uint8))


_OF_THE_FOLDER = ("folder", "heartbeat", "history")
"""What a record that was read says of where it stands and how it is written, not of the run."""


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}


def _trouble(tracker: Tracker, error: Exception) -> str:
    return f"{tracker.name}: not everything was logged ({type(error).__name__}: {error})"


def _unreachable(url: str) -> str | None:
    """Why the server of an address, or the proxy on the way to it, does not answer within `PATIENCE` seconds."""
    server = urlsplit(url)
    proxy = urlsplit(getproxies().get(server.scheme, ""))
    host, port = (proxy.hostname, proxy.port) if proxy.hostname else (server.hostname, server.port)
    port = port or (443 if server.scheme == "https" else 80)
    found = ["no answer"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=PATIENCE).close()
            found.clear()
        except Exception as error:
            found[:] = [str(error)]

    # Looking a name up heeds no timeout, so that it is left behind where it takes too long.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return f"{url} cannot be reached ({found[0]})" if found else None


@contextmanager
def _environment_restored() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for key in set(os.environ) - set(before):
            del os.environ[key]
        os.environ.update(before)
