from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from routing_lab.runs.files import replacing
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import FINISHED, new_record, read_history

HOLD = """
import sys, time
from routing_lab.runs.folder import RunFolder
with RunFolder(sys.argv[1]).lock(print):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "cell-abc")
    folder.prepare()
    return folder


def record(**changes: object) -> dict[str, object]:
    return {**new_record({"seed": 0}, run_id="abc", name="cell", command="test"), **changes}


def test_making_the_object_writes_nothing(tmp_path: Path) -> None:
    RunFolder(tmp_path / "runs" / "cell")
    assert not (tmp_path / "runs").exists()


def test_a_record_is_finished_only_when_it_says_so(folder: RunFolder) -> None:
    assert folder.read_record() is None
    folder.write_record(record())
    assert folder.finished_record() is None
    folder.write_record(record(status=FINISHED))
    finished = folder.finished_record()
    assert finished is not None
    assert finished["heartbeat"]["pid"] == os.getpid()
    folder.record.write_text(folder.record.read_text()[:50])
    assert folder.finished_record() is None


def test_an_error_while_writing_leaves_the_old_file(folder: RunFolder) -> None:
    folder.error_log.write_text("old")

    def fail() -> None:
        with replacing(folder.error_log) as temporary:
            temporary.write_text("new, but not all of it")
            raise RuntimeError("disk is full")

    with pytest.raises(RuntimeError, match="full"):
        fail()
    assert folder.error_log.read_text() == "old"
    assert [path.name for path in folder.path.iterdir() if path.is_file()] == ["error.log"]


def test_leftovers_of_a_killed_writer_are_removed(folder: RunFolder) -> None:
    leftover = folder.checkpoints / ".last.ckpt.123.tmp"
    leftover.write_bytes(b"half")
    folder.prepare()
    assert not leftover.exists()


def test_history_has_a_column_for_every_key(folder: RunFolder) -> None:
    folder.write_history([{"epoch": 0, "a": 1.5}, {"epoch": 1, "a": 2.5, "b": 3.0}])
    history = read_history({"folder": folder.path})
    assert history["a"] == [1.5, 2.5]
    assert history["b"][1] == 3.0


def test_setting_a_run_aside_keeps_all_of_it(folder: RunFolder) -> None:
    folder.error_log.write_text("precious")
    first = folder.set_aside()
    folder.prepare()
    folder.error_log.write_text("second")
    second = folder.set_aside()
    assert first is not None
    assert second is not None
    assert (first / "error.log").read_text() == "precious"
    assert (second / "error.log").read_text() == "second"
    assert folder.set_aside() is None


def test_the_lock_excludes_another_process_until_it_dies(folder: RunFolder) -> None:
    folder.write_record(record())
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        said: list[str] = []

        def kill_the_holder(line: str) -> None:
            said.append(line)
            holder.send_signal(signal.SIGKILL)

        with folder.lock(kill_the_holder):
            assert len(said) == 1
        assert f"process {os.getpid()}" in said[0]
    finally:
        holder.kill()
        holder.communicate()


def test_further_processes_of_a_run_write_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "cell", writes=False)
    with folder.lock(print):
        folder.prepare()
        folder.write_config({"seed": 0})
        folder.write_record(record())
        folder.write_history([{"epoch": 0}])
        folder.write_error("error")
        folder.drop_resume_state()
    assert folder.set_aside() is None
    assert not (tmp_path / "runs").exists()
