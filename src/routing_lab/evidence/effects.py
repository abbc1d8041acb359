"""The effects of a study, estimated from the records of its arms, seed by seed.

Every effect is one number under each seed: a weighted sum of the arms' results, a ratio of epochs, a share of cost.
Its mean has a two-sided t interval, which gives it a sign, and the narrower one of two one-sided tests, which shows it
to lie within the margin. An effect whose results cannot vary is insensitive: all at the ceiling or the floor, all
equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from routing_lab.evidence import formatting, provenance, statistics
from routing_lab.evidence.arms import Arm
from routing_lab.evidence.formatting import Kind
from routing_lab.evidence.rules import Evidence
from routing_lab.evidence.statistics import Bootstrap
from routing_lab.evidence.study import SAVING, Contrast, Study, area_name, compound, contrast_problems, speed_up_name
from routing_lab.runs.metrics import OF_PREDICTIONS
from routing_lab.runs.records import RecordError, read_history, read_predictions

EQUAL_DIFFERENCES = "equal under all seeds: no estimate of noise"
"""Why differences that agree to the last digit have no interval: a small test set rounds their noise away."""

IDENTICAL = "identical results"

MIN_DISCORDANT = 10
"""Examples that two arms must treat differently for an interval over examples; of fewer, a t interval is no guide."""


@dataclass(frozen=True)
class Levels:
    """Error rates of the tests: two-sided for signs, one-sided for equivalence and non-inferiority."""

    two_sided: float = 0.05
    one_sided: float = 0.05


@dataclass(frozen=True)
class Effect:
    """One estimated effect. `neutral` is the value that means none (0 for a difference, 1 for a ratio).

    `low` and `high` are the two-sided interval, `narrow_low` and `narrow_high` that of two one-sided tests, both at
    the levels that the decision is made at. `values` holds the effect under each seed; `effective_seeds` is how many
    unpaired seeds an arm would have given this standard error. Where no prediction depends on the seed `num_examples`
    says over how many examples `sd` and the intervals are, and is 0 otherwise. `refusal` says why there is no
    estimate, `insensitive` why an estimate says nothing; `is_controlled` is False for a comparison of whole
    configurations, `unequal` in what costs and tokens kept its arms differ; `is_exact` marks a counted quantity that
    was equal under all seeds; `is_withheld` a sign that Holm's adjustment denies.
    """

    name: str
    kind: Kind
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    narrow_low: float = math.nan
    narrow_high: float = math.nan
    n: int = 0
    sd: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan
    p_sign_flip: float = math.nan
    detectable: float = math.nan
    neutral: float = 0.0
    margin: float = math.nan
    direction: int = 1
    values: Mapping[int, float] = field(default_factory=dict)
    bootstrap: Bootstrap | None = None
    is_controlled: bool = True
    is_exact: bool = False
    is_withheld: bool = False
    effective_seeds: float = math.nan
    num_examples: int = 0
    insensitive: str = ""
    unequal: str = ""
    note: str = ""
    refusal: str = ""

    @property
    def evidence(self) -> Evidence:
        """What conditions are tested on."""
        none = self.neutral
        return Evidence(
            self.low - none,
            self.high - none,
            self.narrow_low - none,
            self.narrow_high - none,
            self.margin if none == 0 else math.nan,
            self.direction,
            self.is_withheld,
        )

    @property
    def sign(self) -> int:
        """1 or -1 where the effect is shown to be more or less than none, and not negligible; else 0."""
        return self.evidence.sign if self.evidence.is_known and not self.insensitive else 0

    @property
    def state_text(self) -> str:
        """A state of `rules.STATES`; `positive`, `negative` or `none` of a counted quantity; `insensitive`; `unknown`
        without an estimate.
        """
        if self.insensitive:
            return "insensitive"
        if not self.evidence.is_known:
            return "unknown"
        if self.is_exact:
            return {1: "positive", -1: "negative", 0: "none"}[self.sign]
        return self.evidence.state


def estimate_effects(
    study: Study, arms: Mapping[str, Arm], levels: Levels, variate: Mapping[int, float] | None = None
) -> dict[str, Effect]:
    """Every effect of a study, in the order of `study.effect_names`, as far as the records go.

    Args:
        study: the study.
        arms: its arms with the seeds that are judged.
        levels: error rates of the tests.
        variate: seed to result of the study's control variate, under all its seeds.
    """
    blocked = {name: provenance.contradictions(arm) for name, arm in arms.items()}
    effects = {}
    for name in study.effect_names():
        empty = Effect(
            name,
            _kind(study, name),
            neutral=study.neutrals.get(name, 0.0),
            margin=math.nan if name == SAVING else study.margin_size,
            direction=study.directions[name],
            is_controlled=study.is_controlled(name),
        )
        problems = [problem for arm in study.arms_of(name) for problem in blocked[arm]]
        effects[name] = (
            replace(empty, refusal="; ".join(problems))
            if problems
            else _estimate(study, arms, empty, levels, variate or {})
        )
    return _adjusted(study, effects, levels)


def with_bootstraps(study: Study, arms: Mapping[str, Arm], effects: Mapping[str, Effect]) -> dict[str, Effect]:
    """The effects, those of two arms with the bootstrap over their predictions, where the metric comes from these.

    Apart from `estimate_effects`, since it costs more than all of that and no rule reads it.
    """
    found = dict(effects)
    for name, contrast in study.contrasts.items() if study.metric == OF_PREDICTIONS else ():
        if not effects[name].refusal:
            first, second = (arms[arm] for arm in contrast.arms)
            found[name] = replace(effects[name], bootstrap=_bootstrap(first, second))
    return found


def describe(effect: Effect) -> str:
    """An effect in one line: name, what it is, estimate, interval, number of seeds."""
    if effect.refusal:
        return f"{effect.name}: {effect.refusal}"
    whole = "" if effect.is_controlled else " (whole configurations)"
    return f"{effect.name}{whole} {outcome_text(effect)}"


def outcome_text(effect: Effect) -> str:
    """What an effect was found to be: state, estimate, interval, number of seeds; why, where there is no estimate."""
    if effect.refusal:
        return effect.refusal
    is_signed = effect.neutral == 0
    estimate = formatting.number(effect.estimate, effect.kind, signed=is_signed)
    interval = formatting.interval(effect.low, effect.high, effect.kind, signed=is_signed)
    unit = " points" if effect.kind == "percent" else ""
    why = f" ({effect.insensitive})" if effect.insensitive else ""
    return f"{effect.state_text}{why}: {estimate}{unit} {interval}, n={effect.n}"


def _kind(study: Study, name: str) -> Kind:
    if name in study.weights:
        return formatting.metric(study.metric).kind
    if name == SAVING:
        return "percent"
    assert study.convergence is not None
    is_area = name in {area_name(contrast) for contrast in study.contrasts}
    return formatting.metric(study.convergence.metric).kind if is_area else "ratio"


def _estimate(
    study: Study, arms: Mapping[str, Arm], empty: Effect, levels: Levels, variate: Mapping[int, float]
) -> Effect:
    name = empty.name
    if name in study.weights:
        return _linear_effect(study, arms, empty, levels, variate)
    if name == SAVING:
        return _saving_effect(study, arms, empty, levels)
    return _curve_effect(study, arms, empty, levels)


def _linear_effect(
    study: Study, arms: Mapping[str, Arm], empty: Effect, levels: Levels, variate: Mapping[int, float]
) -> Effect:
    """A weighted sum of the arms' results under each seed."""
    weights = study.weights[empty.name]
    values = {arm: arms[arm].values(study.metric) for arm in weights}
    problems = _seed_problems(arms, values) or _control_problems(study, empty.name, arms)
    if problems:
        return replace(empty, refusal="; ".join(problems))
    seeds = sorted(next(iter(values.values())))
    per_seed = {seed: sum(weight * values[arm][seed] for arm, weight in weights.items()) for seed in seeds}
    metric = formatting.metric(study.metric)
    scale = max(abs(value) for found in values.values() for value in found.values())
    effect = _from_values(empty, per_seed, levels, scale=scale, is_counted=metric.is_exact)
    if effect.insensitive and study.metric == OF_PREDICTIONS:
        effect = _over_examples(effect, arms, weights, levels) or effect
    elif not effect.is_exact:
        effect = _without_common(effect, variate, levels) if variate.keys() >= per_seed.keys() else effect
        effect = replace(effect, effective_seeds=_effective_seeds(effect, values, weights))
    if metric.kind == "percent":
        effect = replace(effect, insensitive=effect.insensitive or _saturated(study, arms, weights))
    if empty.name in study.contrasts:
        contrast = study.contrasts[empty.name]
        first, second = (arms[arm] for arm in contrast.arms)
        mixed = compound(empty.name, contrast, {arm: arms[arm].config for arm in contrast.arms})
        unequal = provenance.unequal_costs(first, second)
        effect = replace(
            effect,
            is_controlled=effect.is_controlled and not mixed,
            unequal=unequal,
            note="; ".join(filter(None, (effect.note, mixed.split(";")[0], unequal))),
        )
    return effect


