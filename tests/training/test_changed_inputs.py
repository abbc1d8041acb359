"""Data and weights that changed since a run read them: refused on reuse and on resumption, and nothing overwritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routing_lab.data.state import changed_data, data_state
from routing_lab.runs.folder import RunFolder
from routing_lab.tasks.classification import Classification

Run = Callable[..., dict[str, Any]]

IMAGES = ("data=image_folder", "train.epochs=2", "train.batch_size=16", "runtime.accelerator=cpu")


def write(folder: Path, label: str, numbers: range, seed: int = 0) -> None:
    (folder / label).mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng([seed, len(label), numbers.start])
    for number in numbers:
        pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / label / f"{number}.bmp")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label in ("bird", "cat", "doggy"):
        write(tmp_path / "photos", label, range(20))
    return tmp_path / "photos"


def swap(first: Path, second: Path) -> None:
    """Exchange the contents of two files of one size."""
    one, two = first.read_bytes(), second.read_bytes()
    assert len(one) == len(two)
    first.write_bytes(two)
    second.write_bytes(one)


def more_images(photos: Path) -> None:
    write(photos, "bird", range(20, 40))


def another_class(photos: Path) -> None:
    write(photos, "owl", range(20), seed=1)


def fewer_images(photos: Path) -> None:
    (photos / "cat/3.bmp").unlink()


def renamed(photos: Path) -> None:
    (photos / "cat/3.bmp").rename(photos / "cat/33.bmp")


def swapped(photos: Path) -> None:
    swap(photos / "cat/3.bmp", photos / "bird/5.bmp")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (more_images, "60 files then, 80 now; bird had 20 files and has 40"),
        (another_class, "60 files then, 80 now; owl is new (20 files)"),
        (fewer_images, "60 files then, 59 now; cat had 20 files and has 19"),
        (renamed, "cat has files of other names or sizes"),
        (swapped, "bird has other content under the same names, cat has other content under the same names"),
    ],
)
def test_a_finished_run_over_other_data_is_refused(
    run: Run, photos: Path, change: Callable[[Path], None], said: str
) -> None:
    words = (*IMAGES, f"data.path={photos}", "train.epochs=0")
    first = run(*words)
    assert first["error"] is None
    kept = RunFolder(first["folder"]).record.read_text()
    assert run(*words)["trained"] is False
    change(photos)
    again = run(*words)
    assert again["status"] == "failed"
    assert again["error"] == (
        f"data.path = {photos}: is not the data of {first['record']['name']}: {said}; put it back, train afresh with"
        " rerun=true, or keep both results with name=..."
    )
    assert RunFolder(first["folder"]).record.read_text() == kept
    assert run(*words, "name=other")["trained"]
    assert run(*words, "rerun=true")["trained"]
    assert run(*words)["trained"] is False


def test_training_afresh_takes_the_run_that_it_starts_from_along(run: Run, photos: Path) -> None:
    words = (*IMAGES, f"data.path={photos}", "init=dense", "train.epochs=1")
    first = run(*words)
    dense = RunFolder(first["folder"].parent / first["record"]["init"]["source"])
    more_images(photos)
    assert "bird had 20 files and has 40" in run(*words)["error"]
    again = run(*words, "rerun=true")
    assert (again["error"], again["record"]["data"]["files"]["count"]) == (None, 80)
    assert (dense.read_record() or {})["data"]["files"]["count"] == 80
    written = dense.record.stat().st_mtime_ns
    assert run(*words, "rerun=true")["error"] is None
    assert dense.record.stat().st_mtime_ns == written  # it is of these data already


def test_a_copy_is_the_same_data(run: Run, photos: Path, tmp_path: Path) -> None:
    words = (*IMAGES, "train.epochs=0")
    assert run(*words, f"data.path={photos}")["trained"]
    for path in photos.rglob("*.bmp"):
        os.utime(path, (1, 1))
    assert run(*words, f"data.path={photos}")["trained"] is False


def test_every_byte_is_compared_when_asked(run: Run, photos: Path) -> None:
    words = (*IMAGES, f"data.path={photos}", "train.epochs=0")
    run(*words)
    times = {path: path.stat() for path in photos.rglob("*.bmp")}
    swapped(photos)
    for path, status in times.items():
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run(*words)["error"] is None  # names, sizes and times agree
    assert "other content" in run(*words, "runtime.verify=content")["error"]


def test_large_sets_are_compared_by_names_sizes_and_times(
    cell: Callable[..., Any], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("routing_lab.data.state.HASHED_BYTES", 100)
    data = cell(*IMAGES, f"data.path={photos}").config.data
    state = data_state(data)
    assert state is not None
    assert state["content"] is None
    assert changed_data(json.loads(json.dumps(state)), data) is None
    os.utime(photos / "cat/3.bmp", (1, 1))
    assert "times of change differ" in str(changed_data(state, data))
    full = data_state(data, full=True)
    os.utime(photos / "cat/3.bmp", (2, 2))
    assert changed_data(full, data) is None
    assert changed_data(None, data) is None  # an older record


def test_data_that_changed_between_interruption_and_resumption_is_refused(
    run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*IMAGES, f"data.path={photos}")
    original = Classification.training_step

    def interrupted(self: Classification, *args: Any) -> Any:
        if self.current_epoch == 1:
            raise RuntimeError("lights out")
        return original(self, *args)

    monkeypatch.setattr(Classification, "training_step", interrupted)
    first = run(*words)
    assert first["record"]["num_epochs_done"] == 1
    monkeypatch.setattr(Classification, "training_step", original)
    kept = RunFolder(first["folder"]).record.read_text()
    shutil.copytree(photos, photos.with_name("before"), copy_function=shutil.copy2)
    more_images(photos)
    assert "bird had 20 files and has 40" in run(*words)["error"]
    # Also where the state of the files is not recorded: an older record.
    record = json.loads(kept)
    del record["data"]["files"]
    RunFolder(first["folder"]).record.write_text(json.dumps(record))
    refused = run(*words)
    assert "the data of this run have changed since it was interrupted" in refused["error"]
    assert refused["record"]["data"]["fingerprint"] == record["data"]["fingerprint"]
    RunFolder(first["folder"]).record.write_text(kept)
    shutil.rmtree(photos)
    shutil.copytree(photos.with_name("before"), photos, copy_function=shutil.copy2)
    assert run(*words)["status"] == "finished"


def test_an_image_that_is_deleted_once_it_was_checked_fails_the_run_by_name(
    run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*IMAGES, f"data.path={photos}", "data.memory=false", "train.epochs=1")
    build = Classification.build_data
    photo = photos / "cat/3.bmp"
    kept = photo.read_bytes()

    def vanishing(config: Any) -> Any:
        data = build(config)
        photo.unlink()
        return data

    with monkeypatch.context() as patch:
        patch.setattr(Classification, "build_data", vanishing)
        result = run(*words)
    assert (result["status"], result["error"]) == (
        "failed",
        f"{photo}: cannot be read (No such file or directory)",
    )
    photo.write_bytes(kept)
    assert run(*words)["status"] == "finished"


def test_overwritten_weights_are_refused(run: Run, tmp_path: Path) -> None:
    dense = run("router=dense", "train.epochs=1")
    weights = tmp_path / "weights.safetensors"
    shutil.copy(RunFolder(dense["folder"]).final, weights)
    words = ("init=checkpoint", f"init.path={weights}", "train.epochs=0")
    first = run(*words)
    assert first["error"] is None
    assert run(*words)["trained"] is False
    size = weights.stat().st_size
    weights.write_bytes(bytes(size))
    again = run(*words)
    assert f"init.path = {weights}: is not the file that {first['record']['name']} started from" in again["error"]
    assert "other content of the same size" in again["error"]
    weights.unlink()
    shutil.copy(RunFolder(dense["folder"]).final, weights)
    assert run(*words)["error"] is None


def test_a_dense_run_that_was_trained_anew_is_noticed(run: Run) -> None:
    words = ("init=dense", "train.epochs=1")
    first = run(*words)
    assert first["error"] is None
    dense = RunFolder(first["folder"].parent / first["record"]["init"]["source"])
    dense.final.write_bytes(dense.final.read_bytes()[:-4] + b"\1\2\3\4")
    assert "is not what" in run(*words)["error"]
