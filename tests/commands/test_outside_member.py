"""The router of CONTRIBUTING.md, exactly as it stands there, trains."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def example() -> tuple[dict[str, str], list[str]]:
    """The files of the section, by path, and the words of its command."""
    section = CONTRIBUTING.read_text("utf-8").split("## A router of your own")[1].split("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, flags=re.DOTALL)
    files = {re.match(r"# (\S+)\n", text)[1]: text for language, text in blocks if language in ("python", "yaml")}  # type: ignore[index]
    (command,) = (text for language, text in blocks if language == "sh")
    return files, shlex.split(command)


def test_the_class_is_short() -> None:
    files, _ = example()
    lines = [line for line in files["my_routers.py"].splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 10


@pytest.mark.slow
def test_the_example_trains(tmp_path: Path) -> None:
    files, command = example()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert command[0] == "python"
    quick = ["train.epochs=1", "train.warmup_epochs=0", "wandb.mode=disabled", "runtime.threads=1"]
    done = subprocess.run(
        [sys.executable, *command[1:], *quick], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/run.json"))
    assert record["status"] == "finished"
    assert record["axes"]["router"]["name"] == "norm"
    assert record["config"]["router"]["power"] == 2.0
    assert record["command"].startswith("python -m routing_lab.train --config-dir my_conf router=norm router.power=2.0")
    assert set(record["routing"]["kept_fraction"]) == {"1", "3", "5"}
