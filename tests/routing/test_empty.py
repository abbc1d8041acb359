"""An empty batch gives empty outputs, whatever routes."""

from __future__ import annotations

import pytest
import torch

from routing_lab.assembly import build_model
from routing_lab.config import Composer, load

METHODS = [name for name in Composer().members("method") if name != "isoflop_depth"]
"""Every method but the one that this backbone has no depth for."""


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_gives_empty_outputs(method: str) -> None:
    config = load([f"method={method}", "backbone.width=16", "backbone.heads=2"]).config
    model = build_model(config, 10)
    for training in (True, False):
        assert model.train(training)(torch.empty(0, config.backbone.channels, 8, 8)).shape == (0, 10)
