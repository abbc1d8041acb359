"""How checks across fields are run, and the check that comes first: that what stands behind a member exists.

A check is a generator over the sections of the configuration it names as parameters; it runs when these are valid in
themselves. One that looks at whatever sections there are names `sections`, a mapping of them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from routing_lab.axes import AXES
from routing_lab.axes.base import Member, UnknownTarget, locate
from routing_lab.config.problems import Problem, alternatives, one_line

Check = Callable[..., Iterator[Any]]


def run_checks(sections: Mapping[str, Any], checks: Iterable[Check]) -> Iterator[Any]:
    """What the checks yield whose sections are all there."""
    known = {**sections, "sections": sections}
    for check in checks:
        wanted = inspect.signature(check).parameters
        if all(name in known for name in wanted):
            yield from check(**{name: known[name] for name in wanted})


def outside_members(sections: Mapping[str, Any]) -> dict[str, list[Problem]]:
    """Axis -> refusals of its member from outside the package: there is no such class, or it takes other options."""
    members: dict[str, Member] = {axis: sections[axis] for axis in AXES if axis in sections}
    found = {
        axis: list(takes_options(axis, member.class_path, member.options, member.given))
        for axis, member in members.items()
        if not member.is_shipped
    }
    return {axis: problems for axis, problems in found.items() if problems}


def takes_options(key: str, path: str, options: Mapping[str, Any], given: frozenset[str]) -> Iterator[Problem]:
    """Refusals of a class or function that does not exist or does not take these options; the core passes `given`."""
    try:
        target = locate(path)
        parameters = dict(inspect.signature(target).parameters)
    except UnknownTarget as error:
        yield Problem.of(f"{key}._target_", path, one_line(str(error)))
        return
    except (TypeError, ValueError):
        yield Problem.of(f"{key}._target_", path, "is neither a class nor a function")
        return
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in given and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    for option, value in options.items():
        if option not in named and not open_ended:
            hint = alternatives(option, named, "it takes ") or "it takes no options"
            yield Problem.of(f"{key}.{option}", value, f"{path} has no such argument; {hint}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in options:
            yield Problem(f"{key}.{name}", None, f"is missing; {path} requires it")
