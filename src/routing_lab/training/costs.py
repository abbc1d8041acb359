"""The cost of a run, from the model that ran and the tokens it really kept.

Multiply-accumulates (MACs) of one example under the convention of `routing_lab.cost.macs`; a learned router's own are
added. Floating-point operations of training are two a MAC and three forwards a step: a backward pass has two matrix
products for each of the forward's (Kaplan et al. 2020, 2001.08361, whose 6 N D this is), whatever is frozen. A teacher
adds its forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from routing_lab.config.nominal import UnknownCost, nominal_macs, router_macs
from routing_lab.cost.macs import block_macs, dense_macs, routed_macs
from routing_lab.cost.measure import WorkMeter, parameter_counts, sample_macs
from routing_lab.runs.metrics import TRAIN_FLOPS
from routing_lab.tasks.base import Task

if TYPE_CHECKING:
    from routing_lab.config import Config
    from routing_lab.cost.macs import ModelShape
    from routing_lab.routing.trace import Trace

FLOPS_PER_MAC = 2
FORWARDS_PER_STEP = 3


class CostMeter:
    """Turns the work of the layers into the record's numbers.

    Args:
        model: the routed model.
        config: the run's configuration.
        shape: of the model, as the task says.
    """

    def __init__(self, model: Any, config: Config, shape: ModelShape) -> None:
        self._model = model
        self._config = config
        self._shape = shape
        self._routers = router_weights(model)
        self._index: list[Tensor] = []
        self._samples: list[Tensor] = []
        self.work = WorkMeter(shape.depth)

    def add(self, trace: Trace, index: Tensor) -> None:
        """Record one forward of the examples with these indices [B]."""
        self.work.add(trace)
        self._index.append(index.cpu())
        self._samples.append(sample_macs(trace, self._shape, self._routers))

    def by_example(self) -> np.ndarray:
        """Multiply-accumulates of every example, by ascending index."""
        order = torch.cat(self._index).argsort(stable=True)
        return torch.cat(self._samples)[order].numpy()

    def tokens(self) -> dict[str, Any]:
        """For the section `routing`: tokens that enter the model, prefix tokens among them, and those that each layer
        computes of them, in the mean.
        """
        computed = dict(enumerate(self.work.computed()))
        return {"initial_tokens": self._shape.tokens, "prefix_tokens": self._shape.prefix, "tokens": computed}

    def section(self) -> dict[str, Any]:
        """Parameters and multiply-accumulates.

        `macs_nominal` is None where the budget depends on the scores. `macs_measured` leaves out `statistics_macs`:
        what was computed besides and the method does without (`Work.repeated`), for instance to read statistics off
        maps that attention makes anyway. `macs_sd` is the standard deviation over examples. `tokens_processed`: tokens
        that layers compute, of those that a dense model does.
        """
        shape = self._shape
        try:
            nominal: float | None = nominal_macs(self._config, shape, self._routers)
        except UnknownCost:
            nominal = None
        routers = router_macs(self._routers, self.work.router())
        measured = routed_macs(shape, self.work.mean()).total + routers
        return {
            **parameter_counts(self._model),
            "router_macs": routers,
            "macs_dense": dense_macs(shape).total,
            "macs_nominal": nominal,
            "macs_measured": measured,
            "macs_sd": float(np.std(self.by_example())),
            "statistics_macs": block_macs(shape, self.work.repeated()),
            "tokens_processed": math.fsum(self.work.computed()) / (shape.depth * shape.tokens),
            **_against_target(self._config, measured),
        }


class TrainingCost(pl.Callback):
    """Notes in every epoch what it costs, `TRAIN_FLOPS` in the history, by what its first batch computes.

    Training may compute other tokens than evaluation: capacities warm up, decisions are drawn, tokens are hidden and
    not removed. Not for compiled models, which asking for a trace would compile again.

    Args:
        shape: of the model.
        teacher: of the dense model that is learned from; None: there is none.
    """

    def __init__(self, shape: ModelShape, teacher: ModelShape | None = None) -> None:
        self._shape = shape
        self._taught = 0.0 if teacher is None else dense_macs(teacher).total
        self._task: Any = None
        self._batches = 0
        self._is_traced = False
        self._hooks: list[RemovableHandle] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            assert isinstance(pl_module, Task)
            self._task, self._batches = pl_module, int(trainer.num_training_batches) * trainer.world_size
            self._hooks = [
                pl_module.model.register_forward_pre_hook(self._ask, with_kwargs=True),
                pl_module.model.register_forward_hook(self._take),
            ]

    def _ask(self, model: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._is_traced = options.get("return_trace", False)
        return arguments, {**options, "return_trace": True}

    def _take(self, model: Any, arguments: Any, found: Any) -> Any:
        for hook in self._hooks:
            hook.remove()
        output, trace, *rest = found
        macs = FORWARDS_PER_STEP * sample_macs(trace, self._shape, router_weights(model)) + self._taught
        self._task.measured[TRAIN_FLOPS] = FLOPS_PER_MAC * macs.sum().item() * self._batches
        if self._is_traced:
            return found
        return (output, *rest) if rest else output


def training_section(history: Sequence[Mapping[str, Any]], teacher: ModelShape | None) -> dict[str, Any]:
    """What training cost, for the section `cost`; nothing is said of a training of which an epoch noted nothing.

    Args:
        history: rows of the epochs.
        teacher: shape of the dense model that is learned from; None: there is none.
    """
    section = {} if teacher is None else {"teacher_macs": dense_macs(teacher).total}
    noted = [row[TRAIN_FLOPS] for row in history if TRAIN_FLOPS in row]
    return section if len(noted) < len(history) else {"train_flops": math.fsum(noted), **section}


def router_weights(model: Any) -> dict[int, int]:
    """Multiply-accumulates of each layer's router for one token: each of its matrices meets every token once."""
    return {
        layer: sum(p.numel() for p in model.layers[str(layer)].router.parameters() if p.ndim == 2)
        for layer in model.routed_layers
    }


def _against_target(config: Config, measured: float) -> dict[str, float]:
    """For a run of a stated cost (`isoflop`, `match`) what it was to cost, and how much of that it does."""
    found = {}
    if config.isoflop.by != "none" and config.isoflop.target_macs is not None:
        found = {"isoflop_target": config.isoflop.target_macs}
    if config.match.key is not None and config.match.macs is not None:
        found = {"match_target": config.match.share * config.match.macs}
    return found | {key.replace("target", "ratio"): measured / target for key, target in found.items()}
