"""The configuration: composed by Hydra, typed and checked here, with every problem reported at once.

    loaded = load(["router=amod", "scaling=multiply", "seed=1"])
    loaded.config.router.name, loaded.resolved, loaded.warnings

Nothing here imports torch, so that a mistake is reported at once; the exception is `backbone=timm`, whose shape only
timm knows.
"""

from __future__ import annotations

from routing_lab.config.compose import Composer, conf_path, expand, sweep_name
from routing_lab.config.identity import VOLATILE, identity, run_name, without_volatile
from routing_lab.config.load import Loaded, check, load
from routing_lab.config.problems import ConfigError, Problem
from routing_lab.config.schema import Config

__all__ = [
    "VOLATILE",
    "Composer",
    "Config",
    "ConfigError",
    "Loaded",
    "Problem",
    "check",
    "conf_path",
    "expand",
    "identity",
    "load",
    "run_name",
    "sweep_name",
    "without_volatile",
]
