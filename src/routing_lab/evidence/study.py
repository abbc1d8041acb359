"""Studies: a question, its arms, seeds, contrasts and decision rule, written down and checked before anything is run.

A study file is YAML (see `experiments/`). Its arms are lists of overrides as typed on the command line; this module
never composes them. Whoever does passes the resolved configurations in, and `check_arms` compares them: a contrast is
refused when its arms differ in more than the one thing it declares.

A file that states a `margin`, the smallest effect of interest, is held to the whole grammar: its rules must give every
pattern of decided effects one verdict, or say which comes first and why. Without a margin nothing can be shown to be
equal, and what is lacking stands beside the verdict.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from routing_lab.axes.base import NAME, NAME_IN_WORDS
from routing_lab.evidence import formatting
from routing_lab.evidence.arms import differing_keys, differing_things
from routing_lab.evidence.rules import (
    Branch,
    Condition,
    Family,
    Patterns,
    enumerate_patterns,
    family,
    parse_condition,
)
from routing_lab.evidence.statistics import MIN_SEEDS
from routing_lab.keys import is_below
from routing_lab.runs.records import comparable

VerdictName = Literal["supports", "contradicted", "mixed", "inconclusive"]
Prediction = Literal["positive", "negative", "none", "superior", "inferior", "equivalent", "non-inferior"]
Scale = Literal["toy", "small", "real", "paper"]

PILOT_SEEDS = 1000
"""Seeds from here on are those of pilots, and never count in a verdict."""


class StudyError(ValueError):
    """A study that cannot be run or judged as written; one line per problem."""

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{name}: {problem}" for problem in problems))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Text = Annotated[str, Field(min_length=1)]
Overrides = list[Text]


class Hypothesis(_Strict):
    """What is expected, as a sentence and as the sign of each effect that the sentence is about."""

    statement: Text
    predicted: dict[Text, Prediction] = Field(min_length=1)


class Contrast(_Strict):
    """`first arm - second arm`. One entry in `differ_in`, a leaf key or an axis whose member is swapped, makes it
    controlled; several make it a comparison of whole configurations, which is reported as such and never as the effect
    of one axis.
    """

    arms: list[Text] = Field(min_length=2, max_length=2)
    differ_in: list[Text] = Field(min_length=1)

    @field_validator("differ_in", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def is_controlled(self) -> bool:
        """Whether the arms may differ in one thing alone."""
        return len(self.differ_in) == 1


class Factor(_Strict):
    """One of two crossed factors: its levels, the reference level first, and the arms at each; all differ in the one
    thing.
    """

    differ_in: Text
    levels: dict[Text, list[Text]] = Field(min_length=2)


class Rule(_Strict):
    """A branch of the decision: taken when all of `when` and at least one of `when_any` hold."""

    verdict: VerdictName
    says: Text
    when: dict[Text, str] = Field(default_factory=dict)
    when_any: dict[Text, str] = Field(default_factory=dict)

    @property
    def conditions(self) -> tuple[tuple[str, str], ...]:
        """Every (effect, condition) of the rule."""
        return (*self.when.items(), *self.when_any.items())


class Otherwise(_Strict):
    """What is said where every effect that the rules read is decided, and no rule is met."""

    verdict: VerdictName
    says: Text


class Decision(_Strict):
    """Rules in the order in which they are tried. Where none is met the verdict is that of `otherwise` if every effect
    that they read is decided, else `inconclusive`.

    `level` is that of the two-sided intervals; equivalence and non-inferiority are shown by one-sided tests at 1 -
    level. `adjust: family` makes every test at (1 - level) over the size of the family (see `rules.Family`); `holm`
    adjusts signs over the effects that the rules read. `order` says why the first rule goes before a later one that
    also holds.
    """

    rules: list[Rule] = Field(min_length=1)
    level: float = Field(default=0.95, gt=0.5, lt=1)
    adjust: Literal["family", "holm", "none"] = "family"
    otherwise: Otherwise | None = None
    order: str = ""

    @property
    def alpha(self) -> float:
        """Error rate of one test before any adjustment."""
        return 1 - self.level


class Margin(_Strict):
    """The smallest effect of interest, in the unit of the study's metric, and the argument for it."""

    size: float = Field(gt=0)
    because: Text


