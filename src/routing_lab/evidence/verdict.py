"""From records to a verdict: the effects of a study, and the branch of its decision rule that they meet.

Nothing here is a judgement: effects are intervals over seeds, and the first rule whose conditions hold gives the
verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from routing_lab.evidence import formatting, statistics
from routing_lab.evidence.arms import Arm, group_arms
from routing_lab.evidence.formatting import Kind
from routing_lab.evidence.statistics import Bootstrap, Difference
from routing_lab.evidence.study import (
    SAVING,
    Contrast,
    Plan,
    Study,
    area_name,
    contrast_problems,
    parse_condition,
    speed_up_name,
)
from routing_lab.evidence.tables import Column, Comparison, Shown, Table, compare
from routing_lab.runs.records import (
    RecordError,
    compared_config,
    is_finished,
    read_history,
    read_predictions,
    scale_label,
)

EQUAL_DIFFERENCES = "equal under all seeds: no estimate of noise"
"""Why differences that agree to the last digit have no interval: a small test set rounds their noise away."""

_SHARE = formatting.Metric(SAVING, SAVING, "percent", True)


@dataclass(frozen=True)
class Effect:
    """One estimated effect. `neutral` is the value that means none (0 for a difference, 1 for a ratio).

    `refusal` says why there is no estimate; `is_controlled` is False for a comparison of whole configurations;
    `is_exact` marks a counted quantity that was equal under all seeds.
    """

    name: str
    kind: Kind
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    p: float = math.nan
    p_holm: float = math.nan
    p_sign_flip: float = math.nan
    detectable: float = math.nan
    neutral: float = 0.0
    sign: int = 0
    bootstrap: Bootstrap | None = None
    is_controlled: bool = True
    is_exact: bool = False
    note: str = ""
    refusal: str = ""

    @property
    def sign_text(self) -> str:
        """`positive`, `negative`, `undecided`; `none` where a counted quantity is equal; `unknown` without estimate."""
        if math.isnan(self.low):
            return "unknown"
        if self.is_exact and self.sign == 0:
            return "none"
        return {1: "positive", -1: "negative", 0: "undecided"}[self.sign]


@dataclass(frozen=True)
class Verdict:
    """The branch that was met, what it says, and the state of every condition that was looked at.

    `is_complete` is False while effects that the rule names have no estimate; the verdict is then `inconclusive`.
    """

    name: str
    says: str
    reasons: tuple[str, ...]
    is_complete: bool


@dataclass(frozen=True)
class StudyResult:
    """A study with its arms, effects and verdict."""

    study: Study
    scale: str
    arms: Mapping[str, Arm]
    comparisons: Mapping[str, Comparison]
    effects: Mapping[str, Effect]
    verdict: Verdict
    missing: tuple[str, ...]

    def predictions(self) -> list[tuple[str, str, str]]:
        """(effect, predicted sign, observed sign) of the hypothesis."""
        return [(name, sign, self.effects[name].sign_text) for name, sign in self.study.hypothesis.predicted.items()]


def evaluate(
    study: Study, records: Sequence[Mapping[str, Any]], *, scale: str | None = None, plan: Plan | None = None
) -> StudyResult:
    """Estimate every effect of a study from records, and compute its verdict.

    Args:
        study: the study; with a plan, the one that was planned.
        records: any records; those of other runs are passed over.
        scale: the scale whose records are meant; None where they are of one scale only.
        plan: names the run of every cell, so that runs shared with another study are found too. Without it, records
            whose `study` and `arm` name the study and the arm are taken.

    Raises:
        RecordError: records of one arm hold different configurations.
    """
    arms = study_arms(study, records, scale=scale, plan=plan)
    comparisons = {name: _checked_comparison(name, contrast, arms, study) for name, contrast in study.contrasts.items()}
    effects = {name: _contrast_effect(name, study, comparisons[name]) for name in study.contrasts}
    effects |= _factor_effects(study, arms)
    effects |= _convergence_effects(study, arms)
    effects |= _saving_effect(study, arms)
    effects = _decided(study, effects)
    labels = sorted({scale_label(record) for arm in arms.values() for record in arm.finished.values()})
    shown = ", ".join(labels) or scale or (plan.scale if plan else "unknown")
    missing = tuple(f"{name}: {text}" for name, arm in arms.items() if (text := arm.missing(study.seeds)))
    return StudyResult(study, shown, arms, comparisons, effects, decide(study, effects), missing)


def study_arms(
    study: Study, records: Sequence[Mapping[str, Any]], *, scale: str | None = None, plan: Plan | None = None
) -> dict[str, Arm]:
    """The study's arms in its order, with the records of their cells; an arm without any is there and empty. See
    `evaluate`.
    """
    cells: dict[str, dict[int, Mapping[str, Any]]] = {arm: {} for arm in study.arms}
    if plan is not None:
        by_run = {record["run_id"]: record for record in records}
        for cell in plan.cells:
            if cell.arm in cells and cell.run_id in by_run:
                cells[cell.arm][cell.seed] = by_run[cell.run_id]
    else:
        names = {study.name, *(study.key(known) for known in ([scale] if scale else study.scales))}
        for record in records:
            if record["study"] in names and record["arm"] in cells and record["seed"] in study.seeds:
                found = cells[record["arm"]]
                if record["seed"] not in found or is_finished(record):
                    found[record["seed"]] = record
    arms = {}
    for name, found in cells.items():
        kinds = group_arms(list(found.values()))
        if len(kinds) > 1:
            raise RecordError(
                f"study {study.name}: arm {name} has records of {len(kinds)} configurations "
                f"({'; '.join(kind.label for kind in kinds)}); name the scale, or the plan"
            )
        config = compared_config(next(iter(found.values()))) if found else {}
        arms[name] = Arm(name, config, found)
    return arms


def decide(study: Study, effects: Mapping[str, Effect]) -> Verdict:
    """The first rule whose conditions hold; `inconclusive` where none does or an effect of a rule is unknown."""
    named = list(dict.fromkeys(name for rule in study.decision.rules for name, _ in rule.conditions))
    unknown = [
        f"{name}: {effects[name].refusal or effects[name].note}" for name in named if math.isnan(effects[name].low)
    ]
    if unknown:
        return Verdict("inconclusive", "effects of the decision rule have no estimate", tuple(unknown), False)
    few = [f"{name}: {effects[name].n} seeds" for name in named if effects[name].n < statistics.MIN_SEEDS]
    if few:
        return Verdict(
            "inconclusive", f"{statistics.SINGLE_RUN}: fewer than three seeds decide nothing", tuple(few), False
        )
    for rule in study.decision.rules:
        all_of = [_holds(effects[name], text) for name, text in rule.when.items()]
        any_of = [_holds(effects[name], text) for name, text in rule.when_any.items()]
        if all(all_of) and (any(any_of) or not any_of):
            met = [text for (_, text), held in zip(rule.conditions, [*all_of, *any_of], strict=True) if held]
            met_names = [name for (name, _), held in zip(rule.conditions, [*all_of, *any_of], strict=True) if held]
            reasons = tuple(f"{describe(effects[n])}: {text}" for n, text in zip(met_names, met, strict=True))
            return Verdict(rule.verdict, rule.says, reasons, True)
    return Verdict(
        "inconclusive", "no rule of the decision is met", tuple(describe(effects[name]) for name in named), True
    )


def describe(effect: Effect) -> str:
    """An effect in one line: name, estimate, interval, number of seeds."""
    if effect.refusal:
        return f"{effect.name}: {effect.refusal}"
    is_signed = effect.neutral == 0
    estimate = formatting.number(effect.estimate, effect.kind, signed=is_signed)
    interval = formatting.interval(effect.low, effect.high, effect.kind, signed=is_signed)
    unit = " points" if effect.kind == "percent" else ""
    whole = "" if effect.is_controlled else " (whole configurations)"
    return f"{effect.name}{whole} {estimate}{unit} {interval}, n={effect.n}"


def effects_table(result: StudyResult) -> Table:
    """Every effect of a study, one a row, with what was predicted for it."""
    predicted = result.study.hypothesis.predicted
    rows = []
    for effect in result.effects.values():
        is_signed = effect.neutral == 0
        boot = (effect.bootstrap.low, effect.bootstrap.high) if effect.bootstrap else None
        rows.append(
            (
                effect.name,
                "yes" if effect.is_controlled else "no",
                effect.n,
                Shown(effect.estimate, effect.kind, is_signed),
                Shown((effect.low, effect.high), effect.kind, is_signed),
                Shown(boot, effect.kind, is_signed),
                effect.p,
                effect.p_sign_flip,
                effect.p_holm,
                Shown(effect.detectable, effect.kind),
                predicted.get(effect.name),
                effect.sign_text,
                effect.refusal or effect.note,
            )
        )
    decision = result.study.decision
    level = f"{100 * decision.level:g} % interval"
    columns = (
        Column("effect", "effect"),
        Column("controlled", "controlled"),
        Column("n", "n", "count"),
        Column("estimate", "estimate", "number"),
        Column("interval", level, "interval"),
        Column("bootstrap", "over seeds and examples", "interval", is_detail=True),
        Column("p", "p (t)", "p"),
        Column("p_sign_flip", "p (signs)", "p", is_detail=True),
        Column("p_holm", "p (Holm)", "p"),
        Column("detectable", "detectable", "number"),
        Column("predicted", "predicted"),
        Column("observed", "observed"),
        Column("note", "note"),
    )
    rule = f"sign where the interval excludes none and p (Holm) is at most {1 - decision.level:g}"
    notes = (
        f"accuracies in percentage points; paired by seed, t interval; observed: "
        f"{rule if decision.adjust == 'holm' else 'sign where the interval excludes none'}; "
        "controlled: the arms differ in the declared key alone",
    )
    caption = f"Effects in {result.study.metric}, study {result.study.name}, scale: {result.scale}"
    return Table("effects", caption, columns, tuple(rows), notes)


def verdict_text(result: StudyResult) -> str:
    """The verdict in plain lines: question, hypothesis, predicted and observed signs, the branch met and why."""
    study, verdict = result.study, result.verdict
    lines = [
        f"Study {study.name} (scale: {result.scale})",
        f"Question: {study.question}",
        f"Hypothesis: {study.hypothesis.statement}",
        *(f"  {name}: predicted {sign}, observed {observed}" for name, sign, observed in result.predictions()),
        f"Verdict: {verdict.name}: {verdict.says}",
        *(f"  {reason}" for reason in verdict.reasons),
        *(f"Missing: {text}" for text in result.missing),
        *(f"Note: {warning}" for warning in study.warnings),
    ]
    if result.scale != "paper":
        lines.append(
            f"Note: scale {result.scale}: a finding about these models and data, no reproduction of a paper's number"
        )
    return "\n".join(lines)


def verdict_record(result: StudyResult) -> dict[str, Any]:
    """The verdict with its effects as plain data, to be written as JSON beside the study."""
    effects = {
        name: {
            "estimate": effect.estimate,
            "low": effect.low,
            "high": effect.high,
            "n": effect.n,
            "p": effect.p,
            "p_holm": effect.p_holm,
            "observed": effect.sign_text,
            "predicted": result.study.hypothesis.predicted.get(name),
            "is_controlled": effect.is_controlled,
            "note": effect.refusal or effect.note,
        }
        for name, effect in result.effects.items()
    }
    return {
        "study": result.study.name,
        "scale": result.scale,
        "verdict": result.verdict.name,
        "says": result.verdict.says,
        "reasons": list(result.verdict.reasons),
        "is_complete": result.verdict.is_complete,
        "metric": result.study.metric,
        "effects": effects,
        "missing": list(result.missing),
    }


def _checked_comparison(name: str, contrast: Contrast, arms: Mapping[str, Arm], study: Study) -> Comparison:
    first, second = (arms[arm] for arm in contrast.arms)
    comparison = compare(first, second, study.metric, study.decision.level)
    if comparison.difference is None:
        return comparison
    problems = contrast_problems(name, contrast, {arm: arms[arm].config for arm in contrast.arms})
    problems += _pairing_problems(first, second, contrast.differ_in)
    if problems:
        return replace(comparison, difference=None, refusal="; ".join(problems))
    return comparison


def _pairing_problems(first: Arm, second: Arm, differ_in: Sequence[str]) -> list[str]:
    """Runs of one seed must have seen the same data and started from the same backbone weights."""
    axes = {key.split(".", 1)[0] for key in differ_in}
    problems = []
    for section, entry, excused, what in (
        ("data", "fingerprint", {"data"}, "data"),
        ("init", "hash", {"data", "init", "backbone"}, "initial weights"),
    ):
        pairs = (
            (a[section].get(entry), second.finished[seed][section].get(entry)) for seed, a in first.finished.items()
        )
        if not axes & excused and any(a != b for a, b in pairs):
            problems.append(f"not paired: {first.label} and {second.label} have other {what} under one seed")
    return problems


def _contrast_effect(name: str, study: Study, comparison: Comparison) -> Effect:
    contrast = study.contrasts[name]
    metric = formatting.metric(study.metric)
    if comparison.difference is None:
        return Effect(name, metric.kind, is_controlled=contrast.is_controlled, refusal=comparison.refusal)
    effect = replace(_from_difference(name, metric, comparison.difference), is_controlled=contrast.is_controlled)
    values = zip(*(side.values(study.metric).values() for side in (comparison.arm, comparison.reference)), strict=True)
    return replace(
        effect,
        p_sign_flip=_sign_flip([a - b for a, b in values]),
        bootstrap=_bootstrap(comparison) if study.metric == "test/acc" else None,
    )


def _from_difference(name: str, metric: formatting.Metric, d: Difference) -> Effect:
    if d.is_degenerate and metric.is_exact:
        sign = statistics.sign_of_interval(d.low, d.high)
        return Effect(
            name, metric.kind, d.mean, d.low, d.high, d.n, sign=sign, is_exact=True, note=d.stamp or "counted"
        )
    low, high = d.interval or (math.nan, math.nan)
    detectable = math.nan if d.is_degenerate else statistics.minimum_detectable_effect(d.sd, d.n, alpha=1 - d.level)
    note = d.stamp
    if d.is_degenerate:
        note = "identical results" if d.mean == 0 else EQUAL_DIFFERENCES
    elif not d.stamp and d.sign and abs(d.mean) < detectable:
        note = "below the detectable effect"
    return Effect(name, metric.kind, d.mean, low, high, d.n, d.p, detectable=detectable, sign=d.sign, note=note)


def _sign_flip(differences: Sequence[float]) -> float:
    if not 1 < len(differences) <= statistics.MAX_EXACT_SIGNS:
        return math.nan
    return statistics.sign_flip(differences).p_two_sided


def _bootstrap(comparison: Comparison) -> Bootstrap | None:
    """Over seeds and examples, where every run kept its predictions of the same examples."""
    sides = []
    for arm in (comparison.arm, comparison.reference):
        try:
            kept = [read_predictions(record) for record in arm.finished.values()]
        except RecordError:
            return None
        sides.append(kept)
    everything = [predictions for kept in sides for predictions in kept]
    index, target = everything[0]["index"], everything[0]["target"]
    if not all(np.array_equal(p["index"], index) and np.array_equal(p["target"], target) for p in everything):
        return None
    correct = [np.stack([p["prediction"] == target for p in kept]) for kept in sides]
    return statistics.paired_bootstrap(correct[0], correct[1], unit="both")


def _factor_effects(study: Study, arms: Mapping[str, Arm]) -> dict[str, Effect]:
    if not study.factors:
        return {}
    metric = formatting.metric(study.metric)
    (f, first), (g, second) = study.factors.items()
    crossed = study.factor_arms()
    wanted = [name for name in study.effect_names() if name.startswith((f"{f}: ", f"{g}: ", f"{f} x {g}"))]
    problems = [
        problem
        for name, factor in study.factors.items()
        for a, b in study.level_pairs(name)
        if arms[a].config and arms[b].config
        for problem in (
            *contrast_problems(f"factor {name}", Contrast(arms=[b, a], differ_in=[factor.differ_in]), _configs(arms)),
            *_pairing_problems_where_matched(arms[a], arms[b], factor.differ_in),
        )
    ]
    cells = {(levels[0], levels[1]): arms[arm].values(study.metric) for levels, arm in crossed.items()}
    empty = [arms[arm].label for arm in crossed.values() if not arms[arm].values(study.metric)]
    if empty:
        problems.append(f"no results of {', '.join(empty)}")
    if not problems:
        try:
            found = statistics.factorial(cells, (f, g), (list(first.levels), list(second.levels)), study.decision.level)
            return {name: _from_difference(name, metric, found[name]) for name in wanted}
        except statistics.UnmatchedSeedsError as error:
            problems.append(str(error))
    return {name: Effect(name, metric.kind, refusal="; ".join(dict.fromkeys(problems))) for name in wanted}


def _configs(arms: Mapping[str, Arm]) -> dict[str, Mapping[str, Any]]:
    return {name: arm.config for name, arm in arms.items()}


def _pairing_problems_where_matched(first: Arm, second: Arm, differ_in: str) -> list[str]:
    if first.finished.keys() != second.finished.keys():
        return []
    return _pairing_problems(first, second, [differ_in])


def _convergence_effects(study: Study, arms: Mapping[str, Arm]) -> dict[str, Effect]:
    if study.convergence is None:
        return {}
    metric = formatting.metric(study.convergence.metric)
    effects = {}
    for contrast_name, contrast in study.contrasts.items():
        curves = [_curves(arms[arm], metric.key) for arm in contrast.arms]
        is_matched = bool(curves[0]) and curves[0].keys() == curves[1].keys()
        refusal = (
            "" if is_matched else f"training curves of {' and '.join(contrast.arms)} do not exist under equal seeds"
        )
        for target in study.convergence.targets:
            name = speed_up_name(contrast_name, target)
            effect = Effect(name, "ratio", neutral=1.0, is_controlled=contrast.is_controlled, refusal=refusal)
            effects[name] = (
                effect if refusal else _speed_up_effect(effect, curves, target, metric, study.decision.level)
            )
        name = area_name(contrast_name)
        effects[name] = Effect(name, metric.kind, is_controlled=contrast.is_controlled, refusal=refusal)
        if not refusal:
            areas = [
                {seed: statistics.area_under_curve(*curve) for seed, curve in curve_of.items()} for curve_of in curves
            ]
            d = statistics.paired_by_seed(areas[0], areas[1], study.decision.level)
            effects[name] = replace(_from_difference(name, metric, d), is_controlled=contrast.is_controlled)
    return effects


def _curves(arm: Arm, metric: str) -> dict[int, tuple[list[float], list[float]]]:
    """Seed to (epochs counted from one, values), of the finished seeds that kept a history."""
    found = {}
    for seed, record in arm.finished.items():
        history = read_history(record)
        if history.get(metric):
            found[seed] = ([epoch + 1 for epoch in history["epoch"]], history[metric])
    return found


def _speed_up_effect(
    effect: Effect,
    curves: Sequence[Mapping[int, tuple[list[float], list[float]]]],
    target: float,
    metric: formatting.Metric,
    level: float,
) -> Effect:
    """Epochs of the contrast's second arm over those of its first: above 1, the first arm is faster."""
    seeds = sorted(curves[0])
    arm, reference = (
        [
            statistics.epochs_to_target(*curve_of[seed], target, higher_is_better=metric.higher_is_better)
            for seed in seeds
        ]
        for curve_of in curves
    )
    ratio = statistics.speed_up(reference, arm, level)
    if ratio.kind != "observed":
        counts = ", ".join(f"{ratio.kinds.count(kind)} {kind}" for kind in dict.fromkeys(ratio.kinds))
        bound = "" if math.isnan(ratio.mean) else f"; {ratio.kind.replace('_', ' ')} {ratio.mean:.2f}"
        return replace(effect, refusal=f"target not reached in every run ({counts.replace('_', ' ')}{bound})")
    logs = statistics.one_sample_t(np.log(ratio.ratios), level, scale=1.0)
    if logs.is_degenerate and logs.mean != 0:
        return replace(effect, estimate=ratio.mean, n=logs.n, note=EQUAL_DIFFERENCES)
    return replace(
        effect, estimate=ratio.mean, low=ratio.low, high=ratio.high, n=logs.n, p=logs.p, sign=logs.sign, note=logs.stamp
    )


