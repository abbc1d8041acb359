"""The tokens that travel through the layers, and which of them a layer keeps.

Shape legend: B batch, N tokens, K kept tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from routing_lab.routing.cache import KVCache
from routing_lab.routing.work import Count


@dataclass(frozen=True)
class Positioned:
    """Tokens as one side of an attention, queries or keys.

    Args:
        x: [B, N, D], the residual stream.
        position: [B, N] int64, see `Tokens.position`; None: 0 .. N - 1.
        valid: [B, N] bool, False at padding; None: all are tokens.
        bias: [B, N] added to the logits of each as a key; None: zero.
        segment: [B, N] int64, see `Tokens.segment`; None: one for all.
    """

    x: Tensor
    position: Tensor | None = None
    valid: Tensor | None = None
    bias: Tensor | None = None
    segment: Tensor | None = None

    def positions(self) -> Tensor:
        """[B, N] int64: the position of each token."""
        if self.position is not None:
            return self.position
        return torch.arange(self.x.shape[1], device=self.x.device).expand(self.x.shape[:2])

    def present(self) -> Tensor:
        """[B, N] bool: which are tokens, and not padding."""
        if self.valid is not None:
            return self.valid
        return torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)

    def take(self, selection: Selection, x: Tensor | None = None) -> Positioned:
        """The tokens that a selection keeps, at their own positions; x [B, K, D]: their residual stream, if at hand."""
        if selection.keeps_all:
            return self if x is None else replace(self, x=x)
        return Positioned(
            selection.gather(self.x) if x is None else x,
            selection.index if self.position is None else selection.gather(self.position),
            selection.valid,
            None if self.bias is None else selection.gather(self.bias),
            None if self.segment is None else selection.gather(self.segment),
        )


@dataclass(frozen=True)
class Layout:
    """How the tokens of a batch of texts lie.

    Args:
        valid: [B, N] bool, False at padding, on the left or on the right; None: all are tokens.
        segment: [B, N] int64, the document of each token, ascending; None: one for all.
        cache: what was read before, and is to be added to; None: nothing.
    """

    valid: Tensor | None = None
    segment: Tensor | None = None
    cache: KVCache | None = None

    def position(self, like: Tensor) -> Tensor | None:
        """[B, N] int64: how many tokens come before each of `like` [B, N], -1 at padding; None: token n stands at n."""
        if self.valid is None and self.cache is None:
            return None
        if self.valid is None:
            position = torch.arange(like.shape[1], device=like.device).expand(like.shape)
        else:
            position = self.valid.cumsum(dim=1) - 1
        if self.cache is not None and self.cache.seen is not None:
            position = position + self.cache.seen.unsqueeze(1)
        return position if self.valid is None else position.masked_fill(~self.valid, -1)


@dataclass
class Tokens:
    """The token sequence at one depth, and what travels with it.

    Args:
        x: [B, N, D], the residual stream.
        num_prefix: how many of the first tokens are not patches (class, distillation, registers).
        origin: [B, N] int64, the patch each token came from, -1 for a token without one; None while no token has been
            removed, when token n came from patch n - num_prefix.
        source: [B, N0] int64, for each token that entered the first layer the position of the token that now stands for
            it, -1 where none does; None while no token has been removed.
        position: [B, N] int64, where each token stood among those that the backbone embedded, which rotary angles,
            relative positions and causal masks go by; -1 for a token without a place of its own; None while token n
            stands at n.
        segment: [B, N] int64, the document of each token: tokens of different documents do not see each other; None:
            one for all.
        size: [B, N], how many of the first tokens each token stands for; None while each stands for itself.
        valid: [B, N] bool, False at padding, where samples have different numbers of tokens; None when all have N.
        proportional: attention weighs keys by `size` (ToMe).
        mass: [B, N], what is left of each token's halting mass of one (A-ViT); None: all of it.
        eligible: the tokens that later layers may still keep; None: all.
        policy: [B, N], 1 at tokens that are still there, 0 at those that a relaxed decision took out, with its
            gradient; None: no decision is relaxed.
        halted: what tokens have given to the model's output so far; None while none has.
    """

    x: Tensor
    num_prefix: int = 0
    origin: Tensor | None = None
    source: Tensor | None = None
    position: Tensor | None = None
    segment: Tensor | None = None
    size: Tensor | None = None
    valid: Tensor | None = None
    proportional: bool = False
    mass: Tensor | None = None
    eligible: Selection | None = None
    policy: Tensor | None = None
    halted: Halted | None = None

    @classmethod
    def placed(cls, x: Tensor, num_prefix: int, position: Tensor | None) -> Tokens:
        """The tokens that enter the first block; position [B, N] int64: those left of all that were embedded."""
        origin = None if position is None else (position - num_prefix).clamp_min(-1)
        return cls(x, num_prefix=num_prefix, origin=origin, position=position)

    def with_x(self, x: Tensor) -> Tokens:
        """The same tokens with another residual stream."""
        return replace(self, x=x)

    def origins(self) -> Tensor:
        """[B, N] int64: the patch each token came from, -1 where it has none."""
        if self.origin is not None:
            return self.origin
        batch, tokens, _ = self.x.shape
        index = torch.arange(-self.num_prefix, tokens - self.num_prefix, device=self.x.device)
        return index.clamp_min(-1).expand(batch, tokens)

    def positions(self) -> Tensor:
        """[B, N] int64: where each token stood among those that the backbone embedded, -1 for none."""
        if self.position is not None:
            return self.position
        return torch.arange(self.x.shape[1], device=self.x.device).expand(self.x.shape[:2])

    def side(self) -> Positioned:
        """The tokens as queries and keys of an attention."""
        return Positioned(self.x, self.position, self.valid, self.key_bias(), self.segment)

    def sources(self) -> Tensor:
        """[B, N0] int64: for each token that entered the first layer the token that now stands for it, -1 where none
        does.
        """
        if self.source is not None:
            return self.source
        batch, tokens, _ = self.x.shape
        return torch.arange(tokens, device=self.x.device).expand(batch, tokens)

    def counts(self) -> Tensor:
        """[B] int64: how many tokens each sample has."""
        if self.valid is not None:
            return self.valid.sum(dim=1)
        return torch.full(self.x.shape[:1], self.x.shape[1], device=self.x.device)

    def number(self) -> Count:
        """`counts`, or the one number where all samples have as many."""
        return self.x.shape[1] if self.valid is None else self.counts()

    def sizes(self) -> Tensor:
        """[B, N]: how many of the first tokens each token stands for."""
        return self.x.new_ones(self.x.shape[:2]) if self.size is None else self.size

    def key_bias(self) -> Tensor | None:
        """[B, N] added to the logits of each key: log size under proportional attention, else None."""
        return self.size.log() if self.proportional and self.size is not None else None

    def masses(self) -> Tensor:
        """[B, N]: what is left of each token's halting mass."""
        if self.mass is not None:
            return self.mass
        return torch.ones(self.x.shape[:2], dtype=_at_least_float(self.x), device=self.x.device)

    def first_tokens(self) -> Tensor:
        """[B, N] int64: of the tokens that entered the first layer the last that each token stands for, -1 for none."""
        batch, tokens, _ = self.x.shape
        source = self.sources()
        slot = torch.where(source < 0, tokens, source)
        first = torch.arange(source.shape[1], device=self.x.device).expand_as(source)
        empty = torch.full((batch, tokens + 1), -1, device=self.x.device)
        return empty.scatter_reduce(1, slot, first, "amax")[:, :tokens]

    def restored(self) -> Tokens:
        """The tokens that the head reads: where some have halted, all that entered the first layer, else these ones."""
        if self.halted is None:
            return self
        x = self.halted.give(self, self.halted.left_of(self)).x
        return Tokens(x, num_prefix=self.num_prefix)

    def keep(self, selection: Selection) -> Tokens:
        """The tokens that a selection keeps; the others are gone."""
        if selection.keeps_all:
            return self
        valid = selection.valid
        position = torch.full(self.x.shape[:2], -1, device=self.x.device)
        kept = torch.arange(selection.index.shape[1], device=self.x.device).expand_as(selection.index)
        position = position.scatter(1, selection.index, _padded(kept, valid, -1))
        return Tokens(
            x=selection.gather(self.x),
            num_prefix=self.num_prefix,
            origin=_padded(selection.gather(self.origins()), valid, -1),
            source=self.follow(position),
            position=_padded(selection.index if self.position is None else selection.gather(self.position), valid, -1),
            segment=None if self.segment is None else selection.gather(self.segment),
            size=None if self.size is None else _padded(selection.gather(self.size), valid, 1),
            valid=valid,
            proportional=self.proportional,
            mass=None if self.mass is None else selection.gather(self.mass),
            halted=self.halted,
        )

    def append(self, x: Tensor, size: Tensor, stands_for: Tensor, valid: Tensor | None = None) -> Tokens:
        """With one token more at the end.

        Args:
            x: [B, D], the new token. size: [B], how many of the first tokens it stands for.
            stands_for: [B, N0] bool, which of them.
            valid: [B] bool, False in samples that get no new token; None: all do.
        """
        last = self.x.shape[1]
        present = valid
        if valid is None and self.valid is not None:
            present = torch.ones_like(self.valid[:, 0])
        return Tokens(
            x=torch.cat([self.x, x.unsqueeze(1).to(self.x.dtype)], dim=1),
            num_prefix=self.num_prefix,
            origin=nn.functional.pad(self.origins(), (0, 1), value=-1),
            source=self.sources().masked_fill(stands_for, last),
            position=nn.functional.pad(self.positions(), (0, 1), value=-1),
            size=torch.cat([self.sizes(), size.unsqueeze(1).to(self.x.dtype)], dim=1),
            valid=None if present is None else torch.cat([self.side().present(), present.unsqueeze(1)], dim=1),
            proportional=self.proportional,
            mass=None if self.mass is None else nn.functional.pad(self.mass, (0, 1), value=1.0),
            halted=self.halted,
        )

    def follow(self, position: Tensor) -> Tensor:
        """[B, N0] `sources` after token n moved to position[:, n] (-1: it is gone); position [B, N] int64."""
        source = self.sources()
        moved = position.gather(1, source.clamp_min(0))
        return torch.where(source < 0, source, moved)


