"""Runs of one cost: `match.key` names a number of the configuration, which is set so that the run costs what it should.

The cost is `match.share` of that of `match.to`: the dense model, a named method on the same backbone or, in a study, an
arm; or of `match.macs`. The resolved configuration has the number that was found, and under `match.solution` the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import ValidationError

from routing_lab.axes import AXES
from routing_lab.config.isoflop import tolerance_for
from routing_lab.config.nominal import RoutingAxes, UnknownCost, nominal_macs
from routing_lab.config.problems import ConfigError, Problem, alternatives
from routing_lab.config.schema import Config, MatchConfig, MatchSolution
from routing_lab.cost.isoflop import closest
from routing_lab.cost.macs import ModelShape, dense_macs

Value: TypeAlias = float | int | list[float] | list[int]

SIZES = ("depth", "width")
SHARES = 10_000
"""A number between 0 and 1 is searched in steps of one over this."""

Presets = Callable[[str], RoutingAxes]
"""A named method as it is on the backbone that is configured. Raises ConfigError."""


def with_match(sections: Mapping[str, Any], preset: Presets) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """The sections with the number that was found, problems that leave none, and a remark on what was found.

    sections: valid ones, all there. Those of a run that was matched give the same run again.
    """
    match: MatchConfig = sections["match"]
    if match.key is None:
        remarks = [] if match == MatchConfig() else ["match has no effect without match.key, which names the number"]
        return {**sections, "match": MatchConfig()}, [], remarks
    try:
        knob = _Knob(sections, match.key)
        macs = match.macs or _cost_of(sections, match.to, preset)
        target = match.share * macs
        value = knob.solved(target)
    except _Refused as refused:
        return dict(sections), [refused.problem], []
    cost = knob.cost(value)
    ratio = cost / target
    if abs(ratio - 1) > match.tolerance:
        message = (
            f"the closest, {match.key}={value}, costs {ratio:.4f} of the target {round(target):,} MACs; name a finer "
            f"key, or allow the gap with match.tolerance={tolerance_for(ratio):g}"
        )
        return dict(sections), [Problem.of("match.tolerance", match.tolerance, message)], []
    solution = MatchSolution(value=value, macs=round(cost), ratio=ratio)
    found = match.model_copy(update={"macs": float(macs), "solution": solution})
    return {**knob.turned(value), "match": found}, [], [told(found)]


def with_target(
    arm: str, overrides: Mapping[str, Sequence[str]], compose: Callable[[Sequence[str]], Config]
) -> list[str]:
    """The overrides of an arm of a study, with the cost of the arm that it is matched to, if it is to one.

    Args:
        arm: its name.
        overrides: of every arm.
        compose: the checked configuration that overrides describe.

    Raises:
        ConfigError: that arm is matched itself, has no nominal cost, or cannot be composed.
    """
    words = list(overrides[arm])
    to = given("match.to", words) or ""
    if to not in overrides or not given("match.key", words) or given("match.macs", words):
        return words
    if given("match.key", overrides[to]):
        raise ConfigError([Problem.of("match.to", to, "that arm is matched itself; name an arm that is not")])
    config = compose(overrides[to])
    try:
        return [*words, f"match.macs={nominal_macs(config, _shape(vars(config)))}"]
    except (_Refused, UnknownCost) as error:
        raise ConfigError([Problem.of("match.to", to, str(error))]) from None


def told(match: MatchConfig) -> str:
    """What was found, in words."""
    assert match.solution is not None
    assert match.macs is not None
    share = "" if match.share == 1 else f"{match.share:g} of "
    return (
        f"match.key={match.key}: at {match.solution.value} the run costs {match.solution.macs:,} MACs, "
        f"{match.solution.ratio:.4f} of {share}the {round(match.macs):,} of {match.to or 'match.macs'}"
    )


def given(key: str, overrides: Sequence[str]) -> str | None:
    """What the last of the overrides sets a key to; None also where that is null."""
    values = [text.removeprefix(f"{key}=") for text in overrides if text.startswith(f"{key}=")]
    return values[-1] if values and values[-1] != "null" else None


class _Refused(Exception):
    """A number that cannot be found, and why."""

    def __init__(self, key: str, value: Any, message: str) -> None:
        self.problem = Problem.of(key, value, message)
        super().__init__(message)


class _Knob:
    """The number at a dotted key: what the run costs at other values of it.

    A list with one entry a layer is a number too: the sum, spread evenly, of which the first layers take what is over.
    Raises _Refused where it is not one that a cost can be found by.
    """

    def __init__(self, sections: Mapping[str, Any], key: str) -> None:
        self._sections = sections
        self._key = key
        self._axis, _, self._name = key.partition(".")
        if self._axis not in (*AXES, "backbone"):
            axes = ", ".join(AXES)
            raise _Refused("match.key", key, f"must be backbone.depth, backbone.width, or a key of {axes}")
        section = sections[self._axis]
        self._kind = type(section)
        self._values = section.model_dump(by_alias=True)
        known = SIZES if self._axis == "backbone" else sorted(section.options)
        if self._name not in known:
            raise _Refused("match.key", key, f"no such key; {alternatives(self._name, known, 'known: ', most=12)}")
        at = self._values[self._name]
        self._entries = len(at) if isinstance(at, list) and self._name in section.per_layer else None
        numbers = at if self._entries else [at]
        self._is_share = all(isinstance(number, float) and 0 < number <= 1 for number in numbers)
        if not self._is_share and not all(type(number) is int for number in numbers):
            raise _Refused(key, at, "is not searched by match.key, which takes whole numbers and those in (0, 1]")
        self._tokens = _shape(sections).tokens

    def solved(self, target: float) -> Value:
        """The value that comes closest to a target cost, of equally close shares one with few digits."""
        low, high = self._range()
        if high is not None and self.cost(self._value(low)) == self.cost(self._value(high)):
            raise _Refused("match.key", self._key, "has no effect on the nominal cost; name a key that has")
        numbers = closest(lambda number: self.cost(self._value(number)), target, low, high)
        return self._value(_roundest(numbers) if self._is_share else numbers[0])

    def cost(self, value: Value) -> float:
        """Nominal cost at a value."""
        turned = self.turned(value)
        try:
            return nominal_macs(Config.model_construct(**turned), _shape(turned))
        except UnknownCost as error:
            raise _Refused("match.key", self._key, f"nothing finds it beforehand: {error}") from None
        except ValueError as error:
            raise _Refused("match.key", self._key, f"at {value}: {error}") from None

    def turned(self, value: Value) -> dict[str, Any]:
        """The sections with another value."""
        return {**self._sections, self._axis: self._kind.model_validate({**self._values, self._name: value})}

    def _range(self) -> tuple[int, int | None]:
        """The numbers that are searched: those of which `_value` makes values that can be run."""
        if self._key == "backbone.width":
            return 1, None
        if self._key == "backbone.depth":
            return next(
                depth for depth in range(1, self._values["depth"] + 1) if self._holds_placed_layers(depth)
            ), None
        entries = self._entries or 1
        if self._is_share:
            return entries, entries * SHARES - (not self._accepts(entries * SHARES))
        return int(not self._accepts(0)), entries * self._tokens

    def _value(self, number: int) -> Value:
        if self._key == "backbone.width":
            return number * int(self._values["heads"])
        if self._entries is None:
            return number / SHARES if self._is_share else number
        each, over = divmod(number, self._entries)
        spread = [each + (entry < over) for entry in range(self._entries)]
        return [part / SHARES for part in spread] if self._is_share else spread

    def _holds_placed_layers(self, depth: int) -> bool:
        try:
            self._sections["placement"].routed(depth)
        except ValueError:
            return False
        return True

    def _accepts(self, number: int) -> bool:
        try:
            self.turned(self._value(number))
        except ValidationError:
            return False
        return True


def _cost_of(sections: Mapping[str, Any], to: str | None, preset: Presets) -> float:
    """Nominal cost of what `match.to` names."""
    shape = _shape(sections)
    if to is None:
        raise _Refused("match.to", None, "name the dense model, a method or an arm of the study, or give match.macs")
    if to == "dense":
        return dense_macs(shape).total
    try:
        return nominal_macs(preset(to), shape)
    except ConfigError as error:
        raise _Refused("match.to", to, "; ".join(problem.message for problem in error.problems)) from None
    except UnknownCost as error:
        raise _Refused(
            "match.to", to, f"{error}; give match.macs, for instance cost.macs_measured of a record"
        ) from None


def _shape(sections: Mapping[str, Any]) -> ModelShape:
    backbone = sections["backbone"]
    classes = sections["data"].num_classes if backbone.is_sized else None
    if classes is None or (shape := backbone.shape(classes)) is None:
        message = "match needs a vision transformer of timm whose MLP and number of classes are known beforehand"
        raise _Refused("backbone", backbone.name, message)
    return shape


def _roundest(numbers: range) -> int:
    """Of neighbouring numbers the first of those with the most zeros at the end, up to three."""
    for step in (1000, 100, 10):
        if (first := -(-numbers[0] // step) * step) in numbers:
            return first
    return numbers[0]
