"""What every member of an axis states, shipped or from outside the package.

A shipped member is one class: its keys with their types, ranges and defaults, its facts, the class or function behind
it, what it refuses alone on a backbone, its remarks, and what its cost takes. Keys that all members of an axis share
without being options of the class behind them (`router.corrupt`, `placement.sublayer`, ...) are fields of the axis'
base class. A member from outside the package is validated by the `Outside*` class of its axis: shared keys here, its
own by its constructor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from routing_lab.axes.facts import BackboneFacts

if TYPE_CHECKING:
    from routing_lab.axes.bypasses import BypassConfig
    from routing_lab.axes.routers import RouterConfig

Fraction: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Index: TypeAlias = Annotated[int, Field(ge=0)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**64)]

NAME = r"^[^\W.=+-][\w.=+-]{0,99}$"
"""What a name of a run, an arm or a member is: it goes into file names, tables and overrides as it is."""

NAME_IN_WORDS = "at most 100 letters, digits and . _ = + -, the first a letter, a digit or _"

Name: TypeAlias = Annotated[str, Field(pattern=NAME)]
Refusal: TypeAlias = tuple[str, Any, str]
"""Config key, its value, and why it cannot be run."""

Stated = TypeVar("Stated")
Kind = TypeVar("Kind", bound="Member")


class UnknownTarget(ValueError):
    """`_target_` names nothing that can be imported."""


def locate(path: str) -> Any:
    """The class or function at a dotted path. Raises UnknownTarget, saying why, when it cannot be imported."""
    module, _, name = path.rpartition(".")
    if not module:
        raise UnknownTarget("must be a dotted path such as my_module.MyRouter")
    try:
        return getattr(import_module(module), name)
    except AttributeError:
        raise UnknownTarget(f"module {module} has no {name}") from None
    except Exception as error:  # importing a user's module may raise anything
        raise UnknownTarget(f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}") from None


class Strict(BaseModel):
    """Refuses unknown keys, silent conversions and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Targeted(Strict):
    """What stands for a class or a function: its path, and the options that are given to it.

    not_options: keys that are not. given: arguments that the core adds. per_layer: keys that may be lists with one
    value per routed layer.
    """

    not_options: ClassVar[tuple[str, ...]] = ("class_path",)
    given: ClassVar[frozenset[str]] = frozenset({"self"})
    per_layer: ClassVar[tuple[str, ...]] = ()

    class_path: str = Field(alias="_target_", min_length=1)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the class or function at `class_path`."""
        own = {key: getattr(self, key) for key in type(self).model_fields if key not in self.not_options}
        return own | dict(self.model_extra or {})

    @classmethod
    def shipped_path(cls) -> Any:
        """The class path that ships for this member; None: it is from outside the package."""
        field = cls.model_fields["class_path"]
        return None if field.is_required() else field.default

    @property
    def is_shipped(self) -> bool:
        """Whether what stands behind it is what this class describes."""
        return self.class_path == self.shipped_path()

    @property
    def states_facts(self) -> bool:
        """Whether its facts are stated and not assumed: it ships, or its class has `traits` of its own.

        Raises UnknownTarget.
        """
        if self.is_shipped:
            return True
        kinds = getattr(locate(self.class_path), "__mro__", ())
        return any("traits" in vars(kind) for kind in kinds if not kind.__module__.startswith("routing_lab."))

    def stated(self, facts: Stated) -> Stated:
        """`facts` of a shipped member; of another the `traits` of its own class, or `facts` where it states none.

        Raises UnknownTarget.
        """
        return facts if self.is_shipped else getattr(locate(self.class_path), "traits", facts)


class Member(Targeted):
    """A member of an axis."""

    not_options: ClassVar[tuple[str, ...]] = ("name", *Targeted.not_options)

    name: Name

    def refusals(self, facts: BackboneFacts) -> Iterator[Refusal]:
        """What cannot be run on a backbone with these facts, whatever the other axes are."""
        yield from ()

    def remarks(self, beside: Beside) -> Iterator[str]:
        """Values of its own that were chosen and mean less than they seem to."""
        yield from ()


class Beside(Protocol):
    """What a member stands beside in a configuration.

    facts: of the backbone. epochs: of training; None where nothing is trained here.
    """

    @property
    def router(self) -> RouterConfig: ...
    @property
    def bypass(self) -> BypassConfig: ...
    @property
    def facts(self) -> BackboneFacts: ...
    @property
    def epochs(self) -> int | None: ...


class Outside(BaseModel):
    """Mixed into the base class of an axis: options are whatever the class from outside the package accepts."""

    model_config = ConfigDict(extra="allow")


def shipped(path: str) -> Any:
    """The field `class_path` of a shipped member."""
    return Field(default=path, alias="_target_", min_length=1)


def registry(*members: type[Kind]) -> Mapping[str, type[Kind]]:
    """Shipped members by their names."""
    return MappingProxyType({member.model_fields["name"].default: member for member in members})