def _saving_effect(study: Study, arms: Mapping[str, Arm]) -> dict[str, Effect]:
    """Share of the reference's cost that is saved where the curve meets the reference's accuracy, seed by seed."""
    settings = study.equal_accuracy
    if settings is None:
        return {}
    effect = Effect(SAVING, "percent", is_controlled=False)
    reference = arms[settings.reference].values(study.metric)
    reference_cost = arms[settings.reference].values(settings.cost)
    points = [(arms[arm].values(settings.cost), arms[arm].values(study.metric)) for arm in settings.curve]
    seeds = set(reference)
    if not seeds or any(cost.keys() != seeds or accuracy.keys() != seeds for cost, accuracy in points):
        return {SAVING: replace(effect, refusal="the curve and its reference do not have results under equal seeds")}
    found = {
        seed: statistics.cost_at_accuracy([c[seed] for c, _ in points], [a[seed] for _, a in points], reference[seed])
        for seed in sorted(seeds)
    }
    kinds = [point.kind for point in found.values()]
    if set(kinds) != {"reached"}:
        counts = ", ".join(f"{kinds.count(kind)} {kind.replace('_', ' ')}" for kind in dict.fromkeys(kinds))
        return {
            SAVING: replace(
                effect, refusal=f"the curve does not cross the reference's accuracy in every seed ({counts})"
            )
        }
    savings = [1 - point.cost / reference_cost[seed] for seed, point in found.items()]
    d = statistics.one_sample_t(savings, study.decision.level)
    return {SAVING: replace(_from_difference(SAVING, _SHARE, d), is_controlled=False)}


def _decided(study: Study, effects: Mapping[str, Effect]) -> dict[str, Effect]:
    """Holm over the contrasts and whatever else the rules name; with `adjust: holm` a sign needs the adjusted p as
    well.
    """
    named = {name for rule in study.decision.rules for name, _ in rule.conditions}
    family = [name for name in effects if name in study.contrasts or name in named]
    adjusted = dict(zip(family, statistics.adjust([effects[name].p for name in family]).tolist(), strict=True))
    alpha = 1 - study.decision.level
    decided = {}
    for name, effect in effects.items():
        p = adjusted.get(name, math.nan)
        is_kept = study.decision.adjust == "none" or name not in adjusted or effect.is_exact or p <= alpha
        decided[name] = replace(effect, p_holm=p, sign=effect.sign if is_kept else 0)
    return decided


def _holds(effect: Effect, condition: str) -> bool:
    return parse_condition(condition).holds(effect.low, effect.high, effect.sign)
