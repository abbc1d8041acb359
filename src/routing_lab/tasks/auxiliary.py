"""Auxiliary losses of a task: those that a configuration chose, each with its coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from routing_lab.axes.base import locate
from routing_lab.routing.trace import Trace

if TYPE_CHECKING:
    from routing_lab.axes.losses import LossConfig


class AuxiliaryLosses:
    """Sum of losses read from a trace. Losses of weight zero are left out.

    Args:
        losses: by name, the section `losses` of a configuration.

    Attributes:
        names: of the losses that count, in order.
        follow_task: some of them are given the task's loss of every example.
    """

    def __init__(self, losses: Mapping[str, LossConfig]) -> None:
        self._losses = {name: loss for name, loss in losses.items() if loss.weight > 0}
        self._functions = {
            name: partial(locate(loss.class_path), **loss.options) for name, loss in self._losses.items()
        }
        self.names = list(self._losses)
        self._following = {name for name, loss in self._losses.items() if loss.traits.follows_task}
        self.follow_task = bool(self._following)

    def __call__(
        self, trace: Trace, progress: float, example_losses: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum, and each loss without its weight.

        Args:
            progress: how far training has come, in [0, 1].
            example_losses: [B], the task's loss of every example; needed where `follow_task`.
        """
        following = {"example_losses": example_losses}
        values = {
            name: function(trace, **(following if name in self._following else {}))
            for name, function in self._functions.items()
        }
        weighted = [weight_at(self._losses[name], progress) * value for name, value in values.items()]
        return torch.stack(weighted).sum(), values


def weight_at(loss: LossConfig, progress: float) -> float:
    """The coefficient of a loss when training has come as far as `progress` in [0, 1]."""
    grown = {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}
    return loss.weight * grown[loss.schedule]
