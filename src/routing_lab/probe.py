"""Measure finished runs: `python -m routing_lab.probe RUN... probe=selection [probe.key=value] [sample.count=64]`.

In place of run folders the registration of a study, `runs/studies/<study>.<scale>.registration.jsonl`, stands for all
its finished cells. A probe writes what it found into the run's own folder, `<run>/probes/<name>.json` with the arrays
behind it in `<name>.npz`, and never into the record; of several runs it says what they have in common. The same command
again reports; an interrupted one measures what is missing.

Exit codes: 0 every run was measured; 1 a run could not be; 2 the words were refused and nothing was written; 130
interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from routing_lab.config import Composer, ConfigError
from routing_lab.config.probing import probe_settings
from routing_lab.config.problems import Problem
from routing_lab.evidence.registration import read_plan
from routing_lab.evidence.study import StudyError
from routing_lab.runs.folder import RunFolder, folders_by_run


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves through `sys.exit`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(f"{__doc__}\nprobes: {', '.join(Composer(config_name='probe').members('probe'))}")
        sys.exit(0 if words else 2)
    overrides = [word for word in words if "=" in word]
    places = [Path(word) for word in words if "=" not in word]
    try:
        settings = probe_settings(overrides)
        sys.exit(_measure(settings, _runs(places)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command measures what is missing", file=sys.stderr)
        sys.exit(130)


def _runs(places: Sequence[Path]) -> list[Path]:
    """The run folders that are named, or the finished cells of a study's registration; all problems at once."""
    found: list[Path] = []
    problems = []
    for place in places:
        if place.suffix == ".jsonl" and place.is_file():
            try:
                cells = read_plan(place).cells
            except StudyError as error:
                problems.append(Problem("STUDY", str(place), str(error)))
                continue
            by_run = folders_by_run(place.parent.parent)
            folders = [by_run[cell.run_id] for cell in cells if cell.run_id in by_run]
            found += [folder for folder in folders if RunFolder(folder).finished_record() is not None]
        elif (place / "run.json").is_file():
            found.append(place)
        else:
            problems.append(Problem("RUN", str(place), "is no run folder (it has no run.json), and no registration"))
    if not places:
        problems = [Problem("RUN", None, "at least one run folder is expected, as in probe runs/NAME probe=selection")]
    if problems:
        raise ConfigError(problems)
    return found


def _measure(settings: dict[str, Any], folders: Sequence[Path]) -> int:
    from routing_lab.probes.opening import between, build, run_on, table  # torch: only where something is measured

    asked = build(settings)
    done = []
    for folder in folders:
        try:
            content, measured = run_on(asked, folder, progress=_progress)
        except ValueError as error:
            print(f"{folder}: {error}", file=sys.stderr)
            continue
        done.append(folder)
        state = "measured" if measured else "had been measured"
        print(f"{content['name']}: probe {asked.name} {state} on {content['examples']} examples")
        print(table(content))
        print(f"findings: {folder / 'probes' / f'{asked.name}.json'}\n", flush=True)
    if common := between(asked, done):
        print(f"what the runs have in common\n{common}")
    return int(len(done) < len(folders))


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} batches", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
