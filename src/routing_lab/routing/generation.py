"""Text from a causal model, token by token.

Shape legend: B batch, N tokens of the prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from routing_lab.routing.cache import KVCache
    from routing_lab.routing.model import RoutedModel


@torch.no_grad()
def stream(
    model: RoutedModel,
    ids: Tensor,
    max_new_tokens: int,
    *,
    valid: Tensor | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    end: int | None = None,
    cache: KVCache | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """[B] int64, the next token of every sample, again and again.

    Args:
        model: in evaluation mode.
        ids: [B, N] int64, the prompts, N >= 1.
        max_new_tokens: so many at most.
        valid: [B, N] bool, False at padding, on the left or on the right; None: there is none.
        temperature: divides the logits before one is drawn; 0: the likeliest is taken, the first of equals.
        top_p: drawn is from the likeliest tokens that have this probability together.
        seed: of the draws.
        end: token behind which a sample is finished: it repeats it, and all being finished nothing follows.
        cache: an empty one to be filled, so that its size can be read afterwards; None: a new one.
        use_cache: false: every token costs a forward over the whole text, for models in which later tokens have a say.

    Raises:
        ValueError: see `RoutedModel.new_cache`; a prompt without a token.
    """
    if ids.shape[1] == 0 or (valid is not None and not bool(valid.any(dim=1).all())):
        raise ValueError("ids: every prompt needs a token")
    if use_cache and cache is None:
        cache = model.new_cache()
    generator = torch.Generator(ids.device).manual_seed(seed)
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    if not use_cache and valid is not None:
        ids, valid = to_the_right(ids, valid)
    text = ids
    for _ in range(max_new_tokens):
        given = {} if cache is None else {"cache": cache}
        logits = model(text, valid=valid, **given)
        last = -1 if valid is None else _last(valid)
        chosen = choose(logits[torch.arange(len(ids)), last], temperature, top_p, generator)
        if end is not None:
            chosen = chosen.masked_fill(done, end)
            done = done | (chosen == end)
        yield chosen
        if bool(done.all()):
            return
        new = chosen.unsqueeze(1)
        if use_cache:
            text, valid = new, None
        else:
            text = torch.cat([text, new], dim=1)
            valid = None if valid is None else torch.nn.functional.pad(valid, (0, 1), value=True)


def choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """[B] int64, one token of each row of logits [B, V]; see `stream`."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probability = (logits.float() / temperature).softmax(dim=-1)
    if top_p < 1:
        ordered, index = probability.sort(dim=-1, descending=True, stable=True)
        # The likeliest stays in any case: what lies before it is nothing.
        beyond = ordered.cumsum(dim=-1) - ordered >= top_p
        probability = probability.masked_fill(beyond.scatter(1, index, beyond), 0)
    return torch.multinomial(probability, 1, generator=generator).squeeze(1)


def to_the_right(ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Texts [B, N] moved to the right, with all their padding on the left."""
    order = valid.to(torch.uint8).argsort(dim=1, stable=True)
    return ids.gather(1, order), valid.gather(1, order)


def _last(valid: Tensor) -> Tensor:
    """[B] int64: where the last token of each text lies."""
    return valid.shape[1] - 1 - valid.to(torch.uint8).flip(1).argmax(dim=1)
