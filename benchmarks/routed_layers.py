"""Routed against dense: one DeiT-S block and the whole DeiT-S, forward and training step.

    python benchmarks/routed_layers.py [--threads 2] [--repetitions 11] [--batch 32] [--model-batch 8]

Times and multiply-accumulates (MACs) are given over those of the dense one; an efficiency of 1 means that the time fell
as much as the MACs.
"""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
from ratios import arguments, ratios, show
from torch import nn

import routing_lab
from routing_lab.cost.macs import LayerRule, dense_macs, layer_rules, nominal_tokens, routed_macs
from routing_lab.cost.measure import vision_shape
from routing_lab.routing.maps import Maps
from routing_lab.routing.model import RoutedModel

FRACTIONS = (0.5, 0.125)
ARMS = {
    "linear, none": ["router=linear", "scaling=none"],
    "linear, multiply": ["router=linear", "scaling=multiply"],
    "amod, none": ["router=amod", "scaling=none"],
}


def main() -> None:
    options = arguments(__doc__, batch=32, model_batch=8)
    one_block(options.batch, options.repetitions)
    whole_model(options.model_batch, options.repetitions)


def one_block(batch: int, repetitions: int) -> None:
    backbone = timm.create_model("deit_small_patch16_224", depth=2).eval()
    models = {fraction: routed(backbone, ["router=linear"], fraction) for fraction in FRACTIONS}
    images = torch.randn(batch, 3, 224, 224)
    with torch.no_grad():
        tokens, context = models[0.5].embed(images)
        state = models[0.5].run_state(tokens)

    def layer(model: RoutedModel) -> torch.Tensor:
        left, _, _ = model.layers["1"](tokens, model.adapter.block(1), context, Maps(), state)
        return left.x

    def first(kept: int) -> torch.Tensor:
        return backbone.blocks[1](tokens.x[:, :kept])

    rows = []
    for name, run in (("forward", forward), ("training step", step)):
        functions = {"dense": run(lambda: backbone.blocks[1](tokens.x), backbone.blocks[1])}
        for fraction, model in models.items():
            functions[f"{fraction}"] = run(lambda model=model: layer(model), model)
            kept = int(fraction * 197)
            functions[f"{fraction} first"] = run(lambda kept=kept: first(kept), backbone.blocks[1])
        measured = ratios(functions, repetitions)
        for fraction, model in models.items():
            share = model_share(model, fraction, blocks_only=True)
            rows.append((name, fraction, measured[f"{fraction}"], measured[f"{fraction} first"], share))
    columns = ("block", "capacity", "routed", "block on the first k tokens", "share of MACs")
    show(f"DeiT-S block, 197 tokens, batch {batch}", columns, rows)


def whole_model(batch: int, repetitions: int) -> None:
    backbone = timm.create_model("deit_small_patch16_224").eval()
    images = torch.randn(batch, 3, 224, 224)
    models = {(arm, c): routed(backbone, overrides, c) for arm, overrides in ARMS.items() for c in FRACTIONS}
    rows = []
    for name, run, count in (("forward", forward, repetitions), ("training step", step, max(3, repetitions // 2))):
        functions = {"dense": run(lambda: backbone(images), backbone)}
        functions |= {str(key): run(lambda model=model: model(images), model) for key, model in models.items()}
        measured = ratios(functions, count)
        for (arm, fraction), model in models.items():
            share, ratio = model_share(model, fraction), measured[str((arm, fraction))]
            rows.append((name, arm, fraction, ratio, share, share / ratio))
    columns = ("model", "arm", "capacity", "routed", "share of MACs", "efficiency")
    show(f"DeiT-S, every second layer routed, batch {batch}", columns, rows)


def routed(backbone: nn.Module, overrides: list[str], fraction: float) -> RoutedModel:
    return routing_lab.route(backbone, [*overrides, f"capacity.fraction={fraction}"])


def forward(call: Callable[[], torch.Tensor], module: nn.Module) -> Callable[[], object]:
    def run() -> object:
        module.eval()
        with torch.no_grad():
            return call()

    return run


def step(call: Callable[[], torch.Tensor], module: nn.Module) -> Callable[[], object]:
    def run() -> object:
        module.train()
        module.zero_grad()
        return call().square().mean().backward()

    return run


def model_share(model: RoutedModel, fraction: float, blocks_only: bool = False) -> float:
    """Multiply-accumulates of the routed model over those of the dense one; of its routed blocks alone."""
    shape = vision_shape(model.backbone)
    rules = layer_rules(shape.depth, model.routed_layers, LayerRule("block"))
    kept = int(fraction * shape.tokens)
    saved = dense_macs(shape).total - routed_macs(shape, nominal_tokens(shape, rules, kept)).total
    if not blocks_only:
        return 1 - saved / dense_macs(shape).total
    nothing = dense_macs(shape).total - routed_macs(shape, nominal_tokens(shape, rules, 0)).total
    return 1 - saved / nothing


if __name__ == "__main__":
    main()
