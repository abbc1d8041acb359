"""A task of one's own, in one file: is the digit odd? CONTRIBUTING.md shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from routing_lab.tasks.base import Task


class Parity(Task):
    """Two classes instead of ten, from the same images; called with `weight`, an option of its own."""

    quantities = ("loss", "acc")
    selects = "acc"

    def __init__(self, *args: Any, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = weight

    @classmethod
    def outputs(cls, data: Any) -> int:
        return 2

    def objective(self, batch: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        images, target, index = batch
        logits = self.model(images, progress=self.progress, step=self.global_step, sample_ids=index)
        loss = self.weight * F.cross_entropy(logits, target % 2)
        count = torch.tensor(float(len(target)), device=loss.device)
        return loss, {"examples": count, "correct": (logits.argmax(1) == target % 2).sum()}, {}

    def examples(self, batch: Any) -> tuple[dict[str, Tensor], Any]:
        images, target, index = batch
        logits, trace = self.evaluate_model(images, index=index)
        loss = F.cross_entropy(logits, target % 2, reduction="none")
        return {"index": index, "target": target % 2, "prediction": logits.argmax(1), "loss": loss}, trace

    def totals(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        correct = arrays["prediction"] == arrays["target"]
        count = torch.tensor(float(len(correct)), device=correct.device)
        return {"examples": count, "correct": correct.sum(), "loss": arrays["loss"].double().sum()}

    def metrics_of(self, totals: Mapping[str, float]) -> dict[str, float]:
        means = {"acc": totals["correct"] / totals["examples"]}
        return means | ({"loss": totals["loss"] / totals["examples"]} if "loss" in totals else {})
