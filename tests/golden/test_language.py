"""Golden cases of decoders: DTRNet's released code, its Mixture-of-Depths baseline, and D-LLM DTRNet's port of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.golden.cases import Case, find
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import routing_lab
from routing_lab.routing.losses import bce_auxiliary_loss, l1_target_loss, load_loss
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.noise import NoiseSource


def check_dtrnet(case: Case) -> None:
    """Routes, gates, hidden states, losses and gradients of DTRNet's code."""
    depth = case.facts["backbone"]["kwargs"]["num_hidden_layers"]
    hidden = case.weights["router.0.fc1.weight"].shape[0]
    placed = _placed(case)
    if case.options["official_dtrnet_layers"] == list(range(2, depth - 1, 2)):
        placed = []  # the preset's own
    model = _routed(case, ["method=dtrnet_code", f"router.hidden={hidden}", *placed], case.weights)
    ids, logits, trace, near = _run(case, model)
    total = load_loss(trace)
    near(total, "aux_total", "loss_abs")
    for layer in case.options["routed_layers"]:
        near(trace[layer].scores, "score", "score_abs", layer, 0)
        near(trace[layer].scores.mean(), "aux", "score_abs", layer)
    loss = _language_loss(logits, ids)
    near(loss, "lm_loss", "loss_abs")
    if case.facts["mode"] == "train":
        _gradients(case, model, loss + case.options["aux_loss_coeff"] * total, near)


def check_mod_baseline(case: Case) -> None:
    """Top-k in training, a double residual, and the auxiliary predictor with its loss."""
    names = {".main.": ".", ".aux.": ".auxiliary."}
    weights = {}
    for name, value in case.weights.items():
        for given, own in names.items():
            name = name.replace(given, own) if name.startswith("router.") else name
        weights[name] = value
    fraction = case.options["topk"]
    overrides = ["method=mod_lm", "router.bias=true", "scaling.target=output", f"capacity.fraction={fraction}"]
    model = _routed(case, [*overrides, *_placed(case)], weights)
    ids, logits, trace, near = _run(case, model)
    for layer in case.options["routed_layers"]:
        near(trace[layer].scores, "score", "score_abs", layer)
        near(trace[layer].predicted, "aux_logit", "score_abs", layer)
        predicted, kept = trace[layer].predicted, _kept(trace, layer).float()
        near(binary_cross_entropy_with_logits(predicted, kept), "aux_loss", "loss_abs", layer)
    total = bce_auxiliary_loss(trace)
    near(total, "aux_total", "loss_abs")
    loss = _language_loss(logits, ids)
    near(loss, "lm_loss", "loss_abs")
    _gradients(case, model, loss + total, near)

    model.eval()
    trace = model(ids, return_trace=True)[1]
    first = case.options["routed_layers"][0]
    assert torch.equal(_kept(trace, first), trace[first].predicted.sigmoid() > 0.5)


def check_dllm(case: Case) -> None:
    """Routes, hidden states and the loss over layers of D-LLM, original and port."""
    options = case.options
    model = _dllm(case)
    assert model.layers[str(options["routed_layers"][0])].capacity.reserve == options["reserve_initials"]
    ids, logits, trace, near = _run(case, model)
    for layer in options["routed_layers"]:
        near(trace[layer].scores, "score", "score_abs", layer, 1)
    position = torch.arange(ids.shape[1])
    counted = (position >= options["reserve_initials"]).expand_as(ids)
    near(l1_target_loss(trace, target=options["target"], weight=counted), "aux_total", "loss_abs")
    near(_language_loss(logits, ids), "lm_loss", "loss_abs")


def check_dllm_train(case: Case) -> None:
    """Routes, logits, hidden states and both losses of D-LLM's training code, from its noise.

    That code multiplies the map by the kept keys and divides by what is left plus 1e-6, which a query that hardly sees
    a kept key notices in its fourth digit, and lets a gradient through the product: gradients are not compared.
    """
    model = _dllm(case)
    case.facts["tolerance"].update(logits_abs=1e-4, hidden_abs=2e-4)
    ids, logits, trace, near = _run(case, model)
    position = torch.arange(ids.shape[1])
    counted = (position >= case.options["reserve_initials"]) & (position < ids.shape[1] - 1)
    loss = l1_target_loss(trace, target=case.options["target"], weight=counted.expand_as(ids))
    near(loss, "active_loss", "loss_abs")
    near(_language_loss(logits, ids), "lm_loss", "loss_abs")


def check_dllm_decode(case: Case) -> None:
    """Logits token by token, and 13 tokens behind a prompt of 20; keys and values that each layer holds."""
    model = _dllm(case)
    near, ids = _Near(case), _ids(case)
    for prompt, name in ((1, "logits"), (20, "logits_prefill20_then_decode")):
        cache = model.new_cache()
        parts = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
        with torch.no_grad():
            near(torch.cat([model(part, cache=cache) for part in parts], dim=1), name)
        held = torch.stack([layer.counts for layer in cache.layers if layer.counts is not None])
        assert torch.equal(held, torch.from_numpy(case.arrays["kv_tokens"]))


