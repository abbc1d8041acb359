"""Language modelling: the next token of every token, and what is measured of it per window.

Shape legend: B windows of a batch, N tokens of a window, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from routing_lab.cost.measure import decoder_shape
from routing_lab.data.layout import DataProblem
from routing_lab.data.text.induction import IGNORED
from routing_lab.data.text.module import build_text
from routing_lab.tasks.base import Task

if TYPE_CHECKING:
    from routing_lab.config import Config
    from routing_lab.cost.macs import ModelShape
    from routing_lab.data.text.windows import TextBatch


class Language(Task):
    """Trains a routed decoder, called as `model(ids, segments=, progress=, step=, sample_ids=)` for logits [B, N, V].

    Every metric is a mean over the tokens that are predicted, so that windows of any number of them add up. Bits per
    byte divides by the bytes of text that these stand for, which makes encodings comparable.

    Kept of every test window: `index`, and over its predicted tokens `tokens`, how many there are, `bytes` of text that
    they stand for, `loss`, the sum of their cross-entropies in nats, and `correct`, how many were the most likely ones.
    """

    quantities = ("loss", "ppl", "bits_per_byte", "acc")
    selects = "ppl"
    unit = "tokens"

    @classmethod
    def build_data(cls, config: Config) -> Any:
        data = build_text(config.data, config.train, config.seed)
        known = getattr(config.backbone, "vocab_size", data.vocab_size)
        if data.vocab_size > known:
            raise DataProblem(
                "data.tokenizer",
                getattr(config.data, "tokenizer", "byte"),
                f"has {data.vocab_size} tokens, and backbone.vocab_size={known}; expected at least as many there",
            )
        return data

    @classmethod
    def outputs(cls, data: Any) -> int:
        return int(data.vocab_size)

    @classmethod
    def data_section(cls, config: Config, data: Any) -> dict[str, Any]:
        return {
            "name": config.data.name,
            "vocab_size": data.vocab_size,
            "context": data.context,
            "sizes": data.sizes,
            "fingerprint": data.fingerprint,
        }

    def objective(self, batch: TextBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        asked = {"return_trace": True} if self.auxiliary.names else {}
        found = self.model(
            batch.ids,
            segments=batch.segments,
            progress=self.progress,
            step=self.global_step,
            sample_ids=batch.indices,
            **asked,
        )
        logits, *trace = found if asked else (found,)
        smoothing = self.train_config.label_smoothing
        losses = token_losses(logits, batch.targets, smoothing)
        counted = batch.targets != IGNORED
        loss = losses.sum() / counted.sum().clamp_min(1)
        plain = losses if smoothing == 0 else token_losses(logits, batch.targets)
        totals = self.totals(_arrays(batch, plain.detach(), logits))
        if not trace:
            return loss, totals, {}
        added, terms = self.auxiliary(trace[0], self.progress)
        return loss + added, totals, terms

    def examples(self, batch: TextBatch) -> tuple[dict[str, Tensor], Any]:
        logits, trace = self.evaluated(batch.ids, segments=batch.segments, return_trace=True, sample_ids=batch.indices)
        return _arrays(batch, token_losses(logits, batch.targets), logits), trace

    def totals(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "examples": arrays["tokens"].sum(),
            "bytes": arrays["bytes"].sum(),
            "nats": arrays["loss"].double().sum() if arrays["loss"].device.type != "mps" else arrays["loss"].sum(),
            "correct": arrays["correct"].sum(),
        }

    def metrics_of(self, totals: Mapping[str, float]) -> dict[str, float]:
        tokens, text = max(totals["examples"], 1), max(totals["bytes"], 1)
        loss = totals["nats"] / tokens
        return {
            "loss": loss,
            "ppl": math.exp(min(loss, LARGEST_EXPONENT)),
            "bits_per_byte": totals["nats"] / math.log(2) / text,
            "acc": totals["correct"] / tokens,
        }

    def cost_shape(self, data: Any) -> ModelShape:
        return decoder_shape(self.model.get_submodule("backbone").config, data.context)


LARGEST_EXPONENT = 700.0
"""Cross-entropies above it, of a model that has diverged, have a perplexity that no double holds."""


def token_losses(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """[B, N] cross-entropy of logits [B, N, V] in nats, in float32; zero where the target [B, N] does not count."""
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    ).view(targets.shape)


def _arrays(batch: TextBatch, losses: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """What is kept of every window of a batch."""
    counted = batch.targets != IGNORED
    with torch.no_grad():
        return {
            "index": batch.indices,
            "tokens": counted.sum(dim=1),
            "bytes": batch.num_bytes,
            "loss": losses.sum(dim=1),
            "correct": ((logits.argmax(dim=-1) == batch.targets) & counted).sum(dim=1),
        }
