"""What routing did, layer by layer: read by losses, measures, probes and costs.

Shape legend: B batch, N tokens that entered the layer, K kept tokens, N0 tokens that entered the first layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from routing_lab.routing.tokens import Tokens
from routing_lab.routing.work import Work


@dataclass
class LayerTrace:
    """What routing did in one layer.

    Args:
        scores: [B, N] float32, aligned with the tokens that entered the layer; None in a dense layer.
        kept: [B, K] int64, indices of kept tokens among those that entered, ascending, -1 at padding.
        counts: [B] int64, number of kept tokens.
        tokens: number of tokens that leave the layer.
        origin: [B, N] int64, patch that each entering token came from, -1 where it has none.
        gate: [B, K] multiplier of the kept tokens' update, None where nothing was multiplied.
        source: [B, N0] int64, for each token that entered the first layer the position, among those that leave this
            layer, of the token that stands for it, -1 where none does; None while no token has been removed.
        size: [B, tokens] how many of the first tokens each leaving token stands for; None while each stands for itself.
        halting: [B, tokens] the part of its halting mass that each leaving token spent here; None without halting.
        valid: [B, N] bool, False at padding among the entering tokens; None without padding.
        predicted: [B, N] log odds of keeping, what a router's auxiliary predictor says; None without one.
        logits: [B, N, E] what a learned router made its scores of, see `Router.read`.
        relaxed: [B, N] the decision as 0 or 1 with a gradient, where the capacity or the bypass makes one in training.
        fraction: the fraction of tokens that the capacity aims at; None where it has none.
        remaining: [B] int64, number of tokens that leave the layer; None in a layer that removes none.
        work: what the layer computed.
    """

    scores: Tensor | None
    kept: Tensor
    counts: Tensor
    tokens: int
    origin: Tensor
    gate: Tensor | None = None
    source: Tensor | None = None
    size: Tensor | None = None
    halting: Tensor | None = None
    valid: Tensor | None = None
    predicted: Tensor | None = None
    logits: Tensor | None = None
    relaxed: Tensor | None = None
    fraction: float | None = None
    remaining: Tensor | None = None
    work: Work = field(default_factory=Work)

    @classmethod
    def dense(cls, entered: Tokens, left: Tokens, work: Work) -> LayerTrace:
        """Of a layer that is not routed: every token is kept, and none is scored."""
        batch, tokens = entered.x.shape[:2]
        everything = torch.arange(tokens, device=entered.x.device).expand(batch, tokens)
        counts = torch.full((batch,), tokens, device=entered.x.device)
        if entered.valid is not None:
            everything, counts = everything.masked_fill(~entered.valid, -1), entered.valid.sum(dim=1)
        return cls(
            None,
            everything,
            counts,
            left.x.shape[1],
            entered.origins(),
            source=left.source,
            size=left.size,
            valid=entered.valid,
            work=work,
        )

    @property
    def entering(self) -> Tensor:
        """[B] int64: number of tokens that entered the layer."""
        if self.valid is not None:
            return self.valid.sum(dim=1)
        return torch.full_like(self.counts, self.origin.shape[1])

    @property
    def treated(self) -> Tensor:
        """[B] int64: number of tokens that the routed part computes: those kept, or where tokens are removed those
        left.
        """
        return self.counts if self.remaining is None else self.remaining

    def present(self) -> Tensor:
        """[B, N] bool: which of the entering tokens are none of padding."""
        return torch.ones_like(self.origin, dtype=torch.bool) if self.valid is None else self.valid

    def patches(self) -> Tensor:
        """[B, N] bool: which of the entering tokens are patches (or words), and neither prefix nor padding."""
        return (self.origin >= 0) & self.present()

    def mask(self) -> Tensor:
        """[B, N] bool: which of the tokens that entered the layer were kept."""
        batch, tokens = self.origin.shape
        mask = torch.zeros(batch, tokens + 1, dtype=torch.bool, device=self.kept.device)
        return mask.scatter(1, self.kept.masked_fill(self.kept < 0, tokens), True)[:, :tokens]


@dataclass
class Trace:
    """What routing did in one forward: `trace[l]` is layer l's part, zero-based."""

    layers: list[LayerTrace] = field(default_factory=list)

    def __getitem__(self, layer: int) -> LayerTrace:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)
