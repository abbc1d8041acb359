"""Which layers are routed, and whose attention they are scored by: numbers, before any model exists.

A placement is a function `(depth, **options) -> list of zero-based layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal


def alternate(depth: int, first: int = 1, stride: int = 2) -> list[int]:
    """Layers `first`, `first + stride`, ... : every second layer by default, each after a dense one (A-MoD)."""
    if stride < 1:
        raise ValueError(f"placement.stride = {stride}: must be at least 1")
    return _in_range(list(range(first, depth, stride)) or [first], depth, "placement.first")


def later(depth: int, first: int | None = None) -> list[int]:
    """Every layer from `first` on; None starts at the middle, layer `depth // 2`."""
    start = depth // 2 if first is None else first
    return _in_range(list(range(start, depth)) or [start], depth, "placement.first")


def every(depth: int, first: int = 1) -> list[int]:
    """Every layer from `first` on."""
    return later(depth, first)


def stages(depth: int, layers: Sequence[int] | None = None) -> list[int]:
    """The given zero-based layers; None: after a quarter, a half and three quarters of the depth.

    Of twelve layers these are 3, 6 and 9, the fourth, seventh and tenth block (EViT, DynamicViT); of six 1, 3 and 5.
    """
    if layers is None:
        return sorted({depth // 4, depth // 2, depth - depth // 4} & set(range(1, depth)))
    return listed(depth, layers)


def bilayer(depth: int, ends: Literal["dense", "routed"] = "dense") -> list[int]:
    """T-D-T-D-...-T (DTRNet): layers 1, 3, 5, ... but never the last, so that the first and last layers are dense.

    ends: `routed`: layers 0 and the last as well, where the released list of layers, meant as those to route, names the
        dense ones: 2, 4, 6, ... but never the last.
    """
    if ends == "routed":
        return [layer for layer in range(depth) if layer % 2 == 1 or layer in (0, depth - 1)]
    return [layer for layer in range(1, depth - 1) if layer % 2 == 1]


def trilayer(depth: int) -> list[int]:
    """T-D-D-T-D-D-...-T (DTRNet): layers 1, 2, 4, 5, ... but never the last."""
    return [layer for layer in range(1, depth - 1) if layer % 3 != 0]


def listed(depth: int, layers: Sequence[int], base: int = 0) -> list[int]:
    """The given layers, counted from `base` (0 or 1)."""
    routed = _in_range([layer - base for layer in layers], depth, "placement.layers", base)
    if len(set(routed)) != len(routed):
        raise ValueError(f"placement.layers = {list(layers)}: names a layer twice")
    return sorted(routed)


def routed_layers(placement: Callable[..., list[int]], depth: int, **options: Any) -> list[int]:
    """Zero-based indices of the routed layers, ascending, for a placement and its options.

    Raises ValueError, naming the config key, when a layer lies outside `0 .. depth - 1`.
    """
    return _in_range(sorted(placement(depth, **options)), depth, "placement")


def layer_string(routed: Sequence[int], depth: int) -> str:
    """T-D-T-D-...: every layer from the first to the last, T dense and D routed (DTRNet's notation)."""
    return "-".join("D" if layer in routed else "T" for layer in range(depth))


def attention_sources(
    routed: Sequence[int],
    depth: int,
    source: str | int = "previous",
    lag: int = 2,
    fill: str = "none",
    sublayer: str = "block",
) -> dict[int, int]:
    """For each routed layer the layer whose attention map its score is made of.

    source: `previous` (l - 1), `lag` (l - lag), `last_dense` (the nearest layer below l that is not routed), `same`
        (l itself: free when no more than its MLP is routed; otherwise the map of all entering tokens is made before the
        selection, one more projection of every token to queries, keys and values) or the index of a layer.
    fill: what stands in for tokens that a routed source layer did not attend to; `none` refuses such a source.

    Raises ValueError, naming the config key, when a source does not exist or is incomplete.
    """
    chosen = set(routed)
    # Either every token takes part in attention, or a map of all tokens is made for the score.
    complete = sublayer == "mlp" or source == "same"
    sources: dict[int, int] = {}
    for layer in sorted(chosen):
        found = _source_of(layer, chosen, source, lag)
        if found is None or found < 0:
            raise ValueError(
                f"placement.attention_source = {source}: routed layer {layer} (zero-based) has no "
                f"{'dense layer below it' if source == 'last_dense' else 'such layer below it'} to take attention from"
            )
        if found >= depth or found > layer or (found == layer and not complete):
            raise ValueError(
                f"placement.attention_source = {source}: layer {found} runs after the selection of routed layer "
                f"{layer}; name a layer below every routed layer (zero-based)"
            )
        if found in chosen and not complete and fill == "none":
            raise ValueError(
                f"placement.attention_source = {source}: layer {found}, the source of routed layer {layer}, is itself "
                "routed, so that its attention map lacks tokens; use attention_source=last_dense or choose "
                "placement.attention_fill=zero, mean or carry"
            )
        sources[layer] = found
    return sources


def _source_of(layer: int, routed: set[int], source: str | int, lag: int) -> int | None:
    if isinstance(source, int):
        return source
    if source == "last_dense":
        return max((below for below in range(layer) if below not in routed), default=None)
    return layer - {"previous": 1, "lag": lag, "same": 0}[source]


def _in_range(routed: list[int], depth: int, key: str, base: int = 0) -> list[int]:
    outside = [layer + base for layer in routed if not 0 <= layer < depth]
    if outside:
        counted = "zero-based" if base == 0 else "counted from 1"
        raise ValueError(
            f"{key} = {', '.join(map(str, outside))}: the backbone has layers {base} to {depth - 1 + base} ({counted})"
        )
    return routed
