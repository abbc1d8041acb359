"""From overrides, or from a composed configuration, to a checked one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from routing_lab.axes import LOSSES, MEMBERS, OUTSIDE
from routing_lab.axes.base import Targeted
from routing_lab.axes.facts import BackboneFacts
from routing_lab.axes.losses import LossConfig, OutsideLossConfig
from routing_lab.config.checks import outside_members, run_checks
from routing_lab.config.compose import Composer, plain
from routing_lab.config.isoflop import with_baseline
from routing_lab.config.match import with_match
from routing_lab.config.problems import ConfigError, Problem, accepted_by, alternatives, from_validation, parts_of
from routing_lab.config.refusals import OF_THIS_MACHINE, REFUSALS
from routing_lab.config.remarks import ABOUT_FILES, REMARKS
from routing_lab.config.schema import Config
from routing_lab.config.shapes import complete_shape
from routing_lab.data.schema import DATA_SETS
from routing_lab.keys import LATER, is_below

Model = TypeVar("Model", bound=BaseModel)

ABOUT_TRAINING = ("losses", "task", "data", "init", "train")
"""Sections that are not looked at when only the routing of a given model is configured."""


@dataclass(frozen=True)
class Loaded:
    """A checked configuration.

    config: typed, for attribute access. resolved: the same as plain values, whose hash is the run's identity.
    warnings: remarks about combinations that run but mean less than they seem to. absent: files that it reads and that
    are not on this machine, where that was no reason to refuse it.
    """

    config: Config
    resolved: dict[str, Any]
    warnings: list[str]
    absent: tuple[Problem, ...] = ()


def load(
    overrides: Sequence[str] = (), config_dir: str | Path | None = None, facts: BackboneFacts | None = None
) -> Loaded:
    """Compose and check a configuration.

    Args:
        overrides: as on the command line, `["router=amod", "capacity.fraction=0.25"]`.
        config_dir: folder with further members, as `--config-dir`.
        facts: check the routing for a backbone with these facts instead of the configured one, and nothing that
            concerns training.

    Raises:
        ConfigError: with every problem found.
    """
    return check_overrides(Composer(config_dir), overrides, facts)


def check_overrides(
    composer: Composer, overrides: Sequence[str], facts: BackboneFacts | None = None, *, here: bool = True
) -> Loaded:
    """As `load`, with a composer that is there already; here: it is to run here, so that its files must be there."""
    config, problems = composer.compose(overrides)
    data = plain(config)[0]
    given = {text.partition("=")[0].lstrip("+") for text in overrides}
    ignored = [key for key in options_of_other_members(data) if key in given]
    for axis, _, key in (path.partition(".") for path in ignored):
        member = data[axis]["name"]
        hint = alternatives(key, MEMBERS[axis][member].model_fields, "known: ", most=12)
        problems.append(Problem.of(f"{axis}.{key}", data[axis][key], f"{axis}={member} has no such key; {hint}"))
    return _check(config, facts, problems, here)


def options_of_other_members(data: Mapping[str, Any]) -> list[str]:
    """Keys that a method sets for the member it chooses, while another member of that axis was chosen over it.

    A method is a starting point: `method=evit bypass=drop` leaves the method's `bypass.weights` without a use.
    """
    if data.get("method") is None:
        return []
    keys = []
    for axis, models in MEMBERS.items():
        node = data.get(axis)
        if not isinstance(node, Mapping) or node.get("name") not in models:
            continue
        own = _keys(models[node["name"]])
        known = set().union(*(_keys(model) for model in models.values()))
        keys += [f"{axis}.{key}" for key in node if key in known - own]
    return keys


def check(config: DictConfig | Mapping[str, Any]) -> Loaded:
    """Check a composed configuration, for instance the one a Hydra job is given or one read from `config.yaml`.

    Raises ConfigError with every problem found.
    """
    return _check(config if isinstance(config, DictConfig) else OmegaConf.create(dict(config)), None, [])


def _check(composed: DictConfig, facts: BackboneFacts | None, problems: list[Problem], here: bool = True) -> Loaded:
    composed = composed.copy()
    with open_dict(composed):
        composed.pop("hydra", None)
        shapeless = complete_shape(composed)
    data, unresolved = plain(composed)
    for axis, _, key in (path.partition(".") for path in options_of_other_members(data)):
        data[axis] = {name: value for name, value in data[axis].items() if name != key}
    if data.get("method") is not None and isinstance(data.get("losses"), Mapping):
        # A method's coefficient for a loss that was taken out of its list.
        data["losses"] = {name: keys for name, keys in data["losses"].items() if "_target_" in keys}
    sections, invalid = _validate(data)
    problems = [*problems, *shapeless]
    covered = {"backbone", "data"} if shapeless else set()
    data_set = str(data["data"].get("name")) if isinstance(data.get("data"), Mapping) else ""
    if "backbone" in sections and data_set in DATA_SETS:
        modality = "text" if sections["backbone"].facts().causal else "images"
        if DATA_SETS[data_set].modality != modality:
            covered.add("data")  # follow a shape that this backbone does not have
    for problem in [*unresolved, *invalid]:
        if not is_below(problem.key, covered | {known.key for known in problems}):
            problems.append(problem)
    for axis, refused in outside_members(sections).items():
        problems += refused
        del sections[axis]
    seen = dict(sections)
    if facts is not None:
        seen = {name: section for name, section in sections.items() if name not in (*ABOUT_TRAINING, "backbone")}
        seen["facts"] = facts
    else:
        seen["data_set"] = data_set
        if "backbone" in sections:
            seen["facts"] = sections["backbone"].facts()
    problems += run_checks(seen, REFUSALS if here else [check for check in REFUSALS if check not in OF_THIS_MACHINE])
    absent = () if here else tuple(run_checks(seen, OF_THIS_MACHINE))
    remarks: list[str] = []
    if not problems and facts is None:
        sections, problems, remarks = with_match(sections, partial(_preset, seen["facts"]))
        if sections["match"].solution is not None:  # what was found is checked as if it had been given
            seen = {**seen, **sections, "facts": sections["backbone"].facts()}
            problems = list(run_checks(seen, [check for check in REFUSALS if check not in OF_THIS_MACHINE]))
    if not problems and facts is None:
        sections, problems, found = with_baseline(sections)
        remarks += found
        seen = {**seen, **sections}
    elif facts is not None:
        problems += [
            Problem.of(key, value, "sizes a model to build; this one is given")
            for key, value in _sizes(sections).items()
        ]
    if problems:
        raise ConfigError(problems)
    config = Config.model_construct(**sections)
    remarks += run_checks(seen, [check for check in REMARKS if not (absent and check in ABOUT_FILES)])
    return Loaded(config, config.model_dump(mode="json", by_alias=True), remarks, absent)


def _preset(facts: BackboneFacts, name: str) -> Config:
    """A named method on a backbone with these facts. Raises ConfigError."""
    return load([f"method={name}"], facts=facts).config


def _sizes(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say how large a model is to be built for a cost, where they do."""
    sizes = {}
    if "isoflop" in sections and sections["isoflop"].by != "none":
        sizes["isoflop.by"] = sections["isoflop"].by
    if "match" in sections and sections["match"].key is not None:
        sizes["match.key"] = sections["match"].key
    return sizes


