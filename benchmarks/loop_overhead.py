"""What Lightning's loop costs: time of a training step inside it over that of a bare loop around the same model.

    python benchmarks/loop_overhead.py
    python benchmarks/loop_overhead.py --epochs 10 --repeats 6 router=linear

Both loops train on the same batches, made beforehand, with the same optimiser, schedule and clipping, on one thread.
Processor time is measured, which other programs on the machine disturb less than elapsed time, and repeats of the two
alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch

from routing_lab.assembly import build_model
from routing_lab.config import Config, load
from routing_lab.data import build_data
from routing_lab.tasks.base import build_optimizer, build_scheduler
from routing_lab.tasks.classification import Classification, classification_loss
from routing_lab.training.callbacks import silence_lightning


class Batches:
    """The same batches in every epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Stopwatch(pl.Callback):
    """Processor seconds of each training epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_epoch_start(self, *arguments: Any) -> None:
        self._start = time.process_time()

    def on_train_epoch_end(self, *arguments: Any) -> None:
        self.seconds.append(time.process_time() - self._start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="epochs of one repeat; the first is not counted")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    silence_lightning()
    config = load(["router=amod", "scaling=multiply", "runtime.accelerator=cpu", *options.overrides]).config
    batches = Batches(list(build_data(config.data, config.train, config.seed, config.runtime).train_dataloader()))
    bare: list[float] = []
    lightning: list[float] = []
    for _ in range(options.repeats):
        bare += bare_loop(config, batches, options.epochs)[1:]
        lightning += lightning_loop(config, batches, options.epochs)[1:]
    for name, seconds in (("bare", bare), ("lightning", lightning)):
        steps = [1000 * value / len(batches) for value in seconds]
        print(f"{name:<10} {statistics.median(steps):.2f} ms a step (median), {min(steps):.2f} ms (fastest epoch)")
    print(f"overhead   {100 * (statistics.median(lightning) / statistics.median(bare) - 1):.1f} % (median)")


def bare_loop(config: Config, batches: Batches, epochs: int) -> list[float]:
    """Processor seconds of each epoch of a plain loop."""
    train = config.train
    model = build_model(config, 10).train()
    optimizer = build_optimizer(model, train)
    scheduler = build_scheduler(optimizer, train, len(batches))
    total, step, seconds = epochs * len(batches), 0, []
    for _ in range(epochs):
        start, sums = time.process_time(), torch.zeros(3)
        for images, target, index in batches:
            logits = model(images, progress=step / total, step=step, sample_ids=index)
            loss = classification_loss(logits, target, train.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            if train.clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad)
            optimizer.step()
            step += 1
            scheduler.step_update(num_updates=step)
            with torch.no_grad():
                correct = (logits.argmax(dim=1) == target).sum().float()
                sums = sums + torch.stack([loss * len(target), correct, torch.full_like(loss, len(target))])
        seconds.append(time.process_time() - start)
    return seconds


def lightning_loop(config: Config, batches: Batches, epochs: int) -> list[float]:
    """Processor seconds of each epoch of the package's task under Lightning."""
    stopwatch = Stopwatch()
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[stopwatch],
        max_epochs=epochs,
        gradient_clip_val=config.train.clip_grad,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Classification(build_model(config, 10), config.train, config.seed, 10), train_dataloaders=batches)
    return stopwatch.seconds


if __name__ == "__main__":
    main()
