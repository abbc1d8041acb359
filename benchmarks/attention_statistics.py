"""Attention statistics: the whole map, two passes and one, over fused attention that returns none.

    python benchmarks/attention_statistics.py [--threads 2] [--repetitions 11]

All return the attention that every token receives (mean over queries), per head.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import timm
import torch
import torch.nn.functional as F
from ratios import arguments, ratios, show

from routing_lab.attention import AttentionMap, StatisticsRequest, backend
from routing_lab.backbones import adapt
from routing_lab.routing.tokens import Positioned

SIZES = ((32, 197), (1, 1024), (1, 4096))
HEADS, HEAD_WIDTH = 6, 64


def main() -> None:
    options = arguments(__doc__)
    with torch.no_grad():
        attention_alone(options.repetitions)
        whole_block(options.repetitions)


def attention_alone(repetitions: int) -> None:
    rows = []
    for batch, tokens in SIZES:
        query, key, value = torch.randn(3, batch, HEADS, tokens, HEAD_WIDTH)
        fused = functools.partial(F.scaled_dot_product_attention, query, key, value)

        attention = AttentionMap(query, key, HEAD_WIDTH**-0.5)
        measured = ratios(
            {
                "fused": fused,
                "eager": functools.partial(backend("eager").attend, attention, value),
                "two passes": lambda fused=fused, a=attention: (fused(), backend("fused").received(a)),
                "one pass": functools.partial(backend("fused").attend, attention, value),
            },
            repetitions,
        )
        rows.append((batch, tokens, measured["eager"], measured["two passes"], measured["one pass"]))
    columns = ("samples", "tokens", "whole map", "two passes", "one pass")
    show(f"{HEADS} heads of {HEAD_WIDTH}, over fused attention without statistics", columns, rows)


def whole_block(repetitions: int) -> None:
    backbone = adapt(timm.create_model("deit_small_patch16_224", depth=1).eval())
    rows = []
    received = StatisticsRequest(received=True)
    for batch, tokens in SIZES:
        x = Positioned(torch.randn(batch, tokens, 384))
        block = backbone.block(0)

        def run(request: StatisticsRequest, block: object = block, x: Positioned = x) -> torch.Tensor:
            h = x.x + block.attend_with_statistics(x, None, request)[0]
            return h + block.mlp(h)

        measured = ratios(
            {
                "none": lambda block=block, x=x: block.dense(x, None),
                "eager": lambda run=run: run(replace(received, backend="eager")),
                "two passes": lambda run=run: run(replace(received, exact=True)),
                "one pass": lambda run=run: run(received),
                "class row": lambda run=run: run(StatisticsRequest(class_row=True)),
            },
            repetitions,
        )
        rows.append(
            (batch, tokens, measured["eager"], measured["two passes"], measured["one pass"], measured["class row"])
        )
    columns = ("samples", "tokens", "whole map", "two passes", "one pass", "class row only")
    show("DeiT-S block with statistics, over the block without", columns, rows)


if __name__ == "__main__":
    main()
