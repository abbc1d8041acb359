"""Output rules: how a token's score enters what the layer adds to it.

Shape legend: B batch, N tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from routing_lab.axes.facts import ScalingTraits
from routing_lab.axes.scalings import (
    MultiplyConfig,
    Normalize,
    NoScalingConfig,
    SoftMixConfig,
    StraightThroughConfig,
    Top1ProbabilityConfig,
)
from routing_lab.routing.base import Gates, Scaling
from routing_lab.routing.tokens import Selection


class Multiply(Scaling):
    """y_i = x_i + g(r_i) u_i: Mixture-of-Depths' rule (Raposo et al. 2024, Eq. 2; A-MoD's Eq. 2).

    Args:
        normalize: g: `raw` r; `sigmoid`; `tanh`; `unit_mean` r / mean |r| over all tokens (N r for scores that sum to
            one); `unit_max` r / max |r|; `softmax_kept` softmax over the kept tokens.
        target: `update` or `output`, see `Scaling`.
    """

    traits: ClassVar[ScalingTraits] = MultiplyConfig.facts

    def __init__(self, *, normalize: Normalize = "raw", **common: Any) -> None:
        super().__init__(**common)
        self.normalize: Normalize = normalize

    def gates(self, scores: Tensor, selection: Selection) -> Gates:
        return Gates(kept=normalized(scores, selection, self.normalize))


class NoScaling(Scaling):
    """y_i = x_i + u_i (A-MoD, Eq. 5): the score selects and nothing else, so a learned router gets no gradient."""

    traits: ClassVar[ScalingTraits] = NoScalingConfig.facts

    def gates(self, scores: Tensor, selection: Selection) -> Gates:
        return Gates()


class StraightThrough(Scaling):
    """The output of `none` with a gradient for the router (Bengio et al. 2013, straight-through estimators).

    Args:
        form: `value`: gate 1 + r - stop(r) on kept tokens, the gradient of a multiplication at gate 1;
            `mask`: gate m + p - stop(p) on every token, with m the selection as 0 or 1: bypassed tokens send a
            gradient too, so that in training the update of every token is computed;
            `stop_gradient`: gate 1 + stop(r) - stop(r) with r kept in the graph: the router's gradient is exactly zero.
        normalize: applied to the score first, as for `multiply`. `sigmoid` keeps the surrogate bounded; with `raw` the
            gradient that reaches the tokens through a linear score grows with the router's weights.
        target: `update` or `output`, see `Scaling`.

    Where the capacity relaxes its decision (`capacity=gumbel`), the gate of `value` and `mask` is that decision, 0 or
    1 with its gradient.
    """

    traits: ClassVar[ScalingTraits] = StraightThroughConfig.facts

    def __init__(
        self,
        *,
        form: Literal["value", "mask", "stop_gradient"] = "value",
        normalize: Normalize = "sigmoid",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.form = form
        self.normalize: Normalize = normalize

    def gates(self, scores: Tensor, selection: Selection) -> Gates:
        if not (self.training and scores.requires_grad):
            return Gates()
        if selection.relaxed is not None and self.form != "stop_gradient":
            return Gates(selection.relaxed, every_token=self.form == "mask", straight_through=True)
        surrogate = normalized(scores, selection, self.normalize)
        if self.form == "stop_gradient":
            return Gates(1 + 0 * surrogate, straight_through=True)
        through = surrogate - surrogate.detach()  # exactly zero
        if self.form == "value":
            return Gates(1 + through, straight_through=True)
        return Gates(selection.mask().to(scores.dtype) + through, every_token=True, straight_through=True)


class SoftMix(Scaling):
    """y_i = x_i + p_i a_i + (1 - p_i) b_i for every token, both paths computed (DTRNet, Eq. 3 and 5).

    Args:
        evaluate: `hard`: in evaluation only the chosen path runs, unweighted (Eq. 2); `soft`: as in training.
    """

    traits: ClassVar[ScalingTraits] = SoftMixConfig.facts

    def __init__(self, *, evaluate: Literal["hard", "soft"] = "hard") -> None:
        super().__init__()
        self.evaluate = evaluate

    def gates(self, scores: Tensor, selection: Selection) -> Gates:
        if not self.training and self.evaluate == "hard":
            return Gates()
        return Gates(kept=scores, bypassed=1 - scores, every_token=True)


class Top1Probability(Scaling):
    """The chosen path times its probability: p_i u_i for kept tokens, (1 - p_i) b_i for the others (DTRNet's code)."""

    traits: ClassVar[ScalingTraits] = Top1ProbabilityConfig.facts

    def __init__(self) -> None:
        super().__init__()

    def gates(self, scores: Tensor, selection: Selection) -> Gates:
        return Gates(kept=scores, bypassed=1 - scores)


def normalized(scores: Tensor, selection: Selection, how: Normalize) -> Tensor:
    """[B, N] the gate value for scores [B, N]; see `Multiply`."""
    if how == "raw":
        return scores
    if how == "sigmoid":
        return scores.sigmoid()
    if how == "tanh":
        return scores.tanh()
    smallest = torch.finfo(scores.dtype).tiny
    if how == "unit_mean":
        return scores / scores.abs().mean(dim=1, keepdim=True).clamp_min(smallest)
    if how == "unit_max":
        return scores / scores.abs().amax(dim=1, keepdim=True).clamp_min(smallest)
    mask = selection.mask()
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=1)
    return weights.masked_fill(~mask, 0)
