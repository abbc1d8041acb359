"""One bad head: a case by hand in which variance turns and the median absolute deviation does not, and the probe."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.routing.tiny import DEPTH, HEADS, images, llama, routed, run_state, spec, token_ids
from torch import Tensor

from routing_lab.attention import AttentionStatistics
from routing_lab.probes.base import Examples, Finding
from routing_lab.probes.heads import KINDS, SCORERS, HeadCorruption, replaced
from routing_lab.routing.base import RouterInput
from routing_lab.routing.routers import AttentionMedADRouter, AttentionVarianceRouter
from routing_lab.routing.tokens import Tokens


def order(router: type, attention: Tensor) -> list[int]:
    """Tokens from the highest score down."""
    tokens = Tokens(torch.zeros(1, attention.shape[2], 1))
    inputs = RouterInput(tokens, AttentionStatistics(received=attention), run_state(batch=1))
    return router(spec(prefix=()), query="all").score(inputs)[0].argsort(descending=True).tolist()


def test_one_head_turns_the_order_by_variance_and_not_that_by_median_deviation() -> None:
    deviation = torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0])[:, None] * torch.tensor([0.01, 0.02, 0.03, 0.04])
    heads = (0.25 + deviation)[None]
    bad = heads.clone()
    bad[0, 2] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert order(AttentionVarianceRouter, heads) == order(AttentionMedADRouter, heads) == [3, 2, 1, 0]
    assert order(AttentionVarianceRouter, bad)[0] == 0
    assert order(AttentionMedADRouter, bad) == [3, 2, 1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replaced_head_is_a_distribution_that_belongs_to_the_example(kind: str) -> None:
    attention = torch.full((3, HEADS, 9), 1 / 9)
    bad = replaced(attention, 1, kind, [4, 5, 6], layer=2)
    torch.testing.assert_close(bad.sum(dim=2), torch.ones(3, HEADS))
    assert (bad[:, [0, 2, 3]] == 1 / 9).all()
    assert not torch.equal(bad[0, 1], bad[1, 1])
    assert torch.equal(replaced(attention[1:2], 1, kind, [5], layer=2), bad[1:2])


def found(model, examples: Examples) -> dict[str, Finding]:  # type: ignore[no-untyped-def]
    probe = HeadCorruption()
    with torch.no_grad():
        findings = probe.summarise(probe.measure(model, examples))
    by_key = {finding.key: finding for finding in findings}
    assert len(by_key) == len(findings)
    return by_key


@pytest.mark.parametrize("kind", ["vit", "pruned", "decoder"])
def test_findings_of_a_model(kind: str) -> None:
    ids = token_ids(5, 12)
    text = Examples(ids, ids.roll(-1, dims=1), torch.arange(5))
    pictures = Examples(images(5), torch.zeros(5, dtype=torch.int64), torch.arange(5))
    if kind == "decoder":
        by_key = found(routed([], llama()), text)
    else:
        overrides = ["router=amod"] if kind == "vit" else ["method=evit_no_fusion", "capacity.fraction=0.7"]
        by_key = found(routed(overrides), pictures)
    for bad in KINDS:
        for name in SCORERS:
            layers = [by_key[f"rank/{bad}/{name}/layer{layer}"].value for layer in range(DEPTH)]
            assert by_key[f"rank/{bad}/{name}"].value == pytest.approx(np.mean(layers))
            assert -1 <= by_key[f"rank/{bad}/{name}"].value <= 1
            assert 0 <= by_key[f"kept/{bad}/{name}"].value <= 1
            assert by_key[f"kept/{bad}/{name}"].chance == pytest.approx(1 / 3)
        difference = by_key[f"kept/{bad}/medad"].value - by_key[f"kept/{bad}/variance"].value
        assert by_key[f"kept/{bad}/medad_over_variance"].value == pytest.approx(difference)
    assert math.isfinite(by_key["rank/noise/mean"].low)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fraction = 1: a number in \(0, 1\)"):
        HeadCorruption(1)
