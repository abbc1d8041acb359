"""Leave-one-out importance of tokens, in the routed model itself.

    I_j = L(model without token j) - L(model)

What does not depend on the token is computed once: a forward without it begins at the first layer that changes.

Shape legend: B batch, N tokens, R rows, one (sample, token) pair each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from routing_lab.probes.base import loss_of, over_targets
from routing_lab.routing.layer import RoutedLayer, SelectionEdit
from routing_lab.routing.maps import Entering
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.tokens import Layout, Selection, Tokens

Operation = Literal["force_skip", "force_skip_refill", "force_keep", "drop_input", "drop_at_layer"]
Loss = Callable[[Any, Tensor], Tensor]
Effect = Callable[[Any, Any, Tensor], Tensor]
"""(output without the token, output with it, targets), one row a pair -> [R]; positive: the token helped."""


def leave_one_out(
    model: RoutedModel,
    inputs: Tensor,
    targets: Tensor,
    layer: int | None = None,
    operation: Operation = "force_skip",
    *,
    loss: Loss | None = None,
    sample_ids: Tensor | None = None,
    segments: Tensor | None = None,
    rows: int = 256,
) -> Tensor:
    """How much the loss of each sample rises when one of its tokens is left out; positive: the token helped.

    Args:
        model: the routed model; it is measured in evaluation mode and left in the mode it came in.
        inputs: [B, ...], what the model takes.
        targets: [B, ...], what the loss takes.
        layer: zero-based layer, for all operations but `drop_input`; a routed one for those that change a selection.
        operation: `force_skip`: the token is taken out of the kept set of `layer` and nothing takes its place;
            `force_skip_refill`: the best token that the layer bypassed takes its place; `force_keep`: the loss as it is
            less that with a bypassed token in the kept set besides; `drop_input`: the token is deleted after the
            embedding, the others keep their positions, and all layers see one token less; `drop_at_layer`: it is
            deleted where it enters `layer`. Later layers choose anew in all of them.
        loss: (output, targets) -> [B] loss of each sample; None: cross-entropy in nats, of a text the mean over its
            tokens.
        sample_ids, segments: as for the model's forward.
        rows: how many (sample, token) pairs are computed at once.

    Returns [B, N] over the tokens that enter `layer` (or the first layer), in the precision of the loss: exactly 0
    where the operation changes nothing (a token forced out that was bypassed, one forced in that was kept), NaN for
    prefix tokens that would be deleted.

    Raises:
        ValueError: for an unknown operation, a layer that is not there or not routed, or a deletion in a model with one
            output for each token.
    """
    of = loss or loss_of

    def rise(without: Any, complete: Any, targets: Tensor) -> Tensor:
        return of(without, targets) - of(complete, targets)

    return leave_one_out_effects(
        model,
        inputs,
        targets,
        layer,
        operation,
        {"loss": rise},
        sample_ids=sample_ids,
        segments=segments,
        rows=rows,
    )["loss"]


def leave_one_out_effects(
    model: RoutedModel,
    inputs: Tensor,
    targets: Tensor,
    layer: int | None,
    operation: Operation,
    effects: Mapping[str, Effect],
    *,
    sample_ids: Tensor | None = None,
    segments: Tensor | None = None,
    edits: Mapping[int, SelectionEdit] | None = None,
    rows: int = 256,
) -> dict[str, Tensor]:
    """`leave_one_out` for several effects of the same forwards: name -> [B, N].

    edits: selections of layers before `layer` that are not made by their capacity.
    """
    if operation not in get_args(Operation):
        raise ValueError(f"operation = {operation}: expected one of {', '.join(get_args(Operation))}")
    if operation.startswith("force") and layer not in model.routed_layers:
        raise ValueError(
            f"layer = {layer}: {operation} needs one of the routed layers {model.routed_layers} (zero-based)"
        )
    depth = model.adapter.depth
    if operation == "drop_at_layer" and (layer is None or not 0 <= layer < depth):
        raise ValueError(f"layer = {layer}: drop_at_layer needs one of the layers 0 to {depth - 1}")
    if sample_ids is None:
        sample_ids = torch.arange(len(inputs), device=inputs.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _measured(model, inputs, targets, layer or 0, operation, effects, sample_ids, segments, edits, rows)
    finally:
        model.train(was_training)


# --- effects: of a class, or of the mean over the tokens of a text that count ---


def loss_rise(without: Tensor, complete: Tensor, targets: Tensor) -> Tensor:
    """How much the cross-entropy rises, in nats."""
    return loss_of(without, targets) - loss_of(complete, targets)


def logit_fall(without: Tensor, complete: Tensor, targets: Tensor) -> Tensor:
    """How much the logit of the true class, or of the next token, falls."""
    fall = (complete - without).gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return over_targets(fall, targets)


def divergence(without: Tensor, complete: Tensor, targets: Tensor) -> Tensor:
    """KL(p || q) of the predictions p with and q without the token, in nats."""
    p, q = log_softmax(complete, dim=-1), log_softmax(without, dim=-1)
    return over_targets((p.exp() * (p - q)).sum(dim=-1), targets)


EFFECTS: Mapping[str, Effect] = {"loss": loss_rise, "logit": logit_fall, "kl": divergence}


# --- private ---


def _measured(
    model: RoutedModel,
    inputs: Tensor,
    targets: Tensor,
    layer: int,
    operation: Operation,
    effects: Mapping[str, Effect],
    sample_ids: Tensor,
    segments: Tensor | None,
    before: Mapping[int, SelectionEdit] | None,
    rows: int,
) -> dict[str, Tensor]:
    def embedded(row: Tensor | slice) -> tuple[Tokens, Any]:
        return model.embed(inputs[row], None if segments is None else Layout(segment=segments[row]))

    tokens, context = embedded(slice(None))
    entering: list[Entering] = []
    state = model.run_state(tokens, sample_ids=sample_ids)
    left, trace = model.forward_from(Entering(0, tokens), context, state, before, seen=entering)
    complete = model.head(left)
    deletes = operation in ("drop_input", "drop_at_layer")
    if deletes and torch.is_tensor(complete) and complete.dim() == 3:
        raise ValueError(f"operation = {operation}: the model has one output for each token; use force_skip")
    start = entering[0 if operation == "drop_input" else layer]
    mask = torch.ones(start.tokens.x.shape[:2], dtype=torch.bool, device=inputs.device)
    if deletes:
        changed = start.tokens.origins() >= 0
    else:
        changed = ~trace[layer].mask() if operation == "force_keep" else trace[layer].mask()
        if start.tokens.valid is not None:
            changed &= start.tokens.valid
    sample, token = changed.nonzero(as_tuple=True)
    found: dict[str, Tensor] = {}
    for row_sample, row_token in zip(sample.split(rows), token.split(rows), strict=True) if len(sample) else ():
        begin = start.take(row_sample)
        row_tokens, row_context = embedded(row_sample)
        edits: dict[int, SelectionEdit] = {}
        if deletes:
            present = mask[row_sample]
            if begin.tokens.valid is not None:
                present = present & begin.tokens.valid
            present[torch.arange(len(row_token), device=present.device), row_token] = False
            begin = begin.keep(Selection.from_mask(present))
        else:
            edits[layer] = _edit(model, layer, operation, row_token)
        if operation == "drop_input":
            row_tokens = begin.tokens
        state = model.run_state(row_tokens, sample_ids=sample_ids[row_sample])
        left, _ = model.forward_from(begin, row_context, state, edits, traced=False)
        outputs = (model.head(left), complete[row_sample])
        for name, effect in effects.items():
            pair = outputs[::-1] if operation == "force_keep" else outputs
            values = effect(*pair, targets[row_sample])
            if name not in found:
                found[name] = values.new_full(mask.shape, float("nan") if deletes else 0.0)
            found[name][row_sample, row_token] = values
    empty = torch.full(mask.shape, float("nan") if deletes else 0.0, device=inputs.device)
    return {name: found.get(name, empty) for name in effects}


def _edit(model: RoutedModel, layer: int, operation: Operation, token: Tensor) -> SelectionEdit:
    """Puts `token` [R] into the selection of each row, or takes it out; with refill the best bypassed one comes in."""
    routed = model.layers[str(layer)]
    assert isinstance(routed, RoutedLayer)
    best_first = routed.capacity.order == "highest"

    def edit(scores: Tensor, selection: Selection) -> Selection:
        mask = selection.mask()
        row = torch.arange(len(token), device=mask.device)
        if operation == "force_keep":
            mask[row, token] = True
            return Selection.from_mask(mask)
        worst = float("-inf") if best_first else float("inf")
        candidates = scores.masked_fill(mask, worst)
        substitute = candidates.argmax(dim=1) if best_first else candidates.argmin(dim=1)
        has_one = ~mask.all(dim=1)
        mask[row, token] = False
        if operation == "force_skip_refill":
            mask[row[has_one], substitute[has_one]] = True
        return Selection.from_mask(mask)

    return edit
