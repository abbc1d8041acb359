"""Auxiliary losses: functions of a trace that return one scalar, added to a task's loss with a coefficient.

A loss reads what routing did in one forward: the scores, the logits behind them, or the decision, which is 0 or 1 and
carries a gradient for the router. Decisions are counted over patches; prefix tokens have no say in a budget.

Shape legend: B batch, N tokens that entered a layer, E logits of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from routing_lab.routing.measures import at, positions, ran
from routing_lab.routing.trace import LayerTrace, Trace

Loss = Callable[..., Tensor]
"""Takes a trace, and its options by keyword."""


def ratio_loss(
    trace: Trace,
    *,
    target: float | Sequence[float] | None = None,
    over: Literal["sample", "batch", "layers"] = "sample",
) -> Tensor:
    """(mean decision - target)^2, averaged over the routed layers: a budget met on average (DynamicViT).

    Args:
        target: fraction of the patches that entered the model to keep, or one per routed layer; None: the capacity's.
        over: `sample`: every sample is to meet the target (DynamicViT); `batch`: the batch is, on average (its
            "dynamic" variant); `layers`: batch and routed layers together are (DyT).
    """
    routed = _routed(trace)
    targets = torch.stack([_target(layer, target, rank, len(routed)) for rank, layer in enumerate(routed)])
    shares = torch.stack([kept_share(trace, layer) for layer in routed])  # [L, B]
    targets = targets.to(shares)
    if over == "layers":
        return (shares.mean() - targets.mean()).square()
    if over == "batch":
        return (shares.mean(dim=1) - targets).square().mean()
    return (shares - targets.unsqueeze(1)).square().mean()


def hinge_loss(trace: Trace, *, target: float = 0.5) -> Tensor:
    """max(0, mean decision - target), averaged over the routed layers: only a budget overrun costs (Router-Tuning)."""
    routed = _routed(trace)
    shares = torch.stack([kept_share(trace, layer).mean() for layer in routed])
    return (shares - target).clamp_min(0).mean()


def l1_target_loss(
    trace: Trace, *, target: float = 0.5, layers: Literal["all", "routed"] = "all", weight: Tensor | None = None
) -> Tensor:
    """mean_i |mean_l d_il - target|: every token is to pass that share of the layers (D-LLM).

    Args:
        target: share of the layers.
        layers: `all`: dense layers count as passed; `routed`: they do not count.
        weight: [B, N] of the tokens in the mean; None: patches count alike and prefix tokens not at all.
    """
    routed = _routed(trace)
    decisions = [decision(layer) for layer in routed]
    patches = routed[0].origin >= 0
    if any(found.shape != patches.shape for found in decisions):
        raise ValueError("losses.l1_target: needs every token in every layer; this bypass removes tokens")
    total = torch.stack(decisions).sum(dim=0)
    share = (total + len(trace) - len(routed)) / len(trace) if layers == "all" else total / len(routed)
    weight = patches.to(share.dtype) if weight is None else weight.to(share.dtype)
    return ((share - target).abs() * weight).sum() / weight.sum().clamp_min(1)


def load_loss(trace: Trace) -> Tensor:
    """sum_l f_l mean(p_l) / sum_l f_l over the routed layers (DTRNet, Eq. 7 as its code reads it).

    p_l are the scores of layer l, probabilities of attending; f_l is the fraction of tokens that layer l kept, a
    constant: the gradient flows through p alone. Zero when no token is kept anywhere.
    """
    routed = _routed(trace)
    fractions = torch.stack([layer.counts.sum() / layer.present().sum() for layer in routed])
    means = torch.stack([_mean(_scores(layer), layer) for layer in routed])
    fractions = fractions.to(means.dtype)
    return (fractions * means).sum() / fractions.sum().clamp_min(torch.finfo(means.dtype).tiny)


def z_loss(trace: Trace) -> Tensor:
    """mean (log sum_e exp z_e)^2 of the router's logits, over tokens, then routed layers (ST-MoE, Eq. 5).

    A router whose score is itself the logit has one logit: the mean of its square.
    """
    return torch.stack([_mean(_logits(layer).logsumexp(dim=-1).square(), layer) for layer in _routed(trace)]).mean()


def bce_auxiliary_loss(trace: Trace) -> Tensor:
    """Cross-entropy of the keep probability against the selection, mean over tokens, then routed layers.

    Mixture-of-Depths' first remedy for a selection that needs the whole sequence (Raposo et al. 2024, section 3.5): it
    pulls the score of kept tokens above the decision boundary and that of the others below, so that a threshold can
    replace the top-k. Where the router has an auxiliary predictor (its second remedy), that is pulled instead.
    """
    losses = []
    for layer in _routed(trace):
        odds = log_odds(layer) if layer.predicted is None else layer.predicted
        target = layer.mask().to(odds.dtype)
        losses.append(_mean(F.binary_cross_entropy_with_logits(odds, target, reduction="none"), layer))
    return torch.stack(losses).mean()


def ponder_loss(trace: Trace) -> Tensor:
    """mean_i rho_i, rho_i = layers that ran token i + the halting mass with which it entered the last of them (A-ViT).

    The mean is over all tokens that entered the model. The number of layers is a constant: the gradient flows through
    the mass alone, which stays one where the router knows no halting.
    """
    remainder = mass = torch.ones_like(trace[0].origin, dtype=torch.float32)
    layers = ran(trace)
    for present, spent in zip(layers, _halting(trace), strict=True):
        remainder = torch.where(present, mass, remainder)
        mass = mass if spent is None else mass - spent
    return (layers.sum(dim=0) + remainder).mean()


def halting_prior_loss(
    trace: Trace,
    *,
    center: float | None = 8.0,
    std: float = 1.0,
    form: Literal["paper", "code"] = "paper",
    skip_first_sample: bool = False,
) -> Tensor:
    """Divergence of the mean halting score of each layer from a Gaussian over the layers (A-ViT).

    With p the layers' means, divided by their sum, and q the Gaussian's density at the layers' indices. Zero where the
    router knows no halting.

    Args:
        center, std: of the Gaussian, in zero-based layers; center None: at two thirds of the depth, A-ViT's 8 of 12.
        form: `paper`: KL(p | q), q divided by its sum; `code`: as released, KL(q | p) / L, q scaled so that its entries
            below `center` sum to 0.98, p clamped to [0.01, 0.99], and no loss where it is negative.
        skip_first_sample: leave the batch's first sample out of the means, as the released slice h[1:] does, which
            meant the class token; a batch of one sample then has no loss.
    """
    means = halting_means(trace, skip_first_sample)
    if len(means) == 0 or (skip_first_sample and len(trace[0].origin) == 1):
        return means.new_zeros(())
    center = 2 / 3 * len(trace) if center is None else center
    index = torch.tensor([i for i, layer in enumerate(trace.layers) if layer.halting is not None]).to(means)
    q = torch.exp(-0.5 * ((index - center) / std).square())
    p = means / means.sum()
    smallest = torch.finfo(p.dtype).tiny
    if form == "paper":
        q = q / q.sum()
        return (p * (p.clamp_min(smallest).log() - q.clamp_min(smallest).log())).sum()
    divergence = F.kl_div(p.clamp(0.01, 0.99).log(), 0.98 * q / q[index < center].sum(), reduction="sum") / len(q)
    return divergence.clamp_min(0)


def reinforce_loss(trace: Trace, *, example_losses: Tensor) -> Tensor:
    """mean_i (L_i - b_i) log pi_i, whose gradient is in expectation that of the task's loss over the draws.

    The score-function estimator (REINFORCE, Williams 1992; of gates in Bengio et al. 2013, 1308.3432, Eq. 4). pi_i is
    the probability of what was drawn for the patches of example i in all routed layers: p for a kept one, 1 - p for
    another, p the router's keep probability. The baseline b_i is the mean loss of the batch's other examples, on which
    the draws of i have no influence (Kool et al. 2019). Zero for a batch of one.

    Args:
        example_losses: L [B] of the task; no gradient flows into it.
    """
    loss = example_losses.detach()
    advantage = (loss - loss.mean()) * len(loss) / max(1, len(loss) - 1)  # loss - mean of the others
    return (advantage * sum(_log_probability(layer) for layer in _routed(trace))).mean()


def halting_means(trace: Trace, skip_first_sample: bool = False) -> Tensor:
    """[L] mean halting score after each layer that has one, over all tokens that entered the model.

    Removed tokens count as zero; hidden ones (`bypass=ponder_masked`) with the score they have.
    """
    first = 1 if skip_first_sample else 0
    means = [spent[first:].mean() for spent in _halting(trace) if spent is not None]
    return torch.stack(means) if means else torch.zeros(0, device=trace[0].origin.device)


LOSSES: dict[str, Loss] = {
    "ratio": ratio_loss,
    "hinge": hinge_loss,
    "l1_target": l1_target_loss,
    "load": load_loss,
    "z": z_loss,
    "bce_auxiliary": bce_auxiliary_loss,
    "reinforce": reinforce_loss,
    "ponder": ponder_loss,
    "halting_prior": halting_prior_loss,
}
"""The shipped losses by name."""


def decision(layer: LayerTrace) -> Tensor:
    """[B, N] which tokens a layer kept, 0 or 1.

    The gradient is that of the relaxed decision where the capacity makes one; else, for a learned router, that of its
    keep probability (straight-through); else none.
    """
    if layer.relaxed is not None:
        return layer.relaxed
    kept = layer.mask()
    if layer.logits is None:
        return kept.to(_scores(layer).dtype)
    probability = log_odds(layer).sigmoid()
    return kept.to(probability.dtype) + (probability - probability.detach())


def kept_share(trace: Trace, layer: LayerTrace) -> Tensor:
    """[B] kept patches of a layer over the patches that entered the model."""
    first = (trace[0].origin >= 0).sum(dim=1)
    return (decision(layer) * (layer.origin >= 0)).sum(dim=1) / first


def _log_probability(layer: LayerTrace) -> Tensor:
    """[B] logarithm of the probability that a layer's decisions about patches are drawn as they were."""
    odds = log_odds(layer)
    drawn = F.logsigmoid(torch.where(layer.mask(), odds, -odds))
    return (drawn * layer.patches()).sum(dim=1)


