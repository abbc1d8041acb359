"""One of two processes that train the same routed model, each on its half of a batch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from tests.routing.tiny import images, routed, vit
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SHARDS = 2


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """A mean over the samples."""
    return model(inputs).square().sum(dim=1).mean()


def run(rank: int, port: int, folder: Path) -> None:
    """Writes the gradients that the processes agree on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SHARDS)
    model = DistributedDataParallel(routed(["router=linear", "scaling=multiply"], vit().train()))
    loss_of(model, images(batch=2 * SHARDS).chunk(SHARDS)[rank]).backward()
    if rank == 0:
        gradients = {name: parameter.grad for name, parameter in model.module.named_parameters()}
        torch.save(gradients, folder / "gradients.pt")
    dist.destroy_process_group()
