"""From the settings of a command to a probe, and from run folders to what is probed or shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from routing_lab.axes.base import UnknownTarget, locate
from routing_lab.config import ConfigError
from routing_lab.config.problems import Problem
from routing_lab.evidence.arms import group_arms
from routing_lab.probes.base import Examples, Finding, Probe
from routing_lab.probes.pictures import picture, write_page
from routing_lab.probes.runner import Progress, Sample, Subject, read_arrays, run_probe
from routing_lab.runs.records import read_record
from routing_lab.training.opening import OpenedRun, open_run

Split = Literal["train", "val", "test"]


@dataclass(frozen=True)
class Asked:
    """A probe with its options, and the examples it is to be made on."""

    name: str
    probe: Probe
    options: Mapping[str, Any]
    sample: Sample
    split: Split
    rerun: bool


def build(settings: Mapping[str, Any]) -> Asked:
    """The probe that checked settings ask for.

    Raises:
        ConfigError: a class that is not there, or options and sample sizes that are refused; all problems at once.
    """
    member = dict(settings["probe"])
    name, path = member.pop("name"), member.pop("_target_")
    chosen = dict(settings["sample"])
    split = chosen.pop("split")
    problems: list[Problem] = []
    if split not in ("train", "val", "test"):
        problems.append(Problem.of("sample.split", split, "expected train, val or test"))
    try:
        kind = locate(path)
    except UnknownTarget as error:
        raise ConfigError([*problems, Problem.of("probe._target_", path, str(error))]) from None
    built: dict[str, Any] = {}
    for section, target, options in (("probe", kind, member), ("sample", Sample, chosen)):
        try:
            built[section] = TypeAdapter(target).validate_python(options)
        except ValidationError as error:
            problems += [_problem(section, detail) for detail in error.errors(include_url=False)]
    if problems:
        raise ConfigError(problems)
    return Asked(name, built["probe"], member, built["sample"], split, bool(settings["rerun"]))


def run_on(asked: Asked, folder: Path, progress: Progress | None = None) -> tuple[dict[str, Any], bool]:
    """`run_probe` on the model and the data of a finished run; raises ValueError where the run cannot be opened."""
    run = open_run(folder)
    subject = Subject(
        run.record["name"],
        run.record["run_id"],
        folder,
        run.model,
        partial(_examples, run),
        run.data.split[asked.split],
    )
    options = {**asked.options, "split": asked.split}
    return run_probe(asked.name, asked.probe, options, subject, asked.sample, rerun=asked.rerun, progress=progress)


def between(asked: Asked, folders: Sequence[Path]) -> str:
    """What measured runs have in common, as aligned plain lines; empty where the probe compares none of them.

    Runs are compared that were measured on the same examples: of one arm under its seeds, and of two arms under the
    same seed; the mean over such pairs stands in the table.
    """
    found: dict[tuple[str, str], list[Finding]] = {}
    arms = group_arms([read_record(folder) for folder in folders])
    cells = [(arm.label, seed, record["folder"]) for arm in arms for seed, record in arm.finished.items()]
    for (first, seed, one), (second, other_seed, other) in combinations(cells, 2):
        if first == second or seed == other_seed:
            rows, other_rows = (read_arrays(Path(folder), asked.name) for folder in (one, other))
            if np.array_equal(rows["index"], other_rows["index"]):
                common = asked.probe.compare(rows, other_rows)
                found.setdefault((first, second), []).extend([common] if common else [])
    lines = [("arm", "and", "pairs", "finding", "value", "chance")]
    for (first, second), pairs in found.items():
        if pairs:
            value, chance = (fmean(getattr(pair, name) for pair in pairs) for name in ("value", "chance"))
            other = "its other seeds" if first == second else second
            lines.append((first, other, str(len(pairs)), pairs[0].name, f"{value:.4f}", f"{chance:.4f}"))
    return _aligned(lines) if len(lines) > 1 else ""


def _examples(run: OpenedRun, index: Tensor) -> Examples:
    """The examples with these numbers, whatever they are: a batch begins with inputs, targets and numbers."""
    batch = run.data.examples(index)
    inputs, targets, numbers = batch[:3]
    masks = run.data.informative(index, run.model.adapter.grid(inputs))
    return Examples(inputs, targets, numbers, masks, getattr(batch, "segments", None))


def _problem(section: str, detail: Any) -> Problem:
    message = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:  # said by the class itself, which names the key and the value
        return Problem(section, None, message)
    return Problem.of(".".join([section, *map(str, detail["loc"])]), detail["input"], message)


def look(folders: Sequence[Path], out: Path, count: int = 16, seed: int = 0) -> Path:
    """A page of what finished runs did with the same test images or texts, see `pictures.write_page`.

    Raises:
        ValueError: a run that cannot be opened, or runs whose data differ.
    """
    runs = [open_run(folder) for folder in folders]
    prints = {run.data.fingerprint for run in runs}
    if len(prints) > 1:
        raise ValueError("the runs have different data: one page shows the same images for all of them")
    data = runs[0].data
    some = _examples(runs[0], Sample(count, seed).indices(data.split["test"]))
    shown = [picture(run.model, some, run.record["name"]) for run in runs]
    title = "What every layer kept: " + ", ".join(item.label for item in shown)
    numbers = some.index.tolist()
    if some.targets.dim() == 2:
        texts = [[data.encoding.decode([token]) for token in row] for row in some.inputs.tolist()]
        return write_page(out, texts, shown, title=title, captions=[f"test text {number}" for number in numbers])
    names = [str(name) for name in data.class_names]
    captions = [f"test image {i}, class {names[c]}" for i, c in zip(numbers, some.targets.tolist(), strict=True)]
    return write_page(out, some.inputs, shown, title=title, captions=captions, class_names=names)


def table(content: Mapping[str, Any]) -> str:
    """The findings as aligned plain lines: name, value, 95 % interval over examples, chance."""
    rows = [("finding", "value", "95 % interval", "chance")]
    for item in content["findings"]:
        interval = "" if math.isnan(item["low"]) else f"[{item['low']:.4f}, {item['high']:.4f}]"
        chance = "" if item["chance"] is None else f"{item['chance']:.4f}"
        rows.append((item["key"], f"{item['value']:.4f}", interval, chance))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
