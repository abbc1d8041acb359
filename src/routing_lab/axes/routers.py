"""The axis `router`: where a token's score comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from routing_lab.axes.base import Beside, Index, Member, Name, Outside, Positive, Refusal, registry, shipped
from routing_lab.axes.facts import AttentionStatistic, BackboneFacts, MapRows, RouterTraits, TokenKind

HeadReduction: TypeAlias = Literal["mean", "max", "median", "head"]
Query: TypeAlias = Literal["cls", "gap", "all"]

RECEIVED: frozenset[AttentionStatistic] = frozenset({"received"})
CLASS_ROW: frozenset[AttentionStatistic] = frozenset({"class_row"})

PUBLISHED_BETAS = {192: 30.0, 384: 75.0}
"""Width of the backbone -> A-ViT's shift of the halting score (README of the released code: DeiT-T and DeiT-S)."""


class RouterConfig(Member):
    """Keys that every router has."""

    not_options: ClassVar[tuple[str, ...]] = (
        *Member.not_options,
        *("attention", "detach", "corrupt", "corrupt_phase", "corrupt_strength", "corrupt_token"),
    )
    given: ClassVar[frozenset[str]] = frozenset({"self", "spec"})
    facts: ClassVar[RouterTraits] = RouterTraits()

    attention: Literal["trained", "random"] = "trained"
    detach: bool = True
    corrupt: Literal["none", "shuffle", "sink", "noise"] = "none"
    corrupt_phase: Literal["train", "eval", "both"] = "both"
    corrupt_strength: float = Field(default=1.0, ge=0)
    corrupt_token: Index = 0

    @property
    def traits(self) -> RouterTraits:
        """Its facts. Raises UnknownTarget."""
        return self.stated(self.facts)

    @property
    def needs_class_token(self) -> bool:
        """Whether the score reads the class token."""
        return self.traits.needs_class_token

    @property
    def map_rows(self) -> MapRows:
        """The rows of an attention map that the score is made of."""
        if not self.traits.attention:
            return "none"
        return "all" if "received" in self.traits.attention else "one"

    def weights(self, width: int) -> int | None:
        """Entries of its matrices, each a multiply-accumulate for every token; None: only its class knows."""
        return 0 if self.states_facts and not self.traits.learned else None

    def refusals(self, facts: BackboneFacts) -> Iterator[Refusal]:
        if self.needs_class_token and "class" not in facts.prefix:
            yield "router", self.name, "reads the class token, which this backbone does not have"
        if self.corrupt == "sink" and facts.tokens is not None and self.corrupt_token >= facts.tokens:
            yield "router.corrupt_token", self.corrupt_token, f"the backbone has tokens 0 to {facts.tokens - 1}"


class HeadRouterConfig(RouterConfig):
    """Routers that combine the heads of a map."""

    head_reduction: HeadReduction = "mean"
    head: Index | None = None

    def refusals(self, facts: BackboneFacts) -> Iterator[Refusal]:
        yield from super().refusals(facts)
        if self.head_reduction == "head" and self.head is None:
            yield "router.head", None, "router.head_reduction=head needs the zero-based index of a head"
        elif self.head is not None and self.head >= facts.heads:
            yield "router.head", self.head, f"the backbone has heads 0 to {facts.heads - 1}"

    def remarks(self, beside: Beside) -> Iterator[str]:
        if self.head is not None and self.head_reduction != "head":
            yield f"router.head={self.head} has no effect without router.head_reduction=head"


class QueryRouterConfig(RouterConfig):
    """Routers that read the attention of one query, the class token or a mean of tokens."""

    facts: ClassVar[RouterTraits] = RouterTraits(attention=CLASS_ROW, positive=True, sees_later=True)

    query: Query = "cls"

    @property
    def needs_class_token(self) -> bool:
        return self.query == "cls"

    @property
    def map_rows(self) -> MapRows:
        return "one" if self.query == "cls" else "all"


class DenseRouterConfig(RouterConfig):
    """`router=dense`."""

    facts: ClassVar[RouterTraits] = RouterTraits(routes=False)

    name: Name = "dense"
    class_path: str = shipped("routing_lab.routing.routers.DenseRouter")


