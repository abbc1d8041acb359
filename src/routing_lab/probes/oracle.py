"""How good could a choice be? Tokens chosen by what they are worth, next to the model's own and a random choice.

Shape legend: B examples, N tokens that enter a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from routing_lab.probes.base import Arrays, Examples, Finding, Probe, loss_of, over_targets
from routing_lab.probes.leave_one_out import EFFECTS, Operation, leave_one_out_effects
from routing_lab.routing.layer import SelectionEdit
from routing_lab.routing.maps import Entering
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.tokens import Selection, Tokens
from routing_lab.routing.trace import Trace
from routing_lab.streams import stream_seed

CHOOSERS = ("own", "random", "oracle")

OPERATIONS: tuple[Operation, ...] = ("force_skip", "force_keep")
"""What a kept patch is worth, and what one that is not kept is; the other of the two is zero."""

Values = Callable[[int, Mapping[int, SelectionEdit], Tokens], Tensor]
"""(layer, choices in the layers before, tokens that enter it) -> [B, N]."""


@dataclass(frozen=True)
class LeaveOneOutOracle(Probe):
    """Loss and accuracy at the same budget with the model's own choice of tokens, a random one, and the oracle's.

    The oracle goes from the first routed layer to the last and keeps, as many as the layer's capacity has chosen, the
    patches that are worth most there: the loss without one that is kept (`force_skip`), less the loss with one that is
    not (`force_keep`), after the oracle's choices in the layers before. It is told the targets, so that it cannot be
    deployed; and it is greedy, so that a better choice may exist. Prefix tokens stay as the capacity has chosen.

    `loss/<chooser>` in nats, `accuracy/<chooser>`; `loss/oracle_below_<other>` and `accuracy/oracle_above_<other>`
    example by example (chance: 0).

    Args:
        rows: patches that are left out at once.
    """

    rows: int = 256

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows = {self.rows}: must be at least 1")

    def measure(self, model: RoutedModel, examples: Examples) -> dict[str, np.ndarray]:
        def worth(layer: int, before: Mapping[int, SelectionEdit], tokens: Tokens) -> Tensor:
            found = [
                leave_one_out_effects(
                    model,
                    examples.inputs,
                    examples.targets,
                    layer,
                    operation,
                    {"loss": EFFECTS["loss"]},
                    sample_ids=examples.index,
                    segments=examples.segments,
                    edits=before,
                    rows=self.rows,
                )["loss"]
                for operation in OPERATIONS
            ]
            return torch.stack(found).sum(dim=0)

        def by_chance(layer: int, before: Mapping[int, SelectionEdit], tokens: Tokens) -> Tensor:
            seeds = [[stream_seed(number, "routing"), layer] for number in examples.index.tolist()]
            drawn = np.stack([np.random.default_rng(seed).random(tokens.x.shape[1]) for seed in seeds])
            return torch.from_numpy(drawn).to(tokens.x.device)

        edits = {"own": {}, "random": _chosen(model, examples, by_chance), "oracle": _chosen(model, examples, worth)}
        arrays = {}
        for name in CHOOSERS:
            left, _, _ = _forward(model, examples, edits[name])
            output = model.head(left).float()
            right = (output.argmax(dim=-1) == examples.targets).double()
            arrays[f"loss/{name}"] = loss_of(output, examples.targets).double().cpu().numpy()
            arrays[f"accuracy/{name}"] = over_targets(right, examples.targets).cpu().numpy()
        return arrays

    def summarise(self, arrays: Arrays) -> list[Finding]:
        findings = []
        for name in CHOOSERS:
            findings.append(Finding.mean(f"loss/{name}", arrays[f"loss/{name}"]))
            findings.append(Finding.share(f"accuracy/{name}", arrays[f"accuracy/{name}"]))
        for other in ("own", "random"):
            below = arrays[f"loss/{other}"] - arrays["loss/oracle"]
            above = arrays["accuracy/oracle"] - arrays[f"accuracy/{other}"]
            findings.append(Finding.mean(f"loss/oracle_below_{other}", below, chance=0.0))
            findings.append(Finding.mean(f"accuracy/oracle_above_{other}", above, chance=0.0))
        return findings


# --- private ---


def _forward(
    model: RoutedModel, examples: Examples, edits: Mapping[int, SelectionEdit]
) -> tuple[Tokens, Trace, list[Entering]]:
    """What leaves the last layer, the trace, and what entered each layer."""
    tokens, context = model.embed(examples.inputs, examples.layout)
    state = model.run_state(tokens, sample_ids=examples.index, informative=examples.masks)
    seen: list[Entering] = []
    left, trace = model.forward_from(Entering(0, tokens), context, state, edits, seen=seen)
    return left, trace, seen


def _chosen(model: RoutedModel, examples: Examples, values: Values) -> dict[int, SelectionEdit]:
    """Of every routed layer the choice of the patches with the largest values, after these choices before it."""
    chosen: dict[int, SelectionEdit] = {}
    for layer in model.routed_layers:
        _, trace, seen = _forward(model, examples, chosen)
        tokens, own = seen[layer].tokens, trace[layer].mask()
        free = (tokens.origins() >= 0) & tokens.side().present()
        if tokens.eligible is not None:
            free &= tokens.eligible.mask()
        kept = most_valuable(values(layer, chosen, tokens), own, free)
        chosen[layer] = partial(_instead, Selection.from_mask(kept))
    return chosen


def most_valuable(values: Tensor, own: Tensor, free: Tensor) -> Tensor:
    """[B, N] bool: a choice `own` whose free tokens are replaced by as many of them with the largest values [B, N]."""
    rank = values.masked_fill(~free, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return torch.where(free, rank < (own & free).sum(dim=1, keepdim=True), own)


def _instead(selection: Selection, scores: Tensor, own: Selection) -> Selection:
    return selection
