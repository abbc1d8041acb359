"""Types and ranges of the configuration, one model per member of every group.

A member's own keys are the constructor options of the class that its `_target_` names; keys that all members of an axis
share without being options (`router.corrupt`, `placement.sublayer`, ...) are fields of the axis' base model. A member
from outside the package is validated by the `Outside*` model of its axis: shared keys here, its own by its constructor.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from routing_lab.config.training import InitConfig, RuntimeConfig, TrainConfig, WandbConfig
from routing_lab.data.schema import DataConfig
from routing_lab.routing.members import BackboneFacts, SubLayer, TokenKind

Fraction: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Index: TypeAlias = Annotated[int, Field(ge=0)]
Normalize: TypeAlias = Literal["raw", "sigmoid", "tanh", "unit_mean", "unit_max", "softmax_kept"]
Target: TypeAlias = Literal["update", "output"]
Scope: TypeAlias = Literal["sample", "batch"]
Name: TypeAlias = Annotated[str, Field(min_length=1, pattern=r"^[\w.=+-]+$")]


class Strict(BaseModel):
    """Refuses unknown keys, silent conversions and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Member(Strict):
    """A member of an axis: its name, the class or function behind it, and the options that are given to it."""

    not_options: ClassVar[tuple[str, ...]] = ("name", "class_path")

    name: Name
    class_path: str = Field(alias="_target_", min_length=1)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the class or function at `class_path`."""
        own = {key: getattr(self, key) for key in type(self).model_fields if key not in self.not_options}
        return own | dict(self.model_extra or {})


class Outside(BaseModel):
    """Mixed into the base model of an axis: options are whatever the class from outside the package accepts."""

    model_config = ConfigDict(extra="allow")


# --- backbones ---


class BackboneConfig(Strict):
    """Keys that every backbone has."""

    name: Name
    width: Positive
    depth: Positive
    heads: Positive

    def facts(self) -> BackboneFacts:
        """What routing needs to know of this backbone."""
        return BackboneFacts(self.depth, self.width, self.heads)


class TimmBackbone(BackboneConfig):
    """A vision transformer of timm, built from the fields or, where `timm_name` is set, as the model of that name."""

    kind: Literal["timm"]
    timm_name: str | None
    image_size: Positive
    patch_size: Positive
    patch_stride: Positive | None
    channels: Positive
    mlp_ratio: Annotated[float, Field(gt=0)] | None
    class_token: bool
    distilled: bool
    registers: int = Field(ge=0)
    layer_scale: Annotated[float, Field(gt=0)] | None
    qk_norm: bool | None
    pool: Literal["token", "avg"] | None
    mlp: Literal["gelu", "swiglu"] | None
    dropout: float = Field(ge=0, lt=1)
    drop_path: float = Field(ge=0, lt=1)

    def facts(self) -> BackboneFacts:
        kinds = ["class"] * self.class_token + ["distillation"] * self.distilled + ["registers"] * self.registers
        side = (self.image_size - self.patch_size) // (self.patch_stride or self.patch_size) + 1
        return BackboneFacts(self.depth, self.width, self.heads, tuple(kinds), len(kinds) + side * side)


class LlamaBackbone(BackboneConfig):
    """A decoder of the Llama family."""

    kind: Literal["llama"]
    vocab_size: Positive
    context: Positive
    kv_heads: Positive
    mlp_width: Positive

    def facts(self) -> BackboneFacts:
        return BackboneFacts(self.depth, self.width, self.heads, causal=True)


# --- routers ---


class RouterConfig(Member):
    """Keys that every router has."""

    not_options: ClassVar[tuple[str, ...]] = (
        *Member.not_options,
        *("attention", "detach", "corrupt", "corrupt_phase", "corrupt_strength", "corrupt_token"),
    )

    attention: Literal["trained", "random"]
    detach: bool
    corrupt: Literal["none", "shuffle", "sink", "noise"]
    corrupt_phase: Literal["train", "eval", "both"]
    corrupt_strength: float = Field(ge=0)
    corrupt_token: Index


class DenseRouter(RouterConfig):
    """`router=dense`."""


class LinearRouter(RouterConfig):
    """`router=linear`."""

    bias: bool
    init_std: float = Field(ge=0)
    normalize_input: bool


class PredictorRouter(RouterConfig):
    """`router=predictor`."""

    init_std: float = Field(ge=0)


class MLPRouter(RouterConfig):
    """`router=mlp`."""

    hidden: Positive | None
    normalize_input: bool


class ClassAttentionRouter(RouterConfig):
    """`router=cls_attention`."""

    head_reduction: Literal["mean", "max", "median", "head"]
    head: Index | None


class ValueAttentionRouter(ClassAttentionRouter):
    """`router=value_attention`."""


class HaltingRouter(RouterConfig):
    """`router=halting`."""

    gamma: float
    beta: float
    channel: Index


class AttentionReceivedRouter(ClassAttentionRouter):
    """`router=amod`."""

    exclude_queries: list[TokenKind]
    exclude_keys: list[TokenKind]


class MixRouter(AttentionReceivedRouter):
    """`router=mix`."""

    alpha: float = Field(ge=0, le=1)
    learn_alpha: bool
    bias: bool
    init_std: float = Field(ge=0)
    normalize_input: bool


class AttentionVarianceRouter(RouterConfig):
    """`router=attention_variance`."""

    form: Literal["squared", "absolute", "literal"]
    query: Literal["cls", "gap", "all"]


class AttentionMedADRouter(RouterConfig):
    """`router=attention_medad`."""

    inner: Literal["heads", "patches", "global"]
    median: Literal["mid", "lower"]
    query: Literal["cls", "gap", "all"]


class SubspaceRouter(RouterConfig):
    """`router=subspace`."""

    dims: list[Index] = Field(min_length=1)


class RandomRouter(RouterConfig):
    """`router=random`."""

    mode: Literal["iid", "fixed", "strided"]


class ConstantRouter(RouterConfig):
    """`router=constant`."""

    value: float


class OutsideRouter(RouterConfig, Outside):
    """A router from outside the package."""


# --- scalings ---


class ScalingConfig(Member):
    """Keys that every scaling has."""


class NoScaling(ScalingConfig):
    """`scaling=none`."""

    target: Target


class Multiply(ScalingConfig):
    """`scaling=multiply`."""

    normalize: Normalize
    target: Target


class StraightThrough(Multiply):
    """`scaling=straight_through`."""

    form: Literal["value", "mask", "stop_gradient"]


class SoftMix(ScalingConfig):
    """`scaling=soft_mix`."""

    evaluate: Literal["hard", "soft"]


class Top1Probability(ScalingConfig):
    """`scaling=top1_probability`."""


class OutsideScaling(ScalingConfig, Outside):
    """A scaling from outside the package."""


# --- capacities ---


class CapacityConfig(Member):
    """Keys that every capacity has; they are options of its class too."""

    order: Literal["highest", "lowest"]
    protect: Literal["none", "class", "prefix"]
    persist: Literal["per_layer", "hierarchical"]


class FractionCapacity(CapacityConfig):
    """Capacities that keep a stated fraction of the tokens."""

    fraction: Fraction | list[Fraction]
    fraction_last: Fraction | None
    depth_schedule: Literal["constant", "linear", "cosine", "power"]
    warmup: float = Field(ge=0, lt=1)
    warmup_hold: float = Field(ge=0, lt=1)
    warmup_start: Fraction
    warmup_shape: Literal["linear", "cosine"]
    scope: Scope


class TopK(FractionCapacity):
    """`capacity=topk`."""

    rounding: Literal["floor", "ceil", "round"]
    count: Literal["current", "initial"]
    count_prefix: bool


class Gumbel(FractionCapacity):
    """`capacity=gumbel`."""

    temperature: float = Field(gt=0)
    rounding: Literal["floor", "ceil", "round"]


class Percentile(FractionCapacity):
    """`capacity=percentile`."""

    compare: Literal["ge", "gt"]
    interpolation: Literal["linear", "lower", "higher", "midpoint", "nearest"]


class Threshold(CapacityConfig):
    """`capacity=threshold`."""

    threshold: float | list[float]


class Argmax(CapacityConfig):
    """`capacity=argmax`."""


class InverseTransform(FractionCapacity):
    """`capacity=inverse_transform`."""

    points: Literal["ends", "middles"]
    sort: bool
    at_least: Positive
    count: Literal["current", "initial"]


class OutsideCapacity(CapacityConfig, Outside):
    """A capacity from outside the package."""


# --- placements ---


class PlacementConfig(Member):
    """Keys that every placement has."""

    not_options: ClassVar[tuple[str, ...]] = (
        *Member.not_options,
        *("active", "sublayer", "attention_source", "lag", "attention_fill"),
    )

    active: Literal["both", "train", "eval"]
    sublayer: SubLayer
    attention_source: Literal["previous", "lag", "last_dense", "same"] | Index
    lag: Positive
    attention_fill: Literal["none", "zero", "mean", "carry"]


class Alternate(PlacementConfig):
    """`placement=alternate`."""

    first: Index
    stride: Positive


class Later(PlacementConfig):
    """`placement=later`."""

    first: Index | None


class Every(PlacementConfig):
    """`placement=every`."""

    first: Index


class Stages(PlacementConfig):
    """`placement=stages`."""

    layers: Annotated[list[Index], Field(min_length=1)] | None


class Interleaved(PlacementConfig):
    """`placement=bilayer` and `placement=trilayer`."""


class Listed(PlacementConfig):
    """`placement=list`."""

    layers: list[Index] = Field(min_length=1)
    base: Literal[0, 1]


class OutsidePlacement(PlacementConfig, Outside):
    """A placement from outside the package."""


# --- bypass and visibility ---


class BypassConfig(Member):
    """Keys that every bypass has."""


class Drop(BypassConfig):
    """`bypass=drop`."""

    train: Literal["drop", "mask"]


class Fuse(BypassConfig):
    """`bypass=fuse`."""

    weights: Literal["score", "softmax", "mean"]
    temperature: float = Field(gt=0)
    temperature_unit: Literal["absolute", "spread"]


class Merge(BypassConfig):
    """`bypass=merge`."""

    merged: Index | Annotated[float, Field(gt=0, lt=1)] | list[Index]
    inflect: float = Field(ge=-1, le=1)
    proportional: bool


class Ponder(BypassConfig):
    """`bypass=ponder` and `bypass=ponder_masked`."""

    average: Literal["all", "prefix"]


class OutsideBypass(BypassConfig, Outside):
    """A bypass from outside the package."""


class VisibilityConfig(Member):
    """Keys that every visibility has."""


class OutsideVisibility(VisibilityConfig, Outside):
    """A visibility from outside the package."""


MEMBER_MODELS: Mapping[str, Mapping[str, type[Member]]] = MappingProxyType(
    {
        "router": {
            "dense": DenseRouter,
            "linear": LinearRouter,
            "predictor": PredictorRouter,
            "mlp": MLPRouter,
            "amod": AttentionReceivedRouter,
            "cls_attention": ClassAttentionRouter,
            "attention_variance": AttentionVarianceRouter,
            "attention_medad": AttentionMedADRouter,
            "subspace": SubspaceRouter,
            "mix": MixRouter,
            "value_attention": ValueAttentionRouter,
            "halting": HaltingRouter,
            "random": RandomRouter,
            "constant": ConstantRouter,
        },
        "scaling": {
            "multiply": Multiply,
            "none": NoScaling,
            "straight_through": StraightThrough,
            "soft_mix": SoftMix,
            "top1_probability": Top1Probability,
        },
        "capacity": {
            "topk": TopK,
            "gumbel": Gumbel,
            "percentile": Percentile,
            "threshold": Threshold,
            "argmax": Argmax,
            "inverse_transform": InverseTransform,
        },
        "placement": {
            "alternate": Alternate,
            "later": Later,
            "every": Every,
            "stages": Stages,
            "bilayer": Interleaved,
            "trilayer": Interleaved,
            "list": Listed,
        },
        "bypass": {
            "skip": BypassConfig,
            "project": BypassConfig,
            "drop": Drop,
            "fuse": Fuse,
            "ponder": Ponder,
            "ponder_masked": Ponder,
            "merge": Merge,
        },
        "visibility": {"kept": VisibilityConfig, "all": VisibilityConfig},
    }
)
"""Axis -> name of a shipped member -> the model of its keys."""

OUTSIDE_MODELS: Mapping[str, type[Member]] = MappingProxyType(
    {
        "router": OutsideRouter,
        "scaling": OutsideScaling,
        "capacity": OutsideCapacity,
        "placement": OutsidePlacement,
        "bypass": OutsideBypass,
        "visibility": OutsideVisibility,
    }
)
"""Axis -> the model of a member from outside the package."""


# --- auxiliary losses ---


class LossConfig(Strict):
    """Keys that every auxiliary loss has; the others are options of the function behind it.

    weight: its coefficient in the loss; 0 switches it off. schedule: the coefficient over training, from its full value
    at once (`constant`) or growing to it (`linear`, or `sine`: a quarter of a sine wave).
    """

    not_options: ClassVar[tuple[str, ...]] = ("class_path", "weight", "schedule")

    class_path: str = Field(alias="_target_", min_length=1)
    weight: float = Field(ge=0)
    schedule: Literal["constant", "linear", "sine"]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the function at `class_path`."""
        own = {key: getattr(self, key) for key in type(self).model_fields if key not in self.not_options}
        return own | dict(self.model_extra or {})


