"""The tool that attacks runs, sweeps and studies, on a few of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "scripts" / "torture.py"


@pytest.mark.slow
def test_what_was_attacked_ends_with_the_same_bits(tmp_path: Path) -> None:
    words = ["run", "sweep", "full", "--kills", "4", "--each", "2", "train.epochs=2", "router=random"]
    done = subprocess.run(
        [sys.executable, TOOL, *words], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed: 0" in done.stdout
