"""What is wrong with a configuration, in words: a line a problem, with key, value and what is accepted."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from routing_lab.axes.base import NAME, NAME_IN_WORDS

_ABSENT = object()


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. key: dotted config key; value: what was given, as text, None where nothing was."""

    key: str
    value: str | None
    message: str

    def __str__(self) -> str:
        given = self.key if self.value is None else f"{self.key} = {self.value}"
        return printable(f"{given}: {self.message}")

    @classmethod
    def of(cls, key: str, value: Any, message: str) -> Problem:
        """A problem with a plain value."""
        return cls(key, shown(value), message)

    @classmethod
    def from_error(cls, error: Exception, key: str) -> Problem:
        """A problem from an error whose text names its key itself, `key = value: message`; else it belongs to `key`."""
        text = str(error).strip()
        named = re.match(r"([\w.\[\]]+) ?= ?(.*?): (.+)", text, flags=re.DOTALL)
        return cls(named[1], named[2], one_line(named[3])) if named else cls(key, None, one_line(text))


class ConfigError(ValueError):
    """A configuration that cannot be run. problems: everything that is wrong with it; as text, one line a problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        return ConfigError, (self.problems,)


def shown(value: Any) -> str:
    """A value as a person would write it on the command line."""
    if isinstance(value, str):
        return value or "''"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(text: str) -> str:
    """Text without line breaks, repeated blanks and terminal escapes."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """Text whose unprintable characters, which could steer a terminal, are written out as in Python."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def lines_of(error: Exception) -> str:
    """What an error says, line by line, without characters that could steer a terminal."""
    return "\n".join(printable(line) for line in str(error).splitlines())


def alternatives(given: str, known: Iterable[str], what: str = "", most: int | None = None) -> str:
    """`did you mean ...?` where something known is close, and what there is unless that is more than `most`."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    is_listed = names and not (close and most is not None and len(names) > most)
    return f"{hint}{what}{', '.join(names)}" if is_listed else hint.strip()


def from_validation(
    error: ValidationError, model: type[BaseModel], prefix: str, data: Mapping[str, Any]
) -> list[Problem]:
    """A pydantic error as problems, one for each key."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        problem = _from_detail(detail, model, prefix, data)
        problems.setdefault(problem.key, problem)
    # Of a union's alternatives, the one that points into a list says more.
    return [problem for key, problem in problems.items() if not any(other.startswith(f"{key}[") for other in problems)]


def accepted(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a type accepts, in words: `a number greater than 0 and at most 1, or null`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *more = get_args(annotation)
        return accepted(base, [*metadata, *_flat(more)])
    if origin in (Union, UnionType):
        choices = [accepted(part, metadata) for part in get_args(annotation) if part is not NoneType]
        choices += ["null"] if NoneType in get_args(annotation) else []
        return ", or ".join(_shortened(choices))
    if origin is Literal:
        values = [shown(value) for value in get_args(annotation)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    limits = _limits(metadata)
    if origin is list:
        return f"a list{limits}, each entry {accepted(get_args(annotation)[0])}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
    return words.get(annotation, "another type of value") + limits


def accepted_by(field: FieldInfo) -> str:
    """What a field accepts, in words."""
    return accepted(field.annotation, _flat(field.metadata))


def parts_of(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a tuple of the type itself for any other type."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _from_detail(detail: Mapping[str, Any], model: type[BaseModel], prefix: str, data: Mapping[str, Any]) -> Problem:
    name, *rest = detail["loc"] or ("",)
    key = f"{prefix}.{name}".strip(".")
    fields = {info.alias or field: info for field, info in model.model_fields.items()}
    kind = detail["type"]
    if kind == "extra_forbidden":
        given = ({"name"} & set(data) and f"{prefix}={data['name']} has no such key") or "no such key"
        return Problem.of(key, detail["input"], f"{given}; {alternatives(str(name), fields, 'known: ', most=12)}")
    if kind == "missing":
        return Problem(key, None, f"is missing; must be {accepted_by(fields[str(name)])}")
    value = data.get(str(name), _ABSENT)
    if kind == "value_error":
        error = detail["ctx"]["error"]
        return Problem.from_error(error, key) if value is _ABSENT else Problem.of(key, value, one_line(str(error)))
    index = next((part for part in rest if isinstance(part, int)), None)
    if isinstance(value, list) and index is not None:
        key, value = f"{key}[{index}]", value[index]
        inner = next(part for part in parts_of(fields[str(name)].annotation) if get_origin(part) is list)
        return Problem.of(key, value, f"must be {accepted(get_args(inner)[0])}")
    if str(name) not in fields or value is _ABSENT:
        return Problem.of(key, detail["input"], one_line(detail["msg"]))
    return Problem.of(key, value, f"must be {accepted_by(fields[str(name)])}")


def _shortened(choices: list[str]) -> list[str]:
    """`a number at least 0`, `a list, each entry a number at least 0` as `a number at least 0`, `a list of such`."""
    repeated = {f"a list, each entry {choice}": "a list of such" for choice in choices}
    return [repeated.get(choice, choice) for choice in choices]


def _flat(metadata: Iterable[Any]) -> list[Any]:
    return [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _limits(metadata: Sequence[Any]) -> str:
    words = []
    for item in metadata:
        match item:
            case annotated_types.Gt(gt=bound):
                words.append(f"greater than {bound}")
            case annotated_types.Ge(ge=bound):
                words.append(f"at least {bound}")
            case annotated_types.Lt(lt=bound):
                words.append(f"less than {bound}")
            case annotated_types.Le(le=bound):
                words.append(f"at most {bound}")
            case annotated_types.MinLen(min_length=1):
                words.append("that is not empty")
            case annotated_types.MinLen(min_length=length):
                words.append(f"of at least {length} entries")
            case annotated_types.MaxLen(max_length=length):
                words.append(f"of at most {length} entries")
            case _ if getattr(item, "pattern", None) == NAME:
                words.append(f"of {NAME_IN_WORDS}")
    return " " + " and ".join(words) if words else ""
