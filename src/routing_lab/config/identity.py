"""What a run is called and when two runs are the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routing_lab.config.schema import Config
from routing_lab.keys import LATER, VOLATILE

MOST_BYTES = 180
"""Of a run's name in the name of its folder, to which locks and replaced runs add their own."""


def identity(resolved: Mapping[str, Any]) -> str:
    """Ten hexadecimal digits: SHA-256 of the canonical JSON of a resolved configuration without its volatile keys."""
    return hashlib.sha256(_canonical(without_volatile(resolved)).encode()).hexdigest()[:10]


def without_volatile(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved configuration that the identity of the run depends on."""
    kept = {key: value for key, value in resolved.items() if key not in VOLATILE}
    for path in (key for key in VOLATILE if "." in key):
        kept = _without(kept, path)
    for path, neutral in LATER.items():
        kept = _without(kept, path, neutral)
    return kept


def run_name(config: Config) -> str:
    """A name for people: `amod-multiply-topk0.5-vit_micro-digits-s0`, or `config.name` with the seed."""
    seed = f"s{config.seed}"
    if config.name is not None:
        return f"{config.name}-{seed}"
    place = [config.backbone.name, config.data.name, seed]
    if config.isoflop.by != "none":
        size = getattr(config.backbone, config.isoflop.by)
        return "-".join([f"isoflop_{config.isoflop.by}{size}", *place])
    if not config.router.traits.routes:
        return "-".join([config.router.name, *place])
    return "-".join([config.router.name, config.scaling.name, config.capacity.name + config.capacity.budget, *place])


def run_folder(config: Config, resolved: Mapping[str, Any]) -> Path:
    """Where a run is kept: `<paths.runs>/<name>-<hash>`."""
    # Names that are put together may exceed what a file system takes; the hash still tells them apart.
    name = run_name(config).encode()[:MOST_BYTES].decode(errors="ignore")
    return Path(config.paths.runs) / f"{name}-{identity(resolved)}"


def _without(resolved: dict[str, Any], path: str, value: Any = ...) -> dict[str, Any]:
    """`resolved` without the key at a dotted path; with `value`, only where it has that value."""
    section, _, key = path.partition(".")
    if not key:
        left_out = section in resolved and (value is ... or resolved[section] == value)
        return {name: found for name, found in resolved.items() if not (left_out and name == section)}
    if not isinstance(resolved.get(section), Mapping) or key not in resolved[section]:
        return resolved
    if value is not ... and resolved[section][key] != value:
        return resolved
    return {**resolved, section: {name: found for name, found in resolved[section].items() if name != key}}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
