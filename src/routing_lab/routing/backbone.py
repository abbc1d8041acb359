"""What routing needs of a model: its tokens, its blocks and its head. Families of models are adapted in `backbones`.

Shape legend: B batch, N tokens, K queries, M keys, H query heads, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from routing_lab.attention import AttentionMap, AttentionStatistics, StatisticsRequest
from routing_lab.axes.facts import SUBLAYERS, SubLayer
from routing_lab.routing.cache import LayerCache
from routing_lab.routing.tokens import Layout, Positioned, Tokens

MapWatch = Callable[[int, AttentionMap, Positioned, Positioned], None]
"""Is shown an attention map: the number of the attention among those of its block, the map, its queries and its keys.

A differential attention shows both its maps, as twice the heads; what a policy weighs is shown without it.
"""


LayerWatch = Callable[[int, int, AttentionMap, Positioned, Positioned], None]
"""A `MapWatch` that is told the zero-based layer first."""


class Backbone(ABC):
    """What routing needs of a model: its tokens, its blocks and its head. An adapter, without parameters of its own.

    It keeps nothing but the model: whatever is changed in that has its effect.

    Args:
        module: the adapted model.

    Attributes:
        accepts: the class of models that the adapter is for.
        causal: a token attends to itself and earlier tokens only.
    """

    accepts: ClassVar[type[nn.Module]]
    causal: bool

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, self.accepts):
            raise ValueError(
                f"backbone = {type(module).__name__}: this model routes a {self.accepts.__name__}; route another kind "
                "of model anew"
            )
        self.module: Any = module  # parts of outside models are typed as Tensor | Module

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def width(self) -> int:
        """D, width of the residual stream."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """H, number of query heads."""

    @property
    @abstractmethod
    def prefix(self) -> tuple[str, ...]:
        """Kinds of the prefix tokens in order, for instance ("class", "registers")."""

    def grid(self, inputs: Tensor) -> tuple[int, int] | None:
        """Rows and columns of the patches that these inputs are made into; None: tokens have no grid."""
        return None

    @abstractmethod
    def example(self, batch: int) -> Tensor:
        """Random inputs for so many examples, of the shape that the model was built for."""

    @abstractmethod
    def embed(self, inputs: Tensor, layout: Layout | None = None) -> tuple[Tokens, Any]:
        """The tokens [B, N, D] that enter the first block, and what all blocks share in this forward.

        layout: padding and documents; None: neither. Raises ValueError in a family that knows none.
        """

    @abstractmethod
    def block(self, layer: int) -> Block:
        """The block with this zero-based index, as it is now.

        Raises ValueError for a kind of block that routing is not defined for, naming it.
        """

    @abstractmethod
    def norm(self, x: Tensor) -> Tensor:
        """The norm between the last block and the head, of tokens [B, N, D]."""

    @abstractmethod
    def classify(self, normed: Tensor, valid: Tensor | None = None, pre_logits: bool = False) -> Any:
        """The model's output from normed tokens [B, N, D].

        Args:
            valid: [B, N], False or 0 at tokens that an average leaves out.
            pre_logits: what enters the last linear module instead.
        """

    def head(self, x: Tensor, valid: Tensor | None = None) -> Any:
        """The model's output from the tokens [B, N, D] that left the last block; valid: see `classify`."""
        return self.classify(self.norm(x), valid)


class Block(ABC):
    """What a backbone adapter offers for one pre-norm block, h = x + a(x), y = h + m(h).

    The adapter's block is a view of the backbone's own modules, made for one forward: it owns no parameters, and what
    is changed in the backbone has its effect.

    Attributes:
        query_key_shape: shape (query width + key width, D) of the joint query and key projection.
        projects_together: queries, keys and values come from one module, so that whoever wants one computes all.
        recomputed: the backward pass recomputes the block (activation checkpointing).
        sublayers: what of the block can be routed by itself.
        one_map: attention is one map a head, each row a distribution over keys, of which scores can be made.
    """

    query_key_shape: tuple[int, int]
    sublayers: tuple[SubLayer, ...] = SUBLAYERS
    one_map: bool = True
    projects_together: bool = False
    recomputed: bool = False

    @abstractmethod
    def dense(self, tokens: Positioned, context: Any) -> Tensor:
        """The untouched block's output [B, N, D]."""

    @abstractmethod
    def attend(
        self,
        queries: Positioned,
        context: Any,
        keys: Positioned | None = None,
        *,
        visible: Tensor | None = None,
        stays: Tensor | None = None,
    ) -> Tensor:
        """The attention branch a, without the residual.

        Args:
            queries: [B, K, D] tokens that attend.
            context: what the backbone's blocks share in this forward.
            keys: [B, M, D] tokens attended to; None: the queries themselves.
            visible: [B, K, M] bool, True where a query may attend to a valid key; None: to all.
            stays: [B, M] bool, the keys that tokens of later calls may attend to, see `caching`; None: all.
        """

    @abstractmethod
    def attend_with_statistics(
        self, tokens: Positioned, context: Any, request: StatisticsRequest, *, projection: Tensor | None = None
    ) -> tuple[Tensor, AttentionStatistics]:
        """`attend(tokens, context)` and the requested statistics of its map.

        The output is `attend`'s to rounding, since one pass computes both; with `request.exact` it is so bit by bit.

        projection: `query_key_shape`, standard normal; if given, the statistics are those of the map whose queries and
            keys are projected by it, scaled to the spread of the trained weights (`router.attention=random`).
        """

    def attends_in_one_pass(self, request: StatisticsRequest, projection: Tensor | None = None) -> bool:
        """Whether `attend_with_statistics` reads columns off the map that attention makes, and makes none besides."""
        return False

    @abstractmethod
    def statistics(
        self,
        queries: Positioned,
        context: Any,
        request: StatisticsRequest,
        keys: Positioned | None = None,
        *,
        projection: Tensor | None = None,
    ) -> AttentionStatistics:
        """Statistics of the map of queries [B, K, D] over keys [B, M, D]; None: over the queries themselves."""

    @abstractmethod
    def mlp(self, x: Tensor) -> Tensor:
        """The MLP branch m, without the residual."""

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """x W_V W_O (DTRNet's linear path): the attention branch of a token that attends to itself alone."""

    @abstractmethod
    def called(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """compute(x), what leaves the layer for the tokens x that enter it, with the forward hooks of the block."""

    @abstractmethod
    def weighing(self, policy: Tensor) -> Block:
        """This block with an attention that weighs every key by policy [B, N], see `policy_softmax`."""

    @abstractmethod
    def caching(self, cache: LayerCache) -> Block:
        """This block with an attention that also sees the keys of earlier calls, and adds its own to them."""

    @abstractmethod
    def hiding(self, mask: Tensor) -> Block:
        """This block with norm(x m) m as the input of either branch; mask m [B, N] bool, False at hidden tokens."""

    @abstractmethod
    def watched(self, watch: MapWatch, part: int = 0) -> Block:
        """This block, which shows `watch` every map that it attends by, unless keys come from a cache.

        part: the number of its first attention.
        """
