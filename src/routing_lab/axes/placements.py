"""The axis `placement`: which layers are routed, which part of them, and whose attention they are scored by."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from routing_lab.axes.base import Index, Member, Name, Outside, Positive, locate, registry, shipped
from routing_lab.axes.facts import SubLayer
from routing_lab.axes.layers import attention_sources, routed_layers

AttentionSource: TypeAlias = Literal["previous", "lag", "last_dense", "same"] | Index


class PlacementConfig(Member):
    """Keys that every placement has."""

    not_options: ClassVar[tuple[str, ...]] = (
        *Member.not_options,
        *("active", "sublayer", "attention_source", "lag", "attention_fill"),
    )
    given: ClassVar[frozenset[str]] = frozenset({"depth"})

    active: Literal["both", "train", "eval"] = "both"
    sublayer: SubLayer = "block"
    attention_source: AttentionSource = "previous"
    lag: Positive = 2
    attention_fill: Literal["none", "zero", "mean", "carry"] = "none"

    def routed(self, depth: int) -> list[int]:
        """Zero-based indices of the routed layers. Raises ValueError where one does not exist, and UnknownTarget."""
        return routed_layers(locate(self.class_path), depth, **self.options)

    def sources(self, routed: list[int], depth: int) -> dict[int, int]:
        """Routed layer -> the layer whose attention it is scored by. Raises ValueError where it is missing."""
        return attention_sources(routed, depth, self.attention_source, self.lag, self.attention_fill, self.sublayer)


class AlternateConfig(PlacementConfig):
    """`placement=alternate`."""

    name: Name = "alternate"
    class_path: str = shipped("routing_lab.routing.members.alternate")
    first: Index = 1
    stride: Positive = 2


class LaterConfig(PlacementConfig):
    """`placement=later`."""

    name: Name = "later"
    class_path: str = shipped("routing_lab.routing.members.later")
    first: Index | None = None
    attention_source: AttentionSource = "last_dense"


class EveryConfig(PlacementConfig):
    """`placement=every`."""

    name: Name = "every"
    class_path: str = shipped("routing_lab.routing.members.every")
    first: Index = 1
    attention_source: AttentionSource = "last_dense"


class StagesConfig(PlacementConfig):
    """`placement=stages`."""

    name: Name = "stages"
    class_path: str = shipped("routing_lab.routing.members.stages")
    layers: Annotated[list[Index], Field(min_length=1)] | None = None


class BilayerConfig(PlacementConfig):
    """`placement=bilayer`."""

    name: Name = "bilayer"
    class_path: str = shipped("routing_lab.routing.members.bilayer")
    ends: Literal["dense", "routed"] = "dense"


class TrilayerConfig(PlacementConfig):
    """`placement=trilayer`."""

    name: Name = "trilayer"
    class_path: str = shipped("routing_lab.routing.members.trilayer")
    attention_source: AttentionSource = "last_dense"


class ListedConfig(PlacementConfig):
    """`placement=list`."""

    name: Name = "list"
    class_path: str = shipped("routing_lab.routing.members.listed")
    layers: list[Index] = Field(min_length=1)
    base: Literal[0, 1] = 0


class OutsidePlacementConfig(PlacementConfig, Outside):
    """A placement from outside the package."""


PLACEMENTS = registry(
    AlternateConfig,
    LaterConfig,
    EveryConfig,
    StagesConfig,
    BilayerConfig,
    TrilayerConfig,
    ListedConfig,
)
