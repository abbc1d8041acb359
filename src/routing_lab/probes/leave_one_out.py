"""Leave-one-out importance of tokens, in the routed model itself.

    I_j = L(model without token j) - L(model)

Shape legend: B batch, N tokens, R rows, one (sample, token) pair each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from routing_lab.routing.layer import RoutedLayer, SelectionEdit
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.tokens import Selection, Tokens

Operation = Literal["force_skip", "force_skip_refill", "drop_input"]
Loss = Callable[[Any, Tensor], Tensor]


def leave_one_out(
    model: RoutedModel,
    inputs: Tensor,
    targets: Tensor,
    layer: int | None = None,
    operation: Operation = "force_skip",
    *,
    loss: Loss | None = None,
    sample_ids: Tensor | None = None,
    rows: int = 256,
) -> Tensor:
    """How much the loss of each sample rises when one of its tokens is left out; positive: the token helped.

    Args:
        model: the routed model; it is measured in evaluation mode and left in the mode it came in.
        inputs: [B, ...], what the model takes.
        targets: [B, ...], what the loss takes.
        layer: zero-based routed layer, for the operations that force a token out of its selection.
        operation: `force_skip`: the token is taken out of the kept set of `layer` and nothing takes its place;
            `force_skip_refill`: the best token that the layer bypassed takes its place; `drop_input`: the token is
            deleted after the embedding, the others keep their positions, and all layers see one token less. Later
            layers choose anew in all three.
        loss: (output, targets) -> [B] loss of each sample; None: cross-entropy in nats.
        sample_ids: as for the model's forward.
        rows: how many (sample, token) pairs are computed at once.

    Returns [B, N] over the tokens that enter `layer` (or the first layer), in the precision of the loss: exactly 0
    where the token forced out was bypassed anyway, NaN for prefix tokens under `drop_input`.

    Raises:
        ValueError: for an unknown operation, a layer that is not routed, or `drop_input` on a backbone whose blocks
            compute positions themselves.
    """
    if operation not in get_args(Operation):
        raise ValueError(f"operation = {operation}: expected one of {', '.join(get_args(Operation))}")
    if operation != "drop_input" and layer not in model.routed_layers:
        raise ValueError(
            f"layer = {layer}: {operation} needs one of the routed layers {model.routed_layers} (zero-based)"
        )
    if sample_ids is None:
        sample_ids = torch.arange(len(inputs), device=inputs.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _importance(model, inputs, targets, layer, operation, loss or _cross_entropy, sample_ids, rows)
    finally:
        model.train(was_training)


def _importance(
    model: RoutedModel,
    inputs: Tensor,
    targets: Tensor,
    layer: int | None,
    operation: Operation,
    loss: Loss,
    sample_ids: Tensor,
    rows: int,
) -> Tensor:
    tokens, context = model.embed(inputs)
    if operation == "drop_input" and context is not None:
        raise ValueError(
            f"operation = drop_input: the blocks of {type(model.backbone).__name__} compute positions themselves, so "
            "that the other tokens would move; use force_skip"
        )
    left, trace = model.forward_tokens(tokens, context, model.run_state(tokens, sample_ids=sample_ids))
    full = loss(model.head(left), targets)
    if operation == "drop_input":
        importance = full.new_full(tokens.x.shape[:2], float("nan"))
        sample, token = _pairs(tokens.origins() >= 0)
    else:
        assert layer is not None
        kept = trace[layer].kept
        importance = full.new_zeros(trace[layer].origin.shape)
        sample, position = _pairs(kept >= 0)
        token = kept[sample, position]

    for row_sample, row_token in zip(sample.split(rows), token.split(rows), strict=True):
        row_tokens, row_context = model.embed(inputs[row_sample])
        edits: dict[int, SelectionEdit] = {}
        if operation == "drop_input":
            row_tokens = _without(row_tokens, row_token)
        else:
            assert layer is not None
            routed = model.layers[str(layer)]
            assert isinstance(routed, RoutedLayer)
            best_first = routed.capacity.order == "highest"
            edits[layer] = _forced_out(row_token, refill=operation == "force_skip_refill", best_first=best_first)
        state = model.run_state(row_tokens, sample_ids=sample_ids[row_sample])
        left, _ = model.forward_tokens(row_tokens, row_context, state, edits)
        changed = loss(model.head(left), targets[row_sample])
        importance[row_sample, row_token] = changed - full[row_sample]
    return importance


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(output, targets, reduction="none")


def _pairs(wanted: Tensor) -> tuple[Tensor, Tensor]:
    sample, position = wanted.nonzero(as_tuple=True)
    return sample, position


def _without(tokens: Tokens, dropped: Tensor) -> Tokens:
    """The tokens of each row without one of them."""
    batch, num_tokens = tokens.x.shape[:2]
    mask = torch.ones(batch, num_tokens, dtype=torch.bool, device=tokens.x.device)
    mask[torch.arange(batch, device=mask.device), dropped] = False
    rest = Selection.from_mask(mask)
    return replace(tokens, x=rest.gather(tokens.x), origin=rest.gather(tokens.origins()))


def _forced_out(token: Tensor, refill: bool, best_first: bool) -> SelectionEdit:
    """Takes `token` [R] out of the selection of each row; with `refill` the best bypassed token comes in."""

    def edit(scores: Tensor, selection: Selection) -> Selection:
        mask = selection.mask()
        row = torch.arange(len(token), device=mask.device)
        worst = float("-inf") if best_first else float("inf")
        candidates = scores.masked_fill(mask, worst)
        substitute = candidates.argmax(dim=1) if best_first else candidates.argmin(dim=1)
        has_one = ~mask.all(dim=1)
        mask[row, token] = False
        if refill:
            mask[row[has_one], substitute[has_one]] = True
        return Selection.from_mask(mask)

    return edit
