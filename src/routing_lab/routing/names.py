"""Names of a routed model's parameters in its state dict: the backbone's own, and those of the axes beside them.

backbone.X  <->  X
layers.<l>.<axis>.X  <->  <axis>.<l>.X
"""

from __future__ import annotations

from typing import Any

from torch import nn

AXIS_MODULES = ("router", "scaling", "capacity", "bypass", "corruption")


def is_of_axis(name: str) -> bool:
    """Whether a name in the state dict is that of an axis' parameter."""
    axis, _, rest = name.partition(".")
    return axis in AXIS_MODULES and rest.partition(".")[0].isdigit()


def to_public(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """backbone.X -> X and layers.<l>.<axis>.X -> <axis>.<l>.X, in place and in order."""
    own = [key for key in state if key.startswith(prefix)]
    renamed = {}
    for key in own:
        name = key[len(prefix) :]
        value = state.pop(key)
        if name.startswith("backbone."):
            name = name.removeprefix("backbone.")
        elif name.startswith("layers."):
            _, layer, axis, rest = name.split(".", 3)
            name = f"{axis}.{layer}.{rest}"
        renamed[prefix + name] = value
    state.update(renamed)


def from_public(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    """The inverse of `to_public`."""
    own = [key for key in state if key.startswith(prefix)]
    renamed = {}
    for key in own:
        name = key[len(prefix) :]
        internal = f"backbone.{name}"
        if is_of_axis(name):
            axis, layer, parameter = name.split(".", 2)
            internal = f"layers.{layer}.{axis}.{parameter}"
        renamed[prefix + internal] = state.pop(key)
    state.update(renamed)
