"""The routed layer and its axes: tensors in, tensors out.

Nothing is imported until it is named, so that `routing_lab.routing.members`, which the configuration checks read,
never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS: dict[str, str] = {}
"""Public name -> module that defines it."""

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
