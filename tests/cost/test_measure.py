"""Shapes read off real models, and the cost model against torch's own counter on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from routing_lab.cost.macs import dense_macs
from routing_lab.cost.measure import WorkMeter, decoder_shape, parameter_counts, vision_shape
from routing_lab.routing.trace import LayerTrace, Trace
from routing_lab.routing.work import Work

VISION: list[tuple[str, dict[str, Any]]] = [
    ("deit_tiny_patch16_224", {}),
    ("deit_tiny_distilled_patch16_224", {}),
    ("vit_small_patch14_reg4_dinov2", {"img_size": 224}),
    ("vit_tiny_patch16_224", {"mlp_layer": timm.layers.SwiGLU, "mlp_ratio": 8 / 3, "num_classes": 7}),
    ("vit_tiny_patch16_224", {"mlp_layer": timm.layers.GluMlp, "in_chans": 1, "img_size": 96}),
    ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "num_classes": 10, "depth": 3}),
    ("vit_giant_patch14_reg4_dinov2", {"img_size": 224}),
]


def counted(model: nn.Module, *inputs: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize(("name", "options"), VISION, ids=[f"{name}-{n}" for n, (name, _) in enumerate(VISION)])
def test_vision_transformers_cost_what_torch_counts(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **options).eval()
        images = torch.empty(1, model.patch_embed.proj.in_channels, *model.patch_embed.img_size)
    assert 2 * dense_macs(vision_shape(model)).total == counted(model, images)


def test_other_image_sizes() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True).eval()
        images = torch.empty(1, 3, 96, 160)
    assert 2 * dense_macs(vision_shape(model, (96, 160))).total == counted(model, images)


def test_decoders_cost_what_torch_counts() -> None:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="eager",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.zeros(1, 11, dtype=torch.long)
    assert 2 * dense_macs(decoder_shape(config, 11)).total == counted(model, tokens)


def test_uncounted_parts_are_refused() -> None:
    with torch.device("meta"):
        pooled = timm.create_model("vit_tiny_patch16_224", global_pool="map", class_token=False)
        uneven = timm.create_model("vit_tiny_patch16_224")
        uneven.blocks[3].mlp = timm.layers.Mlp(192, 100)
    with pytest.raises(ValueError, match="attention pooling"):
        vision_shape(pooled)
    with pytest.raises(ValueError, match="blocks of one shape"):
        vision_shape(uneven)


def test_parameter_counts_tell_routers_apart() -> None:
    model = nn.ModuleDict({"blocks": nn.Linear(3, 2), "router": nn.ModuleDict({"1": nn.Linear(3, 1, bias=False)})})
    assert parameter_counts(model) == {"params": 11, "router_params": 3}


def layer(samples: int, work: Work) -> LayerTrace:
    index = torch.zeros(samples, 1, dtype=torch.long)
    return LayerTrace(None, index, torch.ones(samples, dtype=torch.long), 5, index, work=work)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=8))
def test_measured_cost_is_the_mean_over_samples(batches: list[list[int]]) -> None:
    meter = WorkMeter(1)
    for batch in batches:
        work, kept = Work(router=9), torch.tensor(batch)
        work.add_attention(kept, kept)
        work.repeat().map_pairs += 3
        meter.add(Trace([layer(len(batch), work)]))
    samples = [kept for batch in batches for kept in batch]
    (found,) = meter.mean()
    assert found.queries == sum(samples) / len(samples)
    assert found.pairs == sum(kept * kept for kept in samples) / len(samples)
    assert meter.router() == [9]
    assert meter.repeated()[0].map_pairs == 3


def test_a_layer_that_never_ran_has_no_cost() -> None:
    with pytest.raises(ValueError, match=r"layer 0 .zero-based. was never recorded"):
        WorkMeter(2).mean()
