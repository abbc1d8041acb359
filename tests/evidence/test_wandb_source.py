"""Records through Weights & Biases and back: summarised as a run does it, read through a stand-in for the API."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.evidence.synthetic import STORED

from routing_lab import report as command
from routing_lab.evidence import wandb_source
from routing_lab.evidence.report import build_report, to_csv
from routing_lab.evidence.tables import sweep_table
from routing_lab.evidence.wandb_source import RECORD_KEY, has_api_key, read_source, records_from_wandb
from routing_lab.runs.files import json_text
from routing_lab.runs.records import RecordError, read_history, read_records, to_frame
from routing_lab.training.tracking import summary


class StoredRun:
    """What the API returns of a mirrored run: everything has been through JSON."""

    def __init__(self, number: int, record: Mapping[str, Any]) -> None:
        self.id = f"run{number}"
        self.config = json.loads(json.dumps(record["config"]))
        self.summary = json.loads(json.dumps({**summary(record), "_runtime": 3}))
        columns = read_history(record)
        rows = zip(*columns.values(), strict=True)
        self.rows = [dict(zip(columns, row, strict=True)) | {"_step": step} for step, row in enumerate(rows)]

    def scan_history(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


class Api:
    """Stands in for `wandb.Api()` and notes what it is asked for."""

    def __init__(self, runs: list[Any]) -> None:
        self.stored = runs
        self.asked: list[Any] = []

    def runs(self, path: str, filters: Mapping[str, Any], order: str) -> list[Any]:
        self.asked.append((path, dict(filters), order))
        return self.stored


def finished() -> list[dict[str, Any]]:
    """The stored records that a run would have mirrored, as a run writes them."""
    return [json.loads(json_text(record)) for record in read_records(STORED) if record["status"] == "finished"]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    api = Api([StoredRun(number, record) for number, record in enumerate(finished())])
    monkeypatch.setattr(wandb_source, "_client", lambda: api)
    return api


def test_records_come_back_whole(api: Api) -> None:
    found = records_from_wandb("team", "project", {"config.study": "confound.toy"}, api)
    assert api.asked == [("team/project", {"jobType": "train", "config.study": "confound.toy"}, "+created_at")]
    assert len(found) == 20
    for there, here in zip(found, finished(), strict=True):
        assert read_history(there) == read_history(here)
        assert len(read_history(there)["val/acc"]) == 4
        assert there["folder"].startswith("wandb:team/project/run")
        places = ("folder", "history")
        assert {k: v for k, v in there.items() if k not in places} == {k: v for k, v in here.items() if k != "folder"}


def test_tables_and_report_are_those_of_the_folder(api: Api) -> None:
    there, here = read_source("wandb:team/project"), finished()
    assert to_frame(there).drop(columns="folder").equals(to_frame(here).drop(columns="folder"))
    assert sweep_table(there).arms == sweep_table(here).arms
    assert to_csv(build_report(there)) == to_csv(build_report(here))


def test_report_and_its_curves_from_the_command_line(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["wandb:team/project", "--html"]) == 0
    page = (tmp_path / "project.report" / "report.html").read_text(encoding="utf-8")
    assert "Training curves of val/acc" in page
    printed = capsys.readouterr()
    assert "Runs: 20 (20 finished)" in printed.out
    assert "no predictions" in printed.err


def test_of_two_uploads_of_a_run_the_last_counts(api: Api) -> None:
    again = StoredRun(99, {**finished()[0], "command": "again"})
    api.stored.append(again)
    found = records_from_wandb("team", "project", api=api)
    assert len(found) == 20
    assert found[0]["command"] == "again"


@pytest.mark.parametrize(
    ("kept", "reason"),
    [({}, "holds no 'record'"), ({RECORD_KEY: "{"}, "not JSON"), ({RECORD_KEY: "{}"}, "lacks schema")],
)
def test_runs_without_a_record_are_named(kept: dict[str, Any], reason: str) -> None:
    (record,) = records_from_wandb("team", "project", api=Api([SimpleNamespace(id="abc", summary=kept)]))
    assert (record["status"], record["name"]) == ("unreadable", "abc")
    assert reason in record["reason"]


@pytest.mark.parametrize("source", ["wandb:", "wandb:team", "wandb:team/", "wandb:team/project/run"])
def test_sources_are_checked(source: str) -> None:
    with pytest.raises(RecordError, match="wandb:<entity>/<project> is expected"):
        read_source(source)


def test_what_goes_wrong_over_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(*args: Any, **options: Any) -> None:
        raise ValueError("Could not find project team/project")

    with pytest.raises(RecordError, match="wandb:team/project: ValueError: Could not find project"):
        records_from_wandb("team", "project", api=SimpleNamespace(runs=runs))


def test_without_a_key_nobody_is_asked_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_api_key()
    assert command.main(["wandb:team/project"]) == 2
    assert "wandb login" in capsys.readouterr().err


def test_importing_the_source_imports_no_client() -> None:
    code = "import sys, routing_lab.evidence.wandb_source; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
