"""Leave-one-out importance against the obvious way, and how long a whole measurement takes.

    python benchmarks/leave_one_out.py [--images 64]

Brute force is one forward of the whole model for every token that is left out. Both give the same numbers; the time
over brute force is taken on a few images, alternating, and the whole measurement on all of them.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn.functional import cross_entropy

import routing_lab
from routing_lab.assembly import build_model
from routing_lab.config import load
from routing_lab.probes.leave_one_out import leave_one_out
from routing_lab.routing.tokens import Selection

FEW = 4
"""Images on which brute force is measured too."""


def brute_force(model: routing_lab.RoutedModel, images: torch.Tensor, labels: torch.Tensor, layer: int) -> torch.Tensor:
    logits, trace = model(images, return_trace=True)
    importance = torch.zeros(trace[layer].origin.shape)
    for sample, kept in enumerate(trace[layer].kept.tolist()):
        ids = torch.tensor([sample])
        for token in kept:
            rest = torch.tensor([[other for other in kept if other != token]])
            tokens, context = model.embed(images[[sample]])
            edits = {layer: lambda _, selection, rest=rest: Selection(rest, None, selection.num_tokens)}
            left, _ = model.forward_tokens(tokens, context, model.run_state(tokens, sample_ids=ids), edits)
            without = cross_entropy(model.head(left), labels[[sample]])
            importance[sample, token] = without - cross_entropy(logits[[sample]], labels[[sample]])
    return importance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build_model(load(["router=amod", "backbone=vit_micro"]).config, 10).eval()
    size = model.backbone.patch_embed.img_size[0]
    images = torch.randn(options.images, model.backbone.patch_embed.proj.in_channels, size, size)
    labels = torch.randint(0, 10, (options.images,))
    few, few_labels = images[:FEW], labels[:FEW]
    ratios = []
    with torch.no_grad():
        for _ in range(3):
            start = time.perf_counter()
            found = [leave_one_out(model, few, few_labels, layer) for layer in model.routed_layers]
            between = time.perf_counter()
            expected = [brute_force(model, few, few_labels, layer) for layer in model.routed_layers]
            ratios.append((time.perf_counter() - between) / (between - start))
    difference = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    start = time.perf_counter()
    for layer in model.routed_layers:
        for operation in ("force_skip", "force_keep", "drop_at_layer"):
            leave_one_out(model, images, labels, layer, operation)
    seconds = time.perf_counter() - start
    tokens = model.embed(images[:1])[0].x.shape[1]
    print(f"vit_micro, {tokens} tokens, routed layers {model.routed_layers} of {model.adapter.depth}")
    print(
        f"brute force over leave_one_out: {sorted(ratios)[1]:.1f} times (3 alternating rounds: "
        f"{', '.join(f'{ratio:.1f}' for ratio in ratios)}); largest difference {difference:.1e}"
    )
    print(f"{options.images} images, every token, every routed layer, three operations: {seconds:.1f} s")


if __name__ == "__main__":
    main()
