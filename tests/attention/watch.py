"""Watches what operations allocate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def largest_tensor() -> Iterator[dict[str, int]]:
    """The number of elements of the largest tensor that any operation returns."""
    seen = {"numel": 0}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else (out,):
                # An expanded view holds fewer elements than it shows.
                if isinstance(value, Tensor):
                    seen["numel"] = max(seen["numel"], value.untyped_storage().size() // value.element_size())
            return out

    with Watch():
        yield seen
