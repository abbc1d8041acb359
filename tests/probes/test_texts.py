"""Probes on language models: an example is a window of tokens, and its patches are its tokens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.routing.tiny import llama, routed, token_ids

from routing_lab.config import load
from routing_lab.data.text import IGNORED
from routing_lab.look import main as look
from routing_lab.probe import main as probe
from routing_lab.probes.agreement import MaskAgreement
from routing_lab.probes.base import Examples, Finding, Probe, loss_of
from routing_lab.probes.importance import Importance
from routing_lab.probes.leave_one_out import EFFECTS, leave_one_out_effects
from routing_lab.probes.selection import CapacitySweep, SelectionBehaviour
from routing_lab.routing.model import RoutedModel
from routing_lab.runs.findings import read_findings

TEXTS, TOKENS = 4, 10


def texts(masks: bool = False) -> Examples:
    """Windows of two documents each, of which the first two tokens predict nothing that counts."""
    ids = token_ids(TEXTS, TOKENS)
    targets = ids.roll(-1, dims=1)
    targets[:, :2] = IGNORED
    inside = torch.zeros(TEXTS, TOKENS, dtype=torch.bool)
    inside[:, 3:6] = True
    segments = torch.arange(TOKENS).ge(4).long().expand(TEXTS, -1)
    return Examples(ids, targets, torch.arange(TEXTS), inside if masks else None, segments)


def model_of(*overrides: str) -> RoutedModel:
    return routed(["router=linear", *overrides], llama(), double=True)


def findings_of(measuring: Probe, model: RoutedModel, some: Examples) -> dict[str, Finding]:
    with torch.no_grad():
        return {finding.key: finding for finding in measuring.summarise(measuring.measure(model, some))}


def test_loss_is_the_mean_over_the_tokens_that_count_within_their_document() -> None:
    model, some = model_of(), texts()
    with torch.no_grad():
        logits = model(some.inputs, segments=some.segments, sample_ids=some.index)
    expected = [
        np.mean([-logits[row].log_softmax(dim=-1)[n, some.targets[row, n]].item() for n in range(2, TOKENS)])
        for row in range(TEXTS)
    ]
    assert loss_of(logits, some.targets).tolist() == pytest.approx(expected)
    with torch.no_grad():
        arrays = SelectionBehaviour().measure(model, some)
    assert arrays["loss"].tolist() == pytest.approx(expected, rel=1e-5)
    assert arrays["kept"].shape == (TEXTS, len(model.routed_layers), TOKENS)


def test_effects_of_leaving_a_token_out_are_those_of_the_forward_without_it() -> None:
    model, some = model_of(), texts()
    found = leave_one_out_effects(
        model, some.inputs, some.targets, 1, "force_skip", EFFECTS, segments=some.segments, rows=3
    )
    with torch.no_grad():
        complete, trace = model(some.inputs, segments=some.segments, return_trace=True)
        row, token = trace[1].mask().nonzero()[-1].tolist()

        def without(scores: torch.Tensor, selection):  # type: ignore[no-untyped-def]
            mask = selection.mask()
            mask[row, token] = False
            return type(selection).from_mask(mask)

        tokens, context = model.embed(some.inputs, some.layout)
        left, _ = model.forward_tokens(tokens, context, model.run_state(tokens), {1: without})
        changed = model.head(left)
    p, q = (logits[row, 2:].log_softmax(dim=-1) for logits in (complete, changed))
    target = some.targets[row, 2:, None]
    torch.testing.assert_close(found["loss"][row, token], (p - q).gather(1, target).mean())
    torch.testing.assert_close(found["kl"][row, token], (p.exp() * (p - q)).sum(dim=1).mean())
    fall = (complete - changed)[row, 2:].gather(1, target).mean()
    torch.testing.assert_close(found["logit"][row, token], fall)
    for values in found.values():
        assert (values[~trace[1].mask()] == 0).all()


def test_importance_of_tokens_in_batches_and_alone() -> None:
    model, some, measuring = model_of(), texts(), Importance(rows=7)
    with torch.no_grad():
        whole = measuring.measure(model, some)
        parts = (some.inputs, some.targets, some.index, some.segments)
        ids, targets, index, segments = (part[1:2] for part in parts if part is not None)
        alone = measuring.measure(model, Examples(ids, targets, index, None, segments))
    for name, values in alone.items():
        np.testing.assert_allclose(values, whole[name][1:2], atol=1e-10, err_msg=name)
    assert not any(key.startswith("dense.") for key in whole)
    found = {finding.key: finding.value for finding in measuring.summarise(whole)}
    assert math.isfinite(found["spearman/score"])
    assert math.isfinite(found["spearman/received/layer1"])
    assert not any(key.endswith("_and_dense/layer1") for key in found)


def test_sweep_and_agreement() -> None:
    model, some = model_of(), texts(masks=True)
    found = findings_of(CapacitySweep((1.0, 0.5)), model, some)
    with torch.no_grad():
        dense = routed(["router=dense"], llama(), double=True)(some.inputs, segments=some.segments)
    right = (dense.argmax(dim=-1) == some.targets) & (some.targets != IGNORED)
    assert found["accuracy_at_1"].value == pytest.approx(right.sum().item() / (TEXTS * (TOKENS - 2)))
    assert (found["tokens_at_1"].value, found["tokens_at_0.5"].value) == (TOKENS, TOKENS // 2)
    agreement = findings_of(MaskAgreement(), model, some)
    assert agreement["auc/layer1"].chance == 0.5
    assert agreement["background_of_kept/layer1"].chance == pytest.approx(0.7)


def test_a_trained_run_of_texts_is_probed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from routing_lab.training.run import run_cell

    loaded = load(
        [
            *("task=language", "data=induction", "method=mod_lm", "backbone.width=16", "backbone.depth=2"),
            *("backbone.heads=2", "backbone.kv_heads=1", "backbone.mlp_width=16", "train.epochs=1"),
            *("train.batch_size=16", "data.num_train=32", "data.num_val=16", "data.num_test=16"),
            *("wandb.mode=disabled", "runtime.progress=none", f"paths.runs={tmp_path}"),
        ]
    )
    result = run_cell(loaded.config, loaded.resolved, loaded.warnings, command="test")
    assert result["status"] == "finished", result["error"]
    folder = str(result["folder"])
    for name in ("selection", "agreement", "structure", "corrupted_head", "capacity_sweep", "importance"):
        with pytest.raises(SystemExit) as leaving:
            probe([folder, f"probe={name}", "sample.count=4", "sample.batch_size=2"])
        assert leaving.value.code == 0, capsys.readouterr().err
    found = read_findings(result["folder"])
    assert {"probe/selection/dead", "probe/importance/spearman/score", "probe/structure/row_entropy/layer0"} <= set(
        found
    )
    assert look([folder, "--images", "2", "--out", str(tmp_path / "page.html")]) == 0
    assert '"unit":"tokens"' in (tmp_path / "page.html").read_text()
