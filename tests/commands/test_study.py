"""The study command without training: pilots are set apart, register nothing, and `--plan` tells them again."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routing_lab import dashboard
from routing_lab import study as command
from routing_lab import train as train_command
from routing_lab.config import identity, load
from routing_lab.data.state import data_state
from routing_lab.evidence.claims import Claim
from routing_lab.evidence.pilot import forecast_table, is_pilot, read_pilot
from routing_lab.evidence.registration import find_plan, plan_path
from routing_lab.evidence.report import build_report, to_html
from routing_lab.evidence.study import PILOT_SEEDS
from routing_lab.runs.files import write_json
from routing_lab.runs.records import read_records

COMMITTED = Path(__file__).parents[2] / "experiments" / "results" / "confound_2x2.toy" / "runs"
SPREAD = 0.02
CONTENT: dict[str, Any] = {
    "question": "Does attention select better tokens than chance?",
    "hypothesis": {"statement": "It does.", "predicted": {"attention": "superior"}},
    "arms": {"dense": ["router=dense"], "amod": ["router=amod"], "random": ["router=random"]},
    "common": ["scaling=none", "data=digits", "recipe=quick"],
    "seeds": list(range(4)),
    "reference": "dense",
    "margin": {"size": 0.01, "because": "for the test"},
    "controls": {"positive": {"random against dense": -0.01}},
    "contrasts": {
        "attention": {"arms": ["amod", "random"], "differ_in": "router"},
        "random against dense": {"arms": ["random", "dense"], "differ_in": "router"},
    },
    "decision": {
        "rules": [
            {"verdict": "supports", "says": "better", "when": {"attention": "superior"}},
            {"verdict": "contradicted", "says": "no better", "when": {"attention": "non-superior"}},
        ]
    },
    "scales": {"toy": {"overrides": ["backbone=vit_micro"], "seconds_per_cell": 9, "machine": "2 CPU cores"}},
}


@pytest.fixture
def study(trained: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    """A study file in the working folder; runs of its cells are invented, with a spread of `SPREAD` in a difference."""
    invented = sys.modules["routing_lab.training.run"]
    run_cell = invented.run_cell

    def with_noise(config: Any, resolved: Any, warnings: Any = (), **options: Any) -> dict[str, Any]:
        result: dict[str, Any] = run_cell(config, resolved, warnings, **options)
        accuracy = {"dense": 0.9, "amod": 0.8, "random": 0.7}[config.router.name]
        noise = np.random.default_rng([config.seed, len(config.router.name)]).normal(0, SPREAD / math.sqrt(2))
        result["record"]["metrics"] = {"test/acc": accuracy + float(noise)}
        result["record"]["cost"] = {"train_seconds": 3.0}
        write_json(result["folder"] / "run.json", result["record"])
        return result

    monkeypatch.setattr(invented, "run_cell", with_noise)
    Path("chance.yaml").write_text(json.dumps(CONTENT))
    return "chance.yaml"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        command.main(arguments)
    return int(left.value.code or 0)


def test_a_pilot_tells_what_the_study_can_find_and_counts_nowhere(
    study: str, trained: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(study, "--pilot", "--pilot-seeds", "4") == 0
    assert {call["seed"] for call in trained} == set(range(PILOT_SEEDS, PILOT_SEEDS + 4))
    told = capsys.readouterr().out
    for words in (
        "0 of 12 cells have finished",
        "seeds 1000-1003, set apart and never counted",
        "Positive control came out: random against dense",
        "Power with 4 seeds, at a spread of",
        "3.0 s of training a cell, 36 s for all 12 planned cells",
    ):
        assert words in told
    # What the contrast of interest came out as is not told.
    assert "+10" not in told
    assert find_plan("runs", "chance", "toy") is None
    assert not plan_path("runs", "chance", "toy").exists()

    # `--plan` tells it again; `--pilot` trains nothing twice; more seeds add to it.
    assert run(study, "--plan") == 0
    planned = capsys.readouterr().out
    assert told[told.index("Pilot of chance") :].strip() in planned
    assert "12 cells to run" in planned
    trained.clear()
    assert run(study, "--pilot", "--pilot-seeds", "5") == 0
    assert [call["seed"] for call in trained] == [1004] * 3

    # The study itself begins from nothing, and the report counts its own runs alone.
    trained.clear()
    assert run(study) == 0
    assert [call["seed"] for call in trained if call["seed"] >= PILOT_SEEDS] == []
    records = read_records("runs")
    assert sum(map(is_pilot, records)) == 15
    plan = find_plan("runs", "chance", "toy")
    assert plan is not None
    report = build_report(records, plans=[plan])
    assert report.sections[0].lines[:2] == ("Runs: 12 (12 finished)", "Runs of pilots, never counted: 15")
    assert [section.name for section in report.sections] == ["summary", "study-chance-toy"]


def test_the_pilot_predicts_the_width_of_the_interval(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(study, "--pilot", "--pilot-seeds", "7") == 0
    capsys.readouterr()
    planned = command.plan_study(Path(study))
    pilot = command.pilot_of(planned, range(PILOT_SEEDS, PILOT_SEEDS + 7))
    read = read_pilot(pilot.plan, read_records("runs"))
    assert read.spread == pytest.approx(SPREAD, rel=0.5)
    forecast = read.forecasts[0]
    assert forecast.interval[0] < SPREAD < forecast.interval[1]
    # Two one-sided tests at 0.05 need about (1.645 + 1.645)^2 (spread / margin)^2 seeds for power 0.9.
    assert forecast.equal_seeds == pytest.approx((1.645 * 2 * forecast.spread / 0.01) ** 2, rel=0.1)
    assert forecast.seconds == 6.0
    assert (
        forecast_table(read).column("time")[0] == f"{max(forecast.sign_seeds, forecast.equal_seeds) * 6 / 60:.0f} min"
    )
    assert run(study) == 0
    result = json.loads(Path("runs/studies/chance.toy.verdict.json").read_text())
    effect = result["effects"]["attention"]
    predicted = forecast.half_width * effect["sd"] / forecast.spread
    assert (effect["high"] - effect["low"]) / 2 == pytest.approx(predicted)


def test_a_changed_file_is_refused_or_an_amendment_everywhere(
    study: str, trained: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(study) == 0
    registered = plan_path("runs", "chance", "toy").read_bytes()
    trained.clear()
    # Another rule, once the data are known: the file alone, or an override, changes nothing in silence.
    rules = [{"verdict": "supports", "says": "s", "when": {"random against dense": "inferior"}}]
    changed = CONTENT | {"decision": {"rules": rules, "otherwise": {"verdict": "mixed", "says": "m"}}}
    Path(study).write_text(json.dumps(changed))
    for arguments in ([study], [study, "--plan"], [study, "train.lr=0.1"]):
        assert run(*arguments) == 2
        assert "since then it has changed" in capsys.readouterr().err
    assert plan_path("runs", "chance", "toy").read_bytes() == registered
    assert trained == []

    assert run(study, "--amend", "we looked") == 0
    assert run(study) == 0  # the second time as well
    assert capsys.readouterr().out.count("supports (exploratory)") == 2
    assert plan_path("runs", "chance", "toy").read_bytes().startswith(registered)
    verdict = json.loads(Path("runs/studies/chance.toy.verdict.json").read_text())
    assert "amended on" in verdict["exploratory"][0]
    assert [entry["event"] for entry in verdict["registration"]] == ["registered", "amended"]
    plan = find_plan("runs", "chance", "toy")
    assert plan is not None
    test = {"study": "chance", "effect": "random against dense", "expected": "inferior"}
    claim = Claim.model_validate({"claim": "c", "source": "s", "tests": [test]})
    report = build_report(read_records("runs"), plans=[plan], claims=[claim])
    page = to_html(report)
    assert "Exploratory: amended on" in page
    assert "we looked" in page
    assert "supports (exploratory)" in page
    told = dashboard.verdict(plan.study, "toy", Path("runs"))
    assert told is not None
    assert "supports (exploratory)" in told


def test_cells_over_changed_data_are_refused_and_trained_afresh_when_told(
    study: str, trained: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    invented = sys.modules["routing_lab.training.run"]
    run_cell = invented.run_cell

    def with_files(config: Any, *given: Any, **options: Any) -> dict[str, Any]:
        result: dict[str, Any] = run_cell(config, *given, **options)
        result["record"]["data"] = {"files": data_state(config.data)}
        write_json(result["folder"] / "run.json", result["record"])
        return result

    monkeypatch.setattr(invented, "run_cell", with_files)
    for label in ("cat", "dog"):
        for number in range(12):
            photo = Path("photos", label, f"{number}.bmp")
            photo.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), number + 100 * (label == "dog")).save(photo)
    Path(study).write_text(
        json.dumps(CONTENT | {"common": ["scaling=none", "data=image_folder", "data.path=photos"], "seeds": [0, 1]})
    )
    sweep = ["router=amod", "data=image_folder", "data.path=photos", "seed=5,6", "-m"]
    commands: list[tuple[Callable[..., int], list[str], int]] = [(run, [study], 6), (swept, sweep, 2)]
    for command_of, words, cells in commands:
        assert command_of(*words) == 0
        assert len(trained) == cells
        trained.clear()
    Image.new("L", (8, 8), 255).save("photos/cat/99.bmp")
    for command_of, words, cells in commands:
        capsys.readouterr()
        assert command_of(*words) != 0
        assert "cat had 12 files and has 13" in "".join(capsys.readouterr())
        assert trained == []
        assert command_of(*words, "rerun=true") == 0
        assert len(trained) == cells
        trained.clear()
        assert command_of(*words) == 0
        assert trained == []
    assert run(study, "rerun=true") == 0
    assert trained == []  # a study trains afresh only what is of other data


def swept(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        train_command.main(arguments)
    return int(left.value.code or 0)


def test_the_committed_study_goes_on_with_nothing_to_train_and_its_plan_as_it_was(
    trained: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "committed" / "runs"
    shutil.copytree(COMMITTED, runs)
    plan = (runs / "studies" / "confound_2x2.toy.json").read_bytes()
    shutil.copy(COMMITTED.parent / "confound_2x2.yaml", tmp_path)
    assert run(str(tmp_path / "confound_2x2.yaml"), f"paths.runs={runs}") == 0
    told = capsys.readouterr().out
    assert "42 of 42 cells have finished" in told
    assert "Verdict: inconclusive" in told
    assert trained == []
    assert (runs / "studies" / "confound_2x2.toy.json").read_bytes() == plan


def test_one_seed_has_no_spread(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(study, "--pilot", "--pilot-seeds", "1") == 2
    assert "at least 2" in capsys.readouterr().err


def test_what_follows_the_seed_is_what_the_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = {**CONTENT, "common": [*CONTENT["common"], "train.epochs=${seed}"]}
    Path("followed.yaml").write_text(json.dumps(content))
    planned = command.plan_study(Path("followed.yaml"))
    for cell, job in zip(planned.plan.cells, planned.jobs, strict=True):
        assert cell.run_id == identity(load(job).resolved)