class ProjectionRouterConfig(RouterConfig):
    """Routers that project the token to a number."""

    bias: bool = False
    init_std: float = Field(default=0.02, ge=0)
    normalize_input: bool = False

    def weights(self, width: int) -> int:
        return width


class LinearRouterConfig(ProjectionRouterConfig):
    """`router=linear`."""

    facts: ClassVar[RouterTraits] = RouterTraits(learned=True, boundary=0.0)

    name: Name = "linear"
    class_path: str = shipped("routing_lab.routing.routers.LinearRouter")
    auxiliary: bool = False

    def weights(self, width: int) -> int:
        return width * (2 if self.auxiliary else 1)


class PredictorRouterConfig(RouterConfig):
    """`router=predictor`."""

    facts: ClassVar[RouterTraits] = RouterTraits(
        learned=True, boundary=math.log(0.5), log_probability=True, sees_later=True
    )

    name: Name = "predictor"
    class_path: str = shipped("routing_lab.routing.routers.PredictorRouter")
    init_std: float = Field(default=0.02, ge=0)

    def weights(self, width: int) -> int:
        half, quarter = width // 2, width // 4
        return width * width + width * half + half * quarter + quarter * 2


class MLPRouterConfig(RouterConfig):
    """`router=mlp`."""

    facts: ClassVar[RouterTraits] = RouterTraits(learned=True, boundary=0.5, probability=True, positive=True)

    name: Name = "mlp"
    class_path: str = shipped("routing_lab.routing.routers.MLPRouter")
    hidden: Positive | None = None
    normalize_input: bool = False
    norm: Literal["none", "rms"] = "none"
    init_bias: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None

    def weights(self, width: int) -> int:
        hidden = width // 2 if self.hidden is None else self.hidden
        return width * hidden + 2 * hidden


class ClassAttentionRouterConfig(HeadRouterConfig):
    """`router=cls_attention`."""

    facts: ClassVar[RouterTraits] = RouterTraits(
        attention=CLASS_ROW, positive=True, unit_mass=True, needs_class_token=True
    )

    name: Name = "cls_attention"
    class_path: str = shipped("routing_lab.routing.routers.ClassAttentionRouter")


class ValueAttentionRouterConfig(HeadRouterConfig):
    """`router=value_attention`."""

    facts: ClassVar[RouterTraits] = RouterTraits(
        attention=frozenset({"class_row", "value_norm"}), positive=True, unit_mass=True, needs_class_token=True
    )

    name: Name = "value_attention"
    class_path: str = shipped("routing_lab.routing.routers.ValueAttentionRouter")


class HaltingRouterConfig(RouterConfig):
    """`router=halting`."""

    facts: ClassVar[RouterTraits] = RouterTraits(halts=True)

    name: Name = "halting"
    class_path: str = shipped("routing_lab.routing.routers.HaltingRouter")
    gamma: float = 10.0
    beta: float = 30.0
    channel: Index = 0

    def remarks(self, beside: Beside) -> Iterator[str]:
        yield from super().remarks(beside)
        width = beside.facts.width
        chosen_for = {beta: width for width, beta in PUBLISHED_BETAS.items()}.get(self.beta)
        if chosen_for not in (None, width):
            own = f"{PUBLISHED_BETAS[width]:g} at this one" if width in PUBLISHED_BETAS else "and none at this one"
            yield (
                f"router.beta={self.beta:g} is A-ViT's for a backbone of width {chosen_for}, {own} ({width}): it sets "
                "how large the halting channel must grow before a token halts"
            )


class AttentionReceivedRouterConfig(HeadRouterConfig):
    """`router=amod`."""

    facts: ClassVar[RouterTraits] = RouterTraits(attention=RECEIVED, positive=True, unit_mass=True, sees_later=True)

    name: Name = "amod"
    class_path: str = shipped("routing_lab.routing.routers.AttentionReceivedRouter")
    exclude_queries: list[TokenKind] = Field(default=[])
    exclude_keys: list[TokenKind] = Field(default=[])

    def refusals(self, facts: BackboneFacts) -> Iterator[Refusal]:
        yield from super().refusals(facts)
        present = {*facts.prefix, "self"} | ({"prefix"} if facts.prefix else set())
        for key, kinds in (("exclude_queries", self.exclude_queries), ("exclude_keys", self.exclude_keys)):
            for kind in kinds:
                if kind not in present:
                    message = f"this backbone has no {kind} token; it has {', '.join(sorted(present))}"
                    yield f"router.{key}", kinds, message


