"""Studies: a question, its arms, seeds, contrasts and decision rule, written down and checked before anything is run.

A study file is YAML (see `experiments/`). Its arms are lists of overrides as typed on the command line; this module
never composes them. Whoever does passes the resolved configurations in, and `check_arms` compares them: a contrast is
refused when its arms differ in more than the key it declares.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from routing_lab.evidence.arms import differing_keys
from routing_lab.evidence.statistics import MIN_SEEDS
from routing_lab.runs.files import write_text
from routing_lab.runs.records import comparable, is_finished

VerdictName = Literal["supports", "contradicted", "mixed", "inconclusive"]
Sign = Literal["positive", "negative", "none"]
Scale = Literal["toy", "small", "paper"]

CONDITIONS = "'positive', 'negative', 'undecided', '> x', '< x', 'within x', or one of them after 'not '"
"""What a rule may say of an effect."""


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
    predicted: dict[Text, Sign] = Field(min_length=1)


class Contrast(_Strict):
    """`first arm - second arm`. One key in `differ_in` makes it controlled; several make it a comparison of whole
    configurations,
    which is reported as such and never as the effect of one axis."""

    arms: list[Text] = Field(min_length=2, max_length=2)
    differ_in: list[Text] = Field(min_length=1)

    @field_validator("differ_in", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def is_controlled(self) -> bool:
        """Whether the arms may differ in one key alone."""
        return len(self.differ_in) == 1


class Factor(_Strict):
    """One of two crossed factors: its levels, the reference level first, and the arms at each; all differ in the one
    key.
    """

    differ_in: Text
    levels: dict[Text, list[Text]] = Field(min_length=2)


@dataclass(frozen=True)
class Condition:
    """A statement about an effect's interval. `bound` is None for the words `positive`, `negative` and `undecided`."""

    relation: str
    bound: float | None
    is_negated: bool

    def holds(self, low: float, high: float, sign: int) -> bool:
        """Whether the statement is true of an interval and of the sign that the decision grants it.

        `> x` and `< x` ask for the whole interval, `within x` for all of it between -x and x; an unknown interval
        satisfies none of them, negated or not.
        """
        if math.isnan(low) or math.isnan(high):
            return False
        if self.bound is None:
            holds = {"positive": sign > 0, "negative": sign < 0, "undecided": sign == 0}[self.relation]
        else:
            x = self.bound
            holds = {">": low > x, "<": high < x, "within": -x < low and high < x}[self.relation]
        return holds != self.is_negated


def parse_condition(text: str) -> Condition:
    """Read a condition of a rule.

    Raises:
        ValueError: `text` is none of `CONDITIONS`.
    """
    match = _CONDITION.fullmatch(" ".join(text.split()))
    if match is None:
        raise ValueError(f"{text!r} is not a condition; {CONDITIONS} is expected")
    bound = match["bound"]
    return Condition(
        match["word"] or match["relation"], None if bound is None else float(bound), bool(match["negated"])
    )


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


class Decision(_Strict):
    """Rules in the order in which they are tried; where none applies, the verdict is `inconclusive`.

    `level` is that of every interval. With `adjust: holm` an effect has a sign only where its p value, adjusted over
    the study, is also at most 1 - level.
    """

    rules: list[Rule] = Field(min_length=1)
    level: float = Field(default=0.95, gt=0.5, lt=1)
    adjust: Literal["holm", "none"] = "holm"


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

    `arms` adds overrides to single arms, where what they stand for depends on the size of the model.
    """

    overrides: Overrides
    arms: dict[Text, Overrides] = Field(default_factory=dict)
    seconds_per_cell: float = Field(gt=0)
    machine: Text


class Study(_Strict):
    """A study as written in its file. See `load_study`."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    question: Text
    hypothesis: Hypothesis
    arms: dict[Text, Overrides] = Field(min_length=2)
    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    reference: Text
    contrasts: dict[Text, Contrast] = Field(min_length=1)
    decision: Decision
    scales: dict[Scale, ScaleSettings] = Field(min_length=1)
    metric: Text = "test/acc"
    common: Overrides = Field(default_factory=list)
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
            pairs = list(itertools.product(rows[1:], columns[1:]))
            for r, c in pairs:
                names.append(f"{f} x {g}" + ("" if len(pairs) == 1 else f" ({r} - {rows[0]}, {c} - {columns[0]})"))
        if self.convergence:
            for contrast in self.contrasts:
                names += [speed_up_name(contrast, target) for target in self.convergence.targets]
                names.append(area_name(contrast))
        if self.equal_accuracy:
            names.append(SAVING)
        return names

    @property
    def warnings(self) -> list[str]:
        """What is legal and weakens the study."""
        found = []
        if len(self.seeds) < MIN_SEEDS:
            found.append(f"{len(self.seeds)} seeds: a single run decides nothing; at least {MIN_SEEDS} are needed")
        whole = [name for name, contrast in self.contrasts.items() if not contrast.is_controlled]
        if whole:
            found.append(f"comparisons of whole configurations, not effects of one axis: {', '.join(whole)}")
        return found


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
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise StudyError(str(path), [f"not YAML: {' '.join(str(error).split())}"]) from error
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
        lines = [f"{'.'.join(map(str, e['loc']))}={_short(e['input'])}: {e['msg']}" for e in error.errors()]
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
        configs: arm to resolved configuration, all of one scale and seed.

    Raises:
        StudyError: a contrast or a factor whose arms differ in other keys than the declared ones (the message names
            the keys), or do not differ at all; two arms that are one configuration.
    """
    problems = []
    for name, contrast in study.contrasts.items():
        problems += contrast_problems(name, contrast, configs)
    for name, factor in study.factors.items():
        for first, second in study.level_pairs(name):
            declared = Contrast(arms=[second, first], differ_in=[factor.differ_in])
            problems += contrast_problems(f"factor {name}", declared, configs)
    for first, second in itertools.combinations(study.arms, 2):
        if not _differing(configs[first], configs[second]):
            problems.append(f"arms {first} and {second} are the same configuration")
    if problems:
        raise StudyError(study.name, list(dict.fromkeys(problems)))


def contrast_problems(name: str, contrast: Contrast, configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why a contrast does not compare what it declares; empty when it does."""
    first, second = contrast.arms
    keys = _differing(configs[first], configs[second])
    declared = ", ".join(contrast.differ_in)
    if not keys:
        return [f"{name}: {first} and {second} do not differ; they should in {declared}"]
    extra = [key for key in keys if not any(_is_under(key, allowed) for allowed in contrast.differ_in)]
    if extra:
        return [
            f"{name}: not controlled: {first} and {second} also differ in {', '.join(extra)} (declared: {declared})"
        ]
    absent = [allowed for allowed in contrast.differ_in if not any(_is_under(key, allowed) for key in keys)]
    if absent:
        return [f"{name}: {first} and {second} do not differ in {', '.join(absent)}, which is declared"]
    return []


