"""Refusals: what each value allows alone, but not together. A check yields `Problem`s, see `routing_lab.config.checks`.

What a member refuses alone on a backbone it says itself, in `routing_lab.axes`; here it is asked for facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError

from routing_lab.axes import AXES
from routing_lab.axes.base import UnknownTarget
from routing_lab.axes.bypasses import BypassConfig
from routing_lab.axes.capacities import CapacityConfig
from routing_lab.axes.facts import BackboneFacts
from routing_lab.axes.losses import LossConfig
from routing_lab.axes.placements import PlacementConfig
from routing_lab.axes.routers import ROUTERS, RouterConfig
from routing_lab.axes.scalings import ScalingConfig
from routing_lab.config.backbones import BackboneConfig
from routing_lab.config.checks import Check, takes_options
from routing_lab.config.problems import Problem, from_validation, one_line
from routing_lab.config.schema import (
    TASKS,
    IsoflopConfig,
    MatchConfig,
    TaskConfig,
    TaskFacts,
)
from routing_lab.config.training import ALL_ROUTERS, InitConfig, RuntimeConfig, TrackingConfig, TrainConfig
from routing_lab.data.inspect import inspect as inspect_data
from routing_lab.data.inspect import num_train
from routing_lab.data.layout import DataProblem
from routing_lab.data.schema import DATA_SETS, DataConfig

# --- refusals: backbone ---


def backbone_can_be_built(backbone: BackboneConfig) -> Iterator[Problem]:
    """What the backbone refuses by itself."""
    yield from (Problem.of(*refusal) for refusal in backbone.refusals())


# --- where ---


def placed_layers(placement: PlacementConfig, router: RouterConfig, facts: BackboneFacts) -> Iterator[Problem]:
    """The routed layers exist, there is at least one, and the attention they are scored by is there."""
    if not router.traits.routes:
        return
    try:
        routed = placement.routed(facts.depth)
    except (ValueError, TypeError, UnknownTarget) as error:
        yield Problem.from_error(error, "placement")
        return
    if not routed:
        message = f"routes none of the {facts.depth} layers; use router=dense for that"
        yield Problem.of("placement", placement.name, message)
        return
    if router.traits.attention:
        try:
            placement.sources(routed, facts.depth)
        except ValueError as error:
            yield Problem.from_error(error, "placement.attention_source")


def sublayer_allows(placement: PlacementConfig, bypass: BypassConfig, router: RouterConfig) -> Iterator[Problem]:
    """The bypass is defined for the part of the layer that is routed."""
    allowed = bypass.traits.sublayers
    if router.traits.routes and placement.sublayer not in allowed:
        message = f"is defined for placement.sublayer={_or(allowed)} only, not {placement.sublayer}"
        yield Problem.of("bypass", bypass.name, message)


def backbone_allows(placement: PlacementConfig, router: RouterConfig, facts: BackboneFacts) -> Iterator[Problem]:
    """The backbone's blocks have the part that is routed, and the map that the score is made of."""
    if router.traits.routes and placement.sublayer not in facts.sublayers:
        message = f"attention and MLP of this backbone stand beside each other; use {_or(facts.sublayers)}"
        yield Problem.of("placement.sublayer", placement.sublayer, message)
    if not facts.one_map and {"received", "class_row"} & set(router.traits.attention):
        message = "reads an attention map, and this backbone's attention is a difference of two"
        yield Problem.of("router", router.name, message)


# --- members ---


def members_fit_the_backbone(
    sections: Mapping[str, Any], router: RouterConfig, facts: BackboneFacts
) -> Iterator[Problem]:
    """What every member refuses by itself; where nothing is routed, only the router is asked."""
    for axis in AXES if router.traits.routes else ("router",):
        if axis in sections:
            yield from (Problem.of(*refusal) for refusal in sections[axis].refusals(facts))


def truth_is_known(router: RouterConfig, data: DataConfig) -> Iterator[Problem]:
    """A router that is told which patches decide the class gets data that know."""
    if router.traits.needs_informative and not data.knows_informative:
        message = f"is told which patches matter, and data={data.name} does not know; use data=planted or induction"
        yield Problem.of("router", router.name, message)


