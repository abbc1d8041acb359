from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import routing_lab
from routing_lab.runs.folder import RunFolder
from routing_lab.runs.records import read_predictions

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(run: Run) -> RunFolder:
    return RunFolder(run("train.ema_decay=0.5", "train.selection=best")["folder"])


def test_an_opened_run_predicts_what_its_record_holds(folder: RunFolder) -> None:
    config, model, data, record = routing_lab.open_run(folder.path)
    assert config.train.ema_decay == 0.5
    assert not model.training
    predictions = read_predictions(record)
    images, _, index = data.examples(torch.from_numpy(predictions["index"]))
    with torch.no_grad():
        logits = model(images, sample_ids=index)
    np.testing.assert_allclose(logits, predictions["logits"], rtol=1e-4, atol=1e-5)
    assert record["metrics"]["test/acc"] == (predictions["prediction"] == predictions["target"]).mean()


def test_a_folder_of_an_earlier_version_opens(folder: RunFolder) -> None:
    """One whose configuration lacks what came later."""
    config = OmegaConf.load(folder.config)
    del config["placement"]["active"]
    OmegaConf.save(config, folder.config)
    assert routing_lab.open_run(folder.path).config.placement.active == "both"


def test_weights_of_another_model_are_refused(folder: RunFolder) -> None:
    config = OmegaConf.load(folder.config)
    config.backbone.depth = 3
    OmegaConf.save(config, folder.config)
    with pytest.raises(ValueError, match=r"final.safetensors: .*Missing key"):
        routing_lab.open_run(folder.path)
    folder.final.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"final.safetensors: "):
        routing_lab.open_run(folder.path)
    folder.final.unlink()
    with pytest.raises(ValueError, match="there are no weights"):
        routing_lab.open_run(folder.path)
    folder.config.unlink()
    with pytest.raises(ValueError, match="there is no such file"):
        routing_lab.open_run(folder.path)
