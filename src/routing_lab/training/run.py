"""One cell from configuration to record: train, resume, select, test once, write everything down."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import warnings as python_warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from routing_lab.assembly import build_model
from routing_lab.axes import AXES
from routing_lab.axes.base import locate
from routing_lab.config import Config, Loaded, check, identity, load, run_folder, run_name
from routing_lab.config.isoflop import full_size
from routing_lab.config.problems import Problem
from routing_lab.config.training import TrainConfig
from routing_lab.cost.measure import vision_shape
from routing_lab.data.state import WAYS_ON, changed_inputs, data_state
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import FAILED, FINISHED, INTERRUPTED, is_finished, new_record
from routing_lab.runs.source import git_state
from routing_lab.tasks.base import Task
from routing_lab.training.callbacks import (
    LIGHTNING_LOGGERS,
    Bar,
    EpochLine,
    Keeper,
    resumable,
    save_weights,
    silence_lightning,
    small_update_warning,
    unlike,
)
from routing_lab.training.costs import CostMeter, TrainingCost, training_section
from routing_lab.training.dynamics import Dynamics
from routing_lab.training.environment import command_line, environment, other_versions
from routing_lab.training.initialisation import initialise
from routing_lab.training.readout import solve_head
from routing_lab.training.signals import Stopped, stoppable
from routing_lab.training.surroundings import check_surroundings, launched_outside
from routing_lab.training.tracking import Described, Tracking
from routing_lab.training.weights import load_weights, read_weights

if TYPE_CHECKING:
    from routing_lab.cost.macs import ModelShape

SHARED_WIDTH = 128
"""Backbones narrower than this run on one thread: their operations are too short to be shared out, and threads that
wait for each other cost most of the time on a machine that others use too (see benchmarks/README.md)."""


def run_cell(
    config: Config,
    resolved: Mapping[str, Any],
    warnings: Sequence[str] = (),
    *,
    command: str | None = None,
    group: str | None = None,
    rerun_changed: bool = False,
) -> dict[str, Any]:
    """Run one cell, or report it where it is already finished; an interrupted or failed one is taken up again.

    Args:
        config: the checked configuration.
        resolved: the same as a plain dictionary, of which the run's identity is the hash.
        warnings: remarks of the configuration check, kept in the record.
        command: the command that a person types to get this run; None: this process' own.
        group: name of the sweep, for tracking; a study's name comes first.
        rerun_changed: train afresh, as `rerun` does, where the data or weights of the run have changed since.

    Returns:
        `status` (`finished`, `failed` or `interrupted`), `folder`, `record`, `error` (one line, None without),
        `signal` (what interrupted it, None without) and `trained` (False for a run that was already finished).
        Failures of training are returned, not raised.

    Raises:
        ConfigError: this machine or its libraries lack what the configuration asks for; nothing was written.
    """
    check_surroundings(config)
    folder = RunFolder(run_folder(config, resolved), writes=_is_first_process())
    result: dict[str, Any] = {"folder": folder.path, "error": None, "signal": None, "trained": False}
    try:
        with stoppable(), _quiet(), _threads(config), folder.lock(_say):
            command = command or command_line()
            return result | _run_locked(folder, config, resolved, warnings, command, group, rerun_changed)
    except Stopped as stopped:  # while it waited for another process
        return result | {"status": INTERRUPTED, "record": {}, "error": str(stopped), "signal": stopped.signal}


def dense_cell(config: Config, resolved: Mapping[str, Any]) -> Loaded:
    """The configuration of the dense run that `init=dense` starts from and that distillation learns from.

    Same backbone, data, recipe and seed; no routing, no distillation, the routing axes at their defaults so that all
    arms share one run. It starts where the arm starts. Where the arm starts from it, it starts from the file
    `init.path` or from scratch, and `init.epochs` gives its length.
    """
    defaults = load(["router=dense"]).resolved
    optional = {key: field.default for key, field in TrainConfig.model_fields.items() if not field.is_required()}
    init, epochs = config.init.of_dense_run(config.train.epochs)
    train = {**resolved["train"], "distill": "none", **optional, "epochs": epochs}
    node = {
        **{key: value for key, value in full_size(resolved).items() if key != "hydra"},
        **{axis: defaults[axis] for axis in (*AXES, "losses")},
        "train": train,
        "init": init,
        "arm": "dense",
        "name": None,
        "rerun": False,
    }
    return check(OmegaConf.create(node))


def shorter_cell(config: Config, resolved: Mapping[str, Any]) -> Loaded | None:
    """The run from scratch that goes on with `init=run init.epochs=...`; None where another run starts this one."""
    epochs = config.init.earlier_epochs
    if epochs is None:
        return None
    train = {**resolved["train"], "epochs": epochs}
    return check(OmegaConf.create({**resolved, "train": train, "init": {"kind": "scratch"}, "rerun": False}))


# --- one run, under its lock ---


def _run_locked(
    folder: RunFolder,
    config: Config,
    resolved: Mapping[str, Any],
    warnings: Sequence[str],
    command: str,
    group: str | None,
    rerun_changed: bool,
) -> dict[str, Any]:
    before = folder.read_record()
    changed = [] if before is None or config.rerun else changed_inputs(before, config)
    if config.rerun or (changed and rerun_changed):
        if (aside := folder.set_aside()) is not None:
            _say(f"{folder.path.name}: rerun=true, the run that was there is now {aside}")
        before = None
    if before is not None:
        if changed:
            return {"status": FAILED, "record": before, "error": "; ".join(str(Problem.of(*one)) for one in changed)}
        if is_finished(before):
            return {"status": FINISHED, "record": before}
    record = new_record(resolved, run_id=identity(resolved), name=run_name(config), command=command)
    record |= {"warnings": list(warnings), "num_epochs_done": 0, "git": git_state(), "environment": environment()}
    if before is not None and before.get("num_epochs_done"):
        # What was learned so far belongs to these data and weights: they are compared, never replaced.
        record |= {key: before[key] for key in ("num_epochs_done", "data", "init")}
        _note_other_versions(before, record)
    tracking = Tracking(config, Described(folder, record, resolved, config.study or group))
    try:
        folder.prepare()
        folder.write_config(resolved)
        folder.write_record(record)
        record = _train_and_test(folder, config, resolved, record, command, group, tracking)
    except Stopped as stopped:
        record = _close(folder, record, INTERRUPTED)
        tracking.end(record)
        return {"status": INTERRUPTED, "record": record, "error": str(stopped), "signal": stopped.signal}
    except Exception as error:
        trace = traceback.format_exc()
        record = _close(folder, record, FAILED)
        with suppress(OSError):  # on a full disk the record comes first
            folder.write_error(trace)
        tracking.end(record)
        return {"status": FAILED, "record": record, "error": _one_line(error)}
    return {"status": FINISHED, "record": record, "trained": True}


def _train_and_test(
    folder: RunFolder,
    config: Config,
    resolved: Mapping[str, Any],
    record: dict[str, Any],
    command: str,
    group: str | None,
    tracking: Tracking,
) -> dict[str, Any]:
    task_class: type[Task] = locate(config.task.class_path)
    data = task_class.build_data(config)
    outputs = task_class.outputs(data)
    seen = task_class.data_section(config, data)
    files = data_state(config.data, full=config.runtime.verify == "content")
    _check_same("data", record["data"].get("fingerprint"), seen["fingerprint"])
    record["data"] = seen | ({} if files is None else {"files": files})
    dense: RunFolder | None = None
    from_dense_run = config.train.distils and config.train.distill_teacher == "dense"
    if config.init.is_dense or from_dense_run:
        dense = _trained(dense_cell(config, resolved), command, group, config.rerun)
    trained = dense if config.init.is_dense else None
    if config.init.folder is not None:
        trained = RunFolder(config.init.folder)
    elif (shorter := shorter_cell(config, resolved)) is not None:
        trained = _trained(shorter, command, group, config.rerun)
    model, init, found = initialise(config, outputs, trained)
    if init["source"] is not None:
        _check_same("initial weights", record["init"].get("hash"), init["hash"])
    if config.init.solves_head:
        init["readout"] = solve_head(model, data, config.train.eval_batch_size)
    record["init"] = init
    record["warnings"] += found
    teacher: Any = None
    if config.train.distils:
        teacher = build_model(dense_cell(config, resolved).config, outputs)
        if from_dense_run:
            assert dense is not None
            load_weights(teacher, read_weights(dense.final)[0])
        else:
            teacher.load_state_dict(model.get_submodule("backbone").state_dict())

    task = task_class(model, config.train, config.seed, outputs, teacher, config.losses, **config.task.options)
    task.inspect(data)
    learned_from = None if teacher is None else vision_shape(teacher.get_submodule("backbone"))
    cost = [] if config.train.compile else [TrainingCost(task.cost_shape(data), learned_from)]
    keeper = _fit(task, data, folder, config, record, tracking, cost)
    if config.train.selection == "best" and keeper.history:
        task.evaluated.load_state_dict(load_file(folder.best))
    record["metrics"] = _selected_metrics(keeper, config.train.selection, task.quantities)
    record["metrics"] |= _test(task, data, folder, config, record)
    save_weights(task, folder.final)
    measured = keeper.warnings or [line for line in [small_update_warning(task)] if line]
    if not any("scaling.normalize=unit_mean" in line for line in record["warnings"]):
        record["warnings"] += measured  # the configuration's own check did not foresee it
    record["cost"] |= training_section(keeper.history, learned_from)
    record["cost"] |= {
        "train_seconds": keeper.seconds,
        f"train_{task.unit}_per_second": keeper.examples / keeper.seconds if keeper.seconds else None,
    }
    record["environment"] |= environment(next(task.parameters()).device)
    record["status"] = FINISHED
    tracking.end(record)
    record["warnings"] += tracking.warnings
    folder.write_record(record)
    folder.drop_resume_state()
    return record


def _fit(
    task: Task,
    data: Any,
    folder: RunFolder,
    config: Config,
    record: dict[str, Any],
    tracking: Tracking,
    watching: Sequence[pl.Callback],
) -> Keeper:
    """Train from the newest whole checkpoint, or from the beginning; returns the keeper with the whole history.

    watching: callbacks that add to what an epoch has measured, before the keeper writes it down.
    """
    shown = _progress(config)
    line = [EpochLine(run_name(config), config.train.epochs, task.quantities)] if shown == "plain" else []
    keeper = Keeper(folder, record, record["run_id"], config.train.selection, f"val/{task.selects}", [*line, tracking])
    tracking.rows = partial(keeper.rows, task.unit)
    resume, found = resumable(folder, record["run_id"])
    record["warnings"] += found
    for warning in found:
        _say(f"{run_name(config)}: {warning}")
    if config.train.epochs == 0:
        return keeper
    trainer = _trainer(
        config,
        callbacks=[
            *([Dynamics(config.train.dynamics)] if config.train.dynamics else []),
            *watching,
            *(keeper, tracking),
            *([Bar()] if shown == "bar" else []),
        ],
        enable_progress_bar=shown == "bar",
        enable_checkpointing=True,  # by the keeper; without it Lightning refuses any callback of that kind
        devices=config.runtime.devices,
        strategy=_strategy(config),
        max_epochs=config.train.epochs,
        accumulate_grad_batches=config.train.accumulate,
        gradient_clip_val=config.train.clip_grad,
    )
    try:
        trainer.fit(task, datamodule=data, ckpt_path=resume, weights_only=True)
    except Stopped:
        if config.runtime.devices > 1 and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGKILL)
        raise
    except Exception as error:
        if resume is not None and not keeper.has_started and config.runtime.devices == 1:
            why = unlike(resume, task) or _one_line(error)
            raise ValueError(f"{resume.name} is of other code or packages ({why}); rerun=true trains afresh") from error
        raise
    if len(keeper.history) < config.train.epochs:
        # Trained in processes of their own: what they kept is in the checkpoint.
        keeper.load_state_dict(torch.load(folder.last, "cpu", weights_only=True)["callbacks"][keeper.state_key])
    return keeper


def _test(task: Task, data: Any, folder: RunFolder, config: Config, record: dict[str, Any]) -> dict[str, float]:
    """One pass over the test split: predictions, metrics, measured tokens and cost; then what else the task tests."""

    def tested(loader: Any, shape: ModelShape) -> tuple[CostMeter, dict[str, Any], dict[str, float], dict[str, float]]:
        meter = CostMeter(task.model, config, shape)
        trainer = _trainer(config, callbacks=[_CountTokens(meter)], enable_progress_bar=False, devices=1)
        trainer.test(task, dataloaders=loader, verbose=False)
        section = meter.section()
        measured = {name: task.measured[f"test/{name}"] for name in task.quantities}
        return meter, section, measured, task.efficiency(section, shape, meter.work.mean())

    metrics: dict[str, float] = {}
    if config.train.epochs == 0:
        trainer = _trainer(config, enable_progress_bar=False, devices=1)
        trainer.validate(task, dataloaders=data.val_dataloader(), verbose=False)
        metrics |= task.measured
    meter, section, _, efficiency = tested(data.test_dataloader(), task.cost_shape(data))
    folder.write_predictions(task.predictions | {"macs": meter.by_example()})
    record["routing"] = task.routing.section() | meter.tokens()
    metrics |= {name: value for name, value in task.measured.items() if name.startswith("test/")}
    further, costs = task.further_tests(config, data, lambda loader, shape: tested(loader, shape)[2:], efficiency)
    record["cost"] = section | efficiency | costs
    return metrics | further


def _selected_metrics(keeper: Keeper, selection: str, quantities: Sequence[str]) -> dict[str, float]:
    """Metrics of the epoch whose weights are kept."""
    if not keeper.history:
        return {}
    row = keeper.history[-1 if selection == "last" else keeper.best["epoch"]]
    names = [f"{split}/{name}" for split in ("train", "val") for name in quantities]
    return {"selected_epoch": row["epoch"], **{name: row[name] for name in names}}


def _note_other_versions(before: Mapping[str, Any], record: dict[str, Any]) -> None:
    """Keep in the record, under `environment.resumed`, after which epoch the run went on under which other versions."""
    resumed = list(before["environment"].get("resumed", []))
    if changes := other_versions(before, record):
        resumed.append({"after_epoch": before["num_epochs_done"], **changes})
    if resumed:
        record["environment"]["resumed"] = resumed
    for note in resumed:
        told = [f"{name} {pair[1]} (before {pair[0]})" for name, pair in note.items() if name != "after_epoch"]
        record["warnings"].append(f"went on after {note['after_epoch']} epochs with {', '.join(told)}")


def _check_same(what: str, before: str | None, now: str) -> None:
    """Refuse to go on with other data or other initial weights than the run began with."""
    if before is not None and before != now:
        raise ValueError(
            f"the {what} of this run have changed since it was interrupted (fingerprint {before[:10]}, now {now[:10]});"
            f" {WAYS_ON}"
        )


def _trained(cell: Loaded, command: str, group: str | None, rerun_changed: bool) -> RunFolder:
    """The folder of a run that another one needs, trained now if it is missing or, if asked, over other data.

    Raises:
        Stopped: when it was interrupted.
        RuntimeError: when it failed.
    """
    result = run_cell(
        cell.config, cell.resolved, cell.warnings, command=command, group=group, rerun_changed=rerun_changed
    )
    if result["signal"] is not None:
        raise Stopped(result["signal"])
    if result["status"] != FINISHED:
        raise RuntimeError(f"the run {result['folder']} that this one needs failed: {result['error']}")
    return RunFolder(result["folder"])


# --- Lightning ---


class _CountTokens(pl.Callback):
    """Feeds the traces of a test pass to the cost meter."""

    def __init__(self, meter: CostMeter) -> None:
        self.meter = meter

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.meter.add(outputs["trace"], outputs["index"])


def _trainer(config: Config, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator=config.runtime.accelerator,
        precision=config.train.precision,
        logger=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **{"enable_checkpointing": False} | options,
    )


def _strategy(config: Config) -> str:
    strategy = config.runtime.strategy
    if config.runtime.devices > 1 and not launched_outside():
        # Lightning would start the whole command again in every process, which a sweep must not do. Routers may be
        # without a gradient, which DDP has to be told.
        if strategy in ("auto", "ddp"):
            return "ddp_spawn_find_unused_parameters_true"
        if strategy.startswith("ddp_find_unused"):
            return strategy.replace("ddp_", "ddp_spawn_")
    return strategy


def _is_first_process() -> bool:
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) if launched_outside() else "0"
    return rank == "0"


def _progress(config: Config) -> str:
    if config.runtime.progress != "auto":
        return config.runtime.progress
    return "bar" if sys.stdout.isatty() else "plain"


# --- surroundings ---


def _close(folder: RunFolder, record: dict[str, Any], status: str) -> dict[str, Any]:
    """The record with its last status, written where there is room for it; a run that could not is taken up again."""
    closed = {**record, "status": status}
    try:
        folder.write_record(closed)
    except OSError as error:
        _say(f"{folder.path.name}: {status}, which its record does not say: it cannot be written ({error.strerror})")
    return closed


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's remarks, which are put back afterwards."""
    loggers = [logging.getLogger(name) for name in LIGHTNING_LOGGERS]
    levels = [logger.level for logger in loggers]
    with python_warnings.catch_warnings():
        silence_lightning()
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _threads(config: Config) -> Iterator[None]:
    before = torch.get_num_threads()
    number = config.runtime.threads
    if number is None and config.backbone.width < SHARED_WIDTH:
        number = 1
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _say(line: str) -> None:
    print(line, flush=True)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
