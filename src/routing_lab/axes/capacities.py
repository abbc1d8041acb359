"""The axis `capacity`: how many tokens are kept, by which rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from routing_lab.axes.base import (
    Beside,
    Fraction,
    Index,
    Member,
    Name,
    Outside,
    Positive,
    Refusal,
    locate,
    registry,
    shipped,
)
from routing_lab.axes.budget import Offer, layer_fraction, percentile_count, topk_count, topk_uncounted
from routing_lab.axes.facts import BackboneFacts, CapacityTraits

Order: TypeAlias = Literal["highest", "lowest"]
Protect: TypeAlias = Literal["none", "class", "prefix"]
ProtectCount: TypeAlias = Literal["inside", "beside"]
Persist: TypeAlias = Literal["per_layer", "hierarchical"]
DepthSchedule: TypeAlias = Literal["constant", "linear", "cosine", "power"]
Shape: TypeAlias = Literal["linear", "cosine"]
Scope: TypeAlias = Literal["sample", "batch"]
Rounding: TypeAlias = Literal["floor", "ceil", "round"]
CountOf: TypeAlias = Literal["current", "initial"]
Compare: TypeAlias = Literal["ge", "gt"]
Evaluate: TypeAlias = Literal["budget", "choice"]
Interpolation: TypeAlias = Literal["linear", "lower", "higher", "midpoint", "nearest"]


class CapacityConfig(Member):
    """Keys that every capacity has; they are options of its class too."""

    given: ClassVar[frozenset[str]] = frozenset({"self", "spec", "boundary", "scale"})
    facts: ClassVar[CapacityTraits] = CapacityTraits(has_fraction=False)

    order: Order = "highest"
    protect: Protect = "prefix"
    persist: Persist = "per_layer"
    reserve: Index = 0

    @property
    def needs_choice(self) -> bool:
        """Whether the rule follows the router's own two-way decision."""
        return self.traits.needs_choice

    @property
    def compares(self) -> bool:
        """Whether in evaluation it depends on later tokens if a token is kept."""
        return self.traits.compares

    @property
    def traits(self) -> CapacityTraits:
        """Its facts. Raises UnknownTarget."""
        return self.stated(self.facts)

    @property
    def budget(self) -> str:
        """What the run's name says of how much is kept: a number, `0.7to0.3` for a list, or nothing."""
        value = self.options.get(self.traits.budget)
        numbers = value if isinstance(value, list) else [value]
        if not numbers or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
            return ""
        return f"{numbers[0]:g}to{numbers[-1]:g}" if isinstance(value, list) else f"{value:g}"

    def num_protected(self, prefix: int) -> int:
        """How many of `prefix` prefix tokens are always kept."""
        return {"none": 0, "class": min(1, prefix), "prefix": prefix}[self.protect]

    def num_kept(self, offer: Offer) -> int | None:
        """How many tokens a routed layer keeps in evaluation; None: that depends on the scores."""
        return None

    def refusals(self, facts: BackboneFacts) -> Iterator[Refusal]:
        if self.protect == "class" and "class" not in facts.prefix:
            yield "capacity.protect", "class", "this backbone has no class token; use none or prefix"


