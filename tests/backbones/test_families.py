"""Every family that is routed: the original where all is kept, finite and independent of the batch where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from tests.backbones.families import FAMILIES, inputs_of, output_of
from tests.routing.tiny import route

import routing_lab
from routing_lab.assembly import backbone_facts
from routing_lab.backbones import adapt
from routing_lab.config import ConfigError
from routing_lab.config.compose import conf_path

PRESETS = {path.stem: path.read_text() for path in sorted((conf_path() / "method").glob("*.yaml"))}
LAYERS = ["placement=list", "placement.layers=[1,2]"]
"""Stands for placements that need more layers."""
ALWAYS = {"mod", "random", "linear_straight_through"}
"""Presets that apply to every backbone and always bypass tokens."""
KEEP_ALL = (
    ["router=dense"],
    ["router=linear", "capacity.fraction=1"],
    ["router=random", "capacity.fraction=1", "visibility=all"],
)


def routed_by(method: str, model: Any) -> Any:
    """The model routed by a preset; None: it does not apply to this backbone, or is a size instead of a routing."""
    where = LAYERS if "placement: stages" in PRESETS[method] or method == "ats" else []
    try:
        return route(model, [f"method={method}", *where])
    except ConfigError:
        return None


@pytest.mark.parametrize(
    ("module", "least"),
    [("vision_transformer", 150), ("vision_transformer_hybrid", 10), ("deit", 15), ("eva", 50), ("beit", 5)],
)
def test_every_name_of_timm_is_accepted(module: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    names = timm.list_models(module=module)
    for name in names:
        with torch.device("meta"):
            try:
                model = timm.create_model(name, depth=2)
            except AssertionError:  # it has a list with one entry a block
                model = timm.create_model(name, depth=2, num_kv_heads=1)
        facts = backbone_facts(adapt(model))
        assert facts.depth >= 2
        assert len(facts.prefix) == model.num_prefix_tokens
    with capsys.disabled():
        print(f" {len(names)} names of timm.models.{module} accepted", end="")
    assert len(names) >= least


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swin_tiny_patch4_window7_224", "shifted windows"),
        ("swinv2_tiny_window8_256", "shifted windows"),
        ("xcit_nano_12_p16_224", "between channels"),
        ("cait_xxs24_224", "mixes the maps of its heads"),
        ("naflexvit_base_patch16_gap", "padded sequences"),
        ("samvit_base_patch16", "windows of a fixed grid"),
    ],
)
def test_what_is_not_routed_says_why(name: str, reason: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=reason):
        routing_lab.route(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_keeping_everything_is_the_original(name: str) -> None:
    model = FAMILIES[name]()
    inputs = inputs_of(name)
    with torch.no_grad():
        expected = output_of(model, inputs)
        for overrides in KEEP_ALL:
            assert torch.equal(route(model, overrides)(inputs), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_presets_are_finite_and_samples_independent(name: str) -> None:
    model = FAMILIES[name]().double()
    inputs = inputs_of(name, dtype=torch.float64)
    applied = []
    with torch.no_grad():
        dense = output_of(model, inputs)
        for method in PRESETS:
            routed = routed_by(method, model)
            if routed is None:
                continue
            applied.append(method)
            found = routed(inputs)
            assert found.isfinite().all(), method
            alone = routed(inputs[2:], sample_ids=torch.tensor([2]))
            torch.testing.assert_close(alone, found[2:], rtol=0, atol=1e-9, msg=lambda text, m=method: f"{m}: {text}")
            if method in ALWAYS:
                assert (found - dense).abs().max() > 1e-4
    assert set(applied) >= ALWAYS