class MixRouterConfig(AttentionReceivedRouterConfig, ProjectionRouterConfig):
    """`router=mix`."""

    facts: ClassVar[RouterTraits] = RouterTraits(attention=RECEIVED, learned=True, sees_later=True)

    name: Name = "mix"
    class_path: str = shipped("routing_lab.routing.routers.MixRouter")
    alpha: float = Field(default=0.5, ge=0, le=1)
    learn_alpha: bool = False


class AttentionVarianceRouterConfig(QueryRouterConfig):
    """`router=attention_variance`."""

    name: Name = "attention_variance"
    class_path: str = shipped("routing_lab.routing.routers.AttentionVarianceRouter")
    form: Literal["squared", "sample", "absolute", "literal"] = "squared"

    def refusals(self, facts: BackboneFacts) -> Iterator[Refusal]:
        yield from super().refusals(facts)
        if self.form == "sample" and facts.heads < 2:
            yield "router.form", self.form, "one head has no sample variance; use squared"

    def remarks(self, beside: Beside) -> Iterator[str]:
        yield from super().remarks(beside)
        if self.form == "literal":
            yield (
                "router.form=literal: Eq. 6 as printed is zero for every token, so that the rule for ties decides "
                "which are kept"
            )


class AttentionMedADRouterConfig(QueryRouterConfig):
    """`router=attention_medad`."""

    name: Name = "attention_medad"
    class_path: str = shipped("routing_lab.routing.routers.AttentionMedADRouter")
    inner: Literal["heads", "patches", "global"] = "heads"
    median: Literal["mid", "lower"] = "mid"


class SubspaceRouterConfig(RouterConfig):
    """`router=subspace`."""

    name: Name = "subspace"
    class_path: str = shipped("routing_lab.routing.routers.SubspaceRouter")
    dims: list[Index] = Field(default=[0], min_length=1)

    def refusals(self, facts: BackboneFacts) -> Iterator[Refusal]:
        yield from super().refusals(facts)
        if max(self.dims) >= facts.width:
            yield "router.dims", self.dims, f"the backbone has channels 0 to {facts.width - 1}"


class RandomRouterConfig(RouterConfig):
    """`router=random`."""

    facts: ClassVar[RouterTraits] = RouterTraits(positive=True)

    name: Name = "random"
    class_path: str = shipped("routing_lab.routing.routers.RandomRouter")
    mode: Literal["iid", "fixed", "strided"] = "iid"


class ConstantRouterConfig(RouterConfig):
    """`router=constant`."""

    name: Name = "constant"
    class_path: str = shipped("routing_lab.routing.routers.ConstantRouter")
    value: float = 1.0

    def remarks(self, beside: Beside) -> Iterator[str]:
        if self.corrupt == "shuffle":
            yield "router.corrupt=shuffle has no effect on the scores of router=constant"


class OracleRouterConfig(RouterConfig):
    """`router=oracle`."""

    facts: ClassVar[RouterTraits] = RouterTraits(positive=True, needs_informative=True, sees_later=True)

    name: Name = "oracle"
    class_path: str = shipped("routing_lab.routing.routers.OracleRouter")


class OutsideRouterConfig(RouterConfig, Outside):
    """A router from outside the package."""


ROUTERS = registry(
    DenseRouterConfig,
    LinearRouterConfig,
    PredictorRouterConfig,
    MLPRouterConfig,
    AttentionReceivedRouterConfig,
    ClassAttentionRouterConfig,
    AttentionVarianceRouterConfig,
    AttentionMedADRouterConfig,
    SubspaceRouterConfig,
    MixRouterConfig,
    ValueAttentionRouterConfig,
    HaltingRouterConfig,
    RandomRouterConfig,
    ConstantRouterConfig,
    OracleRouterConfig,
)
