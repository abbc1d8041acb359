"""Which keys a kept token attends to."""

from __future__ import annotations

from typing import ClassVar

from routing_lab.axes.facts import VisibilityTraits
from routing_lab.axes.visibilities import AllConfig, KeptConfig


class Visibility:
    """Which keys a kept token attends to, as a fact: the routed layer acts on it."""

    traits: ClassVar[VisibilityTraits]


class Kept(Visibility):
    """Kept tokens attend to kept tokens only (Mixture-of-Depths; DTRNet Eq. 6): bypassed tokens cost nothing."""

    traits: ClassVar[VisibilityTraits] = KeptConfig.facts


class All(Visibility):
    """Kept tokens attend to every token (DTRNet Eq. 4): keys and values are computed for all."""

    traits: ClassVar[VisibilityTraits] = AllConfig.facts