def _from_values(
    empty: Effect,
    values: Mapping[int, float],
    levels: Levels,
    *,
    scale: float | None = None,
    is_counted: bool = False,
    is_log: bool = False,
) -> Effect:
    """Mean and both intervals of an effect's values; with `is_log` they are logarithms, and the intervals those of the
    geometric mean.
    """
    x = [values[seed] for seed in sorted(values)]
    wide = statistics.one_sample_t(x, 1 - levels.two_sided, scale)
    narrow = statistics.one_sample_t(x, 1 - 2 * levels.one_sided, scale)
    back = math.exp if is_log else float
    effect = replace(
        empty,
        estimate=back(wide.mean),
        n=wide.n,
        sd=wide.sd,
        p=wide.p,
        values={seed: back(value) for seed, value in values.items()},
        p_sign_flip=_sign_flip(x),
    )
    if wide.is_degenerate and not is_counted:
        return replace(effect, insensitive=IDENTICAL if wide.mean == 0 else EQUAL_DIFFERENCES)
    known = not (is_log or wide.is_degenerate)
    return replace(
        effect,
        low=back(wide.low),
        high=back(wide.high),
        narrow_low=back(narrow.low),
        narrow_high=back(narrow.high),
        detectable=statistics.minimum_detectable_effect(wide.sd, wide.n, alpha=levels.two_sided) if known else math.nan,
        is_exact=wide.is_degenerate,
        note=wide.stamp or ("counted" if wide.is_degenerate else ""),
    )


