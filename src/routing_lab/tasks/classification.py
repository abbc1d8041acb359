"""Image classification: the objective, distillation from a dense teacher, and what is measured per epoch.

Shape legend: B batch, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from routing_lab.tasks.auxiliary import AuxiliaryLosses
from routing_lab.tasks.base import RoutedTask
from routing_lab.tasks.distillation import logit_divergence, token_loss

if TYPE_CHECKING:
    from routing_lab.config.schema import LossConfig
    from routing_lab.config.training import TrainConfig

Batch = tuple[Tensor, Tensor, Tensor]
"""Images [B, channels, H, W]; classes [B] int64, or probabilities [B, C] when mixed; indices of the examples [B]."""


class Classification(RoutedTask):
    """Trains a routed image classifier.

    Args:
        model: called as `model(images, progress=, step=, sample_ids=)`, returns logits [B, C].
        train: the recipe.
        seed: the run's seed.
        num_classes: C.
        teacher: dense model to distil from, where the recipe does; it is not part of the state.
        losses: auxiliary losses, added with their coefficients where the model routes.

    Attributes:
        predictions: after a test pass, arrays `index, target, prediction, loss, logits`, sorted by index.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainConfig,
        seed: int,
        num_classes: int,
        teacher: nn.Module | None = None,
        losses: Mapping[str, LossConfig] = MappingProxyType({}),
    ) -> None:
        super().__init__(model, train, seed)
        if (teacher is not None) != train.distils:
            given = f"train.distill={train.distill!r}, train.distill_tokens={train.distill_tokens!r}"
            raise ValueError(f"{given} {'needs a' if teacher is None else 'takes no'} teacher")
        self.auxiliary = AuxiliaryLosses(losses if self.routing.layers else {})
        self._teacher = [] if teacher is None else [teacher.eval().requires_grad_(False)]
        self.predictions: dict[str, np.ndarray] = {}
        self._train_sums: Tensor | None = None
        # Means in double precision are the same however many processes share the examples.
        self.val_acc, self.val_loss = (MeanMetric().set_dtype(torch.float64) for _ in range(2))
        self._terms: list[str] = []
        self._test_batches: list[dict[str, Tensor]] = []

    # --- training ---

    def on_fit_start(self) -> None:
        for teacher in self._teacher:
            teacher.to(self.device)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self._train_sums = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, target, index = batch
        logits, loss, terms = self._objective(images, target, index)
        with torch.no_grad():
            classes = target.argmax(dim=1) if target.is_floating_point() else target
            correct = (logits.argmax(dim=1) == classes).sum()
            count = float(len(target))
            losses = [value.float() * count for value in (loss, *terms.values())]
            sums = torch.stack([correct.float(), torch.full_like(loss, count).float(), *losses])
            self._train_sums = sums if self._train_sums is None else self._train_sums + sums
            self._terms = ["loss", *(f"loss_{name}" for name in terms)]
        return loss

    def _objective(self, images: Tensor, target: Tensor, index: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits, the loss, and by name those parts of it that are not the labels' term, without their coefficients."""
        train, terms = self.train_config, {}
        asked = {"return_trace": bool(self.auxiliary.names), "return_tokens": train.distill_tokens != "none"}
        asked = {key: True for key, wanted in asked.items() if wanted}
        found = self.model(images, progress=self.progress, step=self.global_step, sample_ids=index, **asked)
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
            added, values = self.auxiliary(more[0], self.progress)
            loss, terms = loss + added, terms | values
        return logits, loss, terms

    def _close_training_epoch(self) -> None:
        """Reduce the epoch's sums, before validation meets weights that are not finite."""
        if self._train_sums is None:
            return
        correct, count, *losses = self.trainer.strategy.reduce(self._train_sums, reduce_op="sum").tolist()
        self.num_examples = int(count)
        means = {f"train/{name}": total / count for name, total in zip(self._terms, losses, strict=True)}
        self.measured |= {"train/loss": means["train/loss"], "train/acc": correct / count, **means}
        loss = means["train/loss"]
        if not np.isfinite(loss):
            raise ValueError(
                f"the training loss of epoch {self.current_epoch} is {loss}: lower train.lr={self.train_config.lr} "
                f"or set train.clip_grad"
            )

    def running(self) -> dict[str, float]:
        """Training loss and accuracy of the epoch so far."""
        if self._train_sums is None:
            return {}
        correct, count, loss, *_ = self._train_sums.tolist()
        return {"train/loss": loss / count, "train/acc": correct / count}

    # --- evaluation ---

    def on_validation_epoch_start(self) -> None:
        self._close_training_epoch()
        self.val_acc.reset()
        self.val_loss.reset()
        self.routing.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, target, index = batch
        logits, trace = self.evaluated(images, return_trace=True, sample_ids=index)
        self.val_acc.update(logits.argmax(dim=1) == target)
        self.val_loss.update(F.cross_entropy(logits.float(), target, reduction="none"))
        self.routing.update(trace)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.world_size > 1:
            self.routing.reduce(self.trainer.strategy)
        self.measured |= {"val/loss": self.val_loss.compute().item(), "val/acc": self.val_acc.compute().item()}

    def on_test_epoch_start(self) -> None:
        self.routing.reset()
        self._test_batches = []

    def test_step(self, batch: Batch, batch_idx: int) -> Any:
        images, target, index = batch
        logits, trace = self.evaluated(images, return_trace=True, sample_ids=index)
        logits = logits.float()
        self.routing.update(trace)
        outputs = {
            "index": index,
            "target": target,
            "prediction": logits.argmax(dim=1),
            "loss": F.cross_entropy(logits, target, reduction="none"),
            "logits": logits,
        }
        self._test_batches.append({name: values.cpu() for name, values in outputs.items()})
        return {"trace": trace}

    def on_test_epoch_end(self) -> None:
        batches, self._test_batches = self._test_batches, []
        arrays = {name: torch.cat([batch[name] for batch in batches]).numpy() for name in batches[0]}
        order = np.argsort(arrays["index"], kind="stable")
        self.predictions = {name: values[order] for name, values in arrays.items()}


def classification_loss(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Mean cross-entropy of logits [B, C], in float32.

    Args:
        target: classes [B] int64, or probabilities [B, C].
        smoothing: weight of the uniform distribution.
    """
    return F.cross_entropy(logits.float(), target, label_smoothing=smoothing)


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
