"""Image classification: the objective, distillation from a dense teacher, and what is measured per epoch.

Shape legend: B batch, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from routing_lab.tasks.base import Task
from routing_lab.tasks.distillation import logit_divergence, token_loss

if TYPE_CHECKING:
    from routing_lab.config.training import TrainConfig

Batch = tuple[Tensor, Tensor, Tensor]
"""Images [B, channels, H, W]; classes [B] int64, or probabilities [B, C] when mixed; indices of the examples [B]."""


MAX_LOGITS = 5_000_000
"""Examples x classes up to which predictions.npz holds the logits."""


class Classification(Task):
    """Trains a routed image classifier, called as `model(images, progress=, step=, sample_ids=)` for logits [B, C].

    Kept of every test example: `index, target, prediction, loss, logits`.
    """

    quantities = ("loss", "acc")
    selects = "acc"

    def objective(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        images, target, index = batch
        logits, loss, terms = self._objective(images, target, index)
        classes = target.argmax(dim=1) if target.is_floating_point() else target
        totals = {
            "examples": torch.tensor(float(len(target)), device=loss.device),
            "correct": (logits.argmax(dim=1) == classes).sum(),
        }
        return loss, totals, terms

    def _objective(self, images: Tensor, target: Tensor, index: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits, the loss, and by name those parts of it that are not the labels' term, without their coefficients."""
        train, terms = self.train_config, {}
        asked = {"return_trace": bool(self.auxiliary.names), "return_tokens": train.distill_tokens != "none"}
        asked = {key: True for key, wanted in asked.items() if wanted}
        where = {"progress": self.progress, "step": self.global_step, "sample_ids": index}
        found = self.model(images, **where, **self.told(index), **asked)
        logits, *more = found if asked else (found,)
        loss = classification_loss(logits, target, train.label_smoothing)
        if self._teacher:
            with torch.no_grad():
                if train.distill_tokens == "none":
                    teacher_logits = self._teacher[0](images)
                else:
                    teacher_logits, teacher_tokens = self._teacher[0](images, return_tokens=True)
            loss = distilled_loss(loss, logits, teacher_logits, train)
            if train.distill_tokens != "none":
                terms["tokens"] = token_loss(more[-1], teacher_tokens, train.distill_tokens)
                loss = loss + train.distill_tokens_weight * terms["tokens"]
        if self.auxiliary.names:
            alone = None
            if self.auxiliary.follow_task:
                alone = classification_loss(logits, target, train.label_smoothing, reduction="none")
            added, values = self.auxiliary(more[0], self.progress, alone)
            loss, terms = loss + added, terms | values
        return logits, loss, terms

    def examples(self, batch: Batch) -> tuple[dict[str, Tensor], Any]:
        images, target, index = batch
        logits, trace = self.evaluate_model(images, index=index)
        logits = logits.float()
        arrays = {
            "index": index,
            "target": target,
            "prediction": logits.argmax(dim=1),
            "loss": F.cross_entropy(logits, target, reduction="none"),
            "logits": logits,
        }
        return arrays, trace

    def totals(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        correct = arrays["prediction"] == arrays["target"]
        return {
            "examples": torch.tensor(float(len(correct)), device=correct.device),
            "correct": correct.sum(),
            "loss": arrays["loss"].double().sum(),
        }

    def metrics_of(self, totals: Mapping[str, float]) -> dict[str, float]:
        means = {"acc": totals["correct"] / totals["examples"]}
        return means | ({"loss": totals["loss"] / totals["examples"]} if "loss" in totals else {})

    def stored(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: values for name, values in arrays.items() if name != "logits" or values.size <= MAX_LOGITS}


def classification_loss(
    logits: Tensor, target: Tensor, smoothing: float, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """Cross-entropy of logits [B, C], in float32.

    Args:
        target: classes [B] int64, or probabilities [B, C].
        smoothing: weight of the uniform distribution.
        reduction: the `mean` over the batch, or [B] without one (`none`).
    """
    return F.cross_entropy(logits.float(), target, label_smoothing=smoothing, reduction=reduction)


def distilled_loss(loss: Tensor, logits: Tensor, teacher_logits: Tensor, train: TrainConfig) -> Tensor:
    """w loss + a D, a = `distill_alpha`, w = `distill_labels` or 1 - a (DeiT, Touvron et al. 2021, Eqs. 2 and 3).

    `soft`: D = T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over examples, T = `distill_temperature`.
    `hard`: D = cross-entropy against the teacher's decision. `none`: the loss as it is.

    Args:
        loss: the labels' term.
        logits, teacher_logits: [B, C].
    """
    if train.distill == "none":
        return loss
    if train.distill == "hard":
        term = F.cross_entropy(logits.float(), teacher_logits.argmax(dim=1))
    else:
        term = logit_divergence(logits, teacher_logits, train.distill_temperature)
    labels = 1 - train.distill_alpha if train.distill_labels is None else train.distill_labels
    return labels * loss + train.distill_alpha * term
