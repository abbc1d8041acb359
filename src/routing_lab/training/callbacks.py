"""Lightning callbacks of a run: keeping what an interruption must not lose, and telling a person how it goes."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Checkpoint, RichProgressBar
from safetensors.torch import save_file

from routing_lab.runs.files import replacing
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.metrics import metric
from routing_lab.tasks.base import Task

LIGHTNING_LOGGERS = ("lightning.pytorch", "lightning.fabric")
"""Names of the loggers that Lightning's remarks go to."""

SMALL_UPDATE = 0.1
"""Mean multiplier below which a routed layer is reported to leave almost nothing of its update."""


class Keeper(Checkpoint):
    """Saves at the end of every epoch, after validation, all that the run needs to continue bit by bit.

    A checkpoint stands exactly between two epochs, so it needs no generator or data-loader state: both are functions of
    the seed and the epoch. `last.ckpt` is replaced atomically; the one before it stays as `previous.ckpt`.

    Args:
        folder: the run folder; only the first process of a multi-device run writes to it.
        record: the run's record, written with a heartbeat every epoch.
        run_id: identity stored in the checkpoints, so that a foreign file is not resumed.
        selection: `best` also keeps the weights that are best by `selects`, the earliest of equals.
        selects: the validation metric, as `val/acc`.
        reports: each is given the epoch's row of metrics, as `rows` has it.

    Attributes:
        history: one row of metrics per finished epoch.
        warnings: what the run had to warn about, once each.
        best: epoch and value of the best `selects`.
        has_started: whether training has begun, or gone on, in this process.
        seconds, examples: time and examples of training so far, over all interruptions; validation is not counted.
    """

    def __init__(
        self,
        folder: RunFolder,
        record: dict[str, Any],
        run_id: str,
        selection: str,
        selects: str,
        reports: Sequence[Callable[[Mapping[str, Any]], None]] = (),
    ) -> None:
        self.folder = folder
        self.record = record
        self.run_id = run_id
        self.selection = selection
        self.selects = metric(selects)
        self.reports = reports
        self.history: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.best: dict[str, Any] = {"epoch": None}
        self.has_started = False
        self.seconds = 0.0
        self.examples = 0
        self._epoch_seconds = 0.0
        self._started = 0.0

    def rows(self, unit: str) -> list[dict[str, Any]]:
        """The history with the throughput of every epoch, in `unit` per second."""
        examples = self.examples / max(1, len(self.history))
        return [{**row, f"{unit}_per_second": examples / row["seconds"]} for row in self.history]

    # --- state inside the checkpoint ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "history": self.history,
            "warnings": self.warnings,
            "best": self.best,
            "seconds": self.seconds,
            "images": self.examples,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])
        self.warnings = list(state_dict["warnings"])
        self.best = dict(state_dict["best"])
        self.seconds = state_dict["seconds"]
        self.examples = state_dict["images"]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The epoch is complete but for Lightning's own bookkeeping after this hook: say so, or resuming would see an
        # epoch that is still open and prepare its data for the wrong one.
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        for counter in (progress["total"], progress["current"]):
            counter["completed"] = counter["processed"]

    # --- hooks ---

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            silence_lightning()  # in the processes that Lightning has started

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.has_started = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch_seconds = time.perf_counter() - self._started

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        self.folder.require()
        self.seconds += self._epoch_seconds
        self.examples += pl_module.num_examples
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "lr": max(group["lr"] for group in trainer.optimizers[0].param_groups),
            **pl_module.measured,
            **{f"val/kept_fraction/{layer}": kept for layer, kept in pl_module.routing.kept_fraction().items()},
            "seconds": self._epoch_seconds,
        }
        self.history.append(row)
        if not self.warnings:
            self.warnings += [line for line in [small_update_warning(pl_module)] if line]
        key = self.selects.key
        value = row.get(key, math.nan)
        improved = self.selects.is_better(value, self.best[key]) if key in self.best else not math.isnan(value)
        if improved:
            self.best = {"epoch": row["epoch"], key: value}
        if improved and self.selection == "best" and trainer.is_global_zero:
            save_weights(pl_module, self.folder.best)
        self._save(trainer)
        if trainer.is_global_zero:
            self.folder.write_history(self.history)
            self.record["num_epochs_done"] = len(self.history)
            self.folder.write_record(self.record)
            for report in self.reports:
                report(self.rows(pl_module.unit)[-1])

    def _save(self, trainer: pl.Trainer) -> None:
        last, previous = self.folder.last, self.folder.previous
        temporary = last.with_name(f".{last.name}.{os.getpid()}.tmp")
        try:
            trainer.save_checkpoint(temporary)
            if trainer.is_global_zero:
                if last.exists():
                    os.replace(last, previous)
                os.replace(temporary, last)
        finally:
            temporary.unlink(missing_ok=True)  # half of it would keep a full disk full