class Controls(_Strict):
    """What must come out if the study can see anything (effect -> least size), and what must not if it is sound.

    A positive control passes with a sign on the side of its least size and an estimate at least as large; without it
    the verdict is `insensitive`. A negative control that is shown to differ makes the verdict `invalid`.
    """

    positive: dict[Text, float] = Field(default_factory=dict)
    negative: list[Text] = Field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """Every effect that is a control."""
        return (*self.positive, *self.negative)


class ControlVariate(_Strict):
    """An arm, as a rule the dense one, that runs under seeds 0 to `seeds` - 1, more than the study's: what the effects
    have in common with its results is taken out of them, see `statistics.control_variate`. Worth its seeds only where
    an arm's results follow this arm's from seed to seed; `worth unpaired seeds` says what it gave.
    """

    arm: Text
    seeds: int = Field(gt=MIN_SEEDS)


class Looks(_Strict):
    """Seeds 0, 1, ... in portions: a verdict may be reached at `first` seeds and after every `step` more, up to `most`.

    The error rates over all looks are kept by alpha spending, see `sequential`.
    """

    first: int = Field(ge=MIN_SEEDS)
    step: int = Field(ge=1)
    most: int

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Looks:
        if self.most <= self.first:
            raise ValueError(f"most={self.most} must be larger than first={self.first}")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of seeds at the looks."""
        return tuple(dict.fromkeys([*range(self.first, self.most, self.step), self.most]))


def _kind_of_seeds(value: Any) -> str:
    return "listed" if isinstance(value, (list, tuple)) else "looks"


Seeds = Annotated[
    Annotated[list[Annotated[int, Field(ge=0)]], Tag("listed")] | Annotated[Looks, Tag("looks")],
    Discriminator(_kind_of_seeds),
]


class Convergence(_Strict):
    """Epochs to fixed targets, read from the training curves: adds `speed-up <contrast> @ <target>` and `area
    <contrast>`.
    """

    metric: Text = "val/acc"
    targets: list[float] = Field(min_length=1)


class EqualAccuracy(_Strict):
    """Cost at which the curve through `curve` reaches the accuracy of `reference`: adds `saving at equal accuracy`."""

    curve: list[Text] = Field(min_length=2)
    reference: Text
    cost: Text = "cost/macs_measured"


class ScaleSettings(_Strict):
    """How the study is run at one scale, and what a cell is expected to cost there.

    `arms` adds overrides to single arms, where what they stand for depends on the size of the model; `seeds` replaces
    the study's. `spread` is the standard deviation of a difference under one seed that power is computed from until a
    pilot has measured it, and `spread_from` where it comes from.
    """

    overrides: Overrides
    arms: dict[Text, Overrides] = Field(default_factory=dict)
    seconds_per_cell: float = Field(gt=0)
    machine: Text
    seeds: Seeds | None = None
    spread: float | None = Field(default=None, gt=0)
    spread_from: str = ""


class Study(_Strict):
    """A study as written in its file. See `load_study`.

    `tests`: row of `docs/ledger.csv` -> the effects that decide what the row says.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    question: Text
    hypothesis: Hypothesis
    tests: dict[Text, list[Text]] = Field(default_factory=dict)
    arms: dict[Text, Overrides] = Field(min_length=2)
    seeds: Seeds
    reference: Text
    margin: Margin | None = None
    controls: Controls = Field(default_factory=Controls)
    control_variate: ControlVariate | None = None
    contrasts: dict[Text, Contrast] = Field(min_length=1)
    decision: Decision
    scales: dict[Scale, ScaleSettings] = Field(min_length=1)
    metric: Text = "test/acc"
    common: Overrides = Field(default_factory=list)
    probes: dict[Text, Overrides] = Field(default_factory=dict)
    factors: dict[Text, Factor] = Field(default_factory=dict)
    convergence: Convergence | None = None
    equal_accuracy: EqualAccuracy | None = None
    notes: str = ""

    def overrides(self, arm: str, scale: str, extra: Iterable[str] = ()) -> list[str]:
        """The command-line overrides of an arm at a scale, without the seed; later ones win."""
        settings = self.scales[self.scale(scale)]
        return [*self.common, *settings.overrides, *self.arms[arm], *settings.arms.get(arm, []), *extra]

    def key(self, scale: str) -> str:
        """What the records of the study at a scale carry as `study`: `<name>.<scale>`."""
        return f"{self.name}.{scale}"

    def scale(self, name: str) -> Scale:
        """`name`, if the study has that scale.

        Raises:
            StudyError: it has not.
        """
        for known in self.scales:
            if known == name:
                return known
        raise StudyError(self.name, [f"scale={name!r}: one of {', '.join(self.scales)} is expected"])

    def looks(self, scale: str) -> tuple[tuple[int, ...], ...]:
        """The seeds at each look at a scale; one entry where the study is looked at once."""
        seeds = self.scales[self.scale(scale)].seeds or self.seeds
        if isinstance(seeds, Looks):
            return tuple(tuple(range(size)) for size in seeds.sizes)
        return (tuple(seeds),)

    def planned_seeds(self, scale: str) -> tuple[int, ...]:
        """All the seeds that a scale may run."""
        return self.looks(scale)[-1]

    def extra_seeds(self, arm: str) -> tuple[int, ...]:
        """Seeds of an arm as a control variate, empty for the others."""
        variate = self.control_variate
        return tuple(range(variate.seeds)) if variate is not None and variate.arm == arm else ()

    def planned_cells(self, scale: str) -> list[tuple[int, str]]:
        """(seed, arm) of every cell at a scale, seed by seed."""
        planned = self.planned_seeds(scale)
        cells = [(seed, arm) for seed in planned for arm in self.arms]
        extra = [(seed, arm) for arm in self.arms for seed in self.extra_seeds(arm) if seed not in planned]
        return [*cells, *extra]

    @property
    def margin_size(self) -> float:
        """The margin, NaN where none is stated."""
        return self.margin.size if self.margin else float("nan")

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The rules of the decision, their conditions read."""
        return tuple(
            Branch(
                rule.verdict,
                rule.says,
                tuple((name, self._condition(name, text)) for name, text in rule.when.items()),
                tuple((name, self._condition(name, text)) for name, text in rule.when_any.items()),
            )
            for rule in self.decision.rules
        )

    @cached_property
    def read_effects(self) -> tuple[str, ...]:
        """Effects that some rule reads."""
        return tuple(dict.fromkeys(name for branch in self.branches for name, _ in branch.conditions))

    @cached_property
    def family(self) -> Family:
        """Over how many effects the study adjusts, with `adjust: family`."""
        if self.decision.adjust != "family":
            return Family({})
        return family(self.branches, self.margin_size, self.directions, self._exact)

    @cached_property
    def patterns(self) -> Patterns | None:
        """What the rules say of every pattern of what may be found; None where there are too many patterns."""
        return enumerate_patterns(self.branches, self.margin_size, self.neutrals, self.directions)

    @cached_property
    def directions(self) -> dict[str, int]:
        """Effect -> 1 where more is better, -1 where less is."""
        higher = formatting.metric(self.metric).higher_is_better
        ratios = {*self.neutrals, SAVING}
        return {name: 1 if higher or name in ratios else -1 for name in self.effect_names()}

    @cached_property
    def weights(self) -> dict[str, dict[str, float]]:
        """Effect -> arm -> weight, of every effect that is a sum of the arms' values."""
        found = {name: {contrast.arms[0]: 1.0, contrast.arms[1]: -1.0} for name, contrast in self.contrasts.items()}
        if not self.factors:
            return found
        (f, first), (g, second) = self.factors.items()
        cells = self.factor_arms()
        rows, columns = list(first.levels), list(second.levels)
        for level in rows[1:]:
            share = 1 / len(columns)
            found[f"{f}: {level} - {rows[0]}"] = _summed(
                [(cells[level, c], share) for c in columns] + [(cells[rows[0], c], -share) for c in columns]
            )
        for level in columns[1:]:
            share = 1 / len(rows)
            found[f"{g}: {level} - {columns[0]}"] = _summed(
                [(cells[r, level], share) for r in rows] + [(cells[r, columns[0]], -share) for r in rows]
            )
        for r, c in itertools.product(rows[1:], columns[1:]):
            found[self._interaction(r, c)] = _summed(
                [
                    (cells[r, c], 1.0),
                    (cells[rows[0], c], -1.0),
                    (cells[r, columns[0]], -1.0),
                    (cells[rows[0], columns[0]], 1.0),
                ]
            )
        return found

    def arms_of(self, effect: str) -> tuple[str, ...]:
        """Arms whose results an effect is computed from."""
        if effect in self.weights:
            return tuple(arm for arm in self.arms if arm in self.weights[effect])
        if effect == SAVING and self.equal_accuracy:
            return (*self.equal_accuracy.curve, self.equal_accuracy.reference)
        contrast = next(name for name in self.contrasts if effect in self._curve_effects(name))
        return tuple(self.contrasts[contrast].arms)

    def is_controlled(self, effect: str) -> bool:
        """Whether one thing alone differs between the arms of an effect."""
        if effect in self.contrasts:
            return self.contrasts[effect].is_controlled
        if effect in self.weights:
            return True
        if effect == SAVING:
            return False
        return next(c.is_controlled for name, c in self.contrasts.items() if effect in self._curve_effects(name))

    def factor_arms(self) -> dict[tuple[str, ...], str]:
        """The arm of each combination of levels, in the order of the factors."""
        levels = [factor.levels for factor in self.factors.values()]
        crossed = itertools.product(*(level.items() for level in levels))
        return {
            tuple(name for name, _ in combination): next(
                iter(set.intersection(*(set(arms) for _, arms in combination)))
            )
            for combination in crossed
        }

    def level_pairs(self, factor: str) -> list[tuple[str, str]]:
        """Arms (at the reference level, at another level) that differ in `factor` alone."""
        position = list(self.factors).index(factor)
        cells = self.factor_arms()
        reference = next(iter(self.factors[factor].levels))
        pairs = []
        for combination, arm in cells.items():
            if combination[position] != reference:
                base = tuple(reference if i == position else level for i, level in enumerate(combination))
                pairs.append((cells[base], arm))
        return pairs

    def effect_names(self) -> list[str]:
        """Names of every effect that the study estimates, as hypothesis and rules may use them."""
        names = list(self.contrasts)
        if self.factors:
            (f, first), (g, second) = self.factors.items()
            rows, columns = list(first.levels), list(second.levels)
            for factor, own in ((f, rows), (g, columns)):
                names += [f"{factor}: {level} - {own[0]}" for level in own[1:]]
            names += [self._interaction(r, c) for r, c in itertools.product(rows[1:], columns[1:])]
        names += [name for contrast in self.contrasts for name in self._curve_effects(contrast)]
        if self.equal_accuracy:
            names.append(SAVING)
        return names

    def _condition(self, effect: str, text: str) -> Condition:
        return parse_condition(text).relative_to(self.neutrals.get(effect, 0.0))

    def _interaction(self, row: str, column: str) -> str:
        (f, first), (g, second) = self.factors.items()
        rows, columns = list(first.levels), list(second.levels)
        is_single = len(rows) == len(columns) == 2
        return f"{f} x {g}" + ("" if is_single else f" ({row} - {rows[0]}, {column} - {columns[0]})")

    def _curve_effects(self, contrast: str) -> list[str]:
        if self.convergence is None:
            return []
        return [*(speed_up_name(contrast, target) for target in self.convergence.targets), area_name(contrast)]

    @cached_property
    def neutrals(self) -> dict[str, float]:
        """Ratios -> the value that means no effect, one; every other effect means none at zero."""
        targets = self.convergence.targets if self.convergence else []
        return {speed_up_name(contrast, target): 1.0 for contrast in self.contrasts for target in targets}

    @property
    def _exact(self) -> frozenset[str]:
        return frozenset(self.weights) if formatting.metric(self.metric).is_exact else frozenset()

    def warnings(self, scale: str | None = None) -> list[str]:
        """What is legal and weakens the study, at a scale or at any."""
        found = []
        counts = {len(self.planned_seeds(name)) for name in ([scale] if scale else self.scales)}
        if min(counts) < MIN_SEEDS:
            found.append(f"{min(counts)} seeds: a single run decides nothing; at least {MIN_SEEDS} are needed")
        whole = [name for name, contrast in self.contrasts.items() if not contrast.is_controlled]
        if whole:
            found.append(f"comparisons of whole configurations, not effects of one axis: {', '.join(whole)}")
        if not formatting.metric(self.metric).is_exact:
            if self.margin is None:
                found.append(
                    "no margin is stated: nothing can be shown to be equal, and any sign counts, however small"
                )
            if not self.controls.positive:
                found.append("no positive control is named: whether this study could see anything is not known")
        return found + ([] if self.margin else _rule_problems(self))


