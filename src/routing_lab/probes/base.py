"""What a probe is: a measurement on a trained or outside model, example by example, and its summary.

A probe of your own is a dataclass with the two methods below, in any module that Python can import, and a YAML file of
the config group `probe` that names it under `_target_`; its fields are its keys.

Shape legend: B examples, N0 tokens that entered the model, P patches, L layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from routing_lab.data.text import IGNORED
from routing_lab.probes.metrics import mean_interval
from routing_lab.routing import measures
from routing_lab.routing.backbone import LayerWatch
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.tokens import Layout
from routing_lab.routing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arrays = Mapping[str, np.ndarray]
"""Name -> array whose first axis runs over the examples."""


@dataclass(frozen=True)
class Examples:
    """A batch of examples as they are evaluated.

    Args:
        inputs: [B, ...], what the model takes.
        targets: [B] classes, or [B, N] token ids, -100 where none counts.
        index: [B] int64, numbers of the examples in their data set; routing noise belongs to them.
        masks: [B, P] bool, the patches that decide the class; None where the data set does not know.
        segments: [B, N] int64, the document of each token of a text; None: one for all, or no text.
    """

    inputs: Tensor
    targets: Tensor
    index: Tensor
    masks: Tensor | None = None
    segments: Tensor | None = None

    @property
    def layout(self) -> Layout | None:
        """How the tokens of texts lie."""
        return None if self.segments is None else Layout(segment=self.segments)


@dataclass(frozen=True)
class Finding:
    """One number of a probe, with its interval over examples.

    Args:
        name: what it is.
        value, low, high: the mean and the ends of its 95 % interval; NaN where there is none.
        n: examples (or groups of them) that it is made of.
        layer, head: zero-based, where it belongs to one.
        chance: what it would be without any knowledge; None where that is not known.
    """

    name: str
    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    layer: int | None = None
    head: int | None = None
    chance: float | None = None

    @property
    def key(self) -> str:
        """Name with place: `auc/layer3/head1`."""
        place = [f"layer{self.layer}"] if self.layer is not None else []
        return "/".join([self.name, *place, *([f"head{self.head}"] if self.head is not None else [])])

    @classmethod
    def mean(cls, name: str, values: Any, **place: Any) -> Finding:
        """The mean over examples with its t interval."""
        value, low, high, n = mean_interval(np.asarray(values, dtype=np.float64))
        return cls(name, value, low, high, n, **place)

    @classmethod
    def share(cls, name: str, values: Any, **place: Any) -> Finding:
        """The mean over examples of shares, whose t interval ends at 0 and 1."""
        found = cls.mean(name, values, **place)
        return replace(found, low=float(np.clip(found.low, 0, 1)), high=float(np.clip(found.high, 0, 1)))


class Probe(ABC):
    """A measurement: `measure` sees one batch of examples at a time, `summarise` all that was measured.

    What is measured of one example must not depend on the others of its batch: an interrupted probe goes on with the
    batches that are missing.
    """

    @abstractmethod
    def measure(self, model: RoutedModel, examples: Examples) -> dict[str, np.ndarray]:
        """Arrays with one row an example. The model is in evaluation mode, without gradients."""

    @abstractmethod
    def summarise(self, arrays: Arrays) -> list[Finding]:
        """The probe's numbers, from the rows of all examples."""

    def figure(self, arrays: Arrays) -> Figure | None:
        """A figure of them; None: there is none."""
        return None

    def compare(self, first: Arrays, second: Arrays) -> Finding | None:
        """What two runs have in common, from their rows of the same examples; None: nothing is compared."""
        return None


def traced(model: RoutedModel, examples: Examples, watch: LayerWatch | None = None) -> tuple[Any, Trace]:
    """The model's output and trace for a batch; watch: is shown every attention map."""
    tokens, context = model.embed(examples.inputs, examples.layout)
    state = model.run_state(tokens, sample_ids=examples.index, informative=examples.masks)
    left, trace = model.forward_tokens(tokens, context, state, watch=watch)
    return model.head(left), trace


def over_targets(values: Tensor, targets: Tensor) -> Tensor:
    """[B] values of examples from those of their targets: the same [B], or the mean of [B, N] over those that count."""
    if targets.dim() == 1:
        return values
    counted = targets != IGNORED
    return (values * counted).sum(dim=1) / counted.sum(dim=1).clamp_min(1)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """[B] cross-entropy of each example in nats: of its class, or the mean over the tokens of a text that count.

    Args:
        output: logits [B, C], or [B, N, V] of a text. targets: [B], or [B, N] with -100 where none counts.
    """
    losses = cross_entropy(output.movedim(-1, 1), targets, ignore_index=IGNORED, reduction="none")
    return over_targets(losses, targets)


def kept_patches(trace: Trace, layers: Sequence[int]) -> np.ndarray:
    """[B, layers, P] bool: the patches that each of `layers` ran."""
    return measures.kept_patches(trace, layers).transpose(0, 1).cpu().numpy()


def patch_scores(trace: Trace, layers: Sequence[int]) -> np.ndarray:
    """[B, layers, P] float64: the score of each patch where it entered a routed layer, NaN where it was gone."""
    places = measures.positions(trace)
    found = []
    for layer in layers:
        scores, position = trace[layer].scores, places[layer]
        assert scores is not None
        scored = measures.at(scores.double(), position).masked_fill(position < 0, math.nan)
        found.append(scored[:, measures.is_patch(trace)])
    return torch.stack(found, dim=1).cpu().numpy()
