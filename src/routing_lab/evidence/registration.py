"""What a study was registered as: its text, overrides, seeds, cells and versions, dated, before its first cell trained.

A registration is a file of its own, `<runs>/studies/<name>.<scale>.registration.jsonl`, one entry a line. Entries are
only ever added; each carries the hash of the one before and of itself, so that an edited one is noticed. What changes
after the first cell has finished is an amendment: it is listed with its date wherever the verdict stands, and the
verdict is exploratory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from routing_lab.evidence.study import Study, StudyError, parse_study
from routing_lab.keys import is_below
from routing_lab.runs.records import NOT_COMPARED, flatten, is_finished

Event = Literal["registered", "revised", "amended"]
"""`revised` is a change before the first cell had finished, `amended` one after it."""

UNKNOWN_DATE = "unknown"
"""Date of a plan that an earlier version wrote, which kept none."""

_FREE = ("notes", "question", "tests")
_FREE_OF_SCALES = ("seconds_per_cell", "machine", "spread", "spread_from")
"""What may change without the study being another one: words, and what was expected of time and spread."""


@dataclass(frozen=True)
class Cell:
    """An arm with a seed, and the run that it is."""

    arm: str
    seed: int
    run_id: str


@dataclass(frozen=True)
class Entry:
    """One line of a registration.

    `finished` counts the cells that had finished when it was written, `known` names the effects of the rules whose
    every cell had, so that their outcome could be known; `difference` says what changed against the entry before,
    `reason` why.
    """

    event: Event
    date: str
    study: Study
    scale: str
    overrides: tuple[str, ...]
    cells: tuple[Cell, ...]
    versions: Mapping[str, Any]
    finished: int = 0
    known: tuple[str, ...] = ()
    difference: tuple[str, ...] = ()
    reason: str = ""
    previous: str = ""
    written: str = ""

    @cached_property
    def hash(self) -> str:
        """SHA-256 over everything that the entry says, the hash before it included."""
        return self.written or _hash(self._content())

    def line(self) -> str:
        """The entry as it stands in the file."""
        return json.dumps({**self._content(), "hash": self.hash}, ensure_ascii=False)

    def _content(self) -> dict[str, Any]:
        return {
            "event": self.event,
            "date": self.date,
            "scale": self.scale,
            "overrides": list(self.overrides),
            "finished": self.finished,
            "known": list(self.known),
            "difference": list(self.difference),
            "reason": self.reason,
            "versions": dict(self.versions),
            "study": self.study.model_dump(exclude_unset=True),
            "cells": [[cell.arm, cell.seed, cell.run_id] for cell in self.cells],
            "previous": self.previous,
        }


@dataclass(frozen=True)
class Plan:
    """The cells of a study at one scale, and the entries of its registration; none where it is not registered."""

    study: Study
    scale: str
    cells: tuple[Cell, ...]
    entries: tuple[Entry, ...] = ()

    def missing(self, records: Iterable[Mapping[str, Any]]) -> list[Cell]:
        """Cells without a finished record."""
        finished = {record["run_id"] for record in records if is_finished(record)}
        return [cell for cell in self.cells if cell.run_id not in finished]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of every arm that the study was registered with."""
        return self.entries[-1].overrides if self.entries else ()

    @property
    def amendments(self) -> tuple[Entry, ...]:
        """Entries that changed the study after its first cell had finished."""
        return tuple(entry for entry in self.entries if entry.event == "amended")

    @property
    def exploratory(self) -> tuple[str, ...]:
        """Why the verdict is exploratory; empty where the study stood before its results."""
        reasons = [
            f"amended on {entry.date} after {entry.finished} cells had finished: {'; '.join(entry.difference)}"
            for entry in self.amendments
        ]
        known = self.entries[0].known if self.entries else ()
        if known:
            reasons.append(f"registered when every cell of {', '.join(known)} had finished")
        return tuple(reasons)

    def lines(self) -> list[str]:
        """The registration in words, one line an entry."""
        found = []
        for entry in self.entries:
            what = f"{entry.event.capitalize()} {entry.date} ({entry.hash[:12]})"
            if entry.event == "registered":
                what += f" with overrides {' '.join(entry.overrides)}" if entry.overrides else " without overrides"
                what += f", {entry.finished} cells had finished" if entry.finished else ", before any cell had finished"
            else:
                what += f" after {entry.finished} cells had finished: {'; '.join(entry.difference)}"
                what += f" (because: {entry.reason})" if entry.reason else ""
            found.append(what)
        return found


