"""What every task shares: optimiser, schedule, moving average of the weights, seeded dropout, what is measured.

A task is one class. It owns its data, the size of its head, its objective, what it keeps of every example, its metrics
and which of them selects a checkpoint; the run knows none of these. Quantities are accumulated as *totals*, sums over
examples that add up over batches and processes; `metrics_of` makes metrics of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import torch
from timm.optim import (
    create_optimizer_v2,
    get_optimizer_info,
    list_optimizers,
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from routing_lab.config.training import ALL_ROUTERS
from routing_lab.cost.measure import vision_shape
from routing_lab.data import build_data
from routing_lab.keys import is_below
from routing_lab.streams import stream_seed
from routing_lab.tasks.auxiliary import AuxiliaryLosses
from routing_lab.tasks.meters import RoutingMeter, Totals

if TYPE_CHECKING:
    from timm.scheduler.scheduler import Scheduler

    from routing_lab.axes.losses import LossConfig
    from routing_lab.config import Config
    from routing_lab.config.training import TrainConfig
    from routing_lab.cost.macs import LayerTokens, ModelShape


Tested = Callable[[Any, "ModelShape"], tuple[dict[str, float], dict[str, float]]]
"""(loader, shape of the model for one of its examples) -> metrics of a test pass by quantity, and its efficiency."""


class Task(pl.LightningModule):
    """Trains a routed model by a recipe.

    Args:
        model: the routed model; its parameter names are kept under `model.`.
        train: the recipe.
        seed: the run's seed; every epoch's dropout draws from its own stream, so that resuming at an epoch's beginning
            needs no generator state and all arms of a seed see the same numbers.
        outputs: of the head.
        teacher: dense model to learn from, where the recipe distils.
        losses: auxiliary losses by name, the section `losses` of a configuration.

    Attributes:
        measured: what the last training, validation and test epoch measured, by metric name.
        num_examples: examples of the last training epoch, in `unit`, over all processes.
        routing: kept tokens and update ratios of the last evaluation pass.
        predictions: after a test pass, what is kept of every example: arrays sorted by `index`.
        masks: [examples, grid, grid] bool, the patches that decide the class, where the data know (`told`).
    """

    quantities: ClassVar[Sequence[str]]
    """What is measured in every split, by name (`runs.metrics.QUANTITIES`); a record holds it as `<split>/<name>`."""

    selects: ClassVar[str]
    """Which of them, on the validation split, selects a checkpoint."""

    unit: ClassVar[str] = "images"
    """What throughput counts: the record's `train_<unit>_per_second`."""

    def __init__(
        self,
        model: nn.Module,
        train: TrainConfig,
        seed: int,
        outputs: int,
        teacher: nn.Module | None = None,
        losses: Mapping[str, LossConfig] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        if (teacher is not None) != train.distils:
            given = f"train.distill={train.distill!r}, train.distill_tokens={train.distill_tokens!r}"
            raise ValueError(f"{given} {'needs a' if teacher is None else 'takes no'} teacher")
        self.model = model
        self.train_config = train
        self.seed = seed
        if train.frozen:
            freeze(model, train.frozen)
        self.ema = None
        if train.ema_decay is not None:
            self.ema = ModelEmaV3(model, decay=train.ema_decay)
            # For averages in bfloat16, which these are not; a generator cannot be sent to another process.
            self.ema._sr_generator = None  # type: ignore[assignment]
        self.measured: dict[str, float] = {}
        self.num_examples = 0
        self.routing = RoutingMeter(getattr(model, "routed_layers", ()))
        self.auxiliary = AuxiliaryLosses(losses if self.routing.layers else {})
        self.predictions: dict[str, np.ndarray] = {}
        self.masks: Tensor | None = None
        self._teacher = [] if teacher is None else [teacher.eval().requires_grad_(False)]
        self._train_totals = Totals()
        self._val_totals = Totals()
        self._test_batches: list[dict[str, Tensor]] = []
        self._total_steps = 1
        if train.compile:
            # In place: `self.model = torch.compile(model)` would rename every parameter.
            self.model.compile()

    # --- what a run has to ask before there is a model ---

    @classmethod
    def build_data(cls, config: Config) -> Any:
        """The data module: loaders for `train`, `val` and `test`; `sizes` and `fingerprint` for the record."""
        return build_data(config.data, config.train, config.seed, config.runtime)

    @classmethod
    def outputs(cls, data: Any) -> int:
        """Outputs of the head."""
        return int(data.num_classes)

    @classmethod
    def data_section(cls, config: Config, data: Any) -> dict[str, Any]:
        """The record's `data` section."""
        sizes, fingerprint = data.sizes, data.fingerprint
        return {
            "name": config.data.name,
            "num_classes": cls.outputs(data),
            "sizes": sizes,
            "fingerprint": fingerprint,
        }

    # --- what a task is ---

    @abstractmethod
    def objective(self, batch: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Of a training batch the loss, its totals, and by name further terms of the loss, means over the batch.

        The totals hold `examples`, how many `unit`s the batch has, and what `metrics_of` needs.
        """

    @abstractmethod
    def examples(self, batch: Any) -> tuple[dict[str, Tensor], Any]:
        """Of an evaluation batch what is kept of every example, `index` among it, and the trace."""

    @abstractmethod
    def totals(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over examples, in double precision, of what `examples` gives."""

    @abstractmethod
    def metrics_of(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The task's `quantities` from totals over any number of batches."""

    def stored(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The part of the test pass' arrays that is written to predictions.npz."""
        return arrays

    def cost_shape(self, data: Any) -> ModelShape:
        """The shape of the model that is counted for an example of the data module.

        Raises ValueError for a model that the cost model does not know.
        """
        return vision_shape(self.model.get_submodule("backbone"))

    def inspect(self, data: Any) -> None:
        """Take from the data module what it knows of its examples beyond what batches hold."""
        self.masks = getattr(data, "masks", None)

    def efficiency(self, macs: Mapping[str, Any], shape: ModelShape, layers: Sequence[LayerTokens]) -> dict[str, float]:
        """What routing saved in a test pass, for the record's section `cost`: the share of the dense model's
        multiply-accumulates, and what a task says besides.

        Args:
            macs: that section so far.
            shape: of the model, for one example.
            layers: what each layer computed of it, in the mean.
        """
        return {"macs_fraction": macs["macs_measured"] / macs["macs_dense"]}

    def further_tests(
        self, config: Config, data: Any, tested: Tested, saved: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics, and entries for the section `cost`, of passes over other examples than those of the test split.

        saved: the efficiency there.
        """
        return {}, {}

    @property
    def evaluated(self) -> nn.Module:
        """The module that is validated, tested and kept: the moving average where there is one."""
        return self.model if self.ema is None else self.ema.module

    def running(self) -> dict[str, float]:
        """Training metrics of the epoch so far, for a progress bar."""
        return self._train_totals.named("train", self.metrics_of)

    def evaluate_model(self, *inputs: Tensor, index: Tensor) -> tuple[Any, Any]:
        """The evaluated model's output and trace; `index` numbers the examples, for routing noise."""
        return self.evaluated(*inputs, return_trace=True, sample_ids=index, **self.told(index))

    def told(self, index: Tensor) -> dict[str, Tensor]:
        """What an oracle is told of the examples with these indices, as an argument of the model: `informative`,
        [B, P] bool; nothing where the data do not know.
        """
        return {} if self.masks is None else {"informative": self.masks[index.cpu()].flatten(1).to(index.device)}

    # --- training and evaluation, from the parts above ---

    def on_fit_start(self) -> None:
        for teacher in self._teacher:
            teacher.to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, totals, terms = self.objective(batch)
        with torch.no_grad():
            self._train_totals.update(totals, {"loss": loss, **{f"loss_{name}": term for name, term in terms.items()}})
        return loss

    def _close_training_epoch(self) -> None:
        """Reduce the epoch's totals, before validation meets weights that are not finite."""
        if not self._train_totals.update_called:
            return
        self._train_totals.sync(should_sync=self.trainer.world_size > 1)
        self.num_examples = int(self._train_totals.sums()["examples"])
        means = self._train_totals.named("train", self.metrics_of)
        self.measured |= means
        if not np.isfinite(means["train/loss"]):
            raise ValueError(
                f"the training loss of epoch {self.current_epoch} is {means['train/loss']}: lower"
                f" train.lr={self.train_config.lr} or set train.clip_grad"
            )

    def on_validation_epoch_start(self) -> None:
        self._close_training_epoch()
        self._val_totals.reset()
        self.routing.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        arrays, trace = self.examples(batch)
        self._val_totals.update(self.totals(arrays))
        self.routing.update(trace, **self.told(arrays["index"]))
        return {"trace": trace}

    def on_validation_epoch_end(self) -> None:
        for meter in (self.routing, self._val_totals):
            meter.sync(should_sync=self.trainer.world_size > 1)
        self.measured |= self._val_totals.named("val", self.metrics_of)

    def on_test_epoch_start(self) -> None:
        self.routing.reset()
        self._test_batches = []

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        arrays, trace = self.examples(batch)
        self.routing.update(trace, **self.told(arrays["index"]))
        self._test_batches.append({name: values.cpu() for name, values in arrays.items()})
        return {"trace": trace, "index": arrays["index"]}

    def on_test_epoch_end(self) -> None:
        batches, self._test_batches = self._test_batches, []
        arrays = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        order = arrays["index"].argsort(stable=True)
        arrays = {name: values[order] for name, values in arrays.items()}
        totals = {name: value.item() for name, value in self.totals(arrays).items()}
        self.measured |= {f"test/{name}": value for name, value in self.routing.metrics().items()}
        self.measured |= {f"test/{name}": value for name, value in self.metrics_of(totals).items()}
        self.predictions = self.stored({name: values.numpy() for name, values in arrays.items()})

    # --- optimisation ---

    def configure_optimizers(self) -> Any:
        total = int(self.trainer.estimated_stepping_batches)
        self._total_steps = max(1, total)
        optimizer = build_optimizer(self.model, self.train_config)
        scheduler = build_scheduler(optimizer, self.train_config, total // max(1, self.train_config.epochs))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Scheduler, metric: Any) -> None:  # type: ignore[override]
        scheduler.step_update(num_updates=self.global_step)
        self._hold_backbone()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None:
            self.ema.update(self.model)

    @property
    def progress(self) -> float:
        """How far training has come, in [0, 1]."""
        return min(1.0, self.global_step / self._total_steps)

    def on_train_epoch_start(self) -> None:
        self._train_totals.reset()
        if self.train_config.backbone_freeze_epochs:
            # The rate that this epoch begins with: at the end of the one before, the backbone was still held.
            scheduler: Any = self.lr_schedulers()
            self.lr_scheduler_step(scheduler, None)
        torch.manual_seed(stream_seed(self.seed, "dropout", self.current_epoch, self.global_rank))

    def _hold_backbone(self) -> None:
        """In the first `train.backbone_freeze_epochs` epochs the backbone's learning rate is zero."""
        if self.current_epoch < self.train_config.backbone_freeze_epochs:
            for group in self.trainer.optimizers[0].param_groups:
                if group["part"] == "backbone":
                    group["lr"] = 0.0


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """The recipe's timm optimiser over the model's parameters.

    Biases, norms and whatever the model lists in `no_weight_decay()` are not decayed. With `layer_decay` the learning
    rate falls by that factor from each layer to the one below it; `backbone_lr_factor` multiplies that of the whole
    backbone. Routers train at the full rate.

    Raises:
        ValueError: an optimiser that timm does not have.
    """
    check_optimizer(train.optimizer)
    info = get_optimizer_info(train.optimizer)
    options: dict[str, Any] = {}
    if train.betas is not None and info.has_betas:
        options["betas"] = tuple(train.betas)
    if train.optimizer in ("adam", "adamw") and train.precision == 32:
        # One kernel for all parameters. Lightning refuses to clip beside it in mixed precision.
        options["fused"] = True
    if train.layer_decay is not None or train.backbone_lr_factor != 1 or train.backbone_freeze_epochs:
        options["param_group_fn"] = lambda _: _groups(model, train)
    optimizer: torch.optim.Optimizer = create_optimizer_v2(
        model, opt=train.optimizer, lr=train.lr, weight_decay=train.weight_decay, momentum=train.momentum, **options
    )
    return optimizer


def freeze(model: nn.Module, names: Iterable[str]) -> None:
    """Make parameters of a routed model's backbone, or all of a module's, constants; `routers` are all its routers.

    Raises:
        ValueError: a name that the backbone has neither as a parameter nor as a module.
    """
    backbone = model.get_submodule("backbone")
    for name in names:
        if name == ALL_ROUTERS:
            for key, parameter in model.state_dict(keep_vars=True).items():
                parameter.requires_grad_(parameter.requires_grad and not key.startswith("router."))
            continue
        found = [value for own, value in backbone.named_parameters(remove_duplicate=False) if is_below(own, [name])]
        if not found:
            parts = [*dict(backbone.named_parameters(recurse=False)), *dict(backbone.named_children())]
            raise ValueError(
                f"train.frozen={name!r}: the backbone has no such parameter or module; it has {', '.join(parts)}"
            )
        for parameter in found:
            parameter.requires_grad_(False)


def check_optimizer(name: str) -> None:
    """Raise ValueError, with the accepted names, for an optimiser that timm does not have."""
    known = [str(known) for known in list_optimizers()]
    if name not in known:
        raise ValueError(f"train.optimizer={name!r}: expected a timm optimiser, one of {', '.join(known)}")


def build_scheduler(optimizer: torch.optim.Optimizer, train: TrainConfig, steps_per_epoch: int) -> Scheduler:
    """The recipe's timm schedule, updated after every optimiser step."""
    names = {"cosine": "cosine", "linear": "poly", "step": "step", "constant": "step"}
    rates = {"linear": 1.0, "constant": 1.0}  # the power of `poly`; a `step` that changes nothing
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=names[train.schedule],
        num_epochs=max(1, train.epochs),
        decay_epochs=train.decay_epochs,
        decay_rate=rates.get(train.schedule, train.decay_rate),
        min_lr=train.min_lr,
        warmup_lr=train.warmup_lr,
        warmup_epochs=train.warmup_epochs,  # type: ignore[arg-type]  # counted in steps, it may be a fraction
        step_on_epochs=False,
        updates_per_epoch=max(1, steps_per_epoch),
    )
    if any("lr_scale" in group for group in optimizer.param_groups):
        scheduler.step_update(num_updates=0)  # timm scales a rate when it changes it, and so not yet
    return scheduler


def _groups(model: Any, train: TrainConfig) -> list[dict[str, Any]]:
    """Parameter groups, each with its `part` (backbone or router) and the factor `lr_scale` of its learning rate."""
    backbone = model.backbone
    options: dict[str, Any] = {
        "weight_decay": train.weight_decay,
        "no_weight_decay_list": backbone.no_weight_decay() if hasattr(backbone, "no_weight_decay") else (),
    }
    groups: list[dict[str, Any]]
    if train.layer_decay is None:
        groups = param_groups_weight_decay(backbone, **options)
    else:
        groups = param_groups_layer_decay(backbone, **options, layer_decay=train.layer_decay)
    for group in groups:
        group |= {"part": "backbone", "lr_scale": group.get("lr_scale", 1.0) * train.backbone_lr_factor}
    routers = param_groups_weight_decay(model.layers, train.weight_decay)
    groups += [{**group, "part": "router", "lr_scale": 1.0} for group in routers]
    return [group for group in groups if group["params"]]
