"""The axis `visibility`: which keys a kept token attends to."""

from __future__ import annotations

from typing import ClassVar

from routing_lab.axes.base import Member, Name, Outside, registry, shipped
from routing_lab.axes.facts import VisibilityTraits


class VisibilityConfig(Member):
    """Keys that every visibility has."""

    facts: ClassVar[VisibilityTraits] = VisibilityTraits()

    @property
    def traits(self) -> VisibilityTraits:
        """Its facts. Raises UnknownTarget."""
        return self.stated(self.facts)


class KeptConfig(VisibilityConfig):
    """`visibility=kept`."""

    name: Name = "kept"
    class_path: str = shipped("routing_lab.routing.visibility.Kept")


class AllConfig(VisibilityConfig):
    """`visibility=all`."""

    facts: ClassVar[VisibilityTraits] = VisibilityTraits(all_keys=True)

    name: Name = "all"
    class_path: str = shipped("routing_lab.routing.visibility.All")


class OutsideVisibilityConfig(VisibilityConfig, Outside):
    """A visibility from outside the package."""


VISIBILITIES = registry(KeptConfig, AllConfig)
