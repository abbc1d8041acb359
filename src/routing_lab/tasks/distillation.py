"""What a routed model learns from a dense one: its logits, and its tokens.

Shape legend: B batch, N tokens, C classes, D width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from routing_lab.routing.tokens import Tokens


def logit_divergence(logits: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over examples; logits [B, C] of both, in float32."""
    student = F.log_softmax(_raised(logits) / temperature, dim=1)
    target = F.log_softmax(_raised(teacher) / temperature, dim=1)
    return F.kl_div(student, target, reduction="batchmean", log_target=True) * temperature**2


def token_loss(tokens: Tokens, teacher: Tokens, form: Literal["mse", "kl"] = "mse") -> Tensor:
    """Difference between the final patch tokens and the teacher's, over patches that are still there (DynamicViT).

    A patch is compared with the token that stands for it; where tokens were merged several patches share one. Of the
    patches that a relaxed decision took out, and of removed ones, there is no difference; it is zero when none is left.

    Args:
        tokens: the student's, normed; any number of them.
        teacher: the dense model's, normed, one for each that entered its first layer.
        form: `mse`: mean square over patches and channels (DynamicViT with DeiT); `kl`: KL(softmax(teacher) ||
            softmax(student)) over channels, mean over patches (with LV-ViT).
    """
    source = tokens.sources()
    present = source >= 0
    present[:, : tokens.num_prefix] = False
    if tokens.policy is not None:
        present = present & (tokens.policy.detach() > 0.5).gather(1, source.clamp_min(0))
    width = tokens.x.shape[-1]
    index = source.clamp_min(0).unsqueeze(-1).expand(-1, -1, width)
    student, target = _raised(tokens.x.gather(1, index)), _raised(teacher.x)
    if form == "mse":
        difference = (student - target).square().mean(dim=-1)
    else:
        student, target = F.log_softmax(student, dim=-1), F.log_softmax(target, dim=-1)
        difference = F.kl_div(student, target, reduction="none", log_target=True).sum(dim=-1)
    return (difference * present).sum() / present.sum().clamp_min(1)


def _raised(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
