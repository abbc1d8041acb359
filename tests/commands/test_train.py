"""The training command around the training: refusals, sweeps, tables, exit codes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_a_refused_command_writes_nothing_and_exits_with_2(
    train: Any, trained: list, tmp_path: Path, capfd: Any
) -> None:
    assert train("router=amodd", "capacity.fraction=1.5", "seed=0,-1", "-m") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "router = amodd",
        "capacity.fraction = 1.5",
        "seed = -1",
    ]
    assert trained == []
    assert list(tmp_path.iterdir()) == []


def test_a_single_run_prints_its_results_and_leaves_no_other_folder(
    train: Any, trained: list, tmp_path: Path, capfd: Any
) -> None:
    assert train("router=linear", "seed=0") == 0
    out = capfd.readouterr().out
    assert "note: router=linear is learned but gets no gradient" in out
    assert "test/acc   90.00 %" in out
    assert "run folder: runs/linear-none-topk0.5-vit_micro-digits-s0-" in out
    assert [call["command"] for call in trained] == ["python -m routing_lab.train router=linear seed=0"]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_finished_run_is_reported_and_rerun_trains_afresh(train: Any, trained: list, capfd: Any) -> None:
    assert train("seed=2") == train("seed=2") == 0
    assert len(trained) == 1
    assert "had finished, nothing was trained" in capfd.readouterr().out
    assert train("seed=2", "rerun=true") == 0
    assert len(trained) == 2


def test_a_failed_run_exits_with_1(train: Any, capfd: Any) -> None:
    assert train("seed=13") == 1
    captured = capfd.readouterr()
    assert "failed: ValueError: thirteen (runs/" in captured.err
    assert "Traceback" not in captured.err


def test_a_sweep_prints_and_writes_its_table(train: Any, trained: list, tmp_path: Path, capfd: Any) -> None:
    assert train("router=amod,random", "seed=0,1,2", "-m") == 0
    out = capfd.readouterr().out
    assert [(call["router"], call["seed"]) for call in trained] == [
        (r, s) for r in ("amod", "random") for s in (0, 1, 2)
    ]
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    assert {call["group"] for call in trained} == {folder.name}
    assert f"table: runs/sweeps/{folder.name}/sweep.csv" in out
    assert "6 of 6 cells finished, 6 of them trained now" in out
    assert "Differences" in out
    assert "[88.52, 93.48]" in out  # 91 +- t(2 df) / sqrt(3)
    assert "note: ratio 0.5 % (and 5 more like it)" in out
    assert len(list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))) >= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]

    trained.clear()
    assert train("router=amod,random", "seed=0,1,2", "-m") == 0
    assert trained == []
    assert "6 of 6 cells finished, 0 of them trained now" in capfd.readouterr().out


def test_a_failed_cell_leaves_the_others_alone_and_is_taken_up_again(train: Any, trained: list, capfd: Any) -> None:
    assert train("seed=12,13,14", "-m") == 1
    out = capfd.readouterr().out
    assert [call["seed"] for call in trained] == [12, 13, 14]
    assert "  seed=13: failed: ValueError: thirteen (runs/amod-none-topk0.5-vit_micro-digits-s13-" in out
    assert "2 of 3 cells finished" in out
    trained.clear()
    assert train("seed=12,13,14", "-m") == 1
    assert [call["seed"] for call in trained] == [13]


def test_an_interruption_ends_the_sweep(train: Any, trained: list, capfd: Any) -> None:
    assert train("seed=1,99,2", "-m") == 128 + 15
    out = capfd.readouterr().out
    assert [call["seed"] for call in trained] == [1, 99]
    assert "  seed=99: interrupted: stopped by SIGTERM" in out
    assert "  seed=2: did not run to its end" in out
    assert train("seed=99") == 128 + 15


def test_options_may_stand_between_overrides(train: Any, trained: list) -> None:
    assert train("router=random", "-m", "seed=0,1") == 0
    assert [call["seed"] for call in trained] == [0, 1]


def test_outcomes_of_jobs_in_other_processes_are_read_from_disk(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from routing_lab.sweeps import read_outcomes, report_sweep, write_outcome

    monkeypatch.chdir(tmp_path)
    failed = {
        "status": "failed",
        "error": "it broke",
        "trained": False,
        "signal": None,
        "folder": "runs/x",
        "overrides": ["seed=1", "a=1"],
    }
    write_outcome(tmp_path / "launch", 1, failed)
    outcomes = read_outcomes(tmp_path / "launch")
    assert report_sweep(tmp_path / "sweep", [["seed=0", "a=1"], ["seed=1", "a=1"]], outcomes) == 1
    out = capsys.readouterr().out
    assert "  seed=0: left no outcome" in out
    assert "  seed=1: failed: it broke (runs/x)" in out


def test_two_identical_sweeps_at_once_count_their_own_cells(tmp_path: Path) -> None:
    from routing_lab.sweeps import Launch, write_outcome

    outcome = {"status": "finished", "error": None, "trained": True, "signal": None, "folder": "x", "overrides": []}
    first, second = Launch(tmp_path), Launch(tmp_path)
    write_outcome(first.outcome_dir, 0, outcome)

    def launch() -> None:
        write_outcome(second.outcome_dir, 1, {**outcome, "trained": False})

    code, outcomes = second(launch)
    assert (code, list(outcomes)) == (0, [1])
    assert list(first(lambda: None)[1]) == [0]
    assert list(tmp_path.iterdir()) == []


def test_an_error_outside_training_fails_its_cell_only(train: Any, trained: list, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(sys.modules["routing_lab.training.run"], "run_cell", lambda *args, **options: 1 / 0)
    assert train("seed=0,1", "-m") == 1
    captured = capfd.readouterr()
    assert "  seed=0: failed: ZeroDivisionError: division by zero" in captured.out
    assert "  seed=1: failed: ZeroDivisionError" in captured.out


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_the_sweep_folder_is_the_same_inside_a_job(launcher: str) -> None:
    """What parallel launchers do: compose a job's configuration from the sweep's, in another process."""
    from hydra.core.utils import setup_globals
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from routing_lab.config import Composer

    setup_globals()
    loader = Composer().loader
    sweep = loader.load_configuration("train", ["seed=0,1", f"hydra/launcher={launcher}"], run_mode=RunMode.MULTIRUN)
    folder = sweep.hydra.sweep.dir
    job = loader.load_sweep_config(sweep, ["seed=1"])
    assert OmegaConf.select(job, "hydra.sweep.dir") == folder
    assert OmegaConf.select(job, "hydra.overrides.task") == ["seed=1"]


class TestAsACommand:
    """Real processes: what a shell sees."""

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, timeout=120)

    def test_refusal(self, tmp_path: Path) -> None:
        done = self.run("-m", "routing_lab.train", "seed=-1", "rooter=amod", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        expected = "seed = -1: must be a whole number at least 0 and less than 18446744073709551616"
        assert done.stderr.splitlines()[-1] == expected
        assert list(tmp_path.iterdir()) == []

    def test_the_console_script_finds_its_configuration_from_anywhere(self, tmp_path: Path) -> None:
        code = "import sys; from routing_lab.cli import main; sys.argv[0] = 'routing-lab'; main()"
        done = self.run("-c", code, "train", "--cfg", "job", "router=linear", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "_target_: routing_lab.routing.routers.LinearRouter" in done.stdout
        assert done.stdout.splitlines()[-2:] == [
            "# layers: T-D-T-D-T-D (T dense, D routed block)",
            "# ceiling: at most 1.89 times fewer multiply-accumulates than the dense model",
        ]
        assert list(tmp_path.iterdir()) == []

    def test_help_and_info_are_hydras_and_import_no_torch(self, tmp_path: Path) -> None:
        code = (
            "import sys; from routing_lab.train import main\n"
            "try: main()\n"
            "finally: print([n for n in ('torch', 'timm', 'lightning') if n in sys.modules], file=sys.stderr)"
        )
        for option, said in (("--help", "visibility: all, kept"), ("--info=searchpath", "main")):
            done = self.run("-c", code, option, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert said in done.stdout
            assert done.stderr.splitlines()[-1] == "[]"
        assert list(tmp_path.iterdir()) == []