def truth_is_of_the_patches(data: DataConfig, facts: BackboneFacts) -> Iterator[Problem]:
    """Data that know which patches matter know it of the patches that the backbone makes."""
    if data.num_masked is None or facts.tokens is None:
        return
    patches = facts.tokens - len(facts.prefix)
    if patches != data.num_masked:
        message = f"knows which of {data.num_masked} patches matter, and the backbone makes {patches} of an image; use "
        yield Problem.of("data", data.name, message + "the backbone's patch size, and backbone.patch_stride=null")


def lists_have_an_entry_a_layer(
    sections: Mapping[str, Any], placement: PlacementConfig, router: RouterConfig, facts: BackboneFacts
) -> Iterator[Problem]:
    """A list with one value per routed layer has that many."""
    if not router.traits.routes:
        return
    try:
        count = len(placement.routed(facts.depth))
    except (ValueError, TypeError, UnknownTarget):
        return
    members = {axis: sections[axis] for axis in AXES if axis in sections}
    members |= {f"losses.{name}": loss for name, loss in sections.get("losses", {}).items()}
    for prefix, member in members.items():
        for key in member.per_layer if member.is_shipped else ():
            value = getattr(member, key)
            if isinstance(value, list) and len(value) != count:
                message = f"has {len(value)} entries for {count} routed layers; give one each, or a number"
                yield Problem.of(f"{prefix}.{key}", value, message)


def capacity_fits(capacity: CapacityConfig, router: RouterConfig) -> Iterator[Problem]:
    """The rule gets from the router what it goes by: a decision, a learned score, or scores to sample by."""
    rule, score = capacity.traits, router.traits
    if not score.routes:
        return
    if capacity.needs_choice and not score.choice:
        yield Problem.of(
            "capacity",
            capacity.name,
            f"follows the router's own decision, and router={router.name} makes none; use {_routers('choice')}, or "
            "another capacity",
        )
    if rule.relaxes and not score.learned:
        message = f"draws decisions by a learned score, and router={router.name} has none; use {_routers('learned')}"
        yield Problem.of("capacity", capacity.name, message)
    if rule.needs_positive and not score.positive:
        yield Problem.of(
            "capacity",
            capacity.name,
            f"goes in proportion to the scores, and those of router={router.name} may be negative; "
            f"use {_routers('positive')}",
        )
    if rule.needs_positive and capacity.order != "highest":
        message = f"capacity={capacity.name} goes in proportion to the scores"
        yield Problem.of("capacity.order", capacity.order, message)


def prefix_survives(
    capacity: CapacityConfig, router: RouterConfig, bypass: BypassConfig, facts: BackboneFacts
) -> Iterator[Problem]:
    """What removes tokens leaves those that the head, or a class-token score, finds by their position."""
    traits, score = bypass.traits, router.traits
    if not score.routes or not traits.removes or not facts.prefix:
        return
    is_protected = capacity.num_protected(len(facts.prefix)) == len(facts.prefix)
    if not is_protected and (score.attention or not traits.restores):
        reason = f"router={router.name} reads" if traits.restores else "the head reads"
        yield Problem.of(
            "capacity.protect",
            capacity.protect,
            f"bypass={bypass.name} removes tokens, and {reason} the {', '.join(sorted(set(facts.prefix)))} token: use "
            "protect=prefix",
        )


def removal_fits(bypass: BypassConfig, router: RouterConfig, facts: BackboneFacts) -> Iterator[Problem]:
    """Tokens may be removed where no output belongs to each."""
    if router.traits.routes and facts.causal and bypass.traits.removes and not bypass.traits.restores:
        message = "removes tokens, and a language model has an output for every one; use skip"
        yield Problem.of("bypass", bypass.name, message)


