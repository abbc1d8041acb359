"""The routed layer and its axes: tensors in, tensors out.

Nothing is imported until it is named, so that `routing_lab.routing.members`, which the configuration checks read,
never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routing_lab.routing.base import Bypass, Capacity, Gates, LayerSpec, Router, RouterInput, RunState, Scaling
    from routing_lab.routing.model import RoutedModel
    from routing_lab.routing.tokens import Selection, Tokens, unmerge
    from routing_lab.routing.trace import LayerTrace, Trace

__all__ = [
    "Bypass",
    "Capacity",
    "Gates",
    "LayerSpec",
    "LayerTrace",
    "RoutedModel",
    "Router",
    "RouterInput",
    "RunState",
    "Scaling",
    "Selection",
    "Tokens",
    "Trace",
    "unmerge",
]

_MODULES = {
    "LayerTrace": "trace",
    "RoutedModel": "model",
    "Selection": "tokens",
    "Tokens": "tokens",
    "Trace": "trace",
    "unmerge": "tokens",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'base')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