def plan_path(runs: Path | str, name: str, scale: str) -> Path:
    """Where the registration of a study stands: `<runs>/studies/<name>.<scale>.registration.jsonl`."""
    return Path(runs) / "studies" / f"{name}.{scale}.registration.jsonl"


def read_plans(runs: Path | str) -> list[Plan]:
    """The registered studies of a folder of runs, ordered by name."""
    folder = Path(runs) / "studies"
    stems = {path.name.removesuffix(".registration.jsonl") for path in folder.glob("*.registration.jsonl")}
    # An earlier version wrote `<name>.<scale>.json`, beside `<name>.<scale>.verdict.json`.
    stems |= {path.stem for path in folder.glob("*.json") if path.stem.count(".") == 1}
    return [plan for stem in sorted(stems) if (plan := find_plan(runs, *stem.rsplit(".", 1)))]


def find_plan(runs: Path | str, name: str, scale: str) -> Plan | None:
    """The registered study, or None where it is not registered; raises like `read_plan`."""
    path = plan_path(runs, name, scale)
    older = path.with_name(f"{name}.{scale}.json")
    if path.exists():
        return read_plan(path)
    return _older_plan(older) if older.exists() else None


def read_plan(path: Path | str) -> Plan:
    """A registration as written.

    Raises:
        StudyError: the file cannot be read, or one of its entries is not what was written: its hash, or that of the
        entry
            before, does not fit.
    """
    path = Path(path)
    if path.suffix == ".json":
        return _older_plan(path)
    entries: list[Entry] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            content = json.loads(line)
            entry = Entry(
                content["event"],
                content["date"],
                parse_study(content["study"]),
                content["scale"],
                tuple(content["overrides"]),
                tuple(Cell(*cell) for cell in content["cells"]),
                content["versions"],
                content["finished"],
                tuple(content["known"]),
                tuple(content["difference"]),
                content["reason"],
                content["previous"],
                content["hash"],
            )
            before = entries[-1].hash if entries else ""
            if entry.hash != _hash(content) or entry.previous != before:
                raise StudyError(str(path), [f"entry {number} has been changed since it was written (hash differs)"])
            entries.append(entry)
    except StudyError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(str(path), [f"not a registration: {error}"]) from error
    if not entries:
        raise StudyError(str(path), ["not a registration: no entry"])
    last = entries[-1]
    return Plan(last.study, last.scale, last.cells, tuple(entries))