def _seed_problems(arms: Mapping[str, Arm], values: Mapping[str, Mapping[int, float]]) -> list[str]:
    empty = [arms[arm].label for arm, found in values.items() if not found]
    if empty:
        return [f"no results of {' and '.join(empty)}"]
    first, *others = values
    problems = []
    for other in others:
        only_first, only_other = (sorted(a.keys() - b.keys()) for a, b in _both_ways(values[first], values[other]))
        sides = [(only_first, arms[first].label), (only_other, arms[other].label)]
        parts = [f"{formatting.runs_of(only)} only in {side}" for only, side in sides if only]
        if parts:
            problems.append(f"not compared: seeds differ ({'; '.join(parts)})")
    return list(dict.fromkeys(problems))


def _both_ways(a: Mapping[int, float], b: Mapping[int, float]) -> list[tuple[Mapping[int, float], Mapping[int, float]]]:
    return [(a, b), (b, a)]


def _control_problems(study: Study, name: str, arms: Mapping[str, Arm]) -> list[str]:
    """Why an effect's arms are not what the study says, or their runs no pairs."""
    configs = {arm: arms[arm].config for arm in study.arms_of(name)}
    if name in study.contrasts:
        contrast = study.contrasts[name]
        first, second = (arms[arm] for arm in contrast.arms)
        return contrast_problems(name, contrast, configs) + provenance.pairing_problems(
            first, second, contrast.differ_in
        )
    problems = []
    for factor, settings in study.factors.items():
        for a, b in study.level_pairs(factor):
            if a in configs and b in configs:
                declared = Contrast(arms=[b, a], differ_in=[settings.differ_in])
                problems += contrast_problems(f"factor {factor}", declared, configs)
                problems += provenance.pairing_problems(arms[b], arms[a], [settings.differ_in])
    return list(dict.fromkeys(problems))


def _saturated(study: Study, arms: Mapping[str, Arm], weights: Mapping[str, float]) -> str:
    """Why all results of an effect are at one end of what the metric can show: within one test example of it."""
    used = [arms[arm] for arm, weight in weights.items() if weight]
    records = [record for arm in used for record in arm.finished.values()]
    num_test = {(record["data"].get("sizes") or {}).get("test") for record in records}
    step = 1 / min(int(n) for n in num_test if n) if any(num_test) else 0.0
    values = [value for arm in used for value in arm.values(study.metric).values()]
    if all(value >= 1 - step - 1e-9 for value in values):
        return "saturated: every result is within one test example of 100 %"
    classes = {record["data"].get("num_classes") for record in records}
    floors = {0.0} | {1 / int(n) for n in classes if n}
    if any(all(value <= floor + step + 1e-9 for value in values) for floor in floors):
        return "saturated: every result is within one test example of guessing"
    return ""


