"""The benchmark: what it measures adds up, is written down with its circumstances, and mistakes are refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.routing.tiny import images, llama, route, token_ids, vit

from routing_lab import benchmark
from routing_lab.config import load, run_folder
from routing_lab.timing import CATEGORIES, TRUSTED, TimedPair, Timing, forward_parts


def test_a_comparison_says_what_was_measured() -> None:
    model = vit()
    routed = route(model, ["router=amod", "capacity.fraction=0.5"])
    for train in (False, True):
        found = benchmark.compare(model, routed, images(), rounds=3, train=train)
        assert found.efficiency == pytest.approx(found.speedup * found.mac_ratio)
        assert 0.5 < found.mac_ratio < 1
        assert found.peak_memory is not None
        assert min(found.peak_memory.values()) >= images().numel()
        assert found.parts is not None
        assert tuple(found.parts) == CATEGORIES
        assert all(found.parts[part] > 0 for part in CATEGORIES)
        assert found.setting["train"] is train
        assert found.setting["threads"] == torch.get_num_threads()
    assert not model.training
    with pytest.raises(ValueError, match="rounds = 1: at least 2"):
        benchmark.compare(model, routed, images(), rounds=1)


def test_a_decoder_is_timed_too() -> None:
    model = llama()
    found = benchmark.compare(model, route(model, ["router=linear", "capacity.fraction=0.5"]), token_ids(), rounds=2)
    assert 0 < found.mac_ratio < 1


def test_statistics_of_a_pass_of_their_own_are_statistics() -> None:
    """The exact way computes the map once more; nothing stays behind of the watching."""
    routed = route(vit(), ["router=amod", "runtime.attention=exact"])
    before = routed(images())
    parts = forward_parts(routed, images())
    assert parts["statistics"] > parts["router"] / 10
    assert torch.equal(routed(images()), before)


def test_a_wide_spread_is_a_warning() -> None:
    def comparison(ratios: list[float]) -> TimedPair:
        one = Timing.of([1.0, 1.0])
        return TimedPair(one, one, Timing.of(ratios), 0.5, 1.0, None, None)

    assert comparison([0.5, 0.5, 0.5]).warning is None
    wide = comparison([0.5, 0.5 * (1 + 4 * TRUSTED), 0.5])
    assert wide.warning is not None
    assert "other work shares this machine" in wide.warning
    assert wide.efficiency == 1


def test_the_command_writes_a_record_of_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["router=linear", "capacity.fraction=0.25,0.5", "-m", "batch_size=2", "rounds=2", f"paths.runs={tmp_path}"]
    with pytest.raises(SystemExit) as left:
        benchmark.main(words)
    assert left.value.code == 0
    files = sorted((tmp_path / "benchmarks").glob("*.json"))
    assert len(files) == 2
    loaded = load(["router=linear", "capacity.fraction=0.25", f"paths.runs={tmp_path}"])
    content = json.loads(files[0].read_text())
    assert content["run"] == run_folder(loaded.config, loaded.resolved).name
    assert content["asked"]["batch_size"] == 2
    assert content["efficiency"] == pytest.approx(content["mac_ratio"] / content["ratio"]["median"])
    assert {"device", "threads", "dtype", "compile", "load"} <= set(content["setting"])
    printed = capsys.readouterr().out
    assert printed.count("efficiency") == 2
    assert "gather_scatter" in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["batch_size=0", "dtype=int8", "router=nothing"], ["batch_size = 0", "dtype = int8", "router = nothing"]),
        (["router=dense"], ["router = dense", "nothing to compare"]),
        (["batch_size=1,2"], ["several values need -m"]),
        (["amod"], ["an override is expected"]),
    ],
)
def test_mistakes_are_refused(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        benchmark.main(words)
    assert left.value.code == 2
    found = capsys.readouterr().err
    assert all(text in found for text in expected), found
