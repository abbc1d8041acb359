"""Reading a prompt and decoding behind it, against transformers' dense model with its own cache, by length.

    python benchmarks/decoding.py [--threads 2] [--repetitions 5] [--longest 8192] [--width 256] [--depth 8] [--steps 8]

A tenth of the tokens attends in the routed layers, drawn by chance, so that the time does not depend on training. Times
are given over those of the dense model, one text at a time; cached are keys and values behind the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from ratios import arguments, ratios, show
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import routing_lab
from routing_lab.routing.model import RoutedModel

ARMS = {
    "every second layer": ["method=random_lm"],
    "two of three layers": ["method=random_lm", "placement=trilayer"],
}
LENGTHS = (512, 1024, 2048, 4096, 8192)


def main() -> None:
    options = arguments(__doc__, longest=8192, width=256, depth=8, steps=8)
    torch.manual_seed(0)
    size = {"hidden_size": options.width, "num_hidden_layers": options.depth, "intermediate_size": 3 * options.width}
    heads = {"num_attention_heads": options.width // 64, "num_key_value_heads": max(1, options.width // 128)}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=1024, max_position_embeddings=16384, **size, **heads)).eval()
    routed = {name: routing_lab.route(dense, overrides) for name, overrides in ARMS.items()}
    rows: list[tuple[object, ...]] = []
    for length in (length for length in LENGTHS if length <= options.longest):
        ids = torch.randint(1024, (1, length))
        with torch.no_grad():
            rows += measured(dense, routed, ids, options.steps, options.repetitions)
        print(*rows[-len(routed) :], sep="\n", flush=True)  # the longest take minutes
    show(
        f"Llama, width {options.width}, {options.depth} layers; over the dense model",
        ("tokens", "routed", "prefill", "decode", "bytes held", "bytes allocated"),
        rows,
    )


def measured(
    dense: LlamaForCausalLM, routed: dict[str, RoutedModel], ids: torch.Tensor, steps: int, repetitions: int
) -> list[tuple[object, ...]]:
    """A row for each routed model: prompt, decoding of some tokens behind it, and memory, over the dense model's."""
    dense_cache = DynamicCache()
    dense(ids, cache=dense_cache, logits_to_keep=1)
    dense_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in dense_cache.layers)
    caches = {name: model.new_cache() for name, model in routed.items()}
    for name, model in routed.items():
        model(ids, cache=caches[name])
    held = {name: cache.logical_bytes / dense_bytes for name, cache in caches.items()}
    allocated = {name: cache.allocated_bytes / dense_bytes for name, cache in caches.items()}
    token = ids[:, -1:]

    def decode(call: Callable[[], object]) -> Callable[[], None]:
        def some() -> None:
            for _ in range(steps):
                call()

        return some

    prompt = {"dense": lambda: dense(ids, cache=DynamicCache())}
    prompt |= {name: lambda m=model: m(ids, cache=m.new_cache()) for name, model in routed.items()}
    behind = {"dense": decode(lambda: dense(token, cache=dense_cache))}
    behind |= {name: decode(lambda m=model, n=name: m(token, cache=caches[n])) for name, model in routed.items()}
    first, then = ratios(prompt, repetitions), ratios(behind, repetitions)
    return [(ids.shape[1], name, first[name], then[name], held[name], allocated[name]) for name in routed]


if __name__ == "__main__":
    main()
