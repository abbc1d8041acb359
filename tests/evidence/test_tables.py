"""Arms and tables: what is grouped, compared and refused, and that every form of a table says the same."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.evidence.synthetic import configuration, write_arms, write_run

from routing_lab.evidence import formatting, statistics
from routing_lab.evidence.arms import arm_labels, differing_keys, group_arms, without_followers
from routing_lab.evidence.tables import (
    csv_text,
    render_html,
    render_latex,
    render_markdown,
    render_plain,
    render_rich,
    sweep_table,
    win_counts,
    write_csv,
)
from routing_lab.runs.records import flatten, read_records

DENSE, LINEAR, AMOD = {"router": "dense"}, {"router": "linear"}, {"router": "amod"}
ARMS: dict[str, Any] = {"amod": (AMOD, 0.95), "dense": (DENSE, 0.96), "linear": (LINEAR, 0.93)}


def labels(*changes: dict[str, Any]) -> list[str]:
    return arm_labels([flatten(configuration(change)) for change in changes])


def test_labels_name_what_differs_and_nothing_else() -> None:
    assert labels(LINEAR, AMOD) == ["router=linear", "router=amod"]
    assert labels({"capacity.fraction": 0.5}, {"capacity.fraction": 0.25}) == [
        "capacity.fraction=0.5",
        "capacity.fraction=0.25",
    ]
    assert labels({"train.lr": 1e-3} | AMOD, {"train.lr": 2e-3} | AMOD, LINEAR) == [
        "router=amod train.lr=0.001",
        "router=amod train.lr=0.002",
        "router=linear train.lr=0.002",
    ]
    two_heads = [AMOD, AMOD | {"router.head_reduction": "max"}, LINEAR]
    assert labels(*two_heads) == [
        "router=amod router.head_reduction=mean",
        "router=amod router.head_reduction=max",
        "router=linear",
    ]
    larger = {"backbone.name": "vit_mini", "backbone.image_size": 32, "data.image_size": 32}
    assert labels({}, larger) == ["backbone=vit_micro", "backbone=vit_mini"]
    assert labels(AMOD) == ["amod multiply"]


def test_differing_keys() -> None:
    a, b = configuration(LINEAR), configuration(AMOD)
    assert differing_keys(a, b) == ["router.bias", "router.head_reduction", "router.name"]
    assert differing_keys(a, a) == []
    c = configuration({"backbone.image_size": 16, "data.image_size": 16})
    assert differing_keys(a, c) == ["backbone.image_size"]


def test_three_seeds_of_one_arm_give_one_row_without_differences(tmp_path: Path) -> None:
    write_arms(tmp_path, {"amod": (AMOD, 0.95)}, range(3))
    records = read_records(tmp_path)
    table = sweep_table(records)
    accuracies = [record["metrics"]["test/acc"] for record in records]
    expected = statistics.summarize(accuracies)
    assert table.differences is None
    assert table.arms.column("n") == [3]
    assert table.arms.column("mean") == [expected.mean]
    assert table.arms.column("sd") == [pytest.approx(np.std(accuracies, ddof=1))]
    assert table.arms.column("interval") == [(expected.low, expected.high)]
    assert table.arms.column("kept_fraction") == [0.5]
    assert table.arms.column("scale") == ["toy"]
    assert table.arms.column("note") == [""]
    text = render_plain(table)
    assert f"{100 * expected.mean:.2f}" in text
    assert "scale: toy" in text
    assert "750.000 k" in text


def test_several_arms_are_compared_with_the_dense_one_by_seed(tmp_path: Path) -> None:
    write_arms(tmp_path, ARMS, range(5))
    records = read_records(tmp_path)
    table = sweep_table(records)
    assert table.differences is not None
    assert table.differences.column("arm") == ["router=amod", "router=linear"]
    assert table.differences.column("reference") == ["router=dense"] * 2
    arms = {arm.label: arm.values("test/acc") for arm in group_arms(records)}
    d = statistics.paired_by_seed(arms["router=amod"], arms["router=dense"])
    assert table.differences.column("difference")[0] == d.mean
    assert table.differences.column("difference_interval")[0] == (d.low, d.high)
    raw = [
        m - r for m, r in zip(table.differences.column("mean"), table.differences.column("reference_mean"), strict=True)
    ]
    assert table.differences.column("difference") == pytest.approx(raw, abs=1e-12)
    assert table.differences.column("p_holm") == list(statistics.adjust(table.differences.column("p")))
    assert win_counts(table.comparisons, "test/acc") == {"win": 0, "tie": 0, "loss": 2}


def test_cells_are_listed_where_they_fit(tmp_path: Path) -> None:
    write_arms(tmp_path, {"amod": (AMOD, 0.95)}, range(3))
    write_run(tmp_path, AMOD, 3, 0.0, status="failed")
    records = read_records(tmp_path)
    table = sweep_table(records)
    assert table.cells.column("seed") == [0, 1, 2, 3]
    assert table.cells.column("status") == ["finished"] * 3 + ["failed"]
    assert table.cells.column("test/acc")[:3] == [record["metrics"]["test/acc"] for record in records[:3]]
    assert "Cells:" in render_plain(table)
    write_arms(tmp_path, ARMS | {"amod": (AMOD, 0.9)}, range(4, 16))
    assert "Cells:" not in render_plain(sweep_table(read_records(tmp_path)))


def test_intervals_of_an_accuracy_stay_inside_what_it_can_be(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.1, 0.23)):
        write_run(tmp_path, AMOD, seed, accuracy)
    (interval,) = sweep_table(read_records(tmp_path)).arms.column("interval")
    assert interval[0] == 0.0
    assert 0.9 < interval[1] <= 1.0
    whole = statistics.summarize([0.1, 0.23])
    assert whole.low < 0
    (loss,) = sweep_table(read_records(tmp_path), metric="test/loss").arms.column("interval")
    assert loss[1] > 1


def test_absence_of_the_dense_arm_is_said_and_the_first_arm_takes_its_place(tmp_path: Path) -> None:
    write_arms(tmp_path, {"linear": (LINEAR, 0.93), "amod": (AMOD, 0.95)}, range(3))
    records = sorted(read_records(tmp_path), key=lambda record: record["axes"]["router"]["name"], reverse=True)
    table = sweep_table(records)
    assert table.differences is not None
    assert table.differences.column("reference") == ["router=linear"]
    assert "dense arm (router=dense) is missing" in render_plain(table)
    chosen = sweep_table(records, reference="router=amod").differences
    assert chosen is not None
    assert chosen.column("arm") == ["router=linear"]
    with pytest.raises(ValueError, match=r"reference='mod'.*router=linear, router=amod"):
        sweep_table(records, reference="mod")


def test_each_arm_is_compared_with_the_dense_arm_of_its_own_data_and_recipe(tmp_path: Path) -> None:
    for router in ("dense", "amod"):
        for data, lr in (("digits", 0.002), ("digits", 0.01), ("planted", 0.002)):
            changes = {"router": router, "data.name": data, "train.lr": lr}
            write_arms(tmp_path, {"x": (changes, 0.9)}, range(3))
    table = sweep_table(read_records(tmp_path))
    assert table.differences is not None
    pairs = zip(table.differences.column("arm"), table.differences.column("reference"), strict=True)
    assert all(arm.replace("router=amod", "router=dense") == reference for arm, reference in pairs)
    assert len(table.differences.rows) == 3


def test_few_seeds_are_stamped_and_never_called_a_win(tmp_path: Path) -> None:
    write_arms(tmp_path, {"amod": (AMOD, 0.95), "dense": (DENSE, 0.5)}, range(2))
    table = sweep_table(read_records(tmp_path))
    assert table.differences is not None
    assert table.arms.column("note") == ["single run", "single run"]
    assert table.differences.column("difference_note") == ["single run"]
    assert table.differences.column("outcome") == [""]
    assert win_counts(table.comparisons, "test/acc") == {"win": 0, "tie": 0, "loss": 0}


def test_failed_and_missing_cells_are_shown_and_unequal_seeds_refused(tmp_path: Path) -> None:
    write_arms(tmp_path, {"dense": (DENSE, 0.96)}, range(4))
    write_arms(tmp_path, {"amod": (AMOD, 0.95)}, [0, 1])
    write_run(tmp_path, AMOD, 2, 0.0, status="failed")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text('{"schema"')
    table = sweep_table(read_records(tmp_path))
    assert table.differences is not None
    assert table.arms.column("n") == [2, 4]
    assert table.arms.column("note") == ["single run; failed: seed 2; missing: seed 3", ""]
    assert table.differences.column("difference_note") == ["not compared: seeds differ (2, 3 only in the reference)"]
    assert table.differences.column("difference") == [None]
    assert any("unreadable: broken" in note for note in table.arms.notes)


def test_a_sweep_without_results_is_still_a_table(tmp_path: Path) -> None:
    write_run(tmp_path, AMOD, 0, 0.0, status="failed")
    write_run(tmp_path, DENSE, 0, 0.0, status="running")
    text = render_plain(sweep_table(read_records(tmp_path)))
    assert "failed: seed 0" in text
    assert "no results of" in text
    assert "Arms: test/loss" in render_plain(sweep_table([]))


def test_arm_names_win_over_keys_and_stay_unique(tmp_path: Path) -> None:
    write_arms(tmp_path, {"a": (AMOD | {"arm": "attention"}, 0.9), "b": (LINEAR | {"arm": "attention"}, 0.9)}, range(3))
    write_arms(tmp_path, {"c": (DENSE, 0.9)}, range(3))
    found = [arm.label for arm in group_arms(read_records(tmp_path))]
    assert sorted(found) == ["attention (router=amod)", "attention (router=linear)", "router=dense"]


def test_every_form_of_a_table_shows_the_same_digits(tmp_path: Path) -> None:
    write_arms(tmp_path, ARMS, range(4))
    table = sweep_table(read_records(tmp_path))
    assert table.differences is not None
    rows = list(csv.DictReader(io.StringIO(csv_text(table))))
    assert len(rows) == 3
    shown = table.differences.texts()
    by_arm = {row["arm"]: row for row in rows}
    position = [column.key for column in table.differences.columns].index("difference")
    for row in shown:
        raw = float(by_arm[row[0]]["difference"])
        assert row[position] == f"{100 * raw:+.2f}"
        for form in (render_html(table), render_markdown(table), render_latex(table), render_plain(table)):
            assert row[position] in form
    dense = by_arm["router=dense"]
    assert dense["difference"] == dense["difference_interval_low"] == ""
    assert float(dense["interval_low"]) == table.arms.column("interval")[1][0]
    assert (write_csv(table, tmp_path / "sweep.csv")).read_text() == csv_text(table)


def test_rich_tables_print_on_a_terminal(tmp_path: Path) -> None:
    write_arms(tmp_path, ARMS, range(3))
    console = Console(width=200, file=io.StringIO(), force_terminal=True)
    for part in render_rich(sweep_table(read_records(tmp_path))):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    assert "router=amod" in console.file.getvalue()


def test_markup_in_labels_is_escaped(tmp_path: Path) -> None:
    write_arms(tmp_path, {"a": (AMOD | {"arm": "<b>a_1 & 50 %|[red]"}, 0.9)}, range(3))
    table = sweep_table(read_records(tmp_path))
    assert "&lt;b&gt;a_1 &amp; 50 %|[red]" in render_html(table)
    assert r"\ensuremath{<}b\ensuremath{>}a\_1 \& 50 \%|[red]" in render_latex(table)
    assert r"<b>a_1 & 50 %\|[red]" in render_markdown(table)


@pytest.mark.parametrize(
    ("value", "kind", "signed", "text"),
    [
        (0.95371, "percent", False, "95.37"),
        (-0.00001, "percent", True, "0.00"),
        (0.0123, "percent", True, "+1.23"),
        (None, "number", False, "-"),
        (math.nan, "percent", False, "-"),
        (math.inf, "number", False, "inf"),
        (4.6081e9, "macs", False, "4.608 G"),
        (950, "macs", False, "950"),
        (0.00001, "p", False, "<0.0001"),
        (0.0312, "p", False, "0.0312"),
        (3, "count", False, "3"),
        ("", "text", False, "-"),
    ],
)
def test_numbers(value: Any, kind: formatting.Kind, signed: bool, text: str) -> None:
    assert formatting.number(value, kind, signed=signed) == text


@pytest.mark.parametrize(
    ("confidence", "text"),
    [(0.95, "95 %"), (0.9, "90 %"), (0.9775, "97.75 %"), (0.9992, "99.92 %"), (0.999985, "99.9985 %"), (1.0, "100 %")],
)
def test_no_level_short_of_certainty_is_shown_as_certain(confidence: float, text: str) -> None:
    assert formatting.level(confidence) == text


def test_seeds_and_values_as_text() -> None:
    assert formatting.runs_of([5, 0, 1, 2, 3, 8, 9]) == "0-3, 5, 8, 9"
    assert formatting.value_text([0.5, 0.25]) == "[0.5,0.25]"
    assert formatting.value_text(None) == "null"
    assert formatting.value_text(True) == "true"


def test_keys_that_follow_the_seed_make_no_arm_of_their_own() -> None:
    def record(seed: int, split: int, fraction: float) -> dict[str, Any]:
        config = {"router": {"name": "amod"}, "data": {"split_seed": split}, "capacity": {"fraction": fraction}}
        return {"run_id": str(seed), "seed": seed, "status": "finished", "arm": "a", "config": config, "axes": {}}

    def kinds(*records: dict[str, Any]) -> int:
        return len(group_arms(without_followers(records)))

    assert kinds(record(0, 0, 0.5), record(1, 1, 0.5), record(2, 2, 0.5)) == 1
    assert kinds(record(0, 0, 0.5), record(1, 1, 0.5), record(2, 1, 0.5)) == 2
    assert kinds(record(0, 0, 0.5), record(1, 1, 0.25)) == 2
    assert kinds(record(3, 7, 0.5)) == 1
