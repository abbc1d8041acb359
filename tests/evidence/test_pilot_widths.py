"""The first half of the seeds foretells how wide the intervals of a whole study are, on committed records."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pilots() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pilots", ROOT / "benchmarks" / "pilots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_pooled_spread_of_three_seeds_foretells_widths_within_thirty_percent(pilots: ModuleType) -> None:
    found = {item.study: item for item in pilots.foretold()}
    for study in ("confound_2x2.toy", "length_extrapolation.toy", "selection_matters.toy"):
        assert (found[study].pilot, found[study].seeds) == (3, 6)
        assert found[study].pooled == pytest.approx(1, abs=0.3)
        assert found[study].effects
