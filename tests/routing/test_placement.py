"""Which layers are routed, and whose attention they are scored by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.routing.test_routers import source_map
from tests.routing.tiny import images, routed
from torch import Tensor

from routing_lab.axes.layers import attention_sources
from routing_lab.axes.placements import PLACEMENTS

X = images(dtype=torch.float64)


@pytest.mark.parametrize(
    ("placement", "depth", "options", "layers"),
    [
        ("alternate", 12, {}, [1, 3, 5, 7, 9, 11]),
        ("alternate", 6, {"first": 2, "stride": 3}, [2, 5]),
        ("later", 12, {}, [6, 7, 8, 9, 10, 11]),
        ("later", 5, {}, [2, 3, 4]),
        ("later", 12, {"first": 10}, [10, 11]),
        ("every", 6, {}, [1, 2, 3, 4, 5]),
        ("every", 4, {"first": 0}, [0, 1, 2, 3]),
        ("stages", 12, {}, [3, 6, 9]),
        ("bilayer", 8, {}, [1, 3, 5]),
        ("bilayer", 9, {}, [1, 3, 5, 7]),
        ("trilayer", 8, {}, [1, 2, 4, 5]),
        ("trilayer", 7, {}, [1, 2, 4, 5]),
        ("list", 6, {"layers": [5, 0]}, [0, 5]),
        ("list", 6, {"layers": [1, 6], "base": 1}, [0, 5]),
    ],
)
def test_layers(placement: str, depth: int, options: dict[str, Any], layers: list[int]) -> None:
    assert PLACEMENTS[placement](**options).routed(depth) == layers


@pytest.mark.parametrize(
    ("placement", "options", "message"),
    [
        ("list", {"layers": [1, 6]}, r"placement\.layers = 6: the backbone has layers 0 to 5 \(zero-based\)"),
        (
            "list",
            {"layers": [0], "base": 1},
            r"placement\.layers = 0: the backbone has layers 1 to 6 \(counted from 1\)",
        ),
        ("list", {"layers": [2, 2]}, "names a layer twice"),
        ("alternate", {"first": 9}, r"placement\.first = 9"),
        ("stages", {"layers": [3, 6, 9]}, r"placement\.layers = 6, 9"),
    ],
)
def test_layers_that_do_not_exist(placement: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PLACEMENTS[placement](**options).routed(6)


@pytest.mark.parametrize(
    ("routed_ones", "options", "sources"),
    [
        ([1, 3, 5], {}, {1: 0, 3: 2, 5: 4}),
        ([2, 3], {"source": "lag", "lag": 2}, {2: 0, 3: 1}),
        ([2, 3, 4], {"source": "last_dense"}, {2: 1, 3: 1, 4: 1}),
        ([2, 3], {"source": 0}, {2: 0, 3: 0}),
        ([1, 2], {"fill": "zero"}, {1: 0, 2: 1}),
        ([0, 1], {"source": "same", "sublayer": "mlp"}, {0: 0, 1: 1}),
        ([1, 2], {"sublayer": "mlp"}, {1: 0, 2: 1}),
    ],
)
def test_sources(routed_ones: list[int], options: dict[str, Any], sources: dict[int, int]) -> None:
    assert attention_sources(routed_ones, 6, **options) == sources


@pytest.mark.parametrize(
    ("routed_ones", "options", "message"),
    [
        ([0, 2], {}, "routed layer 0 .* has no such layer below it"),
        ([0, 2], {"source": "last_dense"}, "routed layer 0 .* has no dense layer below it"),
        ([1, 2], {}, "layer 1, the source of routed layer 2, is itself routed"),
        ([1, 3], {"source": 2}, "layer 2 runs after the selection of routed layer 1"),
        ([1, 3], {"source": 9}, "layer 9 runs after the selection of routed layer 1"),
        ([1, 3], {"source": "lag", "lag": 2}, "routed layer 1 .* has no such layer below it"),
    ],
)
def test_sources_that_do_not_exist(routed_ones: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_sources(routed_ones, 6, **options)


def trace_of(*overrides: str) -> Any:
    with torch.no_grad():
        return routed(["router=amod", "placement=list", *overrides], double=True)(X, return_trace=True)[1]


def received(layer: int) -> Tensor:
    return source_map(X, layer=layer).mean(dim=(1, 2))


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "layer", "source"),
    [
        (["placement.layers=[1]"], 1, 0),
        (["placement.layers=[2]", "placement.attention_source=lag"], 2, 0),
        (["placement.layers=[3]", "placement.attention_source=1"], 3, 1),
        (["placement.layers=[2]", "placement.attention_source=same"], 2, 2),
        (["placement.layers=[2,3]", "placement.attention_source=last_dense"], 2, 1),
    ],
)
def test_scores_come_from_the_named_layer(options: list[str], layer: int, source: int) -> None:
    near(trace_of(*options)[layer].scores, received(source))


def test_one_map_serves_several_layers() -> None:
    trace = trace_of("placement.layers=[2,3]", "placement.attention_source=last_dense")
    assert torch.equal(trace[2].scores, trace[3].scores)
    assert torch.equal(trace[2].kept, trace[3].kept)


def own_map_of_kept(layer: int, kept: Tensor) -> Tensor:
    """[B, K] attention received among the kept tokens of a routed layer whose input is the dense model's."""
    from tests.attention.test_statistics import own_map
    from tests.routing.tiny import vit

    from routing_lab.backbones import adapt

    backbone = adapt(vit().double())
    with torch.no_grad():
        tokens, context = backbone.embed(X)
        for below in range(layer):
            tokens = tokens.with_x(backbone.block(below).dense(tokens.side(), context))
        rows = torch.stack([row[index] for row, index in zip(tokens.x, kept, strict=True)])
        return own_map(backbone, rows, layer).mean(dim=(1, 2))


