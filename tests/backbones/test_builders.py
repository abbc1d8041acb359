"""Named models of timm as the command builds them, whatever their family."""

from __future__ import annotations

import pytest
import torch

from routing_lab.assembly import build_model
from routing_lab.config import ConfigError, load
from routing_lab.cost.macs import dense_macs
from routing_lab.cost.measure import vision_shape

SMALL = ["backbone=timm", "backbone.image_size=32", "backbone.patch_size=8", "backbone.width=48", "backbone.depth=3"]
COMMON = [*SMALL, "backbone.heads=2", "data=planted", "router=linear"]


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3", "beit_base_patch16_224"])
def test_a_family_is_built_by_its_name(name: str) -> None:
    config = load([*COMMON, f"backbone.timm_name={name}"]).config
    model = build_model(config, num_classes=5)
    assert model.adapter.prefix == config.backbone.facts().prefix
    logits, trace = model(torch.rand(2, 3, 32, 32), return_trace=True)
    assert logits.shape == (2, 5)
    assert len(trace) == 3
    assert dense_macs(vision_shape(model.backbone)).total > 0


def test_what_a_named_model_lacks_is_refused() -> None:
    common = [*COMMON, "backbone.timm_name=vit_base_patch16_xp_224"]
    with pytest.raises(ConfigError, match="stand beside each other"):
        build_model(load([*common, "placement.sublayer=attention"]).config, num_classes=5)
    with pytest.raises(ConfigError, match="shifted windows"):
        load(["backbone=timm", "backbone.timm_name=swin_tiny_patch4_window7_224"])
