"""Vision transformers of transformers as the command builds them: from options, from a folder, with its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.backbones.families import output_of
from torch.utils.flop_counter import FlopCounterMode

from routing_lab import open_run
from routing_lab.assembly import build_model
from routing_lab.backbones.hf_build import MODEL_TYPES
from routing_lab.config import ConfigError, check, load
from routing_lab.cost.macs import dense_macs
from routing_lab.cost.measure import vision_shape
from routing_lab.training.run import run_cell

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 8, "patch_size": 2}
OPTIONS = {
    name: SIZES | ({"mlp_ratio": 2} if name.startswith("dinov2") else {"intermediate_size": 64}) for name in MODEL_TYPES
}


def words(model_type: str) -> list[str]:
    given = ", ".join(f"{key}: {value}" for key, value in OPTIONS[model_type].items())
    return ["backbone=hf", f"backbone.model_type={model_type}", f"+backbone.options={{{given}}}", "data=planted"]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_type_is_built_saved_and_read_again(model_type: str, tmp_path: Path) -> None:
    loaded = load([*words(model_type), "method=mod"])
    facts = loaded.config.backbone.facts()
    model = build_model(loaded.config, num_classes=5).eval()
    example = model.adapter.example(2)
    logits, trace = model(example, return_trace=True)
    assert logits.shape == (2, 5)
    assert (model.adapter.prefix, len(trace)) == (facts.prefix, facts.depth)
    assert trace[0].origin.shape[1] == facts.tokens

    model.backbone.save_pretrained(tmp_path)
    stored = ["backbone=hf", f"backbone.folder={tmp_path}", "data=planted", "router=dense", "init=pretrained"]
    same = build_model(load(stored).config, num_classes=5, pretrained=True).eval()
    assert torch.equal(same(example), output_of(model.backbone, example))
    larger = load([*stored, "backbone.image_size=12"]).config
    assert larger.backbone.facts().tokens == len(facts.prefix) + 36
    assert build_model(larger, num_classes=3, pretrained=True)(torch.rand(2, 3, 12, 12)).shape == (2, 3)


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name != "siglip_vision_model"])
def test_it_costs_what_torch_counts(model_type: str) -> None:
    # SigLIP computes an attention pooling that its classifier does not read, and a routed one does not.
    model: Any = build_model(load(words(model_type)).config, num_classes=5).backbone
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(1, 3, 8, 8))
    assert 2 * dense_macs(vision_shape(model)).total == counter.get_total_flops()


def test_the_command_trains_from_a_folder(tmp_path: Path) -> None:
    config = transformers.DeiTConfig(**OPTIONS["deit"], num_labels=7)
    transformers.DeiTForImageClassification(config).save_pretrained(tmp_path / "model")
    quiet = ["tracking=none", "runtime.progress=none", f"paths.runs={tmp_path / 'runs'}", "train.warmup_epochs=0"]
    small = ["data.num_train=32", "data.num_val=16", "data.num_test=16", "train.epochs=1"]
    loaded = load(
        ["backbone=hf", f"backbone.folder={tmp_path / 'model'}", "init=pretrained", "data=planted", *small, *quiet]
    )
    result = run_cell(loaded.config, loaded.resolved)
    assert result["error"] is None
    cost = result["record"]["cost"]
    assert cost["macs_measured"] == cost["macs_nominal"] < cost["macs_dense"]
    assert result["record"]["init"]["source"] == str(tmp_path / "model")
    assert open_run(result["folder"]).model.adapter.prefix == ("class", "distillation")


def test_a_configuration_describes_the_model_without_its_folder(tmp_path: Path) -> None:
    transformers.Dinov2Config(**OPTIONS["dinov2"]).save_pretrained(tmp_path)
    loaded = load(["backbone=hf", f"backbone.folder={tmp_path}", "data=planted"])
    shutil.rmtree(tmp_path)
    assert check(loaded.resolved).resolved == loaded.resolved
    assert build_model(loaded.config, num_classes=5).adapter.depth == 4


def test_refusals_name_the_reason(tmp_path: Path) -> None:
    transformers.SwinConfig().save_pretrained(tmp_path / "swin")
    transformers.ViTConfig(**OPTIONS["vit"]).save_pretrained(tmp_path / "bare")
    swin, bare = f"backbone.folder={tmp_path / 'swin'}", f"backbone.folder={tmp_path / 'bare'}"
    for given, message in (
        ([], r"give one of backbone\.folder"),
        (["backbone.folder=nowhere"], "config.json"),
        (["backbone.hf_name=nobody/nothing"], "cache has no such name; backbone.download=true"),
        ([swin], "swin: is not routed; expected one of vit, vit_msn, deit"),
        ([bare, "+backbone.options={hiden: 3}"], "hiden: vit has no such key; known: .*hidden_size"),
        ([bare, "backbone.width=3"], "the model has 32"),
        ([bare, "init=pretrained"], "holds no weights"),
        ([bare, "isoflop.by=depth"], "sizes a vision transformer of timm"),
        (["backbone.model_type=vit", "init=pretrained"], r"needs backbone\.folder or backbone\.hf_name"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(["backbone=hf", "data=planted", *given])


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    transformers.ViTForImageClassification(transformers.ViTConfig(**OPTIONS["vit"])).save_pretrained(tmp_path)
    stored = ["backbone=hf", f"backbone.folder={tmp_path}", "data=planted", "init=pretrained"]
    config = load([*stored, "+backbone.options={num_hidden_layers: 5}"]).config
    with pytest.raises(ValueError, match=r"its weights are another model's: it lacks vit\.layers\.4"):
        build_model(config, num_classes=5, pretrained=True)
