"""A block that notes what it is asked to compute, so that what a member of one's own computes with it is counted too.

Shape legend: B batch, N tokens, K queries, M keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from routing_lab.attention import AttentionStatistics, StatisticsRequest
from routing_lab.routing.backbone import Block, MapWatch
from routing_lab.routing.cache import LayerCache
from routing_lab.routing.tokens import Positioned
from routing_lab.routing.work import Count, Work


class CountedBlock(Block):
    """A block that notes in `work` what it is asked to compute; attributes besides are the block's own.

    Args:
        block: computes.
        work: is added to.
        valid: [B, K] bool, False at padding of the tokens that the block is given; None: they are not padded.
        key_valid: [B, M] bool, the same for keys that are other tokens.
        repeats: `work` is that of repetitions itself.
    """

    def __init__(
        self,
        block: Block,
        work: Work,
        valid: Tensor | None = None,
        key_valid: Tensor | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        self.block = block
        self.work = work
        self.valid = valid
        self.key_valid = key_valid
        self.repeats = repeats
        self.query_key_shape = block.query_key_shape
        self.projects_together = block.projects_together
        self.recomputed = block.recomputed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)

    def of(self, valid: Tensor | None, key_valid: Tensor | None = None) -> CountedBlock:
        """The same block, about to be given other tokens."""
        return CountedBlock(self.block, self.work, valid, key_valid, repeats=self.repeats)

    def repeating(self) -> CountedBlock:
        """The same block, about to compute what it computes anyway."""
        return CountedBlock(self.block, self._besides(), self.valid, self.key_valid, repeats=True)

    def dense(self, tokens: Positioned, context: Any) -> Tensor:
        number = _number(tokens.x, self.valid)
        self.work.add_attention(number, number)
        self.work.mlp += number
        return self.block.dense(tokens, context)

    def attend(
        self,
        queries: Positioned,
        context: Any,
        keys: Positioned | None = None,
        *,
        visible: Tensor | None = None,
        stays: Tensor | None = None,
    ) -> Tensor:
        number, key_number = self._numbers(queries, keys)
        self.work.add_attention(number, key_number)
        if keys is not None:
            self._note_rest(keys_and_values_of=number, queries_of=key_number)
        return self.block.attend(queries, context, keys, visible=visible, stays=stays)

    def attend_with_statistics(
        self, tokens: Positioned, context: Any, request: StatisticsRequest, *, projection: Tensor | None = None
    ) -> tuple[Tensor, AttentionStatistics]:
        number = _number(tokens.x, self.valid)
        self.work.add_attention(number, number)
        besides = self._besides()
        apart = replace(request, received=False) if self.attends_in_one_pass(request, projection) else request
        besides.map_pairs += _map_pairs(apart, number, number)
        if projection is not None:
            self._note_random(tokens, number, number)
        return self.block.attend_with_statistics(tokens, context, request, projection=projection)

    def attends_in_one_pass(self, request: StatisticsRequest, projection: Tensor | None = None) -> bool:
        return self.block.attends_in_one_pass(request, projection)

    def statistics(
        self,
        queries: Positioned,
        context: Any,
        request: StatisticsRequest,
        keys: Positioned | None = None,
        *,
        projection: Tensor | None = None,
    ) -> AttentionStatistics:
        number, key_number = self._numbers(queries, keys)
        self.work.add_projections(number, key_number)
        self.work.map_pairs += _map_pairs(request, number, key_number)
        if keys is not None:
            self._note_rest(keys_and_values_of=number, queries_of=key_number)
        if projection is not None:
            self._note_random(queries, number, key_number)
        return self.block.statistics(queries, context, request, keys, projection=projection)

    def mlp(self, x: Tensor) -> Tensor:
        self.work.mlp += _number(x, self.valid)
        return self.block.mlp(x)

    def project(self, x: Tensor) -> Tensor:
        number = _number(x, self.valid)
        self.work.values += number
        self.work.outputs += number
        if self.projects_together:
            self._besides().queries += number
            self._besides().keys += number
        return self.block.project(x)

    def called(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        return self.block.called(x, compute)

    def weighing(self, policy: Tensor) -> CountedBlock:
        return CountedBlock(self.block.weighing(policy), self.work, self.valid, self.key_valid, repeats=self.repeats)

    def caching(self, cache: LayerCache) -> CountedBlock:
        return CountedBlock(self.block.caching(cache), self.work, self.valid, self.key_valid)

    def hiding(self, mask: Tensor) -> CountedBlock:
        return CountedBlock(self.block.hiding(mask), self.work, self.valid, self.key_valid, repeats=self.repeats)

    def watched(self, watch: MapWatch, part: int = 0) -> CountedBlock:
        twin = self.of(self.valid, self.key_valid)
        twin.block = self.block.watched(watch, part)
        return twin

    def _besides(self) -> Work:
        return self.work if self.repeats else self.work.repeat()

    def _note_rest(self, *, keys_and_values_of: Count, queries_of: Count) -> None:
        """What one module projects besides where queries are of some tokens and keys and values of others."""
        if self.projects_together:
            self._besides().add_projections(queries_of, keys_and_values_of)

    def _note_random(self, queries: Positioned, number: Count, key_number: Count) -> None:
        """Random queries and keys, and the trained projections of unit vectors that they take their spread from."""
        besides = self._besides()
        besides.queries += number
        besides.keys += key_number
        batch, _, width = queries.x.shape
        besides.add_projections((width + 1) / batch, (width + 1) / batch)

    def _numbers(self, queries: Positioned, keys: Positioned | None) -> tuple[Count, Count]:
        number = _number(queries.x, self.valid)
        return number, number if keys is None else _number(keys.x, self.key_valid)


def _number(x: Tensor, valid: Tensor | None) -> Count:
    """Tokens of each sample among x [B, N, D]; padding is known for tokens as many as in `valid`."""
    return x.shape[1] if valid is None or valid.shape[1] != x.shape[1] else valid.sum(dim=1)


def _map_pairs(request: StatisticsRequest, queries: Count, keys: Count) -> Count:
    rows = (queries if request.received else 0) + (1 if request.class_row else 0)
    return rows * keys