@pytest.mark.parametrize("fill", ["zero", "mean", "carry"])
def test_tokens_missing_from_a_routed_source_are_filled(fill: str) -> None:
    trace = trace_of(
        "placement.layers=[1,2]", f"placement.attention_fill={fill}", "placement.attention_source=previous"
    )
    kept, scores = trace[1].kept, trace[2].scores
    among = own_map_of_kept(1, kept)
    near(scores.gather(1, kept), among)
    missing = torch.ones_like(scores, dtype=torch.bool).scatter(1, kept, False)
    expected = {
        "zero": torch.zeros_like(scores),
        "mean": among.mean(dim=1, keepdim=True).expand_as(scores),
        "carry": received(0),
    }[fill]
    near(scores[missing], expected[missing])


def test_visible_keys_need_no_filling() -> None:
    """With visibility=all a routed source covers every key: the mean runs over the kept queries."""
    fills = [
        trace_of("placement.layers=[1,2]", f"placement.attention_fill={fill}", "visibility=all")[2].scores
        for fill in ("zero", "mean", "carry")
    ]
    assert torch.equal(fills[0], fills[1])
    assert torch.equal(fills[0], fills[2])
    near(fills[0].sum(dim=1), torch.ones(3, dtype=torch.float64))
    assert (fills[0] > 0).all()


def test_class_attention_without_the_class_token_is_zero() -> None:
    """A routed source that did not keep the class token has no row of it."""
    trace = trace_of(
        *("router=cls_attention", "placement.layers=[1,2]", "placement.attention_source=previous"),
        *("placement.attention_fill=zero", "capacity.protect=none", "capacity.order=lowest", "capacity.fraction=0.3"),
    )
    has_class = (trace[1].kept == 0).any(dim=1)
    assert not has_class.all()
    assert (trace[2].scores[~has_class] == 0).all()


def test_model_says_which_layers_it_routes() -> None:
    model = routed(["router=amod"])
    assert model.routed_layers == [1, 3]
    assert "routed_layers=[1, 3] (zero-based), T-D-T-D" in repr(model)
