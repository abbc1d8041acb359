"""What the axes of a routed layer are given and what they return.

Every axis is an independent module: tensors in, tensors out. A member from outside the package subclasses `Router`,
`Capacity`, `Scaling` or `Bypass` and implements one method.

Shape legend: B batch, N tokens that entered the layer, K kept tokens, H heads, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from routing_lab.attention import AttentionMap, AttentionStatistics, StatisticsRequest
from routing_lab.axes.facts import (
    SUBLAYERS,
    BypassTraits,
    CapacityTraits,
    RouterTraits,
    ScalingTraits,
    ScoreScale,
    SubLayer,
)
from routing_lab.routing.cache import KVCache, LayerCache
from routing_lab.routing.noise import NoiseSource
from routing_lab.routing.tokens import Positioned, Selection, Tokens
from routing_lab.routing.work import Work

MapWatch = Callable[[int, AttentionMap, Positioned, Positioned], None]
"""Is shown an attention map: the number of the attention among those of its block, the map, its queries and its keys.

A differential attention shows both its maps, as twice the heads; what a policy weighs is shown without it.
"""


@dataclass(frozen=True)
class LayerSpec:
    """Where an axis object stands: constants of the backbone and of one routed layer.

    Args:
        width: D, width of the residual stream.
        heads: H, number of attention heads.
        layer: zero-based index of the routed layer.
        prefix: kinds of the prefix tokens in order, for instance ("class", "registers", "registers").
        rank: position of this layer among the routed ones.
        num_routed: how many layers are routed.
        seed: seed of the routing noise.
    """

    width: int
    heads: int
    layer: int = 0
    prefix: tuple[str, ...] = ()
    rank: int = 0
    num_routed: int = 1
    seed: int = 0


@dataclass
class RunState:
    """What a forward pass is told about the run.

    Args:
        progress: how far training has come, in [0, 1]; 1 in evaluation.
        noise: source of the routing noise.
        training: whether the model is in training mode.
        initial_tokens: number of tokens that entered the first layer.
        informative: [B, P] bool, the patches that decide the class, where the data know; only an oracle reads them.
        cache: keys and values of earlier calls, to which the layers add theirs; None: there are none.
    """

    progress: float
    noise: NoiseSource
    training: bool
    initial_tokens: int
    informative: Tensor | None = None
    cache: KVCache | None = None


@dataclass
class RouterInput:
    """What a router may look at.

    Args:
        tokens: the tokens that enter the layer; `tokens.x` is the residual stream [B, N, D], not normalised.
        attention: statistics of the source layer's map, [B, H, N], aligned with `tokens`; None unless asked for.
        state: the run's state, with the noise source.
    """

    tokens: Tokens
    attention: AttentionStatistics | None
    state: RunState


class Router(nn.Module, ABC):
    """The source of one score per token; a higher score is kept first.

    Subclasses implement `score`. Class attribute `traits` states what the router needs (an attention map, ...).
    """

    traits: ClassVar[RouterTraits] = RouterTraits()

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec

    def request(self) -> StatisticsRequest | None:
        """What this router needs of its source layer's attention map: what `traits.attention` names; None: nothing."""
        needed = self.traits.attention
        if not needed:
            return None
        return StatisticsRequest(
            received="received" in needed, class_row="class_row" in needed, value_norm="value_norm" in needed
        )

    @abstractmethod
    def score(self, inputs: RouterInput) -> Tensor:
        """Scores [B, N], one for each token that entered the layer."""

    def predicted(self, inputs: RouterInput) -> Tensor | None:
        """[B, N] what is chosen by in evaluation instead of the score, on its scale; None: the score itself."""
        return None

    def halting(self, tokens: Tokens) -> Tensor | None:
        """[B, N] the part of its halting mass that each token which leaves the layer spends here; None: it has none."""
        return None

    def forward(self, inputs: RouterInput) -> Tensor:
        """`score` in at least float32, whatever the surrounding precision."""
        return self.read(inputs)[0]

    def read(self, inputs: RouterInput) -> tuple[Tensor, Tensor | None]:
        """`forward`, and the logits [B, N, E] that a learned router makes its scores of.

        E is 1 where the score is the log odds of keeping, 2 where a router weighs "keep" against "bypass".
        """
        x = inputs.tokens.x
        with torch.autocast(x.device.type, enabled=False):
            score, logits = self.scored(inputs)
        expected = x.shape[:2]
        if score.shape != expected:
            raise ValueError(
                f"{type(self).__name__}.score returned shape {tuple(score.shape)}; one score per token, "
                f"{tuple(expected)}, is needed"
            )
        return score if score.dtype == torch.float64 else score.float(), logits

    def scored(self, inputs: RouterInput) -> tuple[Tensor, Tensor | None]:
        """Scores [B, N] and the logits behind them, None for a router that is not learned."""
        score = self.score(inputs)
        return score, log_odds(score, self.traits.scale).unsqueeze(-1) if self.traits.learned else None


