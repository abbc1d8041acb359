"""What a checked configuration costs by its own numbers, before any model exists: token counts and router costs.

Counts are those of one example in evaluation, at the capacity's final fraction. Where they depend on the scores, as
under `capacity=threshold`, there is no nominal cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from routing_lab.config.checks import traits_of
from routing_lab.config.schema import (
    BypassConfig,
    CapacityConfig,
    Fuse,
    Gumbel,
    LinearRouter,
    Merge,
    MixRouter,
    MLPRouter,
    Percentile,
    PlacementConfig,
    PredictorRouter,
    RouterConfig,
    ScalingConfig,
    SoftMix,
    TimmBackbone,
    TopK,
    VisibilityConfig,
)
from routing_lab.cost.macs import LayerRule, LayerTokens, ModelShape, layer_rules
from routing_lab.routing.budget import layer_fraction, merge_count, merge_schedule, percentile_count, topk_count


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


@dataclass(frozen=True)
class Treated:
    """Tokens of one layer: those that enter, those that its routed part computes, and those that its router reads."""

    entering: int
    treated: int
    scored: int = 0


def routing_rules(axes: RoutingAxes, routed: Sequence[int], depth: int) -> list[LayerRule]:
    """Which part of each layer only the kept tokens pay; dense where every token is computed whatever is kept."""
    every_token = isinstance(axes.scaling, SoftMix) and axes.scaling.evaluate == "soft"
    if every_token or axes.placement.active == "train" or not traits_of("bypass", axes.bypass).saves:
        return layer_rules(depth, (), LayerRule())
    rule = LayerRule(
        sublayer=axes.placement.sublayer,
        project=axes.bypass.name == "project",
        all_keys=traits_of("visibility", axes.visibility).all_keys,
        map_rows=_map_rows(axes),
    )
    return layer_rules(depth, routed, rule)


def nominal_counts(
    axes: RoutingAxes, routed: Sequence[int], depth: int, tokens: int, prefix: int
) -> list[Treated] | None:
    """Token counts of every layer; None where they depend on the scores.

    Args:
        axes: the configuration.
        routed: zero-based routed layers, ascending.
        depth: number of layers.
        tokens: tokens that enter the first layer, `prefix` of them before the patches.
    """
    if axes.placement.active == "train":
        routed = ()
    bypass = traits_of("bypass", axes.bypass)
    nested = bypass.final or axes.capacity.persist == "hierarchical"
    entering = eligible = tokens
    counts = []
    for layer in range(depth):
        if layer not in routed:
            counts.append(Treated(entering, entering))
            continue
        rank = routed.index(layer)
        kept = _kept(axes.capacity, eligible, tokens, prefix, rank, len(routed))
        if kept is None:
            return None
        if not bypass.removes:
            counts.append(Treated(entering, kept, entering))
            eligible = kept if nested else entering
            continue
        remaining = _remaining(axes.bypass, eligible, kept, tokens, prefix, rank, len(routed))
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


def router_weights(router: RouterConfig, width: int) -> int | None:
    """Entries of one router's matrices, each a multiply-accumulate for every token; None where only its class knows."""
    if not traits_of("router", router).learned:
        return 0
    if isinstance(router, LinearRouter | MixRouter):
        return width
    if isinstance(router, MLPRouter):
        hidden = width // 2 if router.hidden is None else router.hidden
        return width * hidden + 2 * hidden
    if isinstance(router, PredictorRouter):
        half, quarter = width // 2, width // 4
        return width * width + width * half + half * quarter + quarter * 2
    return None


def backbone_shape(backbone: TimmBackbone, classes: int) -> ModelShape | None:
    """The shape of the model that `backbone` describes; None where it leaves the MLP to timm."""
    if backbone.mlp_ratio is None or backbone.mlp is None:
        return None
    hidden = int(backbone.width * backbone.mlp_ratio)
    facts = backbone.facts()
    assert facts.tokens is not None
    return ModelShape(
        width=backbone.width,
        depth=backbone.depth,
        heads=backbone.heads,
        mlp_hidden=hidden // 2 if backbone.mlp == "swiglu" else hidden,
        mlp_matrices=3 if backbone.mlp == "swiglu" else 2,
        positions=facts.tokens - len(facts.prefix),
        prefix=len(facts.prefix),
        patch_inputs=backbone.patch_size**2 * backbone.channels,
        classes=classes,
        head_tokens=2 if backbone.distilled else 1,
    )


def _map_rows(axes: RoutingAxes) -> Literal["none", "one", "all"]:
    """Which rows of the layer's own map are made before the selection, for the score."""
    attention = traits_of("router", axes.router).attention
    if not attention or axes.placement.attention_source != "same" or axes.placement.sublayer == "mlp":
        return "none"
    return "all" if "received" in attention or getattr(axes.router, "query", "cls") != "cls" else "one"


def _kept(
    capacity: CapacityConfig, tokens: int, first_tokens: int, prefix: int, rank: int, num_routed: int
) -> int | None:
    """Tokens that a routed layer keeps of `tokens`."""
    if not isinstance(capacity, TopK | Percentile | Gumbel):
        return None
    protected = {"none": 0, "class": min(1, prefix), "prefix": prefix}[capacity.protect]
    fraction = layer_fraction(capacity.fraction, rank, num_routed, capacity.fraction_last, capacity.depth_schedule)
    if isinstance(capacity, Percentile):
        return max(protected, percentile_count(fraction, tokens, capacity.compare, capacity.interpolation))
    of_first = isinstance(capacity, Gumbel) or capacity.count == "initial"
    patches_alone = isinstance(capacity, Gumbel) or not capacity.count_prefix
    return topk_count(
        fraction,
        capacity.rounding,
        tokens,
        base=first_tokens if of_first else tokens,
        num_uncounted=prefix if patches_alone else 0,
        num_protected=protected,
    )


def _remaining(
    bypass: BypassConfig, tokens: int, kept: int, first_tokens: int, prefix: int, rank: int, num_routed: int
) -> int | None:
    """Tokens that are left of `tokens` when `kept` were kept."""
    if isinstance(bypass, Merge):
        schedule = merge_schedule(bypass.merged, bypass.inflect, first_tokens, num_routed)
        return kept - merge_count(schedule[rank], kept, prefix)
    if isinstance(bypass, Fuse):
        return kept + (kept < tokens)
    return kept if bypass.name in ("drop", "ponder") else None
