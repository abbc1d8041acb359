"""The axis `bypass`: what happens to the tokens that are not kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from routing_lab.axes.base import Beside, Index, Member, Name, Outside, registry, shipped
from routing_lab.axes.budget import Offer, merge_count, merge_schedule
from routing_lab.axes.facts import BypassTraits


class BypassConfig(Member):
    """Keys that every bypass has."""

    given: ClassVar[frozenset[str]] = frozenset({"self", "spec"})
    facts: ClassVar[BypassTraits] = BypassTraits()

    @property
    def traits(self) -> BypassTraits:
        """Its facts. Raises UnknownTarget."""
        return self.stated(self.facts)

    @property
    def hides_in_training(self) -> bool:
        """Whether in training attention weighs keys by the decision, which so gets a gradient, and removes none."""
        return False

    def num_left(self, kept: int, offer: Offer) -> int | None:
        """How many tokens are left where it removes those that are not kept; None: only its class knows."""
        return None


class SkipConfig(BypassConfig):
    """`bypass=skip`."""

    name: Name = "skip"
    class_path: str = shipped("routing_lab.routing.bypass.Skip")


class ProjectConfig(BypassConfig):
    """`bypass=project`."""

    facts: ClassVar[BypassTraits] = BypassTraits(sublayers=("attention",), projects=True)

    name: Name = "project"
    class_path: str = shipped("routing_lab.routing.bypass.Project")


class DropConfig(BypassConfig):
    """`bypass=drop`."""

    facts: ClassVar[BypassTraits] = BypassTraits(sublayers=("block", "mlp"), removes=True)

    name: Name = "drop"
    class_path: str = shipped("routing_lab.routing.bypass.Drop")
    train: Literal["drop", "mask"] = "drop"

    @property
    def hides_in_training(self) -> bool:
        return self.train == "mask"

    def num_left(self, kept: int, offer: Offer) -> int:
        return kept


class FuseConfig(BypassConfig):
    """`bypass=fuse`."""

    facts: ClassVar[BypassTraits] = BypassTraits(sublayers=("block", "mlp"), removes=True)

    name: Name = "fuse"
    class_path: str = shipped("routing_lab.routing.bypass.Fuse")
    weights: Literal["score", "softmax", "mean"] = "score"
    temperature: float = Field(default=1.0, gt=0)
    temperature_unit: Literal["absolute", "spread"] = "absolute"

    def num_left(self, kept: int, offer: Offer) -> int:
        return kept + (kept < offer.tokens)

    def remarks(self, beside: Beside) -> Iterator[str]:
        yield from super().remarks(beside)
        is_flat = self.weights == "softmax" and self.temperature_unit == "absolute" and self.temperature >= 1
        if is_flat and beside.router.traits.attention:
            yield (
                f"bypass.temperature={self.temperature:g} fuses by nearly equal weights (bypass.weights=mean): scores "
                f"that router={beside.router.name} reads off an attention map lie within 1 of each other; "
                "bypass.temperature_unit=spread measures it by their spread"
            )


class MergeConfig(BypassConfig):
    """`bypass=merge`."""

    facts: ClassVar[BypassTraits] = BypassTraits(sublayers=("mlp",), removes=True, merges=True, placed=True)
    per_layer: ClassVar[tuple[str, ...]] = ("merged",)

    name: Name = "merge"
    class_path: str = shipped("routing_lab.routing.merge.Merge")
    merged: Index | Annotated[float, Field(gt=0, lt=1)] | list[Index] = 0.066
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    inflect: float = Field(default=0.0, ge=-1, le=1)
    proportional: bool = True

    def num_left(self, kept: int, offer: Offer) -> int:
        schedule = merge_schedule(self.merged, self.inflect, offer.first_tokens, offer.num_routed)
        return kept - merge_count(schedule[offer.rank], kept, offer.prefix)


class PonderConfig(BypassConfig):
    """`bypass=ponder`."""

    facts: ClassVar[BypassTraits] = BypassTraits(sublayers=("block", "mlp"), removes=True, restores=True)

    name: Name = "ponder"
    class_path: str = shipped("routing_lab.routing.bypass.Ponder")
    average: Literal["all", "prefix"] = "all"

    def num_left(self, kept: int, offer: Offer) -> int:
        return kept


class PonderMaskedConfig(BypassConfig):
    """`bypass=ponder_masked`."""

    facts: ClassVar[BypassTraits] = BypassTraits(sublayers=("block",), restores=True, final=True, saves=False)

    name: Name = "ponder_masked"
    class_path: str = shipped("routing_lab.routing.bypass.PonderMasked")
    average: Literal["all", "prefix"] = "all"


class OutsideBypassConfig(BypassConfig, Outside):
    """A bypass from outside the package."""


BYPASSES = registry(
    SkipConfig,
    ProjectConfig,
    DropConfig,
    FuseConfig,
    PonderConfig,
    PonderMaskedConfig,
    MergeConfig,
)
