"""The training command without training: what a run would leave behind, in milliseconds."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routing_lab.config import identity, run_folder, run_name
from routing_lab.runs.files import write_json
from routing_lab.runs.records import new_record


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Replaces `run_cell` in an empty working folder; the list holds the keyword arguments of each call.

    Seed 13 fails and seed 99 is interrupted.
    """
    calls: list[dict[str, Any]] = []

    def run_cell(config: Any, resolved: Any, warnings: Any = (), **options: Any) -> dict[str, Any]:
        calls.append({"seed": config.seed, "router": config.router.name, "threads": config.runtime.threads, **options})
        folder = run_folder(config, resolved)
        record = new_record(resolved, run_id=identity(resolved), name=run_name(config), command=options["command"])
        result = {"folder": folder, "error": None, "signal": None, "trained": True, "status": "finished"}
        if config.seed == 13:
            result |= {"status": "failed", "error": "ValueError: thirteen", "trained": False}
        if config.seed == 99:
            result |= {"status": "interrupted", "error": "stopped by SIGTERM", "trained": False, "signal": 15}
        record |= {"status": result["status"], "warnings": [*warnings, f"ratio {config.seed}.5 %"]}
        record["metrics"] = {"val/acc": 0.9, "test/acc": min(0.9 + config.seed / 100, 1.0), "test/loss": 0.3}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "run.json", record)
        return result | {"record": record}

    module = types.ModuleType("routing_lab.training.run")
    module.run_cell = run_cell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "routing_lab.training.run", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return calls


@pytest.fixture
def train(trained: list[dict[str, Any]]) -> Callable[..., int]:
    """The command in this process; returns its exit code."""
    from routing_lab.train import main

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        return int(left.value.code or 0)

    return run