class FractionCapacityConfig(CapacityConfig):
    """Capacities that keep a stated fraction of the tokens."""

    facts: ClassVar[CapacityTraits] = CapacityTraits(ragged=True, compares=True)
    per_layer: ClassVar[tuple[str, ...]] = ("fraction",)

    fraction: Fraction | list[Fraction] = 0.5
    fraction_last: Fraction | None = None
    depth_schedule: DepthSchedule = "constant"
    warmup: float = Field(default=0.0, ge=0, lt=1)
    warmup_hold: float = Field(default=0.0, ge=0, lt=1)
    warmup_start: Fraction = 1.0
    warmup_shape: Shape = "linear"
    scope: Scope = "sample"

    def fraction_of(self, offer: Offer) -> float:
        """The final fraction of a routed layer."""
        return layer_fraction(self.fraction, offer.rank, offer.num_routed, self.fraction_last, self.depth_schedule)

    def refusals(self, facts: BackboneFacts) -> Iterator[Refusal]:
        yield from super().refusals(facts)
        if self.depth_schedule == "constant":
            return
        if self.fraction_last is None and self.depth_schedule != "power":
            message = f"capacity.depth_schedule={self.depth_schedule} needs the fraction of the last routed layer"
            yield "capacity.fraction_last", None, message
        if isinstance(self.fraction, list):
            message = "needs one number as capacity.fraction, not a list with a value for every routed layer"
            yield "capacity.depth_schedule", self.depth_schedule, message

    def remarks(self, beside: Beside) -> Iterator[str]:
        fractions = self.fraction if isinstance(self.fraction, list) else [self.fraction]
        last = [self.fraction_last] if self.fraction_last and self.depth_schedule != "constant" else []
        if all(fraction == 1 for fraction in [*fractions, *last]) and not beside.bypass.traits.merges:
            yield "capacity.fraction=1 keeps every token: only the scaling distinguishes this arm from the dense model"
        if self.fraction_last is not None and self.depth_schedule == "constant":
            yield "capacity.fraction_last has no effect with capacity.depth_schedule=constant"
        if self.warmup and beside.epochs == 0:
            yield "capacity.warmup has no effect without training (train.epochs=0)"


class ChoosingCapacityConfig(FractionCapacityConfig):
    """Capacities that in evaluation may follow the router's own decision instead of the fraction."""

    evaluate: Evaluate = "budget"

    @property
    def needs_choice(self) -> bool:
        return self.evaluate == "choice"

    @property
    def compares(self) -> bool:
        return self.evaluate == "budget"


class TopKConfig(ChoosingCapacityConfig):
    """`capacity=topk`."""

    facts: ClassVar[CapacityTraits] = CapacityTraits(compares=True)

    name: Name = "topk"
    class_path: str = shipped("routing_lab.routing.capacity.TopK")
    rounding: Rounding = "floor"
    count: CountOf = "current"
    count_prefix: bool = True
    protect_count: ProtectCount = "inside"

    def num_kept(self, offer: Offer) -> int | None:
        if self.evaluate == "choice":
            return None
        protected = self.num_protected(offer.prefix)
        return topk_count(
            self.fraction_of(offer),
            self.rounding,
            offer.tokens,
            base=offer.first_tokens if self.count == "initial" else offer.tokens,
            num_uncounted=topk_uncounted(offer.prefix, protected, self.count_prefix, self.protect_count),
            num_protected=protected,
        )

    def remarks(self, beside: Beside) -> Iterator[str]:
        yield from super().remarks(beside)
        if self.protect_count == "beside" and not self.count_prefix:
            yield "capacity.protect_count=beside has no effect with capacity.count_prefix=false, which leaves out more"


class GumbelConfig(ChoosingCapacityConfig):
    """`capacity=gumbel`."""

    facts: ClassVar[CapacityTraits] = CapacityTraits(ragged=True, relaxes=True, compares=True)

    name: Name = "gumbel"
    class_path: str = shipped("routing_lab.routing.capacity.Gumbel")
    temperature: float = Field(default=1.0, gt=0)
    rounding: Rounding = "floor"

    def num_kept(self, offer: Offer) -> int | None:
        if self.evaluate == "choice":
            return None
        return topk_count(
            self.fraction_of(offer),
            self.rounding,
            offer.tokens,
            base=offer.first_tokens,
            num_uncounted=offer.prefix,
            num_protected=self.num_protected(offer.prefix),
        )


class PercentileConfig(FractionCapacityConfig):
    """`capacity=percentile`."""

    name: Name = "percentile"
    class_path: str = shipped("routing_lab.routing.capacity.Percentile")
    compare: Compare = "ge"
    interpolation: Interpolation = "linear"
    protect_count: ProtectCount = "inside"

    def num_kept(self, offer: Offer) -> int:
        protected = self.num_protected(offer.prefix)
        uncounted = protected if self.protect_count == "beside" else 0
        fraction = self.fraction_of(offer)
        count = percentile_count(fraction, offer.tokens, self.compare, self.interpolation, num_uncounted=uncounted)
        return max(protected, count)


