"""Golden cases of DynamicViT: its official code, in evaluation and in training, through the public interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.golden.cases import Case, find
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

import routing_lab
from routing_lab.routing.losses import ratio_loss
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.noise import NoiseSource
from routing_lab.routing.trace import Trace
from routing_lab.tasks.distillation import logit_divergence, token_loss


@dataclass
class Recorded(NoiseSource):
    """Gumbel noise [B, patches, 2] of each routed layer, read from a case; prefix tokens get none."""

    gumbels: Mapping[int, Tensor] = field(default_factory=dict)

    def gumbel(self, num_tokens: int, seed: int, layer: int) -> Tensor:
        noise = self.gumbels[layer]
        return pad(noise, (0, 0, num_tokens - noise.shape[1], 0))


def overrides(case: Case) -> list[str]:
    """The preset, where the case's stages and keep rates are."""
    options = case.options
    stages, rates = options["router_blocks"], options["keep_ratios"]
    assert rates == [rates[0] ** (stage + 1) for stage in range(len(stages))]
    if case.facts["mode"] == "eval":
        assert options["keep_count"] == "int(initial_patches * ratio), floor"
    return ["method=dynamicvit", f"placement.layers={stages}", f"capacity.fraction={rates[0]}"]


def model_of(case: Case, dtype: torch.dtype) -> RoutedModel:
    model = routing_lab.route(case.backbone(), overrides(case))
    model.load_state_dict(case.weights, strict=True)
    assert model.routed_layers == case.options["router_blocks"]
    return model.to(dtype).train(case.facts["mode"] == "train")


def near(case: Case, found: Tensor, key: str, bound: str, relative: float = 0.0) -> None:
    expected = case.expected(key)
    assert expected is not None
    torch.testing.assert_close(
        found.detach().double(),
        expected,
        rtol=relative,
        atol=case.facts["tolerance"][bound],
        msg=lambda text: f"{key}: {text}",
    )


def check_evaluation(case: Case, dtype: torch.dtype) -> None:
    """Tokens really dropped before each stage."""
    model = model_of(case, dtype)
    images = case.expected("input").to(dtype)
    near(case, model.backbone(images), "logits_dense", "logits_abs")
    logits, trace = model(images, return_trace=True)
    near(case, logits, "logits", "logits_abs")
    position = None  # in our order, that of the patches, of the tokens in the official one, that of their scores
    for number, stage in enumerate(model.routed_layers):
        part = trace[stage]
        assert part.tokens == 1 + case.options["tokens_kept"][number]
        scores = part.scores[:, 1:]
        near(case, scores if position is None else scores.gather(1, position), f"score_{stage}", "score_abs")
        kept = case.expected(f"kept_{stage}")
        kept = kept if position is None else position.gather(1, kept)
        assert torch.equal(part.kept[:, 1:] - 1, kept.sort(dim=1).values)
        assert (part.kept[:, 0] == 0).all()
        originals = case.expected(f"kept_original_{stage}")
        assert torch.equal(part.origin.gather(1, part.kept)[:, 1:], originals.sort(dim=1).values)
        position = originals.argsort(dim=1).argsort(dim=1)


def check_training(case: Case, dtype: torch.dtype) -> None:
    """Masked attention with the recorded noise; every loss, and the gradients of their sum."""
    options = case.options
    model = model_of(case, dtype)
    images, labels = case.expected("input").to(dtype), case.expected("labels")
    gumbels = {stage: case.expected(f"gumbel_{stage}") for stage in model.routed_layers}
    noise = Recorded(0, torch.arange(len(images)), gumbels)
    logits, trace, tokens = model(images, return_trace=True, return_tokens=True, noise=noise)
    near(case, logits, "logits", "logits_abs")
    near(case, tokens.x[:, 1:], "token_pred", "logits_abs")
    for stage in model.routed_layers:
        part = trace[stage]
        near(case, part.scores[:, 1:], f"score_{stage}", "score_abs")
        near(case, part.logits.log_softmax(dim=-1)[:, 1:], f"logprob_{stage}", "score_abs")
        decision = case.expected(f"decision_{stage}")
        assert torch.equal(part.relaxed[:, 1:].detach().double(), decision)
        assert (part.relaxed[:, 0] == 1).all()
        assert torch.equal(part.counts, decision.sum(dim=1).long() + 1)
        assert part.tokens == 1 + decision.shape[1]

    teacher = routing_lab.route(model.backbone, ["router=dense"]).eval()
    with torch.no_grad():
        teacher_logits, teacher_tokens = teacher(images, return_tokens=True)
    model.train()
    near(case, teacher_logits, "logits_dense", "logits_abs")
    near(case, teacher_tokens.x[:, 1:], "teacher_tokens", "logits_abs")

    stages = len(model.routed_layers)
    found = losses(trace, logits, labels, tokens, teacher_logits, teacher_tokens, options)
    near(case, found["ce"], "loss_ce", "loss_abs")
    near(case, stages * found["ratio"], "loss_ratio_sum", "loss_abs")
    near(case, options["ratio_weight"] * found["ratio"], "loss_ratio_term", "loss_abs")
    near(case, found["kl"], "loss_cls_kl", "loss_abs")
    near(case, found["mse"], "loss_token_mse", "loss_abs")
    near(case, found["token_kl"], "lv_loss_token_kl", "loss_abs")
    near(case, stages * found["ratio_batch"], "dynamic_loss_ratio_sum", "loss_abs")
    near(case, total(found, options, "ratio", "token_kl"), "lv_loss_total", "loss_abs")
    near(case, total(found, options, "ratio_batch", "mse"), "dynamic_loss_total", "loss_abs")
    loss = total(found, options, "ratio", "mse")
    near(case, loss, "loss_total", "loss_abs")

    loss.backward()
    state = model.state_dict(keep_vars=True)
    wanted = [key for key in case.arrays if key.startswith("grad.")]
    assert wanted
    for key in wanted:
        near(case, state[key.removeprefix("grad.")].grad, key, "grad_abs", case.facts["tolerance"]["grad_rel"])


def losses(
    trace: Trace, logits: Tensor, labels: Tensor, tokens: Any, teacher_logits: Tensor, teacher_tokens: Any, options: Any
) -> dict[str, Tensor]:
    return {
        "ce": cross_entropy(logits, labels),
        "ratio": ratio_loss(trace),
        "ratio_batch": ratio_loss(trace, over="batch"),
        "kl": logit_divergence(logits, teacher_logits),
        "mse": token_loss(tokens, teacher_tokens, "mse"),
        "token_kl": token_loss(tokens, teacher_tokens, "kl"),
    }


def total(found: Mapping[str, Tensor], options: Mapping[str, Any], ratio: str, token: str) -> Tensor:
    clf, weight, distill = (options[key] for key in ("clf_weight", "ratio_weight", "distill_weight"))
    return clf * found["ce"] + weight * found[ratio] + distill * (found["kl"] + found[token])


CASES = find({"dynamicvit_eval*": check_evaluation, "dynamicvit_train*": check_training})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("case", "check"), CASES, ids=[case.name for case, _ in CASES])
def test_golden(case: Case, check: Any, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_both_modes_have_a_case_of_their_own() -> None:
    assert {check for case, check in CASES if "objects" in case.facts} == {check_evaluation, check_training}
