"""Fates of the tokens that were not kept."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from routing_lab.attention import AttentionStatistics
from routing_lab.axes.bypasses import (
    DropConfig,
    FuseConfig,
    PonderConfig,
    PonderMaskedConfig,
    ProjectConfig,
    SkipConfig,
)
from routing_lab.axes.facts import BypassTraits
from routing_lab.routing.backbone import Block
from routing_lab.routing.base import Bypass, Masking, Reduction
from routing_lab.routing.tokens import Halted, Selection, Tokens


class Skip(Bypass):
    """Identity: a bypassed token leaves the routed part bit-identical and may be kept again in a later layer."""

    traits: ClassVar[BypassTraits] = SkipConfig.facts
    identity: ClassVar[bool] = True

    def update(self, x: Tensor, block: Block) -> Tensor:
        return x.new_zeros(x.shape)


class Project(Bypass):
    """x_i + x_i W_V W_O: the linear path with the attention's own projections (DTRNet); the MLP follows for every
    token.
    """

    traits: ClassVar[BypassTraits] = ProjectConfig.facts

    def update(self, x: Tensor, block: Block) -> Tensor:
        return block.project(x)


class Drop(Reduction):
    """Removal: bypassed tokens are gone for good (DynamicViT, EViT without fusion).

    Args:
        train: in training, `drop` removes them too; `mask` takes them out as keys alone, in attention that is weighed
            by the decision in every block (DynamicViT): all tokens are computed, and the decision gets a gradient.
    """

    traits: ClassVar[BypassTraits] = DropConfig.facts

    def __init__(self, *, train: Literal["drop", "mask"] = "drop") -> None:
        super().__init__()
        self.hides = train == "mask"

    def reduce(
        self, tokens: Tokens, selection: Selection, scores: Tensor, attention: AttentionStatistics | None
    ) -> Tokens:
        return tokens.keep(selection)


class Fuse(Reduction):
    """Removal, with one fused token appended last: x_f = sum_p w_p x_p over the removed tokens p.

    The fused token passes the rest of the layer, and is an ordinary token afterwards, which a later layer may remove.
    Without removed tokens there is no fused one.

    Args:
        weights: `score`: w_p = r_p, not normalised (EViT); `softmax`: softmax over the removed tokens of r_p / T
            (attention-variance pruning, Eq. 8); `mean`: equal weights.
        temperature: T of the softmax.
        temperature_unit: `absolute`, or `spread`: T is multiplied by the standard deviation of the removed tokens'
            scores in each sample.
    """

    traits: ClassVar[BypassTraits] = FuseConfig.facts

    def __init__(
        self,
        *,
        weights: Literal["score", "softmax", "mean"] = "score",
        temperature: float = 1.0,
        temperature_unit: Literal["absolute", "spread"] = "absolute",
    ) -> None:
        super().__init__()
        self.weights = weights
        self.temperature = temperature
        self.temperature_unit = temperature_unit

    def reduce(
        self, tokens: Tokens, selection: Selection, scores: Tensor, attention: AttentionStatistics | None
    ) -> Tokens:
        removed = ~selection.mask()
        if tokens.valid is not None:
            removed = removed & tokens.valid
        kept = tokens.keep(selection)
        if selection.keeps_all:
            return kept
        weight = self.fusion_weights(scores, removed)
        ragged = selection.valid is not None or tokens.valid is not None
        present = tokens.sources().clamp_min(0)
        return kept.append(
            x=(weight.to(tokens.x.dtype).unsqueeze(1) @ tokens.x).squeeze(1),
            size=(tokens.sizes() * removed).sum(dim=1),
            stands_for=removed.gather(1, present) & (tokens.sources() >= 0),
            valid=removed.any(dim=1) if ragged else None,
        )

    def fusion_weights(self, scores: Tensor, removed: Tensor) -> Tensor:
        """[B, N] weight of each token in the fused one, zero for kept tokens; scores [B, N], removed [B, N] bool."""
        if self.weights == "score":
            return scores * removed
        count = removed.sum(dim=1, keepdim=True).clamp_min(1)
        if self.weights == "mean":
            return removed.to(scores.dtype) / count
        temperature: Tensor | float = self.temperature
        if self.temperature_unit == "spread":
            mean = (scores * removed).sum(dim=1, keepdim=True) / count
            spread = (((scores - mean) * removed).square().sum(dim=1, keepdim=True) / count).sqrt()
            temperature = temperature * spread.clamp_min(torch.finfo(scores.dtype).tiny)
        nobody = ~removed.any(dim=1, keepdim=True)
        logits = (scores / temperature).masked_fill(~(removed | nobody), float("-inf"))
        return torch.softmax(logits, dim=1) * removed


class Ponder(Reduction):
    """Early exit: tokens that are not kept have halted and are computed no more, what they gave to the output stays.

    A token's output is a mean of the states in which it entered the routed layers, weighted by the halting mass spent
    before each (A-ViT, Yin et al. 2022): on halting it gives its present state all the mass it has left. The head reads
    the outputs of all tokens that entered the first layer. With a router that knows no halting, a token spends its mass
    at once when it is not kept: its output is its last state.

    Args:
        average: `all`: as above for every token; `prefix`: for the class token and its like, while the output of a
            patch is its last state (the paper).
    """

    traits: ClassVar[BypassTraits] = PonderConfig.facts

    def __init__(self, *, average: Literal["all", "prefix"] = "all") -> None:
        super().__init__()
        self.average = average

    def reduce(
        self, tokens: Tokens, selection: Selection, scores: Tensor, attention: AttentionStatistics | None
    ) -> Tokens:
        halted = given_to_output(tokens, selection, self.average == "prefix")
        return replace(tokens.keep(selection), halted=halted)


class PonderMasked(Masking):
    """`ponder` as A-ViT's code runs it: halted tokens stay in the sequence, hidden, and nothing is saved.

    A hidden token enters the block as zero, of which the backward pass knows nothing: x + stop(x m - x). Inside, biases
    and attention to visible tokens give it a state again, which reaches no visible token and no output, but whose
    halting score counts in the released prior loss.

    Args:
        average: as for `ponder`.
    """

    traits: ClassVar[BypassTraits] = PonderMaskedConfig.facts

    def __init__(self, *, average: Literal["all", "prefix"] = "all") -> None:
        super().__init__()
        self.average = average

    def hide(self, tokens: Tokens, selection: Selection) -> Tokens:
        halted = given_to_output(tokens, selection, self.average == "prefix")
        x = tokens.x
        zeroed = x * selection.mask().unsqueeze(-1).to(x.dtype)
        return replace(tokens, x=x + (zeroed - x).detach(), halted=halted)


def given_to_output(tokens: Tokens, selection: Selection, prefix_only: bool) -> Halted | None:
    """What has been given to the output once the tokens that are not kept have halted; None: nothing yet.

    Args:
        tokens: those that enter the layer, with the halting mass that they have left.
        selection: the tokens that go on.
        prefix_only: patches give nothing before they halt.
    """
    if tokens.halted is None and tokens.mass is None and selection.keeps_all:
        return None
    halted = tokens.halted or Halted.nothing(tokens)
    left = halted.left_of(tokens)
    spent = left - tokens.masses()
    if prefix_only:
        spent = spent * (tokens.first_tokens() < tokens.num_prefix)
    return halted.give(tokens, torch.where(selection.mask(), spent, left))
