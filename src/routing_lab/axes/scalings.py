"""The axis `scaling`: how a kept token's score enters the output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, TypeAlias

from routing_lab.axes.base import Beside, Member, Name, Outside, registry, shipped
from routing_lab.axes.facts import ScalingTraits

Normalize: TypeAlias = Literal["raw", "sigmoid", "tanh", "unit_mean", "unit_max", "softmax_kept"]
Target: TypeAlias = Literal["update", "output"]
StraightThroughForm: TypeAlias = Literal["value", "mask", "stop_gradient"]


class ScalingConfig(Member):
    """Keys that every scaling has."""

    facts: ClassVar[ScalingTraits] = ScalingTraits()

    @property
    def traits(self) -> ScalingTraits:
        """Its facts. Raises UnknownTarget."""
        return self.stated(self.facts)

    @property
    def computes_every_token(self) -> bool:
        """Whether in evaluation the update of every token is computed, whatever is kept."""
        return self.traits.every_token


class NoScalingConfig(ScalingConfig):
    """`scaling=none`."""

    facts: ClassVar[ScalingTraits] = ScalingTraits(uses_score=False, gives_router_gradient=False)

    name: Name = "none"
    class_path: str = shipped("routing_lab.routing.scaling.NoScaling")
    target: Target = "update"


class MultiplyConfig(ScalingConfig):
    """`scaling=multiply`."""

    facts: ClassVar[ScalingTraits] = ScalingTraits(over_sequence=("unit_mean", "unit_max", "softmax_kept"))

    name: Name = "multiply"
    class_path: str = shipped("routing_lab.routing.scaling.Multiply")
    normalize: Normalize = "raw"
    target: Target = "update"


class StraightThroughConfig(ScalingConfig):
    """`scaling=straight_through`."""

    facts: ClassVar[ScalingTraits] = ScalingTraits(uses_score=False, no_gradient_forms=("stop_gradient",))

    name: Name = "straight_through"
    class_path: str = shipped("routing_lab.routing.scaling.StraightThrough")
    form: StraightThroughForm = "value"
    normalize: Normalize = "sigmoid"
    target: Target = "update"

    def remarks(self, beside: Beside) -> Iterator[str]:
        router = beside.router
        if not router.traits.learned and (router.detach or not router.traits.attention):
            changes = f"a gradient could change nothing in router={router.name}"
            yield f"scaling=straight_through equals scaling=none: {changes}"


class SoftMixConfig(ScalingConfig):
    """`scaling=soft_mix`."""

    facts: ClassVar[ScalingTraits] = ScalingTraits(
        needs_probability=True, sublayers=("attention",), weighs_bypassed=True
    )

    name: Name = "soft_mix"
    class_path: str = shipped("routing_lab.routing.scaling.SoftMix")
    evaluate: Literal["hard", "soft"] = "hard"

    @property
    def computes_every_token(self) -> bool:
        return self.evaluate == "soft"


class Top1ProbabilityConfig(ScalingConfig):
    """`scaling=top1_probability`."""

    facts: ClassVar[ScalingTraits] = ScalingTraits(needs_probability=True)

    name: Name = "top1_probability"
    class_path: str = shipped("routing_lab.routing.scaling.Top1Probability")


class OutsideScalingConfig(ScalingConfig, Outside):
    """A scaling from outside the package."""


SCALINGS = registry(
    MultiplyConfig,
    NoScalingConfig,
    StraightThroughConfig,
    SoftMixConfig,
    Top1ProbabilityConfig,
)
