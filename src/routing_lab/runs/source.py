"""The source that a record was made with. No torch here: a study registers it before anything trains."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any


def git_state() -> dict[str, Any]:
    """Commit of the checkout this package runs from and whether it has changes; None for both outside a checkout."""
    source = Path(__file__).parent
    # Tracked or not: an installed package may lie inside somebody else's repository.
    if _git(source, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"commit": None, "dirty": None}
    commit, changes = _git(source, "rev-parse", "HEAD"), _git(source, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