def scaling_fits(
    scaling: ScalingConfig, router: RouterConfig, placement: PlacementConfig, bypass: BypassConfig
) -> Iterator[Problem]:
    """The output rule is defined for this router, this part of the layer and this bypass."""
    traits = scaling.traits
    if not router.traits.routes:
        return
    if traits.needs_probability and not router.traits.probability:
        gives_none = f"router={router.name} does not give; use {_routers('probability')}"
        yield Problem.of("scaling", scaling.name, f"weighs two paths by a probability, which {gives_none}")
    if placement.sublayer not in traits.sublayers:
        message = f"is defined for placement.sublayer={_or(traits.sublayers)} only, not {placement.sublayer}"
        yield Problem.of("scaling", scaling.name, message)
    if traits.weighs_bypassed and (bypass.traits.removes or bypass.traits.final):
        message = f"weighs what bypassed tokens get, and bypass={bypass.name} takes them out; use skip or project"
        yield Problem.of("scaling", scaling.name, message)


# --- auxiliary losses ---


def losses_fit(
    losses: Mapping[str, LossConfig], router: RouterConfig, capacity: CapacityConfig, placement: PlacementConfig
) -> Iterator[Problem]:
    """Every auxiliary loss finds in the trace what it reads, and a target."""
    if not router.traits.routes:
        return
    if placement.active == "eval" and any(loss.weight for loss in losses.values()):
        message = f"nothing is routed in training that losses={', '.join(losses)} could read; use both"
        yield Problem.of("placement.active", "eval", message)
    for name, loss in losses.items():
        if not loss.is_shipped:
            yield from takes_options(f"losses.{name}", loss.class_path, loss.options, loss.given)
            continue
        reads = loss.traits.reads
        if reads == "logits" and not router.traits.learned:
            has_none = f"router={router.name} has none; use {_routers('learned')}"
            yield Problem.of("losses", name, f"reads a learned router's logits, and {has_none}")
        elif reads == "probability" and not router.traits.probability:
            gives_none = f"router={router.name} does not give; use {_routers('probability')}"
            yield Problem.of("losses", name, f"reads attend probabilities, which {gives_none}")
        elif reads == "drawn":
            yield from _draws(f"losses.{name}", capacity)
        if loss.traits.needs_target and loss.options["target"] is None and not capacity.traits.has_fraction:
            message = f"capacity={capacity.name} aims at no fraction: give one, in (0, 1]"
            yield Problem.of(f"losses.{name}.target", None, message)


def _draws(key: str, capacity: CapacityConfig) -> Iterator[Problem]:
    """A capacity that draws every decision by itself, with the router's keep probability."""
    if not capacity.traits.relaxes:
        yield Problem.of(key, capacity.name, f"needs decisions that are drawn, and capacity={capacity.name} draws none")
    for option, value, needed in (("order", capacity.order, "highest"), ("persist", capacity.persist, "per_layer")):
        if value != needed:
            yield Problem.of(f"capacity.{option}", value, f"{key} needs the router's own probabilities; use {needed}")


# --- files and recipe ---


def data_exist(data: DataConfig) -> Iterator[Problem]:
    """The data set is where it is said to be and has at least two classes."""
    for key, value, message in inspect_data(data):
        yield Problem.of(key, value, one_line(message))


def batches_can_be_mixed(data: DataConfig, train: TrainConfig, runtime: RuntimeConfig) -> Iterator[Problem]:
    """A training batch divides into accumulated batches and processes, and these into pairs where they are mixed."""
    parts = train.accumulate * runtime.devices * (2 if train.mixup or train.cutmix else 1)
    if not train.epochs or parts == 1:
        return
    try:
        number = num_train(data)
    except DataProblem:
        return
    is_one_batch = number is not None and number < train.batch_size
    if (number or 0) < parts if is_one_batch else train.batch_size % parts:
        names = [f"train.accumulate={train.accumulate}"] if train.accumulate > 1 else []
        names += [f"runtime.devices={runtime.devices}"] if runtime.devices > 1 else []
        names += ["pairs to mix"] if train.mixup or train.cutmix else []
        message = f"cannot be divided for {' and '.join(names)}; expected a multiple of {parts}"
        yield Problem.of("train.batch_size", train.batch_size, message)


