from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import read_history

Run = Callable[..., dict[str, Any]]


def test_a_finished_run_leaves_a_complete_record(run: Run) -> None:
    result = run("router=amod", "scaling=multiply")
    record, folder = result["record"], RunFolder(result["folder"])
    assert (result["status"], result["error"], result["trained"]) == ("finished", None, True)
    assert record["metrics"].keys() >= {"val/acc", "val/loss", "train/loss", "train/acc", "test/acc", "test/loss"}
    assert record["cost"].keys() >= {
        *("params", "router_params", "macs_dense", "macs_nominal", "macs_measured"),
        *("train_seconds", "train_images_per_second"),
    }
    assert record["routing"]["routed_layers"] == [1]
    assert record["routing"]["initial_tokens"] == 17
    assert record["routing"]["prefix_tokens"] == 1
    assert record["routing"]["tokens"] == {0: 17, 1: 8}
    assert record["cost"]["tokens_processed"] == 25 / 34
    assert record["cost"]["macs_fraction"] == record["cost"]["macs_measured"] / record["cost"]["macs_dense"]
    assert record["cost"]["macs_sd"] == 0
    assert record["routing"]["kept_fraction"].keys() == {1}
    assert record["environment"].keys() >= {"python", "torch", "timm", "lightning", "cpu", "threads", "device"}
    assert record["git"].keys() == {"commit", "dirty"}
    assert record["data"].keys() >= {"name", "fingerprint", "sizes"}
    assert len(record["init"]["hash"]) == 64
    assert folder.config.exists()
    assert not folder.last.exists()
    assert read_history({"folder": folder.path})["epoch"] == [0, 1]
    assert len(load_file(folder.final)) > 0


def test_accuracy_and_loss_equal_the_predictions(run: Run) -> None:
    result = run("router=linear")
    with np.load(RunFolder(result["folder"]).predictions) as saved:
        arrays = dict(saved)
    assert arrays["index"].dtype == np.int64
    assert (np.diff(arrays["index"]) > 0).all()
    assert arrays["logits"].shape == (len(arrays["index"]), 10)
    metrics = result["record"]["metrics"]
    assert metrics["test/acc"] == np.mean(arrays["prediction"] == arrays["target"])
    assert metrics["test/acc"] == np.mean(arrays["logits"].argmax(1) == arrays["target"])
    assert metrics["test/loss"] == np.mean(arrays["loss"], dtype=np.float64)


def test_the_cost_of_every_example_is_kept(run: Run) -> None:
    """Under a threshold examples differ in it; training is counted by what the capacity had it compute."""
    ragged = run("router=linear", "capacity=threshold", "capacity.threshold=0.0")
    with np.load(RunFolder(ragged["folder"]).predictions) as saved:
        macs = saved["macs"]
    cost = ragged["record"]["cost"]
    assert np.ptp(macs) > 0
    assert cost["macs_measured"] == pytest.approx(macs.mean())
    assert cost["macs_sd"] == pytest.approx(macs.std())
    warm = run("router=linear", "capacity.warmup=0.5", "capacity.fraction=0.5")
    epochs = read_history({"folder": warm["folder"]})["cost/train_flops"]
    cost = warm["record"]["cost"]
    # At first every token is kept, and read by the router. Of 1257 examples 9 whole batches of 128 are trained on.
    assert epochs == [6 * 1152 * (cost["macs_dense"] + 17 * 16), 6 * 1152 * cost["macs_measured"]]
    assert cost["train_flops"] == sum(epochs)


def test_logits_are_left_out_of_large_predictions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing_lab.tasks.classification.MAX_LOGITS", 100)
    with np.load(RunFolder(run()["folder"]).predictions) as saved:
        assert set(saved) == {"index", "target", "prediction", "loss", "macs"}


def test_a_finished_run_is_reported_not_repeated(run: Run) -> None:
    first, second = run(), run()
    assert (first["trained"], second["trained"]) == (True, False)
    assert second["status"] == "finished"
    assert second["record"]["metrics"] == first["record"]["metrics"]


def test_rerun_starts_afresh_and_keeps_the_old_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    first = run()
    again = run("rerun=true")
    assert again["trained"]
    assert again["folder"] == first["folder"]
    assert again["record"]["metrics"] == first["record"]["metrics"]
    aside = list((first["folder"].parent / ".replaced").iterdir())
    assert [(path / "run.json").exists() for path in aside] == [True]
    assert str(aside[0]) in capsys.readouterr().out


HOLD_AND_FINISH = """
import os, sys, time
from pathlib import Path
from routing_lab.runs.folder import RunFolder
folder = RunFolder(sys.argv[1])
with folder.lock(print):
    print("held", flush=True)
    sys.stdin.readline()
    os.replace(folder.path / "elsewhere.json", folder.record)
"""


