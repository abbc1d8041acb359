from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from routing_lab.config import conf_path
from routing_lab.config.training import InitConfig, TrainConfig

RECIPES = sorted(path.stem for path in (conf_path() / "recipe").glob("*.yaml"))


def recipe(name: str) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(conf_path() / "recipe" / f"{name}.yaml"))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_is_valid_and_named_as_its_file(name: str) -> None:
    assert TrainConfig.model_validate(recipe(name)).name == name


def test_the_four_recipes_are_shipped() -> None:
    assert {"quick", "finetune", "transfer", "scratch"} <= set(RECIPES)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", -1),
        ("epochs", 1.5),
        ("batch_size", 0),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("betas", [0.9]),
        ("betas", [0.9, 1.0]),
        ("layer_decay", 1.5),
        ("clip_grad", 0.0),
        ("accumulate", 3),
        ("schedule", "cosin"),
        ("min_lr", 1.0),
        ("precision", 64),
        ("compile", "yes"),
        ("ema_decay", 1.0),
        ("label_smoothing", 1.0),
        ("augment", "heavy"),
        ("erasing", 1.1),
        ("distill", "token"),
        ("distill_temperature", 0.0),
        ("selection", "first"),
        ("unknown", 1),
    ],
)
def test_a_value_outside_its_range_is_refused_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainConfig.model_validate(recipe("quick") | {key: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {key}


def test_zero_epochs_need_no_shorter_warmup() -> None:
    assert TrainConfig.model_validate(recipe("finetune") | {"epochs": 0}).epochs == 0


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ({"kind": "scratch"}, "scratch"),
        ({"kind": "pretrained"}, "pretrained"),
        ({"kind": "checkpoint", "path": "weights.safetensors"}, "checkpoint"),
        ({"kind": "dense", "epochs": None}, "dense"),
    ],
)
def test_every_initialisation_has_its_own_keys(node: dict[str, Any], kind: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(InitConfig)
    assert adapter.validate_python(node).kind == kind
    with pytest.raises(ValidationError):
        adapter.validate_python(node | {"surplus": 1})


def test_schema_and_folder_import_no_torch() -> None:
    modules = "routing_lab.config.training, routing_lab.runs.folder, routing_lab.sweeps"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
