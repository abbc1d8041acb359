"""Attention in which keys carry weights: the differentiable stand-in for removed tokens.

Shape legend: B batch, H heads, N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_softmax(logits: Tensor, policy: Tensor, epsilon: float = 1e-6) -> Tensor:
    """a_ij = (e_ij p_ij + epsilon / N) / (sum_j e_ij p_ij + epsilon), e = exp(logit - row maximum) (DynamicViT's code).

    Args:
        logits: [B, H, N, N].
        policy: [B, N], weight p_j of each key; a token sees itself in any case, p_ii = 1.

    Returns [B, H, N, N] in at least float32.
    """
    tokens = logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = torch.eye(tokens, dtype=logits.dtype, device=logits.device)
    weight = policy[:, None, None].to(logits.dtype)
    weight = weight + (1 - weight) * own
    attention = (logits - logits.amax(dim=-1, keepdim=True)).exp() * weight
    return (attention + epsilon / tokens) / (attention.sum(dim=-1, keepdim=True) + epsilon)
