"""Kill a run at random moments, give the same command again, and compare with an uninterrupted run bit by bit.

    python scripts/kill_and_resume.py --trials 20 --kills 3
    python scripts/kill_and_resume.py --trials 5 --command router=random capacity.warmup=0.5

Every trial starts the run, ends it with SIGKILL, SIGTERM or SIGINT after a random time, several times over, and then
lets it finish. Compared are the final weights, the history, the predictions, the metrics and the routing record, all
without tolerance. The exit code is the number of trials that differ (at most 100).

Processes are forked from one that has imported everything, so that nearly all kills hit the run itself; `--command`
starts the public command instead, whose imports can be hit too.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

SMALL = (
    "train.epochs=6",
    "train.warmup_epochs=1",
    "train.batch_size=128",
    "train.ema_decay=0.9",
    "train.selection=best",
    "backbone.width=32",
    "backbone.drop_path=0.1",
    "wandb.mode=disabled",
    "runtime.threads=1",
)
"""What the run is unless overrides say otherwise: small, and with random numbers wherever there can be some."""

TIMES = ("train_seconds", "train_images_per_second")


def main() -> int:
    """Parse the command line and run the trials; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10, help="runs that are interrupted (default 10)")
    parser.add_argument("--kills", type=int, default=3, help="interruptions of each run (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and signals (default 0)")
    parser.add_argument("--command", action="store_true", help="start the public command instead of forking")
    parser.add_argument("--keep", action="store_true", help="keep the run folders and say where they are")
    parser.add_argument("overrides", nargs="*", help="overrides of the run, as for routing_lab.train")
    options = parser.parse_intermixed_args()
    overrides = list({text.partition("=")[0]: text for text in (*SMALL, *options.overrides)}.values())
    start = _command if options.command else _forked()
    root = Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    try:
        return _trials(start, overrides, root, options.trials, options.kills, random.Random(options.seed))
    finally:
        if options.keep:
            print(f"run folders: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


def _trials(
    start: Callable[[Sequence[str], Path], int],
    overrides: Sequence[str],
    root: Path,
    trials: int,
    kills: int,
    rng: random.Random,
) -> int:
    begin = time.monotonic()
    code = _wait(start([*overrides, f"paths.runs={root / 'reference'}"], root / "reference.log"))
    duration = time.monotonic() - begin
    if code != 0:
        print((root / "reference.log").read_text(), file=sys.stderr)
        raise SystemExit(f"the uninterrupted run ended with exit code {code}")
    expected = _outcome(root / "reference")
    print(f"uninterrupted: {duration:.1f} s, metrics {expected['metrics']}", flush=True)

    mismatches, hits = 0, Counter[str]()
    for trial in range(trials):
        runs = root / f"trial{trial}"
        words = [*overrides, f"paths.runs={runs}"]
        told = []
        log = root / f"trial{trial}.log"
        for _ in range(kills):
            number, begin = rng.choice(SIGNALS), time.monotonic()
            ended = _end_after(start(words, log), rng.uniform(0.0, duration), number)
            what = number.name if ended else "finished first"
            hits[what] += 1
            told.append(f"{what} after epoch {_epochs_done(runs)}")
            if not ended:
                if len(told) == 1:  # a whole run, without the first one's warming up
                    duration = min(duration, time.monotonic() - begin)
                break
        code = _wait(start(words, log))
        if code:
            print(log.read_text(), file=sys.stderr)
        different = [f"exit code {code}"] if code else _differences(expected, _outcome(runs))
        mismatches += bool(different)
        verdict = f"DIFFERS: {', '.join(different)}" if different else "equal"
        print(f"trial {trial + 1}/{trials}: {', '.join(told)}: {verdict}", flush=True)
    print(f"{mismatches} of {trials} trials differ; {dict(hits)}")
    return min(mismatches, 100)


# --- processes ---


def _command(words: Sequence[str], log: Path) -> int:
    with open(log, "ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "routing_lab.train", *words], stdout=stream, stderr=stream, start_new_session=True
        )
    return process.pid


def _forked() -> Callable[[Sequence[str], Path], int]:
    from routing_lab.config import load
    from routing_lab.training.run import run_cell

    def start(words: Sequence[str], log: Path) -> int:
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            loaded = load(list(words))
            result = run_cell(loaded.config, loaded.resolved, loaded.warnings, command="kill_and_resume")
            print(result["status"], result["error"], flush=True)
            code = {"finished": 0, "failed": 1}.get(result["status"], 128 + (result["signal"] or 0))
        finally:
            os._exit(code)

    return start


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


def _outcome(runs: Path) -> dict[str, Any]:
    import numpy as np

    from routing_lab.runs.records import read_record

    (path,) = runs.glob("*/run.json")
    record, folder = read_record(path.parent), path.parent
    with np.load(folder / "predictions.npz") as arrays:
        predictions = {name: arrays[name].tobytes() for name in arrays}
    return {
        "status": record["status"],
        "weights": (folder / "checkpoints" / "final.safetensors").read_bytes(),
        "history": [row.rpartition(",")[0] for row in (folder / "history.csv").read_text().splitlines()],
        "predictions": predictions,
        "metrics": record["metrics"],
        "routing": record["routing"],
        "cost": {key: value for key, value in record["cost"].items() if key not in TIMES},
    }


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [name for name, value in expected.items() if found[name] != value]


def _epochs_done(runs: Path) -> str:
    from routing_lab.runs.records import RecordError, read_record

    for path in runs.glob("*/run.json"):
        try:
            return str(read_record(path.parent).get("num_epochs_done", 0))
        except RecordError:
            return "?"
    return "none"


if __name__ == "__main__":
    sys.exit(main())
