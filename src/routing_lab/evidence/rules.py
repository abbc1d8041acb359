"""What a decision rule may say of an effect, and whether the rules of a study leave anything open.

An effect is read from two intervals: the two-sided one (95 %), which gives it a sign, and the one of two one-sided
tests (90 %), which shows it to lie within a margin. Together they put it into one of `STATES`; a condition of a rule
is true of some states and of no interval that is wide enough to hold anything. So nothing is concluded from not
knowing: there is no `not` in the grammar.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal

State = Literal["superior", "equivalent", "inferior", "non-inferior", "non-superior", "inconclusive"]

STATES: tuple[State, ...] = ("superior", "equivalent", "inferior", "non-inferior", "non-superior", "inconclusive")
"""What an effect may be found to be; each excludes the others. The first three are decided."""

DECIDED: frozenset[str] = frozenset({"superior", "equivalent", "inferior"})

NEEDS_MARGIN: frozenset[str] = frozenset({"equivalent", "non-inferior", "non-superior"})
"""Words that mean nothing without a margin."""

CONDITIONS = (
    "superior, non-inferior, equivalent, non-superior, inferior, inconclusive, positive, negative, '> x', '< x' or "
    "'within x', or several of them joined by 'or'"
)
"""What a rule may say of an effect."""

MAX_PATTERNS = 400_000
"""Patterns of states up to which the rules of a study are enumerated."""


@dataclass(frozen=True)
class Evidence:
    """What is known of an effect; the ends may be arrays, of as many effects that are judged at once.

    Args:
        low, high: the two-sided interval at the level of the decision, relative to the value that means no effect.
        narrow_low, narrow_high: the interval of two one-sided tests at that level.
        margin: smallest effect of interest, NaN where none is stated.
        direction: 1 where higher is better, -1 where lower is.
        is_withheld: an adjustment denies the sign that the interval alone would grant.
    """

    low: Any
    high: Any
    narrow_low: Any
    narrow_high: Any
    margin: float = math.nan
    direction: int = 1
    is_withheld: bool = False

    @property
    def is_known(self) -> Any:
        """Whether there is an interval at all."""
        return self.low == self.low

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Word of a condition -> whether it is shown. All are False of an unknown interval."""
        m = self.margin
        # Both one-sided tests reject; or the effect is counted, and zero.
        equivalent = ((-m < self.narrow_low) & (self.narrow_high < m)) | ((self.low == 0) & (self.high == 0))
        may_have_sign = (equivalent | self.is_withheld) ^ True
        positive, negative = (self.low > 0) & may_have_sign, (self.high < 0) & may_have_sign
        superior, inferior = (positive, negative) if self.direction > 0 else (negative, positive)
        above, below = self.narrow_low > -m, self.narrow_high < m
        not_worse, not_better = (above, below) if self.direction > 0 else (below, above)
        non_inferior, non_superior = not_worse | superior | equivalent, not_better | inferior | equivalent
        return {
            "superior": superior,
            "equivalent": equivalent,
            "inferior": inferior,
            "non-inferior": non_inferior,
            "non-superior": non_superior,
            "inconclusive": ((non_inferior | non_superior) ^ True) & self.is_known,
            "positive": positive,
            "negative": negative,
        }

    @property
    def sign(self) -> int:
        """1 or -1 where the two-sided interval excludes zero and the effect is not shown to be negligible, else 0."""
        return int(self.facts["positive"]) - int(self.facts["negative"])

    @property
    def state(self) -> State:
        """The one state that the intervals show; better and worse are meant in the direction of the metric."""
        return next((state for state in STATES if self.facts[state]), "inconclusive")


@dataclass(frozen=True)
class Statement:
    """One alternative of a condition: a word, or a relation to a bound."""

    relation: str
    bound: float | None = None

    def holds(self, evidence: Evidence) -> Any:
        """Whether it is shown. `> x` and `< x` ask for the whole two-sided interval, `within x` for the narrow one."""
        if self.bound is None:
            return evidence.facts[self.relation]
        x = self.bound
        if self.relation == "within":
            return (-x < evidence.narrow_low) & (evidence.narrow_high < x)
        side = evidence.low > x if self.relation == ">" else evidence.high < x
        return side & (evidence.is_withheld ^ True)

    def is_refuted(self, evidence: Evidence) -> bool:
        """Whether the contrary is shown: the effect is something that the statement excludes."""
        if not evidence.is_known:
            return False
        if self.bound is not None:
            x = self.bound
            return bool(
                {
                    ">": evidence.high < x,
                    "<": evidence.low > x,
                    "within": evidence.low > x or evidence.high < -x,
                }[self.relation]
            )
        excluded = {
            "superior": {"equivalent", "inferior", "non-superior"},
            "inferior": {"equivalent", "superior", "non-inferior"},
            "equivalent": {"superior", "inferior"},
            "non-inferior": {"inferior"},
            "non-superior": {"superior"},
        }
        opposite = {"positive": "negative", "negative": "positive"}
        if self.relation in opposite:
            return bool(evidence.facts["equivalent"] or evidence.facts[opposite[self.relation]])
        return evidence.state in excluded.get(self.relation, set())

    def is_true_of(self, effect: float, margin: float, direction: int = 1) -> bool:
        """Whether the statement is true when the effect itself is known."""
        if self.bound is None:
            better = effect * direction
            return {
                "positive": effect > 0,
                "negative": effect < 0,
                "superior": better > 0,
                "inferior": better < 0,
                "equivalent": abs(effect) < margin or effect == 0,
                "non-inferior": better > -margin or better >= 0,
                "non-superior": better < margin or better <= 0,
                "inconclusive": False,
            }[self.relation]
        x = self.bound
        return {">": effect > x, "<": effect < x, "within": abs(effect) < x}[self.relation]


