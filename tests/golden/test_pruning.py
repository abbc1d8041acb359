"""Pruning by the class token's attention: EViT's official code, and attention-variance pruning by its equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.golden.cases import Case, find
from torch import Tensor

import routing_lab
from routing_lab.attention import AttentionStatistics
from routing_lab.routing.base import LayerSpec, RouterInput, RunState
from routing_lab.routing.bypass import Fuse
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.noise import NoiseSource
from routing_lab.routing.routers import (
    AttentionMedADRouter,
    AttentionVarianceRouter,
    ClassAttentionRouter,
    Router,
)
from routing_lab.routing.tokens import Tokens

EXACT = 1e-10

SPEC = LayerSpec(width=48, heads=3, prefix=("class",))
SCORES: dict[str, Router] = {
    "cls_mean": ClassAttentionRouter(SPEC),
    "cls_var": AttentionVarianceRouter(SPEC),
    "cls_var_abs": AttentionVarianceRouter(SPEC, form="absolute"),
    "cls_var_literal": AttentionVarianceRouter(SPEC, form="literal"),
    "cls_medad": AttentionMedADRouter(SPEC),
    "cls_medad_lower": AttentionMedADRouter(SPEC, median="lower"),
    "cls_medad_patches": AttentionMedADRouter(SPEC, inner="patches"),
    "cls_medad_global": AttentionMedADRouter(SPEC, inner="global"),
}
"""Name of a score in the cases -> the router that computes it."""


def check_evit(case: Case, dtype: torch.dtype) -> None:
    """EViT's official code. It orders kept tokens by score, ours by position: tokens are compared by their patch."""
    options = case.options
    method = "evit" if options["fuse_token"] else "evit_no_fusion"
    layers = f"placement.layers={options['drop_loc']}".replace(" ", "")
    model = _routed(case, [f"method={method}", f"capacity.fraction={options['base_keep_rate']}", layers], dtype)
    logits, trace = model(case.expected("input").to(dtype), return_trace=True)
    _near(case, logits, "logits", dtype)
    assert [part.tokens for part in trace.layers] == options["tokens_after_each_block"]

    official = np.tile(np.arange(options["tokens_initial"] - 1), (logits.shape[0], 1))
    for layer in options["drop_loc"]:
        part = trace[layer]
        ours = np.take_along_axis(part.origin.numpy(), part.kept.numpy()[:, 1:], 1)
        official = np.take_along_axis(official, case.expected("kept", layer).numpy(), 1)
        assert np.array_equal(np.sort(ours, 1), np.sort(official, 1))
        scores = part.scores[:, 1:].double().sort(dim=1).values
        torch.testing.assert_close(scores, case.expected("score", layer).sort(dim=1).values, rtol=0, atol=1e-6)
        if options["fuse_token"]:
            official = np.pad(official, ((0, 0), (0, 1)), constant_values=-1)


def check_variance(case: Case, dtype: torch.dtype) -> None:
    """Attention-variance pruning, Eq. 5 to 8, or without a pruned forward the scores alone."""
    _other_scores(case)
    options = case.options
    if "logits" not in case.arrays:
        return
    method = {"cls_var": "attention_variance", "cls_medad": "attention_medad"}[options["router"]]
    given = [
        f"method={method}",
        f"capacity.fraction={options['keep_rate']}",
        f"placement.layers={options['prune_layers_0based']}".replace(" ", ""),
    ]
    given += ["bypass=drop"] if options["fusion"].startswith("drop") else [f"bypass.temperature={options['fusion_T']}"]
    given += [f"router.median={options['median']}"] if method == "attention_medad" else []
    given += ["capacity.order=lowest"] if options["order"].startswith("asc") else []
    model = _routed(case, given, dtype)
    pictures = case.expected("input").to(dtype)
    logits, trace = model(pictures, return_trace=True)
    _near(case, logits, "logits", dtype)
    _near(case, model.backbone(pictures), "logits_dense", dtype)
    for layer in options["prune_layers_0based"]:
        part = trace[layer]
        _near(case, part.scores[:, 1:], "score", dtype, layer, "score_abs")
        assert torch.equal(part.kept, case.expected("kept", layer))
        assert torch.equal(part.origin, _patches(case.expected("origin_in", layer)))
        assert torch.equal(trace[layer + 1].origin, _patches(case.expected("origin_out", layer)))
        fate = model.layers[str(layer)].bypass
        if isinstance(fate, Fuse):
            removed = torch.ones_like(part.scores, dtype=torch.bool).scatter(1, part.kept, False)
            weights = fate.fusion_weights(part.scores, removed).gather(1, case.expected("pruned", layer))
            _near(case, weights, "fuse_weight", dtype, layer, "fuse_weight_abs")


CASES = find({"evit_*": check_evit, "eq_attnvar_*": check_variance})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("case", "check"), CASES, ids=[case.name for case, _ in CASES])
def test_golden(case: Case, check: object, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_both_families_are_there() -> None:
    assert {case.name.split("_")[0] for case, _ in CASES} == {"evit", "eq"}


def _routed(case: Case, overrides: list[str], dtype: torch.dtype) -> RoutedModel:
    model = routing_lab.route(case.backbone(), overrides)
    model.load_state_dict(case.weights, strict=True)
    return model.to(dtype).eval()


def _near(
    case: Case, found: Tensor, key: str, dtype: torch.dtype, layer: int | None = None, bound: str = "logits_abs"
) -> None:
    exact = dtype == torch.float64 and case.is_double(key, layer)
    tolerance = EXACT if exact else case.facts["tolerance"][bound]
    torch.testing.assert_close(found.double(), case.expected(key, layer), rtol=0, atol=tolerance)


def _patches(tokens: Tensor) -> Tensor:
    """Patches of first tokens 0 .. N - 1, of which 0 is the class token. Fused ones are negative there, -1 here."""
    return (tokens - 1).clamp_min(-1)


def _other_scores(case: Case) -> None:
    """Every score that is given for the same class rows."""
    own = {"cls_var(form=literal)": "cls_var_literal"}.get(case.options["router"], case.options["router"])
    for key in case.arrays:
        if not key.startswith("cls_attention_"):
            continue
        layer = int(key.rsplit("_", 1)[1])
        rows = torch.nn.functional.pad(case.expected("cls_attention", layer), (1, 0))
        batch, _, tokens = rows.shape
        state = RunState(1.0, NoiseSource(-1, torch.arange(batch)), False, tokens)
        given = RouterInput(
            Tokens(torch.zeros(batch, tokens, 48), num_prefix=1), AttentionStatistics(class_row=rows), state
        )
        names = {"score": own} if own == "cls_var_literal" else {}
        names |= {f"alt_{name}": name for name in SCORES}
        for array, name in names.items():
            expected = case.expected(array, layer)
            if expected is not None:
                torch.testing.assert_close(SCORES[name](given)[:, 1:].double(), expected, rtol=0, atol=1e-12)
