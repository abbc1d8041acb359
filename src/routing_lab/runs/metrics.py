"""What is measured, declared once: key, how it is shown, its unit and which direction is better.

Choosing a checkpoint, tables, verdicts, dashboards and figures all ask here. A task names the quantities it measures; a
record holds them per split, as `test/acc`.
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
        Metric("informative_recall", "informative patches kept", "percent", True, "%"),
    ]
)
"""What tasks measure, by the name that follows the split."""

HEADLINES = tuple(f"test/{name}" for name in ("ppl", "acc", "loss"))
"""What a table shows of a run that is asked for nothing else: the first that runs have."""

COSTS = _declared(
    [
        Metric("cost/params", "params", "count", False),
        Metric("cost/router_params", "router params", "count", False),
        Metric("cost/macs_measured", "MACs", "macs", False),
        Metric("cost/macs_nominal", "nominal MACs", "macs", False),
        Metric("cost/macs_dense", "dense MACs", "macs", False),
        Metric("cost/router_macs", "router MACs", "macs", False),
        Metric("cost/train_seconds", "train", "seconds", False, "s"),
        Metric("cost/train_images_per_second", "training throughput", "number", True, "images/s"),
        Metric("cost/train_tokens_per_second", "training throughput", "number", True, "tokens/s"),
    ]
)
"""What every run costs, by its key in the record's section `cost`."""

THROUGHPUTS = tuple(key for key in COSTS if key.endswith("_per_second"))


def is_declared(key: str) -> bool:
    """Whether a record of a shipped task may hold this key."""
    split, _, name = key.partition("/")
    return key in COSTS or (split in SPLITS and name in QUANTITIES)


def metric(key: str) -> Metric:
    """The declaration of a record's key, `test/acc` or `cost/params`.

    A quantity that nobody declared is a plain number that is better when higher.
    """
    split, _, name = key.partition("/")
    if split in SPLITS and name in QUANTITIES:
        return replace(QUANTITIES[name], key=key, label=key)  # the key says the split too
    return COSTS.get(key) or QUANTITIES.get(key) or Metric(key, key, "number", True)
