"""A routed model goes on computing with what its backbone is now, and with where its tokens stand."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from tests.backbones.two_processes import SHARDS, loss_of, run
from tests.routing.tiny import images, llama, routed, token_ids, vit
from torch import Tensor, nn
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


def peft_fused(model: Any) -> None:
    peft(model, ["qkv", "proj"])


def peft(model: nn.Module, targets: list[str]) -> None:
    """LoRA in place of projections, with weights that matter."""
    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets), model)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


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
    [replace_block, shorten, low_rank, peft_fused, hook_blocks, hook_attention, hook_projections],
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


DECODER_ARMS = {
    "kept": ["router=linear", "scaling=multiply"],
    "all-keys": ["router=linear", "scaling=multiply", "visibility=all"],
    "ponder": ["router=random", "capacity=topk", "bypass=ponder"],
}


def replace_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(llama(seed=9).model.layers[1])


def shorten_decoder(model: Any) -> None:
    model.model.layers = model.model.layers[:3]


def peft_separate(model: Any) -> None:
    peft(model, ["q_proj", "v_proj", "o_proj"])


def hook_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, given, output: 1.1 * output)


def hook_parts(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, given, output: (0.5 * output[0], *output[1:]))
        layer.self_attn.k_proj.register_forward_hook(lambda module, given, output: output + 0.2)
        layer.mlp.register_forward_pre_hook(lambda module, given: (given[0] * 0.7,))


@pytest.mark.parametrize("arm", DECODER_ARMS)
@pytest.mark.parametrize(
    "change",
    [replace_layer, shorten_decoder, peft_separate, hook_layers, hook_parts],
    ids=lambda f: f.__name__,
)
def test_a_change_of_a_decoder_after_routing_is_one_before(change: Callable[[Any], None], arm: str) -> None:
    backbone = llama()
    model = routed(DECODER_ARMS[arm], backbone)
    changed = llama()
    with torch.no_grad():
        before = model(token_ids())
        change(backbone)
        change(changed)
        twin = routed(DECODER_ARMS[arm], llama())
        twin.backbone = changed
        assert torch.equal(model(token_ids()), twin(token_ids()))
        assert (model(token_ids()) - before).abs().max() > 1e-3


@pytest.mark.parametrize("arm", ARMS)
def test_replacing_the_backbone_is_routing_the_other_one(arm: str) -> None:
    model, other = routed(ARMS[arm]), routed(ARMS[arm], vit(seed=9))
    model.backbone = other.backbone
    with torch.no_grad():
        assert torch.equal(model(images()), other(images()))


@pytest.mark.parametrize("name", ["vit", "decoder"])
def test_low_rank_adapters_train_and_merge(name: str) -> None:
    overrides = ["router=linear", "scaling=multiply", "visibility=all"]
    if name == "vit":
        backbone, inputs, targets = vit(), images(), ["attn.qkv", "attn.proj"]
    else:
        backbone, inputs, targets = llama(), token_ids(), ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = routed(overrides, backbone)
    peft(backbone, targets)
    model.requires_grad_(False)
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    for parameter in adapters:
        parameter.requires_grad_(True)
    optimiser = torch.optim.SGD(adapters, lr=1e-4)
    losses = []
    for _ in range(3):
        loss = model(inputs).square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in adapters)
        optimiser.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    with torch.no_grad():
        expected = model(inputs)
        merged = [module for module in model.modules() if isinstance(module, LoraLayer)]
        for module in merged:
            module.merge()
        assert len(merged) == 4 * len(targets)
        torch.testing.assert_close(model(inputs), expected, rtol=0, atol=1e-4)


def test_a_replica_computes_with_its_own_parameters() -> None:
    """What `nn.DataParallel` does on every device: modules are copied without parameters, which are then attached."""
    model = routed(ARMS["all-keys"])

    def replica(module: nn.Module) -> nn.Module:
        copied: Any = module._replicate_for_data_parallel()
        for name, child in module.named_children():
            copied._modules[name] = replica(child)
        for name, parameter in module._parameters.items():
            setattr(copied, name, None if parameter is None else 0.9 * parameter)
        return copied

    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter *= 0.9
        assert torch.equal(replica(model)(images()), scaled(images()))
        assert not torch.equal(scaled(images()), model(images()))


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    model = routed(["router=linear", "scaling=multiply"], vit().train())
    loss_of(model, images(batch=2 * SHARDS)).backward()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (port, tmp_path), nprocs=SHARDS)
    found: dict[str, Tensor] = torch.load(tmp_path / "gradients.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


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


def test_activation_checkpointing_of_a_decoder_recomputes() -> None:
    calls, gradients = [], []
    for recompute in (False, True):
        backbone = llama()
        if recompute:
            backbone.activation_checkpointing_enable()
        count = [0]

        def counted(*_: Any, count: list[int] = count) -> None:
            count[0] += 1

        for layer in backbone.model.layers:
            layer.self_attn.q_proj.register_forward_hook(counted)
        model = routed(["router=linear", "scaling=multiply"], backbone).train()
        model(token_ids()).square().mean().backward()
        calls.append(count[0])
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert calls == [4, 8]
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
