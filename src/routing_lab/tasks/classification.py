"""Image classification: the objective, distillation from a dense teacher, and what is measured per epoch.

Shape legend: B batch, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from routing_lab.tasks.base import RoutedTask

if TYPE_CHECKING:
    from routing_lab.training.schema import TrainConfig

Batch = tuple[Tensor, Tensor, Tensor]
"""Images [B, channels, H, W]; classes [B] int64, or probabilities [B, C] when mixed; indices of the examples [B]."""


class Classification(RoutedTask):
    """Trains a routed image classifier.

    Args:
        model: called as `model(images, progress=, step=, sample_ids=)`, returns logits [B, C].
        train: the recipe.
        seed: the run's seed.
        num_classes: C.
        teacher: dense model to distil from, for `train.distill` other than `none`; it is not part of the state.

    Attributes:
        predictions: after a test pass, arrays `index, target, prediction, loss, logits`, sorted by index.
    """

    def __init__(
        self, model: nn.Module, train: TrainConfig, seed: int, num_classes: int, teacher: nn.Module | None = None
    ) -> None:
        super().__init__(model, train, seed)
        if (teacher is None) != (train.distill == "none"):
            raise ValueError(f"train.distill={train.distill!r} {'needs a' if teacher is None else 'takes no'} teacher")
        self._teacher = [] if teacher is None else [teacher.eval().requires_grad_(False)]
        self.val_acc = MulticlassAccuracy(num_classes=num_classes, average="micro")
        self.val_loss = MeanMetric()
        self.predictions: dict[str, np.ndarray] = {}
        self._train_sums: Tensor | None = None
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
        logits = self.model(images, progress=self.progress, step=self.global_step, sample_ids=index)
        loss = classification_loss(logits, target, self.train_config.label_smoothing)
        if self._teacher:
            with torch.no_grad():
                teacher_logits = self._teacher[0](images)
            loss = distilled_loss(loss, logits, teacher_logits, self.train_config)
        with torch.no_grad():
            classes = target.argmax(dim=1) if target.is_floating_point() else target
            correct = (logits.argmax(dim=1) == classes).sum()
            count = float(len(target))
            sums = torch.stack([loss.float() * count, correct.float(), torch.full_like(loss, count).float()])
            self._train_sums = sums if self._train_sums is None else self._train_sums + sums
        return loss

    def _close_training_epoch(self) -> None:
        """Reduce the epoch's sums, before validation meets weights that are not finite."""
        if self._train_sums is None:
            return
        loss, correct, count = self.trainer.strategy.reduce(self._train_sums, reduce_op="sum").tolist()
        self.num_examples = int(count)
        self.measured |= {"train/loss": loss / count, "train/acc": correct / count}
        if not np.isfinite(loss):
            raise ValueError(
                f"the training loss of epoch {self.current_epoch} is {loss}: lower train.lr={self.train_config.lr} "
                f"or set train.clip_grad"
            )

    def running(self) -> dict[str, float]:
        """Training loss and accuracy of the epoch so far."""
        if self._train_sums is None:
            return {}
        loss, correct, count = self._train_sums.tolist()
        return {"train/loss": loss / count, "train/acc": correct / count}

    # --- evaluation ---

    def on_validation_epoch_start(self) -> None:
        self._close_training_epoch()
        self.routing.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, target, index = batch
        logits, trace = self.evaluated(images, return_trace=True, sample_ids=index)
        self.val_acc.update(logits, target)
        self.val_loss.update(F.cross_entropy(logits.float(), target), weight=len(target))
        self.routing.update(trace)

    def on_validation_epoch_end(self) -> None:
        self.routing.reduce(self.trainer.strategy)
        self.measured |= {"val/loss": float(self.val_loss.compute()), "val/acc": float(self.val_acc.compute())}
        self.val_loss.reset()
        self.val_acc.reset()

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
    """(1 - a) loss + a D, with a = `distill_alpha` (DeiT, Touvron et al. 2021, Eqs. 2 and 3).

    `soft`: D = T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over examples, T = `distill_temperature`.
    `hard`: D = cross-entropy against the teacher's decision.

    Args:
        loss: the labels' term.
        logits, teacher_logits: [B, C].
    """
    logits, teacher_logits = logits.float(), teacher_logits.float()
    if train.distill == "hard":
        term = F.cross_entropy(logits, teacher_logits.argmax(dim=1))
    else:
        temperature = train.distill_temperature
        student = F.log_softmax(logits / temperature, dim=1)
        teacher = F.log_softmax(teacher_logits / temperature, dim=1)
        term = F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2
    return (1 - train.distill_alpha) * loss + train.distill_alpha * term