FAMILIES: dict[str, Callable[[Case], None]] = {
    "dtrnet_mod_train": check_mod_baseline,
    "dtrnet_*": check_dtrnet,
    "dllm_eval_prefill": check_dllm,
    "dllm_train": check_dllm_train,
    "dllm_decode": check_dllm_decode,
    "dllm_port_*": check_dllm,
}

CASES = find(FAMILIES)  # type: ignore[arg-type]


@pytest.mark.parametrize(("case", "check"), CASES, ids=[case.name for case, _ in CASES])
def test_golden_decoder(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


class _Near:
    """Compares with a golden array within the case's tolerance; nothing where the case has none."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(
        self, found: Any, key: str, bound: str = "logits_abs", layer: int | None = None, column: int | None = None
    ) -> None:
        name = key if layer is None else f"{key}_{layer}"
        if name not in self.case.arrays:
            return
        expected = torch.from_numpy(self.case.arrays[name]).to(found.dtype)
        expected = expected if column is None else expected[..., column]
        tolerance = self.case.facts["tolerance"].get(bound, self.case.facts["tolerance"]["logits_abs"])
        torch.testing.assert_close(
            found.detach(), expected, rtol=0, atol=tolerance, msg=lambda text: f"{name} of {self.case.name}: {text}"
        )


class _Recorded(NoiseSource):
    """The Gumbel noise that a case recorded, of skipping first."""

    case: Case

    def gumbel(self, num_tokens: int, seed: int, layer: int) -> Tensor:
        return torch.from_numpy(self.case.arrays[f"gumbel_{layer}"]).flip(-1)


def _run(case: Case, model: RoutedModel) -> tuple[Tensor, Tensor, Any, _Near]:
    """One forward, with what all families have in common: logits, hidden states and routes, dense ones besides."""
    near = _Near(case)
    ids = _ids(case)
    near(model.backbone(ids).logits, "logits_dense")
    noise = None
    if any(key.startswith("gumbel_") for key in case.arrays):
        noise = _Recorded(0, torch.arange(len(ids)))
        noise.case = case
    hidden: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_hook(lambda m, a, out, i=int(i): hidden.update({i: out[0].x}))
        for i, layer in model.layers.items()
    ]
    logits, trace = model(ids, return_trace=True, noise=noise)
    for handle in handles:
        handle.remove()
    near(logits, "logits")
    for layer in case.options["routed_layers"]:
        near(hidden[layer], "hidden", "hidden_abs", layer)
        assert torch.equal(_kept(trace, layer), torch.from_numpy(case.arrays[f"route_{layer}"]))
    return ids, logits, trace, near


def _ids(case: Case) -> Tensor:
    return torch.from_numpy(case.arrays["input"] if "input" in case.arrays else case.arrays["input_ids"])


def _gradients(case: Case, model: RoutedModel, loss: Tensor, near: _Near) -> None:
    model.zero_grad()
    loss.backward()
    renamed = {f".{axis}.": f".{own}." for axis, own in (("main", ""), ("aux", "auxiliary"))}
    state = model.state_dict(keep_vars=True)
    relative = case.facts["tolerance"]["grad_abs_relative_to_tensor_max"]
    wanted = [key for key in case.arrays if key.startswith("grad.")]
    assert wanted
    for key in wanted:
        name = key.removeprefix("grad.")
        for given, own in renamed.items():
            name = name.replace(given, own.replace("..", ".")) if name.startswith("router.") else name
        expected = torch.from_numpy(case.arrays[key])
        found = state[name].grad
        assert found is not None, name
        bound = relative * max(expected.abs().max().item(), 1e-6)
        torch.testing.assert_close(found, expected, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


def _dllm(case: Case) -> RoutedModel:
    hidden = case.options["router_hidden_dim"]
    visibility = "all" if case.options["eviction"].startswith("NONE") else "kept"
    weights = {
        # The released router puts skipping first.
        name: value.flip(0) if name.startswith("router.") and ".fc2." in name else value
        for name, value in case.weights.items()
    }
    return _routed(case, ["method=dllm", f"router.hidden={hidden}", f"visibility={visibility}"], weights)


def _routed(case: Case, overrides: list[str], weights: dict[str, Tensor]) -> RoutedModel:
    model = routing_lab.route(case.backbone(), overrides)
    assert model.routed_layers == case.options["routed_layers"]
    model.load_state_dict(weights, strict=True)
    return model.train(case.facts["mode"] == "train")


def _placed(case: Case) -> list[str]:
    layers = str(case.options["routed_layers"]).replace(" ", "")
    return ["placement=list", f"placement.layers={layers}"]


def _kept(trace: Any, layer: int) -> Tensor:
    """[B, N] bool, True at kept tokens."""
    part = trace[layer]
    batch, tokens = part.origin.shape
    index = part.kept.masked_fill(part.kept < 0, tokens)
    return torch.zeros(batch, tokens + 1, dtype=torch.bool).scatter(1, index, True)[:, :tokens]


def _language_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