@dataclass(frozen=True)
class EpochLine:
    """Prints one plain line per epoch, for logs and pipes.

    Args:
        name: what the line begins with.
        epochs: how many epochs there will be.
        quantities: what the task measures, by name.
    """

    name: str
    epochs: int
    quantities: Sequence[str]

    def __call__(self, row: Mapping[str, Any]) -> None:
        keys = [f"{split}/{name}" for split in ("train", "val") for name in self.quantities]
        shown = [f"{key} {row[key]:.4f}" for key in keys if key in row]
        epoch = f"{row['epoch'] + 1:>{len(str(self.epochs))}}/{self.epochs}"
        print(f"{self.name}  epoch {epoch}  {'  '.join(shown)}  {row['seconds']:.1f} s", flush=True)


class Bar(RichProgressBar):
    """A progress bar with the running training loss and accuracy, and the last validation."""

    def __init__(self) -> None:
        super().__init__(leave=False)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        assert isinstance(pl_module, Task)
        metrics = pl_module.measured | pl_module.running()
        return {key: f"{value:.4f}" for key, value in metrics.items()}


def silence_lightning() -> None:
    """Hide Lightning's remarks about what this package does on purpose."""
    for name in LIGHTNING_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", PossibleUserWarning)
    # Lightning asks torch about its trees in a way that newer versions of torch deprecate.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")


def small_update_warning(task: Task) -> str | None:
    """A line about routed layers whose multiplier leaves almost nothing of the update; None where there are none."""
    small = {layer: ratio for layer, ratio in task.routing.update_ratio().items() if ratio < SMALL_UPDATE}
    if not small:
        return None
    shares = ", ".join(f"layer {layer}: {100 * ratio:.2g} %" for layer, ratio in small.items())
    return (
        f"the score multiplies the update and leaves only a small part of it ({shares}; zero-based layers, mean over"
        " kept tokens); scaling.normalize=unit_mean keeps its size"
    )


def save_weights(task: Task, path: Path) -> None:
    """Write the evaluated weights under the dense model's names (and `router.*`) as safetensors, atomically."""
    state = {name: value.detach().cpu().contiguous().clone() for name, value in task.evaluated.state_dict().items()}
    with replacing(path) as temporary:
        save_file(state, temporary)


def resumable(folder: RunFolder, run_id: str) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of this run, and a warning for each one that could not be used."""
    found_wrong = []
    for path in (folder.last, folder.previous):
        if not path.exists():
            continue
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            found = state["callbacks"][Keeper.__qualname__]["run_id"]
        except Exception as error:  # whatever a damaged file makes the unpickler raise
            found_wrong.append(f"{path.name} cannot be read ({type(error).__name__}); an earlier state is used")
            continue
        if found == run_id:
            return path, found_wrong
        found_wrong.append(f"{path.name} belongs to run {found}; it is not used")
    return None, found_wrong


def unlike(path: Path, task: Task) -> str:
    """What of a checkpoint does not fit a task: names and shapes of weights; empty where they all fit."""
    saved = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    own = task.state_dict()
    missing, unknown = [name for name in own if name not in saved], [name for name in saved if name not in own]
    other = [name for name in own if name in saved and own[name].shape != saved[name].shape]
    named = {"without": missing, "with the unknown": unknown, "with other shapes of": other}
    return "; ".join(
        f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for what, names in named.items()
        if names
    )
