"""What a checked configuration costs by its own numbers, before any model exists: token counts and router costs.

Counts are those of one example in evaluation, at the capacity's final fraction. Where they depend on the scores, as
under `capacity=threshold`, there is no nominal cost; nor where a member from outside the package does not say what it
computes, see `unsaid`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from routing_lab.axes.budget import Offer
from routing_lab.axes.bypasses import BypassConfig
from routing_lab.axes.capacities import CapacityConfig
from routing_lab.axes.layers import layer_string
from routing_lab.axes.placements import PlacementConfig
from routing_lab.axes.routers import RouterConfig
from routing_lab.axes.scalings import ScalingConfig
from routing_lab.axes.visibilities import VisibilityConfig
from routing_lab.cost.macs import LayerRule, LayerTokens, ModelShape, layer_rules, routed_macs, speedup_ceiling

if TYPE_CHECKING:
    from routing_lab.config.schema import Config


class RoutingAxes(Protocol):
    """The axes of a configuration that its cost depends on."""

    @property
    def router(self) -> RouterConfig: ...
    @property
    def scaling(self) -> ScalingConfig: ...
    @property
    def capacity(self) -> CapacityConfig: ...
    @property
    def placement(self) -> PlacementConfig: ...
    @property
    def bypass(self) -> BypassConfig: ...
    @property
    def visibility(self) -> VisibilityConfig: ...


class UnknownCost(ValueError):
    """Why there is no nominal cost: what is computed depends on the scores, or only a class knows it."""


@dataclass(frozen=True)
class Treated:
    """Tokens of one layer: those that enter, those that its routed part computes, and those that its router reads."""

    entering: int
    treated: int
    scored: int = 0


def unsaid(axes: RoutingAxes) -> list[str]:
    """The members from outside the package whose class states no facts, so that only a run tells what they compute."""
    members = {"scaling": axes.scaling, "bypass": axes.bypass}
    return [f"{axis}={member.name}" for axis, member in members.items() if not member.states_facts]


def routing_rules(axes: RoutingAxes, routed: Sequence[int], depth: int) -> list[LayerRule]:
    """Which part of each layer only the kept tokens pay; dense where every token is computed whatever is kept."""
    bypass, placement = axes.bypass.traits, axes.placement
    if axes.scaling.computes_every_token or placement.active == "train" or not bypass.saves:
        return layer_rules(depth, (), LayerRule())
    # A map is made for the score alone where the layer's own is asked for before its attention runs.
    is_made = placement.attention_source == "same" and placement.sublayer != "mlp"
    rule = LayerRule(
        sublayer=placement.sublayer,
        project=bypass.projects,
        all_keys=axes.visibility.traits.all_keys,
        map_rows=axes.router.map_rows if is_made else "none",
    )
    return layer_rules(depth, routed, rule)


def nominal_counts(
    axes: RoutingAxes, routed: Sequence[int], depth: int, tokens: int, prefix: int
) -> list[Treated] | None:
    """Token counts of every layer; None where they depend on the scores, or are not said.

    Args:
        axes: the configuration.
        routed: zero-based routed layers, ascending.
        depth: number of layers.
        tokens: tokens that enter the first layer, `prefix` of them before the patches.
    """
    if unsaid(axes):
        return None
    if axes.placement.active == "train":
        routed = ()
    bypass = axes.bypass.traits
    nested = bypass.final or axes.capacity.persist == "hierarchical"
    entering = eligible = tokens
    counts = []
    for layer in range(depth):
        if layer not in routed:
            counts.append(Treated(entering, entering))
            continue
        offer = Offer(eligible, tokens, prefix, routed.index(layer), len(routed))
        kept = None if axes.capacity.reserve else axes.capacity.num_kept(offer)
        if kept is None:
            return None
        if not bypass.removes:
            counts.append(Treated(entering, kept, entering))
            eligible = kept if nested else entering
            continue
        remaining = axes.bypass.num_left(kept, offer)
        if remaining is None:
            return None
        counts.append(Treated(entering, remaining, entering))
        entering = eligible = remaining
    return counts


def layer_tokens(rules: Sequence[LayerRule], counts: Sequence[Treated]) -> list[LayerTokens]:
    """What each part of every layer treats, for `routing_lab.cost.macs.routed_macs`."""
    return [
        rule.tokens(count.entering, count.entering if rule.sublayer is None else count.treated)
        for rule, count in zip(rules, counts, strict=True)
    ]


def placed_lines(config: Config) -> list[str]:
    """Which layers a configuration routes, and what they can save at most; empty for a dense model.

    The ceiling is the dense cost over that of a model whose routed layers keep nothing but protected tokens, the head,
    which reads one token, left out: at most 2 where every second layer is routed as a whole.
    """
    backbone = config.backbone
    if not config.router.traits.routes:
        return []
    routed = config.placement.routed(backbone.depth)
    lines = [f"layers: {layer_string(routed, backbone.depth)} (T dense, D routed {config.placement.sublayer})"]
    shape = backbone.shape(classes=0)
    if shape is not None and not unsaid(config):
        kept = config.capacity.num_protected(shape.prefix)
        ceiling = speedup_ceiling(shape, routing_rules(config, routed, shape.depth), kept)
        lines.append(f"ceiling: at most {ceiling:.2f} times fewer multiply-accumulates than the dense model")
    return lines


def nominal_macs(axes: RoutingAxes, shape: ModelShape, routers: Mapping[int, int] | None = None) -> float:
    """Nominal multiply-accumulates of one example, routers included.

    Args:
        axes: the configuration.
        shape: of the model.
        routers: of its routed layers, each with its router's multiply-accumulates for one token; None: as placed, and
            as the configuration says.

    Raises:
        UnknownCost: there is no such number.
        ValueError: a placed layer does not exist in a model of this depth.
    """
    if members := unsaid(axes):
        raise UnknownCost(f"only a run tells what {' '.join(members)} computes: its class has no `traits`")
    if routers is None:
        weights = axes.router.weights(shape.width)
        if weights is None:
            raise UnknownCost(f"only the class of router={axes.router.name} knows its own cost")
        placed = axes.placement.routed(shape.depth) if axes.router.traits.routes else []
        routers = dict.fromkeys(placed, weights)
    routed = sorted(routers)
    counts = nominal_counts(axes, routed, shape.depth, shape.tokens, shape.prefix)
    if counts is None:
        raise UnknownCost(f"what capacity={axes.capacity.name} bypass={axes.bypass.name} keeps depends on the scores")
    layers = layer_tokens(routing_rules(axes, routed, shape.depth), counts)
    return routed_macs(shape, layers).total + router_macs(routers, [count.scored for count in counts])


def router_macs(routers: Mapping[int, int], tokens: Sequence[float]) -> float:
    """Multiply-accumulates of the routers of one example: of each for one token, by layer, and the tokens it reads."""
    return sum(tokens[layer] * number for layer, number in routers.items())