SAVING = "saving at equal accuracy"


def speed_up_name(contrast: str, target: float) -> str:
    """Name of the speed-up of a contrast to a target."""
    return f"speed-up {contrast} @ {target:g}"


def area_name(contrast: str) -> str:
    """Name of a contrast's difference in area under the training curve."""
    return f"area {contrast}"


def load_study(path: Path | str) -> Study:
    """Read and check a study file.

    Raises:
        StudyError: with every problem of the file at once: unknown keys, wrong types, arms, effects or scales that do
            not exist, factors that are not crossed, conditions that cannot be read.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    path = Path(path)
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise StudyError(str(path), ["no such file"]) from None
    except OSError as error:
        raise StudyError(str(path), [error.strerror or str(error)]) from None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise StudyError(str(path), [f"not YAML: {' '.join(str(error).split())}"]) from error
    if isinstance(content, dict) and set(content) == {"claims"}:
        raise StudyError(
            str(path),
            [f"holds claims, not a study; python -m routing_lab.report FOLDER --claims {path} judges them by records"],
        )
    if not isinstance(content, dict):
        raise StudyError(str(path), [f"a mapping of keys is expected, not a {type(content).__name__}"])
    named = {"name": path.stem, **{str(key): value for key, value in content.items()}}
    if named["name"] != path.stem:
        raise StudyError(
            path.stem, [f"name={named['name']!r}: a study is named after its file; {path.stem!r} is expected"]
        )
    return parse_study(named)


def parse_study(content: Mapping[str, Any]) -> Study:
    """A study from plain data; raises like `load_study`."""
    name = str(content.get("name", "study"))
    try:
        study = Study.model_validate(dict(content))
    except ValidationError as error:
        lines = [f"{_key(e['loc'])}={_short(e['input'])}: {e['msg']}" for e in error.errors()]
        raise StudyError(name, lines) from None
    problems = [*_arm_problems(study), *_factor_problems(study)]
    # Names of effects exist only where arms and factors do.
    problems += [] if problems else _decision_problems(study)
    if problems:
        raise StudyError(study.name, problems)
    return study


def check_arms(study: Study, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the resolved configurations of the arms with what the study declares.

    Args:
        study: the study.
        configs: arm to resolved configuration, all of one scale and seed; those that contrasts and factors read.

    Raises:
        StudyError: a contrast or a factor whose arms differ in other keys than the declared ones (the message names
            the keys), or do not differ at all; two arms that are one configuration.
    """
    problems = []
    for name, contrast in study.contrasts.items():
        problems += contrast_problems(name, contrast, configs) or _refused(compound(name, contrast, configs), study)
    for name, factor in study.factors.items():
        for first, second in study.level_pairs(name):
            declared = Contrast(arms=[second, first], differ_in=[factor.differ_in])
            problems += contrast_problems(f"factor {name}", declared, configs)
            problems += _refused(compound(f"factor {name}", declared, configs), study)
    for first, second in itertools.combinations([arm for arm in study.arms if arm in configs], 2):
        if not _differing(configs[first], configs[second]):
            problems.append(f"arms {first} and {second} are the same configuration")
    if problems:
        raise StudyError(study.name, list(dict.fromkeys(problems)))


