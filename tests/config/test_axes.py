"""Every shipped member states its keys, defaults and facts once, and its YAML file, class and constructor agree."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import routing_lab
from routing_lab.axes import AXES, LOSSES, MEMBERS, OUTSIDE
from routing_lab.axes.base import Targeted, locate
from routing_lab.config import conf_path

SHIPPED = [(axis, name) for axis, members in MEMBERS.items() for name in members]
ALL = [*SHIPPED, *(("losses", name) for name in LOSSES)]


def member_of(axis: str, name: str) -> type[Targeted]:
    return (LOSSES if axis == "losses" else MEMBERS[axis])[name]


def file_of(axis: str, name: str) -> dict[str, Any]:
    content = yaml.safe_load((conf_path() / axis / f"{name}.yaml").read_text())
    return content[name] if axis == "losses" else content


def shared(axis: str) -> dict[str, Any]:
    """Keys that every member of an axis has, where the configuration gives them their defaults."""
    return yaml.safe_load((conf_path() / "train.yaml").read_text()).get(axis) or {}


def defaults_of(member: type[Targeted]) -> dict[str, Any]:
    return {
        field.alias or key: field.get_default(call_default_factory=False)
        for key, field in member.model_fields.items()
        if not field.is_required()
    }


def test_an_axis_has_a_file_for_every_member_and_for_no_other() -> None:
    for axis in AXES:
        assert {path.stem for path in (conf_path() / axis).glob("*.yaml")} == set(MEMBERS[axis]), axis
    assert {path.stem for path in (conf_path() / "losses").glob("*.yaml")} == set(LOSSES)
    assert set(OUTSIDE) == set(AXES)


@pytest.mark.parametrize(("axis", "name"), ALL)
def test_the_file_states_every_key_at_its_default(axis: str, name: str) -> None:
    member, file = member_of(axis, name), file_of(axis, name)
    known = {field.alias or key for key, field in member.model_fields.items()}
    assert known - set(shared(axis)) <= set(file) <= known
    required = {field.alias or key for key, field in member.model_fields.items() if field.is_required()}
    stated = {key: value for key, value in (shared(axis) | file).items() if key not in required}
    assert stated == defaults_of(member)
    assert required <= {key for key, value in file.items() if value == "???"}


@pytest.mark.parametrize(("axis", "name"), ALL)
def test_options_and_defaults_are_those_of_the_class_behind_it(axis: str, name: str) -> None:
    member = member_of(axis, name)
    options = {key for key in member.model_fields if key not in member.not_options}
    found = constructor(locate(member.shipped_path()))
    assert options == set(found) - member.given - ({"weight"} if name == "l1_target" else set())
    known = defaults_of(member)
    for key in options & set(known):
        if axis != "placement" or known[key] is not None:
            default = found[key].default
            assert (list(default) if isinstance(default, tuple) else default) == known[key], key


@pytest.mark.parametrize(("axis", "name"), [pair for pair in SHIPPED if pair[0] != "placement"])
def test_facts_are_the_members_own(axis: str, name: str) -> None:
    assert locate(member_of(axis, name).shipped_path()).traits is MEMBERS[axis][name].facts  # type: ignore[attr-defined]


def constructor(target: Any) -> Mapping[str, inspect.Parameter]:
    """Arguments of a function, or of a class and those base classes that its constructor passes the rest on to."""
    functions = (
        [target] if inspect.isfunction(target) else [c.__init__ for c in target.__mro__ if "__init__" in vars(c)]
    )
    found: dict[str, inspect.Parameter] = {}
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


def sources() -> Iterator[tuple[str, ast.Module]]:
    root = Path(routing_lab.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), ast.parse(path.read_text())


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, module in sources():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_nobody_asks_a_member_for_its_class_or_its_name() -> None:
    """Outside the axes a member is asked for facts, so that one from outside the package is treated alike."""
    modules = dict(sources())
    configs = {
        node.name
        for path, module in modules.items()
        for node in ast.walk(module)
        if path.startswith("axes/") and isinstance(node, ast.ClassDef)
    }
    names = {name for members in MEMBERS.values() for name in members}
    asked = []
    for path, module in modules.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                kinds = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                asked += [f"{path}:{node.lineno} {kind}" for kind in kinds & configs]
            if isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "name":
                values = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                asked += [f"{path}:{node.lineno} {value}" for value in values if value in names]
    assert asked == []
