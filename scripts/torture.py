"""Attack a run, a sweep and a study, give the same command again, and compare with undisturbed ones bit by bit.

    python scripts/torture.py --kills 200
    python scripts/torture.py run --kills 30 --program router=random capacity.warmup=0.5

Attacks: `run`, `sweep` and `study` are ended with SIGKILL, SIGTERM or SIGINT after a random time, several times over,
and then left to finish; `two` starts the same run twice at the same moment; `full` runs where no file may grow beyond a
random size, as on a full disk, and then where it may. Every trial must end with exit code 0 and, without tolerance, the
final weights, histories, predictions, metrics, routing and costs of the undisturbed command; a signal or a full disk
may cost a sentence and an exit code, never a traceback. The exit code is the number of trials that failed, at most 100.

Processes are forked from one that has imported everything, so that nearly all kills hit the work itself; `--program`
starts the public program instead, whose imports can be hit too.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

SMALL = (
    "train.epochs=3",
    "train.warmup_epochs=1",
    "train.batch_size=128",
    "train.ema_decay=0.9",
    "train.selection=best",
    "backbone.width=16",
    "backbone.heads=2",
    "backbone.depth=2",
    "backbone.drop_path=0.1",
    "wandb.mode=disabled",
    "runtime.threads=1",
)
"""What is run unless overrides say otherwise: small, and with random numbers wherever there can be some."""

STUDY = """
question: Does a study survive what befalls its machine?
hypothesis: {statement: It does., predicted: {it: positive}}
seeds: [0, 1, 2]
arms: {one: [router=amod], two: [router=random]}
reference: two
contrasts: {it: {arms: [one, two], differ_in: router}}
decision:
  rules: [{verdict: supports, says: it is positive, when: {it: positive}}]
  otherwise: {verdict: mixed, says: it is not positive}
