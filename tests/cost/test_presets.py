"""From a method and its keys to multiply-accumulates: by the configuration alone, and by what a real forward treats.

The expected numbers (`data/flops.json`) were computed independently and equal torch's own counter.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.routing.tiny import HEADS, WIDTH, images, vit

from routing_lab.assembly import attach
from routing_lab.axes.facts import BackboneFacts
from routing_lab.axes.routers import ROUTERS
from routing_lab.backbones import adapt
from routing_lab.backbones.build import build_vit
from routing_lab.config import Config, conf_path, load
from routing_lab.config.backbones import TimmBackboneConfig
from routing_lab.config.nominal import (
    layer_tokens,
    nominal_counts,
    routing_rules,
)
from routing_lab.cost.macs import LayerTokens, ModelShape, routed_macs
from routing_lab.cost.measure import WorkMeter, vision_shape
from routing_lab.routing.model import RoutedModel

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "flops.json").read_text())
BACKBONES = {"deit_t": "deit_tiny", "deit_s": "deit_small", "vit_b": "vit_base", "vit_l": "vit_large"}
CLASSES = 1000


def reference_cases() -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Overrides -> the rows of the reference that they describe, one for each backbone and patch stride."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for placement in ("alternate", "later"):
        for row in REFERENCE[placement]:
            # Percentile keeps protected tokens besides those above it, so that their scores would decide the count.
            rule = ("percentile", "none") if "percentile" in row["k_rule"] else ("topk", "prefix")
            visibility = {"kept_only": "kept", "full_kv": "all"}[row["attn_scope"]]
            key = (
                *("method=amod", f"placement={placement}", "placement.attention_source=last_dense"),
                *(f"capacity={rule[0]}", f"capacity.protect={rule[1]}", f"capacity.fraction={row['capacity']}"),
                f"visibility={visibility}",
            )
            found.setdefault(key, []).append(row)
    for row in REFERENCE["prune"] + REFERENCE["overlap"]:
        method = "evit" if row["fused_token"] else "evit_no_fusion"
        key = (f"method={method}", f"capacity.fraction={row['keep']}") if row["keep"] else ("router=dense",)
        found.setdefault(key, []).append(row)
    return found


CASES = reference_cases()


@cache
def backbone(name: str) -> TimmBackboneConfig:
    config = load([f"backbone={name}"]).config.backbone
    assert isinstance(config, TimmBackboneConfig)
    return config


@cache
def tiny_deit(stride: int) -> torch.nn.Module:
    """A ViT with the tokens of a DeiT at 224 pixels, as narrow as possible."""
    torch.manual_seed(0)
    return build_vit(
        num_classes=2, embed_dim=6, depth=12, num_heads=2, mlp_ratio=1.0, patch_stride=None if stride == 16 else stride
    ).eval()


def nominal(config: Config, shape: ModelShape) -> list[LayerTokens]:
    routed = config.placement.routed(shape.depth) if config.router.traits.routes else []
    counts = nominal_counts(config, routed, shape.depth, shape.tokens, shape.prefix)
    assert counts is not None
    return layer_tokens(routing_rules(config, routed, shape.depth), counts)


def measured(model: RoutedModel, pictures: torch.Tensor) -> list[LayerTokens]:
    meter = WorkMeter(len(model.backbone.blocks))
    with torch.no_grad():
        meter.add(model(pictures, return_trace=True)[1])
    return meter.mean()


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_cost_is_the_reference(overrides: tuple[str, ...]) -> None:
    config = load(overrides, facts=BackboneFacts(12, 384, 6, ("class",), 197)).config
    real: dict[int, list[LayerTokens]] = {}
    for row in CASES[overrides]:
        stride = row.get("patch_stride", 16)
        shape = backbone(BACKBONES[row["model"]]).model_copy(update={"patch_stride": stride}).shape(CLASSES)
        assert shape is not None
        layers = nominal(config, shape)
        cost = routed_macs(shape, layers)
        assert cost.total == row["mac"]
        if "parts" in row:
            assert {part: value for part, value in cost.as_dict().items() if part != "total"} == row["parts"]
        if shape.depth == 12:
            if stride not in real:
                model = attach(adapt(tiny_deit(stride)), config)
                pictures = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
                real[stride] = measured(model, pictures)
            assert routed_macs(shape, real[stride]).total == row["mac"]


FILES = sorted((conf_path() / "method").glob("*.yaml"))
METHODS = [path.stem for path in FILES if "defaults:" in path.read_text()]
STAGED = [path.stem for path in FILES if "/placement: stages" in path.read_text()]


@pytest.mark.parametrize("method", METHODS)
def test_nominal_cost_of_every_method_is_what_a_forward_costs(method: str) -> None:
    facts = BackboneFacts(4, WIDTH, HEADS, ("class",), 17)
    given = [f"method={method}"]
    if method in STAGED:
        given.append("placement.layers=[1,2,3]")
    config = load(given, facts=facts).config
    model = attach(adapt(vit()), config)
    shape = vision_shape(model.backbone)
    rules = routing_rules(config, model.routed_layers, shape.depth)
    counts = nominal_counts(config, model.routed_layers, shape.depth, shape.tokens, shape.prefix)
    found = measured(model, images())
    if counts is not None:
        assert found == layer_tokens(rules, counts)
    for part in found:
        assert 0 < part.mlp <= shape.tokens


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_cost_their_matrices(name: str) -> None:
    facts = BackboneFacts(4, WIDTH, HEADS, ("class",), 17)
    given = [f"router={name}", "scaling=none"]
    config = load(given, facts=facts).config
    model = attach(adapt(vit()), config)
    matrices = {
        layer: sum(p.numel() for p in model.layers[str(layer)].router.parameters() if p.ndim == 2)
        for layer in model.routed_layers
    }
    assert set(matrices.values()) <= {config.router.weights(WIDTH)}


def test_what_depends_on_scores_has_no_nominal_cost() -> None:
    config = load(["capacity=threshold"]).config
    assert nominal_counts(config, [1, 3, 5], 6, 17, 1) is None


def test_merging_and_pruning_add_up() -> None:
    rule = ["placement.layers=[1,3]", "capacity.fraction=0.5", "bypass.merged=2"]
    config = load(["method=prune_then_merge", *rule]).config
    counts = nominal_counts(config, [1, 3], 6, 17, 1)
    assert counts is not None
    assert [count.entering for count in counts] == [17, 17, 7, 7, 3, 3]
    assert [count.treated for count in counts] == [17, 7, 7, 3, 3, 3]
