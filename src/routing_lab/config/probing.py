"""The settings of a probe, from the words of a command or of a study file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from routing_lab.config.compose import Composer, plain
from routing_lab.config.problems import ConfigError


def probe_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings that the words of a command ask for; raises ConfigError with every problem."""
    config, problems = Composer(config_name="probe").compose(overrides)
    values, unresolved = plain(OmegaConf.masked_copy(config, ["probe", "sample", "rerun"]))
    if problems or unresolved:
        raise ConfigError([*problems, *unresolved])
    return values
