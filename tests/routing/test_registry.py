"""Every registered member states its facts once, and its YAML file, class and options agree."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
from omegaconf import OmegaConf

from routing_lab.config import conf_path
from routing_lab.config.schema import MEMBER_MODELS, OUTSIDE_MODELS
from routing_lab.routing import members

REGISTRIES: dict[str, Any] = {
    "router": members.ROUTERS,
    "scaling": members.SCALINGS,
    "capacity": members.CAPACITIES,
    "placement": members.PLACEMENTS,
    "bypass": members.BYPASSES,
    "visibility": members.VISIBILITIES,
}
MEMBERS = [(axis, name) for axis, registry in REGISTRIES.items() for name in registry]
GIVEN_BY_THE_CORE = {"self", "spec", "boundary", "scale", "depth"}


def test_axes_and_names_are_the_same_everywhere() -> None:
    assert set(REGISTRIES) == set(members.AXES) == set(members.TARGETS)
    for axis, registry in REGISTRIES.items():
        files = {path.stem for path in (conf_path() / axis).glob("*.yaml")}
        assert set(registry) == set(members.TARGETS[axis]) == set(MEMBER_MODELS[axis]) == files, axis


@pytest.mark.parametrize(("axis", "name"), MEMBERS)
def test_traits_are_the_registrys_own(axis: str, name: str) -> None:
    member = _locate(members.TARGETS[axis][name])
    if axis == "placement":
        assert member is members.PLACEMENTS[name]
    else:
        assert member.traits is REGISTRIES[axis][name]


@pytest.mark.parametrize(("axis", "name"), MEMBERS)
def test_yaml_names_class_and_its_options(axis: str, name: str) -> None:
    file = OmegaConf.load(conf_path() / axis / f"{name}.yaml")
    assert file.name == name
    assert file._target_ == members.TARGETS[axis][name]
    shared = OmegaConf.load(conf_path() / "train.yaml").get(axis, {})
    configured = {str(key) for key in [*file, *shared]} - {"name", "_target_"} - set(OUTSIDE_MODELS[axis].not_options)
    assert configured == _options(_locate(members.TARGETS[axis][name]))


def _options(target: Any) -> set[str]:
    """Arguments of a function, or of a class and those base classes that its constructor passes the rest on to."""
    functions = (
        [target] if inspect.isfunction(target) else [c.__init__ for c in target.__mro__ if "__init__" in vars(c)]
    )
    found: set[str] = set()
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        found |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found - GIVEN_BY_THE_CORE


def _locate(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize(("axis", "name"), MEMBERS)
def test_defaults_of_yaml_and_signature_agree(axis: str, name: str) -> None:
    file = OmegaConf.to_container(OmegaConf.load(conf_path() / axis / f"{name}.yaml"))
    assert isinstance(file, dict)
    target = _locate(members.TARGETS[axis][name])
    for option, default in _defaults(target).items():
        if option in file:
            assert _plain(file[option]) == _plain(default), option


def _defaults(target: Any) -> dict[str, Any]:
    functions = (
        [target] if inspect.isfunction(target) else [c.__init__ for c in target.__mro__ if "__init__" in vars(c)]
    )
    found: dict[str, Any] = {}
    for function in functions:
        for option, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not parameter.empty:
                found.setdefault(option, parameter.default)
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
