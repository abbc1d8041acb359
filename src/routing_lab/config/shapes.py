"""The shape of a backbone that is only named, filled in from the library that knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from omegaconf import DictConfig

from routing_lab.config.hf_shape import complete_from_hf
from routing_lab.config.problems import Problem
from routing_lab.config.timm_shape import complete_from_timm

COMPLETIONS: Mapping[str, Callable[[DictConfig], list[Problem]]] = MappingProxyType(
    {"timm": complete_from_timm, "hf": complete_from_hf}
)
"""By `backbone.kind` what fills the section in, in place."""


def complete_shape(config: DictConfig) -> list[Problem]:
    """Fill in, in place, what the section `backbone` leaves to a library; the problems where that knows no such model.

    A library is loaded only for a section that leaves something to it.
    """
    backbone = config.get("backbone")
    completion = COMPLETIONS.get(str(backbone.get("kind"))) if isinstance(backbone, DictConfig) else None
    return [] if completion is None else completion(backbone)
