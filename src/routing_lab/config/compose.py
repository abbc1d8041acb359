"""Composition by Hydra, with every offending override found instead of the first one.

Hydra's own loader composes the files in `conf/`; nothing here touches Hydra's global state, so that it may run before,
inside and beside `hydra.main`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from routing_lab.axes import AXES
from routing_lab.config.hydra_internals import BasicSweeper, ConfigLoaderImpl, create_config_search_path
from routing_lab.config.problems import ConfigError, Problem, alternatives, one_line, shown

PRIMARY = "train"
REQUIRED_GROUPS = ("backbone", *AXES, "task", "data", "init", "recipe")
LIST_GROUPS = ("losses",)
"""Groups of which any number of members may be chosen."""
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError)


@cache
def conf_path() -> Path:
    """The folder of the configuration files: inside the installed package, or at the top of the checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / f"{PRIMARY}.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"no {PRIMARY}.yaml in {package / 'conf'} or {package.parents[1] / 'conf'}: broken installation"
    )


class Composer:
    """Composes configurations from the shipped files and, after them, from the user's folder."""

    def __init__(
        self,
        config_dir: str | Path | None = None,
        config_path: str | Path | None = None,
        config_name: str | None = None,
    ) -> None:
        setup_globals()
        if config_path is not None and not Path(config_path).is_dir():
            raise ConfigError([Problem("--config-path", str(config_path), "no such folder")])
        search_path = create_config_search_path(str(config_path or conf_path()))
        if config_dir is not None:
            folder = Path(config_dir).absolute()
            if not folder.is_dir():
                raise ConfigError([Problem("--config-dir", str(config_dir), f"no such folder (looked at {folder})")])
            search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
        self.loader = ConfigLoaderImpl(search_path)
        self._name = config_name or PRIMARY
        known = [name for name in self.members("") if not name.startswith("_")]
        if self._name.removesuffix(".yaml") not in known:
            hint = alternatives(self._name, known, "there are ")
            raise ConfigError([Problem("--config-name", self._name, f"no such configuration; {hint}")])

    def compose(self, overrides: Sequence[str]) -> tuple[DictConfig, list[Problem]]:
        """The configuration without the overrides that are at fault, `hydra` node included, and these as problems.

        Raises ConfigError when it does not compose even without them.
        """
        try:
            return self._load(overrides), []
        except COMPOSITION_ERRORS as error:
            problems, accepted = self._offenders(overrides)
            if not problems:
                raise ConfigError([Problem("configuration", None, _reason(error))]) from None
            return self._load(accepted), problems

    def members(self, group: str) -> list[str]:
        """Names of the members of a config group."""
        return sorted(self.loader.get_group_options(group, ObjectType.CONFIG))

    def _offenders(self, overrides: Sequence[str]) -> tuple[list[Problem], list[str]]:
        """The overrides that do not compose, as problems, and the others: added one by one, group choices first."""
        problems: list[Problem] = []
        parsed: list[tuple[str, Override]] = []
        for text in overrides:
            try:
                parsed.append((text, parse_one(text)))
            except ConfigError as error:
                problems += error.problems
        accepted: list[str] = []
        failed_groups: set[str] = set()
        for text, override in sorted(parsed, key=lambda item: not self._is_group(item[1])):
            key = override.key_or_group
            if key.split(".")[0] in failed_groups:
                continue
            value = text.partition("=")[2]
            problem = self._group_problem(override) or _sweep_problem(override, value)
            if problem is None:
                try:
                    self._load([*accepted, text])
                except COMPOSITION_ERRORS as error:
                    problem = self._explain(override, value, error, accepted)
            if problem is None:
                accepted.append(text)
                continue
            problems.append(problem)
            if self._is_group(override):
                failed_groups.add("train" if key == "recipe" else key)
        return problems, accepted

    def sweep_dir(self, overrides: Sequence[str]) -> str:
        """The folder that a sweep with these overrides writes its table to."""
        return os.path.expanduser(str(self.multirun_config(overrides).hydra.sweep.dir))

    def multirun_config(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of a multirun, `hydra` node included, as Hydra's launchers take it."""
        return self.loader.load_configuration(self._name, list(overrides), run_mode=RunMode.MULTIRUN)

    def _load(self, overrides: Sequence[str]) -> DictConfig:
        return self.loader.load_configuration(self._name, list(overrides), run_mode=RunMode.RUN)

    def _is_group(self, override: Override) -> bool:
        return bool(self.members(override.key_or_group))

    def _group_problem(self, override: Override) -> Problem | None:
        group = override.key_or_group
        if not self._is_group(override) or override.is_sweep_override():
            return None
        value, known = override.value(), self.members(group)
        if group in LIST_GROUPS:
            names = value if isinstance(value, list) else [value]
            unknown = next((name for name in names if name not in known), None)
            if not any(name not in known for name in names):
                return None
            hint = alternatives(str(unknown), known, "there are ")
            return Problem(group, shown(value), f"takes names of members, as losses=[ratio,z]; {hint}")
        if value is None and group not in REQUIRED_GROUPS:
            return None
        if not isinstance(value, str):
            return Problem(group, shown(value), f"must be one of {', '.join(known)}")
        if value not in known:
            extra = "; others come with pip install 'routing_lab[launchers]'" if group == "hydra/launcher" else ""
            return Problem(group, shown(value), f"no such member; {alternatives(value, known, 'there are ')}{extra}")
        return None

    def _explain(self, override: Override, value: str, error: Exception, accepted: Sequence[str]) -> Problem:
        if isinstance(error, ConfigError):
            return error.problems[0]
        key = override.key_or_group
        config = self._load(accepted)
        parent, _, last = key.rpartition(".")
        group, name = [*key.split("."), ""][:2]
        if group in LIST_GROUPS and name in self.members(group):
            return Problem(key, value, f"{group}={name} is not chosen; add it, as in {group}=[{name}]")
        node = OmegaConf.select(config, parent, throw_on_resolution_failure=False) if parent else config
        if isinstance(node, DictConfig) and last not in node and not override.is_delete():
            known = [str(name) for name in node if name != "hydra"]
            if not parent:
                known += [group for group in (*REQUIRED_GROUPS, "method") if group not in known]
            return Problem(key, value, f"no such key; {alternatives(last, known, 'known: ', most=12)}")
        if not isinstance(node, DictConfig):
            top = key.split(".")[0]
            tops = [str(name) for name in config if name != "hydra"]
            return Problem(key, value, f"no such key; {alternatives(top, tops, 'known: ', most=12)}")
        return Problem(key, value, _reason(error))


def parse(overrides: Iterable[str]) -> list[Override]:
    """Hydra's parse of command-line overrides. Raises HydraException on a syntax error."""
    return OverridesParser.create().parse_overrides(list(overrides))


def parse_one(text: str) -> Override:
    """Hydra's parse of one override. Raises ConfigError, which says how to quote where that is what is missing."""
    key, _, value = text.partition("=")
    try:
        if text.startswith("="):
            raise ValueError("a key is expected before the =")
        return parse([text])[0]
    except COMPOSITION_ERRORS as error:
        message = f"is not a valid override: {_reason(error)}"
        quoted = f"{key}='{value}'"
        with suppress(*COMPOSITION_ERRORS):
            if value and "'" not in value and parse([quoted])[0].value() == value:
                message += f'; such a value is quoted once for the shell and once for Hydra: "{quoted}"'
        raise ConfigError([Problem(key, value, message)]) from None


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The cells of a sweep: the overrides of each job, in the order in which Hydra's basic sweeper runs them.

    A continuous range (`interval(0, 1)`), which only other sweepers expand, is left out. Raises HydraException on a
    syntax error.
    """
    finite = [item for item in parse(overrides) if item.is_discrete_sweep() or not item.is_sweep_override()]
    return [list(cell) for cell in BasicSweeper.split_arguments(finite, None)[0]]


def sweep_name(overrides: Iterable[Any]) -> str:
    """A folder name for a sweep: its overrides, shortened, and a hash of those that say what is run."""
    texts = [
        str(text)
        for text in overrides
        if not re.match(r"\+*(runtime|paths|tracking|wandb|rerun|study|arm|name)\b", str(text))
    ]
    readable = re.sub(r"[^\w.=+-]+", "_", "-".join(texts)).strip("_-")[:60].rstrip("_-.") or "sweep"
    return f"{readable}-{hashlib.sha256(chr(10).join(sorted(texts)).encode()).hexdigest()[:8]}"


def plain(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """The configuration with every interpolation resolved, and what cannot be resolved, left out, as problems."""
    problems: list[Problem] = []
    resolved = _plain(config, "", problems)
    assert isinstance(resolved, dict)
    return resolved, problems


def _sweep_problem(override: Override, value: str) -> Problem | None:
    if not override.is_sweep_override():
        return None
    return Problem(override.key_or_group, value, f"several values need -m (one list is written [{value}])")


def _plain(node: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(node, DictConfig | ListConfig):
        return node
    if isinstance(node, ListConfig):
        pairs: list[tuple[Any, str]] = [(index, f"{path}[{index}]") for index in range(len(node))]
    else:
        pairs = [(key, f"{path}.{key!s}".lstrip(".")) for key in node]
    found: dict[Any, Any] = {}
    for key, full in pairs:
        if OmegaConf.is_missing(node, key):
            problems.append(Problem(full, None, f"must be given: {full}=..."))
            continue
        try:
            value = node[key]
        except Exception as error:  # a resolver, also a user's own, may raise anything
            raw: Any = OmegaConf.to_container(node, resolve=False)
            problems.append(Problem(full, str(raw[key]), f"cannot be resolved: {_reason(error)}"))
            continue
        found[key] = _plain(value, full, problems)
    return list(found.values()) if isinstance(node, ListConfig) else found


def _reason(error: BaseException) -> str:
    """The telling part of an error of Hydra or OmegaConf, on one line."""
    text = str(error) or str(error.__cause__ or "") or type(error).__name__
    kept = [
        line for line in text.splitlines() if not re.match(r"\s*(full_key|object_type|reference_type|See https)", line)
    ]
    line = one_line(" ".join(kept)).replace(str(conf_path()) + os.sep, "")
    return line if len(line) <= 300 else line[:297] + "..."


# Cached, because a job of the sweep must see the sweep's folder and not one named after its own overrides.
OmegaConf.register_new_resolver("sweep_name", sweep_name, use_cache=True, replace=True)
