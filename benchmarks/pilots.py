"""How well a few seeds foretell the width of a study's intervals, on the committed records.

    python benchmarks/pilots.py              # seconds; writes benchmarks/pilots.md

Of every committed study with three seeds or more the first half (at least two) stand for a pilot: what
`study FILE --pilot` would have said of the width of the intervals to come, over the width that came. Nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from routing_lab.evidence.pilot import read_pilot
from routing_lab.evidence.registration import Cell, Plan, read_plan
from routing_lab.evidence.study import load_study
from routing_lab.evidence.verdict import study_arms
from routing_lab.runs.files import write_text
from routing_lab.runs.records import read_records

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "results"


@dataclass(frozen=True)
class Foretold:
    """Widths that the first seeds foretold, over those that all seeds gave.

    `pooled` is by the spread over all effects that the rules read, `effects` by that of each alone.
    """

    study: str
    pilot: int
    seeds: int
    pooled: float
    effects: Mapping[str, float]


def main() -> int:
    """Write the table."""
    rows = [
        f"| {found.study} | {found.pilot} of {found.seeds} | {found.pooled:.2f} | "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.effects.items())
        + " |"
        for found in foretold()
    ]
    print(write_text(Path(__file__).with_suffix(".md"), "\n".join([_HEAD, *rows, ""])))
    return 0


def foretold() -> Iterator[Foretold]:
    """Every committed study with three seeds or more."""
    for folder in sorted(RESULTS.glob("*.*/runs")):
        records = read_records(folder)
        plan = _plan(folder, records)
        if plan is None:
            continue
        seeds = sorted({cell.seed for cell in plan.cells})
        if len(seeds) < 3:
            continue
        first = seeds[: max(2, len(seeds) // 2)]
        part = read_pilot(replace(plan, cells=tuple(cell for cell in plan.cells if cell.seed in first)), records)
        whole = read_pilot(plan, records)
        came = {forecast.effect: forecast.half_width for forecast in whole.forecasts}
        ratios = {
            forecast.effect: forecast.half_width / came[forecast.effect]
            for forecast in part.forecasts
            if forecast.effect in plan.study.read_effects and forecast.half_width > 0 and came[forecast.effect] > 0
        }
        yield Foretold(folder.parent.name, len(first), len(seeds), part.spread / whole.spread, ratios)


def _plan(folder: Path, records: Sequence[Mapping[str, Any]]) -> Plan | None:
    """The registered plan, or for a study from before there were registrations the cells that have run."""
    for registration in sorted(folder.glob("studies/*.registration.jsonl")):
        return read_plan(registration)
    for file in sorted(folder.parent.glob("*.yaml")):
        study, scale = load_study(file), folder.parent.suffix.removeprefix(".")
        arms = study_arms(study, records, scale=scale)
        cells = [Cell(name, seed, run["run_id"]) for name, arm in arms.items() for seed, run in arm.finished.items()]
        return Plan(study, scale, tuple(cells))
    return None


_HEAD = """\
# What a pilot foretells

Written by `python benchmarks/pilots.py`; see there. Width of the intervals of the whole study, by the spread of its
first seeds, over the width that came: pooled over the effects that the rules read, as power and the warnings of
`--pilot` use it, and of each effect alone, as its table lists it. The spread of a single effect from three seeds is
itself known to a factor of 0.6 to 4.4 only, the 90 % interval that stands beside it in that table.

| study | seeds of the pilot | pooled | effects |
|---|---|---:|---|"""

if __name__ == "__main__":
    sys.exit(main())
