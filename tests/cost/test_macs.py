"""The cost model against independently computed numbers (`data/flops.json`, equal to torch's own counter)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from routing_lab.axes.routers import LinearRouterConfig
from routing_lab.cost import macs
from routing_lab.cost.macs import LayerRule, LayerTokens, ModelShape

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "flops.json").read_text())
WIDTHS = {"deit_t": (192, 12, 3), "deit_s": (384, 12, 6), "vit_b": (768, 12, 12), "vit_l": (1024, 24, 16)}
DECODERS = {
    "360m": {"width": 960, "depth": 32, "heads": 15, "kv_heads": 5, "mlp_hidden": 2560},
    "1.3b": {"width": 2048, "depth": 24, "heads": 32, "kv_heads": 32, "mlp_hidden": 5632},
}


def vit(name: str, positions: int = 196, **changes: Any) -> ModelShape:
    width, depth, heads = WIDTHS[name]
    fields: dict[str, Any] = {"width": width, "depth": depth, "heads": heads, "mlp_hidden": 4 * width} | changes
    return ModelShape(positions=positions, patch_inputs=16 * 16 * 3, classes=1000, **fields)


def decoder(name: str, positions: int) -> ModelShape:
    return ModelShape(
        positions=positions, prefix=0, classes=32000, head_tokens=positions, mlp_matrices=3, **DECODERS[name]
    )


def pruned(shape: ModelShape, layers: list[int], remaining: list[int]) -> list[LayerTokens]:
    """Counts when tokens leave for good between attention and MLP of the given layers."""
    counts, entering = [], shape.tokens
    for layer in range(shape.depth):
        if layer in layers:
            kept = remaining[layers.index(layer)]
            counts.append(LayerRule("mlp").tokens(entering, kept))
            entering = kept
        else:
            counts.append(LayerRule().tokens(entering, entering))
    return counts


def check(row: dict[str, Any], cost: macs.Macs) -> None:
    assert cost.total == row["mac"]
    if "parts" in row:
        assert {key: value for key, value in cost.as_dict().items() if key != "total"} == row["parts"]


def rows(section: str) -> list[Any]:
    return [pytest.param(row, id=f"{section}-{number}") for number, row in enumerate(REFERENCE[section])]


@pytest.mark.parametrize("name", REFERENCE["models"])
def test_dense_models(name: str) -> None:
    row = REFERENCE["models"][name]
    assert vit(name).tokens == row["tokens"]
    check(row, macs.dense_macs(vit(name)))


@pytest.mark.parametrize("row", rows("alternate") + rows("later"))
def test_routed_blocks(row: dict[str, Any]) -> None:
    shape = vit(row["model"])
    routed = row["routed_layers_0based"]
    rules = macs.layer_rules(shape.depth, routed, LayerRule("block", all_keys=row["attn_scope"] == "full_kv"))
    cost = macs.routed_macs(shape, macs.nominal_tokens(shape, rules, row["k"]))
    check(row, cost)
    assert cost.total / macs.dense_macs(shape).total == pytest.approx(row["ratio_to_dense"], rel=1e-12)
    if "linear_router_mac_not_included" in row:
        router = LinearRouterConfig().weights(shape.width) * shape.tokens * len(routed)
        assert router == row["linear_router_mac_not_included"]


@pytest.mark.parametrize("row", rows("prune"))
def test_tokens_removed_after_attention(row: dict[str, Any]) -> None:
    shape = vit(row["model"])
    check(row, macs.routed_macs(shape, pruned(shape, row["layers_0based"], row["tokens_after_layers_3_6_9"])))


@pytest.mark.parametrize("row", rows("overlap"))
def test_overlapping_patches(row: dict[str, Any]) -> None:
    shape = vit(row["model"], positions=row["patches"])
    layers = pruned(shape, [3, 6, 9] if row["keep"] else [], row["tokens_after_layers_3_6_9"] or [])
    check(row, macs.routed_macs(shape, layers))


def test_smaller_dense_baselines() -> None:
    for depth, expected in REFERENCE["isoflop_deit_s"]["by_depth"].items():
        assert macs.dense_macs(vit("deit_s", depth=int(depth))).total == expected
    for width, expected in REFERENCE["isoflop_deit_s"]["by_width_depth12"].items():
        shape = vit("deit_s", width=int(width), heads=1, mlp_hidden=4 * int(width))
        assert macs.dense_macs(shape).total == expected


@pytest.mark.parametrize("row", rows("dtr_lm"))
def test_projected_attention_in_a_decoder_with_grouped_keys(row: dict[str, Any]) -> None:
    shape = decoder(row["config"], row["T"])
    assert macs.dense_macs(shape).total == row["dense_mac"]
    for all_keys, expected in ((False, row["routed_kv_mac"]), (True, row["full_kv_mac"])):
        rule = LayerRule("attention", project=True, all_keys=all_keys)
        rules = macs.layer_rules(shape.depth, range(1, 1 + row["routed_layers"]), rule)
        assert macs.routed_macs(shape, macs.nominal_tokens(shape, rules, row["routed_tokens"])).total == expected


RULES = [
    LayerRule(sublayer, project, all_keys)
    for sublayer in (None, "block", "attention", "mlp")
    for project in ((False, True) if sublayer == "attention" else (False,))
    for all_keys in (False, True)
]


@pytest.mark.parametrize("rule", RULES)
def test_keeping_every_token_costs_what_dense_does(rule: LayerRule) -> None:
    shape = vit("deit_t")
    layers = macs.nominal_tokens(shape, [rule] * shape.depth, shape.tokens)
    assert macs.routed_macs(shape, layers) == macs.dense_macs(shape)


def test_sublayers_pay_only_for_their_own_part() -> None:
    block, attention, mlp = (LayerRule(sublayer).tokens(10, 4) for sublayer in ("block", "attention", "mlp"))
    assert block == LayerTokens(queries=4, keys=4, values=4, outputs=4, mlp=4, pairs=16)
    assert attention == LayerTokens(queries=4, keys=4, values=4, outputs=4, mlp=10, pairs=16)
    assert mlp == LayerTokens(queries=10, keys=10, values=10, outputs=10, mlp=4, pairs=100)
    everything = LayerRule("attention", project=True, all_keys=True).tokens(10, 4)
    assert everything == LayerTokens(queries=4, keys=10, values=10, outputs=10, mlp=10, pairs=40)
    scored_by_itself = LayerRule("block", map_rows="all").tokens(10, 4)
    assert scored_by_itself == LayerTokens(queries=14, keys=14, values=14, outputs=4, mlp=4, pairs=16, map_pairs=100)


def test_ceiling_of_alternate_routing_stays_below_two() -> None:
    shape = vit("deit_s")
    alternate = macs.layer_rules(shape.depth, range(1, shape.depth, 2), LayerRule("block"))
    ceiling = macs.speedup_ceiling(shape, alternate)
    assert 1.9 < ceiling < 2
    assert macs.speedup_ceiling(shape, alternate, kept=1) < ceiling
    assert macs.speedup_ceiling(shape, [LayerRule()] * shape.depth) == 1
    blocks_only = ModelShape(width=8, depth=2, heads=2, mlp_hidden=32, positions=4, prefix=0)
    assert macs.speedup_ceiling(blocks_only, [LayerRule(), LayerRule("block")]) == 2


def test_useless_counts_are_refused() -> None:
    shape = vit("deit_t")
    with pytest.raises(ValueError, match="width = 100: must be a multiple of heads = 3"):
        vit("deit_t", width=100)
    with pytest.raises(ValueError, match="backbone has 12"):
        macs.routed_macs(shape, [LayerRule().tokens(197, 197)])
    with pytest.raises(ValueError, match="kept = 11: must lie between 0 and the 10 tokens"):
        LayerRule("block").tokens(10, 11)
