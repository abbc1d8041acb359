"""What is measured, declared once: key, how it is shown, its unit and which direction is better.

Choosing a checkpoint, tables, verdicts, dashboards and figures all ask here. A task names the quantities it measures; a
record holds them per split, as `test/acc`. What was measured on examples of another length carries it behind `@`, as
`test/ppl@512` and `cost/attended_fraction@512`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

Kind = Literal["text", "count", "percent", "number", "fraction", "macs", "p", "ratio", "seconds", "interval"]
"""What a number is; `evidence.formatting` says how each kind looks."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Metric:
    """How a measured quantity is named and shown."""

    key: str
    label: str
    kind: Kind
    higher_is_better: bool
    unit: str = ""

    @property
    def heading(self) -> str:
        """Label with its unit."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    @property
    def difference_heading(self) -> str:
        """Heading of a difference of two values."""
        return f"difference in {self.label}, points" if self.kind == "percent" else f"difference in {self.label}"

    @property
    def is_exact(self) -> bool:
        """Whether the quantity is counted, so that equal values under all seeds are no coincidence."""
        return self.kind in ("macs", "count")

    @property
    def factor(self) -> float:
        """What a stored value is multiplied by to be drawn on an axis under `heading`."""
        return 100.0 if self.kind == "percent" else 1.0

    def is_better(self, value: float, than: float) -> bool:
        """Whether a value is strictly better than another."""
        return value > than if self.higher_is_better else value < than


def _declared(metrics: Iterable[Metric]) -> Mapping[str, Metric]:
    return MappingProxyType({metric.key: metric for metric in metrics})


QUANTITIES = _declared(
    [
        Metric("acc", "accuracy", "percent", True, "%"),
        Metric("top5", "top-5 accuracy", "percent", True, "%"),
        Metric("loss", "loss", "number", False),
        Metric("ppl", "perplexity", "number", False),
        Metric("bits_per_byte", "bits per byte", "number", False),
        Metric("informative_recall", "informative tokens kept", "percent", True, "%"),
        Metric("attended_drift", "change of the attended fraction to the longest texts", "fraction", False),
    ]
)
"""What tasks measure, by the name that follows the split."""

OF_PREDICTIONS = "test/acc"
"""The metric that `predictions.npz` decides: the share of the test examples whose prediction is their target."""

HEADLINES = tuple(f"test/{name}" for name in ("ppl", "acc", "loss"))
"""What a table shows of a run that is asked for nothing else: the first that runs have."""

TRAIN_FLOPS = "cost/train_flops"
"""Floating-point operations of training: of an epoch in a row of a history, of all epochs in a record."""

COSTS = _declared(
    [
        Metric("cost/params", "params", "count", False),
        Metric("cost/router_params", "router params", "count", False),
        Metric("cost/macs_measured", "MACs", "macs", False),
        Metric("cost/macs_nominal", "nominal MACs", "macs", False),
        Metric("cost/macs_dense", "dense MACs", "macs", False),
        Metric("cost/macs_sd", "sd of MACs over examples", "macs", False),
        Metric("cost/router_macs", "router MACs", "macs", False),
        Metric("cost/teacher_macs", "teacher MACs", "macs", False),
        Metric("cost/tokens_processed", "tokens processed", "fraction", False),
        Metric(TRAIN_FLOPS, "training FLOPs", "macs", False),
        Metric("cost/attended_fraction", "attended", "fraction", False),
        Metric("cost/kv_bytes", "KV cache", "count", False, "bytes"),
        Metric("cost/kv_fraction", "KV bytes of dense", "fraction", False),
        Metric("cost/macs_fraction", "MACs of dense", "fraction", False),
        Metric("cost/train_seconds", "train", "seconds", False, "s"),
        Metric("cost/train_images_per_second", "training throughput", "number", True, "images/s"),
        Metric("cost/train_tokens_per_second", "training throughput", "number", True, "tokens/s"),
    ]
)
"""What every run costs, by its key in the record's section `cost`."""

ATTENDED = "cost/attended_fraction"

EFFICIENCIES = (ATTENDED, "cost/kv_fraction", "cost/macs_fraction", "cost/tokens_processed")
"""What routing saved, beside the metrics of a run that measures it: attending tokens of the routed layers, and bytes of
keys and values, multiply-accumulates and tokens of all layers that the dense model has.
"""

DYNAMICS = _declared(
    [
        Metric("dynamics/overlap", "overlap of kept patches with the epoch before", "fraction", True),
        Metric("dynamics/spread", "spread of the scores", "number", True),
        Metric("dynamics/entropy", "indecision of the scores", "fraction", False),
        Metric("dynamics/dead", "patches that no layer keeps", "fraction", False),
        Metric("dynamics/grad_norm", "gradient norm", "number", False),
        Metric("dynamics/spikes", "loss spikes", "count", False),
    ]
)
"""What the history of a run with `train.dynamics` holds besides, mean over the routed layers."""

THROUGHPUTS = tuple(key for key in COSTS if key.endswith("_per_second"))


def is_declared(key: str) -> bool:
    """Whether a record of a shipped task may hold this key."""
    key, _ = at_length(key)
    split, _, name = key.partition("/")
    return key in COSTS or (split in SPLITS and name in QUANTITIES)


def at_length(key: str) -> tuple[str, int | None]:
    """A record's key without the length that it was measured at, and that length; None: the one of training."""
    name, _, length = key.rpartition("@")
    return (name, int(length)) if name and length.isdecimal() else (key, None)


def metric(key: str) -> Metric:
    """The declaration of a record's key, `test/acc` or `cost/params`.

    A quantity that nobody declared is a plain number that is better when higher.
    """
    bare, length = at_length(key)
    split, _, name = bare.partition("/")
    if split in SPLITS and name in QUANTITIES:
        return replace(QUANTITIES[name], key=key, label=key)  # the key says the split too
    found = COSTS.get(bare) or QUANTITIES.get(bare) or DYNAMICS.get(bare)
    if found is None:
        return Metric(key, key, "number", True)
    return found if length is None else replace(found, key=key, label=f"{found.label} at {length} tokens")
