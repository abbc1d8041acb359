"""Fates of the tokens that were not kept."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from routing_lab.routing import members
from routing_lab.routing.base import Block, Bypass
from routing_lab.routing.members import BypassTraits


class Skip(Bypass):
    """Identity: a bypassed token leaves the routed part bit-identical and may be kept again in a later layer."""

    traits: ClassVar[BypassTraits] = members.BYPASSES["skip"]
    identity: ClassVar[bool] = True

    def update(self, x: Tensor, block: Block) -> Tensor:
        return x.new_zeros(x.shape)


class Project(Bypass):
    """x_i + x_i W_V W_O: the linear path with the attention's own projections (DTRNet); the MLP follows for every token."""

    traits: ClassVar[BypassTraits] = members.BYPASSES["project"]

    def update(self, x: Tensor, block: Block) -> Tensor:
        return block.project(x)
