"""Does a score know which tokens matter? Scores against the leave-one-out importance of tokens in the deployed model.

Shape legend: B examples, L routed layers, P patches, N tokens that enter a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from routing_lab.assembly import route
from routing_lab.attention import StatisticsRequest
from routing_lab.probes.base import Arrays, Examples, Finding, Probe, patch_scores
from routing_lab.probes.leave_one_out import EFFECTS, Operation, leave_one_out_effects
from routing_lab.probes.metrics import COEFFICIENTS, finite_mean, pooled_interval, within
from routing_lab.routing.maps import Entering
from routing_lab.routing.measures import at, is_patch, positions
from routing_lab.routing.model import RoutedModel
from routing_lab.streams import stream_seed

SCORERS = ("score", "received", "random", "shuffled")
"""The layer's own score; the attention that patches received in the layer before, whatever the model routes by; a
random number; the own scores of the image in another order."""


@dataclass(frozen=True)
class Importance(Probe):
    """Importance of every patch in every routed layer, and how well scores rank it.

    A patch's importance in the deployed model is what keeping it in that layer is worth: the loss without it where the
    layer keeps it (`force_skip`), the loss as it is less the loss with it where the layer bypasses it (`force_keep`).
    In the dense model of the same weights it is what the loss rises by when the patch is deleted after the embedding;
    of a text, every token of which has an output, nothing is deleted, and its patches are its tokens.

    `<coefficient>/<scorer>`: correlation within an image of a scorer (see `SCORERS`) with the importance in the
    deployed model; `<coefficient>/<scorer>_and_dense`: with that in the dense model; `spearman/<scorer>_and_<effect>`:
    with the fall of the true logit or the KL divergence of the prediction; `pooled_spearman/<scorer>`: over the patches
    of all images. Without a layer: the mean over the routed layers. Chance is 0.
    `worth_of_kept`, `worth_of_bypassed`: mean importance of either, in nats.

    Args:
        dense: measure the dense model too.
        rows: patches that are left out at once.
    """

    dense: bool = True
    rows: int = 256

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows = {self.rows}: must be at least 1")

    def measure(self, model: RoutedModel, examples: Examples) -> dict[str, np.ndarray]:
        tokens, context = model.embed(examples.inputs, examples.layout)
        entering: list[Entering] = []
        state = model.run_state(tokens, sample_ids=examples.index)
        _, trace = model.forward_from(Entering(0, tokens), context, state, seen=entering)
        layers, places, patches = model.routed_layers, positions(trace), is_patch(trace)

        def aligned(values: Tensor, layer: int) -> np.ndarray:
            found = at(values.double(), places[layer]).masked_fill(places[layer] < 0, float("nan"))
            return found[:, patches].cpu().numpy()

        def left_out(layer: int, operation: Operation) -> dict[str, Tensor]:
            return leave_one_out_effects(
                model,
                examples.inputs,
                examples.targets,
                layer,
                operation,
                EFFECTS,
                sample_ids=examples.index,
                segments=examples.segments,
                rows=self.rows,
            )

        worth: dict[str, list[np.ndarray]] = {name: [] for name in EFFECTS}
        for layer in layers:
            skipped, kept = left_out(layer, "force_skip"), left_out(layer, "force_keep")
            for name, values in worth.items():
                values.append(aligned(skipped[name] + kept[name], layer))  # one of the two is zero
        own = patch_scores(trace, layers)
        arrays = {
            "layer": np.tile(np.array(layers), (len(examples.index), 1)),
            "kept": np.stack([aligned(trace[layer].mask(), layer) for layer in layers], axis=1),
            "score": own,
            "received": np.stack([aligned(*_received(model, entering, context, layer)) for layer in layers], axis=1),
            **_by_chance(own, examples.index.tolist()),
            **{f"worth.{name}": np.stack(values, axis=1) for name, values in worth.items()},
        }
        if self.dense and examples.targets.dim() == 1:
            plain = route(model.backbone, ["router=dense"]).eval()
            dropped = leave_one_out_effects(
                plain, examples.inputs, examples.targets, None, "drop_input", EFFECTS, rows=self.rows
            )
            arrays |= {f"dense.{name}": values[:, patches].cpu().numpy() for name, values in dropped.items()}
        return arrays

    def summarise(self, arrays: Arrays) -> list[Finding]:
        findings = [
            Finding.mean(f"spearman/{scorer}", self._over_layers(arrays, scorer), chance=0.0) for scorer in SCORERS
        ]
        for rank, layer in enumerate(arrays["layer"][0].tolist()):
            worth = {name: arrays[f"worth.{name}"][:, rank] for name in EFFECTS}
            kept = arrays["kept"][:, rank]
            for name, side in (("worth_of_kept", kept == 1), ("worth_of_bypassed", kept == 0)):
                findings.append(Finding.mean(name, _mean_of(worth["loss"], side), layer=layer))
            for scorer in SCORERS:
                values = arrays[scorer][:, rank]
                for coefficient in COEFFICIENTS:
                    found = within(values, worth["loss"], coefficient)
                    findings.append(Finding.mean(f"{coefficient}/{scorer}", found, layer=layer, chance=0.0))
                    if "dense.loss" in arrays:
                        found = within(values, arrays["dense.loss"], coefficient)
                        findings.append(
                            Finding.mean(f"{coefficient}/{scorer}_and_dense", found, layer=layer, chance=0.0)
                        )
                for name in ("logit", "kl"):
                    found = within(values, worth[name], "spearman")
                    findings.append(Finding.mean(f"spearman/{scorer}_and_{name}", found, layer=layer, chance=0.0))
                value, low, high, n = pooled_interval(values, worth["loss"], "spearman")
                findings.append(Finding(f"pooled_spearman/{scorer}", value, low, high, n, layer=layer, chance=0.0))
        return findings

    def _over_layers(self, arrays: Arrays, scorer: str) -> np.ndarray:
        """[B] mean over the routed layers of the rank correlation with the importance in the deployed model."""
        found = [
            within(arrays[scorer][:, rank], arrays["worth.loss"][:, rank], "spearman")
            for rank in range(arrays["layer"].shape[1])
        ]
        return finite_mean(np.stack(found), axis=0)


def _received(model: RoutedModel, entering: list[Entering], context: object, layer: int) -> tuple[Tensor, int]:
    """Mean attention over heads that each token received in the layer before, and that layer; its own in layer 0."""
    layer = max(layer - 1, 0)
    block = model.adapter.block(layer)
    request = StatisticsRequest(received=True)
    found = block.statistics(entering[layer].tokens.side(), context, request).received
    assert found is not None
    return found.mean(dim=1), layer


def _by_chance(scores: np.ndarray, index: list[int]) -> dict[str, np.ndarray]:
    """Random scores, and the given ones shuffled among the patches that have one; the same for an example always."""
    drawn, shuffled = np.empty_like(scores), scores.copy()
    for row, number in enumerate(index):
        generator = np.random.default_rng([stream_seed(number, "routing"), number])
        drawn[row] = generator.random(scores.shape[1:])
        for layer in range(scores.shape[1]):
            present = np.isfinite(scores[row, layer])
            shuffled[row, layer, present] = generator.permutation(scores[row, layer, present])
    return {"random": drawn, "shuffled": shuffled}


def _mean_of(values: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Mean of the values [B, P] on one side, per example; NaN where it is empty."""
    mean: Callable[[np.ndarray], float] = lambda row: float(row.mean()) if len(row) else float("nan")  # noqa: E731
    return np.array([mean(row[chosen & np.isfinite(row)]) for row, chosen in zip(values, side, strict=True)])
