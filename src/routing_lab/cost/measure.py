"""What the cost model needs of a built model: its shape, its parameters, and the work that its layers did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from routing_lab.backbones import adapt
from routing_lab.cost.macs import LayerTokens, ModelShape, routed_macs
from routing_lab.routing.trace import Trace
from routing_lab.routing.work import Work

COUNTED = tuple(field.name for field in fields(LayerTokens))


def vision_shape(backbone: nn.Module, image_size: tuple[int, int] | None = None) -> ModelShape:
    """Shape of a vision transformer that is routed, of timm or transformers.

    Args:
        backbone: the model; only the shapes of its parameters are read, so that it may live on the meta device.
        image_size: height and width when they differ from the ones it was built for.

    Raises ValueError when its blocks differ from each other, or it has parts that the cost model does not count.
    """
    model: Any = backbone
    if not hasattr(model, "patch_embed"):
        return _hf_shape(adapt(model), image_size)
    if getattr(model, "attn_pool", None) is not None:
        raise ValueError("the cost model does not count attention pooling; choose a backbone with pool token or avg")
    blocks = {_block_shape(block) for block in model.blocks}
    if len(blocks) != 1:
        raise ValueError(f"the cost model needs blocks of one shape; the backbone has {sorted(blocks)}")
    heads, kv_heads, head_dim, mlp_hidden, mlp_weights = blocks.pop()
    embed = model.patch_embed.proj
    grid = (
        model.patch_embed.grid_size
        if image_size is None
        else [(size - k) // s + 1 for size, k, s in zip(image_size, embed.kernel_size, embed.stride, strict=True)]
    )
    distilled = isinstance(getattr(model, "head_dist", None), nn.Linear)
    return ModelShape(
        width=model.embed_dim,
        depth=len(model.blocks),
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=head_dim,
        mlp_hidden=mlp_hidden,
        mlp_matrices=3 if mlp_weights == 3 * mlp_hidden * model.embed_dim else 2,
        positions=grid[0] * grid[1],
        prefix=model.num_prefix_tokens,
        patch_inputs=embed.weight[0].numel(),
        classes=model.head.out_features if isinstance(model.head, nn.Linear) else 0,
        head_tokens=2 if distilled else 1,
    )


def decoder_shape(config: Any, positions: int) -> ModelShape:
    """Shape of a Llama decoder that reads `positions` tokens, from its transformers `LlamaConfig`."""
    return ModelShape(
        width=config.hidden_size,
        depth=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        mlp_hidden=config.intermediate_size,
        mlp_matrices=3,
        positions=positions,
        prefix=0,
        classes=config.vocab_size,
        head_tokens=positions,
    )


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """`params`, all parameters, and `router_params`, those named `router.` in checkpoints: a record's cost entries."""
    named = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)}
    routers = sum(parameter.numel() for name, parameter in named.items() if name.startswith("router."))
    return {"params": sum(parameter.numel() for parameter in model.parameters()), "router_params": routers}


def sample_macs(trace: Trace, shape: ModelShape, router_weights: Mapping[int, int]) -> Tensor:
    """[B] float64: multiply-accumulates of each sample of one forward.

    router_weights: multiply-accumulates of a router for one token, by layer.
    """
    counts: list[Any] = [LayerTokens(**{name: getattr(part.work, name) for name in COUNTED}) for part in trace.layers]
    macs: Any = routed_macs(shape, counts).total
    macs = macs + sum(trace[layer].work.router * weights for layer, weights in router_weights.items())
    return torch.as_tensor(macs).cpu().double().expand(len(trace[0].counts))