def _halting(trace: Trace) -> list[Tensor | None]:
    """For each layer [B, N0] what each token that entered the model spent of its halting mass; None: no halting."""
    after = positions(trace)[1:]
    return [
        None if layer.halting is None else at(layer.halting, position)
        for layer, position in zip(trace.layers, after, strict=True)
    ]


def _routed(trace: Trace) -> list[LayerTrace]:
    routed = [layer for layer in trace.layers if layer.scores is not None]
    if not routed:
        raise ValueError("the trace has no routed layer to take a loss from")
    return routed


def _scores(layer: LayerTrace) -> Tensor:
    assert layer.scores is not None
    return layer.scores


def _target(layer: LayerTrace, target: float | Sequence[float] | None, rank: int, num_routed: int) -> Tensor:
    if target is None:
        if layer.fraction is None:
            raise ValueError("losses.ratio.target = null: the capacity aims at no fraction; give one")
        return torch.tensor(layer.fraction)
    if isinstance(target, int | float):
        return torch.tensor(float(target))
    if len(target) != num_routed:
        raise ValueError(f"losses.ratio.target = {list(target)}: {len(target)} entries for {num_routed} routed layers")
    return torch.tensor(float(target[rank]))


def _logits(layer: LayerTrace) -> Tensor:
    if layer.logits is None:
        raise ValueError("the router of this trace is not learned: it has no logits")
    return layer.logits


def log_odds(layer: LayerTrace) -> Tensor:
    """[B, N] log odds of keeping."""
    logits = _logits(layer)
    return logits[..., 0] if logits.shape[-1] == 1 else logits[..., 0] - logits[..., 1]


def _mean(values: Tensor, layer: LayerTrace) -> Tensor:
    """Mean of values [B, N] over the tokens that are no padding."""
    if layer.valid is None:
        return values.mean()
    return (values * layer.valid).sum() / layer.valid.sum().clamp_min(1)