def samples_of(value: Any, rows: Tensor) -> Any:
    """The samples `rows` [R], which may repeat, of a tensor [B, ...], or of a dataclass of such tensors."""
    if isinstance(value, Tensor):
        return value[rows]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    taken = {part.name: samples_of(getattr(value, part.name), rows) for part in fields(value)}
    return replace(value, **taken)


@dataclass
class Halted:
    """What the tokens that entered the first layer have given to the model's output: a weighted mean of their states.

    Args:
        x: [B, N0, D], the weighted sum so far.
        left: [B, N0], the weight that each has not given yet.
    """

    x: Tensor
    left: Tensor

    @classmethod
    def nothing(cls, tokens: Tokens) -> Halted:
        """Nothing given yet, by any of the tokens that entered the first layer."""
        batch, first = tokens.sources().shape
        zeros = tokens.x.new_zeros(batch, first, tokens.x.shape[2])
        return cls(zeros, torch.ones(batch, first, dtype=_at_least_float(zeros), device=zeros.device))

    def left_of(self, tokens: Tokens) -> Tensor:
        """[B, N] the weight that each token has not given yet; zero for tokens that stand for none of the first."""
        first = tokens.first_tokens()
        return self.left.gather(1, first.clamp_min(0)) * (first >= 0)

    def give(self, tokens: Tokens, weight: Tensor) -> Halted:
        """After each token has given its state with `weight` [B, N]."""
        first = tokens.first_tokens()
        weight = weight * (first >= 0)
        slot = first.clamp_min(0)
        given = tokens.x * weight.unsqueeze(-1).to(tokens.x.dtype)
        return Halted(
            self.x.scatter_add(1, slot.unsqueeze(-1).expand_as(given), given.to(self.x.dtype)),
            self.left.scatter_add(1, slot, -weight.to(self.left.dtype)),
        )