def precision_is_there(train: TrainConfig, runtime: RuntimeConfig) -> Iterator[Problem]:
    """A processor has no mixed precision in 16-bit floats; Lightning would take another one in its place."""
    if train.precision == "16-mixed" and runtime.accelerator == "cpu":
        yield Problem.of("train.precision", "16-mixed", "is not there on runtime.accelerator=cpu; use bf16-mixed or 32")


def patches_stay(data: DataConfig, train: TrainConfig) -> Iterator[Problem]:
    """Augmentation does not move the patches that spell the class of a planted image."""
    if data.knows_informative and train.augment in ("standard", "randaugment"):
        message = f"moves what data={data.name} planted away from its mask; use none"
        yield Problem.of("train.augment", train.augment, message)


def shipped_task(task: TaskConfig) -> TaskFacts | None:
    """Facts about a task that ships; None: its class is from outside the package."""
    known = TASKS.get(task.name)
    return known if known is not None and known.target == task.class_path else None


def task_exists(task: TaskConfig) -> Iterator[Problem]:
    """A shipped task's options are in their ranges; one from outside the package has a class that takes its options."""
    if (known := shipped_task(task)) is not None:
        try:
            known.options.model_validate(task.options)
        except ValidationError as error:
            yield from from_validation(error, known.options, "task", task.options)
        return
    given = frozenset({"model", "train", "seed", "outputs", "teacher", "losses"})
    yield from takes_options("task", task.class_path, task.options, given)


def task_takes(task: TaskConfig, backbone: BackboneConfig, data_set: str) -> Iterator[Problem]:
    """Backbone and data are of the kind that a shipped task takes."""
    known = shipped_task(task)
    if known is None:
        return
    chosen = f"task={task.name}"
    if backbone.facts().causal != known.causal:
        kinds = ("a vision transformer", "a language model")
        able = next(name for name, facts in TASKS.items() if facts.causal != known.causal)
        is_kind, takes = kinds[not known.causal], kinds[known.causal]
        yield Problem.of("backbone", backbone.name, f"is {is_kind}, and {chosen} takes {takes}; use task={able}")
    modality = DATA_SETS[data_set].modality if data_set in DATA_SETS else known.reads
    if modality != known.reads:
        able = next(name for name, facts in TASKS.items() if facts.reads == modality)
        yield Problem.of("data", data_set, f"is {modality}, and {chosen} reads {known.reads}; use task={able}")


def texts_have_other_lengths(task: TaskConfig, data: DataConfig) -> Iterator[Problem]:
    """Lengths beside the one of training are asked of data that can be read at any."""
    lengths = task.options.get("eval_lengths")
    if shipped_task(task) is not None and lengths and not data.any_length:
        yield Problem.of("task.eval_lengths", lengths, f"data={data.name} has windows of one length; use []")


