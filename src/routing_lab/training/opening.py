"""A run folder as what it was made of: configuration, trained model, data and record."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file

from routing_lab.assembly import build_model
from routing_lab.axes.base import locate
from routing_lab.config import Config, check
from routing_lab.routing.model import RoutedModel
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import read_record
from routing_lab.tasks.base import Task


class OpenedRun(NamedTuple):
    """A run: its configuration as it was checked; the model with the evaluated weights, in evaluation mode, on the CPU;
    the splits and loaders of its data; the record as `runs.records.read_record` gives it.
    """

    config: Config
    model: RoutedModel
    data: Any
    record: dict[str, Any]


def open_run(folder: str | Path) -> OpenedRun:
    """Configuration, model, data and record of a finished run.

    The model has the weights that were tested (`checkpoints/final.safetensors`): the last, the best, or the moving
    average, as the recipe says. Every weight must be there and none may be left over.

    Args:
        folder: a run folder; one that an earlier version wrote opens as well.

    Raises:
        RecordError: no record, or one that cannot be read.
        ConfigError: its configuration is refused, for instance because the data is not where it was.
        ValueError: no configuration or weights, or weights that are damaged or of another model.
    """
    run = RunFolder(folder)
    record = read_record(run.path)
    if not run.config.is_file():
        raise ValueError(f"{run.config}: there is no such file, so that the model cannot be built")
    composed = OmegaConf.load(run.config)
    assert isinstance(composed, DictConfig)
    config = check(composed).config
    task: type[Task] = locate(config.task.class_path)
    data = task.build_data(config)
    model = build_model(config, task.outputs(data))
    if not run.final.is_file():
        raise ValueError(f"{run.final}: there are no weights (status of the run: {record['status']})")
    try:
        model.load_state_dict(load_file(run.final))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{run.final}: {' '.join(str(error).split())}") from error
    model.eval()
    return OpenedRun(config, model, data, record)
