"""Measures of how routing shares the layers out among tokens: pure functions of traces, without gradient.

Shape legend: B batch, N0 tokens that entered the model, P patches, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from routing_lab.routing.trace import Trace


def ran(trace: Trace) -> Tensor:
    """[layers, B, N0] bool: which of the tokens that entered the model each layer ran, all of them where it is dense.

    A removed token is run no more. A token that stands for several, fused or merged, runs for all of them.
    """
    layers = zip(trace.layers, positions(trace), strict=False)
    return torch.stack([at(layer.mask(), position) for layer, position in layers])


def positions(trace: Trace) -> list[Tensor]:
    """For each layer, and after the last, [B, N0]: where the token is that stands for each that entered the model.

    -1: there is none any more.
    """
    first = trace[0].origin
    found = [torch.arange(first.shape[1], device=first.device).expand_as(first)]
    for layer in trace.layers:
        found.append(found[-1] if layer.source is None else layer.source)
    return found


def at(values: Tensor, position: Tensor) -> Tensor:
    """[B, M] entries of values [B, N] at position [B, M], zero where that is negative."""
    return F.pad(values, (0, 1)).gather(1, torch.where(position < 0, values.shape[1], position))


def informative_kept(trace: Trace, informative: Tensor) -> Tensor:
    """[routed layers, B] int64: how many of the patches that decide the class each routed layer keeps.

    A removed patch is kept no more; one that was fused or merged is kept where the token is that stands for it.

    informative: [B, P] bool.
    """
    return (kept_patches(trace) & informative).sum(dim=2)


def is_patch(trace: Trace) -> Tensor:
    """[N0] bool: which of the tokens that entered the model are patches (or words), and not prefix tokens."""
    return trace[0].origin[0] >= 0


def kept_patches(trace: Trace, layers: Sequence[int] | None = None) -> Tensor:
    """[L, B, P] bool: the patches that each of these layers ran; None: of every routed layer.

    Raises ValueError where no layer was routed.
    """
    if layers is None:
        layers = [index for index, layer in enumerate(trace.layers) if layer.scores is not None]
        if not layers:
            raise ValueError("the trace has no routed layer to measure")
    return ran(trace)[list(layers)][..., is_patch(trace)]


def jaccard(first: Tensor, second: Tensor) -> Tensor:
    """Overlap |A and B| / |A or B| of two choices [..., N] of tokens, along the last axis; 1 where both are empty."""
    union = (first | second).sum(dim=-1)
    return ((first & second).sum(dim=-1).double() / union.clamp_min(1)).where(union > 0, 1.0)
