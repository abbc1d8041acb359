"""Types and ranges of the whole configuration; the members of the axes are those of `routing_lab.axes`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator

from routing_lab.axes.base import Index, Member, Name, Outside, Positive, Seed, Strict
from routing_lab.axes.bypasses import BypassConfig
from routing_lab.axes.capacities import CapacityConfig
from routing_lab.axes.losses import LossConfig
from routing_lab.axes.placements import PlacementConfig
from routing_lab.axes.routers import RouterConfig
from routing_lab.axes.scalings import ScalingConfig
from routing_lab.axes.visibilities import VisibilityConfig
from routing_lab.config.backbones import HfBackboneConfig, LlamaBackboneConfig, Rope, TimmBackboneConfig
from routing_lab.config.training import (
    InitConfig,
    RuntimeConfig,
    TrackerName,
    TrackingConfig,
    TrainConfig,
    WandbConfig,
)
from routing_lab.data.schema import DataConfig

# --- the dense baseline of equal cost ---


class FullSize(Strict):
    """Size of a backbone before a baseline was made of it."""

    depth: Positive
    width: Positive
    mlp_ratio: float = Field(gt=0)


class IsoflopSolution(Strict):
    """What `isoflop` found: the layers kept with by=depth, the cost, and its ratio to the target."""

    full: FullSize
    layers: list[Index] | None
    macs: Positive
    ratio: float = Field(gt=0)


class IsoflopConfig(Strict):
    """A dense model at the cost of the arm that the other keys describe, instead of that arm."""

    by: Literal["none", "depth", "width"]
    layers: Literal["first", "uniform"]
    mlp: Literal["adjust", "keep"]
    tolerance: float = Field(ge=0)
    target_macs: Annotated[float, Field(gt=0)] | None
    solution: IsoflopSolution | None


# --- a run of a stated cost ---


class MatchSolution(Strict):
    """What `match` found: the value of its key, the nominal cost, and its ratio to the target."""

    value: float | int | list[int] | list[float]
    macs: Positive
    ratio: float = Field(gt=0)


class MatchConfig(Strict):
    """The key whose value makes the run cost `share` of what `to` names, or of `macs`; `key` null: none does."""

    key: Annotated[str, Field(pattern=r"^\w+\.\w+$")] | None = None
    to: Name | None = None
    macs: Annotated[float, Field(gt=0)] | None = None
    share: float = Field(default=1.0, gt=0)
    tolerance: float = Field(default=0.01, ge=0)
    solution: MatchSolution | None = None


# --- the task ---


class TaskConfig(Member, Outside):
    """What is trained for: the class that owns data, head, loss and metrics, and the options that are given to it."""


class TaskOptions(Strict):
    """Options of a shipped task that has none."""


class LanguageOptions(TaskOptions):
    """Options of `task=language`."""

    eval_lengths: list[Positive] = Field(default=[], description="lengths at which the test split is read once more")
    eval_rope: Rope = Field(
        default="plain", description="rotary angles of texts longer than those that the backbone was trained on"
    )


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a shipped task, which checks need before its class is imported.

    target: the class. reads: data of this modality. causal: its backbone is a language model. distils: it can learn
    from a teacher. options: types and ranges of its own keys.
    """

    target: str
    reads: Literal["images", "text"]
    causal: bool = False
    distils: bool = False
    options: type[TaskOptions] = TaskOptions


TASKS: Mapping[str, TaskFacts] = MappingProxyType(
    {
        "classification": TaskFacts("routing_lab.tasks.classification.Classification", reads="images", distils=True),
        "language": TaskFacts(
            "routing_lab.tasks.language.Language", reads="text", causal=True, options=LanguageOptions
        ),
    }
)
"""Shipped tasks by name."""


# --- the whole ---


class PathsConfig(Strict):
    """Where runs are written and data sets are looked for."""

    runs: str = Field(min_length=1)
    data: str = Field(min_length=1)

    @field_validator("runs")
    @classmethod
    def _at_home(cls, runs: str) -> str:
        return os.path.expanduser(runs)


class Config(Strict):
    """A whole, checked configuration; `routing_lab.config.load` and `check` make it."""

    backbone: Annotated[TimmBackboneConfig | HfBackboneConfig | LlamaBackboneConfig, Field(discriminator="kind")]
    router: SerializeAsAny[RouterConfig]
    scaling: SerializeAsAny[ScalingConfig]
    capacity: SerializeAsAny[CapacityConfig]
    placement: SerializeAsAny[PlacementConfig]
    bypass: SerializeAsAny[BypassConfig]
    visibility: SerializeAsAny[VisibilityConfig]
    losses: dict[str, SerializeAsAny[LossConfig]]
    isoflop: IsoflopConfig
    match: MatchConfig
    task: TaskConfig
    data: DataConfig
    init: InitConfig
    train: TrainConfig
    seed: Seed
    method: Name | None
    study: Name | None
    arm: Name | None
    name: Name | None
    rerun: bool
    paths: PathsConfig
    tracking: TrackingConfig
    wandb: WandbConfig
    runtime: RuntimeConfig

    def trackers(self) -> list[TrackerName]:
        """Where the run is shown, in order and once each."""
        asked: list[Any] = [self.tracking] if isinstance(self.tracking, str) else list(self.tracking)
        left_out = ("none", "wandb") if self.wandb.mode == "disabled" else ("none",)
        return [name for name in dict.fromkeys(asked) if name not in left_out]
