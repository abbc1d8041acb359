"""Exported models: one file, any batch, the model's own outputs; and what cannot be exported says why."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from tests.routing.tiny import images, route, vit
from torch import Tensor

from routing_lab import export as command
from routing_lab.exporting import export
from routing_lab.routing.base import RunState
from routing_lab.routing.capacity import Threshold
from routing_lab.routing.tokens import Selection


@pytest.mark.parametrize(
    "arm", [["router=amod"], ["router=linear", "scaling=multiply", "capacity=threshold", "capacity.threshold=0"]]
)
def test_a_program_runs_on_any_batch(arm: list[str], tmp_path: Path) -> None:
    model = route(vit(), arm).eval()
    assert export(model, tmp_path / "model.pt2") < 1e-5
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        for batch in (1, 5):
            x = images(batch=batch)
            torch.testing.assert_close(program(x), model(x), rtol=0, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx_agrees_with_the_model(tmp_path: Path) -> None:
    model = route(vit(), ["router=amod"]).eval()
    assert export(model, tmp_path / "model.onnx") < 1e-4
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    x = images(batch=5)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=0, atol=1e-4)


def test_a_rule_that_asks_python_how_many_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def select(self: Threshold, scores: Tensor, state: RunState) -> Selection:
        return Selection.first(len(scores), int((scores > 0).sum()), scores.shape[1], scores.device)

    monkeypatch.setattr(Threshold, "select", select)
    model = route(vit(), ["router=linear", "capacity=threshold"]).eval()
    with pytest.raises(ValueError, match="cannot be exported: Python must not ask for the value of a tensor"):
        export(model, tmp_path / "model.pt2")
    with pytest.raises(ValueError, match=r"expected a name that ends in \.onnx or \.pt2"):
        export(model, tmp_path / "model.bin")
    assert not list(tmp_path.iterdir())


def test_words_are_checked_before_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nothing"], [str(tmp_path), "model.bin"]):
        with pytest.raises(SystemExit) as left:
            command.main(words)
        assert left.value.code == 2
    found = capsys.readouterr().err
    assert "two are expected" in found
    assert "is no run folder" in found
    assert "must end in .onnx or .pt2" in found
