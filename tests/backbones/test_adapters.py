"""Adapters: parts of a block, names of parameters, and what a routed model can be used for."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import timm
import torch
from tests.backbones.families import FAMILIES
from tests.routing.tiny import DEPTH, WIDTH, images, llama, routed, token_ids, vit
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import routing_lab
from routing_lab.axes.routers import ROUTERS
from routing_lab.backbones import adapt
from routing_lab.backbones.build import build_vit
from routing_lab.routing.tokens import Positioned


class OtherAttention(Attention):
    pass


class OtherForward(VisionTransformer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


PARAMETER_FREE = [name for name, member in ROUTERS.items() if not member.facts.learned and member.facts.routes]
STATIC = {
    "amod": ["router=amod"],
    "mod": ["router=linear", "scaling=multiply", "scaling.normalize=sigmoid"],
    "random-all": ["router=random", "visibility=all"],
    "mlp-project": ["router=mlp", "placement.sublayer=attention", "bypass=project", "scaling=top1_probability"],
    "subspace-mlp": ["router=subspace", "placement.sublayer=mlp", "router.corrupt=noise"],
}

RAGGED = {
    "percentile": ["router=amod", "capacity=percentile", "capacity.persist=hierarchical", "visibility=all"],
    "threshold": [
        *("router=linear", "capacity=threshold", "capacity.threshold=0"),
        *("scaling=multiply", "placement.sublayer=attention", "bypass=project"),
    ],
    "sampling": ["method=ats", "placement.first=1", "capacity.at_least=1"],
    "halting": ["method=avit", "router.gamma=1", "router.beta=0.5"],
}


@pytest.mark.parametrize("name", ["vit", "decoder"])
def test_projecting_is_attending_to_oneself(name: str) -> None:
    backbone = adapt(vit(init_values=0.5, qk_norm=True).double() if name == "vit" else llama().double())
    inputs = images(dtype=torch.float64) if name == "vit" else token_ids()
    with torch.no_grad():
        tokens, context = backbone.embed(inputs)
        x, block = tokens.x, backbone.block(1)
        own = torch.eye(x.shape[1], dtype=torch.bool).expand(len(x), -1, -1)
        torch.testing.assert_close(
            block.project(x), block.attend(tokens.side(), context, visible=own), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", ["vit", "decoder"])
def test_attending_to_some_keys_is_masking_the_others(name: str) -> None:
    backbone = adapt(vit(qk_norm=True).double() if name == "vit" else llama().double())
    inputs = images(dtype=torch.float64) if name == "vit" else token_ids()
    with torch.no_grad():
        tokens, context = backbone.embed(inputs)
        x, block = tokens.x, backbone.block(2)
        index = torch.tensor([0, 2, 3, 7, 9]).expand(len(x), 5)
        kept = x[:, index[0]]
        queries = Positioned(kept, index)
        among = block.attend(queries, context)
        visible = torch.zeros(x.shape[:2], dtype=torch.bool)
        visible[:, index[0]] = True
        own = torch.eye(x.shape[1], dtype=torch.bool)
        masked = block.attend(tokens.side(), context, visible=visible.unsqueeze(1) | own)
        torch.testing.assert_close(among, masked[:, index[0]], rtol=0, atol=1e-12)
        every = block.attend(queries, context, tokens.side())
        torch.testing.assert_close(every, block.attend(tokens.side(), context)[:, index[0]], rtol=0, atol=1e-12)


def test_block_parts_make_the_block() -> None:
    for backbone, inputs in ((adapt(vit(init_values=0.5)), images()), (adapt(llama()), token_ids())):
        with torch.no_grad():
            tokens, context = backbone.embed(inputs)
            block = backbone.block(0)
            h = tokens.x + block.attend(tokens.side(), context)
            assert torch.equal(h + block.mlp(h), block.dense(tokens.side(), context))


def test_names_of_parameters() -> None:
    backbone = vit()
    model = routed(["router=linear", "router.bias=true", "scaling=multiply"], backbone)
    names = list(model.state_dict())
    assert names[: len(backbone.state_dict())] == list(backbone.state_dict())
    routers = [f"router.{layer}.{name}" for layer in (1, 3) for name in ("weight", "bias")]
    assert names[len(backbone.state_dict()) :] == routers
    assert model.num_router_parameters == 2 * (WIDTH + 1)
    assert model.backbone is backbone
    assert model.routed_layers == [1, 3]

    other = routed(["router=linear", "router.bias=true", "scaling=multiply"], vit(seed=5))
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(images()), model(images()))
    with pytest.raises(RuntimeError, match=r"router\.1\.weight|layers\.1\.router\.weight"):
        other.load_state_dict(backbone.state_dict(), strict=True)


@pytest.mark.parametrize("router", PARAMETER_FREE)
def test_dense_checkpoints_load_strictly(router: str) -> None:
    overrides = [f"router={router}"]
    model = routing_lab.route(vit(seed=3), overrides)
    assert model.num_router_parameters == 0
    model.load_state_dict(vit(seed=4).state_dict(), strict=True)
    vit(seed=5).load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize("arm", STATIC)
def test_pickles_copies_and_changes_precision(arm: str) -> None:
    model = routed(STATIC[arm])
    with torch.no_grad():
        expected, trace = model(images(), return_trace=True)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin.backbone is not model.backbone
            assert torch.equal(twin(images()), expected)
            twin.backbone.head.weight.zero_()  # the twin runs on its own backbone
            assert not torch.equal(twin(images()), expected)
        half = copy.deepcopy(model).to(torch.bfloat16)
        logits, coarse = half(images().bfloat16(), return_trace=True)
        assert logits.dtype == torch.bfloat16
        assert coarse[1].scores.dtype == trace[1].scores.dtype == torch.float32
        assert (logits.float() - expected).abs().max() < 0.5
        assert copy.deepcopy(model).double()(images().double()).dtype == torch.float64


@pytest.mark.parametrize("arm", STATIC)
def test_compiles_without_graph_breaks(arm: str) -> None:
    model = routed(STATIC[arm])
    with torch.no_grad():
        expected, trace = model(images(), return_trace=True)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found, compiled_trace = compiled(images(), return_trace=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert all(torch.equal(compiled_trace[layer].kept, trace[layer].kept) for layer in range(DEPTH))
    assert set(compiled.state_dict()) != set(model.state_dict())
    torch.compiler.reset()


@pytest.mark.parametrize("arm", RAGGED)
def test_compiles_without_graph_breaks_where_scores_decide_how_many_are_kept(arm: str) -> None:
    model = routed(RAGGED[arm])
    with torch.no_grad():
        expected, trace = model(images(batch=4), return_trace=True)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        found, compiled_trace = compiled(images(batch=4), return_trace=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for layer, other in zip(trace.layers, compiled_trace.layers, strict=True):
        assert torch.equal(other.counts, layer.counts)
    torch.compiler.reset()


@pytest.mark.parametrize("arm", STATIC)
def test_exports(arm: str, tmp_path: Path) -> None:
    model = routed(STATIC[arm])
    with torch.no_grad():
        program = torch.export.export(model, (images(),))
        found = program.module()(images())
        torch.testing.assert_close(found, model(images()), rtol=0, atol=1e-5)


def test_compiled_training_step() -> None:
    model = routed(["router=linear", "scaling=multiply"]).train()
    model(images()).square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(images()).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


def test_training_mode_follows() -> None:
    model = routed(["router=linear"])
    assert not model.training
    model.train()
    assert model.backbone.training
    assert model.layers["1"].scaling.training
    assert routing_lab.route(vit().train(), ["router=linear"]).training


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear: expected a timm VisionTransformer, a timm Eva"):
        routing_lab.route(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="ResNet"):
        routing_lab.route(timm.create_model("resnet18", num_classes=2))
    other = vit()
    other.blocks[2].attn = OtherAttention(WIDTH)
    with pytest.raises(ValueError, match="block 2 is a Block whose attention is a OtherAttention"):
        routing_lab.route(other)
    with pytest.raises(ValueError, match="OtherForward: it has a forward of its own, which routing would not call"):
        routing_lab.route(vit(kind=OtherForward))


def test_blocks_that_read_weights_refuse_what_stands_in_their_place() -> None:
    model = FAMILIES["beit"]()
    model.blocks[1].attn.qkv = nn.Sequential(model.blocks[1].attn.qkv)
    with pytest.raises(ValueError, match=r"block 1: timm's Attention reads the weight of qkv .* this Sequential"):
        routing_lab.route(model)
    model.blocks[1].attn.qkv_bias_separate = True
    with torch.no_grad():
        assert torch.equal(routing_lab.route(model, ["router=dense"])(images()), model(images()))


def test_what_a_backbone_lacks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="this backbone's attention is a difference of two"):
        routing_lab.route(FAMILIES["differential"](), ["router=amod"])
    with pytest.raises(ValueError, match=r"placement.sublayer = attention: attention and MLP .* beside each other"):
        routing_lab.route(FAMILIES["parallel"](), ["router=linear", "placement.sublayer=attention"])


def test_decoder_refuses_scores_of_a_class_token() -> None:
    with pytest.raises(ValueError, match="class token"):
        routing_lab.route(llama(), ["router=cls_attention"])


def test_unknown_timm_model_suggests_others() -> None:
    with pytest.raises(ValueError, match=r"deit_small_patch16_244: timm has no such model; similar: deit_small"):
        build_vit(num_classes=2, timm_name="deit_small_patch16_244")
