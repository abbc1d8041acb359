"""The probe command on a trained run: findings beside it, the record untouched, mistakes by name."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from routing_lab.config import Composer, load
from routing_lab.config.probing import probe_settings
from routing_lab.evidence.arms import metric_of
from routing_lab.evidence.registration import Cell, append, register
from routing_lab.evidence.study import Study
from routing_lab.look import main as look
from routing_lab.probe import main as probe
from routing_lab.probes.opening import build
from routing_lab.runs.findings import read_findings
from routing_lab.runs.records import read_record

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from routing_lab.training.run import run_cell

    folder = tmp_path_factory.mktemp("probed")
    loaded = load(
        [
            *("data=planted", "data.num_train=64", "data.num_val=32", "data.num_test=48", "router=amod"),
            *("backbone.depth=2", "backbone.width=32", "backbone.heads=2", "train.epochs=1", "train.batch_size=32"),
            *("train.warmup_epochs=0", "wandb.mode=disabled", "runtime.progress=none", f"paths.runs={folder}"),
        ]
    )
    result = run_cell(loaded.config, loaded.resolved, loaded.warnings, command="test")
    assert result["status"] == "finished", result["error"]
    return Path(result["folder"])


def called(*words: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        probe(list(words))
    return int(leaving.value.code or 0)


@pytest.mark.parametrize("name", Composer(config_name="probe").members("probe"))
def test_every_shipped_probe_is_what_its_file_says(name: str) -> None:
    asked = build(probe_settings([f"probe={name}"]))
    assert asked.name == name
    defaults = {field.name: field.default for field in fields(type(asked.probe))}  # type: ignore[arg-type]
    assert {key: getattr(asked.probe, key) for key in asked.options} == defaults


def test_findings_stand_beside_the_run_and_are_reported_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = (run / "run.json").read_bytes()
    words = (str(run), "probe=agreement", "sample.count=32", "sample.batch_size=16")
    assert called(*words) == 0
    first = capsys.readouterr().out
    assert "probe agreement measured on 32 examples" in first
    assert called(*words) == 0
    assert capsys.readouterr().out == first.replace("measured on", "had been measured on")
    assert (run / "run.json").read_bytes() == record
    content = json.loads((run / "probes" / "agreement.json").read_text())
    assert read_findings(run)["probe/agreement/auc/layer1"] == content["findings"][0]["value"]


def test_choices_of_runs_are_compared_among_seeds_and_between_arms(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, places = json.loads((run / "run.json").read_text()), []
    for router, seed in (("amod", 0), ("amod", 1), ("linear", 1)):
        place = shutil.copytree(run, tmp_path / f"{router}-{seed}")
        record["seed"], record["config"]["router"]["name"] = seed, router
        (place / "run.json").write_text(json.dumps(record))
        places.append(str(place))
    assert called(*places, "probe=selection", "sample.count=32") == 0
    lines = capsys.readouterr().out.split("what the runs have in common\n")[1].split("\n")
    found = [line.split() for line in lines[1:] if line]
    assert [row[-4:-1] for row in found] == [["1", "overlap", "1.0000"]] * 2  # the same weights
    assert "its other seeds" in lines[1]
    assert all(0.2 < float(row[-1]) < 0.5 for row in found)


def test_a_finding_is_read_like_a_metric_and_a_registration_stands_for_its_cells(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_record(run)
    assert math.isnan(metric_of(record, "probe/importance/spearman/score"))
    content = yaml.safe_load((EXPERIMENTS / "importance_agreement.yaml").read_text())
    study = Study.model_validate(content | {"name": "importance_agreement"})
    cells = [Cell("attention", 0, record["run_id"]), Cell("random", 0, "0123456789")]
    plan = register(
        None, study, "toy", cells, overrides=[], versions={}, finished=set(), reason="", now=datetime.now(UTC)
    )
    append(plan, run.parent)
    registration = run.parent / "studies" / "importance_agreement.toy.registration.jsonl"
    assert called(str(registration), "probe=importance", "sample.count=8", "probe.dense=false") == 0
    assert "probe importance measured on 8 examples" in capsys.readouterr().out
    assert math.isfinite(metric_of(record, "probe/importance/spearman/score"))


def test_the_sweep_at_capacity_one_is_the_dense_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(str(run), "probe=capacity_sweep", "probe.fractions=[1.0,0.5]", "sample.count=0") == 0
    out = capsys.readouterr().out
    assert "on 48 examples" in out
    assert "accuracy_at_0.5" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["probe=agreemen"], "probe = agreemen: no such member; did you mean agreement?"),
        (["probe=selection", "sample.count=-1"], "count = -1: must be at least 0"),
        (["probe=capacity_sweep", "probe.fractions=[2]"], "numbers in (0, 1] are expected"),
        (["probe=selection", "sample.split=dev"], "sample.split = dev: expected train, val or test"),
        (["probe=selection", "sampel.count=3"], "no such key"),
    ],
)
def test_mistakes_are_named(run: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(str(run), *words) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(str(tmp_path), "probe=selection") == 2
    assert "is no run folder" in capsys.readouterr().err
    assert called("probe=selection") == 2
    assert "at least one run folder is expected" in capsys.readouterr().err


def test_a_page_of_the_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert look([str(run), str(run), "--images", "3", "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert text.count("data:image/png;base64,") == 3
    assert "http" not in text
    assert look([str(tmp_path)]) == 2
    assert "no record" in capsys.readouterr().err
