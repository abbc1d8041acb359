"""How routing and optimisation go while a run trains, in the rows of its history (`train.dynamics`).

    dynamics/overlap[/layer]   Jaccard index of the patches kept now and an epoch ago, of the same validation examples
    dynamics/spread[/layer]    standard deviation of the scores within an example
    dynamics/entropy[/layer]   how undecided the scores are, in [0, 1], see `undecided`
    dynamics/dead              share of the patches that no routed layer keeps
    dynamics/grad_norm         mean norm of the gradient before clipping; the largest: dynamics/grad_norm_max
    dynamics/spikes            steps whose loss leaps, see `is_spike`

Without a layer (zero-based): the mean over the routed layers. The examples are the first of the validation split, whose
pass is watched, so that nothing is computed twice; of several processes the first one is watched. A loss that is no
number ends a run, whose record then says so.

Shape legend: B examples, N tokens.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from routing_lab.routing.losses import log_odds
from routing_lab.routing.measures import jaccard, kept_patches
from routing_lab.routing.trace import LayerTrace, Trace
from routing_lab.tasks.base import Task

WINDOW = 64
"""Steps that a step's loss is compared with, those before it."""

LEAP = 5.0
"""Robust standard deviations above the median of these that make a spike."""


class Dynamics(pl.Callback):
    """Adds the dynamics of every epoch to what the task has measured.

    Args:
        examples: how many validation examples are followed.
    """

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self._kept: Tensor | None = None
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._seen: list[Trace] = []
        self._norms: list[Tensor] = []
        self._steps: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept, "losses": list(self._losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = state_dict["kept"]
        self._losses = deque(state_dict["losses"], maxlen=WINDOW)

    # --- hooks ---

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._norms, self._steps = [], []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        self._norms.append(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm())

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps.append(outputs["loss"].detach())

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seen = []

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if sum(len(trace[0].origin) for trace in self._seen) < self.examples:
            self._seen.append(outputs["trace"])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        found = {"spikes": float(self._spikes())}
        if self._norms:
            norms = torch.stack(self._norms)
            found |= {"grad_norm": norms.mean().item(), "grad_norm_max": norms.max().item()}
        layers = [index for index in pl_module.routing.layers if self._seen and self._seen[0][index].scores is not None]
        if layers:
            found |= self._routing(layers)
        pl_module.measured |= {f"dynamics/{name}": value for name, value in found.items()}
        self._seen = []

    # --- private ---

    def _spikes(self) -> int:
        """Spikes of the epoch, each step compared with those before it."""
        spikes = 0
        for loss in torch.stack(self._steps).tolist() if self._steps else ():
            spikes += is_spike(loss, self._losses)
            self._losses.append(loss)
        return spikes

    def _routing(self, layers: Sequence[int]) -> dict[str, float]:
        kept = torch.cat([kept_patches(trace, layers) for trace in self._seen], dim=1)[:, : self.examples].cpu()
        found = {"dead": 1 - kept.any(dim=0).double().mean().item()}
        by_layer = {"spread": self._mean(spread, layers), "entropy": self._mean(undecided, layers)}
        by_layer["overlap"] = [math.nan] * len(layers)
        if self._kept is not None:
            by_layer["overlap"] = jaccard(self._kept, kept).mean(dim=1).tolist()
        self._kept = kept
        for name, values in by_layer.items():
            found[name] = statistics.fmean(values)
            found |= {f"{name}/{layer}": value for layer, value in zip(layers, values, strict=True)}
        return found

    def _mean(self, measure: Any, layers: Sequence[int]) -> list[float]:
        """The mean over the followed examples of a measure [B] of a layer, for each layer."""
        rows = [torch.cat([measure(trace[layer]) for trace in self._seen])[: self.examples] for layer in layers]
        return [row.double().mean().item() for row in rows]


def spread(layer: LayerTrace) -> Tensor:
    """[B] standard deviation of a layer's scores over the patches of each example."""
    scores, patches = _of_patches(layer)
    count = patches.sum(dim=1).clamp_min(1)
    mean = scores.sum(dim=1) / count
    return (((scores - mean.unsqueeze(1)) * patches).square().sum(dim=1) / count).sqrt()


def undecided(layer: LayerTrace) -> Tensor:
    """[B] how undecided a layer's scores are: 1 where they prefer nothing, 0 where they are certain.

    Of a router that has logits the mean entropy of "keep or not" over the patches, in bits. Of any other the entropy of
    the scores as shares of their sum, over the logarithm of the number of patches; NaN where a score is negative.
    """
    scores, patches = _of_patches(layer)
    count = patches.sum(dim=1)
    if layer.logits is not None:
        odds = log_odds(layer).double()
        bits = -(
            odds.sigmoid() * torch.nn.functional.logsigmoid(odds)
            + (-odds).sigmoid() * torch.nn.functional.logsigmoid(-odds)
        ) / math.log(2)
        return (bits * patches).sum(dim=1) / count.clamp_min(1)
    shares = scores / scores.sum(dim=1, keepdim=True)
    found = torch.special.entr(shares).sum(dim=1) / count.double().log()
    return found.where((scores >= 0).all(dim=1), math.nan)


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Whether a loss lies more than `LEAP` robust standard deviations (1.4826 times the median absolute deviation)
    above the median of those before; never with fewer than 16 of them.
    """
    if len(before) < 16:
        return False
    middle = statistics.median(before)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in before)
    return loss > middle + LEAP * deviation


def _of_patches(layer: LayerTrace) -> tuple[Tensor, Tensor]:
    """Scores [B, N] in double precision, 0 where there is no patch, and [B, N] bool, where there is one."""
    assert layer.scores is not None
    patches = layer.patches()
    return layer.scores.double() * patches, patches