def recipe_fits_task(task: TaskConfig, train: TrainConfig, isoflop: IsoflopConfig) -> Iterator[Problem]:
    """The recipe changes nothing that a shipped task does not have."""
    known = shipped_task(task)
    if known is None:
        return
    chosen = f"task={task.name}"
    if known.reads == "text":
        off = {"augment": "none", "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}
        for key in (key for key, value in off.items() if getattr(train, key) != value):
            message = f"changes images, and {chosen} reads text; use {off[key]}"
            yield Problem.of(f"train.{key}", getattr(train, key), message)
    if train.distils and not known.distils:
        able = next(name for name, facts in TASKS.items() if facts.distils)
        yield Problem.of("train.distill", train.distill, f"{chosen} learns from no teacher; task={able} does")
    if isoflop.by != "none" and known.causal:
        yield Problem.of("isoflop.by", isoflop.by, f"sizes a vision transformer, and {chosen} takes a language model")


def published_weights_are_there(init: InitConfig, backbone: BackboneConfig) -> Iterator[Problem]:
    """Weights of a library are there for the backbone."""
    if init.is_published and backbone.no_weights is not None:
        yield Problem.of("init", init.kind, backbone.no_weights)


def start_is_said(sections: Mapping[str, Any], init: InitConfig) -> Iterator[Problem]:
    """A dense run has a length, and a run that goes on is named once."""
    train: TrainConfig | None = sections.get("train")
    yield from (Problem.of(*refusal) for refusal in init.refusals(None if train is None else train.epochs))


def initial_weights_are_there(init: InitConfig) -> Iterator[Problem]:
    """The file that the run starts from is there."""
    yield from (Problem.of(*refusal) for refusal in init.absent())


def teacher_is_trained(init: InitConfig, train: TrainConfig) -> Iterator[Problem]:
    """A teacher that is the model the run starts from has learned something."""
    if train.distils and train.distill_teacher == "initial" and init.is_random:
        yield Problem.of(
            "train.distill_teacher",
            "initial",
            "init=scratch starts from random weights; use init=dense, pretrained or checkpoint",
        )


def frozen_routers_exist(train: TrainConfig, router: RouterConfig) -> Iterator[Problem]:
    """Routers that are held as they are have something to learn."""
    if ALL_ROUTERS in train.frozen and not router.traits.learned:
        message = f"router={router.name} has no parameters that could learn; use {_routers('learned')}"
        yield Problem.of("train.frozen", train.frozen, message)


def backbone_has_sizes(isoflop: IsoflopConfig, backbone: BackboneConfig) -> Iterator[Problem]:
    """The baseline of equal cost, a vision transformer, is built in another size."""
    if isoflop.by != "none" and not backbone.is_sized and not backbone.facts().causal:
        message = f"sizes a vision transformer of timm, which backbone={backbone.name} is not"
        yield Problem.of("isoflop.by", isoflop.by, message)


def isoflop_fits(isoflop: IsoflopConfig, init: InitConfig, train: TrainConfig) -> Iterator[Problem]:
    """Weights of another width cannot be taken over, and a smaller model teaches no better."""
    if isoflop.by == "width" and init.has_one_width:
        message = f"init={init.kind} has weights of another width; use init=scratch, or isoflop.by=depth"
        yield Problem.of("isoflop.by", "width", message)
    if isoflop.by != "none" and train.distils and train.distill_teacher == "initial":
        message = "the model of isoflop starts smaller than the one it would learn from; use dense"
        yield Problem.of("train.distill_teacher", "initial", message)


def one_cost_is_asked_for(isoflop: IsoflopConfig, match: MatchConfig) -> Iterator[Problem]:
    """A baseline costs what the arm does that the keys describe, which is then not sized itself."""
    if isoflop.by != "none" and match.key is not None:
        message = "isoflop sizes a dense model already; with router=dense match.key=backbone.width sizes one too"
        yield Problem.of("match.key", match.key, message)


def trackers_are_installed(tracking: TrackingConfig) -> Iterator[Problem]:
    """`tracking=tensorboard` without its package, which is not among the required ones."""
    if "tensorboard" in tracking and find_spec("tensorboard") is None:
        yield Problem.of("tracking", tracking, "is not installed: pip install 'routing_lab[tensorboard]'")


REFUSALS: tuple[Check, ...] = (
    backbone_can_be_built,
    placed_layers,
    backbone_allows,
    sublayer_allows,
    members_fit_the_backbone,
    truth_is_known,
    truth_is_of_the_patches,
    lists_have_an_entry_a_layer,
    capacity_fits,
    prefix_survives,
    removal_fits,
    scaling_fits,
    losses_fit,
    data_exist,
    batches_can_be_mixed,
    precision_is_there,
    patches_stay,
    task_exists,
    task_takes,
    texts_have_other_lengths,
    recipe_fits_task,
    published_weights_are_there,
    start_is_said,
    initial_weights_are_there,
    frozen_routers_exist,
    backbone_has_sizes,
    isoflop_fits,
    one_cost_is_asked_for,
    teacher_is_trained,
    trackers_are_installed,
)

OF_THIS_MACHINE: tuple[Check, ...] = (data_exist, initial_weights_are_there)
"""Those that say what is not on this machine, and nothing of the configuration."""


def _routers(fact: str) -> str:
    """The shipped routers of which a fact holds, as one would choose them."""
    return f"router={_or(name for name, member in ROUTERS.items() if getattr(member.facts, fact))}"


def _or(names: Iterable[str]) -> str:
    return " or ".join(names)
