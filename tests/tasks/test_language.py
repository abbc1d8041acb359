from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from routing_lab.assembly import build_model
from routing_lab.config import load
from routing_lab.data.layout import DataProblem
from routing_lab.data.text.induction import IGNORED
from routing_lab.data.text.windows import TextBatch
from routing_lab.runs.metrics import QUANTITIES
from routing_lab.tasks.language import Language, token_losses

SMALL = ["task=language", "backbone.width=16", "backbone.depth=3", "backbone.heads=2", "backbone.kv_heads=1"]


@pytest.fixture
def task() -> Any:
    config = load([*SMALL, "backbone.mlp_width=16", "method=dtrnet_vit"]).config
    return Language(build_model(config, 256), config.train, 0, 256, None, config.losses)


def a_batch(windows: int = 3, tokens: int = 8) -> TextBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (windows, tokens + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :3] = IGNORED
    return TextBatch(ids[:, :-1], targets, torch.arange(windows), (targets != IGNORED).sum(dim=1) * 2)


def test_the_default_cell_is_a_language_model_and_the_command_line_wins(tmp_path: Path) -> None:
    config = load(["task=language"]).config
    assert (config.backbone.name, config.data.name, config.train.name) == ("llama_micro", "shakespeare", "language")
    other = load(["data=induction", "task=language", "recipe=quick", "train.augment=none"]).config
    assert (other.data.name, other.train.name) == ("induction", "quick")


def test_metrics_are_means_over_the_predicted_tokens(task: Any) -> None:
    batch = a_batch()
    arrays, _ = task.eval().examples(batch)
    logits = task.model(batch.ids)
    nats = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
    found = task.metrics_of({name: value.item() for name, value in task.totals(arrays).items()})
    assert set(found) == set(task.quantities) <= set(QUANTITIES)
    assert found["loss"] == pytest.approx(nats / 21)
    assert found["ppl"] == pytest.approx(math.exp(nats / 21))
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / 42)
    assert arrays["tokens"].tolist() == [5, 8, 8]
    assert not QUANTITIES[task.selects].higher_is_better


def test_the_objective_has_the_auxiliary_losses_and_every_parameter_learns(
    task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.auxiliary._losses["load"] = task.auxiliary._losses["load"].model_copy(update={"weight": 0.5})
    task.train()
    batch = a_batch()
    monkeypatch.setattr(Language, "progress", 0.0)
    monkeypatch.setattr(Language, "global_step", 0)
    loss, totals, terms = task.objective(batch)
    assert totals["examples"] == 21
    plain = token_losses(task.model(batch.ids), batch.targets).sum() / 21
    torch.testing.assert_close(loss, plain + 0.5 * terms["load"])
    loss.backward()
    assert all(parameter.grad is not None for parameter in task.model.parameters())


@pytest.mark.parametrize("method", ["dense", "dtrnet_vit", "mod"])
def test_documents_in_one_window_do_not_see_each_other(method: str) -> None:
    extra = ["capacity=threshold", "capacity.threshold=0.0"] if method == "mod" else []
    model = build_model(load([*SMALL, f"method={method}", *extra]).config, 256).eval()
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    segments = torch.tensor([[0] * 5 + [1] * 7, [3] * 12])
    packed = model(ids, segments=segments)
    changed = ids.clone()
    changed[0, :5] = (changed[0, :5] + 1) % 256
    torch.testing.assert_close(model(changed, segments=segments)[0, 5:], packed[0, 5:])
    assert not torch.allclose(model(changed)[0, 5:], model(ids)[0, 5:])
    torch.testing.assert_close(packed[1], model(ids[1:])[0])
    # A document alone stands at other positions, which rotary angles do not see.
    torch.testing.assert_close(model(ids[:1, 5:])[0], packed[0, 5:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side: str) -> None:
    model = build_model(load([*SMALL, "method=dtrnet_vit"]).config, 256).eval()
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(2))
    pad = torch.zeros(2, 3, dtype=torch.int64)
    valid = torch.ones(2, 9, dtype=torch.bool)
    parts, marks = ([pad, ids], [pad.bool(), valid]) if side == "left" else ([ids, pad], [valid, pad.bool()])
    found = model(torch.cat(parts, 1), valid=torch.cat(marks, 1))
    kept = found[:, 3:] if side == "left" else found[:, :9]
    torch.testing.assert_close(kept, model(ids), atol=1e-5, rtol=1e-4)


def test_an_encoding_that_the_backbone_does_not_know_is_refused() -> None:
    config = load(["task=language", "data.vocab_size=256", "backbone.vocab_size=200"]).config
    with pytest.raises(DataProblem, match="has 256 tokens, and backbone"):
        Language.build_data(config)


def test_images_have_no_documents() -> None:
    model = build_model(load([]).config, 10)
    with pytest.raises(ValueError, match="an image has neither padding nor documents"):
        model(torch.zeros(1, 1, 8, 8), segments=torch.zeros(1, 16, dtype=torch.int64))