class ThresholdConfig(CapacityConfig):
    """`capacity=threshold`."""

    facts: ClassVar[CapacityTraits] = CapacityTraits(has_fraction=False, budget="threshold", ragged=True)
    per_layer: ClassVar[tuple[str, ...]] = ("threshold",)

    name: Name = "threshold"
    class_path: str = shipped("routing_lab.routing.capacity.Threshold")
    threshold: float | list[float] = 0.5

    def remarks(self, beside: Beside) -> Iterator[str]:
        lowest = min(self.threshold) if isinstance(self.threshold, list) else self.threshold
        if beside.router.traits.unit_mass and lowest >= 0.5 and self.order == "highest":
            yield (
                f"capacity.threshold={self.threshold} is far above the scores of router={beside.router.name}, whose "
                "mean is 1/N: hardly any token is kept"
            )


class ControlledConfig(CapacityConfig):
    """`capacity=controlled`."""

    facts: ClassVar[CapacityTraits] = CapacityTraits(budget="target", ragged=True)

    name: Name = "controlled"
    class_path: str = shipped("routing_lab.routing.capacity.Controlled")
    target: Fraction = 0.1
    rate: float = Field(default=0.01, gt=0)
    start: float = 0.5


class ArgmaxConfig(CapacityConfig):
    """`capacity=argmax`."""

    facts: ClassVar[CapacityTraits] = CapacityTraits(has_fraction=False, needs_choice=True, ragged=True)

    name: Name = "argmax"
    class_path: str = shipped("routing_lab.routing.capacity.Argmax")
    force: float = Field(default=0.0, ge=0, le=1)


class NeverConfig(CapacityConfig):
    """`capacity=never`."""

    facts: ClassVar[CapacityTraits] = CapacityTraits(has_fraction=False)

    name: Name = "never"
    class_path: str = shipped("routing_lab.routing.capacity.Never")

    def num_kept(self, offer: Offer) -> int:
        return self.num_protected(offer.prefix)

    def remarks(self, beside: Beside) -> Iterator[str]:
        if beside.router.traits.learned:
            yield f"capacity=never keeps no token: router={beside.router.name} decides nothing"


class InverseTransformConfig(FractionCapacityConfig):
    """`capacity=inverse_transform`."""

    facts: ClassVar[CapacityTraits] = CapacityTraits(ragged=True, needs_positive=True, compares=True)

    name: Name = "inverse_transform"
    class_path: str = shipped("routing_lab.routing.capacity.InverseTransform")
    points: Literal["ends", "middles"] = "ends"
    sort: bool = True
    at_least: Positive = 8
    count: CountOf = "current"


class EntropyConfig(CapacityConfig):
    """`capacity=entropy`."""

    facts: ClassVar[CapacityTraits] = CapacityTraits(
        has_fraction=False, budget="share", ragged=True, needs_positive=True, compares=True
    )

    name: Name = "entropy"
    class_path: str = shipped("routing_lab.routing.capacity.Entropy")
    share: float = Field(default=0.5, gt=0)
    at_least: Positive = 1


class OutsideCapacityConfig(CapacityConfig, Outside):
    """A capacity from outside the package; where its class says so, by `nominal_kept`, its cost is known beforehand."""

    def num_kept(self, offer: Offer) -> int | None:
        say = getattr(locate(self.class_path), "nominal_kept", None)
        return None if say is None else say(offer, **self.options)


CAPACITIES = registry(
    TopKConfig,
    GumbelConfig,
    PercentileConfig,
    ThresholdConfig,
    ControlledConfig,
    ArgmaxConfig,
    InverseTransformConfig,
    EntropyConfig,
    NeverConfig,
)
