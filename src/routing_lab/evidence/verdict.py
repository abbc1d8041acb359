"""From records to a verdict: what the effects of a study show, and the branch of its decision rule that they meet.

Nothing here is a judgement. The planned seeds, or those of a stated look, must be there; the controls must behave; then
the first rule whose conditions are shown gives the verdict. `invalid` is said where a negative control came out,
`insensitive` where a positive one did not or nothing could have been seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from routing_lab.evidence import formatting, provenance, sequential, statistics
from routing_lab.evidence.arms import Arm, group_arms, without_followers
from routing_lab.evidence.effects import Effect, Levels, describe, estimate_effects, with_bootstraps
from routing_lab.evidence.power import power_lines
from routing_lab.evidence.registration import Plan
from routing_lab.evidence.rules import DECIDED
from routing_lab.evidence.study import PILOT_SEEDS, Study
from routing_lab.evidence.tables import Column, Comparison, Shown, Table, compare
from routing_lab.runs.records import RecordError, compared_config, is_finished, scale_label


@dataclass(frozen=True)
class Control:
    """A control and how it came out; `passes` is None while it has no estimate."""

    name: str
    is_positive: bool
    least: float
    passes: bool | None
    text: str
    expected: str


@dataclass(frozen=True)
class Verdict:
    """The branch that was met, what it says, and the state of every condition that was looked at.

    `is_complete` is False while cells that the rules or controls need are missing; the verdict is then `inconclusive`.
    `exploratory` says why the verdict does not test a hypothesis that stood before its results; empty where it does.
    `rule` is the number of the rule that was met, counted from zero, `otherwise` after the last; None without one.
    """

    name: str
    says: str
    reasons: tuple[str, ...]
    is_complete: bool
    exploratory: tuple[str, ...] = ()
    rule: int | None = None

    @property
    def ends_looks(self) -> bool:
        """Whether a study with looks ends here. More seeds may bring out an effect that its rules read, and a positive
        control, which is judged at the same strict levels of an early look.
        """
        return self.is_complete and self.name not in ("inconclusive", "insensitive")

    @property
    def heading(self) -> str:
        """The word of the verdict, with what it must not be read without."""
        if not self.is_complete:
            return f"{self.name} (incomplete)"
        return f"{self.name} (exploratory)" if self.exploratory else self.name


@dataclass(frozen=True)
class Look:
    """One look at a study: how many seeds, at which levels, and whether it was the last one."""

    number: int
    num_looks: int
    seeds: tuple[int, ...]
    levels: Levels


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
    controls: tuple[Control, ...]
    look: Look
    provenance: tuple[str, ...]
    plan: Plan | None = None

    def predictions(self) -> list[tuple[str, str, str]]:
        """(effect, predicted, observed) of the hypothesis."""
        return [(name, sign, self.effects[name].state_text) for name, sign in self.study.hypothesis.predicted.items()]


def evaluate(
    study: Study, records: Sequence[Mapping[str, Any]], *, scale: str | None = None, plan: Plan | None = None
) -> StudyResult:
    """Estimate every effect of a study from records, and compute its verdict.

    A study with looks is judged at the first look that decides, so that later cells change nothing; else at the last
    look whose cells are complete.

    Args:
        study: the study; with a plan, the one that was planned.
        records: any records; those of other runs are passed over.
        scale: the scale whose records are meant; None where they are of one scale only.
        plan: names the run of every cell, so that runs shared with another study are found too. Without it, records
            whose `study` and `arm` name the study and the arm are taken.

    Raises:
        RecordError: records of one arm hold different configurations.
    """
    own = study.scale(scale or (plan.scale if plan else _recorded_scale(study, records)))
    arms = study_arms(study, records, scale=scale, plan=plan)
    looks = planned_looks(study, own)
    chosen = _judged(study, arms, looks[0], plan)
    for look in looks[1:]:
        if chosen[1].ends_looks or _missing(study, arms, look.seeds):
            break
        chosen = _judged(study, arms, look, plan)
    effects, verdict, controls, look, used = chosen
    effects = with_bootstraps(study, used, effects)
    comparisons = {name: _comparison(study, name, used, effects) for name in study.contrasts}
    labels = sorted({scale_label(record) for arm in arms.values() for record in arm.finished.values()})
    missing = tuple(_missing(study, arms, look.seeds, study.arms))
    strays = _strays(study, own, records) if plan is None else []
    return StudyResult(
        study,
        ", ".join(labels) or own,
        used,
        comparisons,
        effects,
        verdict,
        missing,
        controls,
        look,
        (*provenance.differences(used.values()), *_unequal(study, effects), *strays),
        plan,
    )


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
        wanted = [scale] if scale else list(study.scales)
        names = {study.name, *(study.key(known) for known in wanted)}
        seeds = {seed for known in wanted for seed in study.planned_seeds(known)}
        for record in records:
            if record["study"] not in names or record["arm"] not in cells:
                continue
            if record["seed"] in seeds or record["seed"] in study.extra_seeds(record["arm"]):
                found = cells[record["arm"]]
                if record["seed"] not in found or is_finished(record):
                    found[record["seed"]] = record
    arms = {}
    for name, found in cells.items():
        kinds = group_arms(without_followers(list(found.values())))
        if len(kinds) > 1:
            raise RecordError(
                f"study {study.name}: arm {name} has records of {len(kinds)} configurations "
                f"({'; '.join(kind.label for kind in kinds)}); name the scale, or the plan"
            )
        config = compared_config(next(iter(found.values()))) if found else {}
        arms[name] = Arm(name, config, found)
    return arms


def decide(study: Study, effects: Mapping[str, Effect], controls: Sequence[Control] = ()) -> Verdict:
    """What the controls and the rules say of effects; `inconclusive` where neither do."""
    named = [effects[name] for name in study.read_effects]
    read = [*named, *(effects[name] for name in study.controls.names if name not in study.read_effects)]
    unknown = [f"{effect.name}: {effect.refusal or effect.note}" for effect in read if effect.state_text == "unknown"]
    if unknown:
        return Verdict("inconclusive", "effects of the decision rule have no estimate", tuple(unknown), False)
    few = [f"{effect.name}: {effect.n} seeds" for effect in read if effect.n < statistics.MIN_SEEDS]
    if few:
        return Verdict(
            "inconclusive", f"{statistics.SINGLE_RUN}: fewer than three seeds decide nothing", tuple(few), False
        )
    failed = [control for control in controls if not control.passes]
    broken = tuple(control.text for control in failed if not control.is_positive)
    if broken:
        return Verdict("invalid", "a negative control came out, so that no effect can be trusted", broken, True)
    blind = [describe(effect) for effect in named if effect.insensitive]
    blind += [control.text for control in failed if control.is_positive]
    if blind:
        return Verdict("insensitive", "the study could not have seen the effects that it asks for", tuple(blind), True)
    evidence = {effect.name: effect.evidence for effect in named}
    for number, (rule, branch) in enumerate(zip(study.decision.rules, study.branches, strict=True)):
        if branch.holds(evidence):
            texts = [*rule.when.items(), *rule.when_any.items()]
            met = [
                f"{describe(effects[name])}: {text}"
                for (name, text), (_, condition) in zip(texts, branch.conditions, strict=True)
                if condition.holds(evidence[name])
            ]
            return Verdict(rule.verdict, rule.says, tuple(met), True, rule=number)
    reasons = tuple(describe(effect) for effect in named)
    otherwise = study.decision.otherwise
    if otherwise is not None and all(effect.is_exact or effect.state_text in DECIDED for effect in named):
        return Verdict(otherwise.verdict, otherwise.says, reasons, True, rule=len(study.branches))
    return Verdict("inconclusive", "no rule of the decision is met", reasons, True)


def effects_table(result: StudyResult) -> Table:
    """Every effect of a study, one a row, with what was predicted for it and who reads it."""
    study, levels = result.study, result.look.levels
    predicted = study.hypothesis.predicted
    rows = []
    for effect in result.effects.values():
        is_signed = effect.neutral == 0
        boot = (effect.bootstrap.low, effect.bootstrap.high) if effect.bootstrap else None
        rows.append(
            (
                effect.name,
                effect.state_text,
                predicted.get(effect.name),
                Shown(effect.estimate, effect.kind, is_signed),
                Shown((effect.low, effect.high), effect.kind, is_signed),
                effect.n,
                effect.p,
                role(study, effect.name),
                effect.refusal or effect.insensitive or effect.note,
                "no" if not effect.is_controlled else "yes, at unequal cost" if effect.unequal else "yes",
                Shown((effect.narrow_low, effect.narrow_high), effect.kind, is_signed),
                Shown(boot, effect.kind, is_signed),
                effect.p_sign_flip,
                effect.p_holm,
                Shown(effect.detectable, effect.kind),
                effect.effective_seeds,
            )
        )
    columns = (
        Column("effect", "effect"),
        Column("observed", "observed"),
        Column("predicted", "predicted"),
        Column("estimate", "estimate", "number"),
        Column("interval", f"{formatting.level(1 - levels.two_sided)} interval", "interval"),
        Column("n", "n", "count"),
        Column("p", "p (t)", "p"),
        Column("role", "read by"),
        Column("note", "note"),
        Column("controlled", "controlled", is_detail=True),
        Column("narrow", f"{formatting.level(1 - 2 * levels.one_sided)} interval", "interval", is_detail=True),
        Column("bootstrap", "over seeds and examples", "interval", is_detail=True),
        Column("p_sign_flip", "p (signs)", "p", is_detail=True),
        Column("p_holm", "p (Holm)", "p", is_detail=True),
        Column("detectable", "detectable", "number", is_detail=True),
        Column("effective_seeds", "worth unpaired seeds", "ratio", is_detail=True),
    )
    margin = f"margin {_size(study, study.margin_size)}" if study.margin else "no margin"
    notes = (
        f"accuracies in percentage points; paired by seed, t intervals; {margin}; superior or inferior by the "
        f"{formatting.level(1 - levels.two_sided)} interval, equivalent and non-inferior by the "
        f"{formatting.level(1 - 2 * levels.one_sided)} interval (two one-sided tests); controlled: one thing differs; "
        "effects that no rule or control reads are exploratory; worth unpaired seeds: how many "
        "seeds of arms that share none would have given this standard error",
    )
    caption = f"Effects in {study.metric}, study {study.name}, scale: {result.scale}"
    return Table("effects", caption, columns, tuple(rows), notes)


def verdict_text(result: StudyResult) -> str:
    """The verdict in plain lines: question, hypothesis, registration, the branch met and why, controls, what is
    lacking.
    """
    study, verdict = result.study, result.verdict
    gaps = f"; {'; '.join(result.missing)}" if result.missing else ""
    lines = [
        f"Study {study.name} (scale: {result.scale})",
        f"Question: {study.question}",
        f"Hypothesis: {study.hypothesis.statement}",
        *(f"  {name}: predicted {sign}, observed {observed}" for name, sign, observed in result.predictions()),
        f"Verdict: {verdict.heading}: {verdict.says}{gaps}",
        *(f"  {reason}" for reason in verdict.reasons),
        *(f"Exploratory: {reason}" for reason in verdict.exploratory),
        *(control.text for control in result.controls),
        *design_lines(result),
        *_power_lines(result),
        *(result.plan.lines() if result.plan else []),
        *(f"Missing: {text}" for text in result.missing),
        *(f"Note: {line}" for line in result.provenance),
        *(f"Note: {warning}" for warning in study.warnings()),
    ]
    if result.scale != "paper":
        lines.append(
            f"Note: scale {result.scale}: a finding about these models and data, no reproduction of a paper's number"
        )
    return "\n".join(lines)


def verdict_record(result: StudyResult) -> dict[str, Any]:
    """The verdict with everything it rests on as plain data, to be written as JSON beside the study."""
    study = result.study
    effects = {
        name: {
            "estimate": effect.estimate,
            "low": effect.low,
            "high": effect.high,
            "narrow_low": effect.narrow_low,
            "narrow_high": effect.narrow_high,
            "n": effect.n,
            "sd": effect.sd,
            "values": {str(seed): value for seed, value in effect.values.items()},
            "p": effect.p,
            "p_holm": effect.p_holm,
            "detectable": effect.detectable,
            "effective_seeds": effect.effective_seeds,
            "observed": effect.state_text,
            "predicted": study.hypothesis.predicted.get(name),
            "read_by": role(study, name),
            "is_controlled": effect.is_controlled,
            "note": effect.refusal or effect.insensitive or effect.note,
        }
        for name, effect in result.effects.items()
    }
    look = result.look
    return {
        "study": study.name,
        "scale": result.scale,
        "verdict": result.verdict.name,
        "says": result.verdict.says,
        "reasons": list(result.verdict.reasons),
        "is_complete": result.verdict.is_complete,
        "exploratory": list(result.verdict.exploratory),
        "metric": study.metric,
        "margin": None if study.margin is None else study.margin.model_dump(),
        "family": {"size": study.family.size, "ways": dict(study.family.ways), "text": study.family.text()},
        "look": {
            "number": look.number,
            "of": look.num_looks,
            "seeds": list(look.seeds),
            "two_sided_level": look.levels.two_sided,
            "one_sided_level": look.levels.one_sided,
        },
        "controls": [
            {
                "effect": c.name,
                "kind": "positive" if c.is_positive else "negative",
                "least": c.least,
                "passes": c.passes,
            }
            for c in result.controls
        ],
        "rules": [
            {"verdict": rule.verdict, "says": rule.says, "when": dict(rule.when), "when_any": dict(rule.when_any)}
            for rule in study.decision.rules
        ],
        "registration": [
            {
                "event": entry.event,
                "date": entry.date,
                "hash": entry.hash,
                "overrides": list(entry.overrides),
                "finished": entry.finished,
                "difference": list(entry.difference),
                "reason": entry.reason,
                "versions": dict(entry.versions),
            }
            for entry in (result.plan.entries if result.plan else ())
        ],
        "effects": effects,
        "missing": list(result.missing),
        "provenance": list(result.provenance),
    }


def design_lines(result: StudyResult) -> list[str]:
    """Margin, family and look of a study, each as `what: value`."""
    study, look = result.study, result.look
    lines = []
    if study.margin is not None:
        lines.append(f"Margin: {_size(study, study.margin.size)}: {study.margin.because}")
    if study.decision.adjust == "family":
        lines.append(f"Family: {study.family.text()}")
    elif study.decision.adjust == "holm":
        lines.append("Family: signs adjusted by Holm over the contrasts and whatever else the rules read")
    if study.control_variate is not None:
        variate = study.control_variate
        lines.append(
            f"Control variate: {variate.arm} under {variate.seeds} seeds, taken out of every effect by regression"
        )
    if look.num_looks > 1:
        lines.append(
            f"Look: {look.number} of {look.num_looks}, {len(look.seeds)} seeds, two-sided tests at "
            f"{look.levels.two_sided:.2g}, one-sided at {look.levels.one_sided:.2g} (alpha spending)"
        )
    return lines


def planned_looks(study: Study, scale: str) -> list[Look]:
    """The looks of a study with the levels of their tests: alpha over the family, spent over the looks."""
    seeds = study.looks(scale)
    alpha = study.decision.alpha / study.family.size
    sizes = [len(found) for found in seeds]
    levels = zip(sequential.two_sided_levels(sizes, alpha), sequential.one_sided_levels(sizes, alpha), strict=True)
    return [Look(i + 1, len(seeds), seeds[i], Levels(two, one)) for i, (two, one) in enumerate(levels)]


def judged_controls(study: Study, effects: Mapping[str, Effect]) -> tuple[Control, ...]:
    """How each control of a study came out."""
    found = []
    for name, least in study.controls.positive.items():
        effect = effects[name]
        side = 1 if least > 0 else -1
        is_out = effect.sign == side and side * (effect.estimate - effect.neutral) >= abs(least)
        passes = None if effect.state_text == "unknown" else is_out
        words = {None: "not known", True: "came out", False: "did not come out"}[passes]
        expected = f"at least {_size(study, least, name)}"
        text = f"Positive control {words}: {describe(effect)}, {expected} expected"
        found.append(Control(name, True, least, passes, text, expected))
    for name in study.controls.negative:
        effect = effects[name]
        passes = None if effect.state_text == "unknown" else effect.sign == 0
        words = {None: "not known", True: "did not come out", False: "came out"}[passes]
        text = f"Negative control {words}: {describe(effect)}"
        found.append(Control(name, False, 0.0, passes, text, "no sign"))
    return tuple(found)


def role(study: Study, name: str) -> str:
    """Who reads an effect: the rules, a control, or nobody."""
    roles = ["rules"] if name in study.read_effects else []
    roles += ["positive control"] if name in study.controls.positive else []
    roles += ["negative control"] if name in study.controls.negative else []
    return ", ".join(roles) or "exploratory"


def _recorded_scale(study: Study, records: Sequence[Mapping[str, Any]]) -> str:
    named = {record["study"] for record in records}
    return next((scale for scale in study.scales if study.key(scale) in named), next(iter(study.scales)))


def _needed(study: Study) -> set[str]:
    """Arms without which the rules and the controls cannot be read."""
    variate = [study.control_variate.arm] if study.control_variate else []
    return {arm for name in (*study.read_effects, *study.controls.names) for arm in study.arms_of(name)} | {*variate}


def _missing(
    study: Study, arms: Mapping[str, Arm], seeds: Sequence[int], needed: Collection[str] | None = None
) -> list[str]:
    """Cells without a result, by arm; of the arms without which there is no verdict, if not told otherwise."""
    wanted = _needed(study) if needed is None else needed
    return [
        f"{name}: {text}"
        for name, arm in arms.items()
        if name in wanted and (text := arm.missing(sorted({*seeds, *study.extra_seeds(name)})))
    ]


def _judged(
    study: Study, arms: Mapping[str, Arm], look: Look, plan: Plan | None
) -> tuple[dict[str, Effect], Verdict, tuple[Control, ...], Look, dict[str, Arm]]:
    used = {
        name: replace(arm, cells={seed: record for seed, record in arm.cells.items() if seed in look.seeds})
        for name, arm in arms.items()
    }
    variate = arms[study.control_variate.arm].values(study.metric) if study.control_variate else {}
    effects = estimate_effects(study, used, look.levels, variate)
    controls = judged_controls(study, effects)
    missing = _missing(study, arms, look.seeds)
    if missing and len(look.seeds) >= statistics.MIN_SEEDS:
        refused = [f"{name}: {effects[name].refusal}" for name in study.read_effects if effects[name].refusal]
        says = f"no verdict before the planned seeds ({formatting.runs_of(list(look.seeds))})"
        verdict = Verdict("inconclusive", says, (*missing, *refused), False)
    else:
        verdict = decide(study, effects, controls)
    exploratory = plan.exploratory if plan and verdict.is_complete else ()
    return effects, replace(verdict, exploratory=exploratory), controls, look, used


def _comparison(study: Study, name: str, arms: Mapping[str, Arm], effects: Mapping[str, Effect]) -> Comparison:
    first, second = (arms[arm] for arm in study.contrasts[name].arms)
    comparison = compare(first, second, study.metric, study.decision.level)
    refusal = effects[name].refusal
    return replace(comparison, difference=None, refusal=refusal) if refusal else comparison


def _unequal(study: Study, effects: Mapping[str, Effect]) -> list[str]:
    """Effects of the rules whose arms differ in cost or in tokens kept."""
    return [
        f"{name} is no comparison at equal cost: {u}" for name in study.read_effects if (u := effects[name].unequal)
    ]


def _strays(study: Study, scale: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Seeds that have run under the study's name and that it does not name: it was changed, or stopped early."""
    planned = {*study.planned_seeds(scale), *(seed for arm in study.arms for seed in study.extra_seeds(arm))}
    found = sorted(
        {
            record["seed"]
            for record in records
            if record["study"] in (study.name, study.key(scale)) and isinstance(record["seed"], int)
        }
        - planned
    )
    found = [seed for seed in found if seed < PILOT_SEEDS]
    return [f"seeds {formatting.runs_of(found)} have run as well and are none of the study's"] if found else []


def _power_lines(result: StudyResult) -> list[str]:
    plan, study = result.plan, result.study
    settings = study.scales[study.scale(plan.scale)] if plan else None
    if plan is None or settings is None or settings.spread is None or study.margin is None:
        return []
    return power_lines(study, plan.scale, settings.spread, settings.spread_from)


def _size(study: Study, size: float, effect: str = "") -> str:
    is_ratio = effect in study.neutrals
    kind = "number" if is_ratio else formatting.metric(study.metric).kind
    return formatting.number(size, kind) + (" points" if kind == "percent" else "")