@dataclass(frozen=True)
class Cell:
    """An arm with a seed, and the run that it is."""

    arm: str
    seed: int
    run_id: str


@dataclass(frozen=True)
class Plan:
    """The cells of a study at one scale, and the study as it was when they were planned.

    Written before the first cell trains, so that hypothesis and decision rule stand before their result.
    """

    study: Study
    scale: str
    cells: tuple[Cell, ...]

    def missing(self, records: Iterable[Mapping[str, Any]]) -> list[Cell]:
        """Cells without a finished record."""
        finished = {record["run_id"] for record in records if is_finished(record)}
        return [cell for cell in self.cells if cell.run_id not in finished]

    def write(self, runs: Path | str) -> Path:
        """Write the plan into the folder of the runs; see `plan_path`."""
        path = plan_path(runs, self.study.name, self.scale)
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = [{"arm": cell.arm, "seed": cell.seed, "run_id": cell.run_id} for cell in self.cells]
        content = {"study": self.study.model_dump(), "scale": self.scale, "cells": cells}
        # Not `write_json`, which sorts keys: the order of arms, levels and contrasts is part of the study.
        return write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def plan_path(runs: Path | str, name: str, scale: str) -> Path:
    """Where the plan of a study stands: `<runs>/studies/<name>.<scale>.json`."""
    return Path(runs) / "studies" / f"{name}.{scale}.json"


def read_plans(runs: Path | str) -> list[Plan]:
    """The plans that stand in a folder of runs, ordered by name."""
    paths = sorted((Path(runs) / "studies").glob("*.json"))
    # Beside `<name>.<scale>.json` stands `<name>.<scale>.verdict.json`.
    return [read_plan(path) for path in paths if path.stem.count(".") == 1]


def read_plan(path: Path | str) -> Plan:
    """A plan as written.

    Raises:
        StudyError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        cells = tuple(Cell(**cell) for cell in content["cells"])
        return Plan(parse_study(content["study"]), content["scale"], cells)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(str(path), [f"not a plan: {error}"]) from error


_CONDITION = re.compile(
    r"(?P<negated>not )?"
    r"(?:(?P<word>positive|negative|undecided)|(?P<relation>[<>]|within) ?(?P<bound>[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?))"
)


def _arm_problems(study: Study) -> list[str]:
    problems = []
    known = ", ".join(study.arms)

    def check(where: str, arms: Iterable[str]) -> None:
        unknown = [arm for arm in arms if arm not in study.arms]
        if unknown:
            problems.append(f"{where}={unknown}: no such arm; {known} are there")

    check("reference", [study.reference])
    for name, contrast in study.contrasts.items():
        check(f"contrasts.{name}.arms", contrast.arms)
        if contrast.arms[0] == contrast.arms[1]:
            problems.append(f"contrasts.{name}.arms={contrast.arms}: two different arms are expected")
    for name, factor in study.factors.items():
        for level, arms in factor.levels.items():
            check(f"factors.{name}.levels.{level}", arms)
    if study.equal_accuracy:
        check("equal_accuracy", [*study.equal_accuracy.curve, study.equal_accuracy.reference])
    for scale, settings in study.scales.items():
        check(f"scales.{scale}.arms", settings.arms)
    if len(set(study.seeds)) != len(study.seeds):
        problems.append(f"seeds={study.seeds}: every seed once is expected")
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


def _decision_problems(study: Study) -> list[str]:
    effects = study.effect_names()
    known = "; ".join(effects)
    twice = sorted({name for name in effects if effects.count(name) > 1})
    problems = [f"effects named twice: {', '.join(twice)}; rename the contrasts"] if twice else []
    problems += [
        f"hypothesis.predicted.{name}: no such effect; there are: {known}"
        for name in study.hypothesis.predicted
        if name not in effects
    ]
    for i, rule in enumerate(study.decision.rules):
        if not rule.conditions:
            problems.append(f"decision.rules.{i}: at least one condition is expected under 'when' or 'when_any'")
        for name, condition in rule.conditions:
            if name not in effects:
                problems.append(f"decision.rules.{i}.{name}: no such effect; there are: {known}")
            try:
                parse_condition(condition)
            except ValueError as error:
                problems.append(f"decision.rules.{i}.{name}: {error}")
    return problems


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return differing_keys(comparable(first), comparable(second))


def _is_under(key: str, allowed: str) -> bool:
    return key == allowed or key.startswith(f"{allowed}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
