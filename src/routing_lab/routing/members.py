"""What every shipped member of an axis is, in facts that need no torch.

The configuration checks read these facts before any model exists, and the torch classes carry the same objects as
their class attribute `traits`, so that a check and the code it guards cannot disagree. A member from outside the
package states its facts the same way: `traits = RouterTraits(attention=frozenset({"received"}))`.

Placements are plain functions `(depth, **options) -> list of zero-based layer indices`; they live here because
placing layers needs nothing but numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

AXES = ("router", "scaling", "capacity", "placement", "bypass", "visibility")
"""The config groups whose members are classes or functions named by `_target_`."""

AttentionStatistic = Literal["received", "class_row", "value_norm"]
SubLayer = Literal["block", "attention", "mlp"]
ScoreScale = Literal["logit", "probability", "log_probability"]
TokenKind = Literal["class", "distillation", "registers", "prefix", "self"]

SUBLAYERS: tuple[SubLayer, ...] = ("block", "attention", "mlp")


@dataclass(frozen=True, slots=True)
class RouterTraits:
    """Facts about a router, the source of one score per token.

    attention: statistics of another layer's attention map that the score is made of: `received` (column mean, A-MoD
        Eq. 4), `class_row` (the class token's row, EViT), `value_norm` (ATS). Empty: no attention map is needed.
    learned: the router has parameters that training is meant to change.
    boundary: the score at which the router's own two-way decision "attend or not" flips; None if it makes none.
    probability: scores are probabilities of a two-way softmax, so that `1 - score` weighs the bypass.
    positive: scores are never negative.
    unit_mass: scores of one sample sum to one, so that their mean is 1/N and a raw product removes most of the update.
    needs_class_token: the score reads the class token.
    log_probability: scores are logarithms of such probabilities.
    halts: tokens spend a halting mass in the routed layers, and the score is what they have left (A-ViT).
    routes: False only for `dense`, which routes nothing.
    """

    attention: frozenset[AttentionStatistic] = frozenset()
    learned: bool = False
    boundary: float | None = None
    probability: bool = False
    positive: bool = False
    unit_mass: bool = False
    needs_class_token: bool = False
    log_probability: bool = False
    halts: bool = False
    routes: bool = True

    @property
    def scale(self) -> ScoreScale:
        """What a score says about "keep": its log odds (`logit`), its `probability`, or the logarithm of that."""
        if self.probability:
            return "probability"
        return "log_probability" if self.log_probability else "logit"

    @property
    def choice(self) -> bool:
        """Whether the score carries a two-way decision that `capacity=argmax` can follow."""
        return self.boundary is not None


@dataclass(frozen=True, slots=True)
class ScalingTraits:
    """Facts about an output rule, the way a kept token's score enters the output.

    uses_score: the output depends on the score's value, not only on the selection.
    gives_router_gradient: a learned router receives a gradient through this rule.
    no_gradient_forms: values of the option `form` under which it does not.
    needs_probability: the rule is defined only for a router whose scores are two-way probabilities.
    sublayers: the parts of a block that may be routed under this rule.
    bypasses: the bypass members it is defined with; None: any.
    """

    uses_score: bool = True
    gives_router_gradient: bool = True
    no_gradient_forms: tuple[str, ...] = ()
    needs_probability: bool = False
    sublayers: tuple[SubLayer, ...] = SUBLAYERS
    bypasses: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class CapacityTraits:
    """Facts about a selection rule.

    has_fraction: the rule keeps a stated fraction of the tokens (`capacity.fraction`).
    needs_choice: the rule follows the router's own two-way decision.
    ragged: samples of one batch may keep different numbers of tokens.
    needs_positive: scores are weights to sample by, which must not be negative.
    relaxes: in training it makes a differentiable decision of the score, whose scale it is told.
    compares: whether a token is kept depends on the scores of the whole sequence, later tokens' among them.
    """

    has_fraction: bool = True
    needs_choice: bool = False
    ragged: bool = False
    needs_positive: bool = False
    relaxes: bool = False
    compares: bool = False


@dataclass(frozen=True, slots=True)
class BypassTraits:
    """Facts about the fate of a token that was not kept.

    sublayers: the parts of a block it is defined for.
    removes: bypassed tokens are gone for good.
    merges: kept tokens become fewer as well.
    placed: its constructor is given the `LayerSpec`: it differs between layers.
    restores: removed tokens are put back before the head, with what they had given to the output.
    final: bypassed tokens stay in the sequence, but no later layer keeps them.
    saves: the work on bypassed tokens is really saved.
    """

    sublayers: tuple[SubLayer, ...] = SUBLAYERS
    removes: bool = False
    merges: bool = False
    placed: bool = False
    restores: bool = False
    final: bool = False
    saves: bool = True


@dataclass(frozen=True, slots=True)
class VisibilityTraits:
    """Facts about the keys that a kept token attends to. all_keys: bypassed tokens are visible too."""

    all_keys: bool = False


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Facts about an auxiliary loss, what it reads from a trace.

    reads: `decision`, which tokens are kept, with the router's gradient; `logits` of a learned router; `probability`,
        scores that are probabilities; `scores` of any router; `halting`, the halting scores of an adaptive depth.
    needs_target: the fraction it pulls towards is the capacity's where the option `target` is null.
    """

    reads: Literal["decision", "logits", "probability", "scores", "halting"] = "scores"
    needs_target: bool = False


@dataclass(frozen=True, slots=True)
class BackboneFacts:
    """What routing needs to know of a backbone before it is built.

    depth: number of layers. width: D, width of the residual stream. heads: H, attention heads.
    prefix: kinds of the prefix tokens in order, for instance ("class", "registers", "registers").
    tokens: length of the sequence, prefix included; None where it varies.
    causal: a token attends only to itself and to earlier ones.
    """

    depth: int
    width: int
    heads: int
    prefix: tuple[str, ...] = ()
    tokens: int | None = None
    causal: bool = False


RECEIVED: frozenset[AttentionStatistic] = frozenset({"received"})
CLASS_ROW: frozenset[AttentionStatistic] = frozenset({"class_row"})

ROUTERS: Mapping[str, RouterTraits] = MappingProxyType(
    {
        "dense": RouterTraits(routes=False),
        "linear": RouterTraits(learned=True, boundary=0.0),
        "predictor": RouterTraits(learned=True, boundary=math.log(0.5), log_probability=True),
        "mlp": RouterTraits(learned=True, boundary=0.5, probability=True, positive=True),
        "amod": RouterTraits(attention=RECEIVED, positive=True, unit_mass=True),
        "cls_attention": RouterTraits(attention=CLASS_ROW, positive=True, unit_mass=True, needs_class_token=True),
        "attention_variance": RouterTraits(attention=CLASS_ROW, positive=True),
        "attention_medad": RouterTraits(attention=CLASS_ROW, positive=True),
        "subspace": RouterTraits(),
        "mix": RouterTraits(attention=RECEIVED, learned=True),
        "value_attention": RouterTraits(
            attention=frozenset({"class_row", "value_norm"}), positive=True, unit_mass=True, needs_class_token=True
        ),
        "halting": RouterTraits(halts=True),
        "random": RouterTraits(positive=True),
        "constant": RouterTraits(),
    }
)

SCALINGS: Mapping[str, ScalingTraits] = MappingProxyType(
    {
        "multiply": ScalingTraits(),
        "none": ScalingTraits(uses_score=False, gives_router_gradient=False),
        "straight_through": ScalingTraits(uses_score=False, no_gradient_forms=("stop_gradient",)),
        "soft_mix": ScalingTraits(needs_probability=True, sublayers=("attention",), bypasses=("project", "skip")),
        "top1_probability": ScalingTraits(needs_probability=True),
    }
)

CAPACITIES: Mapping[str, CapacityTraits] = MappingProxyType(
    {
        "topk": CapacityTraits(compares=True),
        "gumbel": CapacityTraits(ragged=True, relaxes=True, compares=True),
        "percentile": CapacityTraits(ragged=True, compares=True),
        "threshold": CapacityTraits(has_fraction=False, ragged=True),
        "argmax": CapacityTraits(has_fraction=False, needs_choice=True, ragged=True),
        "inverse_transform": CapacityTraits(ragged=True, needs_positive=True, compares=True),
    }
)

BYPASSES: Mapping[str, BypassTraits] = MappingProxyType(
    {
        "skip": BypassTraits(),
        "project": BypassTraits(sublayers=("attention",)),
        "drop": BypassTraits(sublayers=("block", "mlp"), removes=True),
        "fuse": BypassTraits(sublayers=("block", "mlp"), removes=True),
        "ponder": BypassTraits(sublayers=("block", "mlp"), removes=True, restores=True),
        "ponder_masked": BypassTraits(sublayers=("block",), restores=True, final=True, saves=False),
        "merge": BypassTraits(sublayers=("mlp",), removes=True, merges=True, placed=True),
    }
)

VISIBILITIES: Mapping[str, VisibilityTraits] = MappingProxyType(
    {"kept": VisibilityTraits(), "all": VisibilityTraits(all_keys=True)}
)


LOSSES: Mapping[str, LossTraits] = MappingProxyType(
    {
        "ratio": LossTraits(reads="decision", needs_target=True),
        "l1_target": LossTraits(reads="decision"),
        "hinge": LossTraits(reads="decision"),
        "load": LossTraits(reads="probability"),
        "z": LossTraits(reads="logits"),
        "bce_auxiliary": LossTraits(reads="logits"),
        "ponder": LossTraits(reads="halting"),
        "halting_prior": LossTraits(reads="halting"),
    }
)


def alternate(depth: int, first: int = 1, stride: int = 2) -> list[int]:
    """Layers `first`, `first + stride`, ... : every second layer by default, each after a dense one (A-MoD)."""
    if stride < 1:
        raise ValueError(f"placement.stride = {stride}: must be at least 1")
    return _in_range(list(range(first, depth, stride)) or [first], depth, "placement.first")


def later(depth: int, first: int | None = None) -> list[int]:
    """Every layer from `first` on; None starts at the middle, layer `depth // 2`."""
    start = depth // 2 if first is None else first
    return _in_range(list(range(start, depth)) or [start], depth, "placement.first")


def every(depth: int, first: int = 1) -> list[int]:
    """Every layer from `first` on."""
    return later(depth, first)


def stages(depth: int, layers: Sequence[int] | None = None) -> list[int]:
    """The given zero-based layers; None: after a quarter, a half and three quarters of the depth.

    Of twelve layers these are 3, 6 and 9, the fourth, seventh and tenth block (EViT, DynamicViT); of six 1, 3 and 5.
    """
    if layers is None:
        return sorted({depth // 4, depth // 2, depth - depth // 4} & set(range(1, depth)))
    return listed(depth, layers)


def bilayer(depth: int) -> list[int]:
    """T-D-T-D-...-T (DTRNet): layers 1, 3, 5, ... but never the last, so that the first and last layers are dense."""
    return [layer for layer in range(1, depth - 1) if layer % 2 == 1]


def trilayer(depth: int) -> list[int]:
    """T-D-D-T-D-D-...-T (DTRNet): layers 1, 2, 4, 5, ... but never the last."""
    return [layer for layer in range(1, depth - 1) if layer % 3 != 0]


def listed(depth: int, layers: Sequence[int], base: int = 0) -> list[int]:
    """The given layers, counted from `base` (0 or 1)."""
    routed = _in_range([layer - base for layer in layers], depth, "placement.layers", base)
    if len(set(routed)) != len(routed):
        raise ValueError(f"placement.layers = {list(layers)}: names a layer twice")
    return sorted(routed)


PLACEMENTS: Mapping[str, Callable[..., list[int]]] = MappingProxyType(
    {
        "alternate": alternate,
        "later": later,
        "every": every,
        "stages": stages,
        "bilayer": bilayer,
        "trilayer": trilayer,
        "list": listed,
    }
)

TARGETS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "router": MappingProxyType(
            {
                "dense": "routing_lab.routing.routers.DenseRouter",
                "linear": "routing_lab.routing.routers.LinearRouter",
                "predictor": "routing_lab.routing.routers.PredictorRouter",
                "mlp": "routing_lab.routing.routers.MLPRouter",
                "amod": "routing_lab.routing.routers.AttentionReceivedRouter",
                "cls_attention": "routing_lab.routing.routers.ClassAttentionRouter",
                "attention_variance": "routing_lab.routing.routers.AttentionVarianceRouter",
                "attention_medad": "routing_lab.routing.routers.AttentionMedADRouter",
                "subspace": "routing_lab.routing.routers.SubspaceRouter",
                "mix": "routing_lab.routing.routers.MixRouter",
                "value_attention": "routing_lab.routing.routers.ValueAttentionRouter",
                "halting": "routing_lab.routing.routers.HaltingRouter",
                "random": "routing_lab.routing.routers.RandomRouter",
                "constant": "routing_lab.routing.routers.ConstantRouter",
            }
        ),
        "scaling": MappingProxyType(
            {
                "multiply": "routing_lab.routing.scaling.Multiply",
                "none": "routing_lab.routing.scaling.NoScaling",
                "straight_through": "routing_lab.routing.scaling.StraightThrough",
                "soft_mix": "routing_lab.routing.scaling.SoftMix",
                "top1_probability": "routing_lab.routing.scaling.Top1Probability",
            }
        ),
        "capacity": MappingProxyType(
            {
                "topk": "routing_lab.routing.capacity.TopK",
                "gumbel": "routing_lab.routing.capacity.Gumbel",
                "percentile": "routing_lab.routing.capacity.Percentile",
                "threshold": "routing_lab.routing.capacity.Threshold",
                "argmax": "routing_lab.routing.capacity.Argmax",
                "inverse_transform": "routing_lab.routing.capacity.InverseTransform",
            }
        ),
        "placement": MappingProxyType(
            {name: f"routing_lab.routing.members.{function.__name__}" for name, function in PLACEMENTS.items()}
        ),
        "bypass": MappingProxyType(
            {
                "skip": "routing_lab.routing.bypass.Skip",
                "project": "routing_lab.routing.bypass.Project",
                "drop": "routing_lab.routing.bypass.Drop",
                "fuse": "routing_lab.routing.bypass.Fuse",
                "ponder": "routing_lab.routing.bypass.Ponder",
                "ponder_masked": "routing_lab.routing.bypass.PonderMasked",
                "merge": "routing_lab.routing.merge.Merge",
            }
        ),
        "visibility": MappingProxyType(
            {"kept": "routing_lab.routing.visibility.Kept", "all": "routing_lab.routing.visibility.All"}
        ),
    }
)
"""The class (for a placement: the function) behind each shipped member, as its YAML file names it in `_target_`."""


LOSS_TARGETS: Mapping[str, str] = MappingProxyType({name: f"routing_lab.routing.losses.{name}_loss" for name in LOSSES})
"""The function behind each shipped auxiliary loss."""


def routed_layers(placement: str | Callable[..., list[int]], depth: int, **options: Any) -> list[int]:
    """Zero-based indices of the routed layers, ascending, for a placement (its name or its function) and its options.

    Raises ValueError, naming the config key, when a layer lies outside `0 .. depth - 1`.
    """
    function = PLACEMENTS[placement] if isinstance(placement, str) else placement
    routed = sorted(function(depth, **options))
    return _in_range(routed, depth, "placement")


def attention_sources(
    routed: Sequence[int],
    depth: int,
    source: str | int = "previous",
    lag: int = 2,
    fill: str = "none",
    sublayer: str = "block",
) -> dict[int, int]:
    """For each routed layer the layer whose attention map its score is made of.

    source: `previous` (l - 1), `lag` (l - lag), `last_dense` (the nearest layer below l that is not routed), `same`
        (l itself: free when no more than its MLP is routed; otherwise the map of all entering tokens is made before the
        selection, one more projection of every token to queries, keys and values) or the index of a layer.
    fill: what stands in for tokens that a routed source layer did not attend to; `none` refuses such a source.

    Raises ValueError, naming the config key, when a source does not exist or is incomplete.
    """
    chosen = set(routed)
    # Either every token takes part in attention, or a map of all tokens is made for the score.
    complete = sublayer == "mlp" or source == "same"
    sources: dict[int, int] = {}
    for layer in sorted(chosen):
        found = _source_of(layer, chosen, source, lag)
        if found is None or found < 0:
            raise ValueError(
                f"placement.attention_source = {source}: routed layer {layer} (zero-based) has no "
                f"{'dense layer below it' if source == 'last_dense' else 'such layer below it'} to take attention from"
            )
        if found >= depth or found > layer or (found == layer and not complete):
            raise ValueError(
                f"placement.attention_source = {source}: layer {found} runs after the selection of routed layer "
                f"{layer}; name a layer below every routed layer (zero-based)"
            )
        if found in chosen and not complete and fill == "none":
            raise ValueError(
                f"placement.attention_source = {source}: layer {found}, the source of routed layer {layer}, is itself "
                "routed, so that its attention map lacks tokens; use attention_source=last_dense or choose "
                "placement.attention_fill=zero, mean or carry"
            )
        sources[layer] = found
    return sources


def _source_of(layer: int, routed: set[int], source: str | int, lag: int) -> int | None:
    if isinstance(source, int):
        return source
    if source == "last_dense":
        return max((below for below in range(layer) if below not in routed), default=None)
    return layer - {"previous": 1, "lag": lag, "same": 0}[source]


def _in_range(routed: list[int], depth: int, key: str, base: int = 0) -> list[int]:
    outside = [layer + base for layer in routed if not 0 <= layer < depth]
    if outside:
        counted = "zero-based" if base == 0 else "counted from 1"
        raise ValueError(
            f"{key} = {', '.join(map(str, outside))}: the backbone has layers {base} to {depth - 1 + base} ({counted})"
        )
    return routed
