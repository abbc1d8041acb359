"""Records grouped into arms: runs that differ in nothing but their seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from routing_lab.axes.routers import ROUTERS
from routing_lab.evidence.formatting import runs_of, value_text
from routing_lab.runs.files import natural
from routing_lab.runs.findings import PREFIX, read_findings
from routing_lab.runs.metrics import at_length
from routing_lab.runs.records import arm_key, compared_config, flatten, is_finished

# Filled in from another key by the configuration, so they never say more than that key does.
_DERIVED = {"data.image_size": "backbone.image_size", "data.channels": "backbone.channels"}

# Options that act only where another one has one of these values.
_ACTS_WHERE = {
    "router.corrupt_phase": ("router.corrupt", lambda value: value != "none"),
    "router.corrupt_strength": ("router.corrupt", lambda value: value != "none"),
    "router.corrupt_token": ("router.corrupt", lambda value: value != "none"),
    "capacity.fraction_last": ("capacity.depth_schedule", lambda value: value != "constant"),
    "bypass.temperature": ("bypass.weights", lambda value: value == "softmax"),
    "bypass.temperature_unit": ("bypass.weights", lambda value: value == "softmax"),
}


@dataclass(frozen=True)
class Arm:
    """One configuration with one record per seed.

    `config` is flat (`capacity.fraction`) and holds what makes the arm; `cells` maps the seed to its record, finished
    or not.
    """

    label: str
    config: Mapping[str, Any]
    cells: dict[int, Mapping[str, Any]] = field(repr=False)

    @property
    def finished(self) -> dict[int, Mapping[str, Any]]:
        """Records of the seeds that finished, by ascending seed."""
        return {seed: self.cells[seed] for seed in sorted(self.cells) if is_finished(self.cells[seed])}

    def values(self, metric: str) -> dict[int, float]:
        """Seed to value, over the finished seeds that have one. Keys of a record's cost carry the prefix `cost/`."""
        found = {seed: metric_of(record, metric) for seed, record in self.finished.items()}
        return {seed: value for seed, value in found.items() if not math.isnan(value)}

    def lengths(self, metric: str) -> dict[int, str]:
        """Lengths of text at which finished runs have a metric, that of training first and the others ascending, and
        what its key ends in there; empty for runs that read no texts.
        """
        trained = {record["data"].get("context") for record in self.finished.values()}
        found = {length: "" for length in trained if isinstance(length, int)}
        keys = {key for record in self.finished.values() for key in record["metrics"]}
        others = {length for key, length in map(at_length, keys) if key == metric and length is not None}
        return found | {length: f"@{length}" for length in sorted(others)} if found else {}

    def mean(self, metric: str) -> float:
        """Mean over the finished seeds, NaN without any."""
        values = list(self.values(metric).values())
        return math.fsum(values) / len(values) if values else math.nan

    @property
    def kept_fraction(self) -> dict[int, float]:
        """Zero-based routed layer to the measured fraction of tokens it kept, averaged over the finished seeds."""
        layers: dict[int, list[float]] = {}
        for record in self.finished.values():
            for layer, kept in (record["routing"].get("kept_fraction") or {}).items():
                layers.setdefault(int(layer), []).append(float(kept))
        return {layer: math.fsum(kept) / len(kept) for layer, kept in sorted(layers.items())}

    @property
    def mean_kept_fraction(self) -> float:
        """Mean of `kept_fraction` over the routed layers; 1 for a dense arm, NaN where nothing was measured."""
        kept = self.kept_fraction.values()
        if not kept and self.is_dense:
            return 1.0
        return math.fsum(kept) / len(kept) if kept else math.nan

    @property
    def is_dense(self) -> bool:
        """Whether the arm routes nothing."""
        router = ROUTERS.get(str(self.config.get("router.name")))
        return router is not None and not router.facts.routes

    def missing(self, seeds: Sequence[int]) -> str:
        """What of `seeds` has no result, in words: `failed: seed 2; missing: seeds 4, 5`; empty when all have one."""
        states: dict[str, list[int]] = {}
        for seed in sorted(seeds):
            state = self.cells[seed]["status"] if seed in self.cells else "missing"
            if state != "finished":
                states.setdefault(state, []).append(seed)
        return "; ".join(f"{state}: {_seeds(found)}" for state, found in sorted(states.items()))


def metric_of(record: Mapping[str, Any], metric: str) -> float:
    """A measured number of a record: a metric by its own name, a cost as `cost/<name>`, a finding of a probe as
    `probe/<probe>/<finding>`; NaN where the record has none.
    """
    value: Any
    if metric.startswith("cost/"):
        value = record["cost"].get(metric.removeprefix("cost/"))
    elif metric.startswith(PREFIX):
        value = read_findings(record["folder"]).get(metric) if record.get("folder") else None
    else:
        value = record["metrics"].get(metric)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def group_arms(records: Sequence[Mapping[str, Any]]) -> list[Arm]:
    """Arms in order of appearance.

    Records belong to one arm when their compared configurations are equal. Their label is the record's `arm`, where
    it has one, or else the keys in which the arms differ. Of two records with one seed the finished one counts, then
    the first. Records without a configuration (unreadable ones) belong to no arm.
    """
    groups: dict[str, tuple[Mapping[str, Any], dict[int, Mapping[str, Any]]]] = {}
    for record in records:
        if record["status"] == "unreadable" or not isinstance(record["seed"], int):
            continue
        _, cells = groups.setdefault(arm_key(record), (record, {}))
        seed = record["seed"]
        if seed not in cells or (is_finished(record) and not is_finished(cells[seed])):
            cells[seed] = record
    configs = [compared_config(first) for first, _ in groups.values()]
    labels = _unique_labels([first.get("arm") for first, _ in groups.values()], arm_labels(configs))
    cells_of = [cells for _, cells in groups.values()]
    return [Arm(label, config, cells) for label, config, cells in zip(labels, configs, cells_of, strict=True)]