def test_a_run_that_another_process_finishes_is_waited_for(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(run()["folder"])
    folder.record.rename(folder.path / "elsewhere.json")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_FINISH, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "held\n"
        stdin = other.stdin

        def told(line: str) -> None:
            print(line)
            print("finish", file=stdin, flush=True)

        monkeypatch.setattr("routing_lab.training.run._say", told)
        result = run()
    finally:
        other.kill()
        other.communicate()
    assert (result["status"], result["trained"]) == ("finished", False)
    assert "is working on this run" in capsys.readouterr().out


def test_a_failure_is_returned_and_its_traceback_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text("no weights")
    result = run("init=checkpoint", f"init.path={tmp_path / 'weights.pt'}")
    assert result["status"] == "failed"
    assert "expected a safetensors file" in result["error"]
    folder = RunFolder(result["folder"])
    assert "Traceback" in folder.error_log.read_text()
    assert (folder.read_record() or {})["status"] == "failed"


def test_a_loss_that_is_not_finite_fails_the_run(run: Run) -> None:
    result = run("train.lr=1e30", "train.optimizer=sgd", "train.clip_grad=null", "train.schedule=constant")
    assert result["status"] == "failed"
    assert "train.lr" in result["error"]


def test_arms_of_a_seed_start_from_the_same_backbone(run: Run) -> None:
    hashes = {
        run(f"router={router}", "train.epochs=0")["record"]["init"]["hash"] for router in ("dense", "amod", "mlp")
    }
    assert len(hashes) == 1
    assert run("train.epochs=0", "seed=1")["record"]["init"]["hash"] not in hashes


def test_zero_epochs_test_the_initial_weights(run: Run) -> None:
    record = run("train.epochs=0")["record"]
    assert record["metrics"].keys() >= {"val/acc", "test/acc"}
    assert record["cost"]["train_seconds"] == 0


def test_the_small_rest_of_an_update_is_measured_and_said_once(run: Run) -> None:
    record = run("router=amod", "scaling=multiply", "scaling.normalize=raw")["record"]
    ratio = record["routing"]["update_ratio"]
    assert all(0 < value < 0.15 for value in ratio.values())
    assert len([line for line in record["warnings"] if "small part of" in line]) == 1
    record = run("router=constant", "router.value=0.01", "scaling=multiply")["record"]
    assert record["routing"]["update_ratio"] == pytest.approx({1: 0.01})
    assert [line for line in record["warnings"] if "layer 1: 1 %" in line]
    assert run("router=amod", "scaling=none")["record"]["routing"]["update_ratio"] == {1: 1.0}


def test_the_best_epoch_is_kept_when_asked(run: Run) -> None:
    result = run("train.selection=best", "train.epochs=4", "train.lr=0.05", "train.schedule=constant")
    history = read_history({"folder": result["folder"]})["val/acc"]
    metrics = result["record"]["metrics"]
    assert metrics["selected_epoch"] == int(np.argmax(history))
    assert metrics["val/acc"] == max(history)
    best = load_file(RunFolder(result["folder"]).best)
    final = load_file(RunFolder(result["folder"]).final)
    assert all(torch.equal(best[name], final[name]) for name in final)


def test_the_moving_average_is_what_is_tested_and_kept(run: Run) -> None:
    plain, averaged = run(), run("train.ema_decay=0.999")
    start, moved = (load_file(RunFolder(result["folder"]).final) for result in (plain, averaged))
    assert start.keys() == moved.keys()
    # After a few steps an average with this decay has hardly left the initial weights.
    assert averaged["record"]["metrics"]["test/acc"] != plain["record"]["metrics"]["test/acc"]


def test_the_dense_run_is_trained_once_and_reused_by_every_arm(run: Run) -> None:
    first = run("router=amod", "init=dense", "init.epochs=3")
    second = run("router=linear", "init=dense", "init.epochs=3")
    assert first["record"]["init"] == second["record"]["init"]
    dense = first["folder"].parent / first["record"]["init"]["source"]
    assert dense.name.startswith("dense-")
    assert (RunFolder(dense).finished_record() or {})["metrics"]["selected_epoch"] == 2
    again = run("router=dense", "train.epochs=3")
    assert (again["folder"], again["trained"]) == (dense, False)
    adapted = run("router=amod", "init=dense", "init.epochs=3", "train.epochs=0", "capacity.fraction=1.0")
    assert adapted["record"]["metrics"]["test/acc"] == again["record"]["metrics"]["test/acc"]


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_distillation_learns_from_the_dense_run(run: Run, kind: str) -> None:
    result = run("router=amod", f"train.distill={kind}")
    assert result["status"] == "finished"
    plain = run("router=amod")
    assert result["record"]["metrics"]["train/loss"] != plain["record"]["metrics"]["train/loss"]
    names = load_file(RunFolder(result["folder"]).final).keys()
    assert names == load_file(RunFolder(plain["folder"]).final).keys()
    cost, alone = result["record"]["cost"], plain["record"]["cost"]
    assert cost["teacher_macs"] == cost["macs_dense"]
    taught = 2 * cost["teacher_macs"] * 2 * 1152
    assert cost["train_flops"] == pytest.approx(alone["train_flops"] + taught)
    assert len([path for path in result["folder"].parent.iterdir() if path.name.startswith("dense-")]) == 1


def test_a_checkpoint_is_loaded_strictly_but_for_head_and_routers(run: Run, tmp_path: Path) -> None:
    source = run("router=dense")
    weights = load_file(RunFolder(source["folder"]).final)
    kept = {name: value for name, value in weights.items() if not name.startswith("head.")}

    def start(state: dict[str, torch.Tensor], name: str, *overrides: str) -> dict[str, Any]:
        save_file(state, tmp_path / name)
        path = f"init.path={tmp_path / name}"
        return run("router=linear", "init=checkpoint", path, "train.epochs=0", *overrides)

    assert start(weights, "whole.safetensors")["record"]["init"]["source"].endswith("whole.safetensors")
    other_head = kept | {"head.weight": torch.zeros(7, 16), "head.bias": torch.zeros(7)}
    result = start(other_head, "other.safetensors")
    assert [line for line in result["record"]["warnings"] if "head for 7 classes" in line]
    assert [line for line in start(kept, "none.safetensors")["record"]["warnings"] if "no head" in line]
    broken = {name: value for name, value in weights.items() if name != "norm.weight"}
    result = start(broken, "broken.safetensors")
    assert result["status"] == "failed"
    assert "norm.weight is missing" in result["error"]


def test_a_torch_checkpoint_holds_tensors_only(run: Run, tmp_path: Path) -> None:
    weights = load_file(RunFolder(run("router=dense")["folder"]).final)
    path = tmp_path / "weights.pth"
    torch.save({"model": {f"module.{name}": value for name, value in weights.items()}}, path)
    assert run("init=checkpoint", f"init.path={path}", "train.epochs=0")["status"] == "finished"
    torch.save({"model": Path("anything")}, path)
    result = run("init=checkpoint", f"init.path={path}", "train.epochs=0", "seed=1")
    assert result["status"] == "failed"
    assert "plain tensors" in result["error"]


def test_published_weights_that_cannot_be_had_are_explained(run: Run) -> None:
    result = run("backbone=deit_tiny", "init=pretrained", "backbone.width=192", "backbone.depth=12", "backbone.heads=3")
    assert result["status"] == "failed"
    assert "init=checkpoint init.path=" in result["error"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.mixup=0.8", "train.cutmix=1.0", "train.erasing=0.25"],
        ["train.accumulate=4", "train.clip_grad=0.1"],
        ["train.precision=bf16-mixed"],
        ["train.layer_decay=0.5", "router=linear"],
        ["train.optimizer=sgd", "train.schedule=step"],
        ["train.optimizer=lion", "train.schedule=linear", "train.betas=null"],
        ["train.augment=randaugment", "runtime.workers=1", "train.batch_size=512", "train.epochs=1"],
        ["runtime.progress=plain", "runtime.threads=1"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_recipe_options_run(run: Run, overrides: list[str]) -> None:
    result = run(*overrides)
    assert result["error"] is None
    assert np.isfinite(result["record"]["metrics"]["train/loss"])


@pytest.mark.parametrize("router", ["oracle", "random"])
def test_planted_runs_record_how_many_informative_patches_each_layer_keeps(run: Run, router: str) -> None:
    planted = ["data=planted", "data.num_train=256", "data.num_val=64", "data.num_test=128", "train.epochs=1"]
    record = run(*planted, f"router={router}", "placement=every", "capacity.fraction=0.3")["record"]
    recall = record["routing"]["informative_recall"]
    assert recall.keys() == record["routing"]["kept_fraction"].keys()
    assert record["metrics"]["test/informative_recall"] == np.mean(list(recall.values()))
    if router == "oracle":
        assert set(recall.values()) == {1.0}
    else:
        assert 0.15 < recall[1] < 0.35  # 4 of 16 patches


def test_frozen_routers_stay_as_they_were_initialised(run: Run) -> None:
    def routers(*overrides: str) -> dict[str, torch.Tensor]:
        weights = load_file(RunFolder(run("router=linear", "scaling=multiply", *overrides)["folder"]).final)
        return {name: value for name, value in weights.items() if name.startswith("router.")}

    initial, frozen = routers("train.epochs=0"), routers("train.epochs=1", "train.frozen=[routers]")
    free = routers("train.epochs=1")
    assert initial.keys() == frozen.keys() != set()
    assert all(torch.equal(initial[name], frozen[name]) for name in initial)
    assert not any(torch.equal(initial[name], free[name]) for name in initial if name.endswith("weight"))