class RatioLoss(LossConfig):
    """`losses=ratio`."""

    target: Fraction | list[Fraction] | None
    over: Literal["sample", "batch", "layers"]


class HingeLoss(LossConfig):
    """`losses=hinge`."""

    target: Fraction


class L1TargetLoss(LossConfig):
    """`losses=l1_target`."""

    target: Fraction
    layers: Literal["all", "routed"]


class HaltingPriorLoss(LossConfig):
    """`losses=halting_prior`."""

    center: float
    std: float = Field(gt=0)
    form: Literal["paper", "code"]
    skip_first_sample: bool


class OutsideLoss(LossConfig, Outside):
    """A loss from outside the package."""


LOSS_MODELS: Mapping[str, type[LossConfig]] = MappingProxyType(
    {
        "ratio": RatioLoss,
        "hinge": HingeLoss,
        "l1_target": L1TargetLoss,
        "load": LossConfig,
        "z": LossConfig,
        "bce_auxiliary": LossConfig,
        "ponder": LossConfig,
        "halting_prior": HaltingPriorLoss,
    }
)
"""Name of a shipped loss -> the model of its keys."""


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


# --- the task ---


class TaskConfig(Member, Outside):
    """What is trained for: the class that owns data, head, loss and metrics, and the options that are given to it."""


# --- the whole ---


class PathsConfig(Strict):
    """Where runs are written and data sets are looked for."""

    runs: str = Field(min_length=1)
    data: str = Field(min_length=1)


class Config(Strict):
    """A whole, checked configuration; `routing_lab.config.load` and `check` make it."""

    backbone: Annotated[TimmBackbone | LlamaBackbone, Field(discriminator="kind")]
    router: SerializeAsAny[RouterConfig]
    scaling: SerializeAsAny[ScalingConfig]
    capacity: SerializeAsAny[CapacityConfig]
    placement: SerializeAsAny[PlacementConfig]
    bypass: SerializeAsAny[BypassConfig]
    visibility: SerializeAsAny[VisibilityConfig]
    losses: dict[str, SerializeAsAny[LossConfig]]
    isoflop: IsoflopConfig
    task: TaskConfig
    data: DataConfig
    init: InitConfig
    train: TrainConfig
    seed: Index
    method: Name | None
    study: Name | None
    arm: Name | None
    name: Name | None
    rerun: bool
    paths: PathsConfig
    wandb: WandbConfig
    runtime: RuntimeConfig
