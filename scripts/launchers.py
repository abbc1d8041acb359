"""Run sweeps through Hydra's launchers, disturb them, and say what became of their cells and processes.

    python scripts/launchers.py
    python scripts/launchers.py joblib ray

With each launcher (default: those that are installed) a sweep of three cells is run whose second starts from weights of
another model, then the same command again, then once more with weights that fit. After that one of several running
cells is ended with SIGKILL, and the same command given again; and a sweep without an end is ended with SIGTERM, after
which no process that it started may be left. The exit code is the number of answers that were not as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from routing_lab.assembly import build_model
from routing_lab.config import load

PLUGINS = {
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "ray": "hydra_plugins.hydra_ray_launcher",
}
"""Launcher -> what has to be installed for it."""

SMALL = ["backbone.depth=2", "backbone.width=16", "backbone.heads=2", "wandb.mode=disabled", "runtime.threads=1"]
WEIGHTS = ("first.safetensors", "second.safetensors", "third.safetensors")
FAILING = ["train.epochs=0", "init=checkpoint", f"init.path={','.join(WEIGHTS)}"]
LONG = ["train.epochs=60", "train.warmup_epochs=0", "seed=0,1,2"]
ENDLESS = ["train.epochs=100000", "train.warmup_epochs=0", "seed=0,1,2"]

MARK = "ROUTING_LAB_LAUNCHERS"
"""Environment variable by which the processes of a command are found again."""

SECONDS = 600.0
"""After which a command that should have got somewhere is given up."""

Answer = tuple[int, str]
"""Exit code of a command, and what it printed."""


def main() -> int:
    """Parse the command line and run everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launchers", nargs="*", help=f"some of {', '.join(PLUGINS)} (default: those installed)")
    chosen = parser.parse_args().launchers or [name for name, plugin in PLUGINS.items() if _is_installed(plugin)]
    if unknown := set(chosen) - set(PLUGINS):
        parser.error(f"{', '.join(unknown)}: no such launcher; there are {', '.join(PLUGINS)}")
    failed = 0
    for launcher in chosen:
        root = Path(tempfile.mkdtemp(prefix="launchers_"))
        try:
            for what, faults in _tried(launcher, root):
                failed += bool(faults)
                print(f"{launcher}: {what}: {'; '.join(faults) or 'as expected'}", flush=True)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    print(f"failed: {failed}")
    return failed


def _tried(launcher: str, root: Path) -> Iterator[tuple[str, list[str]]]:
    """What was done with a launcher, and what was not as expected."""
    model = build_model(load([*SMALL, "train.epochs=0"]).config, 10)
    fitting = dict(model.get_submodule("backbone").state_dict())
    for name in WEIGHTS:
        save_file(fitting if name != WEIGHTS[1] else {"of": torch.zeros(1)}, root / name)
    answer = _answer(launcher, FAILING, root)
    yield (
        "a cell that fails",
        _unlike(answer, 1, "2 of 3 cells finished, 2 of them trained now", f"{WEIGHTS[1]}: failed"),
    )
    answer = _answer(launcher, FAILING, root)
    yield "again", _unlike(answer, 1, "2 of 3 cells finished, 0 of them trained now", f"{WEIGHTS[1]}: failed")
    save_file(fitting, root / WEIGHTS[1])
    answer = _answer(launcher, FAILING, root)
    yield "with weights that fit", _unlike(answer, 0, "3 of 3 cells finished, 1 of them trained now")

    killed = _disturbed(launcher, LONG, root, lambda process: os.kill(_running(root)[0], signal.SIGKILL))
    yield "a cell is killed", _unlike(killed, 1, "The same command runs what is missing.")
    yield "again, after the kill", _unlike(_answer(launcher, LONG, root), 0, "3 of 3 cells finished")

    ended = _disturbed(launcher, ENDLESS, root, lambda process: process.terminate())
    faults = _unlike(ended, 128 + signal.SIGTERM, "interrupted: stopped by SIGTERM")
    yield "SIGTERM", [*faults, *(f"left alive: {' '.join(process.cmdline())[:90]}" for process in _started(root))]


# --- commands ---


def _begun(launcher: str, words: Sequence[str], root: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "routing_lab.train", *SMALL, *words, f"hydra/launcher={launcher}", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: root.name}
    with open(root / "log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=root, env=environment)


def _ended(process: subprocess.Popen[bytes], root: Path) -> Answer:
    return process.wait(SECONDS), (root / "log").read_text(errors="replace")


def _answer(launcher: str, words: Sequence[str], root: Path) -> Answer:
    return _ended(_begun(launcher, words, root), root)


def _disturbed(
    launcher: str, words: Sequence[str], root: Path, disturb: Callable[[subprocess.Popen[bytes]], None]
) -> Answer:
    """The answer of a command to which something is done once a cell of it trains."""
    process = _begun(launcher, words, root)
    deadline = time.monotonic() + SECONDS
    while not _running(root) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    disturb(process)
    return _ended(process, root)


def _unlike(answer: Answer, code: int, *told: str) -> list[str]:
    """In what an answer differs from the expected one."""
    faults = [f"exit code {answer[0]} instead of {code}"] if answer[0] != code else []
    faults += [f"does not say {text!r}" for text in told if text not in answer[1]]
    faults += ["a traceback"] if "Traceback" in answer[1] else []
    return [*faults, answer[1]] if faults else []


# --- what runs ---


def _running(root: Path) -> list[int]:
    """The processes whose runs have got through an epoch and go on."""
    found = []
    for path in root.glob("runs/*/run.json"):
        with suppress(OSError, ValueError):
            record = json.loads(path.read_text())
            if record["status"] == "running" and record["num_epochs_done"]:
                found.append(int(record["heartbeat"]["pid"]))
    return [process for process in found if psutil.pid_exists(process)]


def _started(root: Path) -> list[psutil.Process]:
    """Processes that a command started and that are there still."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == root.name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_installed(plugin: str) -> bool:
    with suppress(ImportError):
        return find_spec(plugin) is not None
    return False


if __name__ == "__main__":
    sys.exit(main())
