"""Images, their splits and their batches.

`build_data` and `VisionData` load torch on first use; `data.schema` and `data.inspect` never do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routing_lab.data.module import VisionData, build_data

__all__ = ["VisionData", "build_data"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from routing_lab.data import module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
