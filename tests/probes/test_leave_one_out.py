"""Leave-one-out against one forward for every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.routing.tiny import images, llama, routed, token_ids
from torch import Tensor
from torch.nn.functional import cross_entropy

from routing_lab.probes import leave_one_out
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.tokens import Selection, Tokens

X, LABELS = images(dtype=torch.float64), torch.tensor([0, 3, 1])


def loss_of(model: RoutedModel, tokens: Tokens, sample: int, edits: Any = None) -> Tensor:
    state = model.run_state(tokens, sample_ids=torch.tensor([sample]))
    left, _ = model.forward_tokens(tokens, None, state, edits)
    return cross_entropy(model.head(left), LABELS[[sample]])


@pytest.mark.parametrize("router", ["amod", "linear", "random"])
@pytest.mark.parametrize("order", ["highest", "lowest"])
def test_equals_one_forward_per_token(router: str, order: str) -> None:
    model = routed([f"router={router}", f"capacity.order={order}"], double=True)
    with torch.no_grad():
        scores, kept = (model(X, return_trace=True)[1][1].scores, model(X, return_trace=True)[1][1].kept)
        expected = {name: torch.zeros(3, 17, dtype=torch.float64) for name in ("force_skip", "force_skip_refill")}
        expected["drop_input"] = torch.full((3, 17), float("nan"), dtype=torch.float64)
        for b in range(3):
            tokens, _ = model.embed(X[[b]])
            full = loss_of(model, tokens, b)
            rest = [i for i in range(17) if i not in kept[b]]
            substitute = (max if order == "highest" else min)(rest, key=lambda i: scores[b, i].item())
            for j in kept[b].tolist():
                for name, extra in (("force_skip", []), ("force_skip_refill", [substitute])):
                    index = torch.tensor([sorted([i for i in kept[b].tolist() if i != j] + extra)])
                    forced = {1: lambda _, selection, index=index: Selection(index, None, 17)}
                    expected[name][b, j] = loss_of(model, tokens, b, forced) - full
            for j in range(1, 17):
                others = [i for i in range(17) if i != j]
                expected["drop_input"][b, j] = loss_of(model, Tokens(tokens.x[:, others], num_prefix=1), b) - full
    for name, values in expected.items():
        for rows in (5, 1000):
            found = leave_one_out(model, X, LABELS, 1, name, rows=rows)
            torch.testing.assert_close(found, values, rtol=0, atol=1e-12, equal_nan=True)
    skipped = torch.ones(3, 17, dtype=torch.bool).scatter(1, kept, False)
    assert (leave_one_out(model, X, LABELS, 1)[skipped] == 0).all()
    assert (leave_one_out(model, X, LABELS, 1)[~skipped] != 0).any()


def test_noise_stays_with_the_sample() -> None:
    model = routed(["router=random"], double=True)
    ids = torch.tensor([7, 100, 3])
    whole = leave_one_out(model, X, LABELS, 3, sample_ids=ids)
    torch.testing.assert_close(leave_one_out(model, X[1:], LABELS[1:], 3, sample_ids=ids[1:]), whole[1:])


def test_nothing_to_refill_with() -> None:
    model = routed(["router=amod", "capacity.fraction=1"], double=True)
    found = [leave_one_out(model, X, LABELS, 1, name) for name in ("force_skip", "force_skip_refill")]
    assert torch.equal(*found)


def test_other_losses_and_decoders() -> None:
    model = routed(["router=random"], llama(), double=True)
    ids = token_ids()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none").mean(dim=1)

    found = leave_one_out(model, ids, ids, 1, loss=loss)
    assert found.shape == (3, 12)
    assert (found != 0).any()
    with pytest.raises(ValueError, match="operation = drop_input: the model has one output for each token"):
        leave_one_out(model, ids, ids, operation="drop_input", loss=loss)


def test_mode_is_put_back() -> None:
    model = routed(["router=amod"]).train()
    leave_one_out(model, images(), LABELS, 1)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mistakes_are_named() -> None:
    model = routed(["router=amod"])
    with pytest.raises(
        ValueError, match="operation = remove: expected one of force_skip, force_skip_refill, force_keep, drop_input"
    ):
        leave_one_out(model, images(), LABELS, 1, "remove")
    with pytest.raises(ValueError, match=r"layer = 2: force_skip needs one of the routed layers \[1, 3\]"):
        leave_one_out(model, images(), LABELS, 2)
