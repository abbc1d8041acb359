"""Records: written whole or not at all, read back exactly, flagged when broken."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.runs import files, records

CONFIG = {
    "backbone": {"name": "vit_micro", "depth": 6, "_target_": "x.Y"},
    "router": {"name": "amod", "head_reduction": "mean"},
    "capacity": {"name": "topk", "fraction": [0.5, 0.25]},
    "data": {"name": "digits"},
    "train": {"name": "quick", "lr": 1e-3},
    "seed": 3,
    "study": None,
    "arm": "attention",
    "paths": {"runs": "runs"},
}


def make_run(folder: Path, **changes: object) -> dict:
    folder.mkdir(parents=True)
    record = records.new_record(CONFIG, run_id=folder.name, name=folder.name, command="the command")
    record.update(changes)
    files.write_json(folder / "run.json", record)
    return record


def test_record_reads_back_as_written(tmp_path: Path) -> None:
    written = make_run(tmp_path / "a", status="finished", metrics={"test/acc": 0.1 + 0.2, "test/loss": 1e-300})
    read = records.read_record(tmp_path / "a")
    assert read.pop("folder") == str(tmp_path / "a")
    assert read == written
    assert read["axes"]["router"] == {"name": "amod", "head_reduction": "mean"}
    assert read["arm"] == "attention"
    assert read["seed"] == 3


@given(st.floats(allow_nan=False))
def test_floats_round_trip(value: float) -> None:
    assert json.loads(json.dumps(files._plain({"x": value})))["x"] == value


def test_bytes_do_not_depend_on_the_order_of_keys_nor_on_the_kind_of_number(tmp_path: Path) -> None:
    one = {"kept": {11: 0.5, 3: np.float64(0.25)}, "a": (1, 2), "path": Path("x")}
    two = {"path": "x", "a": [1, 2], "kept": {"3": 0.25, "11": 0.5}}
    files.write_json(tmp_path / "one", one)
    files.write_json(tmp_path / "two", two)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert list(json.loads((tmp_path / "one").read_text())["kept"]) == ["3", "11"]


def test_numpy_values_nan_and_infinity_are_kept(tmp_path: Path) -> None:
    values = {"n": np.int64(3), "a": np.arange(2), "nan": math.nan, "inf": -math.inf, "b": np.bool_(True)}
    files.write_json(tmp_path / "x", values)
    read = json.loads((tmp_path / "x").read_text())
    assert read["n"] == 3
    assert read["a"] == [0, 1]
    assert read["inf"] == -math.inf
    assert math.isnan(read["nan"])
    assert read["b"] is True


def test_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write_json(tmp_path / "run.json", {"a": 1})
    with pytest.raises(TypeError, match="object"):
        files.write_json(path, {"a": object()})

    def no_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", no_disk)
    with pytest.raises(OSError, match="no space"):
        files.write_json(path, {"a": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "not JSON"),
        ('{"schema": 1, "run_', "not JSON"),
        ("[1]", "holds a list"),
        ('{"schema": 1}', "lacks run_id, name, status, seed"),
        ('{"schema": 99, "run_id": "a", "name": "a", "status": "finished", "seed": 0}', "schema 99"),
        ('{"schema": 1, "run_id": "a", "name": "a", "status": "done", "seed": 0}', "status 'done'"),
        ('{"schema": 1, "run_id": "a", "name": "a", "status": "failed", "seed": 0, "metrics": 3}', "metrics is a int"),
    ],
)
def test_broken_record_is_flagged_and_the_others_are_read(tmp_path: Path, content: str, cause: str) -> None:
    make_run(tmp_path / "b10", status="finished")
    make_run(tmp_path / "b9", status="failed")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text(content)
    found = records.read_records(tmp_path)
    assert [(r["name"], r["status"]) for r in found] == [("a", "unreadable"), ("b9", "failed"), ("b10", "finished")]
    assert cause in found[0]["reason"]
    assert "run.json" in found[0]["reason"]
    assert found[0]["metrics"] == {}
    with pytest.raises(records.RecordError, match=r"run\.json"):
        records.read_record(tmp_path / "a")


def test_reading_finds_nested_runs_and_the_run_that_died_before_its_record(tmp_path: Path) -> None:
    make_run(tmp_path / "sweep" / "x")
    (tmp_path / "sweep" / "y" / "checkpoints").mkdir(parents=True)
    (tmp_path / "sweep" / "y" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "empty").mkdir()
    found = records.read_records(tmp_path)
    assert [(r["name"], r["status"]) for r in found] == [("x", "running"), ("y", "unreadable")]
    assert [r["name"] for r in records.read_records(tmp_path / "sweep" / "x")] == ["x"]
    with pytest.raises(records.RecordError, match="not a folder"):
        records.read_records(tmp_path / "absent")


def test_frame_has_one_tidy_row_per_run(tmp_path: Path) -> None:
    make_run(
        tmp_path / "a",
        status="finished",
        metrics={"test/acc": 0.9},
        cost={"macs_measured": 10},
        routing={"routed_layers": [1, 3], "kept_fraction": {"1": 0.5, "3": 0.25}},
    )
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{")
    frame = records.to_frame(records.read_records(tmp_path))
    assert len(frame) == 2
    row = frame.iloc[0]
    assert row["router.name"] == "amod"
    assert row["capacity.fraction"] == "[0.5, 0.25]"
    assert row["test/acc"] == 0.9
    assert row["routing/kept_fraction/3"] == 0.25
    assert row["cost/macs_measured"] == 10
    assert row["scale"] == "toy"
    assert "backbone._target_" not in frame
    assert "paths.runs" not in frame
    assert frame.iloc[1]["status"] == "unreadable"


def test_history_and_predictions(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    record = records.read_record(tmp_path / "a")
    assert records.read_history(record) == {}
    with pytest.raises(records.RecordError, match=r"predictions\.npz"):
        records.read_predictions(record)
    (tmp_path / "a" / "history.csv").write_text("epoch,val/acc\n0,0.5\n1,\n")
    history = records.read_history(record)
    assert history["epoch"] == [0.0, 1.0]
    assert math.isnan(history["val/acc"][1])
    np.savez(tmp_path / "a" / "predictions.npz", index=[2, 0, 1], target=[5, 3, 4], prediction=[5, 3, 0])
    predictions = records.read_predictions(record)
    assert predictions["index"].tolist() == [0, 1, 2]
    assert predictions["target"].tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("backbone", "data", "recipe", "label"),
    [
        ("vit_micro", "digits", "quick", "toy"),
        ("deit_small", "digits", "finetune", "toy"),
        ("vit_mini", "cifar10", "quick", "small"),
        ("deit_tiny", "imagenet", "quick", "small"),
        ("deit_tiny", "imagenet", "finetune", "paper"),
        ("deit_tiny", "image_folder", "finetune", "small"),
    ],
)
def test_scale_label(backbone: str, data: str, recipe: str, label: str) -> None:
    config = {"backbone": {"name": backbone}, "data": {"name": data}, "train": {"name": recipe}, "seed": 0}
    assert records.scale_label(records.new_record(config, run_id="a", name="a", command="")) == label


@pytest.mark.parametrize(
    ("init", "epochs", "label"),
    [
        ({"kind": "checkpoint", "path": "vit.safetensors"}, 0, "real"),
        ({"kind": "pretrained"}, 0, "real"),
        ({"kind": "dense", "path": "vit.safetensors", "epochs": 0}, 0, "real"),
        ({"kind": "dense", "path": "vit.safetensors", "epochs": 5}, 0, "small"),
        ({"kind": "checkpoint", "path": "vit.safetensors"}, 5, "small"),
        ({"kind": "dense", "path": None, "epochs": 5}, 0, "small"),
        ({"kind": "scratch"}, 0, "small"),
    ],
)
def test_published_weights_without_training_are_of_real_scale(init: dict[str, Any], epochs: int, label: str) -> None:
    config = {"backbone": {"name": "dinov2_small"}, "data": {"name": "image_folder"}, "seed": 0}
    config |= {"init": init, "train": {"name": "quick", "epochs": epochs}}
    assert records.scale_label(records.new_record(config, run_id="a", name="a", command="")) == label
    config["data"] = {"name": "digits"}
    assert records.scale_label(records.new_record(config, run_id="a", name="a", command="")) == "toy"


def test_reading_records_loads_no_torch_and_no_pandas() -> None:
    heavy = ("torch", "timm", "lightning", "pandas", "scipy")
    code = f"import sys, routing_lab.runs.records; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_keys_that_make_no_arm_are_the_seed_and_what_is_no_part_of_the_identity() -> None:
    from routing_lab.keys import VOLATILE

    assert set(records.NOT_COMPARED) == {"seed", *VOLATILE}
    assert records.comparable({"data": {"name": "digits", "root": "x"}, "seed": 1}) == {"data.name": "digits"}
