"""What an axis is about, in facts that need no torch: what a member of it may be, need and do.

A member states its facts once: a shipped one in its class here in `routing_lab.axes`, one from outside the package in
the class attribute `traits` of its own class, `traits = RouterTraits(attention=frozenset({"received"}))`. The
configuration checks, the cost model and the core read these facts, and never ask a class or a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionStatistic = Literal["received", "class_row", "value_norm"]
SubLayer = Literal["block", "attention", "mlp"]
ScoreScale = Literal["logit", "probability", "log_probability"]
MapRows = Literal["none", "one", "all"]
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
    sees_later: a token's score depends on later tokens, even in a causal model.
    needs_informative: it is told which patches decide the class, which only synthetic data know.
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
    sees_later: bool = False
    needs_informative: bool = False
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
    weighs_bypassed: what bypassed tokens get is weighed by the score too, so that they have to stay in place.
    every_token: in evaluation, too, the update of every token is computed, whatever is kept.
    over_sequence: values of the option `normalize` under which the factor depends on the whole sequence.
    """

    uses_score: bool = True
    gives_router_gradient: bool = True
    no_gradient_forms: tuple[str, ...] = ()
    needs_probability: bool = False
    sublayers: tuple[SubLayer, ...] = SUBLAYERS
    weighs_bypassed: bool = False
    every_token: bool = False
    over_sequence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CapacityTraits:
    """Facts about a selection rule.

    has_fraction: the rule keeps a stated fraction of the tokens (`capacity.fraction`).
    budget: the option whose value stands in the run's name, behind that of the rule.
    needs_choice: the rule follows the router's own two-way decision.
    ragged: samples of one batch may keep different numbers of tokens.
    needs_positive: scores are weights in proportion to which the rule goes, and must not be negative.
    relaxes: in training it makes a differentiable decision of the score, whose scale it is told.
    compares: whether a token is kept depends on the scores of the whole sequence, later tokens' among them.
    """

    has_fraction: bool = True
    budget: str = "fraction"
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
    projects: bypassed tokens pass the value and the output projection.
    """

    sublayers: tuple[SubLayer, ...] = SUBLAYERS
    removes: bool = False
    merges: bool = False
    placed: bool = False
    restores: bool = False
    final: bool = False
    saves: bool = True
    projects: bool = False


@dataclass(frozen=True, slots=True)
class VisibilityTraits:
    """Facts about the keys that a kept token attends to. all_keys: bypassed tokens are visible too."""

    all_keys: bool = False


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Facts about an auxiliary loss, what it reads from a trace.

    reads: `decision`, which tokens are kept, with the router's gradient; `drawn`, decisions that the capacity drew with
        the probabilities of a learned router; `logits` of a learned router; `probability`, scores that are
        probabilities; `scores` of any router; `halting`, the halting scores of an adaptive depth.
    needs_target: the fraction it pulls towards is the capacity's where the option `target` is null.
    follows_task: it is given the task's loss of every example, `example_losses` [B].
    """

    reads: Literal["decision", "drawn", "logits", "probability", "scores", "halting"] = "scores"
    needs_target: bool = False
    follows_task: bool = False


@dataclass(frozen=True, slots=True)
class BackboneFacts:
    """What routing needs to know of a backbone before it is built.

    depth: number of layers. width: D, width of the residual stream. heads: H, attention heads.
    prefix: kinds of the prefix tokens in order, for instance ("class", "registers", "registers").
    tokens: length of the sequence, prefix included; None where it varies.
    causal: a token attends only to itself and to earlier ones.
    sublayers: the parts of a block that can be routed by themselves.
    one_map: attention is one map a head, each row a distribution over keys, of which scores can be made.
    """

    depth: int
    width: int
    heads: int
    prefix: tuple[str, ...] = ()
    tokens: int | None = None
    causal: bool = False
    sublayers: tuple[SubLayer, ...] = SUBLAYERS
    one_map: bool = True
