"""Remarks: combinations that run, as a control perhaps, and mean less than they seem to; a record keeps each line.

What a member remarks of its own values it says itself, in `routing_lab.axes`. See `routing_lab.config.checks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from routing_lab.axes import AXES
from routing_lab.axes.bypasses import BypassConfig
from routing_lab.axes.capacities import CapacityConfig
from routing_lab.axes.facts import BackboneFacts
from routing_lab.axes.losses import LossConfig
from routing_lab.axes.placements import PlacementConfig
from routing_lab.axes.routers import RouterConfig
from routing_lab.axes.scalings import ScalingConfig
from routing_lab.axes.visibilities import VisibilityConfig
from routing_lab.config.checks import Check
from routing_lab.config.training import TrainConfig
from routing_lab.data.inspect import remarks as data_remarks
from routing_lab.data.schema import DataConfig


def router_learns(
    sections: Mapping[str, Any],
    router: RouterConfig,
    scaling: ScalingConfig,
    capacity: CapacityConfig,
    bypass: BypassConfig,
    placement: PlacementConfig,
) -> Iterator[str]:
    """A learned router that training cannot change."""
    if not router.traits.learned:
        return
    if placement.active == "eval":
        yield f"router={router.name} is learned but routes in evaluation only: it stays as it was initialised"
        return
    if capacity.traits.relaxes and bypass.hides_in_training:
        return  # by way of the keys that its decision takes out
    losses: Mapping[str, LossConfig] = sections.get("losses", {})
    if any(loss.weight and loss.traits.reads == "drawn" for loss in losses.values()):
        return  # by what its draws lead to
    form = scaling.options.get("form")
    is_cut = form in scaling.traits.no_gradient_forms
    if is_cut or not scaling.traits.gives_router_gradient:
        rule = f"scaling={scaling.name}" + (f" scaling.form={form}" if is_cut else "")
        yield f"router={router.name} is learned but gets no gradient under {rule}: it stays as it was initialised"


def keys_without_effect(
    router: RouterConfig, placement: PlacementConfig, visibility: VisibilityConfig
) -> Iterator[str]:
    """Values that were chosen and that nothing reads."""
    if not router.traits.routes:
        return
    if not router.traits.attention:
        if router.attention != "trained":
            yield f"router.attention={router.attention} has no effect: router={router.name} reads no attention"
        if not router.detach:
            yield f"router.detach=false has no effect: router={router.name} reads no attention"
        if placement.attention_fill != "none":
            fill = placement.attention_fill
            yield f"placement.attention_fill={fill} has no effect: router={router.name} reads no attention"
    if visibility.traits.all_keys and placement.sublayer == "mlp":
        yield f"visibility={visibility.name} has no effect: with placement.sublayer=mlp all tokens attend"


@dataclass(frozen=True)
class _Beside:
    router: RouterConfig
    bypass: BypassConfig
    facts: BackboneFacts
    epochs: int | None


def members_remark(
    sections: Mapping[str, Any], router: RouterConfig, bypass: BypassConfig, facts: BackboneFacts
) -> Iterator[str]:
    """What every member says of its own values."""
    if router.traits.routes:
        train: TrainConfig | None = sections.get("train")
        beside = _Beside(router, bypass, facts, None if train is None else train.epochs)
        for axis in AXES:
            yield from sections[axis].remarks(beside)


def later_tokens_are_seen(
    capacity: CapacityConfig, router: RouterConfig, scaling: ScalingConfig, facts: BackboneFacts
) -> Iterator[str]:
    """A causal model in which later tokens have a say in what becomes of a token: it cannot be decoded."""
    if not facts.causal or not router.traits.routes:
        return
    if router.traits.sees_later:
        yield (
            f"router={router.name} scores a token by later ones, which a causal model has not seen when it generates; "
            "router=mlp scores it by itself"
        )
    normalize = scaling.options.get("normalize")
    if normalize in scaling.traits.over_sequence:
        yield (
            f"scaling.normalize={normalize} compares a token's score with those of later ones, which a causal model "
            "has not seen when it generates; sigmoid looks at the token alone"
        )
    if capacity.compares:
        yield (
            f"capacity={capacity.name} compares a token's score with those of later ones, which a causal model has "
            "not seen when it generates; capacity=threshold decides from the token alone"
        )


def warmup_ends(train: TrainConfig) -> Iterator[str]:
    """A learning rate that is still warming up, or a backbone that is still held, when training ends."""
    if train.epochs and train.warmup_epochs >= train.epochs:
        yield (
            f"train.warmup_epochs={train.warmup_epochs:g} lasts as long as training (train.epochs={train.epochs}): the "
            "learning rate never falls"
        )
    if train.epochs and train.backbone_freeze_epochs >= train.epochs:
        yield (
            f"train.backbone_freeze_epochs={train.backbone_freeze_epochs} lasts as long as training "
            f"(train.epochs={train.epochs}): only the routers learn"
        )


def losses_change_something(
    losses: Mapping[str, LossConfig], router: RouterConfig, train: TrainConfig, facts: BackboneFacts
) -> Iterator[str]:
    """Auxiliary losses that nothing follows, and what each says of its own values."""
    for name, loss in losses.items():
        if not loss.weight:
            continue
        if router.traits.routes:
            yield from loss.remarks(facts)
        if not router.traits.routes:
            yield f"losses={name} has no effect: router={router.name} routes nothing"
        elif not train.epochs:
            yield f"losses={name} has no effect without training (train.epochs=0)"
        elif loss.traits.reads == "decision" and not router.traits.learned:
            yield f"losses={name} adds a constant: the decision of router={router.name} carries no gradient"
        elif loss.traits.reads == "halting" and not router.traits.halts:
            yield f"losses={name} adds a constant: router={router.name} knows no halting"


def patches_are_covered(data: DataConfig, train: TrainConfig) -> Iterator[str]:
    """Augmentation that hides or mixes the patches that spell the class of a planted image."""
    for key in ("erasing", "mixup", "cutmix"):
        value = getattr(train, key)
        if data.knows_informative and value and train.epochs:
            yield (
                f"train.{key}={value:g} takes out or mixes planted patches, so that the mask no longer says where the "
                "class is"
            )


def about_data(data: DataConfig, train: TrainConfig) -> Iterator[str]:
    """What was left out of the data, and splits that say less than they seem to."""
    yield from data_remarks(data, train)


REMARKS: tuple[Check, ...] = (
    router_learns,
    keys_without_effect,
    members_remark,
    later_tokens_are_seen,
    losses_change_something,
    warmup_ends,
    patches_are_covered,
    about_data,
)

ABOUT_FILES: tuple[Check, ...] = (about_data,)
"""Those that open the files."""