class TwoWayRouter(Router):
    """A learned router that weighs "keep" against "bypass" by a softmax over two logits; subclasses implement `logits`.

    The score is the probability of keeping, or its logarithm where `traits.log_probability` says so.
    """

    @abstractmethod
    def logits(self, inputs: RouterInput) -> Tensor:
        """[B, N, 2], those of keeping first."""

    def score(self, inputs: RouterInput) -> Tensor:
        return self.scored(inputs)[0]

    def scored(self, inputs: RouterInput) -> tuple[Tensor, Tensor]:
        logits = self.logits(inputs)
        if self.traits.log_probability:
            # More digits near probability one than log-softmax has.
            return nn.functional.logsigmoid(logits[..., 0] - logits[..., 1]), logits
        return logits.softmax(dim=-1)[..., 0], logits


def log_odds(scores: Tensor, scale: ScoreScale) -> Tensor:
    """log p / (1 - p) of keeping, from scores on the scale that `RouterTraits.scale` names."""
    if scale == "logit":
        return scores
    smallest = torch.finfo(scores.dtype).tiny
    if scale == "probability":
        return scores.clamp_min(smallest).log() - (1 - scores).clamp_min(smallest).log()
    return scores - (-torch.expm1(scores)).clamp_min(smallest).log()


class Capacity(nn.Module, ABC):
    """The budget and the rule: turns scores into a selection.

    Subclasses implement `select`. One from outside the package may say beforehand what it keeps: `traits.budget` names
    the option that stands in the run's name, and a static method `nominal_kept(offer, **options)` gives the number of
    tokens, see `routing_lab.axes.budget.Offer`, or None where that depends on the scores.

    Args:
        order: whether the highest or the lowest scores are kept.
        protect: prefix tokens that are always kept and count towards the budget: `none`, `class` or all of `prefix`.
        persist: `per_layer`: every layer chooses among all tokens, so that a bypassed one may return
            (Mixture-of-Depths); `hierarchical`: only among those that the routed layer before it kept
            (Mixture-of-Recursions).
        reserve: so many first tokens of a sequence are kept whatever their scores, besides the budget (D-LLM).

    Attributes:
        compares: in evaluation, whether a token is kept depends on later tokens.
    """

    traits: ClassVar[CapacityTraits] = CapacityTraits()

    def __init__(
        self,
        spec: LayerSpec,
        *,
        order: Literal["highest", "lowest"] = "highest",
        protect: Literal["none", "class", "prefix"] = "prefix",
        persist: Literal["per_layer", "hierarchical"] = "per_layer",
        reserve: int = 0,
    ) -> None:
        super().__init__()
        self.reserve = reserve
        self.compares = self.traits.compares
        self.spec = spec
        self.order = order
        self.persist = persist
        self.num_protected = {"none": 0, "class": min(1, len(spec.prefix)), "prefix": len(spec.prefix)}[protect]

    def forward(self, scores: Tensor, state: RunState, valid: Tensor | None = None) -> Selection:
        """The tokens to keep, from scores [B, N]; valid [B, N] bool is False at padding, which is never kept."""
        scores = scores.detach()
        if self.order == "lowest":
            scores = -scores
        return self.select(scores, state) if valid is None else self.select_ragged(scores, valid, state)

    def select_ragged(self, scores: Tensor, valid: Tensor, state: RunState) -> Selection:
        """`select` where samples have different numbers of tokens, and so different budgets: each by itself."""
        mask = torch.zeros_like(valid)
        for sample, present in enumerate(valid):
            mask[sample, present] = self.select(scores[sample, present].unsqueeze(0), state).mask().squeeze(0)
        return Selection.from_mask(mask)

    def aimed_fraction(self, progress: float) -> float | None:
        """The fraction of the tokens to keep when training has come as far as `progress`; None: the rule has none."""
        return None

    @abstractmethod
    def select(self, scores: Tensor, state: RunState) -> Selection:
        """The selection for scores [B, N] of which the highest are to be kept (`order` is already applied)."""


@dataclass
class Gates:
    """How scores enter the output of a layer.

    Args:
        kept: [B, N] multiplier of the update of kept tokens; None: exactly one, nothing is multiplied.
        bypassed: [B, N] multiplier of what bypassed tokens get; None: exactly one.
        every_token: the update of every token is computed and weighted by `kept`, whatever the selection.
        straight_through: `kept` is exactly one at kept tokens (and with `every_token` zero at the others): it is there
            for its gradient, and the output is to the last bit that without it.
    """

    kept: Tensor | None = None
    bypassed: Tensor | None = None
    every_token: bool = False
    straight_through: bool = False


