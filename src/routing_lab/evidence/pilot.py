"""What a few seeds set apart say before a study is registered: how far its differences spread, what the planned seeds
can find at that spread, and what they cost.

The runs of a pilot have seeds from `study.PILOT_SEEDS` on, stand in a folder of their own and never count in a verdict.
What a contrast of interest came out as is not told: a study whose design was chosen by its results tests nothing. The
positive controls are, which must come out if the study can see anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import special

from routing_lab.evidence import formatting, statistics
from routing_lab.evidence.arms import Arm
from routing_lab.evidence.effects import Effect, Levels, estimate_effects
from routing_lab.evidence.power import power_lines, seeds_for
from routing_lab.evidence.registration import Plan
from routing_lab.evidence.study import PILOT_SEEDS, Study
from routing_lab.evidence.tables import Column, Shown, Table, render_plain
from routing_lab.evidence.verdict import judged_controls, planned_looks, role, study_arms

POWER = 0.9
"""What seeds and detectable effects are given for."""

MOST_SEEDS = 1000
"""Seeds that are counted up to."""

_LEVEL = 0.9


@dataclass(frozen=True)
class Forecast:
    """What the planned seeds are expected to show of one effect, by the pilot's spread.

    `spread` is the standard deviation under one seed with its 90 % interval (of a ratio: that of its logarithm);
    `half_width` half of the two-sided interval to come, `detectable` the smallest effect that gets a sign with
    probability 0.9, `sign_seeds` and `equal_seeds` the seeds with which twice the margin gets its sign, and no effect
    is shown to be equivalent, with that probability; `seconds` the training of its arms under one seed. NaN and 0
    where the pilot cannot say, with the reason under `note`.
    """

    effect: str
    role: str
    kind: formatting.Kind
    n: int
    spread: float
    interval: tuple[float, float]
    half_width: float
    detectable: float
    sign_seeds: int
    equal_seeds: int
    seconds: float
    note: str

    @property
    def seconds_for_power(self) -> float:
        """Training time until both hold, NaN where the seeds are not known."""
        return max(self.sign_seeds, self.equal_seeds) * self.seconds if self.sign_seeds else math.nan


@dataclass(frozen=True)
class Pilot:
    """A pilot that has run.

    `spread` is that of a difference of two arms under one seed, pooled over the effects that the rules read; NaN
    where no effect has an estimate. `seconds` is the mean training time of a cell.
    """

    study: Study
    scale: str
    seeds: tuple[int, ...]
    forecasts: tuple[Forecast, ...]
    spread: float
    seconds: float
    controls: tuple[str, ...]
    missing: tuple[str, ...]


def pilot_folder(runs: Path) -> Path:
    """Where the runs of pilots stand."""
    return runs / "pilots"


def pilot_key(study: Study, scale: str) -> str:
    """What the records of a pilot carry as `study`."""
    return f"{study.key(scale)}.pilot"


def is_pilot(record: Mapping[str, Any]) -> bool:
    """Whether a record is a pilot's."""
    return str(record["study"]).endswith(".pilot") and isinstance(record["seed"], int) and record["seed"] >= PILOT_SEEDS


def read_pilot(plan: Plan, records: Sequence[Mapping[str, Any]]) -> Pilot:
    """Forecast every effect of a study from its pilot.

    Args:
        plan: the study, its scale, and the cells of the pilot.
        records: any records; those of other runs are passed over.
    """
    study, scale = plan.study, plan.scale
    seeds = tuple(sorted({cell.seed for cell in plan.cells}))
    arms = study_arms(study, records, plan=plan)
    levels, planned = planned_looks(study, scale)[-1].levels, len(study.planned_seeds(scale))
    effects = estimate_effects(study, arms, levels)
    forecasts = tuple(_forecast(study, effect, arms, levels, planned) for effect in effects.values())
    seconds = [value for arm in arms.values() for value in arm.values("cost/train_seconds").values()]
    return Pilot(
        study,
        scale,
        seeds,
        forecasts,
        _pooled(study, effects),
        math.fsum(seconds) / len(seconds) if seconds else math.nan,
        tuple(control.text for control in judged_controls(study, effects) if control.is_positive),
        tuple(f"{name}: {text}" for name, arm in arms.items() if (text := arm.missing(seeds))),
    )


