"""A routed model goes on computing with what its backbone is now, and with where its tokens stand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.routing.tiny import images, llama, routed, token_ids, vit
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

ARMS = {
    "amod": ["router=amod"],
    "all-keys": ["router=linear", "scaling=multiply", "visibility=all"],
    "ats": ["method=ats"],
    "evit": ["method=evit", "placement=list", "placement.layers=[1,2]"],
    "project": ["router=mlp", "placement.sublayer=attention", "bypass=project", "scaling=top1_probability"],
}


def replace_block(model: Any) -> None:
    model.blocks[1] = copy.deepcopy(vit(seed=9).blocks[1])


def shorten(model: Any) -> None:
    model.blocks = model.blocks[:3]


def low_rank(model: Any) -> None:
    """Adapters where queries, keys and values are projected, as peft puts them there."""
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)


def hook_blocks(model: Any) -> None:
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, output: 1.1 * output)


def hook_attention(model: Any) -> None:
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, given, output: 0.5 * output)


def hook_projections(model: Any) -> None:
    for block in model.blocks:
        block.attn.qkv.register_forward_hook(lambda module, given, output: output + 0.2)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.base = base
        self.down = nn.Parameter(0.3 * torch.randn(2, base.in_features, generator=generator))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, 2, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    "change",
    [replace_block, shorten, low_rank, hook_blocks, hook_attention, hook_projections],
    ids=lambda f: f.__name__,
)
def test_a_change_after_routing_is_one_before(change: Callable[[Any], None], arm: str) -> None:
    if change is shorten and arm == "project":  # its last layers are dense by placement
        return
    backbone = vit()
    model = routed(ARMS[arm], backbone)
    with torch.no_grad():
        before = model(images())
        change(backbone)
        after = model(images())
        changed = vit()
        change(changed)
        twin = routed(ARMS[arm], vit())
        twin.load_state_dict(routed(ARMS[arm], vit()).state_dict())
        twin.backbone = changed
        expected = twin(images())
    assert torch.equal(after, expected)
    assert (after - before).abs().max() > 1e-3


def test_another_kind_of_backbone_is_refused() -> None:
    model = routed(["router=linear"])
    model.backbone = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear: this model routes a VisionTransformer"):
        model(images())


@pytest.mark.parametrize("way", ["flag", "wrapper"])
def test_activation_checkpointing_recomputes(way: str) -> None:
    calls, gradients = [], []
    for recompute in (False, True):
        backbone = vit()
        count = [0] * 4
        for index, block in enumerate(backbone.blocks):

            def counted(*_: Any, index: int = index, count: list[int] = count) -> None:
                count[index] += 1

            block.attn.qkv.register_forward_hook(counted)
        model = routed(["router=linear", "scaling=multiply"], backbone).train()
        if recompute and way == "flag":
            backbone.set_grad_checkpointing()
        elif recompute:
            for index in range(4):
                backbone.blocks[index] = checkpoint_wrapper(backbone.blocks[index])
        model(images()).square().sum().backward()
        calls.append(count)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert calls == [[1] * 4, [2] * 4]
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_dynamic_quantisation_runs() -> None:
    model = routed(["router=linear", "visibility=all"])
    with torch.no_grad():
        expected = model(images())
        quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
        found = quantised(images())
    assert not torch.equal(found, expected)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.9


@pytest.mark.parametrize(
    "arm",
    [
        ["router=random", "capacity=threshold", "capacity.threshold=0.4", "bypass=ponder"],
        ["router=random", "capacity=topk", "bypass=ponder"],
    ],
    ids=["threshold", "topk"],
)
def test_kept_tokens_rotate_by_their_own_positions(arm: list[str]) -> None:
    """Removing tokens of a decoder is hiding them as keys in the original one: the last states of those kept agree."""
    decoder = llama().double()
    model = routed([*arm, "placement=list", "placement.layers=[1,2]"], decoder, double=True)
    ids = token_ids(batch=1)
    with torch.no_grad():
        _, trace, tokens = model(ids, return_trace=True, return_tokens=True)
        start, context = model.embed(ids)
        x = start.x
        alive = torch.ones(x.shape[1], dtype=torch.bool)
        order = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for index, layer in enumerate(decoder.model.layers):
            if index in model.routed_layers:
                present = alive.nonzero().squeeze(1)
                alive = torch.zeros_like(alive)
                alive[present[trace[index].kept[0]]] = True
            visible = (order & alive) | torch.eye(len(alive), dtype=torch.bool)
            y = layer(x, attention_mask=visible[None, None], position_embeddings=(context.cosine, context.sine))
            x = torch.where(alive[:, None], y, x)  # a halted token keeps its last state
        expected = decoder.model.norm(x)
    assert 0 < alive.sum() < len(alive)
    torch.testing.assert_close(tokens.x[0], expected[0], rtol=0, atol=1e-10)
