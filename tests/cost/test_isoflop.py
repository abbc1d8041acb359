"""The solver for dense models of equal cost against the reference's table of depths and widths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.cost.isoflop import chosen_layers, closest, solve_depth, solve_width
from routing_lab.cost.macs import ModelShape, dense_macs

TABLES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "flops.json").read_text())["isoflop_deit_s"]
DEIT_S = ModelShape(width=384, depth=12, heads=6, mlp_hidden=1536, positions=196, patch_inputs=768, classes=1000)


def test_the_table_is_found_again() -> None:
    for depth, macs in TABLES["by_depth"].items():
        assert solve_depth(DEIT_S, macs) == replace(DEIT_S, depth=int(depth))
    for width, macs in TABLES["by_width_depth12"].items():
        if int(width) % DEIT_S.heads == 0:
            for mlp in ("keep", "adjust"):
                found = solve_width(DEIT_S, macs, mlp)
                assert (found.width, found.mlp_hidden) == (int(width), 4 * int(width))
                assert dense_macs(found).total == macs


@pytest.mark.parametrize("target", [2.6e9, 2.59e9, 2_635_293_696])
def test_deit_small_at_the_cost_of_its_routed_forms(target: float) -> None:
    kept, adjusted = (solve_width(DEIT_S, target, mlp) for mlp in ("keep", "adjust"))
    assert 282 <= kept.width <= 288
    assert abs(dense_macs(kept).total / target - 1) < 0.02
    assert abs(dense_macs(adjusted).total / target - 1) < 0.001
    assert (adjusted.heads, adjusted.depth) == (6, 12)
    assert 1.02 < dense_macs(solve_depth(DEIT_S, target)).total / target < 1.05  # 7 layers: more than was to be spent


@given(st.integers(1, 40), st.integers(1, 12), st.floats(0.03, 2.5), st.sampled_from([2, 3]))
def test_no_other_multiple_of_the_heads_comes_closer(step: int, heads: int, share: float, matrices: Any) -> None:
    full = ModelShape(
        width=step * heads, depth=3, heads=heads, mlp_hidden=3 * step * heads, positions=9, mlp_matrices=matrices
    )
    target = share * dense_macs(full).total
    found = solve_width(full, target, "keep")
    assert found.width % heads == 0
    gap = abs(dense_macs(found).total - target)
    for width in (found.width - heads, found.width + heads):
        if width:
            other = replace(full, width=width, mlp_hidden=3 * width)
            assert gap <= abs(dense_macs(other).total - target)
    assert abs(dense_macs(solve_width(full, target)).total - target) <= gap


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(-5, 90), st.sampled_from([1, -1]))
def test_of_the_numbers_of_a_range_none_comes_closer(steps: list[int], target: int, sign: int) -> None:
    costs = [sign * sum(steps[: i + 1]) for i in range(len(steps))]
    found = closest(costs.__getitem__, target, 0, len(costs) - 1)
    gaps = [abs(cost - target) for cost in costs]
    assert [gaps[number] for number in found] == [min(gaps)] * len(found)
    cheapest = min(cost for cost in costs if abs(cost - target) == min(gaps))
    assert list(found) == [number for number, cost in enumerate(costs) if cost == cheapest]


def test_layers_that_stay() -> None:
    assert chosen_layers(12, 5, "first") == [0, 1, 2, 3, 4]
    assert chosen_layers(12, 6, "uniform") == [0, 2, 4, 7, 9, 11]
    for depth in range(1, 13):
        layers = chosen_layers(12, depth, "uniform")
        assert layers == sorted(set(layers))
        assert (len(layers), layers[0]) == (depth, 0)
    with pytest.raises(ValueError, match="depth = 13: must lie between 1 and 12"):
        chosen_layers(12, 13, "first")
