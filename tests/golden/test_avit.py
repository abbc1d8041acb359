"""A-ViT against its official code (`avit_*`), and real early exit against the released masking."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from tests.golden.cases import Case, find
from torch import Tensor
from torch.nn.functional import cross_entropy

import routing_lab
from routing_lab.routing.losses import halting_means, halting_prior_loss, ponder_loss
from routing_lab.routing.measures import ran
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.trace import Trace


def overrides(case: Case, method: str) -> list[str]:
    """What `routing_lab.route` is given for the options of a case."""
    options = case.options
    assert "for EVERY token" in options["output"]
    return [
        f"method={method}",
        f"router.gamma={options['gamma']}",
        f"router.beta={options['beta']}",
        f"capacity.threshold={options['eps']}",
    ]


def routed(case: Case, method: str, dtype: torch.dtype) -> RoutedModel:
    model = routing_lab.route(case.backbone(), overrides(case, method))
    model.load_state_dict(case.weights, strict=True)
    return model.to(dtype).train(case.facts["mode"] == "train")


def prior(case: Case, trace: Trace) -> Tensor:
    center, std = re.search(r"mean (\d+), std (\d+)", case.options["prior_target"]).groups()
    return halting_prior_loss(trace, center=float(center), std=float(std), form="code", skip_first_sample=True)


def check_avit(case: Case, dtype: torch.dtype) -> None:
    """The released form: nothing is removed."""
    model = routed(case, "avit_code", dtype)
    images, tolerance = case.expected("input").to(dtype), case.facts["tolerance"]

    def near(found: Tensor, key: str, bound: str, where: Tensor | None = None) -> None:
        expected = case.expected(key)
        if expected is not None:
            found = found.detach().double()
            if where is not None:
                found, expected = found[where], expected[where]
            torch.testing.assert_close(
                found, expected, rtol=0, atol=tolerance[bound], msg=lambda text: f"{key}: {text}"
            )

    near(model.backbone(images), "logits_dense", "logits_abs")
    tokens, context = model.embed(images)
    left, trace = model.forward_tokens(tokens, context, model.run_state(tokens))
    logits = model.head(left)
    near(logits, "logits", "logits_abs")
    near(left.restored().x, "output_tokens_prenorm", "halting_score_abs")

    active = ran(trace)
    assert torch.equal(ran(trace).sum(dim=0).double(), case.expected("counter"))
    for layer, present in enumerate(active):
        assert torch.equal(present, case.expected("counter") > layer)
        if case.expected("mask", layer) is not None:
            assert torch.equal(present, case.expected("mask", layer).bool())
        near(trace[layer].halting, f"halting_score_{layer}", "halting_score_abs", where=present)
    means = halting_means(trace, skip_first_sample=True)
    near(means, "halting_score_layer", "halting_score_abs")
    near(means / means.sum(), "halting_distr", "halting_score_abs")

    options = case.options
    ponder, distribution = ponder_loss(trace), prior(case, trace)
    near(ponder, "rho", "rho_abs")
    near(options["ponder_token_scale"] * ponder, "ponder_loss", "loss_abs")
    near(distribution, "kl_prior", "loss_abs")
    near(options["distr_prior_alpha"] * distribution, "kl_prior_scaled", "loss_abs")
    if "labels" in case.arrays:
        parts = {
            "grad_kl_only": options["distr_prior_alpha"] * distribution,
            "grad_ponder_only": options["ponder_token_scale"] * ponder,
        }
        task = cross_entropy(logits, case.expected("labels"))
        near(task, "loss_ce", "loss_abs")
        parts["grad"] = task + parts["grad_kl_only"] + parts["grad_ponder_only"]
        near(parts["grad"], "loss_total", "loss_abs")
        for prefix, loss in parts.items():
            gradients(case, model, prefix, loss)


def gradients(case: Case, model: RoutedModel, prefix: str, loss: Tensor) -> None:
    wanted = [key for key in case.arrays if key.startswith(f"{prefix}.")]
    model.zero_grad()
    loss.backward(retain_graph=True)
    state, tolerance = model.state_dict(keep_vars=True), case.facts["tolerance"]
    for key in wanted:
        found, expected = state[key.removeprefix(f"{prefix}.")].grad, case.expected(key)
        torch.testing.assert_close(found.double(), expected, rtol=tolerance["grad_rel"], atol=tolerance["grad_abs"])


def check_early_exit(case: Case, dtype: torch.dtype) -> None:
    """Halted tokens really leave: the same logits, counters and ponder loss, and their gradients, on fewer tokens."""
    images, tolerance = case.expected("input").to(dtype), case.facts["tolerance"]
    found = {}
    for method in ("avit_code", "avit"):
        model = routed(case, method, dtype)
        logits, trace = model(images, return_trace=True)
        labels = torch.arange(len(images)) % logits.shape[1]
        (cross_entropy(logits, labels) + 1e-3 * ponder_loss(trace)).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        found[method] = (logits, trace, grads)
    (masked, code, slow), (logits, trace, fast) = found["avit_code"], found["avit"]
    torch.testing.assert_close(logits.double(), case.expected("logits"), rtol=0, atol=tolerance["logits_abs"])
    assert torch.equal(ran(trace), ran(code))
    torch.testing.assert_close(ponder_loss(trace).double(), case.expected("rho"), rtol=0, atol=tolerance["rho_abs"])
    exact = dtype == torch.float64
    torch.testing.assert_close(logits, masked, rtol=0, atol=1e-12 if exact else tolerance["logits_abs"])
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 if exact else 1e-5)
    assert [part.tokens for part in trace.layers] == [int(part.counts.max()) for part in trace.layers]
    assert trace[len(trace) - 1].tokens < trace[0].tokens == code[len(code) - 1].tokens


CASES = [(case, check) for check in (check_avit, check_early_exit) for case, _ in find({"avit_*": check})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("case", "check"), CASES, ids=[f"{case.name}-{check.__name__}" for case, check in CASES])
def test_golden(case: Case, check: Callable[[Case, torch.dtype], None], dtype: torch.dtype) -> None:
    check(case, dtype)


def test_the_released_prior_has_nothing_to_say_about_one_image() -> None:
    case = CASES[0][0]
    model = routed(case, "avit_code", torch.float32)
    _, trace = model(case.expected("input")[:1].float(), return_trace=True)
    assert prior(case, trace) == 0
    assert halting_prior_loss(trace, form="code") > 0