scales: {toy: {overrides: [], seconds_per_cell: 1, machine: any}}
"""

ATTACKS: dict[str, tuple[str, ...]] = {
    "run": ("train",),
    "sweep": ("train", "seed=0,1", "-m"),
    "study": ("study", "tortured.yaml"),
    "two": ("train",),
    "full": ("train",),
}
"""Attack -> command and its words, beside the overrides."""

TIMES = ("train_seconds", "train_images_per_second")


@dataclass
class Tally:
    """What was tried. kills: signals that hit; failed: trials that did not end as they should."""

    trials: int = 0
    kills: int = 0
    failed: int = 0
    what: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Parse the command line and run the trials; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="attacks (default: all of them) and overrides of the runs")
    parser.add_argument("--kills", type=int, default=20, help="signals that hit before it ends (default 20)")
    parser.add_argument("--each", type=int, default=3, help="signals to one trial (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and signals (default 0)")
    parser.add_argument("--program", action="store_true", help="start the public program instead of forking")
    parser.add_argument("--keep", action="store_true", help="keep the run folders and say where they are")
    options = parser.parse_intermixed_args()
    attacks = [word for word in options.words if "=" not in word] or list(ATTACKS)
    if unknown := set(attacks) - set(ATTACKS):
        parser.error(f"{', '.join(unknown)}: no such attack; there are {', '.join(ATTACKS)}")
    given = [word for word in options.words if "=" in word]
    overrides = list({text.partition("=")[0]: text for text in (*SMALL, *given)}.values())
    root = Path(tempfile.mkdtemp(prefix="torture_"))
    os.chdir(root)
    Path("tortured.yaml").write_text(STUDY, encoding="utf-8")
    try:
        tally = _torture(attacks, overrides, _program if options.program else _forked(), options)
    finally:
        if options.keep:
            print(f"run folders: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    print(
        f"tried: {tally.trials} trials, {tally.kills} kills; failed: {tally.failed}; {dict(sorted(tally.what.items()))}"
    )
    return min(tally.failed, 100)


Start = Callable[[str, Sequence[str], Path, int | None], int]
"""Command, its words, a log and the largest size of a file -> the process that runs it."""


def _torture(attacks: Sequence[str], overrides: Sequence[str], start: Start, options: argparse.Namespace) -> Tally:
    rng, tally = random.Random(options.seed), Tally()
    expected: dict[str, dict[str, Any]] = {}
    durations: dict[str, float] = {}
    for attack in attacks:
        runs = Path(f"undisturbed_{attack}")
        begin = time.monotonic()
        code = _wait(_begin(attack, overrides, start, runs))
        durations[attack] = time.monotonic() - begin
        if code:
            raise SystemExit(f"{_log(runs).read_text()}\nundisturbed: {attack} ended with exit code {code}")
        expected[attack] = _outcome(runs)
        print(f"undisturbed: {attack}, {len(expected[attack])} runs, {durations[attack]:.1f} s", flush=True)
    while tally.kills < options.kills:
        attack = attacks[tally.trials % len(attacks)]
        runs = Path(f"trial{tally.trials}")
        tally.trials += 1
        told = _attack(attack, overrides, start, runs, rng, durations[attack], options.each, tally)
        code = _wait(_begin(attack, overrides, start, runs))
        faults = [f"exit code {code}"] if code else _differences(expected[attack], _outcome(runs))
        if "Traceback" in _log(runs).read_text():
            faults.append("a traceback")
        tally.failed += bool(faults)
        verdict = f"FAILED: {', '.join(faults)}" if faults else "equal"
        print(f"{tally.trials}. {attack}: {', '.join(told)}: {verdict}", flush=True)
        if faults:
            print(_log(runs).read_text(), flush=True)
        elif not options.keep:
            shutil.rmtree(runs)
    return tally


def _attack(
    attack: str,
    overrides: Sequence[str],
    start: Start,
    runs: Path,
    rng: random.Random,
    duration: float,
    each: int,
    tally: Tally,
) -> list[str]:
    """Do to one command what the attack says; returns what befell it."""
    told: list[str] = []
    if attack == "full":
        for size in (rng.randrange(200, 4_000), rng.randrange(4_000, 120_000)):
            code = _wait(_begin(attack, overrides, start, runs, size))
            told.append(f"files up to {size} bytes: exit code {code}")
            tally.what["full"] += 1
        return told
    for _ in range(each):
        number = rng.choice(SIGNALS)
        processes = [_begin(attack, overrides, start, runs) for _ in range(2 if attack == "two" else 1)]
        ended = _end_after(processes[0], rng.uniform(0.0, duration), number)
        what = number.name if ended else "finished first"
        told.append(what)
        tally.kills += ended
        tally.what[what] += 1
        if attack == "two":
            told[-1] += f", the other: exit code {_wait(processes[1])}"
            return told
        if not ended:
            break
    return told


# --- processes ---


def _begin(attack: str, overrides: Sequence[str], start: Start, runs: Path, size: int | None = None) -> int:
    command, *words = ATTACKS[attack]
    return start(command, [*words, *overrides, f"paths.runs={runs}"], _log(runs), size)


def _log(runs: Path) -> Path:
    return runs.with_suffix(".log")


def _program(command: str, words: Sequence[str], log: Path, size: int | None) -> int:
    with open(log, "ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", f"routing_lab.{command}", *words],
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            preexec_fn=lambda: _limit(size),
        )
    return process.pid


def _forked() -> Start:
    for name in ("routing_lab.training.run", "routing_lab.train", "routing_lab.study", "routing_lab.evidence.verdict"):
        import_module(name)

    def start(command: str, words: Sequence[str], log: Path, size: int | None) -> int:
        process = os.fork()
        if process:
            return process
        code: Any = 1
        try:
            stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            _limit(size)
            import_module(f"routing_lab.{command}").main(list(words))
        except SystemExit as leaving:
            code = leaving.code
        finally:
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 0)

    return start


def _limit(size: int | None) -> None:
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _end_after(process: int, seconds: float, number: signal.Signals) -> bool:
    """Send a signal after a time and wait; False when the process had ended by itself before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, _ = os.waitpid(process, os.WNOHANG)
        if ended:
            return False
        time.sleep(0.005)
    os.kill(process, number)
    os.waitpid(process, 0)
    return True


def _wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


# --- outcomes ---


def _outcome(runs: Path) -> dict[str, dict[str, Any]]:
    """Run -> what must be the same, bit by bit."""
    return {path.parent.name: _outcome_of(path.parent) for path in sorted(runs.glob("*/run.json"))}


def _outcome_of(folder: Path) -> dict[str, Any]:
    import numpy as np

    from routing_lab.runs.records import read_record

    record = read_record(folder)
    found: dict[str, Any] = {"status": record["status"], "metrics": record["metrics"], "routing": record["routing"]}
    if record["status"] == "finished":
        with np.load(folder / "predictions.npz") as arrays:
            found["predictions"] = {name: arrays[name].tobytes() for name in arrays}
        found["weights"] = (folder / "checkpoints" / "final.safetensors").read_bytes()
        # The last column is the epoch's duration.
        found["history"] = [row.rpartition(",")[0] for row in (folder / "history.csv").read_text().splitlines()]
        found["cost"] = {key: value for key, value in record["cost"].items() if key not in TIMES}
    return found


def _differences(expected: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> list[str]:
    if set(expected) != set(found):
        return [f"{len(found)} runs instead of {len(expected)}"]
    parts = [(run, part) for run, outcome in expected.items() for part in outcome]
    return [f"{part} of {run}" for run, part in parts if found[run].get(part) != expected[run][part]]


if __name__ == "__main__":
    sys.exit(main())
