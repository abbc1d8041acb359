"""What comes from elsewhere runs nothing, writes nothing where it should not, and tells nothing that is private."""

from __future__ import annotations

import ast
import json
import os
import pickle
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import routing_lab
from routing_lab import report
from routing_lab.config import ConfigError, load
from routing_lab.runs.files import write_text
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import RecordError, read_predictions
from routing_lab.training.callbacks import resumable
from routing_lab.training.run import run_cell
from routing_lab.training.weights import read_weights

SOURCE = Path(routing_lab.__file__).parent
MARKUP = "<script>alert(1)</script>"
MACRO = r"\input{/etc/passwd}"
RUNS_WHAT_IT_READS = ("eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "os.system", "joblib.load")
SECRET = "sk-1f0c9aa7e1"


class Trap:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def _calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _given(call: ast.Call, keyword: str) -> Any:
    return next((word.value.value for word in call.keywords if word.arg == keyword), None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_nothing_in_the_source_can_run_what_it_reads(path: Path) -> None:
    for name, call in _calls(ast.parse(path.read_text(encoding="utf-8"))):
        assert name not in RUNS_WHAT_IT_READS
        assert not name.endswith((".extractall", ".extract")), name
        if name == "torch.load":
            assert _given(call, "weights_only") is True
        if name == "np.load":
            assert not _given(call, "allow_pickle")
        if name.startswith("subprocess."):
            assert not _given(call, "shell")


def test_a_trap_in_a_checkpoint_is_not_sprung(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    folder = RunFolder(tmp_path / "run")
    folder.prepare()
    torch.save({"state_dict": {"a": torch.zeros(1)}, "trap": Trap(sprung)}, folder.last)
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Trap(sprung)))
    assert resumable(folder, "1")[0] is None
    for path in (folder.last, tmp_path / "plain.pth"):
        with pytest.raises(ValueError, match=path.name):
            read_weights(path)
    assert not sprung.exists()


def test_a_trap_in_predictions_is_not_sprung(tmp_path: Path) -> None:
    trap = np.array([Trap(tmp_path / "sprung")], dtype=object)
    np.savez(tmp_path / "predictions.npz", index=np.arange(1), target=trap)
    with pytest.raises(RecordError, match="allow_pickle=False"):
        read_predictions({"folder": str(tmp_path)})
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("member", ["../outside/cat/0.png", "/outside/cat/0.png", "a/../../outside/cat/0.png"])
def test_members_of_an_archive_lead_nowhere_else(member: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "0.png")
    with zipfile.ZipFile(inside / "data.zip", "w") as archive:
        archive.write(tmp_path / "0.png", member)
    with pytest.raises(ConfigError):
        load(["data=image_folder", f"data.path={inside}/data.zip"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0.png", "data.zip", "inside"]


@pytest.mark.parametrize("key", ["name", "arm", "study", "router.name", "data.name"])
@pytest.mark.parametrize("value", ["../x", "/x", "..", "a/b", "a\\b", "~", ".x"])
def test_a_name_is_no_path(key: str, value: str) -> None:
    with pytest.raises(ConfigError):
        load([f"{key}='{value}'"])


def test_reports_quote_what_records_say(tmp_path: Path) -> None:
    for seed in range(2):
        record = {
            "schema": 1,
            "run_id": str(seed),
            "name": f"{MARKUP}{MACRO}",
            "status": "finished",
            "seed": seed,
            "arm": f"{MARKUP}{MACRO}",
            "study": None,
            "warnings": [f"{MARKUP}{MACRO}"],
            "metrics": {"test/acc": 0.5},
            "command": MARKUP,
            "config": {"router": {"name": f"{MARKUP}{MACRO}"}, "data": {"name": f"{MARKUP}{MACRO}"}, "seed": seed},
        }
        record["axes"] = record["config"]
        folder = tmp_path / f"run{seed}"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    broken = tmp_path / "broken<script>alert(1)<"
    broken.mkdir()
    (broken / "run.json").write_text(json.dumps({**record, "status": MARKUP}), encoding="utf-8")
    assert report.main([str(tmp_path), "--html", "--md", "--latex"]) == 0
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert MACRO not in (tmp_path / "report" / "report.tex").read_text(encoding="utf-8")


def test_a_run_tells_no_secret_and_keeps_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MY_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "remote.origin.url")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"https://user:{SECRET}@example.org/x.git")
    loaded = load(["train.epochs=0", "backbone.depth=2", "wandb.mode=disabled", f"paths.runs={tmp_path}/runs"])
    before = os.umask(0o077)
    try:
        assert run_cell(loaded.config, loaded.resolved)["status"] == "finished"
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"run.json", "config.yaml", "predictions.npz"} <= {path.name for path in files}
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
        if ".locks" not in path.parts:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_file_that_was_made_private_stays_so(tmp_path: Path) -> None:
    path = write_text(tmp_path / "run.json", "{}")
    path.chmod(0o600)
    write_text(path, "[]")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