class WorkMeter:
    """Means over samples of what each layer computed.

    Whole numbers are added up, so that the mean number of query-key pairs is exact.

    Args:
        depth: number of layers.
    """

    def __init__(self, depth: int) -> None:
        self._samples = [0] * depth
        self._sums: list[Counter[str]] = [Counter() for _ in range(depth)]

    def add(self, trace: Trace) -> None:
        """Record one forward pass, all layers in one transfer from the device."""
        tensors: list[Tensor] = []
        places: list[tuple[int, str]] = []
        for layer, part in enumerate(trace.layers):
            batch = len(part.counts)
            self._samples[layer] += batch
            for name, count in (_counts(part.work) | {"computed": part.treated}).items():
                if isinstance(count, Tensor):
                    tensors.append(count.sum())
                    places.append((layer, name))
                else:
                    self._sums[layer][name] += count * batch
        if tensors:
            for (layer, name), total in zip(places, torch.stack(tensors).tolist(), strict=True):
                self._sums[layer][name] += total

    def mean(self) -> list[LayerTokens]:
        """Counts of each layer, for `routed_macs`. Raises ValueError when a layer was never recorded."""
        return self._mean("")

    def repeated(self) -> list[LayerTokens]:
        """What each layer computed once more for statistics. Raises ValueError when a layer was never recorded."""
        return self._mean("repeated.")

    def router(self) -> list[float]:
        """Tokens that each layer's router read. Raises ValueError when a layer was never recorded."""
        return [self._per_sample(layer, "router") for layer in range(len(self._sums))]

    def computed(self) -> list[float]:
        """Tokens that each layer's routed part computed. Raises ValueError when a layer was never recorded."""
        return [self._per_sample(layer, "computed") for layer in range(len(self._sums))]

    def _mean(self, prefix: str) -> list[LayerTokens]:
        return [
            LayerTokens(**{name: self._per_sample(layer, prefix + name) for name in COUNTED})
            for layer in range(len(self._sums))
        ]

    def _per_sample(self, layer: int, name: str) -> float:
        if not self._samples[layer]:
            raise ValueError(f"layer {layer} (zero-based) was never recorded")
        return self._sums[layer][name] / self._samples[layer]


def _counts(work: Work) -> dict[str, Any]:
    found = {name: getattr(work, name) for name in (*COUNTED, "router")}
    if work.repeated is not None:
        found |= {f"repeated.{name}": getattr(work.repeated, name) for name in COUNTED}
    return found


def _hf_shape(backbone: Any, image_size: tuple[int, int] | None) -> ModelShape:
    """`vision_shape` of an adapted model of transformers."""
    module, encoder = backbone.module, backbone.encoder
    if encoder is module or getattr(encoder, "pooler", None) is not None:
        raise ValueError(f"the cost model counts models with a classifier; {type(module).__name__} pools otherwise")
    views = [backbone.block(layer) for layer in range(backbone.depth)]
    blocks = {(view.heads, view.kv_heads, view.head_dim, *_mlp_shape(view.module.mlp)) for view in views}
    if len(blocks) != 1:
        raise ValueError(f"the cost model needs blocks of one shape; the backbone has {sorted(blocks)}")
    heads, kv_heads, head_dim, mlp_hidden, mlp_weights = blocks.pop()
    size, patch, channels = backbone.image_shape
    rows, columns = (side // step for side, step in zip(image_size or size, patch, strict=True))
    classifiers = [child for child in module.children() if isinstance(child, nn.Linear)]
    return ModelShape(
        width=backbone.width,
        depth=backbone.depth,
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=head_dim,
        mlp_hidden=mlp_hidden,
        mlp_matrices=mlp_weights // (mlp_hidden * backbone.width),
        positions=rows * columns,
        prefix=len(backbone.prefix),
        patch_inputs=channels * patch[0] * patch[1],
        classes=classifiers[0].out_features if classifiers else 0,
        head_tokens=sum(linear.in_features for linear in classifiers) // backbone.width or 1,
    )


def _mlp_shape(mlp: nn.Module) -> tuple[int, int]:
    """Width of the hidden layer, and the weights of all linear modules."""
    linear = [module for module in mlp.modules() if isinstance(module, nn.Linear)]
    return linear[-1].in_features, sum(module.weight.numel() for module in linear)


def _block_shape(block: Any) -> tuple[int, int, int, int, int]:
    if not hasattr(block, "attn"):
        raise ValueError(
            f"the cost model does not count a {type(block).__name__}: its branches stand beside each other"
        )
    heads = block.attn.num_heads
    head_dim = getattr(block.attn, "head_dim", block.norm1.weight.shape[0] // heads)
    return heads, getattr(block.attn, "num_kv_heads", heads), head_dim, *_mlp_shape(block.mlp)