def without_followers(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records whose configurations lack the keys that have the seed's value under every seed, as by
    `data.split_seed=${seed}`: these belong to the seed, and make no arm of their own.
    """
    flat = [flatten(record["config"] or {}) for record in records]
    if len({record["seed"] for record in records}) < 2:
        return list(records)
    followers = [
        key
        for key in flat[0]
        if all(key in config and config[key] == record["seed"] for config, record in zip(flat, records, strict=True))
    ]
    return [{**record, "config": _without(record["config"] or {}, followers)} for record in records]


def _without(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    left = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    for section, _, name in (key.partition(".") for key in keys):
        if name and isinstance(left.get(section), dict):
            left[section].pop(name, None)
    return left


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Flat keys in which two configurations (flat or nested) differ, in natural order; a key that only one has
    counts.
    """
    first, second = flatten(a), flatten(b)
    absent = object()
    keys = {key for key in first.keys() | second.keys() if first.get(key, absent) != second.get(key, absent)}
    keys -= {derived for derived, source in _DERIVED.items() if derived in keys and source in keys}
    return sorted(keys, key=natural)


def differing_things(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What two configurations (flat or nested) differ in, counted as one would change it.

    A leaf key is one thing. Another member of an axis is one thing, with the options that only one of the two members
    has; options that both have, and that differ, are further ones. An option that does not act in either arm, or acts
    only because of another difference, is none.
    """
    first, second = flatten(a), flatten(b)
    keys = [key for key in differing_keys(a, b) if _acts(key, first, second)]
    swapped = {key.split(".")[0] for key in keys if key.count(".") == 1 and key.endswith((".name", ".kind"))}
    things = dict.fromkeys(sorted(swapped, key=natural))
    for key in keys:
        axis = key.split(".", 1)[0]
        if axis not in swapped or (key in first and key in second and not key.endswith((".name", ".kind"))):
            things[key] = None
    return list(things)


def arm_labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each flat configuration the keys that tell it from the others: `router=amod capacity.fraction=0.5`.

    Where arms differ in the member of an axis, the axis is named once; the member's options appear where they differ
    among arms with that same member.
    """
    if len(configs) < 2:
        return [_own_label(config) for config in configs]
    described = [_as_described(config) for config in configs]
    if list(configs) != described:
        labels = arm_labels(described)
        if len(set(labels)) == len(labels):
            return labels
    keys = list(dict.fromkeys(key for config in configs for key in config))
    varying = [key for key in keys if _varies(configs, key)]
    names = [key for key in varying if key.endswith(".name") and key.count(".") == 1]
    kinds = {key: key.removesuffix(".name") for key in names}
    shown: list[list[str]] = [[] for _ in configs]
    for key in varying:
        if key in kinds:
            for parts, config in zip(shown, configs, strict=True):
                parts.append(f"{kinds[key]}={value_text(config.get(key))}")
            continue
        if key in _DERIVED and all(config.get(key) == config.get(_DERIVED[key]) for config in configs):
            continue
        member = f"{key.split('.', 1)[0]}.name"
        by_member: dict[Any, list[int]] = {}
        for i, config in enumerate(configs):
            by_member.setdefault(config.get(member), []).append(i)
        for indices in by_member.values():
            if _varies([configs[i] for i in indices], key):
                for i in indices:
                    if key in configs[i]:
                        shown[i].append(f"{key}={value_text(configs[i][key])}")
    return [" ".join(parts) or _own_label(config) for parts, config in zip(shown, configs, strict=True)]


def _acts(key: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    if key not in _ACTS_WHERE:
        return True
    other, acts = _ACTS_WHERE[key]
    return all(acts(config.get(other)) for config in (first, second))


def _as_described(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration without what was filled in when it became a baseline of equal cost (`isoflop.by`)."""
    size = "isoflop.solution.full."
    full = {key.replace(size, "backbone."): value for key, value in config.items() if key.startswith(size)}
    stated = {key: value for key, value in config.items() if not key.startswith("isoflop.solution")}
    return stated | full | ({"isoflop.target_macs": None} if full else {})


def _own_label(config: Mapping[str, Any]) -> str:
    parts = [str(config[key]) for key in ("router.name", "scaling.name") if key in config]
    return " ".join(parts) or "all runs"


def _unique_labels(names: Sequence[str | None], labels: Sequence[str]) -> list[str]:
    given = [name or label for name, label in zip(names, labels, strict=True)]
    return [text if given.count(text) == 1 else f"{text} ({label})" for text, label in zip(given, labels, strict=True)]


def _varies(configs: Sequence[Mapping[str, Any]], key: str) -> bool:
    absent = object()
    first = configs[0].get(key, absent)
    return any(config.get(key, absent) != first for config in configs)


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {runs_of(seeds)}"
