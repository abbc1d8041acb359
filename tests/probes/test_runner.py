"""Probes beside a run: chosen by a seed, resumed, reused, and never in the record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.routing.tiny import routed

from routing_lab.probes.base import Arrays, Examples, Finding, Probe
from routing_lab.probes.runner import Sample, Subject, run_probe
from routing_lab.routing.model import RoutedModel
from routing_lab.runs.findings import read_findings

CALLS: list[list[int]] = []


@dataclass(frozen=True)
class Brightness(Probe):
    """A user's own probe; it breaks after so many batches."""

    fail_after: int = 100

    def measure(self, model: RoutedModel, examples: Examples) -> dict[str, np.ndarray]:
        if len(CALLS) >= self.fail_after:
            raise KeyboardInterrupt
        CALLS.append(examples.index.tolist())
        assert not model.training
        return {"mean": examples.inputs.flatten(1).mean(dim=1).numpy()}

    def summarise(self, arrays: Arrays) -> list[Finding]:
        return [Finding.mean("brightness", arrays["mean"])]


def subject(folder: Path, identity: str = "a") -> Subject:
    images = torch.randn(100, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def examples(index: torch.Tensor) -> Examples:
        return Examples(images[index], index % 5, index)

    return Subject("run", identity, folder, routed(["router=amod"]), examples, torch.arange(10, 100))


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def test_an_interrupted_probe_goes_on_with_the_batches_that_are_missing(tmp_path: Path) -> None:
    sample = Sample(count=30, seed=3, batch_size=8)
    with pytest.raises(KeyboardInterrupt):
        run_probe("b", Brightness(fail_after=2), {}, subject(tmp_path), sample)
    first = len(CALLS)
    found, measured = run_probe("b", Brightness(), {}, subject(tmp_path), sample)
    assert (first, len(CALLS), measured) == (2, 4, True)
    assert sorted(index for call in CALLS for index in call) == sample.indices(torch.arange(10, 100)).tolist()
    CALLS.clear()
    whole, _ = run_probe("b", Brightness(), {}, subject(tmp_path / "other"), sample)
    assert whole == found
    assert sorted(path.name for path in (tmp_path / "probes").iterdir()) == ["b.json", "b.npz"]


def test_what_was_measured_is_reported_until_something_differs(tmp_path: Path) -> None:
    sample = Sample(count=8, batch_size=8)
    run_probe("b", Brightness(), {}, subject(tmp_path), sample)
    assert run_probe("b", Brightness(), {}, subject(tmp_path), sample)[1] is False
    assert run_probe("b", Brightness(), {}, subject(tmp_path), sample, rerun=True)[1] is True
    assert run_probe("b", Brightness(), {"x": 1}, subject(tmp_path), sample)[1] is True
    assert run_probe("b", Brightness(), {"x": 1}, subject(tmp_path, "retrained"), sample)[1] is True
    assert run_probe("b", Brightness(), {"x": 1}, subject(tmp_path, "retrained"), Sample(8, 1, 8))[1] is True


def test_findings_read_like_metrics_and_bad_files_are_left_out(tmp_path: Path) -> None:
    found, _ = run_probe("b", Brightness(), {}, subject(tmp_path), Sample(0, batch_size=50))
    assert found["examples"] == 90
    assert read_findings(tmp_path) == {"probe/b/brightness": found["findings"][0]["value"]}
    (tmp_path / "probes" / "torn.json").write_text("{")
    (tmp_path / "probes" / "other.json").write_text(json.dumps([1]))
    assert list(read_findings(tmp_path)) == ["probe/b/brightness"]
    assert read_findings(tmp_path / "nothing") == {}
