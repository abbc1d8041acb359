"""The cells of a command, one run or a sweep, all of them checked before the first one starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from routing_lab.axes.base import UnknownTarget, locate
from routing_lab.config.compose import COMPOSITION_ERRORS, Composer, expand, parse
from routing_lab.config.load import check_overrides
from routing_lab.config.problems import ConfigError, Problem, one_line


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
    texts, parsed = _parse_each(overrides)
    own = [text for text, item in zip(texts, parsed, strict=True) if item.is_hydra_override()]
    job = [text for text, item in zip(texts, parsed, strict=True) if not item.is_hydra_override()]
    swept = {item.key_or_group for item in parsed if item.is_sweep_override()}
    fixed = [text for text, item in zip(texts, parsed, strict=True) if not item.is_sweep_override()]
    base, _ = composer.compose(fixed)
    is_sweep = multirun or str(OmegaConf.select(base, "hydra.mode")).endswith("MULTIRUN")
    if is_sweep:
        params = OmegaConf.select(base, "hydra.sweeper.params") or {}
        job = [f"{key}={value}" for key, value in params.items()] + job
        swept |= {str(key) for key in params}
    cells = expand(job) if is_sweep else [job]
    warnings = _check_cells(composer, own, cells, swept)
    launcher = OmegaConf.to_container(base.hydra.launcher, resolve=False)
    assert isinstance(launcher, dict)
    if is_sweep:
        _launcher_is_installed(base)
    return Command(
        is_sweep=is_sweep,
        cells=cells,
        warnings=warnings,
        launcher={str(key): value for key, value in launcher.items()},
        sweep_dir=composer.sweep_dir(overrides) if is_sweep else None,
        threads=OmegaConf.select(base, "runtime.threads"),
    )


def _parse_each(overrides: Sequence[str]) -> tuple[list[str], list[Override]]:
    parsed, problems = [], []
    for text in overrides:
        try:
            parsed += parse([text])
        except COMPOSITION_ERRORS as error:
            key, _, value = text.partition("=")
            problems.append(Problem(key, value, f"is not a valid override: {one_line(str(error))}"))
    if problems:
        raise ConfigError(problems)
    return list(overrides), parsed


def _check_cells(composer: Composer, own: list[str], cells: list[list[str]], swept: set[str]) -> list[str]:
    """Warnings of all cells. Cells that differ in nothing but the seed are checked once, and each seed once."""
    seen: set[Any] = set()
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
            warnings |= dict.fromkeys(check_overrides(composer, [*own, *cell]).warnings)
        except ConfigError as error:
            for problem in error.problems:
                failures.setdefault(problem, []).append(arm)
    if failures:
        lines = [_prefix(problem, failing, arms, swept) + str(problem) for problem, failing in failures.items()]
        raise CellsError(list(failures), lines)
    return list(warnings)


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
    try:
        locate(target)
    except UnknownTarget as error:
        hint = "pip install 'routing_lab[ray]'" if "ray" in target else "pip install 'routing_lab[launchers]'"
        choice = OmegaConf.select(base, "hydra.runtime.choices")["hydra/launcher"]
        raise ConfigError([Problem("hydra/launcher", choice, f"{error}; {hint}")]) from None