@dataclass
class Selection:
    """Which tokens a layer keeps, as indices into the tokens that entered it.

    Args:
        index: [B, K] int64, ascending in every row. Where a row keeps fewer than K tokens, its rest is padding: other
            tokens of the sample, none of them twice.
        valid: [B, K] bool, False at padding; None when every sample keeps K tokens.
        num_tokens: N.
        relaxed: [B, N] the decision as 0 or 1, with the gradient of a relaxed one; None: there is no relaxed decision.
    """

    index: Tensor
    valid: Tensor | None
    num_tokens: int
    relaxed: Tensor | None = None

    def __post_init__(self) -> None:
        self._found: Tensor | None = None

    @classmethod
    def from_mask(cls, mask: Tensor, most: int | None = None) -> Selection:
        """The selection that keeps the True positions of `mask` [B, N]; counts may differ between samples.

        A traced graph is not to depend on counts: there K is what no sample exceeds.

        Args:
            most: no sample keeps more; None: as far as is known all N may be kept.
        """
        tokens = mask.shape[1]
        counts = mask.sum(dim=1)
        smallest, largest = 0, tokens if most is None else min(most, tokens)
        if not torch.compiler.is_compiling() and len(mask):
            smallest, largest = torch.stack(counts.aminmax()).tolist()
        index = torch.sort((~mask).to(torch.uint8), dim=1, stable=True).indices[:, :largest]
        if smallest == largest:
            return cls(index, None, tokens)
        return cls(index, torch.arange(largest, device=mask.device) < counts.unsqueeze(1), tokens)

    @classmethod
    def first(cls, batch: int, kept: int, tokens: int, device: torch.device) -> Selection:
        """The selection that keeps the first `kept` of `tokens` tokens in every sample."""
        return cls(torch.arange(kept, device=device).expand(batch, kept), None, tokens)

    def including(self, mask: Tensor) -> Selection:
        """This selection and the True positions of `mask` [B, N], whose relaxed decision is one."""
        relaxed = None if self.relaxed is None else self.relaxed.masked_fill(mask, 1)
        return replace(Selection.from_mask(self.mask() | mask), relaxed=relaxed)

    def within(self, outer: Selection) -> Selection:
        """This selection of the tokens that `outer` keeps, as indices into the tokens that `outer` chose from."""
        relaxed = self.relaxed
        if relaxed is not None:
            relaxed = outer.scatter(relaxed.new_zeros(relaxed.shape[0], outer.num_tokens), relaxed)
        return Selection(outer.index.gather(1, self.index), self.valid, outer.num_tokens, relaxed)

    def times(self, policy: Tensor) -> Selection:
        """This selection with its decision as 0 or 1, relaxed or not, multiplied by an earlier one [B, N]."""
        decision = self.mask().to(policy.dtype) if self.relaxed is None else self.relaxed
        return replace(self, relaxed=decision * policy)

    @property
    def keeps_all(self) -> bool:
        """Whether every token of every sample is kept."""
        return self.valid is None and self.index.shape[1] == self.num_tokens

    def counts(self) -> Tensor:
        """[B] int64: how many tokens each sample keeps."""
        if self.valid is not None:
            return self.valid.sum(dim=1)
        return torch.full((self.index.shape[0],), self.index.shape[1], device=self.index.device)

    def mask(self) -> Tensor:
        """[B, N] bool, True at kept tokens."""
        batch = self.index.shape[0]
        mask = torch.zeros(batch, self.num_tokens, dtype=torch.bool, device=self.index.device)
        if self.valid is None:
            return mask.scatter(1, self.index, True)
        return mask.scatter(1, self.index, self.valid)

    def padded_index(self) -> Tensor:
        """[B, K] int64 as `index`, with -1 at padding."""
        return self.index if self.valid is None else self.index.masked_fill(~self.valid, -1)

    def complement(self) -> Selection:
        """The selection of the tokens that this one does not keep."""
        if self.valid is not None:
            return Selection.from_mask(~self.mask())
        order = torch.sort(self.mask().to(torch.uint8), dim=1, stable=True).indices
        return Selection(order[:, : self.num_tokens - self.index.shape[1]], None, self.num_tokens)

    def gather(self, x: Tensor) -> Tensor:
        """[B, K, ...] the kept rows of x [B, N, ...]; at padding those of some other token of the sample."""
        if self.keeps_all:
            return x
        if x.dim() == 2:
            return x.gather(1, self.index)
        return x.flatten(0, 1).index_select(0, self._rows()).unflatten(0, self.index.shape)

    def scatter(self, x: Tensor, update: Tensor) -> Tensor:
        """x [B, N, ...] with the kept rows replaced by update [B, K, ...]; every other row is x's own, bit by bit."""
        if self.keeps_all:
            return update
        # Under autocast a branch may come back in lower precision than the residual stream.
        rows, values = x.flatten(0, 1), update.flatten(0, 1).to(x.dtype)
        if self.valid is not None:
            chosen = self.valid.view(-1, *[1] * (rows.dim() - 1))
            values = torch.where(chosen, values, rows.index_select(0, self._rows()))
        return rows.index_copy(0, self._rows(), values).unflatten(0, x.shape[:2])

    def _rows(self) -> Tensor:
        """[B K] int64: the kept rows of tokens [B N, ...], found once for all that is gathered and scattered."""
        if self._found is None:
            batch = self.index.shape[0]
            if batch == 1:
                self._found = self.index.flatten()
            else:
                start = torch.arange(batch, device=self.index.device).unsqueeze(1) * self.num_tokens
                self._found = (self.index + start).flatten()
        return self._found


def _at_least_float(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def unmerge(x: Tensor, source: Tensor | None, missing: Tensor | None = None) -> Tensor:
    """[B, N0, D] the tokens x [B, N, D] put back where the tokens that they stand for entered the first layer.

    Args:
        x: one row per token that is left.
        source: [B, N0] int64, `Tokens.source` or `LayerTrace.source`; None: nothing was removed.
        missing: [B, N0, D], what tokens get for which none stands; None: zeros. Calling it layer by layer with its own
            last result gives every token the last state it had.
    """
    if source is None:
        return x
    rows = x.gather(1, source.clamp_min(0).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    present = (source >= 0).unsqueeze(-1)
    return rows * present if missing is None else torch.where(present, rows, missing)


def _padded(x: Tensor, valid: Tensor | None, value: int) -> Tensor:
    return x if valid is None else x.masked_fill(~valid, value)
