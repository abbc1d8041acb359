"""The configuration: composed by Hydra, typed and checked here, with every problem reported at once.

    loaded = load(["router=amod", "scaling=multiply", "seed=1"])
    loaded.config.router.name, loaded.resolved, loaded.warnings

Nothing here imports torch, so that a mistake is reported at once; the exception is `backbone=timm`, whose shape only
timm knows.
"""

from __future__ import annotations

from routing_lab.config.cells import Command, check_command
from routing_lab.config.compose import Composer, conf_path
from routing_lab.config.identity import identity, run_folder, run_name
from routing_lab.config.load import Loaded, check, check_overrides, load
from routing_lab.config.problems import ConfigError, Problem
from routing_lab.config.schema import Config

__all__ = [
    "Command",
    "Composer",
    "Config",
    "ConfigError",
    "Loaded",
    "Problem",
    "check",
    "check_command",
    "check_overrides",
    "conf_path",
    "identity",
    "load",
    "run_folder",
    "run_name",
]