def _effective_seeds(effect: Effect, values: Mapping[str, Mapping[int, float]], weights: Mapping[str, float]) -> float:
    if effect.n < 2 or not effect.sd > 0:
        return math.nan
    apart = sum(weight**2 * np.var(list(values[arm].values()), ddof=1) for arm, weight in weights.items())
    return float(effect.n * apart / effect.sd**2)


def _without_common(effect: Effect, variate: Mapping[int, float], levels: Levels) -> Effect:
    """An effect with what it has in common with a control variate taken out."""
    seeds = sorted(effect.values)
    values, control = [effect.values[seed] for seed in seeds], [variate[seed] for seed in seeds]
    everything = [variate[seed] for seed in sorted(variate)]
    wide = statistics.control_variate(values, control, everything, 1 - levels.two_sided)
    narrow = statistics.control_variate(values, control, everything, 1 - 2 * levels.one_sided)
    if wide.df == effect.n - 1:
        return effect
    return replace(
        effect,
        estimate=wide.mean,
        low=wide.low,
        high=wide.high,
        narrow_low=narrow.low,
        narrow_high=narrow.high,
        sd=wide.sd,
        p=wide.p,
        p_sign_flip=math.nan,
        detectable=statistics.minimum_detectable_effect(wide.sd, wide.n, alpha=levels.two_sided),
    )


def _over_examples(
    effect: Effect, arms: Mapping[str, Arm], weights: Mapping[str, float], levels: Levels
) -> Effect | None:
    """An effect of arms whose predictions depend on no seed, as of models that nothing trains, paired by example.

    Over seeds nothing varies, and an interval over them would have no width; the examples are what is drawn. None where
    a prediction depends on the seed, the runs kept none of the same examples, or too few of them differ.
    """
    correct = _correct([arms[arm] for arm in weights])
    if correct is None or any((kept != kept[0]).any() for kept in correct):
        return None
    differences = sum(weight * kept[0].astype(float) for weight, kept in zip(weights.values(), correct, strict=True))
    assert isinstance(differences, np.ndarray)
    if np.count_nonzero(differences) < MIN_DISCORDANT:
        return None
    wide = statistics.one_sample_t(differences, 1 - levels.two_sided)
    narrow = statistics.one_sample_t(differences, 1 - 2 * levels.one_sided)
    return replace(
        effect,
        estimate=wide.mean,
        low=wide.low,
        high=wide.high,
        narrow_low=narrow.low,
        narrow_high=narrow.high,
        sd=wide.sd,
        p=wide.p,
        p_sign_flip=math.nan,
        detectable=statistics.minimum_detectable_effect(wide.sd, wide.n, alpha=levels.two_sided),
        num_examples=wide.n,
        insensitive="",
        note=f"paired by example: no prediction depends on the seed; {wide.n} examples",
    )


def _sign_flip(differences: Sequence[float]) -> float:
    if not 1 < len(differences) <= statistics.MAX_EXACT_SIGNS:
        return math.nan
    return statistics.sign_flip(differences).p_two_sided


def _bootstrap(first: Arm, second: Arm) -> Bootstrap | None:
    """Over seeds and examples, where every run kept its predictions of the same examples."""
    correct = _correct([first, second])
    return None if correct is None else statistics.paired_bootstrap(correct[0], correct[1], unit="both")


def _correct(arms: Sequence[Arm]) -> list[NDArray[np.bool_]] | None:
    """For each arm which examples every seed got right, [seeds, examples]; None where runs kept no predictions of the
    same examples.
    """
    try:
        kept = [[read_predictions(record) for record in arm.finished.values()] for arm in arms]
    except RecordError:
        return None
    everything = [predictions for of_arm in kept for predictions in of_arm]
    if not everything or not all({"index", "target", "prediction"} <= p.keys() for p in everything):
        return None
    index, target = everything[0]["index"], everything[0]["target"]
    if not all(np.array_equal(p["index"], index) and np.array_equal(p["target"], target) for p in everything):
        return None
    return [np.stack([p["prediction"] == target for p in of_arm]) for of_arm in kept]


