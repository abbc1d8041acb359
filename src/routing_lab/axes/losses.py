"""Auxiliary losses, any number of them: what is added to the task's loss, read from a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field

from routing_lab.axes.base import Fraction, Outside, Targeted, shipped
from routing_lab.axes.facts import BackboneFacts, LossTraits


class LossConfig(Targeted):
    """Keys that every auxiliary loss has; the others are options of the function behind it.

    weight: its coefficient in the loss; 0 switches it off. schedule: the coefficient over training, from its full value
    at once (`constant`) or growing to it (`linear`, or `sine`: a quarter of a sine wave).
    """

    not_options: ClassVar[tuple[str, ...]] = (*Targeted.not_options, "weight", "schedule")
    given: ClassVar[frozenset[str]] = frozenset({"trace", "example_losses"})
    facts: ClassVar[LossTraits] = LossTraits()

    weight: float = Field(ge=0)
    schedule: Literal["constant", "linear", "sine"] = "constant"

    @property
    def traits(self) -> LossTraits:
        """Its facts. Raises UnknownTarget."""
        return self.stated(self.facts)

    def remarks(self, facts: BackboneFacts) -> Iterator[str]:
        """Values of its own that mean less than they seem to on a backbone with these facts."""
        yield from ()


class RatioLossConfig(LossConfig):
    """`losses=ratio`."""

    facts: ClassVar[LossTraits] = LossTraits(reads="decision", needs_target=True)
    per_layer: ClassVar[tuple[str, ...]] = ("target",)

    class_path: str = shipped("routing_lab.routing.losses.ratio_loss")
    weight: float = Field(default=2.0, ge=0)
    target: Fraction | list[Fraction] | None = None
    over: Literal["sample", "batch", "layers"] = "sample"


class HingeLossConfig(LossConfig):
    """`losses=hinge`."""

    facts: ClassVar[LossTraits] = LossTraits(reads="decision")

    class_path: str = shipped("routing_lab.routing.losses.hinge_loss")
    weight: float = Field(default=1.0, ge=0)
    target: Fraction = 0.5


class L1TargetLossConfig(LossConfig):
    """`losses=l1_target`."""

    facts: ClassVar[LossTraits] = LossTraits(reads="decision")

    class_path: str = shipped("routing_lab.routing.losses.l1_target_loss")
    weight: float = Field(default=5.0, ge=0)
    schedule: Literal["constant", "linear", "sine"] = "sine"
    target: Fraction = 0.5
    layers: Literal["all", "routed"] = "all"


class LoadLossConfig(LossConfig):
    """`losses=load`."""

    facts: ClassVar[LossTraits] = LossTraits(reads="probability")

    class_path: str = shipped("routing_lab.routing.losses.load_loss")
    weight: float = Field(default=8.0e-4, ge=0)


class ZLossConfig(LossConfig):
    """`losses=z`."""

    facts: ClassVar[LossTraits] = LossTraits(reads="logits")

    class_path: str = shipped("routing_lab.routing.losses.z_loss")
    weight: float = Field(default=1.0e-3, ge=0)


class BCEAuxiliaryLossConfig(LossConfig):
    """`losses=bce_auxiliary`."""

    facts: ClassVar[LossTraits] = LossTraits(reads="logits")

    class_path: str = shipped("routing_lab.routing.losses.bce_auxiliary_loss")
    weight: float = Field(default=0.01, ge=0)


class ReinforceLossConfig(LossConfig):
    """`losses=reinforce`."""

    facts: ClassVar[LossTraits] = LossTraits(reads="drawn", follows_task=True)

    class_path: str = shipped("routing_lab.routing.losses.reinforce_loss")
    weight: float = Field(default=1.0, ge=0)


class PonderLossConfig(LossConfig):
    """`losses=ponder`."""

    facts: ClassVar[LossTraits] = LossTraits(reads="halting")

    class_path: str = shipped("routing_lab.routing.losses.ponder_loss")
    weight: float = Field(default=5.0e-4, ge=0)


class HaltingPriorLossConfig(LossConfig):
    """`losses=halting_prior`."""

    facts: ClassVar[LossTraits] = LossTraits(reads="halting")

    class_path: str = shipped("routing_lab.routing.losses.halting_prior_loss")
    weight: float = Field(default=1.0e-3, ge=0)
    center: float | None = 8.0
    std: float = Field(default=1.0, gt=0)
    form: Literal["paper", "code"] = "paper"
    skip_first_sample: bool = False

    def remarks(self, facts: BackboneFacts) -> Iterator[str]:
        if self.center is not None and self.center > facts.depth - 1:
            yield (
                f"losses.halting_prior.center={self.center:g} lies behind the last layer, {facts.depth - 1}: the prior "
                "only pulls towards halting later; null = two thirds of the depth, A-ViT's 8 of 12"
            )


class OutsideLossConfig(LossConfig, Outside):
    """A loss from outside the package."""


LOSSES: Mapping[str, type[LossConfig]] = MappingProxyType(
    {
        "ratio": RatioLossConfig,
        "hinge": HingeLossConfig,
        "l1_target": L1TargetLossConfig,
        "load": LoadLossConfig,
        "z": ZLossConfig,
        "bce_auxiliary": BCEAuxiliaryLossConfig,
        "reinforce": ReinforceLossConfig,
        "ponder": PonderLossConfig,
        "halting_prior": HaltingPriorLossConfig,
    }
)
