"""The cells of a command, one run or a sweep, all of them checked before the first one starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from routing_lab.axes.base import UnknownTarget, locate
from routing_lab.config.compose import COMPOSITION_ERRORS, Composer, expand, parse_one
from routing_lab.config.load import check_overrides
from routing_lab.config.problems import ConfigError, Problem, one_line
from routing_lab.places import unwritable


@dataclass(frozen=True)
class Command:
    """What a command line asks for.

    is_sweep: whether it is a multirun. cells: the overrides of each job. warnings: remarks about the cells.
    launcher: the node `hydra.launcher`. sweep_dir: folder of the sweep, None for a single run.
    threads: `runtime.threads` as configured.
    """

    is_sweep: bool
    cells: list[list[str]]
    warnings: list[str]
    launcher: dict[str, Any]
    sweep_dir: str | None
    threads: int | None


class CellsError(ConfigError):
    """Problems of a sweep; `lines` say which cells each of them concerns."""

    def __init__(self, problems: Sequence[Problem], lines: Sequence[str]) -> None:
        super().__init__(problems)
        self.lines = list(lines)

    def __str__(self) -> str:
        return "\n".join(self.lines)


def check_command(composer: Composer, overrides: Sequence[str], multirun: bool) -> Command:
    """Expand a command into its cells and check every one.

    Args:
        composer: finds the configuration files.
        overrides: as on the command line, sweeps included.
        multirun: whether `--multirun` was given; `hydra.mode` in the configuration may ask for it as well.

    Raises:
        ConfigError: with the problems of all cells, each line prefixed by what tells these cells from the others.
    """
    texts, parsed = list(overrides), _parse_each(overrides)
    own = [text for text, item in zip(texts, parsed, strict=True) if item.is_hydra_override()]
    job = [text for text, item in zip(texts, parsed, strict=True) if not item.is_hydra_override()]
    swept = {item.key_or_group for item in parsed if item.is_sweep_override()}
    fixed = [text for text, item in zip(texts, parsed, strict=True) if not item.is_sweep_override()]
    base, _ = composer.compose(fixed)
    is_sweep = multirun or str(OmegaConf.select(base, "hydra.mode")).endswith("MULTIRUN")
    if is_sweep:
        _check_sweeps(texts, parsed, str(base.hydra.sweeper.get("_target_")))
        params = OmegaConf.select(base, "hydra.sweeper.params") or {}
        job = [f"{key}={value}" for key, value in params.items()] + job
        swept |= {str(key) for key in params}
    cells = expand(job) if is_sweep else [job]
    warnings, runs = _check_cells(composer, own, cells, swept)
    if is_sweep:
        _launcher_is_installed(base)
    sweep_dir = _folder("hydra.sweep.dir", lambda: composer.sweep_dir(overrides)) if is_sweep else None
    run_dir = _folder("hydra.run.dir", lambda: str(OmegaConf.select(base, "hydra.run.dir", throw_on_missing=True)))
    _check_places(runs, *(("hydra.run.dir", run_dir) if sweep_dir is None else ("hydra.sweep.dir", sweep_dir)))
    launcher = OmegaConf.to_container(base.hydra.launcher, resolve=False)
    assert isinstance(launcher, dict)
    return Command(
        is_sweep=is_sweep,
        cells=cells,
        warnings=warnings,
        launcher={str(key): value for key, value in launcher.items()},
        sweep_dir=sweep_dir,
        threads=OmegaConf.select(base, "runtime.threads"),
    )


def _parse_each(overrides: Sequence[str]) -> list[Override]:
    parsed, problems = [], []
    for text in overrides:
        try:
            parsed.append(parse_one(text))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return parsed


def _check_sweeps(texts: Sequence[str], parsed: Sequence[Override], sweeper: str) -> None:
    """Refuse sweeps that have no cell, and those that the sweeper cannot expand."""
    problems = []
    for text, item in zip(texts, parsed, strict=True):
        key, value = item.key_or_group, text.partition("=")[2]
        if item.is_discrete_sweep() and not list(item.sweep_string_iterator()):
            problems.append(Problem(key, value, "holds no value, so that nothing would be run"))
        elif item.is_sweep_override() and not item.is_discrete_sweep() and sweeper.endswith("BasicSweeper"):
            message = "a continuous range needs a sweeper that draws from it (hydra/sweeper=optuna); give values, as in"
            problems.append(Problem(key, value, f"{message} {key}=0,1,2"))
    if problems:
        raise ConfigError(problems)


def _check_places(runs: Iterable[str], key: str, folder: str) -> None:
    """Refuse folders that cannot be written to: those of the runs, and the one that Hydra makes."""
    problems = [Problem("paths.runs", place, reason) for place in runs if (reason := unwritable(place))]
    reason = None if problems else unwritable(folder)
    if problems or reason:
        raise ConfigError(problems or [Problem(key, folder, str(reason))])


def _folder(key: str, find: Callable[[], str]) -> str:
    """A folder of Hydra's own, which may hold interpolations that cannot be resolved."""
    try:
        return find()
    except COMPOSITION_ERRORS as error:
        raise ConfigError([Problem(key, None, f"cannot be resolved: {one_line(str(error))}")]) from None