def _validate(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The sections that are valid in themselves, typed, and what is wrong with the others."""
    sections: dict[str, Any] = {}
    problems = [
        Problem.of(key, value, f"no such key; {alternatives(key, Config.model_fields, 'known: ', most=12)}")
        for key, value in data.items()
        if key not in Config.model_fields
    ]
    for name, field in Config.model_fields.items():
        if name not in data and name in LATER:
            data = {**data, name: LATER[name]}
        if name not in data:
            problems.append(Problem(name, None, "is missing"))
            continue
        try:
            sections[name] = _losses(data[name]) if name == "losses" else _section(name, field, data[name])
        except ConfigError as error:
            problems += error.problems
    return sections, problems


def _section(name: str, field: FieldInfo, value: Any) -> Any:
    models = [part for part in parts_of(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    if not models:
        annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        try:
            return adapter.validate_python(value, strict=True)
        except ValidationError:
            raise ConfigError([Problem.of(name, value, f"must be {accepted_by(field)}")]) from None
    if not isinstance(value, Mapping):
        raise ConfigError([Problem.of(name, value, "must be a group of keys")])
    model = _member_model(name, value) if name in MEMBERS else _tagged_model(name, models, field.discriminator, value)
    return _valid(model, name, _completed(name, model, value))


def _valid(model: type[Model], prefix: str, value: Mapping[str, Any]) -> Model:
    """A section as its model. A member's defaults are for Python: a configuration states every key."""
    problems = []
    if issubclass(model, Targeted):
        absent = {key: field for key, field in _fields(model).items() if key not in value and not field.is_required()}
        problems = [
            Problem(f"{prefix}.{key}", None, f"is missing; must be {accepted_by(f)}") for key, f in absent.items()
        ]
    try:
        found = model.model_validate(value)
    except ValidationError as error:
        problems += from_validation(error, model, prefix, value)
    if problems:
        raise ConfigError(problems)
    return found


def _completed(name: str, model: type[BaseModel], value: Mapping[str, Any]) -> dict[str, Any]:
    """A section with the keys that the version which wrote it did not have yet, at the value that changes nothing."""
    later = {path.partition(".")[2]: neutral for path, neutral in LATER.items() if path.startswith(f"{name}.")}
    return {key: neutral for key, neutral in later.items() if key in _keys(model)} | dict(value)


def _losses(value: Any) -> dict[str, LossConfig]:
    if not isinstance(value, Mapping):
        raise ConfigError([Problem.of("losses", value, "must be a group of losses, each with its keys")])
    found: dict[str, LossConfig] = {}
    problems: list[Problem] = []
    for name, keys in value.items():
        model = LOSSES.get(name, OutsideLossConfig)
        if not isinstance(keys, Mapping) or "_target_" not in keys:
            problems.append(
                Problem.of(
                    f"losses.{name}",
                    keys,
                    f"must be chosen first, losses=[{name}]; {alternatives(name, LOSSES, 'there are ')}",
                )
            )
            continue
        try:
            found[name] = _valid(model, f"losses.{name}", keys)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def _member_model(axis: str, value: Mapping[str, Any]) -> type[BaseModel]:
    member = value.get("name")
    if not isinstance(member, str):
        raise ConfigError([Problem.of(f"{axis}.name", member, f"a member of {axis} has a name and a _target_")])
    return MEMBERS[axis].get(member, OUTSIDE[axis])


def _tagged_model(name: str, models: list[type[BaseModel]], tag: Any, value: Mapping[str, Any]) -> type[BaseModel]:
    """The model whose literal tag the value carries, out of a discriminated union."""
    if len(models) == 1:
        return models[0]
    tags = {known: model for model in models for known in get_args(model.model_fields[tag].annotation)}
    given = value.get(tag)
    if given not in tags:
        raise ConfigError([Problem.of(f"{name}.{tag}", given, alternatives(str(given), tags, "must be one of "))])
    return tags[given]


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _keys(model: type[BaseModel]) -> set[str]:
    return set(_fields(model))
