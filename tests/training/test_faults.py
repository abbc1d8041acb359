"""What may happen to a process, a disk or an installation while a run trains."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal.utils import run_and_report
from tests.training.conftest import SMALL
from tests.training.test_resume import send, stop_at, traces

from routing_lab.config import Loaded
from routing_lab.interrupts import Interrupted
from routing_lab.runs import folder as folder_module
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import read_history, read_record
from routing_lab.sweeps import launched
from routing_lab.tasks.classification import Classification
from routing_lab.training import environment
from routing_lab.training import run as run_module

Run = Callable[..., dict[str, Any]]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Within the block a file cannot grow beyond `size` bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def leftovers(folder: RunFolder) -> list[Path]:
    return [path for path in folder.path.rglob(".*") if path.is_file()]


# --- disks ---


@pytest.mark.parametrize("method", ["training_step", "test_step"])
def test_a_full_disk_fails_the_run_with_a_status_and_leaves_nothing_half(
    run: Run, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with monkeypatch.context() as patch, files_up_to(resource.RLIM_INFINITY):
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.RLIM_INFINITY))  # noqa: E731
        stop_at(patch, method, 2 if method == "test_step" else 11, limit)
        result = run()
    folder = RunFolder(result["folder"])
    assert result["status"] == "failed"
    assert (folder.read_record() or {})["status"] == "failed"
    assert leftovers(folder) == []
    assert run()["status"] == "finished"


def test_a_disk_without_room_for_the_record_is_said_and_the_run_is_taken_up_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: RunFolder, *content: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 11, lambda: patch.setattr(RunFolder, "write_record", full))
        patch.setattr(RunFolder, "write_error", full)
        result = run()
    assert (result["status"], "No space left" in result["error"]) == ("failed", True)
    assert "its record does not say" in capsys.readouterr().out
    assert (RunFolder(result["folder"]).read_record() or {})["status"] == "running"
    assert run()["status"] == "finished"


def test_a_folder_that_is_removed_while_it_trains_fails_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Path] = []
    monkeypatch.setattr(run_module, "_say", lambda line: None)
    original = RunFolder.prepare
    monkeypatch.setattr(RunFolder, "prepare", lambda self: (runs.append(self.path), original(self))[1])
    stop_at(monkeypatch, "training_step", 11, lambda: shutil.rmtree(runs[0]))
    result = run()
    assert (result["status"], "was removed" in result["error"]) == ("failed", True)
    assert not runs[0].exists()


# --- memory and time ---


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        (lambda: torch.empty(2**52, dtype=torch.uint8), "can't allocate memory"),
        (lambda: bytearray(2**62), "MemoryError"),
    ],
    ids=["torch", "python"],
)
def test_more_memory_than_there_is_fails_the_run_which_is_taken_up_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, asks: Callable[[], object], said: str
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 11, asks)
        result = run()
    folder = RunFolder(result["folder"])
    assert (result["status"], said in result["error"]) == ("failed", True)
    assert (folder.read_record() or {})["num_epochs_done"] == 1
    assert leftovers(folder) == []
    assert run()["status"] == "finished"


def test_a_clock_that_is_put_back_changes_nothing_but_the_dates(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Earlier(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime(1999, 12, 31, tzinfo=tz)

    undisturbed = run(runs=tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 11, send(signal.SIGTERM))
        assert run()["status"] == "interrupted"
    monkeypatch.setattr(folder_module, "datetime", Earlier)
    result = run()
    assert (result["status"], read_record(result["folder"])["heartbeat"]["time"][:4]) == ("finished", "1999")
    assert traces(result) == traces(undisturbed)
    assert run()["trained"] is False


# --- processes ---


def test_a_killed_data_worker_fails_the_run_which_is_taken_up_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill() -> None:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, signal.SIGKILL)
            worker.join()

    asked = ("runtime.workers=1", "train.batch_size=32", "train.augment=randaugment", "train.epochs=1")
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 2, kill)
        result = run(*asked)
    assert (result["status"], "worker" in result["error"]) == ("failed", True)
    assert run(*asked)["status"] == "finished"


def test_workers_that_are_spawned_read_the_same_data(run: Run, tmp_path: Path) -> None:
    alone = run("train.epochs=1", "train.augment=light")
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        spawned = run("train.epochs=1", "train.augment=light", "runtime.workers=1", runs=tmp_path / "spawned")
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert spawned["error"] is None
    assert traces(spawned)["weights"] == traces(alone)["weights"]


def test_a_lock_that_a_dead_process_of_another_host_left_is_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 11, send(signal.SIGTERM))
        folder = RunFolder(run()["folder"])
    record = folder.record.read_text().replace('"interrupted"', '"running"')
    folder.record.write_text(record.replace(f'"pid": {os.getpid()}', '"pid": 1'))
    lock = folder.path.parent / ".locks" / f"{folder.path.name}.lock"
    lock.write_text("1 elsewhere\n")
    said: list[str] = []
    monkeypatch.setattr(run_module, "_say", said.append)
    assert run()["status"] == "finished"
    assert said == []


def test_processes_in_sessions_of_their_own_end_with_an_interrupted_launch() -> None:
    jobs: list[subprocess.Popen[bytes]] = []

    def launch() -> None:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        jobs.append(subprocess.Popen(command, start_new_session=True))
        raise Interrupted(signal.SIGTERM)

    begin = time.monotonic()
    assert launched(launch) == 128 + signal.SIGTERM
    assert jobs[0].poll() is not None or jobs[0].wait(1) is not None
    assert time.monotonic() - begin < 60


def test_a_launcher_that_gives_up_says_why_in_a_line_and_leaves_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    jobs: list[subprocess.Popen[bytes]] = []

    def launch() -> None:
        jobs.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True))
        run_and_report(lambda: [][0])

    assert launched(launch) == 1
    assert capsys.readouterr().err == "IndexError: list index out of range\n"
    assert jobs[0].poll() is not None


LONG = {word.partition("=")[0]: word for word in (*SMALL, "train.epochs=10000", "runtime.progress=plain")}


def started(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "routing_lab.train", *LONG.values(), *words, f"paths.runs={tmp_path}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_interrupted_command_says_so_in_a_sentence_whatever_runs_beside_it(tmp_path: Path) -> None:
    process = started(tmp_path, "wandb.mode=offline")
    assert process.stdout is not None
    while "epoch" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.count("\n") == 1
    assert said.startswith("interrupted: stopped by SIGTERM")
    (folder,) = (RunFolder(path.parent) for path in tmp_path.glob("*/run.json"))
    assert (folder.read_record() or {})["status"] == "interrupted"


def test_a_command_that_loads_its_modules_ends_in_a_sentence(tmp_path: Path) -> None:
    # Not by SIGINT, which a shell has its background processes ignore, and whoever runs these tests may be one.
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    (tmp_path / "hydra.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "routing_lab.train"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "interrupted: stopped by SIGTERM\n")


def test_a_second_signal_ends_a_command_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    def leave(code: int) -> None:
        left.append(code)
        raise SystemExit(code)

    def interrupted_again(folder: RunFolder, record: Any) -> None:
        if record["status"] == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        write(folder, record)

    write = RunFolder.write_record
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", leave)
        patch.setattr(RunFolder, "write_record", interrupted_again)
        stop_at(patch, "training_step", 12, send(signal.SIGTERM))
        assert launched(run) == 128 + signal.SIGINT
    assert left == [128 + signal.SIGINT]
    assert run()["status"] == "finished"


# --- numbers, code and packages ---


def test_a_loss_that_is_not_a_number_stops_the_run_and_the_last_good_weights_stay(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = Classification.objective

    def broken(self: Classification, batch: Any) -> Any:
        loss, totals, terms = objective(self, batch)
        return loss * (float("nan") if self.current_epoch == 1 else 1.0), totals, terms

    monkeypatch.setattr(Classification, "objective", broken)
    result = run("train.epochs=3")
    folder = RunFolder(result["folder"])
    assert (result["status"], "is nan" in result["error"]) == ("failed", True)
    assert (folder.read_record() or {})["num_epochs_done"] == 1
    assert read_history({"folder": folder.path})["epoch"] == [0]
    kept = torch.load(folder.last, weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in kept.values())


def interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    with monkeypatch.context() as patch:
        stop_at(patch, "training_step", 12, send(signal.SIGTERM))
        return RunFolder(run()["folder"])


def test_a_checkpoint_of_changed_code_says_what_differs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = interrupted(run, monkeypatch)
    state = torch.load(folder.last, weights_only=True)
    renamed = {name.replace("norm.", "final_norm."): value for name, value in state["state_dict"].items()}
    torch.save({**state, "state_dict": renamed}, folder.last)
    result = run()
    assert result["status"] == "failed"
    assert "last.ckpt is of other code or packages (without model.norm.weight" in result["error"]
    assert "rerun=true" in result["error"]
    torch.save({**state, "optimizer_states": [{}]}, folder.last)
    assert "rerun=true" in run()["error"]
    assert run("rerun=true")["status"] == "finished"


def test_versions_that_changed_between_interruption_and_resumption_are_kept_and_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(run, monkeypatch)
    monkeypatch.setattr(environment.torch, "__version__", "99.0")
    record = run()["record"]
    (note,) = record["environment"]["resumed"]
    assert (note["after_epoch"], note["torch"][1]) == (1, "99.0")
    assert [line for line in record["warnings"] if line.startswith("went on after 1 epochs with torch 99.0 (before ")]
    assert "resumed" not in run("seed=1")["record"]["environment"]


def test_distribution_is_started_without_a_second_command(cell: Callable[..., Loaded]) -> None:
    strategies = {
        name: run_module._strategy(cell("runtime.devices=2", "train.batch_size=128", f"runtime.strategy={name}").config)
        for name in ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_spawn")
    }
    assert strategies == {
        "auto": "ddp_spawn_find_unused_parameters_true",
        "ddp": "ddp_spawn_find_unused_parameters_true",
        "ddp_find_unused_parameters_false": "ddp_spawn_find_unused_parameters_false",
        "ddp_spawn": "ddp_spawn",
    }
