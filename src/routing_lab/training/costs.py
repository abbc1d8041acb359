"""The cost section of a record, from the model that ran and the tokens it really kept.

Multiply-accumulates of one example under the convention of `routing_lab.cost.macs`; a learned router's own are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from routing_lab.cost.macs import (
    LayerRule,
    ModelShape,
    TokenCounter,
    dense_macs,
    layer_rules,
    nominal_tokens,
    routed_macs,
)
from routing_lab.cost.measure import parameter_counts, vision_shape
from routing_lab.routing.budget import percentile_count, topk_count
from routing_lab.routing.capacity import Percentile, TopK

if TYPE_CHECKING:
    from routing_lab.config import Config


class CostMeter:
    """Counts the tokens that each layer treats, and turns them into the record's numbers.

    Args:
        model: the routed model.
        config: the run's configuration.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        self._model: Any = model
        self._shape = vision_shape(self._model.backbone)
        rule = LayerRule(
            sublayer=config.placement.sublayer,
            project=config.bypass.name == "project",
            all_keys=config.visibility.name == "all",
        )
        self._rules = layer_rules(self._shape.depth, self._model.routed_layers, rule)
        self.counter = TokenCounter(self._rules)

    def section(self) -> dict[str, Any]:
        """Parameters and multiply-accumulates; `macs_nominal` is None where the budget depends on the scores."""
        shape = self._shape
        routers = _router_macs(self._model, shape)
        kept = self._nominal_kept()
        nominal = None
        if kept is not None:
            nominal = routed_macs(shape, nominal_tokens(shape, self._rules, kept)).total + routers
        return {
            **parameter_counts(self._model),
            "router_macs": routers,
            "macs_dense": dense_macs(shape).total,
            "macs_nominal": nominal,
            "macs_measured": routed_macs(shape, self.counter.mean()).total + routers,
        }

    def _nominal_kept(self) -> dict[int, int] | None:
        tokens = self._shape.tokens
        kept = {}
        for layer in self._model.routed_layers:
            capacity = self._model.layers[str(layer)].capacity
            protected = capacity.num_protected
            if isinstance(capacity, TopK):
                uncounted = capacity.num_uncounted
                kept[layer] = topk_count(
                    capacity.fraction, capacity.rounding, tokens, num_uncounted=uncounted, num_protected=protected
                )
            elif isinstance(capacity, Percentile):
                count = percentile_count(capacity.fraction, tokens, capacity.compare, capacity.interpolation)
                kept[layer] = max(count, protected)
            else:
                return None
        return kept


def _router_macs(model: Any, shape: ModelShape) -> int:
    """Matrix products of the routers' own parameters: each matrix meets every entering token once."""
    matrices = [
        parameter.numel()
        for layer in model.routed_layers
        for parameter in model.layers[str(layer)].router.parameters()
        if parameter.ndim == 2
    ]
    return shape.tokens * sum(matrices)
