"""Which layers are routed, and whose attention scores them."""

from __future__ import annotations

import pytest

from routing_lab.axes.layers import attention_sources, layer_string, routed_layers
from routing_lab.axes.placements import PLACEMENTS
from routing_lab.config import load
from routing_lab.config.nominal import placed_lines


@pytest.mark.parametrize(
    ("name", "options", "depth", "expected"),
    [
        ("alternate", {}, 12, [1, 3, 5, 7, 9, 11]),
        ("alternate", {"first": 2, "stride": 3}, 12, [2, 5, 8, 11]),
        ("alternate", {"first": 0}, 3, [0, 2]),
        ("later", {}, 12, [6, 7, 8, 9, 10, 11]),
        ("later", {"first": 9}, 12, [9, 10, 11]),
        ("every", {}, 4, [1, 2, 3]),
        ("every", {"first": 0}, 2, [0, 1]),
        ("stages", {}, 12, [3, 6, 9]),
        ("stages", {}, 6, [1, 3, 5]),
        ("stages", {}, 2, [1]),
        ("bilayer", {}, 6, [1, 3]),
        ("bilayer", {}, 5, [1, 3]),
        ("trilayer", {}, 12, [1, 2, 4, 5, 7, 8, 10]),
        ("trilayer", {}, 1, []),
        ("list", {"layers": [4, 2]}, 6, [2, 4]),
        ("list", {"layers": [1, 6], "base": 1}, 6, [0, 5]),
    ],
)
def test_routed_layers(name: str, options: dict, depth: int, expected: list[int]) -> None:
    assert PLACEMENTS[name](**options).routed(depth) == expected


@pytest.mark.parametrize("name", ["bilayer", "trilayer"])
@pytest.mark.parametrize("depth", range(1, 30))
def test_first_and_last_layer_stay_dense(name: str, depth: int) -> None:
    routed = PLACEMENTS[name]().routed(depth)
    assert 0 not in routed
    assert depth - 1 not in routed


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alternate", {"first": 6}),
        ("later", {"first": 6}),
        ("every", {"first": 9}),
        ("stages", {"layers": [3, 6]}),
        ("list", {"layers": [6]}),
    ],
)
def test_a_layer_that_does_not_exist_is_named_with_the_layers_there_are(name: str, options: dict) -> None:
    with pytest.raises(ValueError, match=r"placement\.\w+ = [\d, ]+: the backbone has layers 0 to 5 \(zero-based\)"):
        PLACEMENTS[name](**options).routed(6)


def test_layers_counted_from_one_are_refused_as_they_were_counted() -> None:
    with pytest.raises(ValueError, match=r"placement.layers = 0, 7: the backbone has layers 1 to 6 \(counted from 1\)"):
        PLACEMENTS["list"](layers=[0, 3, 7], base=1).routed(6)


def test_a_layer_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="names a layer twice"):
        PLACEMENTS["list"](layers=[2, 2]).routed(6)


def test_a_placement_from_outside_is_a_function() -> None:
    assert routed_layers(lambda depth, every: range(0, depth, every), 6, every=3) == [0, 3]
    with pytest.raises(ValueError, match="layers 0 to 5"):
        routed_layers(lambda depth: [depth], 6)


@pytest.mark.parametrize(
    ("routed", "options", "expected"),
    [
        ([1, 3, 5], {}, {1: 0, 3: 2, 5: 4}),
        ([3, 4, 5], {"source": "last_dense"}, {3: 2, 4: 2, 5: 2}),
        ([2, 5], {"source": "lag", "lag": 2}, {2: 0, 5: 3}),
        ([2, 4], {"source": 1}, {2: 1, 4: 1}),
        ([1, 2], {"source": "previous", "fill": "zero"}, {1: 0, 2: 1}),
        ([1, 2], {"source": "previous", "sublayer": "mlp"}, {1: 0, 2: 1}),
        ([0, 1], {"source": "same", "sublayer": "mlp"}, {0: 0, 1: 1}),
        ([0, 1], {"source": "same"}, {0: 0, 1: 1}),
    ],
)
def test_attention_sources(routed: list[int], options: dict, expected: dict[int, int]) -> None:
    assert attention_sources(routed, 6, **options) == expected


@pytest.mark.parametrize(
    ("routed", "options", "reason"),
    [
        ([0, 2], {}, "routed layer 0 .* has no such layer below it"),
        ([0], {"source": "last_dense"}, "routed layer 0 .* has no dense layer below it"),
        ([1], {"source": "lag", "lag": 2, "fill": "carry"}, "routed layer 1 .* has no such layer"),
        ([1, 2], {}, "layer 1, the source of routed layer 2, is itself routed"),
        ([2, 4], {"source": 2}, "layer 2 runs after the selection of routed layer 2"),
        ([2, 4], {"source": 3}, "layer 3 runs after the selection of routed layer 2"),
    ],
)
def test_attention_that_is_not_there_is_refused(routed: list[int], options: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"placement.attention_source = .*{reason}"):
        attention_sources(routed, 6, **options)


def test_every_placement_is_deterministic_and_sorted() -> None:
    for name in PLACEMENTS:
        options = {"layers": [3, 1]} if name in ("stages", "list") else {}
        routed = PLACEMENTS[name](**options).routed(12)
        assert routed == sorted(set(routed))


@pytest.mark.parametrize("depth", [32, 24])
def test_the_layer_string_of_published_decoders(depth: int) -> None:
    """DTRNet's released list D = {2, 4, ..., 30} of 32 and {2, ..., 22} of 24 names the layers that stay dense."""
    listed = layer_string(range(2, depth - 1, 2), depth)
    released = layer_string(PLACEMENTS["bilayer"](ends="routed").routed(depth), depth)
    assert released == listed.translate(str.maketrans("TD", "DT"))
    assert layer_string(PLACEMENTS["bilayer"]().routed(depth), depth) == "T-D-" * (depth // 2 - 1) + "T-T"
    assert layer_string(PLACEMENTS["trilayer"]().routed(8), 8) == "T-D-D-T-D-D-T-T"


def test_what_a_placement_saves_at_most_is_said_beforehand() -> None:
    (layers, ceiling) = placed_lines(load(["placement=later", "capacity.protect=none"]).config)
    assert layers == "layers: T-T-T-D-D-D (T dense, D routed block)"
    assert ceiling == "ceiling: at most 2.00 times fewer multiply-accumulates than the dense model"
    assert placed_lines(load(["router=dense"]).config) == []
    (layers,) = placed_lines(load(["task=language", "method=dtrnet"]).config)
    assert layers.startswith("layers: T-D-T-")
