"""Auxiliary losses that are read from a trace."""

from __future__ import annotations

import torch
from torch import Tensor

from routing_lab.routing.base import Trace


def load_loss(trace: Trace) -> Tensor:
    """sum_l f_l mean(p_l) / sum_l f_l over the routed layers (DTRNet, Eq. 7 as its code reads it).

    p_l are the scores of layer l, probabilities of attending; f_l is the fraction of tokens that layer l kept, a constant:
    the gradient flows through p alone. Zero when no token is kept anywhere.
    """
    routed = [layer for layer in trace.layers if layer.scores is not None]
    if not routed:
        raise ValueError("the trace has no routed layer to take a load from")
    fractions = torch.stack([layer.counts.sum() / layer.scores.numel() for layer in routed if layer.scores is not None])
    means = torch.stack([layer.scores.mean() for layer in routed if layer.scores is not None])
    fractions = fractions.to(means.dtype)
    return (fractions * means).sum() / fractions.sum().clamp_min(torch.finfo(means.dtype).tiny)