@dataclass(frozen=True)
class Condition:
    """A statement about an effect, or several of which one is enough."""

    alternatives: tuple[Statement, ...]

    def holds(self, evidence: Evidence) -> Any:
        """Whether one of the alternatives is shown."""
        return reduce(operator.or_, (statement.holds(evidence) for statement in self.alternatives))

    def is_true_of(self, effect: float, margin: float, direction: int = 1) -> bool:
        """Whether one of the alternatives is true when the effect itself is known."""
        return any(statement.is_true_of(effect, margin, direction) for statement in self.alternatives)

    def is_refuted(self, evidence: Evidence) -> bool:
        """Whether the contrary of every alternative is shown."""
        return all(statement.is_refuted(evidence) for statement in self.alternatives)

    @property
    def needs_margin(self) -> bool:
        """Whether it speaks of the study's margin."""
        return any(statement.relation in NEEDS_MARGIN for statement in self.alternatives)

    @property
    def is_undecided(self) -> bool:
        """Whether it is true of not knowing."""
        return any(statement.relation == "inconclusive" for statement in self.alternatives)

    @property
    def bounds(self) -> tuple[float, ...]:
        """Where an interval's ends change what holds, apart from zero and the margin."""
        found = []
        for statement in self.alternatives:
            if statement.bound is not None:
                found += [statement.bound] if statement.relation != "within" else [-statement.bound, statement.bound]
        return tuple(found)

    def relative_to(self, neutral: float) -> Condition:
        """The same condition with its bounds counted from the value that means no effect."""
        return Condition(
            tuple(Statement(s.relation, None if s.bound is None else s.bound - neutral) for s in self.alternatives)
        )

    def target(self, size: float, direction: int = 1) -> float:
        """A true effect of which the first alternative is true: `size` for a sign, none for equivalence."""
        first = self.alternatives[0]
        if first.bound is not None:
            return {">": first.bound + size, "<": first.bound - size, "within": 0.0}[first.relation]
        signs = {"positive": 1, "negative": -1, "superior": direction, "inferior": -direction}
        return size * signs.get(first.relation, 0)

    @property
    def open_side(self) -> int:
        """Direction in which the first alternative stays true of effects beyond `target`; 0 for none."""
        return {"non-inferior": 1, "non-superior": -1}.get(self.alternatives[0].relation, 0)


def parse_condition(text: str) -> Condition:
    """Read a condition of a rule. `undecided` is an older word for `inconclusive`, and `not undecided` for
    `positive or negative`.

    Raises:
        ValueError: `text` is none of `CONDITIONS`, or negates one.
    """
    parts = " ".join(text.split()).split(" or ")
    alternatives: list[Statement] = []
    for part in parts:
        if part == "not undecided":
            alternatives += [Statement("positive"), Statement("negative")]
            continue
        if part.startswith("not "):
            hint = _INSTEAD.get(part, "state what is shown")
            raise ValueError(f"{part!r} also holds where nothing is known, so it is no evidence; {hint}")
        match = _STATEMENT.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a condition; {CONDITIONS} is expected")
        if match["word"]:
            alternatives.append(Statement("inconclusive" if match["word"] == "undecided" else match["word"]))
        else:
            alternatives.append(Statement(match["relation"], float(match["bound"])))
    return Condition(tuple(alternatives))


