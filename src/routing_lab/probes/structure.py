"""What attention maps look like: spread or concentrated, on which tokens, how far away, alike in the heads or not.

The maps are those that the layers of the deployed model attended by: in a routed layer the map of the tokens that it
kept. They are read slab by slab, so that no whole map of a batch is held.

Shape legend: B examples, L layers, H heads, R rows of a slab, N queries, M keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from routing_lab.attention import AttentionMap
from routing_lab.attention.maps import slices
from routing_lab.probes.base import Arrays, Examples, Finding, Probe, kept_patches, loss_of, traced
from routing_lab.probes.metrics import (
    Array,
    best,
    entropy,
    finite_mean,
    gini,
    pooled_interval,
    share,
    top_share,
    within,
)
from routing_lab.routing.measures import is_patch, jaccard
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.tokens import Positioned
from routing_lab.routing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATISTICS = (
    *("row_entropy", "distance", "column_entropy", "gini", "largest_share", "top_share"),
    *("prefix_share", "first_share", "prefix_sinks", "patch_sinks"),
)
"""What is measured of every head's map."""

JOINED = ("row_entropy", "largest_share")
"""Those of which the correlation with the quality of routing is reported."""

SLAB = 2**22
"""Elements of a batch's maps that are held at once."""


@dataclass(frozen=True)
class AttentionStructure(Probe):
    """The structure of every head's map, [B, N, M] with rows that sum to one.

    Over its rows: `row_entropy`, their mean entropy in nats; `distance`, how far a patch looks: the mean distance of
    patches weighted by the attention between them, in patches of the grid, or in tokens of a text. Over the mean
    attention that each key receives, which sums to one: `column_entropy`, `gini`, `largest_share`, `top_share` of the
    best `top` of the keys, `prefix_share` of the prefix tokens, `first_share` of the token at position 0 (the class
    token, where there is one, or a text's first); `prefix_sinks` and `patch_sinks`, how many keys of either kind
    receive more than `sink` (Gu et al. 2025). Chance is the same number of a map whose rows are spread evenly over the
    keys that their query sees.

    Without a head: the mean over heads. `head_variance`: variance over heads of M times the attention that a key
    receives, mean over keys; 0 where heads agree. `head_overlap`: Jaccard index of the best `top` of the keys in two
    heads, mean over pairs of them (chance: of two random choices). `received_rank_<d>`: Spearman correlation within an
    example of what its patches receive in one layer and d layers later, mean over such pairs of layers: how slowly maps
    change, on which reading an older one rests (2412.20875, section 3).

    `<statistic>_and_loss`: Spearman correlation over examples of `row_entropy` or `largest_share` with the loss.
    `<statistic>_and_recall`, at a routed layer: of the map that it is scored by, with the share of the patches that
    decide the class which it keeps, where the data know them.

    Args:
        sink: share of all attention above which a key is a sink.
        top: share of the keys that `top_share` is of, at least one key.
    """

    sink: float = 0.3
    top: float = 0.1

    def __post_init__(self) -> None:
        for key in ("sink", "top"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"{key} = {getattr(self, key)}: a share in (0, 1] is expected")

    def measure(self, model: RoutedModel, examples: Examples) -> dict[str, np.ndarray]:
        adapter, grid = model.adapter, model.adapter.grid(examples.inputs)
        prefix = len(adapter.prefix)
        seen: dict[tuple[int, int], MapStructure | None] = {}

        def watch(layer: int, part: int, attention: AttentionMap, queries: Positioned, keys: Positioned) -> None:
            if (layer, part) not in seen:  # a repetition is of tokens that are not kept
                seen[layer, part] = map_structure(attention, queries, keys, prefix, grid, self.sink, self.top)

        output, trace = traced(model, examples, watch)
        batch, routed = len(examples.index), model.routed_layers
        layers = [_together([seen[key] for key in sorted(seen) if key[0] == layer]) for layer in range(adapter.depth)]
        heads = max(0 if layer is None else layer.received.shape[1] for layer in layers)
        missing = np.full((batch, heads), math.nan)
        arrays = {
            "source": np.tile(np.array([model.sources.get(layer, layer) for layer in routed], np.int64), (batch, 1)),
            "routed": np.tile(np.array(routed, dtype=np.int64), (batch, 1)),
            "loss": loss_of(output.float(), examples.targets).cpu().numpy(),
            "received": np.stack([_of_patches(layer, trace, prefix) for layer in layers], axis=1),
        }
        for name, measure in (("head_variance", head_variance), ("head_overlap", self._head_overlap)):
            found = [missing[:, 0] if layer is None else measure(layer.received) for layer in layers]
            arrays[name] = np.stack(found, axis=1)
        for name in STATISTICS:
            arrays[name] = np.stack([missing if item is None else item.of_map[name] for item in layers], axis=1)
            even = [missing[:, 0] if item is None else item.of_even[name][:, 0] for item in layers]
            arrays[f"even.{name}"] = np.stack(even, axis=1)
        if examples.masks is not None and routed:
            kept, mask = kept_patches(trace, routed), examples.masks.cpu().numpy()
            arrays["recall"] = np.stack([share(kept[:, rank], mask) for rank in range(len(routed))], axis=1)
        return arrays

    def summarise(self, arrays: Arrays) -> list[Finding]:
        depth, heads = arrays["row_entropy"].shape[1:]
        findings = []
        for layer in range(depth):
            for name in STATISTICS:
                values, even = arrays[name][:, layer], arrays[f"even.{name}"][:, layer]
                if not np.isfinite(values).any():
                    continue
                chance = float(np.nanmean(even))
                findings.append(Finding.mean(name, values.mean(axis=1), layer=layer, chance=chance))
                findings += [
                    Finding.mean(name, values[:, head], layer=layer, head=head, chance=chance) for head in range(heads)
                ]
            findings.append(Finding.mean("head_variance", arrays["head_variance"][:, layer], layer=layer))
            overlap, chance = arrays["head_overlap"][:, layer], self.top / (2 - self.top)
            findings.append(Finding.share("head_overlap", overlap, layer=layer, chance=chance))
            for name in JOINED:
                joined = _correlated(arrays[name][:, layer], arrays["loss"])
                findings.append(Finding(f"{name}_and_loss", *joined, layer=layer, chance=0.0))
        received = arrays["received"]
        for apart in range(1, depth):
            pairs = [within(received[:, i], received[:, i + apart], "spearman") for i in range(depth - apart)]
            findings.append(Finding.mean(f"received_rank_{apart}", finite_mean(np.stack(pairs), axis=0), chance=0.0))
        if "recall" in arrays:
            for rank, (layer, source) in enumerate(
                zip(arrays["routed"][0].tolist(), arrays["source"][0].tolist(), strict=True)
            ):
                for name in JOINED:
                    joined = _correlated(arrays[name][:, source], arrays["recall"][:, rank])
                    findings.append(Finding(f"{name}_and_recall", *joined, layer=layer, chance=0.0))
        return [finding for finding in findings if not math.isnan(finding.value)]

    def _head_overlap(self, received: Array) -> Array:
        """[B] of what keys receive in each head, [B, H, M]; NaN where there is one head alone."""
        chosen = [torch.from_numpy(best(received[:, head], self.top)) for head in range(received.shape[1])]
        pairs = [jaccard(first, second).numpy() for first, second in combinations(chosen, 2)]
        return np.mean(pairs, axis=0) if pairs else np.full(len(received), math.nan)

    def figure(self, arrays: Arrays) -> Figure:
        """The mean of every statistic that is a share, an entropy or a distance, a cell for each layer and head."""
        from matplotlib.figure import Figure

        shown = [name for name in STATISTICS[:8] if np.isfinite(arrays[name]).any()]
        depth, heads = arrays["row_entropy"].shape[1:]
        rows = -(-len(shown) // 4)
        figure = Figure(figsize=(4 * max(2.4, 0.35 * depth), rows * (1.2 + 0.3 * heads)), layout="constrained")
        for axis, name in zip(figure.subplots(rows, 4).flat, shown, strict=False):
            picture = axis.imshow(finite_mean(arrays[name], axis=0).T, aspect="auto", cmap="viridis")
            axis.set(title=name.replace("_", " "), xlabel="layer", ylabel="head")
            axis.set_xticks(range(0, depth, max(1, depth // 6)))
            figure.colorbar(picture, ax=axis)
        for axis in figure.axes[len(shown) : rows * 4]:
            axis.set_axis_off()
        return figure


@dataclass(frozen=True)
class MapStructure:
    """Statistics of one map, and of the map with the same visible keys whose rows are even.

    Args:
        of_map: name -> [B, H]. of_even: name -> [B, 1].
        received: [B, H, M] the mean attention that each key receives, times the number of keys; NaN at padding.
        position: [B, M] of each key; -1: it has none, or is padding.
    """

    of_map: dict[str, Array]
    of_even: dict[str, Array]
    received: Array
    position: np.ndarray


def map_structure(
    attention: AttentionMap,
    queries: Positioned,
    keys: Positioned,
    prefix: int = 0,
    grid: tuple[int, int] | None = None,
    sink: float = 0.3,
    top: float = 0.1,
) -> MapStructure | None:
    """`STATISTICS` of a map; None where it has no query.

    Args:
        attention: the map, [B, H, N, M].
        queries, keys: the tokens of its rows and columns; padding does not count.
        prefix: tokens at positions below it are no patches, nor are those without a position.
        grid: rows and columns of the patches; None: a line.
        sink, top: see `AttentionStructure`.
    """
    batch, heads, rows, columns = *attention.query.shape[:3], attention.key.shape[2]
    if not rows or not columns:
        return None
    present = queries.present()
    weight = present.double() / present.sum(dim=1, keepdim=True).clamp_min(1)
    apart = _Distances(queries, keys, prefix, grid)
    found, even = _Rows.none(batch, heads, columns, weight), _Rows.none(batch, 1, columns, weight)
    for row in slices(rows, max(1, SLAB // max(1, batch * heads * columns))):
        shares = attention.rows(row)
        visible = (shares > 0).any(dim=1, keepdim=True)
        distance = apart.of(row)
        found.add(shares, row, distance)
        even.add(visible / visible.sum(dim=-1, keepdim=True), row, distance)
    there = keys.present().cpu().numpy()
    position = np.where(there, keys.positions().cpu().numpy(), -1)
    kind = np.where(position >= prefix, 1, np.where(position >= 0, 0, -1))
    number = there.sum(axis=1)[:, None, None]
    received = np.where(there[:, None], found.columns.cpu().numpy() * number, math.nan)
    of_map, of_even = (_reduced(rows, there, kind, position, sink, top) for rows in (found, even))
    without = ~present.any(dim=1).cpu().numpy()
    for values in (*of_map.values(), *of_even.values(), received):
        values[without] = math.nan
    return MapStructure(of_map, of_even, received, position)


def head_variance(received: Array) -> Array:
    """[B] variance over heads of what a key receives, [B, H, M] in units of an even share, mean over keys."""
    variance = received.var(axis=1)
    there = np.isfinite(variance)
    return np.asarray(np.where(there, variance, 0).sum(axis=1) / np.maximum(there.sum(axis=1), 1))


# --- private ---


@dataclass
class _Rows:
    """Sums over the rows of a map so far.

    Args:
        weight: [B, N] of each row, summing to one.
        entropy: [B, H]. columns: [B, H, M].
        distance, looking: [B, H] sums of the mean distance of a row's patches, and of the weights of these rows.
    """

    weight: Tensor
    entropy: Tensor
    columns: Tensor
    distance: Tensor
    looking: Tensor

    @classmethod
    def none(cls, batch: int, heads: int, columns: int, weight: Tensor) -> _Rows:
        zero = weight.new_zeros(batch, heads)
        return cls(weight, zero, weight.new_zeros(batch, heads, columns), zero, zero)

    def add(self, shares: Tensor, row: slice, distance: Tensor) -> None:
        """Rows [B, H, R, M]; distance [B, R, M], NaN where one of the two is no patch."""
        weight = self.weight[:, None, row]
        self.entropy = self.entropy + (torch.special.entr(shares).sum(dim=-1) * weight).sum(dim=-1)
        self.columns = self.columns + (weight.unsqueeze(2) @ shares.double()).squeeze(2)
        pairs = ~distance.isnan()
        mass = (shares * pairs.unsqueeze(1)).sum(dim=-1)
        far = (shares * distance.nan_to_num(0.0).to(shares.dtype).unsqueeze(1)).sum(dim=-1)
        looks = weight * (mass > 0)
        self.distance = self.distance + (far / mass.where(mass > 0, 1.0) * looks).sum(dim=-1)
        self.looking = self.looking + looks.sum(dim=-1)


class _Distances:
    """Distances between patches of the rows and columns of a map."""

    def __init__(self, queries: Positioned, keys: Positioned, prefix: int, grid: tuple[int, int] | None) -> None:
        self.sides = [(side.positions() - prefix, side.present()) for side in (queries, keys)]
        self.columns = grid[1] if grid else 0

    def of(self, row: slice) -> Tensor:
        """[B, R, M], NaN where one of the two is no patch."""
        (query, query_there), (key, key_there) = self.sides
        first, second = query[:, row].unsqueeze(2), key.unsqueeze(1)
        if self.columns:
            down = first // self.columns - second // self.columns
            across = first % self.columns - second % self.columns
            distance = torch.hypot(down.double(), across.double())
        else:
            distance = (first - second).abs().double()
        patches = (first >= 0) & (second >= 0) & query_there[:, row].unsqueeze(2) & key_there.unsqueeze(1)
        return distance.where(patches, math.nan)


def _reduced(
    rows: _Rows, there: np.ndarray, kind: np.ndarray, position: np.ndarray, sink: float, top: float
) -> dict[str, Array]:
    """The statistics [B, H] from the sums over rows; there, kind and position [B, M] of the keys."""
    columns = rows.columns.cpu().numpy() * there[:, None]
    prefix, patch = kind[:, None] == 0, kind[:, None] == 1
    looking = rows.looking.cpu().numpy()
    return {
        "row_entropy": rows.entropy.cpu().numpy(),
        "distance": np.divide(
            rows.distance.cpu().numpy(), looking, out=np.full_like(looking, math.nan), where=looking > 0
        ),
        "column_entropy": entropy(columns),
        "gini": np.stack([gini(row[:, here]) for row, here in zip(columns, there, strict=True)]),
        "largest_share": columns.max(axis=-1),
        "top_share": np.stack([top_share(row[:, here], top) for row, here in zip(columns, there, strict=True)]),
        "prefix_share": (columns * prefix).sum(axis=-1),
        "first_share": (columns * (position[:, None] == 0)).sum(axis=-1),
        "prefix_sinks": ((columns > sink) & prefix).sum(axis=-1).astype(np.float64),
        "patch_sinks": ((columns > sink) & patch).sum(axis=-1).astype(np.float64),
    }


def _of_patches(layer: MapStructure | None, trace: Trace, prefix: int) -> Array:
    """[B, P] what each patch receives in a layer, mean over heads; NaN where it is no key there."""
    batch, patches = len(trace[0].origin), int(is_patch(trace).sum())
    found = np.full((batch, patches), math.nan)
    if layer is not None:
        row, key = np.nonzero(layer.position >= prefix)
        found[row, layer.position[row, key] - prefix] = layer.received.mean(axis=1)[row, key]
    return found


def _together(parts: Sequence[MapStructure | None]) -> MapStructure | None:
    """Several attentions beside each other as one with all their heads."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    of_map = {name: np.concatenate([part.of_map[name] for part in found], axis=1) for name in STATISTICS}
    received = np.concatenate([part.received for part in found], axis=1)
    return MapStructure(of_map, found[0].of_even, received, found[0].position)


def _correlated(of_heads: Array, quality: Array) -> tuple[float, float, float, int]:
    """Rank correlation over examples of the mean over heads [B, H] with a quality [B], and its interval."""
    return pooled_interval(of_heads.mean(axis=1)[:, None], quality[:, None], "spearman")
