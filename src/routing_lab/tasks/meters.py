"""What is added up over the batches of an epoch: torchmetrics' metrics, which it adds up over processes too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from routing_lab.routing.measures import informative_kept, kept_patches

_SUM, _MEAN = "sum_", "_x_examples"


class Sums(Metric):
    """Named sums over batches, and over processes after `sync`.

    They are of double precision, so that they are the same however many processes share the examples, and stay on the
    device until they are asked for.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)  # a progress bar reads them in one process only

    def compute(self) -> dict[str, Any]:
        """The sums as numbers, or lists of them, by name; empty where nothing was added."""
        return self.sums()

    def sums(self) -> dict[str, Any]:
        """`compute` of what is here now, which does not undo `sync`."""
        if not self.update_called:
            return {}
        return {name.removeprefix(_SUM): getattr(self, name).tolist() for name in self._defaults}

    def _add(self, values: Mapping[str, Tensor]) -> None:
        """Add a batch's values, of any shape, the same for each name in all batches."""
        for name, value in values.items():
            value = value.detach()
            value = value.double() if value.device.type != "mps" else value.float()
            state = _SUM + name
            if state not in self._defaults:
                self.add_state(state, torch.zeros_like(value), dist_reduce_fx="sum")
            setattr(self, state, getattr(self, state) + value)


class Totals(Sums):
    """A task's totals, and means over their `examples`."""

    def update(self, totals: Mapping[str, Tensor], means: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Add a batch's totals, and means over its `examples`."""
        count = totals["examples"]
        self._add({**totals, **{name + _MEAN: mean.detach() * count for name, mean in means.items()}})

    def named(self, split: str, metrics_of: Callable[[Mapping[str, float]], dict[str, float]]) -> dict[str, float]:
        """The metrics of a split under their keys in a record; what was added as a mean is one, and wins."""
        sums = self.sums()
        if not sums:
            return {}
        means = {name.removesuffix(_MEAN): sums[name] / sums["examples"] for name in sums if name.endswith(_MEAN)}
        found = metrics_of({name: value for name, value in sums.items() if not name.endswith(_MEAN)})
        return {f"{split}/{name}": value for name, value in (found | means).items()}


class RoutingMeter(Sums):
    """What routing did in one evaluation pass.

    Args:
        layers: zero-based indices of the routed layers.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        super().__init__()
        self.layers = list(layers)

    def update(self, trace: Any, informative: Tensor | None = None) -> None:
        """Add one batch's trace; informative: [B, P] bool, the patches that decide the class, where the data know."""
        if not self.layers:
            return
        parts = [_layer_sums(trace[layer]) for layer in self.layers]
        values = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        if trace[self.layers[0]].scores is not None:  # routing does not rest in evaluation
            kept = kept_patches(trace, self.layers)
            reached = kept.any(dim=0)
            values |= {
                "load": kept.sum(dim=(1, 2)),
                "reached": reached.sum(),
                "patches": torch.ones_like(reached).sum(),
            }
            if informative is not None:
                values["found"] = informative_kept(trace, informative).sum(dim=1)
                values["informative"] = informative.sum().expand_as(values["found"])
        self._add(values)

    def kept_fraction(self) -> dict[int, float]:
        """Kept over entering tokens of each routed layer; remaining over entering ones where tokens are removed."""
        return self._ratio("treated", "entering")

    def update_ratio(self) -> dict[int, float]:
        """Mean absolute multiplier of the kept tokens' updates at each routed layer; 1 where nothing is multiplied.

        With A-MoD's raw attention scores (Eq. 4) in MoD's output rule (Eq. 2) it is about 1/N.
        """
        return self._ratio("multipliers", "kept")

    def informative_recall(self) -> dict[int, float]:
        """Share of the patches that decide the class which each routed layer keeps; empty where the data do not know.

        A router that knows nothing keeps about `kept_fraction` of them.
        """
        return self._ratio("found", "informative")

    def sharing(self) -> dict[str, float]:
        """How routing shares its layers out; empty where none routes.

        `dead_token_ratio`: share of the patches that no routed layer keeps (after Mixture-of-Recursions, 2507.10524).
        `maximum_violation`: (largest load - mean load) / mean load of the routed layers, the load being patches kept
        (MaxVio of Wang et al. 2024, 2408.15664, of layers for experts): zero where all keep as many.
        """
        sums = self.sums()
        if not sums.get("patches"):
            return {}
        mean = sum(sums["load"]) / len(sums["load"])
        return {
            "dead_token_ratio": 1 - sums["reached"] / sums["patches"],
            "maximum_violation": max(sums["load"]) / mean - 1 if mean else 0.0,
        }

    def metrics(self) -> dict[str, float]:
        """What counts as a metric of the split, by name."""
        recall = self.informative_recall()
        return {"informative_recall": sum(recall.values()) / len(recall)} if recall else {}

    def section(self) -> dict[str, Any]:
        """The record's section `routing`."""
        recall = self.informative_recall()
        return {
            "routed_layers": self.layers,
            "index_base": 0,
            "kept_fraction": self.kept_fraction(),
            "update_ratio": self.update_ratio(),
            **self.sharing(),
            **({"informative_recall": recall} if recall else {}),
        }

    def _ratio(self, above: str, below: str) -> dict[int, float]:
        sums = self.sums()
        if below not in sums:
            return {}
        rows = zip(self.layers, sums[above], sums[below], strict=True)
        # No token reaches a layer behind which all have halted.
        return {layer: part / whole for layer, part, whole in rows if whole}


def _layer_sums(layer: Any) -> dict[str, Tensor]:
    """How many tokens are kept, enter, and are computed by the routed part, and the sum of absolute multipliers."""
    kept, entering, treated = (count.sum().float() for count in (layer.counts, layer.entering, layer.treated))
    multipliers = kept
    if layer.gate is not None:
        multipliers = layer.gate.abs().float().masked_fill(layer.kept < 0, 0.0).sum()
    return {"kept": kept, "entering": entering, "multipliers": multipliers, "treated": treated}
