"""Records from anywhere: what cannot be right is named with its reason and left out, and a report never stops at it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing_lab import report
from routing_lab.runs.records import RecordError, parse_record, read_records, read_run

RECORD: dict[str, Any] = {
    "schema": 1,
    "run_id": "1",
    "name": "run",
    "status": "finished",
    "seed": 0,
    "arm": "one",
    "metrics": {"test/acc": 0.5, "test/loss": 1.5, "selected_epoch": 2},
    "cost": {"macs_measured": 1e6, "train_seconds": 1.0},
    "routing": {"routed_layers": [1, 3], "kept_fraction": {"1": 0.5, "3": 0.5}, "update_ratio": {"1": 0.1, "3": None}},
    "config": {"router": {"name": "amod"}, "data": {"name": "digits"}, "seed": 0},
    "axes": {"router": {"name": "amod"}, "data": {"name": "digits"}},
}

DEEP = '{"a": ' * 100_000
NESTED: Any = "leaf"
for _ in range(40):
    NESTED = {"a": NESTED}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metrics": {"test/acc": -5}}, "metrics.test/acc is -5, expected a fraction between 0 and 1"),
    ({"metrics": {"test/acc": 1.5}}, "metrics.test/acc is 1.5"),
    ({"metrics": {"val/top5": 2}}, "metrics.val/top5 is 2"),
    ({"metrics": {"test/acc": float("nan")}}, "metrics.test/acc is nan, expected a finite number"),
    ({"metrics": {"test/loss": float("inf")}}, "metrics.test/loss is inf"),
    ({"metrics": {"test/acc": "high"}}, "metrics.test/acc is 'high', expected a number"),
    ({"metrics": {"test/acc": True}}, "metrics.test/acc is True, expected a number"),
    ({"metrics": {"test/acc": {"mean": 0.5}}}, "metrics.test/acc is a mapping, expected a number"),
    ({"metrics": {"test/acc": [0.5]}}, "metrics.test/acc is a list"),
    ({"metrics": [0.5]}, "metrics is a list, not a mapping"),
    ({"seed": None}, "seed is None, expected a whole number at least 0"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 0.5}, "seed is 0.5"),
    ({"seed": True}, "seed is True"),
    ({"seed": "0"}, "seed is '0'"),
    ({"seed": 2**70}, "seed is a whole number of 71 bits"),
    ({"seed": 10**400}, "seed is a whole number of 1329 bits"),
    ({"cost": {"macs_measured": -1}}, "cost.macs_measured is -1, expected a number at least 0"),
    ({"cost": {"macs_measured": 10**400}}, "cost.macs_measured is a whole number of 1329 bits"),
    ({"cost": {"macs_measured": "many"}}, "cost.macs_measured is 'many'"),
    ({"cost": {"train_seconds": float("nan")}}, "cost.train_seconds is nan"),
    ({"cost": 3}, "cost is a int, not a mapping"),
    ({"routing": {"kept_fraction": [0.5]}}, "routing.kept_fraction is a list, expected a number for each layer"),
    ({"routing": {"kept_fraction": {"first": 0.5}}}, "routing.kept_fraction has the key 'first'"),
    ({"routing": {"kept_fraction": {"1": 1.5}}}, "routing.kept_fraction.1 is 1.5"),
    ({"routing": {"kept_fraction": {"1": "half"}}}, "routing.kept_fraction.1 is 'half'"),
    ({"routing": {"update_ratio": {"1": -0.1}}}, "routing.update_ratio.1 is -0.1"),
    ({"routing": {"routed_layers": "1"}}, "routing.routed_layers is '1', expected a list of layers"),
    ({"routing": {"routed_layers": [[1]]}}, "routing.routed_layers is a list"),
    ({"config": NESTED}, "config is nested more than 30 levels deep"),
    ({"name": ["run"]}, "name is a list, expected text"),
    ({"name": "\x1b[2Jrun"}, "name is '\\x1b[2Jrun', expected text"),
    ({"run_id": 7}, "run_id is 7, expected text"),
    ({"arm": {"a": 1}}, "arm is a mapping, expected text or null"),
    ({"study": 3}, "study is 3, expected text or null"),
    ({"warnings": [3]}, "warnings hold something else than text"),
    ({"warnings": "none"}, "warnings is a str, not a list"),
    ({"status": "done"}, "status 'done'"),
    ({"schema": 99}, "schema 99"),
    ({"environment": {"torch": ["2"]}}, "environment.torch is a list"),
    ({"git": {"commit": {"a": 1}}}, "git.commit is a mapping"),
]


def write(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({**RECORD, "name": folder.name, **(changes or {})}), encoding="utf-8")
    return folder


def predictions(folder: Path, **arrays: Any) -> None:
    whole = {
        "index": np.arange(4),
        "target": np.zeros(4, int),
        "prediction": np.array([0, 0, 1, 1]),
        "loss": np.ones(4),
    }
    np.savez(
        folder / "predictions.npz", **{name: value for name, value in (whole | arrays).items() if value is not None}
    )


@pytest.mark.parametrize(("changes", "reason"), WRONG, ids=lambda value: str(value)[:50])
def test_a_record_that_cannot_be_right_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecordError) as refused:
        parse_record(json.dumps({**RECORD, **changes}), "run.json", "")
    assert str(refused.value).startswith("run.json: ")
    assert reason in str(refused.value)


@pytest.mark.parametrize("text", [DEEP, "[" * 100_000, "", "null", "[]", '{"schema": 1', "\x00", "9" * 5000])
def test_text_that_is_no_record(text: str) -> None:
    with pytest.raises(RecordError, match=r"run\.json: "):
        parse_record(text, "run.json", "")


def test_a_run_that_has_not_finished_may_lack_results() -> None:
    text = json.dumps({**RECORD, "status": "failed", "seed": None, "metrics": {"test/acc": float("nan")}})
    assert parse_record(text, "run.json", "")["seed"] is None


def _history(folder: Path, content: bytes) -> None:
    (folder / "history.csv").write_bytes(content)


FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: predictions(folder, index=None), "has no array 'index'"),
    (lambda folder: predictions(folder, index=np.zeros(4, int)), "index names an example twice"),
    (lambda folder: predictions(folder, index=np.arange(4.0)), "index is expected to be whole numbers"),
    (lambda folder: predictions(folder, index=np.arange(4).reshape(4, 1)), "index is expected to be whole numbers"),
    (lambda folder: predictions(folder, index=np.array(3)), "index has the shape ()"),
    (lambda folder: predictions(folder, target=np.zeros(3, int)), "target has the shape (3,)"),
    (lambda folder: predictions(folder, prediction=np.array(list("abcd"))), "prediction holds <U1"),
    (lambda folder: predictions(folder, prediction=np.ones(4)), "prediction holds float64, expected whole numbers"),
    (lambda folder: predictions(folder, prediction=np.array([{}] * 4)), "allow_pickle=False"),
    (
        lambda folder: predictions(folder, prediction=np.zeros(4, int)),
        "test/acc is 0.5 in run.json and 1 by predictions",
    ),
    (lambda folder: (folder / "predictions.npz").mkdir(), "predictions.npz"),
    (lambda folder: (folder / "predictions.npz").write_bytes(b"PK\x03\x04"), "predictions.npz"),
    (lambda folder: (folder / "predictions.npz").symlink_to("predictions.npz"), "predictions.npz"),
    (lambda folder: _history(folder, "epoch,val/acc\n0,\xe9".encode("latin-1")), "history.csv"),
    (lambda folder: _history(folder, b"epoch\n" + b"9" * 200_000), "field larger than field limit"),
    (lambda folder: (folder / "history.csv").mkdir(), "history.csv"),
]


@pytest.mark.parametrize(("damage", "reason"), FILES, ids=[reason for _, reason in FILES])
def test_a_run_whose_files_cannot_be_right_is_refused(
    damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "run")
    predictions(folder)
    read_run(folder)
    (folder / "predictions.npz").unlink()
    damage(folder)
    with pytest.raises(RecordError) as refused:
        read_run(folder)
    assert reason in str(refused.value)


def test_a_report_names_every_bad_record_and_counts_the_good_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for seed in range(3):
        predictions(write(runs / f"good-{seed}", {"seed": seed}))
    for number, (changes, _) in enumerate(WRONG):
        write(runs / f"bad-{number}", changes)
    for number, (damage, _) in enumerate(FILES):
        damage(write(runs / f"damaged-{number}"))
    write(runs / "deep").joinpath("run.json").write_text(DEEP)
    (runs / "loop").symlink_to(runs)
    (runs / "dead").symlink_to(tmp_path / "nowhere")
    os.mkfifo(runs / "pipe")
    assert report.main([str(runs), "--html", "--md", "--csv", "--latex"]) == 0
    captured = capsys.readouterr()
    number = len(WRONG) + len(FILES) + 1
    assert f"Runs: {number + 3} (3 finished, {number} unreadable)" in captured.out
    assert captured.err == ""
    page = (runs / "report" / "report.md").read_text(encoding="utf-8")
    assert "-500" not in page
    assert page.count("Unreadable:") == number
    assert "bad-0: run.json: metrics.test/acc is -5" in page


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
VALUES = st.recursive(SCALARS, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part))


@given(st.sampled_from(sorted(RECORD)), VALUES)
def test_whatever_stands_in_a_record_it_is_read_or_refused(key: str, value: Any) -> None:
    text = json.dumps({**RECORD, key: value})
    with suppress(RecordError):
        assert parse_record(text, "run.json", "")["seed"] == (value if key == "seed" else 0)


def test_links_in_circles_give_each_run_once(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "a2").symlink_to(tmp_path / "runs" / "a")
    assert [record["name"] for record in read_records(tmp_path / "runs")] == ["a"]
