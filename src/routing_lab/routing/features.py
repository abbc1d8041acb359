"""What a routed encoder says about every position, also those whose tokens were removed on the way.

Shape legend: B batch, N0 tokens that entered the first layer, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from routing_lab.routing.tokens import Tokens, unmerge


@dataclass(frozen=True)
class Features:
    """The last state at every position, after the backbone's final norm.

    Args:
        x: [B, N0, D]; a removed token has the last state it had, a merged one that of the token it joined.
        num_prefix: how many of the first tokens are not patches.
        grid: rows and columns of the patches; None: tokens have no grid.
    """

    x: Tensor
    num_prefix: int
    grid: tuple[int, int] | None

    @property
    def prefix(self) -> Tensor:
        """[B, number of prefix tokens, D]."""
        return self.x[:, : self.num_prefix]

    def map(self) -> Tensor:
        """[B, D, rows, columns], the patches where they are in the image."""
        return as_map(self.x, self.num_prefix, self.grid)


def as_map(x: Tensor, num_prefix: int, grid: tuple[int, int] | None) -> Tensor:
    """[B, D, rows, columns] the patches of tokens [B, N0, D]. Raises ValueError where they fill no grid."""
    patches = x[:, num_prefix:]
    if grid is None or patches.shape[1] != grid[0] * grid[1]:
        raise ValueError(
            f"{patches.shape[1]} tokens fill no grid {'' if grid is None else f'of {grid[0]} x {grid[1]}'}"
        )
    return patches.transpose(1, 2).unflatten(2, grid).contiguous()


def at_every_position(states: Sequence[Tokens]) -> list[Tensor]:
    """[B, N0, D] after each layer, from the tokens that enter the first and those that leave each."""
    x = states[0].x
    found = []
    for tokens in states[1:]:
        x = unmerge(tokens.x, tokens.source, x)
        found.append(x)
    return found


def layers_of(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    """Zero-based layers that `forward_intermediates` is asked for."""
    if indices is None or isinstance(indices, int):
        wanted = list(range(depth - (depth if indices is None else indices), depth))
    else:
        wanted = [depth + index if index < 0 else index for index in indices]
    if not wanted or not all(0 <= layer < depth for layer in wanted):
        raise ValueError(f"indices = {indices}: the backbone has layers 0 to {depth - 1}")
    return wanted