class Scaling(nn.Module, ABC):
    """The output rule: how a token's score enters the output (MoD Eq. 2, A-MoD Eq. 5, DTRNet Eq. 3).

    Args:
        target: `update` multiplies what the block adds, y = x + g u(x); `output` multiplies the block's whole output
            and adds the input again, y = x + g (x + u(x)), the double residual of several public MoD codes.
    """

    traits: ClassVar[ScalingTraits] = ScalingTraits()

    def __init__(self, *, target: Literal["update", "output"] = "update") -> None:
        super().__init__()
        self.target = target

    @abstractmethod
    def gates(self, scores: Tensor, selection: Selection) -> Gates:
        """The multipliers for scores [B, N] and the tokens kept."""

    def forward(self, scores: Tensor, selection: Selection) -> Gates:
        return self.gates(scores, selection)


class Block(ABC):
    """What a backbone adapter offers for one pre-norm block, h = x + a(x), y = h + m(h).

    The adapter's block is a view of the backbone's own modules, made for one forward: it owns no parameters, and what
    is changed in the backbone has its effect.

    Attributes:
        query_key_shape: shape (query width + key width, D) of the joint query and key projection.
        projects_together: queries, keys and values come from one module, so that whoever wants one computes all.
        recomputed: the backward pass recomputes the block (activation checkpointing).
        sublayers: what of the block can be routed by itself.
        one_map: attention is one map a head, each row a distribution over keys, of which scores can be made.
    """

    query_key_shape: tuple[int, int]
    sublayers: tuple[SubLayer, ...] = SUBLAYERS
    one_map: bool = True
    projects_together: bool = False
    recomputed: bool = False

    @abstractmethod
    def dense(self, tokens: Positioned, context: Any) -> Tensor:
        """The untouched block's output [B, N, D]."""

    @abstractmethod
    def attend(
        self,
        queries: Positioned,
        context: Any,
        keys: Positioned | None = None,
        *,
        visible: Tensor | None = None,
        stays: Tensor | None = None,
    ) -> Tensor:
        """The attention branch a, without the residual.

        Args:
            queries: [B, K, D] tokens that attend.
            context: what the backbone's blocks share in this forward.
            keys: [B, M, D] tokens attended to; None: the queries themselves.
            visible: [B, K, M] bool, True where a query may attend to a valid key; None: to all.
            stays: [B, M] bool, the keys that tokens of later calls may attend to, see `caching`; None: all.
        """

    @abstractmethod
    def attend_with_statistics(
        self, tokens: Positioned, context: Any, request: StatisticsRequest, *, projection: Tensor | None = None
    ) -> tuple[Tensor, AttentionStatistics]:
        """`attend(tokens, context)` and the requested statistics of its map.

        The output is `attend`'s to rounding, since one pass computes both; with `request.exact` it is so bit by bit.

        projection: `query_key_shape`, standard normal; if given, the statistics are those of the map whose queries and
            keys are projected by it, scaled to the spread of the trained weights (`router.attention=random`).
        """

    def attends_in_one_pass(self, request: StatisticsRequest, projection: Tensor | None = None) -> bool:
        """Whether `attend_with_statistics` reads columns off the map that attention makes, and makes none besides."""
        return False

    @abstractmethod
    def statistics(
        self,
        queries: Positioned,
        context: Any,
        request: StatisticsRequest,
        keys: Positioned | None = None,
        *,
        projection: Tensor | None = None,
    ) -> AttentionStatistics:
        """Statistics of the map of queries [B, K, D] over keys [B, M, D]; None: over the queries themselves."""

    @abstractmethod
    def mlp(self, x: Tensor) -> Tensor:
        """The MLP branch m, without the residual."""

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """x W_V W_O (DTRNet's linear path): the attention branch of a token that attends to itself alone."""

    @abstractmethod
    def called(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """compute(x), what leaves the layer for the tokens x that enter it, with the forward hooks of the block."""

    @abstractmethod
    def weighing(self, policy: Tensor) -> Block:
        """This block with an attention that weighs every key by policy [B, N], see `policy_softmax`."""

    @abstractmethod
    def caching(self, cache: LayerCache) -> Block:
        """This block with an attention that also sees the keys of earlier calls, and adds its own to them."""

    @abstractmethod
    def hiding(self, mask: Tensor) -> Block:
        """This block with norm(x m) m as the input of either branch; mask m [B, N] bool, False at hidden tokens."""

    @abstractmethod
    def watched(self, watch: MapWatch, part: int = 0) -> Block:
        """This block, which shows `watch` every map that it attends by, unless keys come from a cache.

        part: the number of its first attention.
        """


class Bypass(nn.Module, ABC):
    """The fate of tokens that were not kept. Bypassed tokens stay (`update`), or they are removed (`Reduction`)."""

    traits: ClassVar[BypassTraits] = BypassTraits()
    identity: ClassVar[bool] = False
    """Nothing is added: bypassed tokens leave bit-identical, and `update` is never called."""

    @abstractmethod
    def update(self, x: Tensor, block: Block) -> Tensor:
        """What bypassed tokens x [B, R, D] get added instead of the update of kept ones."""


class Masking(nn.Module, ABC):
    """A fate that hides tokens for good and removes none: every token is computed, hidden ones from an input of zero.

    A hidden token's key gets logits of -1000 besides, unless `visibility=all` shows it.
    """

    traits: ClassVar[BypassTraits] = BypassTraits(final=True, saves=False)

    @abstractmethod
    def hide(self, tokens: Tokens, selection: Selection) -> Tokens:
        """The tokens [B, N] that the block is given; those that are not kept are to be hidden."""


class Reduction(nn.Module, ABC):
    """A fate that removes tokens for good: later layers see what `reduce` returns."""

    traits: ClassVar[BypassTraits] = BypassTraits(removes=True)
    hides: bool = False
    """In training no token is removed: attention weighs keys by the decision, which so gets a gradient."""

    def request(self) -> StatisticsRequest | None:
        """What this reduction needs of the layer's own attention map."""
        return None

    @abstractmethod
    def reduce(
        self, tokens: Tokens, selection: Selection, scores: Tensor, attention: AttentionStatistics | None
    ) -> Tokens:
        """The tokens that remain: the kept ones first and in order, then new ones that stand for removed tokens.

        Args:
            tokens: with sub-layer `mlp` the tokens after attention and its residual; with `block` those that entered.
            selection: the kept tokens.
            scores: [B, N].
            attention: what `request` asked for.
        """


@dataclass
class LayerTrace:
    """What routing did in one layer.

    Args:
        scores: [B, N] float32, aligned with the tokens that entered the layer; None in a dense layer.
        kept: [B, K] int64, indices of kept tokens among those that entered, ascending, -1 at padding.
        counts: [B] int64, number of kept tokens.
        tokens: number of tokens that leave the layer.
        origin: [B, N] int64, patch that each entering token came from, -1 where it has none.
        gate: [B, K] multiplier of the kept tokens' update, None where nothing was multiplied.
        source: [B, N0] int64, for each token that entered the first layer the position, among those that leave this
            layer, of the token that stands for it, -1 where none does; None while no token has been removed.
        size: [B, tokens] how many of the first tokens each leaving token stands for; None while each stands for itself.
        halting: [B, tokens] the part of its halting mass that each leaving token spent here; None without halting.
        valid: [B, N] bool, False at padding among the entering tokens; None without padding.
        predicted: [B, N] log odds of keeping, what a router's auxiliary predictor says; None without one.
        logits: [B, N, E] what a learned router made its scores of, see `Router.read`.
        relaxed: [B, N] the decision as 0 or 1 with a gradient, where the capacity or the bypass makes one in training.
        fraction: the fraction of tokens that the capacity aims at; None where it has none.
        remaining: [B] int64, number of tokens that leave the layer; None in a layer that removes none.
        work: what the layer computed.
    """

    scores: Tensor | None
    kept: Tensor
    counts: Tensor
    tokens: int
    origin: Tensor
    gate: Tensor | None = None
    source: Tensor | None = None
    size: Tensor | None = None
    halting: Tensor | None = None
    valid: Tensor | None = None
    predicted: Tensor | None = None
    logits: Tensor | None = None
    relaxed: Tensor | None = None
    fraction: float | None = None
    remaining: Tensor | None = None
    work: Work = field(default_factory=Work)

    @property
    def entering(self) -> Tensor:
        """[B] int64: number of tokens that entered the layer."""
        if self.valid is not None:
            return self.valid.sum(dim=1)
        return torch.full_like(self.counts, self.origin.shape[1])

    @property
    def treated(self) -> Tensor:
        """[B] int64: number of tokens that the routed part computes: those kept, or where tokens are removed those
        left.
        """
        return self.counts if self.remaining is None else self.remaining

    def mask(self) -> Tensor:
        """[B, N] bool: which of the tokens that entered the layer were kept."""
        batch, tokens = self.origin.shape
        mask = torch.zeros(batch, tokens + 1, dtype=torch.bool, device=self.kept.device)
        return mask.scatter(1, self.kept.masked_fill(self.kept < 0, tokens), True)[:, :tokens]


@dataclass
class Trace:
    """What routing did in one forward: `trace[l]` is layer l's part, zero-based."""

    layers: list[LayerTrace] = field(default_factory=list)

    def __getitem__(self, layer: int) -> LayerTrace:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)
