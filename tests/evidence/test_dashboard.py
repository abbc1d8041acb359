"""The workspace of a study: what its panels read is what runs log, and its specification needs no network or login."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.evidence.synthetic import STORED
from tests.evidence.test_study import CONTENT

from routing_lab import dashboard
from routing_lab.dashboard import (
    TABLE_COLUMNS,
    TABLE_RESULTS,
    Panel,
    main,
    panels,
    push,
    report_page,
    routed_layers,
    verdict,
    workspace,
)
from routing_lab.evidence.study import Study, load_study, parse_study
from routing_lab.runs.records import flatten, read_history, read_records
from routing_lab.training import tracking

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def study() -> Study:
    return parse_study(CONTENT | {"seeds": [0, 1, 2, 3]})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "confound.yaml"
    path.write_text(json.dumps(CONTENT | {"seeds": [0, 1, 2, 3]}))
    return path


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def by_kind(shown: list[Panel], kind: str) -> dict[str, Panel]:
    return {panel.title: panel for panel in shown if panel.kind == kind}


def test_panels_are_what_a_reader_needs(study: Study) -> None:
    shown = panels(study, "toy", [1, 3])
    assert list(dict.fromkeys(p.section for p in shown)) == [
        *("Verdict", "Results", "Training", "Routing", "Cost", "Runs")
    ]
    drawn = {
        metric for panel in [*by_kind(shown, "line").values(), *by_kind(shown, "bar").values()] for metric in panel.y
    }
    assert {"test/acc", "val/acc", "val/loss", "cost/train_images_per_second"} <= drawn
    for layer in (1, 3):
        assert {
            f"val/kept_fraction/{layer}",
            f"routing/kept_fraction/{layer}",
            f"routing/update_ratio/{layer}",
        } <= drawn
    assert any(p.x == "cost/macs_measured" and p.y == ("test/acc",) for p in by_kind(shown, "scatter").values())
    titles = [(panel.section, panel.title) for panel in shown]
    assert len(set(titles)) == len(titles)


def test_panels_ask_for_what_the_study_measures_under_each_split(study: Study) -> None:
    other = study.model_copy(update={"metric": "test/bits_per_byte"})
    shown = panels(other, "toy")
    drawn = {metric for panel in shown if panel.kind in ("line", "bar") for metric in panel.y}
    assert {"test/bits_per_byte", "val/bits_per_byte", "train/bits_per_byte", "val/loss"} <= drawn
    assert not any(key.endswith("/acc") for key in drawn)
    assert by_kind(panels(study, "toy"), "line")["val/acc"].y_title == "val/acc, fraction"


def test_what_is_sent_is_what_the_library_reads_back(study: Study) -> None:
    shown = panels(study, "toy", [1, 3], "Verdict: none")
    built = workspace(study, "toy", shown, "team", "mine")
    sections = type(built)._from_model(built._to_model()).sections
    assert [section.name for section in sections] == list(dict.fromkeys(panel.section for panel in shown))
    assert sum(len(section.panels) for section in sections) == len(shown)
    drawn = [panel for section in sections for panel in section.panels if type(panel).__name__ == "LinePlot"]
    assert [[metric.name for metric in panel.y] for panel in drawn] == [
        list(panel.y) for panel in shown if panel.kind == "line"
    ]


def test_a_report_page_holds_the_verdict_and_every_panel(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = panels(study, "toy", [1], "Verdict: none")
    page = report_page(study, "toy", shown, "team", "mine")
    kinds = [type(block).__name__ for block in page.blocks]
    assert kinds[:2] == ["H1", "MarkdownBlock"]
    assert "Verdict: none" in page.blocks[1].text
    grids = [block for block in page.blocks if type(block).__name__ == "PanelGrid"]
    assert sum(len(grid.panels) for grid in grids) == len(shown) - 1
    assert {runs.project for grid in grids for runs in grid.runsets} == {"mine"}


def test_a_study_that_routes_nothing_has_no_routing_panels(study: Study) -> None:
    assert "Routing" not in {panel.section for panel in panels(study, "toy")}


def test_every_metric_is_one_that_runs_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from routing_lab.config import load
    from routing_lab.training import run

    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(tracking.Csv, "log", lambda self, row, picture=None: rows.append(row))
    small = ["backbone.width=16", "backbone.depth=2", "backbone.heads=2", "train.epochs=1", "train.warmup_epochs=0"]
    quiet = ["tracking=csv", "runtime.progress=none", "runtime.threads=1", f"paths.runs={tmp_path}"]
    loaded = load(["router=amod", *small, *quiet])
    result = run.run_cell(loaded.config, loaded.resolved)
    assert result["status"] == "finished"
    results, curves, config = tracking.summary(result["record"]), rows[0], flatten(loaded.resolved)
    study = load_study(EXPERIMENTS / "confound_2x2.yaml")
    for panel in panels(study, "toy", [1]):
        for metric in panel.y:
            assert metric in (curves if panel.kind == "line" else results), panel.title
        assert panel.kind != "line" or panel.x in curves
        assert panel.kind != "scatter" or panel.x in results
    assert set(TABLE_RESULTS) <= set(results)
    assert set(TABLE_COLUMNS) <= set(config)
    assert json.loads(results["record"])["run_id"] == result["record"]["run_id"]


def test_routed_layers_are_those_of_the_arms() -> None:
    study = load_study(EXPERIMENTS / "later_placement_cars.yaml")
    few = study.model_copy(update={"arms": {arm: study.arms[arm] for arm in list(study.arms)[:2]}})
    layers = routed_layers(few, next(iter(study.scales)))
    assert layers
    assert layers == sorted(set(layers))


def test_verdict_is_that_of_the_records(study: Study, tmp_path: Path) -> None:
    text = verdict(study, "toy", STORED)
    assert text is not None
    assert "Verdict: " in text
    (told,) = by_kind(panels(study, "toy", verdict=text), "text").values()
    assert all(line.strip() in told.text for line in text.splitlines())
    assert verdict(study, "toy", tmp_path) is None
    assert verdict(study, "toy", tmp_path / "nowhere") is None
    (told,) = by_kind(panels(study, "toy"), "text").values()
    assert "none yet" in told.text
    assert study.decision.rules[0].says in told.text


def test_specification_is_written_offline_and_is_the_same_every_time(
    path: Path, no_key: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(path), "--runs", str(STORED), "--project", "mine"]
    assert main(arguments) == 0
    written = path.with_name("confound.dashboard.json")
    assert capsys.readouterr().out.strip() == str(written)
    assert main([*arguments, "--spec", str(path.with_name("other.json"))]) == 0
    assert written.read_bytes() == path.with_name("other.json").read_bytes()
    content = json.loads(written.read_text(encoding="utf-8"))
    view = content["workspace"]
    assert (view["displayName"], view["project"]) == ("confound.toy", "mine")
    (runs,) = view["spec"]["section"]["runSets"]
    (condition,) = runs["filters"]["filters"]
    assert (condition["key"]["name"], condition["value"]) == ("study", ["confound.toy", "confound"])
    assert runs["grouping"] == [{"section": "config", "name": "arm.value"}]
    assert runs["runFeed"]["columnPinned"]["config:router.value.name"]
    assert runs["runFeed"]["columnPinned"]["summary:test/acc"]
    sent = [panel for section in view["spec"]["section"]["panelBankConfig"]["sections"] for panel in section["panels"]]
    assert len(sent) == len(content["panels"])
    curves = [panel["config"] for panel in sent if panel["viewType"] == "Run History Line Plot"]
    assert {(c["xAxis"], c["groupBy"], c["groupAgg"], c["groupArea"]) for c in curves} == {
        ("epoch", "arm.value", "mean", "stddev")
    }
    assert sent[0]["viewType"] == "Markdown Panel"


@pytest.mark.parametrize("option", ["--online", "--push"])
def test_what_needs_an_account_says_so(
    option: str, path: Path, no_key: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(path), option, "--runs", str(STORED)]) == 2
    assert "wandb login" in capsys.readouterr().err


def test_without_the_library_the_extra_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    monkeypatch.setattr(dashboard, "routed_layers", lambda *arguments: [1])
    assert main([str(path), "--runs", str(STORED)]) == 2
    assert "routing_lab[dashboards]" in capsys.readouterr().err


def test_a_broken_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_push_uploads_the_finished_records(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tracking, "mirror", lambda *arguments: sent.append(arguments))
    lines = push(study, "toy", STORED, "team", "mine")
    finished = [record for record in read_records(STORED) if record["study"] == "confound.toy"]
    assert sorted(record["name"] for _, _, record, *_ in sent) == sorted(record["name"] for record in finished)
    assert all(line.endswith(": uploaded") for line in lines)
    wandb_config, folder, record, resolved, history, group = sent[0]
    assert (wandb_config.mode, wandb_config.entity, wandb_config.project) == ("online", "team", "mine")
    assert (str(folder), resolved, group) == (record["folder"], record["config"], "confound.toy")
    assert [row["val/acc"] for row in history] == read_history(record)["val/acc"]
