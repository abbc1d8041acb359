"""How a router chooses: how much, alike in different layers or not, by position or by content, in training as deployed.

Shape legend: B examples, L routed layers, P patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from routing_lab.probes.base import (
    Arrays,
    Examples,
    Finding,
    Probe,
    kept_patches,
    loss_of,
    over_targets,
    patch_scores,
    traced,
)
from routing_lab.probes.metrics import chance_overlap, position_predictability, within
from routing_lab.routing.measures import jaccard
from routing_lab.routing.model import RoutedModel


@dataclass(frozen=True)
class SelectionBehaviour(Probe):
    """What the selection looks like over many examples.

    `kept` fraction of the patches by layer, and by class (`kept_of_class_<c>`) and difficulty (`kept_of_easy`,
    `kept_of_hard`: halves by loss). `overlap`: Jaccard index of one routed layer's choice with the next one's (chance:
    that of two random choices of the same sizes). `overlap_rank`: Spearman correlation of their scores within an
    image. `by_position`: how often a patch's position alone tells whether it is kept (chance: the majority guess).
    `training_agreement`: Jaccard index of the choice in training mode and in evaluation. `dead`: share of the patches
    that no routed layer keeps. `load_violation`: (largest load of a layer - mean) / mean.

    Of two runs with as many routed layers, `overlap`: Jaccard index of their choices, mean over the layers.
    """

    def measure(self, model: RoutedModel, examples: Examples) -> dict[str, np.ndarray]:
        layers = model.routed_layers
        output, trace = traced(model, examples)
        model.train()
        try:
            _, training = traced(model, examples)
        finally:
            model.eval()
        arrays = {
            "layer": np.tile(np.array(layers), (len(examples.index), 1)),
            "kept": kept_patches(trace, layers),
            "scores": patch_scores(trace, layers),
            "kept_in_training": kept_patches(training, layers),
        }
        arrays["loss"] = loss_of(output.float(), examples.targets).cpu().numpy()
        if examples.targets.dim() == 1:
            arrays["target"] = examples.targets.cpu().numpy()
        return arrays

    def summarise(self, arrays: Arrays) -> list[Finding]:
        kept = arrays["kept"]
        deployed, training = (torch.from_numpy(arrays[name]) for name in ("kept", "kept_in_training"))
        layers = arrays["layer"][0].tolist()
        fraction = kept.mean(axis=2)
        findings = [Finding.share("kept", fraction[:, rank], layer=layer) for rank, layer in enumerate(layers)]
        for rank, layer in enumerate(layers):
            by_position, majority = position_predictability(kept[:, rank])
            findings.append(Finding("by_position", by_position, n=len(kept), layer=layer, chance=majority))
            agreement = jaccard(deployed[:, rank], training[:, rank])
            findings.append(Finding.share("training_agreement", agreement, layer=layer))
            if rank:
                chance = chance_overlap(fraction[:, rank - 1].mean(), fraction[:, rank].mean())
                overlap = jaccard(deployed[:, rank - 1], deployed[:, rank])
                findings.append(Finding.share("overlap", overlap, layer=layer, chance=chance))
                ranks = within(arrays["scores"][:, rank - 1], arrays["scores"][:, rank], "spearman")
                findings.append(Finding.mean("overlap_rank", ranks, layer=layer, chance=0.0))
        findings.append(Finding.share("dead", 1 - kept.any(axis=1).mean(axis=1)))
        load = kept.sum(axis=(0, 2)).astype(np.float64)
        violation = float((load.max() - load.mean()) / max(load.mean(), 1e-12))
        findings.append(Finding("load_violation", violation, n=len(kept)))
        overall = fraction.mean(axis=1)
        hard = arrays["loss"] > np.median(arrays["loss"])
        findings += [Finding.share("kept_of_easy", overall[~hard]), Finding.share("kept_of_hard", overall[hard])]
        if "target" in arrays:
            for label in np.unique(arrays["target"]).tolist():
                findings.append(Finding.share(f"kept_of_class_{label}", overall[arrays["target"] == label]))
        return findings

    def compare(self, first: Arrays, second: Arrays) -> Finding | None:
        one, other = first["kept"], second["kept"]
        if one.shape != other.shape:
            return None
        overlap = jaccard(torch.from_numpy(one), torch.from_numpy(other)).mean(dim=1)
        shares = zip(one.mean(axis=(0, 2)).tolist(), other.mean(axis=(0, 2)).tolist(), strict=True)
        return Finding.share("overlap", overlap, chance=fmean(chance_overlap(*pair) for pair in shares))


@dataclass(frozen=True)
class CapacitySweep(Probe):
    """Accuracy of one checkpoint at other budgets, without training: `accuracy_at_<f>`, of a text that of its tokens,
    and the kept tokens of a routed layer, `tokens_at_<f>`.

    Args:
        fractions: of the tokens, each in (0, 1].
    """

    fractions: tuple[float, ...] = (1.0, 0.9, 0.75, 0.5, 0.25, 0.125)

    def __post_init__(self) -> None:
        wrong = [fraction for fraction in self.fractions if not 0 < fraction <= 1]
        if wrong or not self.fractions:
            raise ValueError(f"fractions={list(self.fractions)}: numbers in (0, 1] are expected")

    def measure(self, model: RoutedModel, examples: Examples) -> dict[str, np.ndarray]:
        layers: list[Any] = list(model.layers.values())
        capacities = [layer.capacity for layer in layers]
        if not all(capacity.traits.has_fraction for capacity in capacities):
            raise ValueError("probe=capacity_sweep needs a capacity with a fraction, such as capacity=topk")
        trained = [capacity.fraction for capacity in capacities]
        found: dict[str, np.ndarray] = {}
        try:
            for fraction in self.fractions:
                for capacity in capacities:
                    capacity.fraction = fraction
                output, trace = traced(model, examples)
                correct = (output.argmax(dim=-1) == examples.targets).double()
                found[f"correct_{fraction:g}"] = over_targets(correct, examples.targets).cpu().numpy()
                kept = torch.stack([trace[layer].counts for layer in model.routed_layers]).double().mean(dim=0)
                found[f"kept_{fraction:g}"] = kept.cpu().numpy()
        finally:
            for capacity, own in zip(capacities, trained, strict=True):
                capacity.fraction = own
        return found

    def summarise(self, arrays: Arrays) -> list[Finding]:
        return [
            measured(f"{name}_at_{fraction:g}", arrays[f"{source}_{fraction:g}"])
            for name, source, measured in (("accuracy", "correct", Finding.share), ("tokens", "kept", Finding.mean))
            for fraction in self.fractions
        ]
