"""What a layer computed, in numbers of tokens: the layer notes it while it runs, and the cost model only multiplies.

Shape legend: B batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Count = float | Tensor
"""Tokens of a sample: one number for all samples of a batch, or [B] int64. What a batch shares is divided among it."""


@dataclass
class Work:
    """What one layer computed for each sample. Padding is not counted.

    Args:
        queries, keys, values: tokens that were projected to queries, keys, values.
        outputs: tokens that went through the output projection.
        mlp: tokens that went through the MLP.
        pairs: query-key pairs of attention, each a product of the two and a weighted value.
        map_pairs: query-key pairs of a map that was made for the score alone: a product, and no value.
        router: tokens that the router read.
        repeated: what was computed besides and a method does without: a second time, for statistics of a map that
            attention makes anyway, the random queries and keys of a control, or the rest of what one module projects;
            None: nothing.
    """

    queries: Count = 0
    keys: Count = 0
    values: Count = 0
    outputs: Count = 0
    mlp: Count = 0
    pairs: Count = 0
    map_pairs: Count = 0
    router: Count = 0
    repeated: Work | None = None

    def repeat(self) -> Work:
        """`repeated`, to be added to."""
        self.repeated = self.repeated or Work()
        return self.repeated

    def add_projections(self, queries: Count, keys: Count) -> None:
        """So many tokens projected to queries, and so many to keys and values."""
        self.queries += queries
        self.keys += keys
        self.values += keys

    def add_attention(self, queries: Count, keys: Count) -> None:
        """Attention of so many queries to so many keys, from projection to projection."""
        self.add_projections(queries, keys)
        self.outputs += queries
        self.pairs += queries * keys
