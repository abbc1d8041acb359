"""Nodes of the configuration and small image folders for the data tests."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from pydantic import TypeAdapter

from routing_lab.data.schema import DataConfig

CONF = Path(__file__).parents[2] / "conf" / "data"
BACKBONE = {"image_size": 8, "channels": 3, "patch_size": 2, "context": 64, "vocab_size": 256}
TRAIN = {
    "batch_size": 64,
    "eval_batch_size": 100,
    "accumulate": 1,
    "augment": "none",
    "erasing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "mixup_prob": 1.0,
}


@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """A validated `data` node: `conf/data/<name>.yaml` with values put over it."""

    def build(name: str, **values: Any) -> Any:
        composed = OmegaConf.create({"backbone": BACKBONE, "paths": {"data": "data"}})
        composed.data = OmegaConf.load(CONF / f"{name}.yaml")
        composed.data = OmegaConf.merge(composed.data, values)
        return TypeAdapter(DataConfig).validate_python(OmegaConf.to_container(composed, resolve=True)["data"])

    return build


@pytest.fixture(scope="session")
def recipe() -> Callable[..., Any]:
    """A `train` node with what the data module reads."""
    return lambda **values: SimpleNamespace(**{**TRAIN, **values})


@pytest.fixture(scope="session")
def runtime() -> Callable[..., Any]:
    """A `runtime` node."""
    return lambda workers=0: SimpleNamespace(workers=workers)


@pytest.fixture
def write_images(tmp_path: Path) -> Callable[..., Path]:
    """Write one random image for every name below a folder of `tmp_path`, or into a ZIP archive if it ends so."""

    def write(names: list[str], target: str = "images", size: tuple[int, int] = (12, 10), seed: int = 0) -> Path:
        generator = np.random.default_rng(seed)
        folder = tmp_path / (target.removesuffix(".zip") + "-files" if target.endswith(".zip") else target)
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
        if not target.endswith(".zip"):
            return folder
        with zipfile.ZipFile(tmp_path / target, "w") as archive:
            for path in sorted(folder.rglob("*.*")):
                archive.write(path, path.relative_to(folder).as_posix())
        return tmp_path / target

    return write
