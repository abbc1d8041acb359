"""Golden cases: the numbers of the equations, reproduced through the public interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from scipy import stats
from tests.golden.cases import Case, find
from tests.golden.mapping import decoder_overrides, vision_overrides
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import routing_lab
from routing_lab.probes import leave_one_out
from routing_lab.routing.capacity import quantile
from routing_lab.routing.losses import load_loss
from routing_lab.routing.model import RoutedModel

EXACT = 1e-10
"""Bound in double precision, where the expected numbers are double too."""

EXECUTIONS = ("gather", "mask")


def check_vision(case: Case, dtype: torch.dtype) -> None:
    """MoD Eq. 1-2 and A-MoD Eq. 4-5 on a vision transformer."""
    options, routed = case.options, case.options["routed_layers_0based"]
    model = _routed(case, vision_overrides(case), dtype)
    assert model.routed_layers == routed
    images = case.expected("input").to(dtype)
    near = _Near(case, dtype)
    near(model.backbone(images), "logits_dense")
    for execution in EXECUTIONS:
        model.set_execution(execution)
        with _layers_seen(model) as seen:
            logits, trace = model(images, return_trace=True)
        near(logits, "logits")
        _losses(case, near, logits)
        for layer in routed:
            part, before, after = trace[layer], *seen[layer]
            near(part.scores, "score", layer)
            _same_selection(case, part, layer)
            gate = torch.ones_like(part.kept, dtype=dtype) if part.gate is None else part.gate
            near(_spread(gate, part.kept, before.shape[1]), "gate", layer)
            near((after - before).norm(dim=-1), "update_norm", layer)
            near(after, "x_out", layer, double=False)
            if options["select"] == "percentile":
                near(quantile(part.scores, 1 - options["capacity"]).squeeze(1), "threshold", layer, "score_abs")
    _gradients(case, near, model, images)


def check_leave_one_out(case: Case, dtype: torch.dtype) -> None:
    """Loss without each token minus loss with it, in the routed and in the dense model."""
    model = _routed(case, vision_overrides(case), dtype)
    images, labels, layer = case.expected("input").to(dtype), case.expected("labels"), case.options["layer_0based"]
    near = _Near(case, dtype)
    logits, trace = model(images, return_trace=True)
    near(logits, "logits")
    near(cross_entropy(logits, labels, reduction="none"), "loss", bound="loss_change_abs")
    for number in case.options["routed_layers_0based"]:
        near(trace[number].scores, "score", number)
        _same_selection(case, trace[number], number)

    dense = routing_lab.route(model.backbone, ["router=dense"])
    near(cross_entropy(dense(images), labels, reduction="none"), "loss_dense", bound="loss_change_abs")
    operations = ("force_skip", "force_skip_refill", "drop_input")
    found = {operation: leave_one_out(model, images, labels, layer, operation) for operation in operations}
    for operation, importance in found.items():
        near(importance, operation, bound="loss_change_abs")
    near(leave_one_out(dense, images, labels, operation="drop_input"), "drop_input_dense", bound="loss_change_abs")

    skipped = torch.ones(trace[layer].scores.shape, dtype=torch.bool).scatter(1, trace[layer].kept, False)
    assert (found["force_skip"][skipped] == 0).all()
    assert (found["force_skip_refill"][skipped] == 0).all()

    if dtype == torch.float64:
        scores, dropped = trace[layer].scores, found["drop_input"]
        for sample, expected in case.options.get("correlations", {}).items():
            row, given = int(sample), slice(1, None)
            for name in ("spearman", "pearson", "kendall"):
                function = {"spearman": stats.spearmanr, "pearson": stats.pearsonr, "kendall": stats.kendalltau}[name]
                agreement = function(scores[row, given], dropped[row, given]).statistic
                assert agreement == pytest.approx(expected[f"{name}(score_{layer}, drop_input), patches"], abs=1e-9)


def check_decoder(case: Case, dtype: torch.dtype) -> None:
    """DTRNet by its equations on a Llama decoder: attention routed, the others projected."""
    options = case.options
    model = _routed(case, decoder_overrides(case), dtype)
    ids = case.expected("input")
    # transformers computes rotary angles, norms and softmax in single precision in any model.
    near = _Near(case, dtype, exact=False)
    near(model.backbone(ids).logits, "logits_dense")
    for execution in EXECUTIONS:
        model.set_execution(execution)
        with _layers_seen(model) as seen, _mlp_inputs_seen(model) as after_attention:
            logits, trace = model(ids, return_trace=True)
        near(logits, "logits")
        near(cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), "loss_ce", bound="loss_abs")
        near(load_loss(trace), "loss_load", bound="loss_abs")
        for layer in options["routed_layers_0based"]:
            part, before, after = trace[layer], *seen[layer]
            near(part.scores, "score", layer)
            near(torch.stack([part.scores, 1 - part.scores], dim=-1), "prob", layer, "score_abs")
            _same_selection(case, part, layer)
            # A norm sums 48 coordinates, each within the bound.
            near((after_attention[layer] - before).norm(dim=-1), "update_norm", layer)
            near(model.adapter.block(layer).project(before).norm(dim=-1), "bypass_norm", layer)
            near(after, "x_out", layer, double=False)
    _gradients(case, near, model, ids)


FAMILIES: dict[str, Callable[[Case, torch.dtype], None]] = {
    "eq_mod_*": check_vision,
    "eq_amod_*_loo*": check_leave_one_out,
    "eq_amod_*": check_vision,
    "eq_dtr_*": check_decoder,
}
"""Pattern of a case's name -> the check; the first pattern that fits counts."""

