"""The dense baseline at the cost of a routed arm: `isoflop.by=depth` or `width` replaces the arm that keys describe.

The arm's nominal cost, or `isoflop.target_macs`, is the target. The resolved configuration describes the baseline that
is trained: `router=dense`, the backbone in the size found, the target, and under `isoflop.solution` its former size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from routing_lab.axes import AXES
from routing_lab.axes.routers import DenseRouterConfig
from routing_lab.config.backbones import TimmBackboneConfig
from routing_lab.config.nominal import UnknownCost, nominal_macs
from routing_lab.config.problems import Problem
from routing_lab.config.schema import (
    Config,
    FullSize,
    IsoflopConfig,
    IsoflopSolution,
)
from routing_lab.cost.isoflop import chosen_layers, solve_depth, solve_width
from routing_lab.cost.macs import ModelShape, dense_macs
from routing_lab.keys import LATER


def with_baseline(sections: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """The sections of the baseline instead of the arm's, problems that leave none, and a remark on what was found.

    sections: valid ones, all there. Those of a baseline already give the same baseline again.
    """
    isoflop: IsoflopConfig = sections["isoflop"]
    backbone = sections["backbone"]
    if isoflop.by == "none" or backbone.facts().causal:
        return dict(sections), [], []
    if isoflop.solution is not None:
        backbone = backbone.model_copy(update=isoflop.solution.full.model_dump())
    sections = {**sections, "backbone": backbone}
    classes = sections["data"].num_classes
    if classes is None:
        return dict(sections), [Problem.of("data.num_classes", None, "isoflop needs the number of classes")], []
    full = backbone.shape(classes)
    if full is None or backbone.mlp_ratio is None:
        message = "isoflop needs the MLP of the backbone, backbone.mlp_ratio and backbone.mlp"
        return dict(sections), [Problem.of("backbone.mlp_ratio", backbone.mlp_ratio, message)], []
    target: float | Problem = isoflop.target_macs or _target(Config.model_construct(**sections), full)
    if isinstance(target, Problem):
        return dict(sections), [target], []
    shape = solve_depth(full, target) if isoflop.by == "depth" else solve_width(full, target, isoflop.mlp)
    macs = round(dense_macs(shape).total)
    gap = abs(macs / target - 1)
    if gap > isoflop.tolerance:
        return dict(sections), [_too_far(isoflop, backbone, shape, macs / target, target)], []
    solution = IsoflopSolution(
        full=FullSize(depth=backbone.depth, width=backbone.width, mlp_ratio=backbone.mlp_ratio),
        layers=chosen_layers(full.depth, shape.depth, isoflop.layers) if isoflop.by == "depth" else None,
        macs=macs,
        ratio=macs / target,
    )
    small = backbone.model_copy(
        update={"depth": shape.depth, "width": shape.width, "mlp_ratio": _mlp_ratio(backbone, full, shape)}
    )
    routed = sections["router"].traits.routes
    arm = " ".join(f"{axis}={sections[axis].name}" for axis in AXES) if routed else "isoflop.target_macs"
    remark = (
        f"isoflop.by={isoflop.by}: the dense model of {_size(small)} costs {macs:,} MACs, {macs / target:.4f} of the "
        f"{round(target):,} of {arm}"
    )
    baseline = {
        "backbone": small,
        "router": DenseRouterConfig(),
        "losses": {},
        "isoflop": isoflop.model_copy(update={"target_macs": target, "solution": solution}),
    }
    return {**sections, **baseline}, [], [remark]


def tolerance_for(ratio: float) -> float:
    """The smallest tolerance, in thousandths, that a cost of so much of its target meets."""
    return math.ceil(abs(ratio - 1) * 1000) / 1000


def full_size(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration, as plain values, matched to nothing, and with the backbone at the size it had before it
    became a baseline.
    """
    solution = resolved["isoflop"]["solution"]
    full = {} if solution is None else solution["full"]
    none = {"by": "none", "target_macs": None, "solution": None}
    sizes = {"backbone": {**resolved["backbone"], **full}, "isoflop": {**resolved["isoflop"], **none}}
    return {**resolved, **sizes, "match": LATER["match"]}


def _target(config: Config, full: ModelShape) -> float | Problem:
    """Nominal cost of the arm, its routers included, or why there is none."""
    key = "isoflop.target_macs"
    if not config.router.traits.routes:
        message = f"router={config.router.name} routes nothing: choose the arm to be matched, or give the MACs"
        return Problem.of(key, None, message)
    try:
        return nominal_macs(config, full)
    except UnknownCost as error:
        measured = "give the MACs, for instance cost.macs_measured of the arm's record"
        return Problem.of(key, None, f"{error}; {measured}")


def _too_far(
    isoflop: IsoflopConfig, backbone: TimmBackboneConfig, shape: ModelShape, ratio: float, target: float
) -> Problem:
    size = f"depth {shape.depth} of {backbone.depth}" if isoflop.by == "depth" else f"width {shape.width}"
    finer = {"depth": "isoflop.by=width", "width": "isoflop.mlp=adjust"}[isoflop.by]
    return Problem.of(
        "isoflop.tolerance",
        isoflop.tolerance,
        f"the closest dense model, {size}, costs {ratio:.3f} of the target {round(target):,} MACs; use {finer}, or "
        f"allow the gap with isoflop.tolerance={tolerance_for(ratio):g}",
    )


def _mlp_ratio(backbone: TimmBackboneConfig, full: ModelShape, shape: ModelShape) -> float:
    """The ratio that makes timm build an MLP as wide as in `shape`."""
    assert backbone.mlp_ratio is not None
    if shape.mlp_hidden * full.width == full.mlp_hidden * shape.width:
        return backbone.mlp_ratio
    hidden = shape.mlp_hidden * (2 if backbone.mlp == "swiglu" else 1)
    ratio = hidden / shape.width
    return ratio if int(shape.width * ratio) == hidden else math.nextafter(ratio, math.inf)


def _size(backbone: TimmBackboneConfig) -> str:
    return f"depth {backbone.depth}, width {backbone.width}, {backbone.heads} heads, mlp_ratio {backbone.mlp_ratio:.4g}"
