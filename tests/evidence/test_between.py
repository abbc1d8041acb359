"""What differs between two runs is found, and nothing else; a comparison that is not controlled is told from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.evidence.synthetic import write_run

from routing_lab.diff import main
from routing_lab.evidence.between import runs_table, uncontrolled


def rows(first: dict[str, Any], second: dict[str, Any]) -> dict[tuple[str, str], tuple[str, ...]]:
    """(section, key) -> both values and the change, as they are shown."""
    table = runs_table(first, second)
    texts = [[column.text(value) for column, value in zip(table.columns, row, strict=True)] for row in table.rows]
    return {(section, key): tuple(values) for section, key, *values in texts}


def test_one_key_and_what_followed_from_it(tmp_path: Path) -> None:
    first = write_run(tmp_path, {"capacity.fraction": 0.5}, 0, 0.9)
    second = write_run(tmp_path, {"capacity.fraction": 0.25}, 0, 0.8)
    found = rows(first, second)
    assert {key for section, key in found if section == "config"} == {"capacity.fraction"}
    assert found["config", "capacity.fraction"] == ("0.5", "0.25", "-")
    assert found["metrics", "test/acc"] == ("90.00", "80.00", "-10.00")
    assert found["cost", "macs_measured"] == ("750.000 k", "625.000 k", "0.83")
    assert found["routing", "kept_fraction.3"] == ("0.5", "0.25", "-")
    assert not [key for section, key in found if section in ("execution", "data", "init", "git", "environment", "run")]


def test_a_run_does_not_differ_from_itself(tmp_path: Path) -> None:
    record = write_run(tmp_path, {}, 0, 0.9)
    table = runs_table(record, record)
    assert table.rows == ()
    assert table.notes == ("nothing differs",)


def test_a_key_that_came_later_differs_by_its_value_only(tmp_path: Path) -> None:
    before = write_run(tmp_path / "a", {}, 0, 0.9)
    neutral = write_run(tmp_path / "b", {"capacity.reserve": 0}, 0, 0.9)
    other = write_run(tmp_path / "c", {"capacity.reserve": 2}, 0, 0.9)
    assert rows(before, neutral) == {}
    assert list(rows(before, other)) == [("config", "capacity.reserve")]


def test_where_and_with_what_a_run_was_made_stands_apart(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, {}, 0, 0.9) for name in "ab")
    second["config"]["paths"] = {"runs": "elsewhere"}
    second |= {"git": {"commit": "b" * 40}, "environment": {"torch": "9.9"}, "data": {"fingerprint": "other"}}
    second["status"] = "failed"
    assert set(rows(first, second)) == {
        ("execution", "paths.runs"),
        ("git", "commit"),
        ("environment", "torch"),
        ("data", "fingerprint"),
        ("run", "status"),
    }


@pytest.mark.parametrize(
    ("changes", "allowed", "expected"),
    [
        ({"router": "amod"}, ["router"], []),
        ({"router": "amod", "train.lr": 0.1}, ["router"], ["train.lr differs too"]),
        ({"router": "amod", "train.lr": 0.1}, ["router", "train"], []),
        ({"train.lr": 0.1}, ["train.l"], ["train.lr differs too"]),
    ],
)
def test_a_controlled_comparison_differs_in_what_it_says(
    changes: dict[str, Any], allowed: list[str], expected: list[str], tmp_path: Path
) -> None:
    first, second = (write_run(tmp_path / str(n), given, 0, 0.9) for n, given in enumerate(({}, changes)))
    assert uncontrolled(first, second, allowed) == expected


def test_other_data_or_another_seed_is_no_controlled_comparison(tmp_path: Path) -> None:
    first = write_run(tmp_path, {}, 0, 0.9)
    other_data = write_run(tmp_path, {"router": "amod"}, 0, 0.9) | {"data": {"fingerprint": "other"}}
    other_seed = write_run(tmp_path, {"router": "amod"}, 1, 0.9)
    [line] = uncontrolled(first, other_data, ["router"])
    assert "have other data under one seed" in line
    assert uncontrolled(first, other_seed, ["router"]) == ["seed differs too"]
    assert uncontrolled(first, other_seed, ["router", "seed"]) == []


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    for changes in ({}, {"router": "amod", "train.lr": 0.1}):
        write_run(tmp_path, changes, 0, 0.9)
    runs = [str(folder) for folder in sorted(tmp_path.iterdir())]
    assert main(runs) == 0
    assert "train.lr" in capsys.readouterr().out
    assert main([*runs, "--only", "router"]) == 1
    assert capsys.readouterr().err == "not controlled:\n  train.lr differs too\n"
    assert main([runs[0], str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr() == ("", f"{tmp_path / 'nowhere' / 'run.json'}: no record\n")
