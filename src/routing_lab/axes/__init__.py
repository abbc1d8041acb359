"""The axes of routing: one class per member, with everything that can be said of it before a model exists.

    AXES                          the axes, in the order in which they are spoken of
    MEMBERS["capacity"]["topk"]   the class of a shipped member
    OUTSIDE["capacity"]           that of one from outside the package
    LOSSES["ratio"]               the class of an auxiliary loss

Imports neither torch nor anything else of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from routing_lab.axes.base import Member
from routing_lab.axes.bypasses import BYPASSES, OutsideBypassConfig
from routing_lab.axes.capacities import CAPACITIES, OutsideCapacityConfig
from routing_lab.axes.losses import LOSSES
from routing_lab.axes.placements import PLACEMENTS, OutsidePlacementConfig
from routing_lab.axes.routers import ROUTERS, OutsideRouterConfig
from routing_lab.axes.scalings import SCALINGS, OutsideScalingConfig
from routing_lab.axes.visibilities import VISIBILITIES, OutsideVisibilityConfig

__all__ = ["AXES", "LOSSES", "MEMBERS", "OUTSIDE"]

MEMBERS: Mapping[str, Mapping[str, type[Member]]] = MappingProxyType(
    {
        "router": ROUTERS,
        "scaling": SCALINGS,
        "capacity": CAPACITIES,
        "placement": PLACEMENTS,
        "bypass": BYPASSES,
        "visibility": VISIBILITIES,
    }
)

OUTSIDE: Mapping[str, type[Member]] = MappingProxyType(
    {
        "router": OutsideRouterConfig,
        "scaling": OutsideScalingConfig,
        "capacity": OutsideCapacityConfig,
        "placement": OutsidePlacementConfig,
        "bypass": OutsideBypassConfig,
        "visibility": OutsideVisibilityConfig,
    }
)

AXES = tuple(MEMBERS)
"""The config groups whose members are classes or functions named by `_target_`."""