def _curve_effect(study: Study, arms: Mapping[str, Arm], empty: Effect, levels: Levels) -> Effect:
    """A speed-up to a target, or a difference of areas under the training curve."""
    assert study.convergence is not None
    metric = formatting.metric(study.convergence.metric)
    names = {speed_up_name(c, target): (c, target) for c in study.contrasts for target in study.convergence.targets}
    names |= {area_name(c): (c, math.nan) for c in study.contrasts}
    contrast, target = names[empty.name]
    first, second = (_curves(arms[arm], metric.key) for arm in study.contrasts[contrast].arms)
    if not first or first.keys() != second.keys():
        who = " and ".join(study.contrasts[contrast].arms)
        return replace(empty, refusal=f"training curves of {who} do not exist under equal seeds")
    problems = _control_problems(study, contrast, arms)
    if problems:
        return replace(empty, refusal="; ".join(problems))
    if math.isnan(target):
        area = statistics.area_under_curve
        return _from_values(empty, {seed: area(*first[seed]) - area(*second[seed]) for seed in first}, levels)
    seeds = sorted(first)
    arm, reference = (
        [statistics.epochs_to_target(*curves[s], target, higher_is_better=metric.higher_is_better) for s in seeds]
        for curves in (first, second)
    )
    # Epochs of the contrast's second arm over those of its first: above 1, the first arm is faster.
    ratio = statistics.speed_up(reference, arm)
    if ratio.kind != "observed":
        counts = ", ".join(f"{ratio.kinds.count(kind)} {kind}" for kind in dict.fromkeys(ratio.kinds))
        bound = "" if math.isnan(ratio.mean) else f"; {ratio.kind.replace('_', ' ')} {ratio.mean:.2f}"
        return replace(empty, refusal=f"target not reached in every run ({counts.replace('_', ' ')}{bound})")
    logs = dict(zip(seeds, np.log(ratio.ratios).tolist(), strict=True))
    return _from_values(empty, logs, levels, scale=1.0, is_log=True)


def _curves(arm: Arm, metric: str) -> dict[int, tuple[list[float], list[float]]]:
    """Seed to (epochs counted from one, values), of the finished seeds that kept a history."""
    found = {}
    for seed, record in arm.finished.items():
        history = read_history(record)
        if history.get(metric):
            found[seed] = ([epoch + 1 for epoch in history["epoch"]], history[metric])
    return found


def _saving_effect(study: Study, arms: Mapping[str, Arm], empty: Effect, levels: Levels) -> Effect:
    """Share of the reference's cost that is saved where the curve meets the reference's accuracy, seed by seed."""
    settings = study.equal_accuracy
    assert settings is not None
    reference = arms[settings.reference].values(study.metric)
    reference_cost = arms[settings.reference].values(settings.cost)
    points = [(arms[arm].values(settings.cost), arms[arm].values(study.metric)) for arm in settings.curve]
    seeds = set(reference)
    if not seeds or any(cost.keys() != seeds or accuracy.keys() != seeds for cost, accuracy in points):
        return replace(empty, refusal="the curve and its reference do not have results under equal seeds")
    found = {
        seed: statistics.cost_at_accuracy([c[seed] for c, _ in points], [a[seed] for _, a in points], reference[seed])
        for seed in sorted(seeds)
    }
    kinds = [point.kind for point in found.values()]
    if set(kinds) != {"reached"}:
        counts = ", ".join(f"{kinds.count(kind)} {kind.replace('_', ' ')}" for kind in dict.fromkeys(kinds))
        return replace(empty, refusal=f"the curve does not cross the reference's accuracy in every seed ({counts})")
    return _from_values(empty, {seed: 1 - point.cost / reference_cost[seed] for seed, point in found.items()}, levels)


def _adjusted(study: Study, effects: Mapping[str, Effect], levels: Levels) -> dict[str, Effect]:
    """With `adjust: holm` a sign needs the p value adjusted over the effects that the rules read as well."""
    if study.decision.adjust != "holm":
        return dict(effects)
    family = [name for name in effects if name in study.contrasts or name in study.read_effects]
    holm = dict(zip(family, statistics.adjust([effects[name].p for name in family]).tolist(), strict=True))
    return {
        name: replace(
            effect,
            p_holm=holm.get(name, math.nan),
            is_withheld=name in holm and not effect.is_exact and not holm[name] <= levels.two_sided,
        )
        for name, effect in effects.items()
    }
