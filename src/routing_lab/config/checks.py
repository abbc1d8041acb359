"""Checks across fields: what each value allows alone, but not together.

A check is a generator over the sections of the configuration it names as parameters; it runs when these are valid in
themselves. Refusals yield a `Problem`: the combination cannot mean anything. Remarks yield a line of text: the
combination runs, as a control perhaps, and the line is kept in its record.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from routing_lab.config.problems import Problem, alternatives, one_line
from routing_lab.config.schema import (
    AttentionReceivedRouter,
    BackboneConfig,
    BypassConfig,
    CapacityConfig,
    ClassAttentionRouter,
    ConstantRouter,
    Drop,
    FractionCapacity,
    IsoflopConfig,
    LlamaBackbone,
    LossConfig,
    Member,
    Merge,
    PlacementConfig,
    RouterConfig,
    ScalingConfig,
    StraightThrough,
    SubspaceRouter,
    TaskConfig,
    Threshold,
    TimmBackbone,
    VisibilityConfig,
)
from routing_lab.config.training import CheckpointInit, DenseInit, InitConfig, PretrainedInit, ScratchInit, TrainConfig
from routing_lab.data.inspect import inspect as inspect_data
from routing_lab.data.inspect import remarks as data_remarks
from routing_lab.data.schema import DataConfig
from routing_lab.keys import LATER
from routing_lab.routing import members
from routing_lab.routing.members import (
    AXES,
    BackboneFacts,
    BypassTraits,
    CapacityTraits,
    RouterTraits,
    ScalingTraits,
    VisibilityTraits,
    attention_sources,
    routed_layers,
)

TRAITS: Mapping[str, tuple[Mapping[str, Any], Any]] = {
    "router": (members.ROUTERS, RouterTraits()),
    "scaling": (members.SCALINGS, ScalingTraits()),
    "capacity": (members.CAPACITIES, CapacityTraits(has_fraction=False)),
    "bypass": (members.BYPASSES, BypassTraits()),
    "visibility": (members.VISIBILITIES, VisibilityTraits()),
}
"""Axis -> traits of the shipped members, and what is assumed of a class that states none."""

GIVEN_BY_THE_CORE: Mapping[str, frozenset[str]] = {
    "router": frozenset({"self", "spec"}),
    "capacity": frozenset({"self", "spec", "boundary", "scale"}),
    "scaling": frozenset({"self"}),
    "bypass": frozenset({"self", "spec"}),
    "visibility": frozenset({"self"}),
    "placement": frozenset({"depth"}),
}
"""Axis -> constructor arguments that do not come from the configuration."""


class UnknownTarget(ValueError):
    """`_target_` names nothing that can be imported."""


def locate(path: str) -> Any:
    """The class or function at a dotted path. Raises UnknownTarget, saying why, when it cannot be imported."""
    module, _, name = path.rpartition(".")
    if not module:
        raise UnknownTarget("must be a dotted path such as my_module.MyRouter")
    try:
        return getattr(import_module(module), name)
    except AttributeError:
        raise UnknownTarget(f"module {module} has no {name}") from None
    except Exception as error:  # importing a user's module may raise anything
        raise UnknownTarget(f"cannot be imported: {type(error).__name__}: {one_line(str(error))}") from None


def traits_of(axis: str, member: Member) -> Any:
    """The traits of a member: of its shipped name, or those its class states. Raises UnknownTarget."""
    shipped, assumed = TRAITS[axis]
    if member.class_path == members.TARGETS[axis].get(member.name):
        return shipped[member.name]
    return getattr(locate(member.class_path), "traits", assumed)


def outside_member(axis: str, member: Member) -> Iterator[Problem]:
    """Refusals of a member from outside the package: its class does not exist or does not take the options given."""
    if member.class_path == members.TARGETS[axis].get(member.name):
        return
    yield from _takes_options(axis, member.class_path, member.options, GIVEN_BY_THE_CORE[axis])


def _takes_options(key: str, path: str, options: Mapping[str, Any], given: frozenset[str]) -> Iterator[Problem]:
    """Refusals of a class or function that does not exist or does not take these options; the core passes `given`."""
    try:
        target = locate(path)
        parameters = dict(inspect.signature(target).parameters)
    except UnknownTarget as error:
        yield Problem.of(f"{key}._target_", path, str(error))
        return
    except (TypeError, ValueError):
        yield Problem.of(f"{key}._target_", path, "is neither a class nor a function")
        return
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in given and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    for option, value in options.items():
        if option not in named and not open_ended:
            hint = alternatives(option, named, "it takes ") or "it takes no options"
            yield Problem.of(f"{key}.{option}", value, f"{path} has no such argument; {hint}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in options:
            yield Problem(f"{key}.{name}", None, f"is missing; {path} requires it")


# --- refusals: backbone ---


def backbone_shape(backbone: BackboneConfig) -> Iterator[Problem]:
    """Width divides into heads, the image into patches, and the pooled token exists."""
    if backbone.width % backbone.heads:
        yield Problem.of("backbone.heads", backbone.heads, f"must divide backbone.width={backbone.width}")
    if isinstance(backbone, LlamaBackbone):
        if backbone.heads % backbone.kv_heads:
            yield Problem.of("backbone.kv_heads", backbone.kv_heads, f"must divide backbone.heads={backbone.heads}")
        if backbone.width // backbone.heads % 2:
            yield Problem.of("backbone.width", backbone.width, "must give every head an even width (rotary embedding)")
    if not isinstance(backbone, TimmBackbone):
        return
    size, patch, stride = backbone.image_size, backbone.patch_size, backbone.patch_stride
    if stride is None and size % patch:
        yield Problem.of("backbone.image_size", size, f"must be a multiple of backbone.patch_size={patch}")
    elif stride is not None and stride > patch:
        yield Problem.of("backbone.patch_stride", stride, f"must be at most backbone.patch_size={patch}")
    elif patch > size:
        yield Problem.of("backbone.patch_size", patch, f"must be at most backbone.image_size={size}")
    if backbone.pool == "token" and not backbone.class_token:
        yield Problem.of("backbone.pool", "token", "needs backbone.class_token=true; use backbone.pool=avg")
    if backbone.distilled and not backbone.class_token:
        yield Problem.of("backbone.distilled", True, "needs backbone.class_token=true")
    if backbone.timm_name is None:
        for key in ("mlp_ratio", "qk_norm", "pool", "mlp"):
            if getattr(backbone, key) is None:
                yield Problem.of(f"backbone.{key}", None, "may be null only where backbone.timm_name is set")


def backbone_can_be_trained(backbone: BackboneConfig, init: InitConfig) -> Iterator[Problem]:
    """The command trains on images, and published weights need a name."""
    if isinstance(backbone, LlamaBackbone):
        yield Problem.of("backbone", backbone.name, "is a language model; training takes images: use routing_lab.route")
    elif isinstance(init, PretrainedInit) and getattr(backbone, "timm_name", None) is None:
        yield Problem.of("init", "pretrained", f"needs backbone.timm_name; backbone={backbone.name} has none")


# --- refusals: where ---


def placed_layers(placement: PlacementConfig, router: RouterConfig, facts: BackboneFacts) -> Iterator[Problem]:
    """The routed layers exist, there is at least one, and the attention they are scored by is there."""
    if not traits_of("router", router).routes:
        return
    try:
        routed = layers_of(placement, facts)
    except (ValueError, TypeError, UnknownTarget) as error:
        yield Problem.from_error(error, "placement")
        return
    if not routed:
        yield Problem.of(
            "placement", placement.name, f"routes none of the {facts.depth} layers; use router=dense for that"
        )
        return
    if traits_of("router", router).attention:
        try:
            sources_of(placement, routed, facts)
        except ValueError as error:
            yield Problem.from_error(error, "placement.attention_source")


def layers_of(placement: PlacementConfig, facts: BackboneFacts) -> list[int]:
    """Zero-based indices of the routed layers. Raises ValueError where one does not exist."""
    shipped = placement.class_path == members.TARGETS["placement"].get(placement.name)
    return routed_layers(placement.name if shipped else locate(placement.class_path), facts.depth, **placement.options)


def sources_of(placement: PlacementConfig, routed: list[int], facts: BackboneFacts) -> dict[int, int]:
    """Routed layer -> the layer whose attention it is scored by. Raises ValueError where it is missing."""
    return attention_sources(
        routed,
        facts.depth,
        placement.attention_source,
        placement.lag,
        placement.attention_fill,
        placement.sublayer,
    )


def sublayer_allows(placement: PlacementConfig, bypass: BypassConfig, router: RouterConfig) -> Iterator[Problem]:
    """The bypass is defined for the part of the layer that is routed."""
    allowed = traits_of("bypass", bypass).sublayers
    if traits_of("router", router).routes and placement.sublayer not in allowed:
        yield Problem.of(
            "bypass",
            bypass.name,
            f"is defined for placement.sublayer={' or '.join(allowed)} only, not {placement.sublayer}",
        )


# --- refusals: router ---


def router_fits_backbone(router: RouterConfig, facts: BackboneFacts) -> Iterator[Problem]:
    """The router finds the class token, the heads, the channels and the attention it reads."""
    traits = traits_of("router", router)
    if (traits.needs_class_token or getattr(router, "query", None) == "cls") and "class" not in facts.prefix:
        yield Problem.of("router", router.name, "reads the class token, which this backbone does not have")
    if traits.attention and facts.causal:
        yield Problem.of(
            "router",
            router.name,
            "scores a token by the attention of later ones, which a causal backbone must not use",
        )
    if isinstance(router, ClassAttentionRouter):
        if router.head_reduction == "head" and router.head is None:
            yield Problem.of("router.head", None, "router.head_reduction=head needs the zero-based index of a head")
        elif router.head is not None and router.head >= facts.heads:
            yield Problem.of("router.head", router.head, f"the backbone has heads 0 to {facts.heads - 1}")
    if isinstance(router, SubspaceRouter) and max(router.dims) >= facts.width:
        yield Problem.of("router.dims", router.dims, f"the backbone has channels 0 to {facts.width - 1}")
    if router.corrupt == "sink" and facts.tokens is not None and router.corrupt_token >= facts.tokens:
        yield Problem.of(
            "router.corrupt_token", router.corrupt_token, f"the backbone has tokens 0 to {facts.tokens - 1}"
        )


def excluded_tokens_exist(router: RouterConfig, facts: BackboneFacts) -> Iterator[Problem]:
    """Token kinds left out of the attention statistics are kinds that the backbone has."""
    if not isinstance(router, AttentionReceivedRouter):
        return
    present = {*facts.prefix, "self"} | ({"prefix"} if facts.prefix else set())
    for key in ("exclude_queries", "exclude_keys"):
        kinds = getattr(router, key)
        for kind in kinds:
            if kind not in present:
                yield Problem.of(f"router.{key}", kinds, f"this backbone has no {kind} token; it has {_and(present)}")


# --- refusals: capacity and scaling ---


def capacity_fits(
    capacity: CapacityConfig, placement: PlacementConfig, router: RouterConfig, facts: BackboneFacts
) -> Iterator[Problem]:
    """Per-layer lists have one entry a routed layer, schedules have both ends, protected and choosing parts exist."""
    traits = traits_of("router", router)
    if not traits.routes:
        return
    if capacity.protect == "class" and "class" not in facts.prefix:
        yield Problem.of("capacity.protect", "class", "this backbone has no class token; use none or prefix")
    if traits_of("capacity", capacity).needs_choice and not traits.choice:
        deciding = [name for name, facts_ in members.ROUTERS.items() if facts_.choice]
        yield Problem.of(
            "capacity",
            capacity.name,
            f"follows the router's own decision, and router={router.name} makes none; use router={_or(deciding)}, or "
            "another capacity",
        )
    if traits_of("capacity", capacity).relaxes and not traits.learned:
        learned = [name for name, facts_ in members.ROUTERS.items() if facts_.learned]
        yield Problem.of(
            "capacity",
            capacity.name,
            f"draws decisions by a learned score, and router={router.name} has none; use router={_or(learned)}",
        )
    if isinstance(capacity, FractionCapacity) and capacity.depth_schedule != "constant":
        if capacity.fraction_last is None and capacity.depth_schedule != "power":
            yield Problem.of(
                "capacity.fraction_last",
                None,
                f"capacity.depth_schedule={capacity.depth_schedule} needs the fraction of the last routed layer",
            )
        if isinstance(capacity.fraction, list):
            yield Problem.of(
                "capacity.depth_schedule",
                capacity.depth_schedule,
                "needs one number as capacity.fraction, not a list with a value for every routed layer",
            )
    try:
        count = len(layers_of(placement, facts))
    except (ValueError, TypeError, UnknownTarget):
        return
    for key in ("fraction", "threshold"):
        value = getattr(capacity, key, None)
        if isinstance(value, list) and len(value) != count:
            yield Problem.of(
                f"capacity.{key}",
                value,
                f"has {len(value)} entries for {count} routed layers; give one each, or a number",
            )


def capacity_reads_scores(capacity: CapacityConfig, router: RouterConfig) -> Iterator[Problem]:
    """A rule that samples by the scores gets scores to sample by."""
    if not traits_of("router", router).routes or not traits_of("capacity", capacity).needs_positive:
        return
    if not traits_of("router", router).positive:
        able = [name for name, facts in members.ROUTERS.items() if facts.positive]
        yield Problem.of(
            "capacity",
            capacity.name,
            f"samples in proportion to the scores, and those of router={router.name} may be negative; "
            f"use router={_or(able)}",
        )
    if capacity.order != "highest":
        yield Problem.of(
            "capacity.order", capacity.order, f"capacity={capacity.name} samples in proportion to the scores"
        )


def prefix_survives(
    capacity: CapacityConfig, router: RouterConfig, bypass: BypassConfig, facts: BackboneFacts
) -> Iterator[Problem]:
    """What removes tokens leaves those that the head, or a class-token score, finds by their position."""
    traits, source = traits_of("bypass", bypass), traits_of("router", router)
    if not source.routes or not traits.removes or not facts.prefix:
        return
    protected = {"none": 0, "class": 1, "prefix": len(facts.prefix)}[capacity.protect]
    if protected < len(facts.prefix) and (source.attention or not traits.restores):
        reason = f"router={router.name} reads" if traits.restores else "the head reads"
        yield Problem.of(
            "capacity.protect",
            capacity.protect,
            f"bypass={bypass.name} removes tokens, and {reason} the {_and(set(facts.prefix))} token: use "
            "protect=prefix",
        )


def removal_fits(
    bypass: BypassConfig, placement: PlacementConfig, router: RouterConfig, facts: BackboneFacts
) -> Iterator[Problem]:
    """Tokens may be removed where no output belongs to each; a list of merged tokens has one entry a routed layer."""
    traits = traits_of("bypass", bypass)
    if not traits_of("router", router).routes or not traits.removes:
        return
    if facts.causal and not traits.restores:
        yield Problem.of(
            "bypass", bypass.name, "removes tokens, and a language model has an output for every one; use skip"
        )
    if isinstance(bypass, Merge) and isinstance(bypass.merged, list):
        try:
            count = len(layers_of(placement, facts))
        except (ValueError, TypeError, UnknownTarget):
            return
        if len(bypass.merged) != count:
            yield Problem.of(
                "bypass.merged",
                bypass.merged,
                f"has {len(bypass.merged)} entries for {count} routed layers; give one each, or a number",
            )


def scaling_fits(
    scaling: ScalingConfig, router: RouterConfig, placement: PlacementConfig, bypass: BypassConfig
) -> Iterator[Problem]:
    """The output rule is defined for this router, this part of the layer and this bypass."""
    traits, source = traits_of("scaling", scaling), traits_of("router", router)
    if not source.routes:
        return
    if traits.needs_probability and not source.probability:
        able = [name for name, facts in members.ROUTERS.items() if facts.probability]
        yield Problem.of(
            "scaling",
            scaling.name,
            f"weighs two paths by a probability, which router={router.name} does not give; use router={_or(able)}",
        )
    if placement.sublayer not in traits.sublayers:
        yield Problem.of(
            "scaling",
            scaling.name,
            f"is defined for placement.sublayer={_or(traits.sublayers)} only, not {placement.sublayer}",
        )
    if traits.bypasses is not None and bypass.name not in traits.bypasses:
        yield Problem.of(
            "scaling", scaling.name, f"is defined for bypass={_or(traits.bypasses)} only, not {bypass.name}"
        )


# --- refusals: auxiliary losses ---


def losses_fit(
    losses: Mapping[str, LossConfig],
    router: RouterConfig,
    capacity: CapacityConfig,
    placement: PlacementConfig,
    facts: BackboneFacts,
) -> Iterator[Problem]:
    """Every auxiliary loss finds in the trace what it reads, and a target."""
    traits = traits_of("router", router)
    if not traits.routes:
        return
    if placement.active == "eval" and any(loss.weight for loss in losses.values()):
        yield Problem.of(
            "placement.active",
            "eval",
            f"nothing is routed in training that losses={', '.join(losses)} could read; use both",
        )
    for name, loss in losses.items():
        key = f"losses.{name}"
        if loss.class_path != members.LOSS_TARGETS.get(name):
            yield from _takes_options(key, loss.class_path, loss.options, frozenset({"trace"}))
            continue
        reads = members.LOSSES[name].reads
        if reads == "logits" and not traits.learned:
            learned = [known for known, found in members.ROUTERS.items() if found.learned]
            yield Problem.of(
                "losses",
                name,
                f"reads a learned router's logits, and router={router.name} has none; use router={_or(learned)}",
            )
        elif reads == "probability" and not traits.probability:
            able = [known for known, found in members.ROUTERS.items() if found.probability]
            yield Problem.of(
                "losses",
                name,
                f"reads attend probabilities, which router={router.name} does not give; use router={_or(able)}",
            )
        target = loss.options.get("target", 0.0)
        if members.LOSSES[name].needs_target and target is None and not traits_of("capacity", capacity).has_fraction:
            yield Problem.of(
                f"{key}.target", None, f"capacity={capacity.name} aims at no fraction: give one, in (0, 1]"
            )
        if isinstance(target, list):
            try:
                count = len(layers_of(placement, facts))
            except (ValueError, TypeError, UnknownTarget):
                continue
            if len(target) != count:
                yield Problem.of(
                    f"{key}.target",
                    target,
                    f"has {len(target)} entries for {count} routed layers; give one each, or a number",
                )


# --- refusals: files and recipe ---


def data_exist(data: DataConfig) -> Iterator[Problem]:
    """The data set is where it is said to be and has at least two classes."""
    for key, value, message in inspect_data(data):
        yield Problem.of(key, value, one_line(message))


def task_exists(task: TaskConfig) -> Iterator[Problem]:
    """A task from outside the package has a class that takes its options."""
    if {"name": task.name, "_target_": task.class_path, **task.options} == LATER["task"]:
        return
    given = frozenset({"model", "train", "seed", "outputs", "teacher", "losses"})
    yield from _takes_options("task", task.class_path, task.options, given)


def checkpoint_exists(init: InitConfig) -> Iterator[Problem]:
    """The checkpoint file is there."""
    if isinstance(init, CheckpointInit):
        path = Path(init.path).expanduser()
        if not path.is_file():
            yield Problem.of("init.path", init.path, f"no such file (looked at {path.absolute()})")


def dense_run_is_trained(init: InitConfig, train: TrainConfig) -> Iterator[Problem]:
    """Adapting a dense run without training leaves open how long that dense run was trained."""
    if isinstance(init, DenseInit) and train.epochs == 0 and init.epochs is None:
        yield Problem.of("init.epochs", None, "train.epochs=0 needs the number of epochs of the dense run")


def teacher_is_trained(init: InitConfig, train: TrainConfig) -> Iterator[Problem]:
    """A teacher that is the model the run starts from has learned something."""
    if train.distils and train.distill_teacher == "initial" and isinstance(init, ScratchInit):
        yield Problem.of(
            "train.distill_teacher",
            "initial",
            "init=scratch starts from random weights; use init=dense, pretrained or checkpoint",
        )


def isoflop_fits(isoflop: IsoflopConfig, init: InitConfig, train: TrainConfig) -> Iterator[Problem]:
    """Weights of another width cannot be taken over, and a smaller model teaches no better."""
    if isoflop.by == "width" and isinstance(init, PretrainedInit | DenseInit):
        message = f"init={init.kind} has weights of another width; use init=scratch, or isoflop.by=depth"
        yield Problem.of("isoflop.by", "width", message)
    if isoflop.by != "none" and train.distils and train.distill_teacher == "initial":
        message = "the model of isoflop starts smaller than the one it would learn from; use dense"
        yield Problem.of("train.distill_teacher", "initial", message)


REFUSALS: tuple[Callable[..., Iterator[Problem]], ...] = (
    backbone_shape,
    backbone_can_be_trained,
    placed_layers,
    sublayer_allows,
    router_fits_backbone,
    excluded_tokens_exist,
    capacity_fits,
    capacity_reads_scores,
    prefix_survives,
    removal_fits,
    scaling_fits,
    losses_fit,
    data_exist,
    task_exists,
    checkpoint_exists,
    dense_run_is_trained,
    isoflop_fits,
    teacher_is_trained,
)


# --- remarks ---


def router_learns(
    router: RouterConfig,
    scaling: ScalingConfig,
    capacity: CapacityConfig,
    bypass: BypassConfig,
    placement: PlacementConfig,
) -> Iterator[str]:
    """A learned router that training cannot change."""
    if not traits_of("router", router).learned:
        return
    if placement.active == "eval":
        yield f"router={router.name} is learned but routes in evaluation only: it stays as it was initialised"
        return
    if traits_of("capacity", capacity).relaxes and isinstance(bypass, Drop) and bypass.train == "mask":
        return  # by way of the keys that its decision takes out
    traits = traits_of("scaling", scaling)
    form = scaling.options.get("form")
    if not traits.gives_router_gradient or form in traits.no_gradient_forms:
        rule = f"scaling={scaling.name}" + (f" scaling.form={form}" if form in traits.no_gradient_forms else "")
        yield f"router={router.name} is learned but gets no gradient under {rule}: it stays as it was initialised"


def keys_without_effect(
    router: RouterConfig, scaling: ScalingConfig, placement: PlacementConfig, visibility: VisibilityConfig
) -> Iterator[str]:
    """Values that were chosen and that nothing reads."""
    traits = traits_of("router", router)
    if not traits.routes:
        return
    if not traits.attention:
        if router.attention != "trained":
            yield f"router.attention={router.attention} has no effect: router={router.name} reads no attention"
        if not router.detach:
            yield f"router.detach=false has no effect: router={router.name} reads no attention"
        if placement.attention_fill != "none":
            fill = placement.attention_fill
            yield f"placement.attention_fill={fill} has no effect: router={router.name} reads no attention"
    if isinstance(router, ClassAttentionRouter) and router.head is not None and router.head_reduction != "head":
        yield f"router.head={router.head} has no effect without router.head_reduction=head"
    if isinstance(scaling, StraightThrough) and not traits.learned and (router.detach or not traits.attention):
        yield f"scaling=straight_through equals scaling=none: a gradient could change nothing in router={router.name}"
    if traits_of("visibility", visibility).all_keys and placement.sublayer == "mlp":
        yield f"visibility={visibility.name} has no effect: with placement.sublayer=mlp all tokens attend"
    if isinstance(router, ConstantRouter) and router.corrupt == "shuffle":
        yield "router.corrupt=shuffle has no effect on the scores of router=constant"


def capacity_routes(
    capacity: CapacityConfig, router: RouterConfig, bypass: BypassConfig, train: TrainConfig
) -> Iterator[str]:
    """Budgets that keep everything, that keep next to nothing, or whose schedule nothing follows."""
    traits = traits_of("router", router)
    if not traits.routes:
        return
    if isinstance(capacity, FractionCapacity):
        fractions = capacity.fraction if isinstance(capacity.fraction, list) else [capacity.fraction]
        last = [capacity.fraction_last] if capacity.fraction_last and capacity.depth_schedule != "constant" else []
        if all(fraction == 1 for fraction in [*fractions, *last]) and not traits_of("bypass", bypass).merges:
            yield "capacity.fraction=1 keeps every token: only the scaling distinguishes this arm from the dense model"
        if capacity.fraction_last is not None and capacity.depth_schedule == "constant":
            yield "capacity.fraction_last has no effect with capacity.depth_schedule=constant"
        if capacity.warmup and not train.epochs:
            yield "capacity.warmup has no effect without training (train.epochs=0)"
    if isinstance(capacity, Threshold) and traits.unit_mass:
        lowest = min(capacity.threshold) if isinstance(capacity.threshold, list) else capacity.threshold
        if lowest >= 0.5 and capacity.order == "highest":
            yield (
                f"capacity.threshold={capacity.threshold} is far above the scores of router={router.name}, whose mean "
                "is 1/N: hardly any token is kept"
            )


def capacity_sees_the_future(capacity: CapacityConfig, router: RouterConfig, facts: BackboneFacts) -> Iterator[str]:
    """A causal model in which later tokens decide whether a token is kept."""
    compares = traits_of("capacity", capacity).compares
    if facts.causal and traits_of("router", router).routes and compares:
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
    losses: Mapping[str, LossConfig], router: RouterConfig, train: TrainConfig
) -> Iterator[str]:
    """Auxiliary losses that nothing follows."""
    traits = traits_of("router", router)
    for name, loss in losses.items():
        if not loss.weight:
            continue
        if not traits.routes:
            yield f"losses={name} has no effect: router={router.name} routes nothing"
        elif not train.epochs:
            yield f"losses={name} has no effect without training (train.epochs=0)"
        elif name in members.LOSSES and members.LOSSES[name].reads == "decision" and not traits.learned:
            yield f"losses={name} adds a constant: the decision of router={router.name} carries no gradient"
        elif name in members.LOSSES and members.LOSSES[name].reads == "halting" and not traits.halts:
            yield f"losses={name} adds a constant: router={router.name} knows no halting"


def about_data(data: DataConfig, train: TrainConfig) -> Iterator[str]:
    """What was left out of the data, and splits that say less than they seem to."""
    yield from data_remarks(data, train)


REMARKS: tuple[Callable[..., Iterator[str]], ...] = (
    router_learns,
    keys_without_effect,
    capacity_routes,
    capacity_sees_the_future,
    losses_change_something,
    warmup_ends,
    about_data,
)


def run_checks(sections: Mapping[str, Any], names: tuple[Callable[..., Iterator[Any]], ...]) -> Iterator[Any]:
    """What the checks yield whose sections are all there."""
    for check in names:
        wanted = inspect.signature(check).parameters
        if all(name in sections for name in wanted):
            yield from check(**{name: sections[name] for name in wanted})


def outside_members(sections: Mapping[str, Any]) -> dict[str, list[Problem]]:
    """Axis -> refusals of its member from outside the package."""
    found = {axis: list(outside_member(axis, sections[axis])) for axis in AXES if axis in sections}
    return {axis: problems for axis, problems in found.items() if problems}


def _or(names: Any) -> str:
    return " or ".join(names)


def _and(names: Any) -> str:
    return ", ".join(sorted(names))
