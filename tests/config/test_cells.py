"""A command's cells: expanded as Hydra will, every one checked before the first starts."""

from __future__ import annotations

import pytest

from routing_lab.config import Composer, ConfigError, check_command
from routing_lab.config.compose import expand, sweep_name
from routing_lab.sweeps import shares


def command(*overrides: str, multirun: bool = True):
    return check_command(Composer(), overrides, multirun)


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        command(*overrides)
    return str(caught.value).splitlines()


def test_cells_are_the_product_in_order() -> None:
    found = command("router=amod,linear", "seed=range(0,2)", "train.epochs=9")
    assert found.is_sweep
    assert found.cells == [
        ["router=amod", "seed=0", "train.epochs=9"],
        ["router=amod", "seed=1", "train.epochs=9"],
        ["router=linear", "seed=0", "train.epochs=9"],
        ["router=linear", "seed=1", "train.epochs=9"],
    ]
    assert found.warnings == [
        "router=linear is learned but gets no gradient under scaling=none: it stays as it was initialised"
    ]
    assert expand(["capacity.fraction=choice(0.5,0.25)", "seed=0"]) == [
        ["capacity.fraction=0.5", "seed=0"],
        ["capacity.fraction=0.25", "seed=0"],
    ]


def test_a_single_run_is_one_cell() -> None:
    found = command("seed=3", multirun=False)
    assert (found.is_sweep, found.cells, found.sweep_dir) == (False, [["seed=3"]], None)
    assert command("hydra.mode=MULTIRUN", "seed=3", multirun=False).is_sweep


def test_a_problem_of_every_cell_is_said_once() -> None:
    assert refused("router=amod,mix", "seed=0,1", "bypass=project") == [
        "bypass = project: is defined for placement.sublayer=attention only, not block"
    ]


def test_a_problem_of_some_cells_says_which() -> None:
    assert refused("router=amod,cls_attention", "backbone.class_token=false", "backbone.pool=avg", "seed=0,1") == [
        "router = cls_attention: reads the class token, which this backbone does not have"
    ]
    (line,) = refused("router=amod,mlp", "capacity=topk,argmax", "seed=0,1")
    assert line.startswith("[router=amod capacity=argmax] capacity = argmax: follows the router's own decision")
    lines = refused("capacity.fraction=0.5,2", "placement.first=1,9", "seed=0,-1")
    assert {line.split(":")[0] for line in lines} == {"placement.first = 9", "seed = -1", "capacity.fraction = 2"}


def test_syntax_errors_and_missing_launchers_are_reported() -> None:
    assert refused("router=[", "seed=")[0].startswith("router = [: is not a valid override")
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    assert command("hydra/launcher=joblib", "seed=0,1").launcher["n_jobs"] == -1


def test_a_launcher_that_is_not_installed_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hydra_plugins.hydra_ray_launcher", None)
    (line,) = refused("hydra/launcher=ray", "seed=0,1")
    assert line.startswith("hydra/launcher = ray: cannot be imported: ")
    assert line.endswith("pip install 'routing_lab[ray]'")


def test_the_folder_of_a_sweep_is_named_after_what_is_run() -> None:
    folder = command("router=amod", "seed=0,1", "paths.runs=out").sweep_dir
    assert folder is not None
    assert folder.startswith("out/sweeps/router=amod-seed=0_1-")
    assert sweep_name(["router=amod", "seed=0,1"]) == sweep_name(["seed=0,1", "router=amod"][::-1])
    assert sweep_name(["seed=0,1", "runtime.workers=2", "wandb.mode=disabled"]) == sweep_name(["seed=0,1"])
    assert sweep_name(["seed=0,1"]) != sweep_name(["seed=0,2"])
    assert len(sweep_name([f"train.lr={value}" for value in range(100)])) < 80


def test_parallel_launchers_share_the_processors_out(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("shutil.which", lambda program: program)  # SLURM's, where there is none

    def threads(jobs: int, *overrides: str) -> int | None:
        return shares(command("seed=0,1", *overrides).launcher, jobs)[0]

    assert threads(3) is None
    assert threads(3, "hydra/launcher=joblib") == 2
    assert threads(3, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2") == 4
    assert threads(3, "hydra/launcher=joblib", "hydra.launcher.n_jobs=-7") == 4
    assert threads(20, "hydra/launcher=joblib") == 1
    assert threads(2, "hydra/launcher=submitit_local") == 4
    assert threads(2, "hydra/launcher=submitit_slurm") is None
    assert shares(command("seed=0,1", "hydra/launcher=submitit_local").launcher, 20) == (1, 8)
