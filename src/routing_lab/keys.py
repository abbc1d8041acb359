"""Keys of a configuration that stand apart: those that do not make a run another one, and those that came later.

Read by the identity of a run and by whatever groups records into arms; nothing is imported but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

VOLATILE = (
    *("method", "study", "arm", "name", "rerun", "paths", "tracking", "wandb", "runtime", "hydra"),
    *("data.root", "data.download", "data.memory", "backbone.download"),
)
"""Keys that say where, how fast or why a run is executed, not what is run."""

LATER: Mapping[str, Any] = MappingProxyType(
    {
        "tracking": "wandb",
        "placement.active": "both",
        "bypass.threshold": None,
        "capacity.force": 0.0,
        "data.duplicates": "refuse",
        "data.form": "spelling",
        "capacity.protect_count": "inside",
        "capacity.reserve": 0,
        "capacity.evaluate": "budget",
        "router.auxiliary": False,
        "router.norm": "none",
        "router.init_bias": None,
        "placement.ends": "dense",
        "init.entry": None,
        "init.path": None,
        "init.readout": False,
        "backbone.rope_theta": 10000.0,
        "backbone.norm_eps": 1e-6,
        "backbone.tie_embeddings": False,
        "task.eval_lengths": [],
        "task.eval_rope": "plain",
        "train.dynamics": 0,
        "match": {"key": None, "to": None, "macs": None, "share": 1.0, "tolerance": 0.01, "solution": None},
        "task": {"name": "classification", "_target_": "routing_lab.tasks.classification.Classification"},
    }
)
"""Key, or section, that came after the first release -> the value that does what every run did before it.

Such a key counts only where it has another value, so that the runs recorded before it are found again; a configuration
that was written before it has that value.
"""


def is_below(key: str, groups: Iterable[str]) -> bool:
    """Whether a dotted key is one of these, or lies in a group of that name."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)