def forecast_table(pilot: Pilot) -> Table:
    """One row per effect."""
    rows = [
        (
            f.effect,
            f.role,
            f.n,
            Shown(f.spread, f.kind),
            Shown(f.interval, f.kind),
            Shown(f.half_width, f.kind),
            Shown(f.detectable, f.kind),
            _seeds(f.sign_seeds),
            _seeds(f.equal_seeds),
            f.seconds,
            formatting.duration(f.seconds_for_power),
            f.note,
        )
        for f in pilot.forecasts
    ]
    planned = len(pilot.study.planned_seeds(pilot.scale))
    columns = (
        Column("effect", "effect"),
        Column("role", "read by"),
        Column("n", "seeds", "count"),
        Column("spread", "spread", "number"),
        Column("spread_interval", "90 % interval", "interval"),
        Column("half_width", f"half width, {planned} seeds", "number"),
        Column("detectable", "detectable", "number"),
        Column("sign_seeds", "seeds: sign"),
        Column("equal_seeds", "seeds: equivalence"),
        Column("seconds", "s a seed", "seconds"),
        Column("time", "time to both"),
        Column("note", "note"),
    )
    notes = (
        f"spread under one seed, accuracies in points; half width of the interval that {planned} seeds are expected to "
        "give; detectable: gets its sign with probability 0.9; seeds with which twice the margin gets its sign, and no "
        "effect is shown to be equivalent, with probability 0.9; time: training of the effect's arms",
    )
    seeds = formatting.runs_of(list(pilot.seeds))
    caption = f"Pilot of {pilot.study.name}, scale: {pilot.scale}: seeds {seeds}, set apart and never counted"
    return Table("pilot", caption, columns, tuple(rows), notes)


def pilot_lines(pilot: Pilot) -> list[str]:
    """The pilot in plain lines: spread, smallest effects, seeds, times, positive controls, power of every rule."""
    study, scale = pilot.study, pilot.scale
    lines = [render_plain(forecast_table(pilot)), "", *pilot.controls]
    lines += [f"Missing: {text}" for text in pilot.missing]
    if not math.isnan(pilot.seconds):
        cells = len(study.arms) * len(study.planned_seeds(scale))
        lines.append(
            f"Time: {pilot.seconds:.1f} s of training a cell, {formatting.duration(cells * pilot.seconds)} for all "
            f"{cells} planned cells one after the other"
        )
    if math.isnan(pilot.spread):
        return [*lines, "Spread: not known yet, no effect of the rules has an estimate from two seeds"]
    if study.margin is None:
        return [*lines, f"Spread: {pilot.spread:.3g} under one seed, pooled over the effects that the rules read"]
    where = f"{len(pilot.seeds)} seeds of a pilot, pooled over the effects that the rules read"
    return [*lines, *power_lines(study, scale, pilot.spread, where)]


def _forecast(study: Study, effect: Effect, arms: Mapping[str, Arm], levels: Levels, planned: int) -> Forecast:
    seconds = sum(arms[arm].mean("cost/train_seconds") for arm in study.arms_of(effect.name))
    known = effect.n > 1 and effect.sd > 0 and not effect.is_exact and not effect.num_examples
    is_linear = effect.name in study.weights
    nan = math.nan
    interval, half, detectable, seeds = (nan, nan), nan, nan, (0, 0)
    if known:
        df = effect.n - 1
        tail = (1 - _LEVEL) / 2
        interval = (
            effect.sd * math.sqrt(df / special.chdtri(df, tail)),
            effect.sd * math.sqrt(df / special.chdtri(df, 1 - tail)),
        )
    if known and is_linear:
        half = statistics.t_quantile(planned - 1, 1 - levels.two_sided) * effect.sd / math.sqrt(planned)
        alpha = levels.two_sided
        detectable = statistics.minimum_detectable_effect(effect.sd, planned, alpha=alpha, power=POWER)
        if study.margin is not None:
            alpha = study.decision.alpha / study.family.size
            seeds = seeds_for(effect.sd, study.margin.size, alpha, POWER, MOST_SEEDS)
    note = effect.refusal or effect.insensitive or ("counted" if effect.is_exact else "")
    note = note or ("no prediction depends on the seed: one seed says all" if effect.num_examples else "")
    return Forecast(
        effect.name,
        role(study, effect.name),
        effect.kind if is_linear else "number",
        effect.n,
        effect.sd if known else nan,
        interval,
        half,
        detectable,
        *seeds,
        seconds,
        note,
    )


def _pooled(study: Study, effects: Mapping[str, Effect]) -> float:
    """Root mean square of the spreads of what the rules read, each brought to that of a difference of two arms."""
    squares = [
        2 * effects[name].sd ** 2 / sum(weight**2 for weight in study.weights[name].values())
        for name in study.read_effects
        if name in study.weights and effects[name].n > 1 and effects[name].sd > 0 and not effects[name].num_examples
    ]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else math.nan


def _seeds(count: int) -> str:
    return f"over {MOST_SEEDS}" if count >= MOST_SEEDS else str(count or formatting.MISSING)