@dataclass(frozen=True)
class Branch:
    """A rule as it is decided by: conditions that must all hold, and others of which one is enough.

    Bounds are counted from the value that means no effect, as `Evidence` is.
    """

    verdict: str
    says: str
    all_of: tuple[tuple[str, Condition], ...]
    any_of: tuple[tuple[str, Condition], ...] = ()

    @cached_property
    def conditions(self) -> tuple[tuple[str, Condition], ...]:
        """Every (effect, condition)."""
        return (*self.all_of, *self.any_of)

    def holds(self, evidence: Mapping[str, Evidence]) -> Any:
        """Whether the branch is met."""
        return self.is_met(lambda name, condition: condition.holds(evidence[name]))

    def is_true_of(self, effects: Mapping[str, float], margin: float, directions: Mapping[str, int]) -> bool:
        """Whether what the branch asks for is true when the effects themselves are known."""
        return bool(
            self.is_met(lambda name, condition: condition.is_true_of(effects[name], margin, directions.get(name, 1)))
        )

    def is_shown(self, truth: Mapping[str, Mapping[Condition, bool]]) -> bool:
        """Whether the branch is met when it is known of each effect which conditions hold."""
        return bool(self.is_met(lambda name, condition: truth[name][condition]))

    def conjunctions(self) -> list[tuple[tuple[str, Condition], ...]]:
        """The sets of conditions each of which is enough to meet the branch."""
        return [(*self.all_of, one) for one in self.any_of] or [self.all_of]

    def is_met(self, test: Callable[[str, Condition], Any]) -> Any:
        """Whether the branch is met when `test` says which of its conditions hold."""
        met = reduce(operator.and_, (test(*pair) for pair in self.all_of), True)
        if not self.any_of:
            return met
        return met & reduce(operator.or_, (test(*pair) for pair in self.any_of))


@dataclass(frozen=True)
class Family:
    """Over how many effects a verdict could be reached by luck.

    A rule that needs several effects at once (intersection-union) is met by luck only with the weakest of them, and
    needs no adjustment; ways to the same verdict that are open side by side do. `ways` says for each verdict the
    largest number of effects that must be hit to close every false way to it, over all that could be true; every test
    of the study is made at alpha over the largest of these numbers. What stands under `otherwise` claims nothing and
    is not counted.
    """

    ways: Mapping[str, int]

    @property
    def size(self) -> int:
        """What alpha is divided by."""
        return max(self.ways.values(), default=1)

    def text(self) -> str:
        """The family in words."""
        if self.size == 1:
            return "no adjustment: luck with one effect is needed for any verdict (intersection-union)"
        ways = ", ".join(f"{verdict} through {count} effect{'s' * (count > 1)}" for verdict, count in self.ways.items())
        return f"tests at alpha / {self.size}, as luck can lead to {ways}"


def family(
    branches: Sequence[Branch], margin: float, directions: Mapping[str, int], exact: frozenset[str] = frozenset()
) -> Family:
    """The family of a study's rules; effects in `exact` are counted, so that luck has no part in them."""
    return Family(
        {
            verdict: max(1, _ways([b for b in branches if b.verdict == verdict], margin, directions, exact))
            for verdict in dict.fromkeys(branch.verdict for branch in branches)
            if verdict != "inconclusive"
        }
    )


@dataclass(frozen=True)
class Patterns:
    """What the rules say of every pattern of what may be found.

    `verdicts` counts the patterns of decided effects by verdict (by `none` where no rule speaks); `open` are examples
    of the latter, `double` of patterns that meet several rules, each with the numbers of these rules.
    """

    verdicts: Mapping[str, int]
    open: tuple[str, ...]
    double: tuple[tuple[str, tuple[int, ...]], ...]
    num_open: int
    num_double: int
    decided: tuple[tuple[str, str], ...]


def enumerate_patterns(
    branches: Sequence[Branch], margin: float, neutral: Mapping[str, float], directions: Mapping[str, int]
) -> Patterns | None:
    """Try the rules on every pattern of evidence about the effects that they read; None where there are too many.

    Effects are taken as free of each other. A pattern is decided when every effect is, and must then meet a rule; what
    leaves an effect open may end inconclusive.
    """
    names = list(dict.fromkeys(name for branch in branches for name, _ in branch.conditions))
    kinds = [_kinds(name, branches, margin, neutral.get(name, 0.0), directions.get(name, 1)) for name in names]
    if math.prod(len(found) for found in kinds) > MAX_PATTERNS:
        return None
    verdicts: dict[str, int] = {}
    open_, double, decided = list[str](), list[tuple[str, tuple[int, ...]]](), list[tuple[str, str]]()
    num_open = num_double = 0
    for pattern in itertools.product(*kinds):
        truth = dict(zip(names, (kind.truth for kind in pattern), strict=True))
        met = tuple(number for number, branch in enumerate(branches) if branch.is_shown(truth))
        is_decided = all(kind.is_decided for kind in pattern)
        if not is_decided and len(met) < 2:
            continue
        text = ", ".join(f"{name} {kind.label}" for name, kind in zip(names, pattern, strict=True))
        if len(met) > 1:
            num_double += 1
            if len(double) < 3:
                double.append((text, met))
        if is_decided:
            verdict = branches[met[0]].verdict if met else "none"
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
            decided.append((text, verdict))
            if not met:
                num_open += 1
                if len(open_) < 3:
                    open_.append(text)
    return Patterns(verdicts, tuple(open_), tuple(double), num_open, num_double, tuple(decided))


