"""What of a configuration only the machine it runs on can refuse: before a run folder is made."""

from __future__ import annotations

import os

import torch
from lightning.pytorch.strategies import StrategyRegistry

from routing_lab.config import Config, ConfigError
from routing_lab.config.problems import Problem, alternatives
from routing_lab.tasks.base import check_optimizer


def check_surroundings(config: Config) -> None:
    """Refuse an accelerator that is not here, a strategy or optimiser that the libraries do not have, and a precision
    that Lightning would replace by another one.

    Raises:
        ConfigError: with every problem.
    """
    runtime, problems = config.runtime, []
    found = _accelerators()
    if runtime.accelerator not in ("auto", "cpu", *found):
        there = ", ".join(["auto", "cpu", *found])
        problems.append(Problem.of("runtime.accelerator", runtime.accelerator, f"there is none here; use {there}"))
    elif not found and config.train.precision == "16-mixed":
        message = "needs an accelerator, and there is none here; use bf16-mixed or 32"
        problems.append(Problem.of("train.precision", "16-mixed", message))
    elif runtime.accelerator != "cpu" and found and runtime.devices > found[runtime.accelerator]:
        message = f"there are {found[runtime.accelerator]} here"
        problems.append(Problem.of("runtime.devices", runtime.devices, message))
    strategies = ["auto", *StrategyRegistry.available_strategies()]
    if runtime.strategy not in strategies:
        hint = alternatives(runtime.strategy, strategies, "there are ")
        problems.append(Problem.of("runtime.strategy", runtime.strategy, f"Lightning has no such strategy; {hint}"))
    elif runtime.devices > 1 and runtime.strategy.startswith(("fsdp", "deepspeed")) and not launched_outside():
        message = "starts the whole command again in every process; start it with torchrun, or use ddp"
        problems.append(Problem.of("runtime.strategy", runtime.strategy, message))
    try:
        check_optimizer(config.train.optimizer)
    except ValueError as error:
        problems.append(Problem.from_error(error, "train.optimizer"))
    if problems:
        raise ConfigError(problems)


def launched_outside() -> bool:
    """Whether torchrun or SLURM started one process per device already."""
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1


def _accelerators() -> dict[str, int]:
    """Accelerators of this machine by the names that `runtime.accelerator` takes, and how many devices each has."""
    found = {}
    if torch.cuda.is_available():
        found = {"gpu": torch.cuda.device_count()}
    elif torch.backends.mps.is_available():
        found = {"mps": 1, "gpu": 1}
    return found and {"auto": max(found.values()), **found}
