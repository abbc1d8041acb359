"""Names that recorded runs and members of one's own know by this path: placements, and the facts a member states."""

from __future__ import annotations

from routing_lab.axes.facts import (
    BackboneFacts,
    BypassTraits,
    CapacityTraits,
    LossTraits,
    RouterTraits,
    ScalingTraits,
    VisibilityTraits,
)
from routing_lab.axes.layers import alternate, bilayer, every, later, listed, stages, trilayer

__all__ = [
    "BackboneFacts",
    "BypassTraits",
    "CapacityTraits",
    "LossTraits",
    "RouterTraits",
    "ScalingTraits",
    "VisibilityTraits",
    "alternate",
    "bilayer",
    "every",
    "later",
    "listed",
    "stages",
    "trilayer",
]
