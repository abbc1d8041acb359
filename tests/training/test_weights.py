"""Checkpoints as people have them: what is read, how names are found again, what is counted, what is refused."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from routing_lab.assembly import build_model
from routing_lab.training.weights import load_weights, read_weights

Cell = Callable[..., Any]


@pytest.fixture
def model(cell: Cell) -> Callable[..., nn.Module]:
    def make(*overrides: str, classes: int = 10, seed: int = 0) -> nn.Module:
        model = build_model(cell("router=linear", *overrides).config, classes)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        return model

    return make


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.clone()
        for name, value in model.state_dict().items()
        if not name.startswith(("router.", "capacity"))
    }


def loaded(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    own = model.state_dict()
    return all(torch.equal(own[name], value) for name, value in state.items())


FRONTS = [
    *("", "_orig_mod.", "module.", "model.", "backbone.", "net.", "encoder.", "module._orig_mod.", "_orig_mod.module."),
    *("model._orig_mod.", "module.backbone.", "net.encoder.", "module.model.backbone._orig_mod."),
]


@pytest.mark.parametrize("front", FRONTS)
def test_names_behind_wrappers_are_found(model: Callable[..., nn.Module], front: str) -> None:
    state, fresh = state_of(model(seed=1)), model()
    fit = load_weights(fresh, {front + name: value for name, value in state.items()})
    assert loaded(fresh, state)
    assert fit.taken == len(state)
    assert fit.fresh == ["router.1.weight"] or all(name.startswith("router.") for name in fit.fresh)
    assert (fit.left_over, fit.reshaped, fit.warnings) == ([], [], [])


def test_compiled_blocks_and_a_head_beside_the_backbone(model: Callable[..., nn.Module]) -> None:
    state, fresh = state_of(model(seed=1)), model()
    given = {
        name if name.startswith("head.") else "backbone." + name.replace("blocks.0.", "blocks.0._orig_mod."): value
        for name, value in state.items()
    }
    fit = load_weights(fresh, given | {"projector.0.weight": torch.zeros(3)})
    assert loaded(fresh, state)
    assert fit.left_over == ["projector.0.weight"]
    assert "1 left over (projector.0.weight)" in str(fit)


def test_a_routed_checkpoint_keeps_its_routers(model: Callable[..., nn.Module]) -> None:
    whole = {f"module.{name}": value for name, value in model(seed=1).state_dict().items()}
    fresh = model()
    assert load_weights(fresh, whole).fresh == []
    assert loaded(fresh, {name.removeprefix("module."): value for name, value in whole.items()})
    fit = load_weights(model("router=amod"), whole)
    assert any("router weights that this model has no place for" in line for line in fit.warnings)


def test_predictors_of_another_method_are_left_over(model: Callable[..., nn.Module]) -> None:
    """DynamicViT's file holds its predictors beside a DeiT."""
    state = state_of(model(seed=1)) | {"score_predictor.0.in_conv.0.weight": torch.zeros(4)}
    fit = load_weights(model(), state)
    assert fit.left_over == ["score_predictor.0.in_conv.0.weight"]
    assert fit.summary()["left_over"] == fit.left_over


def test_positions_of_another_image_size_are_resized(model: Callable[..., nn.Module]) -> None:
    state, fresh = state_of(model(seed=1)), model("backbone.image_size=16")
    fit = load_weights(fresh, state)
    assert fit.reshaped == ["pos_embed"]
    own = fresh.state_dict()["pos_embed"]
    prefix = 1
    assert torch.equal(own[:, :prefix], state["pos_embed"][:, :prefix])
    torch.testing.assert_close(own[:, prefix:].mean(), state["pos_embed"][:, prefix:].mean(), atol=0.2, rtol=0)
    assert "1 reshaped (pos_embed)" in str(fit)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: {f"resnet.{i}": torch.zeros(2) for i in range(4)}, "nothing to do with this model: of its 4"),
        (lambda state: {"head.weight": state["head.weight"]}, "nothing to do with this model: of its 1 tensors"),
        (lambda state: state | {"dist_token": state["cls_token"]}, "it has a dist_token, the model has none"),
        (lambda state: {n: v for n, v in state.items() if n != "cls_token"}, "it has no cls_token, the model has one"),
        (lambda state: state | {"blocks.2.norm1.weight": torch.zeros(16)}, "blocks.2.norm1.weight is unknown"),
        (lambda state: state | {"blocks.0.ls1.gamma": torch.zeros(16)}, "blocks.0.ls1.gamma is unknown"),
        (lambda state: {n: v for n, v in state.items() if n != "norm.bias"}, "norm.bias is missing"),
        (lambda state: state | {"norm.bias": torch.zeros(8)}, "norm.bias has shape (8,), expected (16,)"),
        (lambda state: {"\x1b[31mred": torch.zeros(2)}, r"(\x1b[31mred)"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Callable[..., nn.Module], change: Callable[[dict[str, torch.Tensor]], Any], said: str
) -> None:
    state, fresh = state_of(model(seed=1)), model()
    before = state_of(fresh)
    with pytest.raises(ValueError) as refused:
        load_weights(fresh, change(state))
    assert said in str(refused.value)
    assert "\x1b" not in str(refused.value)
    assert loaded(fresh, before)


