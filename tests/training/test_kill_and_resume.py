"""The tool that kills runs, on one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "scripts" / "kill_and_resume.py"


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits() -> None:
    words = ["--trials", "2", "--kills", "2", "train.epochs=3", "backbone.depth=2", "router=random"]
    done = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 2 trials differ" in done.stdout
