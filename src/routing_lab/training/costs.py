"""The cost section of a record, from the model that ran and the tokens it really kept.

Multiply-accumulates of one example under the convention of `routing_lab.cost.macs`; a learned router's own are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from routing_lab.config.nominal import layer_tokens, nominal_counts, routing_rules
from routing_lab.cost.macs import block_macs, dense_macs, routed_macs
from routing_lab.cost.measure import WorkMeter, parameter_counts

if TYPE_CHECKING:
    from routing_lab.config import Config
    from routing_lab.cost.macs import ModelShape


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
        self.work = WorkMeter(shape.depth)

    def section(self) -> dict[str, Any]:
        """Parameters and multiply-accumulates.

        `macs_nominal` is None where the budget depends on the scores. `macs_measured` leaves out `statistics_macs`:
        what was computed besides and the method does without (`Work.repeated`), for instance to read statistics off
        maps that attention makes anyway.
        """
        shape, routed = self._shape, self._model.routed_layers
        counts = nominal_counts(self._config, routed, shape.depth, shape.tokens, shape.prefix)
        nominal = None
        if counts is not None:
            routers = _router_macs(self._model, [count.scored for count in counts])
            nominal = (
                routed_macs(shape, layer_tokens(routing_rules(self._config, routed, shape.depth), counts)).total
                + routers
            )
        routers = _router_macs(self._model, self.work.router())
        measured = routed_macs(shape, self.work.mean()).total + routers
        return {
            **parameter_counts(self._model),
            "router_macs": routers,
            "macs_dense": dense_macs(shape).total,
            "macs_nominal": nominal,
            "macs_measured": measured,
            "statistics_macs": block_macs(shape, self.work.repeated()),
            **_against_target(self._config, measured),
        }


def _against_target(config: Config, measured: float) -> dict[str, float]:
    """For a run of a stated cost (`isoflop`, `match`) what it was to cost, and how much of that it does."""
    found = {}
    if config.isoflop.by != "none" and config.isoflop.target_macs is not None:
        found = {"isoflop_target": config.isoflop.target_macs}
    if config.match.key is not None and config.match.macs is not None:
        found = {"match_target": config.match.share * config.match.macs}
    return found | {key.replace("target", "ratio"): measured / target for key, target in found.items()}


def _router_macs(model: Any, tokens: Sequence[float]) -> float:
    """Matrix products of the routers' own parameters: each matrix meets every token that its router reads once."""
    return sum(
        tokens[layer] * parameter.numel()
        for layer in model.routed_layers
        for parameter in model.layers[str(layer)].router.parameters()
        if parameter.ndim == 2
    )
