"""Shipped data configurations and what the schema refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from routing_lab.data.schema import DATA_SETS

CONF = Path(__file__).parents[2] / "conf" / "data"


def test_every_data_set_has_a_configuration() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(DATA_SETS)


@pytest.mark.parametrize("name", sorted(DATA_SETS))
def test_shipped_configuration_is_valid(node: Callable[..., Any], name: str) -> None:
    values = {"path": "somewhere"} if name in ("image_folder", "text_files", "hub_text") else {}
    config = node(name, **values)
    assert isinstance(config, DATA_SETS[name])
    assert config.name == name
    if hasattr(config, "context"):
        assert (config.context, config.vocab_size) == (64, 256)
    else:
        assert (config.image_size, config.channels) == (8, 3)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("digits", {"num_classes": 9}, "Input should be 10"),
        ("digits", {"path": "elsewhere"}, "Extra inputs are not permitted"),
        ("digits", {"std": [0.0]}, "expected numbers > 0"),
        ("digits", {"mean": [0.1, 0.2]}, "data.channels=3 values"),
        ("cifar100", {"num_classes": 10}, "cifar100 has 100 classes"),
        ("image_folder", {"path": "x", "val_fraction": 0.6, "test_fraction": 0.5}, "leave nothing to train on"),
        ("planted", {"patch_size": 3}, "expected a divisor of data.image_size=8"),
        ("planted", {"num_informative": 10, "num_distractors": 7}, "at most 16"),
        ("planted", {"channels": 1, "num_classes": 1000}, "distinct patterns"),
        ("planted", {"shift": 0.1}, "detach it from its mask"),
        ("cars", {"download": True}, "Extra inputs are not permitted"),
    ],
)
def test_bad_values_are_refused(node: Callable[..., Any], name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        node(name, **values)


def test_schema_and_inspection_load_without_torch() -> None:
    code = (
        "import sys, routing_lab.data, routing_lab.data.schema, routing_lab.data.inspect\n"
        "print({'torch', 'torchvision', 'timm', 'lightning', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
