"""A router that keeps everything is the untouched backbone, on every variant of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.routing.tiny import decoder, images, llama, route, token_ids, vit
from timm.layers import SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from routing_lab.backbones import adapt
from routing_lab.backbones.build import set_patch_stride


def overlapping(**options: Any) -> nn.Module:
    model = vit(**options)
    set_patch_stride(model, 1)
    return model


def unfused() -> nn.Module:
    model = vit(qk_norm=True)
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "class-token": vit,
    "no-class-token": lambda: vit(class_token=False, global_pool="avg"),
    "class-token-avg-pool": lambda: vit(global_pool="avg"),
    "attention-pool": lambda: vit(class_token=False, global_pool="map"),
    "registers": lambda: vit(reg_tokens=3),
    "registers-without-position": lambda: vit(reg_tokens=3, no_embed_class=True),
    "distilled": lambda: vit(kind=VisionTransformerDistilled),
    "layer-scale": lambda: vit(init_values=0.3),
    "qk-norm": lambda: vit(qk_norm=True),
    "scale-attn-norm": lambda: vit(scale_attn_norm=True),
    "scale-mlp-norm": lambda: vit(scale_mlp_norm=True),
    "no-qkv-bias": lambda: vit(qkv_bias=False),
    "swiglu": lambda: vit(mlp_layer=SwiGLUPacked),
    "pre-norm-drop-path": lambda: vit(pre_norm=True, drop_path_rate=0.3),
    "dynamic-size": lambda: vit(dynamic_img_size=True),
    "overlapping-patches": overlapping,
    "unfused-attention": unfused,
}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "mistral": partial(decoder, "Mistral"),
    "qwen2": partial(decoder, "Qwen2"),
    "qwen2-windows": partial(decoder, "Qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=2),
    "qwen3": partial(decoder, "Qwen3"),
}

KEEPS_ALL: dict[str, list[str]] = {
    "linear": ["router=linear", "capacity.fraction=1"],
    "amod": ["router=amod", "capacity.fraction=1"],
    "amod-percentile": ["router=amod", "capacity=percentile", "capacity.fraction=1"],
    "threshold-all-keys": ["router=random", "capacity=threshold", "capacity.threshold=-1", "visibility=all"],
    "attention-project": ["router=linear", "capacity.fraction=1", "placement.sublayer=attention", "bypass=project"],
    "mlp-own-map": [
        *("router=amod", "placement=every", "placement.sublayer=mlp", "placement.attention_source=same"),
        *("capacity.fraction=1", "scaling=straight_through"),
    ],
}


def inputs_for(name: str) -> Tensor:
    return images(size=12 if name == "dynamic-size" else 8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_keeping_everything_is_the_backbone(variant: str) -> None:
    backbone = VARIANTS[variant]()
    x = inputs_for(variant)
    with torch.no_grad():
        expected = backbone(x)
        for arm, overrides in KEEPS_ALL.items():
            model = route(backbone, overrides)
            for execution in ("gather", "mask"):
                model.set_execution(execution)
                torch.testing.assert_close(
                    model(x), expected, rtol=0, atol=1e-5, msg=lambda text, arm=arm: f"{arm}: {text}"
                )

        backbone.double()
        expected = backbone(x.double())
        for arm, overrides in KEEPS_ALL.items():
            found = route(backbone, overrides)(x.double())
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=lambda text, arm=arm: f"{arm}: {text}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_operations_give_the_same_bits(variant: str) -> None:
    backbone = VARIANTS[variant]()
    x = inputs_for(variant)
    with torch.no_grad():
        expected = backbone(x)
        for overrides in (["router=dense"], KEEPS_ALL["linear"], [*KEEPS_ALL["amod"], "runtime.attention=exact"]):
            assert torch.equal(route(backbone, overrides)(x), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_routing_changes_the_output_and_masks_agree(variant: str) -> None:
    """Skipped work is skipped: gathering and masking are the same function, and not the dense one."""
    backbone = VARIANTS[variant]().double()
    x = inputs_for(variant).double()
    with torch.no_grad():
        for overrides in (["router=amod"], ["router=random", "visibility=all", "capacity=percentile"]):
            model = route(backbone, overrides)
            gathered = model(x)
            model.set_execution("mask")
            torch.testing.assert_close(model(x), gathered, rtol=0, atol=1e-12)
            assert (gathered - backbone(x)).abs().max() > 1e-3


def test_drop_path_and_dropout_act_in_training_only() -> None:
    backbone = vit(drop_path_rate=0.5, attn_drop_rate=0.2, proj_drop_rate=0.2)
    model = route(backbone, [*KEEPS_ALL["amod"], "runtime.attention=exact"])
    assert torch.equal(model(images()), backbone(images()))
    model.train()
    assert backbone.training
    assert not torch.equal(model(images()), model(images()))


@pytest.mark.parametrize("kind", DECODERS)
def test_keeping_everything_is_the_decoder(kind: str) -> None:
    backbone = DECODERS[kind]()
    ids = token_ids()
    with torch.no_grad():
        for double in (False, True):
            backbone = backbone.double() if double else backbone
            expected = backbone(ids).logits
            for overrides in (
                ["router=dense"],
                ["router=linear", "capacity.fraction=1"],
                ["router=random", "capacity.fraction=1", "visibility=all"],
                ["router=linear", "capacity.fraction=1", "placement.sublayer=attention", "bypass=project"],
            ):
                found = route(backbone, overrides)(ids)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 if double else 1e-5)
            assert torch.equal(route(backbone, ["router=dense"])(ids), expected)


def test_a_sequence_beyond_the_sliding_window_is_refused() -> None:
    model = route(decoder("Mistral", sliding_window=8), ["router=linear"])
    with pytest.raises(ValueError, match="12 tokens are more than the sliding window of 8"):
        model(token_ids())


def test_decoder_keeps_its_order() -> None:
    """A later token changes nothing before it, whichever tokens are kept (the selection itself is fixed here)."""
    backbone = llama().double()
    ids = token_ids()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 23
    with torch.no_grad():
        for visibility in ("kept", "all"):
            for execution in ("gather", "mask"):
                model = route(backbone, ["router=random", f"visibility={visibility}"])
                model.set_execution(execution)
                before, after = model(ids), model(changed)
                torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=0, atol=1e-12)
                assert not torch.allclose(before[:, -1], after[:, -1])


def test_prefix_kinds() -> None:
    assert adapt(vit()).prefix == ("class",)
    assert adapt(vit(class_token=False, global_pool="avg")).prefix == ()
    assert adapt(vit(reg_tokens=2)).prefix == ("class", "registers", "registers")
    assert adapt(vit(kind=VisionTransformerDistilled)).prefix == ("class", "distillation")
    assert adapt(llama()).prefix == ()
