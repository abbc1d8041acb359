from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routing_lab.config import Loaded, load

SMALL = (
    "train.epochs=2",
    "train.warmup_epochs=0",
    "train.batch_size=128",
    "backbone.width=16",
    "backbone.depth=2",
    "backbone.heads=2",
    "wandb.mode=disabled",
    "runtime.progress=none",
)
"""A cell that trains in a fraction of a second."""


@pytest.fixture
def cell(tmp_path: Path) -> Callable[..., Loaded]:
    """Loads a small cell whose runs go to a temporary folder; later overrides win."""

    def make(*overrides: str, runs: Path = tmp_path / "runs") -> Loaded:
        given = {text.partition("=")[0]: text for text in (*SMALL, f"paths.runs={runs}", *overrides)}
        return load(list(given.values()))

    return make


@pytest.fixture
def run(cell: Callable[..., Loaded]) -> Callable[..., dict[str, Any]]:
    """Runs a small cell and returns what `run_cell` returns."""
    from routing_lab.training.run import run_cell

    def execute(*overrides: str, **options: Any) -> dict[str, Any]:
        loaded = cell(*overrides, **options)
        return run_cell(loaded.config, loaded.resolved, loaded.warnings, command="test")

    return execute
