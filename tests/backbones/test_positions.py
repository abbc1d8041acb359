"""Tokens that are left stand where they stood: a layer is the original on all positions, those removed masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.backbones.families import DECODERS, FAMILIES, HF, ROTARY, inputs_of
from tests.routing.tiny import routed
from torch import Tensor

from routing_lab.routing.maps import Entering

LAYERS = ["placement=list", "placement.layers=[1,2]"]
REMOVING = {
    "drop": ["router=random", "bypass=drop"],
    "drop-ragged": ["router=random", "capacity=threshold", "capacity.threshold=0.4", "bypass=drop"],
    "fuse": ["router=random", "bypass=fuse"],
    "merge": ["method=tome", "bypass.merged=3"],
    "merge-alike": ["method=tome", "bypass.merged=0.5", "bypass.threshold=0.3"],
    "ponder": ["router=random", "bypass=ponder"],
    "ponder-ragged": ["router=random", "capacity=threshold", "capacity.threshold=0.4", "bypass=ponder"],
}


def original(model: Any, name: str, x: Tensor, bias: Tensor, context: Any) -> Tensor:
    """The last layer's own call on every position [B, P, D] and tokens without one behind them; bias [B, P]."""
    extra = x.shape[1]
    mask = bias[:, None, None].expand(-1, 1, extra, -1)
    if name in DECODERS:
        later = torch.ones(extra, extra, dtype=torch.bool).triu(1)
        angles = (context.cosine, context.sine)
        return model.model.layers[3](
            x, attention_mask=mask.masked_fill(later, float("-inf")), position_embeddings=angles
        )
    if name in HF:
        extra -= context.num_prefix + len(context.cosine)
        cosine = torch.cat([context.cosine, torch.ones(extra, context.cosine.shape[1], dtype=x.dtype)])
        sine = torch.cat([context.sine, torch.zeros(extra, context.sine.shape[1], dtype=x.dtype)])
        return model.model.layer[3](x, attention_mask=mask, position_embeddings=(cosine, sine))
    rope = context[3] if context.dim() == 4 else context
    extra -= model.num_prefix_tokens + rope.shape[-2]
    sine, cosine = torch.zeros_like(rope), torch.ones_like(rope)
    unturned = torch.cat([part.chunk(2, -1)[0] for part in (sine, cosine)], dim=-1)[..., :1, :]
    rope = torch.cat([rope, unturned.expand(*rope.shape[:-2], extra, -1)], dim=-2)
    return model.blocks[3](x, rope=rope, attn_mask=mask)


@pytest.mark.parametrize("name", ROTARY)
def test_a_layer_behind_a_removal_is_the_original_with_masks(name: str) -> None:
    backbone = FAMILIES[name]().double()
    inputs = inputs_of(name, dtype=torch.float64)
    for arm, overrides in REMOVING.items():
        if name in DECODERS and "ponder" not in arm:
            continue
        model = routed([*overrides, *LAYERS], backbone, double=True)
        with torch.no_grad():
            tokens, context = model.embed(inputs)
            seen: list[Entering] = []
            left, _ = model.forward_from(Entering(0, tokens), context, model.run_state(tokens), seen=seen)
            entering = seen[3].tokens
            batch, number, width = entering.x.shape
            places = tokens.x.shape[1]
            assert number < places
            present = entering.side().valid
            present = torch.ones(batch, number, dtype=torch.bool) if present is None else present
            # Tokens without a place, and padding, stand behind all places.
            slot = torch.where(
                (entering.positions() >= 0) & present, entering.positions(), places + torch.arange(number)
            )
            x = torch.zeros(batch, places + number, width, dtype=torch.float64)
            x = x.scatter(1, slot.unsqueeze(-1).expand_as(entering.x), entering.x)
            own = entering.key_bias()
            own = torch.zeros(batch, number, dtype=torch.float64) if own is None else own
            bias = torch.full((batch, places + number), float("-inf"), dtype=torch.float64)
            bias = bias.scatter(1, slot, own.masked_fill(~present, float("-inf")))
            if name in DECODERS:
                x, bias = x[:, :places], bias[:, :places]
                slot = slot.clamp_max(places - 1)
            y = original(backbone, name, x, bias, context)
            found = y.gather(1, slot.unsqueeze(-1).expand_as(entering.x))
        torch.testing.assert_close(
            left.x[present], found[present], rtol=0, atol=1e-10, msg=lambda text, arm=arm: f"{arm}: {text}"
        )


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_hidden_tokens_of_a_decoder_are_masked(name: str) -> None:
    """`ponder_masked` keeps every token in its place: those that go on are the ones that `ponder` computes."""
    arm = ["router=linear", "scaling=none", "capacity.fraction=0.8", "placement=every"]
    backbone = FAMILIES[name]().double()
    inputs = inputs_of(name)
    with torch.no_grad():
        _, removed = routed([*arm, "bypass=ponder"], backbone, double=True)(inputs, return_tokens=True)
        _, hidden = routed([*arm, "bypass=ponder_masked"], backbone, double=True)(inputs, return_tokens=True)
    torch.testing.assert_close(hidden.x, removed.x, rtol=0, atol=1e-10)