def register(
    plan: Plan | None,
    study: Study,
    scale: str,
    cells: Sequence[Cell],
    *,
    overrides: Sequence[str] = (),
    versions: Mapping[str, Any],
    finished: Iterable[str] = (),
    reason: str = "",
    now: datetime,
) -> Plan:
    """The plan under which a study goes on: the registered one where nothing that matters has changed, else one with a
    further entry.

    Args:
        plan: what is registered, None where nothing is.
        study, scale, cells, overrides: as they are now.
        versions: of the code, kept with a new entry.
        finished: run ids that have finished.
        reason: why a study is changed that has results.
        now: date of a new entry.

    Raises:
        StudyError: the study has changed after its first cell had finished, and no reason is given.
    """
    counted = tuple(text for text in overrides if not _is_volatile(text))
    done = set(finished)
    wanted = Entry("registered", now.isoformat(timespec="seconds"), study, scale, counted, tuple(cells), versions)
    if plan is None:
        num, known = sum(cell.run_id in done for cell in cells), _known(study, cells, done)
        entry = replace(wanted, finished=num, known=known)
        return Plan(study, scale, tuple(cells), (entry,))
    before = plan.entries[-1]
    held = {(cell.arm, cell.seed): cell.run_id for cell in before.cells if cell.run_id in done}
    cells = [Cell(cell.arm, cell.seed, held.get((cell.arm, cell.seed), cell.run_id)) for cell in cells]
    wanted = replace(wanted, cells=tuple(cells))
    difference = differences(before, wanted)
    if not difference and wanted.cells != before.cells:
        difference = ["cells: the same arms and seeds are other runs now (a default, or a file of an arm, has changed)"]
    if not difference:
        return plan
    num = len(held)
    if num and not reason:
        raise StudyError(
            study.name,
            [
                f"was registered on {before.date}, and {num} of its cells have finished; since then it has changed: "
                f"{'; '.join(difference)}. Give --amend 'why' to list the change beside the verdict, which is then "
                "exploratory; or save the study under another name"
            ],
        )
    entry = replace(
        wanted,
        event="amended" if num else "revised",
        finished=num,
        known=_known(study, cells, done),
        difference=tuple(difference),
        reason=reason,
        previous=before.hash,
    )
    return Plan(study, scale, tuple(cells), (*plan.entries, entry))


def append(plan: Plan, runs: Path | str) -> Path:
    """Add the entries of a plan that the file does not hold yet.

    Raises:
        StudyError: the file holds other entries than the plan begins with.
    """
    path = plan_path(runs, plan.study.name, plan.scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    held = read_plan(path).entries if path.exists() else ()
    if [entry.hash for entry in held] != [entry.hash for entry in plan.entries[: len(held)]]:
        raise StudyError(plan.study.name, [f"{path} was written by another command meanwhile; give this one again"])
    new = plan.entries[len(held) :]
    if new:
        with open(path, "a", encoding="utf-8", newline="") as file:
            file.write("".join(f"{entry.line()}\n" for entry in new))
            file.flush()
            os.fsync(file.fileno())
    return path


def differences(before: Entry, after: Entry) -> list[str]:
    """What makes two entries other studies, key by key; empty where only words, times or other scales changed."""
    first, second = flatten(_bearing(before)), flatten(_bearing(after))
    found = []
    for key in sorted(first.keys() | second.keys()):
        old, new = first.get(key), second.get(key)
        if old != new:
            found.append(f"{key}: {_shown(old)} -> {_shown(new)}")
    if list(before.overrides) != list(after.overrides):
        found.append(f"overrides: {_shown(list(before.overrides))} -> {_shown(list(after.overrides))}")
    return found


def _bearing(entry: Entry) -> dict[str, Any]:
    """What a study decides by, at the scale of the entry; lists of rules and arms by position and name."""
    content = entry.study.model_dump()
    for key in _FREE:
        content.pop(key, None)
    scales = content.pop("scales")
    content["scale"] = {k: v for k, v in scales[entry.scale].items() if k not in _FREE_OF_SCALES}
    content["decision"]["rules"] = {str(i): rule for i, rule in enumerate(content["decision"]["rules"])}
    return content


def _hash(content: Mapping[str, Any]) -> str:
    said = {key: value for key, value in content.items() if key != "hash"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _known(study: Study, cells: Sequence[Cell], done: set[str]) -> tuple[str, ...]:
    left = {cell.arm for cell in cells if cell.run_id not in done}
    return tuple(name for name in study.read_effects if not left & set(study.arms_of(name)))


def _older_plan(path: Path) -> Plan:
    """A plan that a version without registrations wrote, as the first entry of one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cells = tuple(Cell(**cell) for cell in content["cells"])
        study = parse_study(content["study"])
        entry = Entry("registered", UNKNOWN_DATE, study, content["scale"], (), cells, {})
    except StudyError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(str(path), [f"not a plan: {error}"]) from error
    return Plan(study, entry.scale, cells, (entry,))


def _is_volatile(override: str) -> bool:
    key = override.lstrip("+~").split("=", 1)[0]
    return is_below(key, NOT_COMPARED)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
