"""From a probe and a model to files: examples chosen by a seed, batches that resume, findings beside the run.

A probe writes into `<folder>/probes/` and never into the record:

    <name>.json   what was asked, and the findings with their intervals
    <name>.npz    the arrays behind them, a row an example
    <name>.png    a figure of them, where the probe makes one
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from routing_lab.probes.base import Examples, Finding, Probe
from routing_lab.routing.model import RoutedModel
from routing_lab.runs.files import replacing, write_json
from routing_lab.runs.findings import FOLDER, SCHEMA, read_probe
from routing_lab.streams import stream_seed

Progress = Callable[[int, int], None]
"""Called with the batches that are done and all there are."""


@dataclass(frozen=True)
class Subject:
    """What is probed.

    Args:
        name: of the run or model.
        identity: of the run, or of the model's configuration and weights; findings of another one are not reused.
        folder: where findings are kept, in its subfolder `probes`.
        model: in any mode; it is measured in evaluation mode and left in the mode it came in.
        examples: (indices int64 [B]) -> the examples with these numbers.
        split: numbers of all examples that may be measured.
    """

    name: str
    identity: str
    folder: Path
    model: RoutedModel
    examples: Callable[[Tensor], Examples]
    split: Tensor


@dataclass(frozen=True)
class Sample:
    """Which examples: `count` of the split, drawn by `seed`, measured `batch_size` at a time; count 0: all."""

    count: int = 256
    seed: int = 0
    batch_size: int = 64

    def __post_init__(self) -> None:
        for key, least in (("count", 0), ("seed", 0), ("batch_size", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} = {getattr(self, key)}: must be at least {least}")

    def indices(self, split: Tensor) -> Tensor:
        """Numbers of the chosen examples, ascending."""
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "data"))
        count = self.count or len(split)
        return split[torch.randperm(len(split), generator=generator)[:count]].sort().values


def run_probe(
    name: str,
    probe: Probe,
    options: Mapping[str, Any],
    subject: Subject,
    sample: Sample,
    *,
    rerun: bool = False,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], bool]:
    """Measure, summarise and write; batches that an interrupted call measured are not measured again.

    Args:
        name: of the probe, and of its files.
        options: of the probe, as they are written down.
        rerun: measure anew what has been measured.

    Returns what `<name>.json` holds, and whether anything was measured now.
    """
    folder = subject.folder / FOLDER
    asked = {"probe": name, "options": dict(options), "sample": asdict(sample), "subject": subject.identity}
    identity = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:10]
    target, parts = folder / f"{name}.json", folder / f".{name}-{identity}"
    if rerun:
        shutil.rmtree(parts, ignore_errors=True)
    elif (found := read_probe(target)) is not None and found.get("identity") == identity:
        return found, False
    parts.mkdir(parents=True, exist_ok=True)
    batches = sample.indices(subject.split).split(sample.batch_size)
    for number, (indices, part) in enumerate(_missing(batches, parts), start=1):
        _write_arrays(part, _measured(probe, subject, indices))
        if progress is not None:
            progress(number, len(batches))
    arrays = _joined([_part(parts, number) for number in range(len(batches))])
    findings = probe.summarise(arrays)
    content = {
        "schema": SCHEMA,
        "identity": identity,
        "name": subject.name,
        **asked,
        "examples": sum(len(batch) for batch in batches),
        "findings": [asdict(finding) | {"key": finding.key} for finding in findings],
    }
    _write_arrays(folder / f"{name}.npz", {"index": torch.cat(batches).numpy(), **arrays})
    figure = probe.figure(arrays)
    if figure is not None:
        with replacing(folder / f"{name}.png") as temporary:
            figure.savefig(temporary, format="png", dpi=120)
    write_json(target, content)
    shutil.rmtree(parts)
    return content, True


def read_arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The rows that a probe measured of a run, with the numbers of the examples as `index`."""
    return _loaded(folder / FOLDER / f"{name}.npz")


def measure(
    model: RoutedModel,
    probe: Probe,
    inputs: Tensor,
    targets: Tensor,
    *,
    masks: Tensor | None = None,
    batch_size: int = 64,
) -> list[Finding]:
    """A probe's findings on a model and examples at hand, for instance a routed checkpoint of one's own; no file is
    written.

    Args:
        model: in any mode; it is measured in evaluation mode and left in the mode it came in.
        inputs: [B, ...], what the model takes.
        targets: [B] classes.
        masks: [B, P] bool, the patches that decide the class; None: not known.
    """

    def examples(index: Tensor) -> Examples:
        return Examples(inputs[index], targets[index], index, None if masks is None else masks[index])

    every = torch.arange(len(inputs), device=inputs.device)
    subject = Subject("", "", Path(), model, examples, every)
    parts = [_measured(probe, subject, index) for index in every.split(batch_size)]
    return probe.summarise({key: np.concatenate([part[key] for part in parts]) for key in parts[0]})


def _missing(batches: tuple[Tensor, ...], parts: Path) -> Iterator[tuple[Tensor, Path]]:
    for number, indices in enumerate(batches):
        part = _part(parts, number)
        if not part.is_file():
            yield indices, part


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:05d}.npz"


def _measured(probe: Probe, subject: Subject, indices: Tensor) -> dict[str, np.ndarray]:
    model = subject.model
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return probe.measure(model, subject.examples(indices))
    finally:
        model.train(was_training)


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with replacing(path) as temporary, open(temporary, "wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


def _joined(parts: list[Path]) -> dict[str, np.ndarray]:
    loaded = [_loaded(part) for part in parts]
    return {key: np.concatenate([arrays[key] for arrays in loaded]) for key in loaded[0]}


def _loaded(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