def _refused(why: str, study: Study) -> list[str]:
    return [why] if why and study.margin else []


def contrast_problems(name: str, contrast: Contrast, configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why a contrast does not compare what it declares; empty when it does."""
    first, second = contrast.arms
    keys = _differing(configs[first], configs[second])
    declared = ", ".join(contrast.differ_in)
    if not keys:
        return [f"{name}: {first} and {second} do not differ; they should in {declared}"]
    things = differing_things(comparable(configs[first]), comparable(configs[second]))
    extra = [thing for thing in things if not is_below(thing, contrast.differ_in)]
    if extra:
        return [
            f"{name}: not controlled: {first} and {second} also differ in {', '.join(extra)} (declared: {declared})"
        ]
    absent = [allowed for allowed in contrast.differ_in if not any(is_below(key, [allowed]) for key in keys)]
    if absent:
        return [f"{name}: {first} and {second} do not differ in {', '.join(absent)}, which is declared"]
    return []


def compound(name: str, contrast: Contrast, configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Why a contrast that is declared controlled is none: its arms differ in several things under the one declared.

    A study with a margin is refused for it; in an older one the contrast is reported as one of whole configurations.
    """
    first, second = contrast.arms
    things = differing_things(comparable(configs[first]), comparable(configs[second]))
    if not contrast.is_controlled or len(things) < 2:
        return ""
    return (
        f"{name}: compound: {first} and {second} differ in {len(things)} things, {', '.join(things)}; a controlled "
        "contrast has one (name them all in differ_in to compare whole configurations)"
    )


def _arm_problems(study: Study) -> list[str]:
    problems = []
    known = ", ".join(study.arms)

    def check(where: str, arms: Iterable[str]) -> None:
        unknown = [arm for arm in arms if arm not in study.arms]
        if unknown:
            problems.append(f"{where}={unknown}: no such arm; {known} are there")

    odd = [arm for arm in study.arms if not re.match(NAME, arm)]
    problems += [f"arms.{arm}: the name of an arm is {NAME_IN_WORDS}" for arm in odd]
    check("reference", [study.reference])
    for name, contrast in study.contrasts.items():
        check(f"contrasts.{name}.arms", contrast.arms)
        if contrast.arms[0] == contrast.arms[1]:
            problems.append(f"contrasts.{name}.arms={contrast.arms}: two different arms are expected")
    for name, factor in study.factors.items():
        for level, arms in factor.levels.items():
            check(f"factors.{name}.levels.{level}", arms)
    if study.control_variate:
        check("control_variate.arm", [study.control_variate.arm])
        most = max(len(study.planned_seeds(scale)) for scale in study.scales)
        if not most < study.control_variate.seeds <= PILOT_SEEDS:
            problems.append(
                f"control_variate.seeds={study.control_variate.seeds}: more than the {most} seeds of the study are "
                f"expected, and none from {PILOT_SEEDS} on"
            )
    if study.equal_accuracy:
        check("equal_accuracy", [*study.equal_accuracy.curve, study.equal_accuracy.reference])
    for scale, settings in study.scales.items():
        check(f"scales.{scale}.arms", settings.arms)
    for where, seeds in [("seeds", study.seeds), *((f"scales.{n}.seeds", s.seeds) for n, s in study.scales.items())]:
        problems += _seed_problems(where, seeds)
    everywhere = [(f"arms.{arm}", overrides) for arm, overrides in study.arms.items()]
    everywhere += [(f"scales.{scale}.overrides", settings.overrides) for scale, settings in study.scales.items()]
    for where, overrides in [*everywhere, ("common", study.common)]:
        taken = [text for text in overrides if re.match(r"[+~]*(seed|study|arm)=", text)]
        if taken:
            problems.append(f"{where}={taken}: the study sets seed, study and arm itself")
    return problems


def _factor_problems(study: Study) -> list[str]:
    if not study.factors:
        return []
    if len(study.factors) != 2:
        return [f"factors={list(study.factors)}: two crossed factors are expected"]
    problems = []
    levels = [factor.levels for factor in study.factors.values()]
    for (row, first), (column, second) in itertools.product(levels[0].items(), levels[1].items()):
        shared = [arm for arm in first if arm in second]
        if len(shared) != 1:
            what = f"arms {', '.join(shared)}" if shared else "no arm"
            problems.append(f"factors: one arm is expected at {row} and {column}, and {what} found")
    return problems


def _seed_problems(where: str, seeds: Seeds | None) -> list[str]:
    if seeds is None:
        return []
    listed = range(seeds.most) if isinstance(seeds, Looks) else seeds
    problems = [] if listed else [f"{where}: at least one seed is expected"]
    if len(set(listed)) != len(listed):
        problems.append(f"{where}={seeds}: every seed once is expected")
    if any(seed >= PILOT_SEEDS for seed in listed):
        problems.append(f"{where}: seeds from {PILOT_SEEDS} on are set apart for pilots; smaller ones are expected")
    return problems


def _decision_problems(study: Study) -> list[str]:
    effects = study.effect_names()
    known = "; ".join(effects)
    twice = sorted({name for name in effects if effects.count(name) > 1})
    problems = [f"effects named twice: {', '.join(twice)}; rename the contrasts"] if twice else []
    named = [(f"hypothesis.predicted.{name}", name) for name in study.hypothesis.predicted]
    named += [(f"controls.positive.{name}", name) for name in study.controls.positive]
    named += [(f"controls.negative.{name}", name) for name in study.controls.negative]
    named += [(f"tests.{row}", name) for row, names in study.tests.items() for name in names]
    problems += [f"{where}: no such effect; there are: {known}" for where, name in named if name not in effects]
    problems += [
        f"controls.positive.{name}=0: the least size with which it must come out is expected"
        for name, size in study.controls.positive.items()
        if size == 0
    ]
    for i, rule in enumerate(study.decision.rules):
        where = f"decision.rules.{i}"
        if not rule.conditions:
            problems.append(f"{where}: at least one condition is expected under 'when' or 'when_any'")
        for name, text in rule.conditions:
            if name not in effects:
                problems.append(f"{where}.{name}: no such effect; there are: {known}")
            try:
                condition = parse_condition(text)
            except ValueError as error:
                problems.append(f"{where}.{name}: {error}")
                continue
            if condition.is_undecided and rule.verdict != "inconclusive":
                problems.append(f"{where}.{name}={text!r}: not knowing is no evidence for {rule.verdict!r}")
            if condition.needs_margin and study.margin is None:
                problems.append(f"{where}.{name}={text!r}: means nothing without a margin; state 'margin'")
            if condition.needs_margin and name in effects and name in {*study.neutrals, SAVING}:
                problems.append(f"{where}.{name}={text!r}: the margin is in {study.metric}; give a bound of its own")
    if problems or study.margin is None:
        return problems
    return _rule_problems(study)


def _rule_problems(study: Study) -> list[str]:
    """Where the rules leave a pattern of decided effects without a verdict, or give it two without saying why."""
    patterns = study.patterns
    if patterns is None:
        return ["decision.rules: they read too many effects for every pattern to be checked; leave some out"]
    problems = []
    if patterns.num_open and study.decision.otherwise is None:
        problems.append(
            f"decision.rules: not complete: {patterns.num_open} patterns of decided effects meet no rule, as "
            f"{'; '.join(patterns.open)} (add a rule, or 'otherwise')"
        )
    if patterns.num_double and not study.decision.order.strip():
        shown = "; ".join(f"{text} (rules {', '.join(map(str, met))})" for text, met in patterns.double)
        problems.append(
            f"decision.rules: not exclusive: {patterns.num_double} patterns meet several rules, as {shown}; say under "
            "'order' which comes first and why"
        )
    return problems


def _summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for arm, weight in pairs:
        total[arm] = total.get(arm, 0.0) + weight
    return total


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return differing_keys(comparable(first), comparable(second))


def _key(loc: Sequence[Any]) -> str:
    return ".".join(str(part) for part in loc if part not in ("listed", "looks"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
