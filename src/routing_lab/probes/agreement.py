"""Does routing keep the patches that matter? Kept and scored patches against a mask of those that decide the class.

Shape legend: B examples, L routed layers, P patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routing_lab.probes.base import Arrays, Examples, Finding, Probe, kept_patches, patch_scores, traced
from routing_lab.probes.metrics import auc, boundary, chance_overlap, iou, share
from routing_lab.routing.model import RoutedModel


@dataclass(frozen=True)
class MaskAgreement(Probe):
    """Agreement of every routed layer's scores and choice with the mask.

    `auc`: probability that a patch inside the mask scores above one outside (chance 0.5). `iou` of the kept patches and
    the mask. `recall`: share of the mask that is kept (chance: the kept fraction). `background_of_kept` and
    `background_of_pruned`: share outside the mask (chance: the background's area). `boundary_kept`: share of kept
    patches on the mask's outline (chance: its area).
    """

    def measure(self, model: RoutedModel, examples: Examples) -> dict[str, np.ndarray]:
        if examples.masks is None:
            raise ValueError("probe=agreement needs the patches that matter; data=planted and data=pets know them")
        _, trace = traced(model, examples)
        layers = model.routed_layers
        return {
            "layer": np.tile(np.array(layers), (len(examples.index), 1)),
            "kept": kept_patches(trace, layers),
            "scores": patch_scores(trace, layers),
            "mask": examples.masks.cpu().numpy(),
        }

    def summarise(self, arrays: Arrays) -> list[Finding]:
        mask = arrays["mask"].astype(bool)
        side = round(mask.shape[1] ** 0.5)
        edge = boundary(mask.reshape(-1, side, side)).reshape(mask.shape) if side**2 == mask.shape[1] else None
        findings = []
        for rank, layer in enumerate(arrays["layer"][0].tolist()):
            kept, scores = arrays["kept"][:, rank], arrays["scores"][:, rank]
            area, fraction = float(mask.mean()), float(kept.mean())
            entered = np.where(np.isfinite(scores), scores, -np.inf)
            findings += [
                Finding.share("auc", auc(entered, mask), layer=layer, chance=0.5),
                Finding.share("iou", iou(kept, mask), layer=layer, chance=chance_overlap(fraction, area)),
                Finding.share("recall", share(kept, mask), layer=layer, chance=fraction),
                Finding.share("background_of_kept", share(~mask, kept), layer=layer, chance=1 - area),
                Finding.share("background_of_pruned", share(~mask, ~kept), layer=layer, chance=1 - area),
            ]
            if edge is not None:
                findings.append(
                    Finding.share("boundary_kept", share(edge, kept), layer=layer, chance=float(edge.mean()))
                )
        return findings
