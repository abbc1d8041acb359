"""What the axes of a routed layer are given and what they return.

Every axis is an independent module: tensors in, tensors out. A member from outside the package subclasses `Router`,
`Capacity`, `Scaling` or `Bypass` and implements one method.

Shape legend: B batch, N tokens that entered the layer, K kept tokens, H heads, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from routing_lab.attention import AttentionStatistics, StatisticsRequest
from routing_lab.axes.facts import (
    BypassTraits,
    CapacityTraits,
    RouterTraits,
    ScalingTraits,
    ScoreScale,
)
from routing_lab.routing.backbone import Block
from routing_lab.routing.cache import KVCache
from routing_lab.routing.noise import NoiseSource
from routing_lab.routing.tokens import Selection, Tokens


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
        protect: prefix tokens that are always kept: `none`, `class` or all of `prefix`.
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