# --- files ---


def test_files_of_training_scripts_are_read(tmp_path: Path) -> None:
    """What the scripts of DeiT, EViT and DynamicViT write: weights, optimiser, arguments, numpy's numbers."""
    weights, average = {"a": torch.ones(2)}, {"a": torch.zeros(2)}
    path = tmp_path / "checkpoint.pth"
    content = {
        "model": weights,
        "optimizer": {"state": {}, "param_groups": [{"lr": np.float64(0.1)}]},
        "lr_scheduler": {"best": np.float32(3.5), "epochs": np.int64(3), "kinds": np.dtype("float16")},
        "epoch": 299,
        "args": argparse.Namespace(
            model="deit_tiny_patch16_224", lr=np.float64(5e-4), device="cuda", flags=[True, None]
        ),
        "model_ema": average,
    }
    torch.save(content, path)
    taken, remarks = read_weights(path)
    assert torch.equal(taken["a"], weights["a"])
    assert remarks == [
        f"init.path={path}: the weights under 'model' are taken; init.entry=model_ema takes their moving average"
    ]
    taken, remarks = read_weights(path, "model_ema")
    assert torch.equal(taken["a"], average["a"])
    assert remarks == []
    with pytest.raises(ValueError, match=r"init\.entry=ema: .* has no such entry; there are model, model_ema"):
        read_weights(path, "ema")
    torch.save({"state_dict": weights, "state_dict_ema": average, "model": "a name"}, path)
    taken, remarks = read_weights(path)
    assert torch.equal(taken["a"], average["a"])
    assert "'state_dict_ema' are taken" in remarks[0]


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("ending", ["pth", "pt", "bin", "ckpt", "safetensors"])
def test_nothing_is_unpickled(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"weights.{ending}"
    torch.save({"model": {"a": torch.ones(2)}, "args": Hostile(f"touch {tmp_path / 'ran'}")}, path)
    with pytest.raises(ValueError, match="expected a safetensors file, or a torch file of plain tensors"):
        read_weights(path)
    torch.save(Hostile(f"touch {tmp_path / 'ran'}"), path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="expected a safetensors file, or a torch file of plain tensors"):
        read_weights(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"PK\x03\x04", bytes(100), b"\x1b[31mred", b"8" * 64])
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_damaged_files_are_refused_in_one_plain_line(tmp_path: Path, content: bytes, ending: str) -> None:
    path = tmp_path / f"weights.{ending}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^init\.path=") as refused:
        read_weights(path)
    assert str(refused.value).isprintable()
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"^init\.path="):
        read_weights(path)


@pytest.mark.parametrize("content", [{}, {"a": 1}, [torch.ones(2)], torch.ones(2), {"model": {}}])
def test_files_without_weights_are_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="expected names and tensors, a model's state"):
        read_weights(tmp_path / "weights.pth")


def test_a_run_says_what_it_took(cell: Cell, model: Callable[..., nn.Module], tmp_path: Path) -> None:
    from routing_lab.training.initialisation import initialise

    state = {f"module.{name}": value for name, value in state_of(model(seed=1)).items()}
    save_file(state, tmp_path / "weights.safetensors")
    config = cell("router=linear", "init=checkpoint", f"init.path={tmp_path / 'weights.safetensors'}").config
    _, record, remarks = initialise(config, 10)
    assert record["tensors"]["taken"] == len(state)
    assert any(f"{len(state)} tensors taken, 1 missing (router.1." in line for line in remarks)