@dataclass(frozen=True)
class _Kind:
    """Evidence that the conditions on an effect cannot tell apart."""

    label: str
    truth: Mapping[Condition, bool]
    is_decided: bool


def _kinds(name: str, branches: Sequence[Branch], margin: float, neutral: float, direction: int) -> list[_Kind]:
    conditions = [condition for branch in branches for found, condition in branch.conditions if found == name]
    bounds = sorted({bound for condition in conditions for bound in condition.bounds})
    # A ratio has no margin of its own: the study's is in the unit of its metric.
    own = margin if neutral == 0 else math.nan
    found: dict[tuple[tuple[bool, ...], bool], _Kind] = {}
    for evidence in _exemplars(own, bounds):
        shown = Evidence(*evidence, own, direction)
        truth = {condition: condition.holds(shown) for condition in conditions}
        one_side = all(bound <= shown.low or bound >= shown.high for bound in bounds)
        is_decided = (shown.state in DECIDED or bool(bounds)) and one_side
        label = shown.state if not bounds else f"in [{shown.low + neutral:.4g}, {shown.high + neutral:.4g}]"
        found.setdefault((tuple(truth.values()), is_decided), _Kind(label, truth, is_decided))
    return list(found.values())


def _exemplars(margin: float, bounds: Sequence[float]) -> Iterator[tuple[float, float, float, float]]:
    """(low, high, narrow_low, narrow_high) for every way in which an interval can lie among the cut points."""
    cuts = sorted({0.0, *bounds} | (set() if math.isnan(margin) else {-margin, margin}))
    width = max([abs(cut) for cut in cuts] + [1e-3])
    points = [cuts[0] - width, *((a + b) / 2 for a, b in itertools.pairwise(cuts)), cuts[-1] + width]
    # A hair within a region, so that intervals have a width.
    hair = 1e-6 * min([b - a for a, b in itertools.pairwise(cuts)] + [width])
    for low, narrow_low, narrow_high, high in itertools.combinations_with_replacement(points, 4):
        yield low - 2 * hair, high + 2 * hair, narrow_low - hair, narrow_high + hair


def _ways(branches: Sequence[Branch], margin: float, directions: Mapping[str, int], exact: frozenset[str]) -> int:
    """Largest number of effects, over all that could be true, of which one has to be taken for something else for any
    of the branches to be met falsely.
    """
    conjunctions = [claim for branch in branches for claim in branch.conjunctions()]
    names = list(dict.fromkeys(name for claim in conjunctions for name, _ in claim if name not in exact))
    truths = [_truths(name, conjunctions, margin, directions.get(name, 1)) for name in names]
    if math.prod(len(found) for found in truths) > MAX_PATTERNS:
        return len(names)
    most = 0
    for truth in itertools.product(*truths):
        false = dict(zip(names, truth, strict=True))
        ways = {frozenset(n for n, condition in claim if condition in false.get(n, ())) for claim in conjunctions}
        # A claim without a false part is true, and so is the verdict that it leads to.
        if frozenset() not in ways:
            most = max(most, _smallest_cover(ways))
    return most


def _truths(
    name: str, conjunctions: Sequence[Sequence[tuple[str, Condition]]], margin: float, direction: int
) -> set[frozenset[Condition]]:
    """The sets of conditions on an effect that can be false together."""
    conditions = [condition for claim in conjunctions for found, condition in claim if found == name]
    own = 1.0 if math.isnan(margin) else margin
    values = {factor * own for factor in (-2, -1, -0.5, 0, 0.5, 1, 2)}
    values |= {bound + step * own for condition in conditions for bound in condition.bounds for step in (-0.5, 0, 0.5)}
    return {frozenset(c for c in conditions if not c.is_true_of(value, margin, direction)) for value in values}


def _smallest_cover(ways: set[frozenset[str]]) -> int:
    """Size of the smallest set of effects that has one of each way."""
    effects = sorted(set().union(*ways))
    return next(
        size
        for size in range(len(effects) + 1)
        if any(all(way & set(chosen) for way in ways) for chosen in itertools.combinations(effects, size))
    )


_STATEMENT = re.compile(
    r"(?P<word>superior|inferior|equivalent|non-inferior|non-superior|inconclusive|positive|negative|undecided)"
    r"|(?P<relation>[<>]|within) ?(?P<bound>[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
)
_INSTEAD = {
    "not negative": "write 'non-inferior', which needs a margin",
    "not inferior": "write 'non-inferior', which needs a margin",
    "not positive": "write 'non-superior', which needs a margin",
    "not superior": "write 'non-superior', which needs a margin",
}