def _check_cells(
    composer: Composer, own: list[str], cells: list[list[str]], swept: set[str]
) -> tuple[list[str], set[str]]:
    """Warnings of all cells, and the folders of their runs.

    Cells that differ in nothing but the seed are checked once, and each seed once.
    """
    seen: set[Any] = set()
    runs: set[str] = set()
    arms: list[list[str]] = []
    failures: dict[Problem, list[list[str]]] = {}
    warnings: dict[str, None] = {}
    for cell in cells:
        seed = next((text for text in cell if text.startswith("seed=")), "")
        arm = [text for text in cell if text != seed]
        if seed in seen and arm in arms:
            continue
        seen.add(seed)
        if arm not in arms:
            arms.append(arm)
        try:
            loaded = check_overrides(composer, [*own, *cell])
            warnings |= dict.fromkeys(loaded.warnings)
            runs.add(loaded.config.paths.runs)
        except ConfigError as error:
            for problem in error.problems:
                failures.setdefault(problem, []).append(arm)
    if failures:
        lines = [_prefix(problem, failing, arms, swept) + str(problem) for problem, failing in failures.items()]
        raise CellsError(list(failures), lines)
    return list(warnings), runs


def _prefix(problem: Problem, failing: list[list[str]], arms: list[list[str]], swept: set[str]) -> str:
    """What tells the failing arms of a sweep from the others; nothing where all fail or the problem itself says it."""
    if problem.key == "seed" or all(arm in failing for arm in arms):
        return ""
    own = {text for text in failing[0] if text.split("=")[0] in swept}
    shared = own.intersection(*failing)
    if shared == {f"{problem.key}={problem.value}"}:
        return ""
    told = [text for text in failing[0] if text in (shared or own)]
    more = f" and {len(failing) - 1} more" if not shared else ""
    return f"[{' '.join(told)}{more}] "


def _launcher_is_installed(base: DictConfig) -> None:
    target = str(base.hydra.launcher.get("_target_"))
    choice = OmegaConf.select(base, "hydra.runtime.choices")["hydra/launcher"]
    try:
        locate(target)
    except UnknownTarget as error:
        hint = "pip install 'routing_lab[ray]'" if "ray" in target else "pip install 'routing_lab[launchers]'"
        raise ConfigError([Problem("hydra/launcher", choice, f"{error}; {hint}")]) from None
    if target.endswith("SlurmLauncher") and shutil.which("srun") is None:
        message = "needs SLURM's program srun, which is not on this machine; submitit_local runs cells here"
        raise ConfigError([Problem("hydra/launcher", choice, message)])
