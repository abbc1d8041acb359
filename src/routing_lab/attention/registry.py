"""Which back end computes attention statistics: by device, dtype and length.

| back end | holds | chosen for |
|---|---|---|
| `fused` | a slab of rows that stays in cache; one pass, in place | a CPU, unless the map is small |
| `chunked` | a slab of rows, for all samples and heads | small maps; other devices; traced, compiled, exported graphs |
| `triton` | O(N), nothing of the map | by name: a GPU with triton, see `make test-gpu` |
| `eager` | the whole map | nothing: the reference |
| `literal` | tiles | nothing: a counter-example |
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from routing_lab.attention.backends import Backend, Chunked, Eager
from routing_lab.attention.fused import Fused
from routing_lab.attention.literal import Literal
from routing_lab.attention.maps import AttentionMap

AUTO = "auto"
SMALL = 2**15
"""Elements of one sample's map up to which a slab for each sample would be calls more than work."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether triton is installed; it comes with torch on Linux."""


def _triton() -> Backend:
    from routing_lab.attention.triton_kernels import Triton

    return Triton()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "eager": Eager,
    "chunked": Chunked,
    "fused": Fused,
    "triton": _triton,
    "literal": Literal,
}


def backend(name: str) -> Backend:
    """The back end with this name.

    Raises:
        ValueError: if there is none, or if it needs triton, which is not installed.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention back end = {name}: expected one of {', '.join([AUTO, *BACKENDS])}")
    if name == "triton" and not HAS_TRITON:
        raise ValueError("attention back end = triton: the package triton is not installed")
    return BACKENDS[name]()


def choose(attention: AttentionMap, name: str = AUTO) -> Backend:
    """The back end for a map, unless `name` says which."""
    return backend(_best(attention) if name == AUTO else name)


def _best(attention: AttentionMap) -> str:
    mask = attention.mask
    if torch.compiler.is_compiling():
        return "chunked"
    if mask is not None and mask.requires_grad:
        return "chunked"  # the only one beside the reference that passes a gradient on to what is added to the logits
    if attention.query.device.type != "cpu" or _size(attention) <= SMALL:
        return "chunked"
    return "fused"


def _size(attention: AttentionMap) -> int:
    """Elements of one sample's map."""
    _, heads, queries, _ = attention.query.shape
    return heads * queries * attention.key.shape[2]
