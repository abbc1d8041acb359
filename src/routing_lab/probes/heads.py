"""Does one bad head turn the selection? Attention scores before and after one head's map is replaced.

Shape legend: B examples, L layers, H heads, N tokens that enter a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from routing_lab.attention import AttentionStatistics, StatisticsRequest
from routing_lab.probes.base import Arrays, Examples, Finding, Probe
from routing_lab.probes.metrics import Array, best, within
from routing_lab.routing.base import LayerSpec, Router, RouterInput, RunState
from routing_lab.routing.maps import Entering
from routing_lab.routing.measures import jaccard
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.routers import AttentionMedADRouter, AttentionReceivedRouter, AttentionVarianceRouter
from routing_lab.routing.tokens import Tokens
from routing_lab.streams import stream_seed

SCORERS = ("mean", "variance", "medad")
"""How a token is scored by the attention that it gets in the heads: their mean, their population variance, their median
absolute deviation.
"""

KINDS = ("noise", "spike")
"""What the bad head says: shares drawn evenly from all there are (a flat Dirichlet), or everything on one token."""


@dataclass(frozen=True)
class HeadCorruption(Probe):
    """What is left of a score when one head is replaced, each in turn, in every layer; the model itself is untouched.

    Heads attend for the class token or, in models without, for all tokens. `rank/<kind>/<scorer>`: Spearman correlation
    within an example of the patches' scores before and after, mean over the heads that are replaced.
    `kept/<kind>/<scorer>`: Jaccard index of the best `fraction` of the patches before and after (chance: of two random
    choices). `<rank or kept>/<kind>/medad_over_variance`: how much more the median absolute deviation keeps than the
    variance, example by example (chance: 0). Without a layer: the mean over layers.

    Args:
        fraction: of the patches that a layer keeps.
    """

    fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"fraction = {self.fraction}: a number in (0, 1) is expected")

    def measure(self, model: RoutedModel, examples: Examples) -> dict[str, np.ndarray]:
        adapter = model.adapter
        if not adapter.block(0).one_map:
            raise ValueError("probe=corrupted_head needs heads of one map each; this model's attend by differences")
        tokens, context = model.embed(examples.inputs, examples.layout)
        state = model.run_state(tokens, sample_ids=examples.index, informative=examples.masks)
        seen: list[Entering] = []
        model.forward_from(Entering(0, tokens), context, state, traced=False, seen=seen)
        of_class = "class" in adapter.prefix
        request = StatisticsRequest(class_row=of_class, received=not of_class)
        found: dict[str, list[Array]] = {}
        for layer, entering in enumerate(seen):
            here = entering.tokens
            statistics = adapter.block(layer).statistics(here.side(), context, request)
            attention = statistics.class_row if of_class else statistics.received
            assert attention is not None
            routers = _routers(LayerSpec(adapter.width, adapter.heads, layer, adapter.prefix))
            patches = (here.origins() >= 0).cpu().numpy()
            before = _scores(routers, attention, here, state, patches)
            left: dict[str, list[Array]] = {}
            for kind in KINDS:
                for head in range(attention.shape[1]):
                    bad = replaced(attention, head, kind, examples.index.tolist(), layer)
                    after = _scores(routers, bad, here, state, patches)
                    for name in SCORERS:
                        rank = within(before[name], after[name], "spearman")
                        chosen = [torch.from_numpy(best(scores[name], self.fraction)) for scores in (before, after)]
                        kept = jaccard(*chosen).numpy()
                        left.setdefault(f"rank/{kind}/{name}", []).append(rank)
                        left.setdefault(f"kept/{kind}/{name}", []).append(kept)
            for key, heads in left.items():
                found.setdefault(key, []).append(np.mean(heads, axis=0))
        return {name: np.stack(layers, axis=1) for name, layers in found.items()}

    def summarise(self, arrays: Arrays) -> list[Finding]:
        findings = []
        for measure, chance in (("rank", 0.0), ("kept", self.fraction / (2 - self.fraction))):
            for kind in KINDS:
                rows = {name: (arrays[f"{measure}/{kind}/{name}"], chance) for name in SCORERS}
                rows["medad_over_variance"] = (rows["medad"][0] - rows["variance"][0], 0.0)
                for name, (values, expected) in rows.items():
                    findings.append(Finding.mean(f"{measure}/{kind}/{name}", values.mean(axis=1), chance=expected))
                    findings += [
                        Finding.mean(f"{measure}/{kind}/{name}", values[:, layer], layer=layer, chance=expected)
                        for layer in range(values.shape[1])
                    ]
        return findings


def replaced(attention: Tensor, head: int, kind: str, index: Sequence[int], layer: int) -> Tensor:
    """Attention [B, H, N] with one head of every example replaced, see `KINDS`; the same for an example always."""
    tokens = attention.shape[2]
    rows = np.empty((len(index), tokens))
    for row, number in zip(rows, index, strict=True):
        generator = np.random.default_rng([stream_seed(number, "routing"), layer, head])
        row[:] = generator.dirichlet(np.ones(tokens)) if kind == "noise" else np.eye(tokens)[generator.integers(tokens)]
    bad = attention.clone()
    bad[:, head] = torch.as_tensor(rows, dtype=attention.dtype, device=attention.device)
    return bad


# --- private ---


def _routers(spec: LayerSpec) -> dict[str, Router]:
    return {
        "mean": AttentionReceivedRouter(spec),
        "variance": AttentionVarianceRouter(spec, query="all"),
        "medad": AttentionMedADRouter(spec, query="all"),
    }


def _scores(
    routers: Mapping[str, Router], attention: Tensor, tokens: Tokens, state: RunState, patches: np.ndarray
) -> dict[str, Array]:
    """Scorer -> [B, N] of attention [B, H, N], NaN where there is no patch."""
    inputs = RouterInput(tokens, AttentionStatistics(received=attention), state)
    return {
        name: np.where(patches, router(inputs).double().cpu().numpy(), math.nan) for name, router in routers.items()
    }
