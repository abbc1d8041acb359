"""Types and ranges of the keys that say how a model is trained, initialised, executed and tracked.

Plain pydantic models, read by `routing_lab.config`; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from routing_lab.axes.base import Refusal
from routing_lab.axes.base import Strict as _Strict

ALL_ROUTERS = "routers"
"""In `train.frozen`: every router of the model."""


class TrainConfig(_Strict):
    """The recipe (config group `recipe`, package `train`). Epochs are passes over the training split."""

    name: str = Field(min_length=1, description="name of the recipe, kept in the record")
    epochs: int = Field(ge=0, description="0 = no training: the initialised model goes straight to the test split")
    batch_size: int = Field(ge=1, description="examples per optimiser step, over all devices and accumulated batches")
    eval_batch_size: int = Field(ge=1, description="examples per evaluation batch and device")

    optimizer: str = Field(min_length=1, description="a timm optimiser name")
    lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    betas: list[float] | None = Field(min_length=2, max_length=2, description="null = the optimiser's own")
    momentum: float = Field(ge=0, lt=1, description="for the optimisers that have one")
    layer_decay: float | None = Field(gt=0, le=1, description="learning-rate factor per layer, counted from the head")
    clip_grad: float | None = Field(gt=0, description="largest gradient norm")
    accumulate: int = Field(ge=1, description="batches per optimiser step")

    schedule: Literal["cosine", "linear", "step", "constant"]
    min_lr: float = Field(ge=0)
    warmup_epochs: float = Field(ge=0)
    warmup_lr: float = Field(ge=0)
    decay_epochs: float = Field(gt=0, description="schedule=step: epochs between two reductions")
    decay_rate: float = Field(gt=0, le=1, description="schedule=step: factor of one reduction")

    precision: Literal[32, "16-mixed", "bf16-mixed"]
    compile: bool
    ema_decay: float | None = Field(gt=0, lt=1, description="null = no moving average of the weights")

    label_smoothing: float = Field(ge=0, lt=1)
    augment: Literal["none", "light", "standard", "randaugment"]
    mixup: float = Field(ge=0, description="alpha of the Beta distribution; 0 = off")
    cutmix: float = Field(ge=0, description="alpha of the Beta distribution; 0 = off")
    mixup_prob: float = Field(ge=0, le=1, description="probability that a batch is mixed at all")
    erasing: float = Field(ge=0, le=1, description="probability that a part of an image is erased")

    distill: Literal["none", "soft", "hard"]
    distill_alpha: float = Field(ge=0, le=1, description="weight of the teacher's term; the labels have the rest")
    distill_temperature: float = Field(gt=0)
    distill_labels: float | None = Field(default=None, ge=0, description="labels' weight; null = 1 - distill_alpha")
    distill_tokens: Literal["none", "mse", "kl"] = Field(default="none", description="learn the teacher's tokens too")
    distill_tokens_weight: float = Field(default=0.5, ge=0)
    distill_teacher: Literal["dense", "initial"] = Field(
        default="dense", description="the dense run, or the dense model of the weights that the run starts from"
    )

    backbone_lr_factor: float = Field(default=1.0, gt=0, description="learning rate of the backbone over the routers'")
    backbone_freeze_epochs: int = Field(default=0, ge=0, description="epochs in which only the routers learn")
    frozen: list[str] = Field(default=[], description="parts of the backbone, or `routers`, that never learn")

    dynamics: int = Field(default=0, ge=0, description="validation examples whose routing is followed over the epochs")
    selection: Literal["last", "best"] = Field(description="which weights are tested: the last, or the best by val/acc")

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: list[float] | None) -> list[float] | None:
        if betas is not None and not all(0 <= beta < 1 for beta in betas):
            raise ValueError("expected two numbers in [0, 1)")
        return betas

    @field_validator("accumulate")
    @classmethod
    def _accumulate_divides(cls, accumulate: int, info: ValidationInfo) -> int:
        batch_size = info.data.get("batch_size")
        if batch_size is not None and batch_size % accumulate:
            raise ValueError(f"expected a divisor of train.batch_size={batch_size}")
        return accumulate

    @field_validator("min_lr", "warmup_lr")
    @classmethod
    def _at_most_lr(cls, value: float, info: ValidationInfo) -> float:
        lr = info.data.get("lr")
        if lr is not None and value > lr:
            raise ValueError(f"expected at most train.lr={lr}")
        return value

    @property
    def distils(self) -> bool:
        """Whether there is a teacher."""
        return self.distill != "none" or self.distill_tokens != "none"


class _Init(_Strict):
    """What a run starts from.

    is_random: they have learned nothing. is_published: a library knows them by the backbone's name. has_one_width: they
    fit the backbone of the arm and none of another width. is_dense: they are those of the arm's dense run. goes_on:
    they are those of a run that this one goes on from.
    """

    is_random: ClassVar[bool] = False
    is_published: ClassVar[bool] = False
    has_one_width: ClassVar[bool] = False
    is_dense: ClassVar[bool] = False
    goes_on: ClassVar[bool] = False

    @property
    def folder(self) -> Path | None:
        """The folder of the run that this one goes on from; None: there is none, or it is not named."""
        return None

    @property
    def earlier_epochs(self) -> int | None:
        """Epochs of the run of this very configuration, from scratch, that goes on; None: another start."""
        return None

    @property
    def file_entry(self) -> str | None:
        """The entry of `file` that is read; None: the usual ones."""
        return None

    @property
    def solves_head(self) -> bool:
        """Whether the head is then solved in closed form."""
        return False

    def of_dense_run(self, epochs: int) -> tuple[dict[str, Any], int]:
        """The section `init` and the epochs of the dense run that belongs to an arm of so many epochs."""
        return self.model_dump(mode="json"), epochs

    def file(self) -> tuple[str, str, Path] | None:
        """The file of weights that the configuration names: its key, the value there and the path; None without."""
        return None

    def refusals(self, epochs: int | None) -> Iterator[Refusal]:
        """What cannot be started from, whatever files there are; epochs: of the run, None where not known."""
        yield from ()

    def absent(self) -> Iterator[Refusal]:
        """Files that are not on this machine."""
        path = getattr(self, "path", None)
        if path is not None and not Path(path).expanduser().is_file():
            yield "init.path", path, f"no such file (looked at {Path(path).expanduser().absolute()})"


class ScratchInit(_Init):
    """Random weights from the initialisation stream of the seed."""

    is_random: ClassVar[bool] = True

    kind: Literal["scratch"]


class PretrainedInit(_Init):
    """The weights timm publishes for `backbone.timm_name`."""

    is_published: ClassVar[bool] = True
    has_one_width: ClassVar[bool] = True

    kind: Literal["pretrained"]


class CheckpointInit(_Init):
    """Weights from a file: safetensors, or a torch file that loads with `weights_only=True`."""

    kind: Literal["checkpoint"]
    path: str = Field(min_length=1)
    entry: str | None = Field(
        default=None, min_length=1, description="which entry of a torch file, such as model_ema; null = the usual ones"
    )
    readout: bool = Field(
        default=False, description="the head in closed form: ridge regression on the training split's features"
    )

    def file(self) -> tuple[str, str, Path] | None:
        return "init.path", self.path, Path(self.path).expanduser()

    @property
    def file_entry(self) -> str | None:
        return self.entry

    @property
    def solves_head(self) -> bool:
        return self.readout


class DenseInit(_Init):
    """The weights of the dense run of the same backbone, data, recipe and seed, trained first if it is missing."""

    has_one_width: ClassVar[bool] = True
    is_dense: ClassVar[bool] = True

    kind: Literal["dense"]
    epochs: int | None = Field(ge=0, description="epochs of that dense run; null = train.epochs")
    path: str | None = Field(
        default=None, min_length=1, description="file that the dense run starts from; null = random weights"
    )
    readout: bool = Field(default=False, description="the dense run gets its head in closed form; needs init.path")

    def of_dense_run(self, epochs: int) -> tuple[dict[str, Any], int]:
        init: dict[str, Any] = {"kind": "scratch"}
        if self.path is not None:
            init = {"kind": "checkpoint", "path": self.path, "entry": None, "readout": self.readout}
        return init, epochs if self.epochs is None else self.epochs

    def refusals(self, epochs: int | None) -> Iterator[Refusal]:
        if self.readout and self.path is None:
            yield "init.readout", True, "a dense run from random weights learns its head; give init.path too"
        if epochs == 0 and self.epochs is None:
            yield "init.epochs", None, "train.epochs=0 needs the number of epochs of the dense run"


class RunInit(_Init):
    """The weights of a finished run: one in a folder, or that of this configuration with another number of epochs."""

    goes_on: ClassVar[bool] = True

    kind: Literal["run"]
    run: str | None = Field(min_length=1, description="folder of the run")
    epochs: int | None = Field(
        ge=0, description="epochs of the run of this configuration, from scratch, that goes on; instead of a folder"
    )

    @property
    def folder(self) -> Path | None:
        return None if self.run is None else Path(self.run).expanduser()

    @property
    def earlier_epochs(self) -> int | None:
        return self.epochs

    def refusals(self, epochs: int | None) -> Iterator[Refusal]:
        if (self.run is None) == (self.epochs is None):
            message = (
                "give the folder of a finished run, or init.epochs, how long this configuration was trained before"
            )
            yield "init.run", self.run, message

    def absent(self) -> Iterator[Refusal]:
        if self.run is not None and self.epochs is None and not final_weights(self.run).is_file():
            yield "init.run", self.run, f"no finished run (there is no {final_weights(self.run).absolute()})"

    def file(self) -> tuple[str, str, Path] | None:
        return None if self.run is None else ("init.run", self.run, final_weights(self.run))


def final_weights(folder: str | Path) -> Path:
    """Where a run folder holds the weights that were tested."""
    return Path(folder).expanduser() / "checkpoints" / "final.safetensors"


InitConfig = Annotated[ScratchInit | PretrainedInit | CheckpointInit | DenseInit | RunInit, Field(discriminator="kind")]


class RuntimeConfig(_Strict):
    """Where and how fast a run executes; none of it is part of the run's identity."""

    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: int = Field(default=1, ge=1)
    strategy: str = Field(default="auto", min_length=1, description="a Lightning strategy")
    workers: int = Field(default=0, ge=0, description="data-loading processes")
    threads: int | None = Field(
        default=None, ge=1, description="null = one for narrow backbones, else torch's own number"
    )
    progress: Literal["auto", "bar", "plain", "none"] = "auto"
    attention: Literal["fast", "exact"] = Field(
        default="fast",
        description="layers whose attention map is read: output and statistics in one pass, 1e-6 from the untouched "
        "output, or in two that leave it to the last bit",
    )
    verify: Literal["stat", "content"] = Field(
        default="stat", description="how the files of a reused run are compared: names, sizes and times, or every byte"
    )


TrackerName = Literal["wandb", "tensorboard", "csv"]
"""Where a run can be shown while it trains; the record on disk is written in any case."""

TrackingConfig = Literal["wandb", "tensorboard", "csv", "none"] | list[TrackerName]
"""One of them, none, or any number."""


class WandbConfig(_Strict):
    """Weights & Biases, for `tracking=wandb`; `disabled` as well as `tracking=none` leaves it out."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    project: str = Field(default="routing_lab", min_length=1)
    entity: str | None = None
    tags: list[str] = Field(default=[])
