"""Selections: gather and scatter undo each other and touch nothing else."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from routing_lab.routing.tokens import Selection, Tokens

masks = (
    st.tuples(st.integers(1, 4), st.integers(1, 7)).flatmap(lambda shape: arrays.arrays(bool, shape)).map(torch.tensor)
)
relaxed = settings(max_examples=60, deadline=None, derandomize=True)


def content(mask: Tensor, width: int = 3) -> Tensor:
    return torch.arange(mask.numel() * width, dtype=torch.float64).view(*mask.shape, width)


@relaxed
@given(masks)
def test_mask_round_trip(mask: Tensor) -> None:
    selection = Selection.from_mask(mask)
    assert torch.equal(selection.mask(), mask)
    assert torch.equal(selection.counts(), mask.sum(dim=1))
    assert selection.keeps_all == bool(mask.all())


@relaxed
@given(masks)
def test_kept_indices_ascend_and_padding_is_minus_one(mask: Tensor) -> None:
    padded = Selection.from_mask(mask).padded_index()
    assert padded.dtype == torch.int64
    for row, kept in zip(padded.tolist(), mask, strict=True):
        expected = kept.nonzero().flatten().tolist()
        assert row == expected + [-1] * (len(row) - len(expected))
    assert padded.shape[1] == mask.sum(dim=1).max()


@relaxed
@given(masks)
def test_complement_partitions_the_tokens(mask: Tensor) -> None:
    selection = Selection.from_mask(mask)
    rest = selection.complement()
    assert torch.equal(rest.mask(), ~mask)
    assert torch.equal(rest.complement().mask(), mask)


@relaxed
@given(masks)
def test_gather_then_scatter_gives_back(mask: Tensor) -> None:
    x = content(mask)
    selection = Selection.from_mask(mask)
    assert torch.equal(selection.scatter(x, selection.gather(x)), x)
    gathered = selection.gather(x)
    assert gathered.shape == (len(mask), selection.index.shape[1], x.shape[2])
    for row, kept in enumerate(mask):
        assert torch.equal(gathered[row, : int(kept.sum())], x[row, kept])


@relaxed
@given(masks)
def test_scatter_replaces_kept_tokens_only(mask: Tensor) -> None:
    x = content(mask)
    selection = Selection.from_mask(mask)
    found = selection.scatter(x, -1 - selection.gather(x))
    assert torch.equal(found, torch.where(mask.unsqueeze(-1), -1 - x, x))
    flat = selection.scatter(x[..., 0], -1 - selection.gather(x[..., 0]))
    assert torch.equal(flat, found[..., 0])


@relaxed
@given(masks)
def test_scatter_sends_gradients_where_values_went(mask: Tensor) -> None:
    x = content(mask).requires_grad_()
    selection = Selection.from_mask(mask)
    update = selection.gather(x.detach()).requires_grad_()
    (selection.scatter(x, update) + 0 * x).sum().backward()
    assert torch.equal(x.grad[..., 0] == 1, ~mask)
    valid = torch.ones_like(update[..., 0], dtype=torch.bool) if selection.valid is None else selection.valid
    assert torch.equal(update.grad[..., 0] == 1, valid)


def test_first_tokens() -> None:
    selection = Selection.first(2, 3, 5, torch.device("cpu"))
    assert selection.index.tolist() == [[0, 1, 2]] * 2
    assert selection.mask().tolist() == [[True] * 3 + [False] * 2] * 2


def test_origin_of_tokens() -> None:
    tokens = Tokens(torch.zeros(2, 5, 3), num_prefix=2)
    assert tokens.origins().tolist() == [[-1, -1, 0, 1, 2]] * 2
    assert torch.equal(tokens.with_x(torch.ones(2, 5, 3)).origins(), tokens.origins())


def test_lower_precision_updates_keep_the_streams_precision() -> None:
    x = torch.randn(2, 4, 3)
    selection = Selection.from_mask(torch.tensor([[True, False, True, False]] * 2))
    found = selection.scatter(x, torch.ones(2, 2, 3, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    assert torch.equal(found[:, 1], x[:, 1])