CASES = find(FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("case", "check"), CASES, ids=[case.name for case, _ in CASES])
def test_golden(case: Case, check: Callable[[Case, torch.dtype], None], dtype: torch.dtype) -> None:
    check(case, dtype)


def test_every_family_has_a_case_of_its_own() -> None:
    checks = {check for case, check in CASES if "objects" in case.facts}
    assert checks == set(FAMILIES.values())


class _Near:
    """Compares a tensor with a golden array within the case's tolerance, or exactly where both are double."""

    def __init__(self, case: Case, dtype: torch.dtype, exact: bool = True) -> None:
        self.case = case
        self.exact = exact and dtype == torch.float64

    def __call__(
        self, found: Tensor, key: str, layer: int | None = None, bound: str = "logits_abs", double: bool = True
    ) -> None:
        expected = self.case.expected(key, layer)
        if expected is None:
            return
        bound = "score_abs" if key == "score" else bound
        tolerance = self.case.facts["tolerance"][bound]
        if self.exact and double and self.case.is_double(key, layer):
            tolerance = EXACT
        assert found.shape == expected.shape, key
        found = found.detach().double()
        torch.testing.assert_close(
            found, expected, rtol=0, atol=tolerance, equal_nan=True, msg=lambda text: f"{key} of layer {layer}: {text}"
        )


def _routed(case: Case, overrides: Sequence[str], dtype: torch.dtype) -> RoutedModel:
    backbone = case.backbone()
    model = routing_lab.route(backbone, overrides)
    model.load_state_dict(case.weights, strict=True)
    assert model.backbone is backbone
    return model.to(dtype).train(case.facts["mode"].startswith("train"))


def _same_selection(case: Case, part: Any, layer: int) -> None:
    kept = case.expected("kept", layer)
    assert kept is not None
    assert torch.equal(part.kept, kept)
    assert torch.equal(part.counts, (kept >= 0).sum(dim=1))
    counts = case.options.get("kept_counts")
    if counts is not None:
        assert part.counts.tolist() == counts[str(layer)]


def _spread(values: Tensor, kept: Tensor, tokens: int) -> Tensor:
    """[B, N] from values [B, K] of kept tokens; zero at the others."""
    padded = values.new_zeros(len(values), tokens + 1)
    return padded.scatter(1, kept.where(kept >= 0, tokens), values)[:, :tokens]


def _losses(case: Case, near: _Near, logits: Tensor) -> None:
    labels = case.expected("labels")
    if labels is not None:
        near(cross_entropy(logits, labels), "loss_ce", bound="loss_abs")


def _gradients(case: Case, near: _Near, model: RoutedModel, inputs: Tensor) -> None:
    """Gradients of the recorded loss, where the case has some."""
    wanted = [key.removeprefix("grad.") for key in case.arrays if key.startswith("grad.")]
    if not wanted:
        return
    model.set_execution("gather")
    model.zero_grad()
    logits, trace = model(inputs, return_trace=True)
    if logits.dim() == 3:
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
        loss = loss + case.options.get("load_coefficient", 0) * load_loss(trace)
    else:
        loss = cross_entropy(logits, case.expected("labels"))
    loss.backward()
    state = model.state_dict(keep_vars=True)
    for name in wanted:
        near(state[name].grad, f"grad.{name}", bound="grad_abs")


@contextmanager
def _layers_seen(model: RoutedModel) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """The residual stream before and after each routed layer."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    handles = [
        layer.register_forward_hook(
            lambda module, args, output, number=int(number): seen.update({number: (args[0].x, output[0].x)})
        )
        for number, layer in model.layers.items()
    ]
    yield seen
    for handle in handles:
        handle.remove()


@contextmanager
def _mlp_inputs_seen(model: RoutedModel) -> Iterator[dict[int, Tensor]]:
    """The residual stream between attention and MLP of each decoder layer."""
    seen: dict[int, Tensor] = {}

    def remember(number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, args: seen.update({number: args[0]})

    handles = [
        layer.post_attention_layernorm.register_forward_pre_hook(remember(number))
        for number, layer in enumerate(model.backbone.model.layers)
    ]
    yield seen
    for handle in handles:
        handle.remove()
