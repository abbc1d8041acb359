"""Language modelling: the next token of every token, and what is measured of it per window.

Shape legend: B windows of a batch, N tokens of a window, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from routing_lab.backbones.decoder import stretched
from routing_lab.cost.measure import decoder_shape
from routing_lab.data.layout import DataProblem
from routing_lab.data.text import IGNORED
from routing_lab.data.text.module import build_text
from routing_lab.tasks.base import Task, Tested

if TYPE_CHECKING:
    from routing_lab.config import Config
    from routing_lab.config.backbones import Rope
    from routing_lab.cost.macs import LayerTokens, ModelShape
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

    def __init__(self, *args: Any, eval_lengths: Sequence[int] = (), eval_rope: Rope = "plain", **common: Any) -> None:
        """Arguments as for `Task`, and the options of `config.schema.LanguageOptions`."""
        super().__init__(*args, **common)
        self.eval_lengths = tuple(eval_lengths)
        self.eval_rope = eval_rope

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
        for length in config.task.options.get("eval_lengths", ()):
            data.at_length(length)  # refused now, not after training
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
            **self.told(batch.indices),
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
        alone = losses.sum(dim=1) / counted.sum(dim=1).clamp_min(1) if self.auxiliary.follow_task else None
        added, terms = self.auxiliary(trace[0], self.progress, alone)
        return loss + added, totals, terms

    def examples(self, batch: TextBatch) -> tuple[dict[str, Tensor], Any]:
        where = {"segments": batch.segments, "sample_ids": batch.indices, **self.told(batch.indices)}
        logits, trace = self.evaluated(batch.ids, return_trace=True, **where)
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

    def efficiency(self, macs: Mapping[str, Any], shape: ModelShape, layers: Sequence[LayerTokens]) -> dict[str, float]:
        """Of a window, once it has been read.

        `attended_fraction`: tokens that attend over all tokens, mean over the routed layers; 1 without any. `kv_bytes`:
        keys and values that the next token will see, and `kv_fraction` of the dense model's.
        """
        routed: list[int] = list(self.routing.layers)
        attended = [min(1.0, layers[layer].queries / shape.tokens) for layer in routed]
        keys = sum(layer.keys for layer in layers)
        element = next(self.model.parameters()).element_size()
        return super().efficiency(macs, shape, layers) | {
            "attended_fraction": sum(attended) / len(attended) if attended else 1.0,
            "kv_bytes": 2 * shape.kv_width * element * keys,
            "kv_fraction": keys / (shape.depth * shape.tokens),
        }

    def further_tests(
        self, config: Config, data: Any, tested: Tested, saved: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The test split in windows of other lengths, under keys that end in `@<length>`.

        `test/attended_drift` is the attended fraction at the longest of these less that at the training length.
        """
        metrics: dict[str, float] = {}
        costs: dict[str, float] = {}
        backbone: Any = self.model.get_submodule("backbone")
        for length in self.eval_lengths:
            with stretched(backbone, self.eval_rope, max(1.0, length / data.context)):
                found, then = tested(data.at_length(length), decoder_shape(backbone.config, length))
            metrics |= {f"test/{name}@{length}": value for name, value in found.items()}
            costs |= {f"{name}@{length}": value for name, value in then.items()}
        if self.eval_lengths:
            longest = f"attended_fraction@{max(self.eval_lengths)}"
            metrics["test/attended_drift"] = costs[longest] - saved["attended_fraction"]
        return metrics, costs


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
