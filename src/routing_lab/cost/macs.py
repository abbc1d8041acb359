"""Multiply-accumulates of a transformer whose layers treat different numbers of tokens. Imports no torch.

Convention. The unit is one multiply-accumulate (MAC) for one image or one sequence; FLOPs in the two-per-MAC
convention, which `torch.utils.flop_counter` prints, are exactly twice these numbers. Counted are the patch embedding
convolution, the query, key, value and output projections, the products QK^T and AV, the MLP matrices and the head.
Not counted are biases, normalisation, softmax, activations, residual additions, position embeddings, token
embeddings, gather and scatter, nor the matching of tokens to merge and the sum that fuses some. Causal attention is not
halved. Routers are counted apart (`weights` in `routing_lab.axes.routers`), and so is what is computed a second time to
read statistics off a map that attention makes anyway.

One block costs, for n_q queries, n_k keys, n_v values, n_o outputs, n_m tokens in the MLP and `pairs` = n_q n_k,

    n_q D A + (n_k + n_v) D A_kv + 2 pairs A + n_o A D + n_m m D M   [+ map_pairs A]

with A = heads x head_dim, A_kv = kv_heads x head_dim, MLP width M and m MLP matrices. With A = A_kv = D, M = 4 D,
m = 2 and equal counts n this is the familiar 12 n D^2 + 2 n^2 D.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a backbone that its cost depends on.

    Args:
        width: D, width of the residual stream.
        depth: number of blocks.
        heads: query heads.
        mlp_hidden: M, width between the MLP's matrices.
        positions: patches of an image, or positions of a text.
        prefix: further tokens: class, distillation, registers.
        patch_inputs: values that one patch is embedded from, patch^2 x channels; 0 for an embedding by table.
        classes: outputs of the head; 0 without one.
        head_tokens: tokens a head is applied to: 1 for an image, 2 with a distillation head, all of a text.
        head_dim: width of one head; None: width / heads.
        kv_heads: key and value heads; None: as many as query heads.
        mlp_matrices: m, 2 for a plain MLP, 3 for a gated one (SwiGLU).

    Raises ValueError when the heads do not divide the width and `head_dim` is not given.
    """

    width: int
    depth: int
    heads: int
    mlp_hidden: int
    positions: int
    prefix: int = 1
    patch_inputs: int = 0
    classes: int = 0
    head_tokens: int = 1
    head_dim: int | None = None
    kv_heads: int | None = None
    mlp_matrices: Literal[2, 3] = 2

    def __post_init__(self) -> None:
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width = {self.width}: must be a multiple of heads = {self.heads}, or give head_dim")

    @property
    def tokens(self) -> int:
        """Number of tokens that enter the first block."""
        return self.positions + self.prefix

    @property
    def query_width(self) -> int:
        """A, width of all query heads together."""
        return self.heads * (self.width // self.heads if self.head_dim is None else self.head_dim)

    @property
    def kv_width(self) -> int:
        """A_kv, width of all key heads together, and of all value heads together."""
        return self.query_width // self.heads * (self.heads if self.kv_heads is None else self.kv_heads)


@dataclass(frozen=True)
class LayerTokens:
    """How many tokens each part of one block treats: integers for one sample, means over samples for many.

    Args:
        queries, keys, values: tokens that are projected to queries, keys, values.
        outputs: tokens that pay the output projection.
        mlp: tokens that pay the MLP.
        pairs: query-key pairs, n_q n_k. Over samples this is the mean of products, not the product of means.
        map_pairs: pairs of a map that is made for the score alone: a product each, and no value.
    """

    queries: float
    keys: float
    values: float
    outputs: float
    mlp: float
    pairs: float
    map_pairs: float = 0


@dataclass(frozen=True)
class LayerRule:
    """Which part of a block only the kept tokens pay.

    Args:
        sublayer: the routed part; None for a dense layer. `mlp` also describes a block that removes tokens between its
            attention and its MLP: `kept` then counts the tokens that remain, a fused one among them.
        project: bypassed tokens get x W_V W_O instead of attention (DTRNet), so that values and output projection are
            paid for every token.
        all_keys: kept tokens attend to every token; otherwise to the kept ones.
        map_rows: rows of a map over all entering tokens that is made for the score, before the selection: those of all
            tokens, or one.
    """

    sublayer: Literal["block", "attention", "mlp"] | None = None
    project: bool = False
    all_keys: bool = False
    map_rows: Literal["none", "one", "all"] = "none"

    def tokens(self, entering: int, kept: int) -> LayerTokens:
        """Counts for one sample of which `kept` of the `entering` tokens are kept (all of them in a dense layer)."""
        if not 0 <= kept <= entering:
            raise ValueError(f"kept = {kept}: must lie between 0 and the {entering} tokens that enter the layer")
        attending = entering if self.sublayer in (None, "mlp") else kept
        keys = entering if self.all_keys else attending
        mapped = 0 if self.map_rows == "none" else entering
        return LayerTokens(
            queries=attending + mapped,
            keys=keys + mapped,
            values=(entering if self.project else keys) + mapped,
            outputs=entering if self.project else attending,
            mlp=entering if self.sublayer in (None, "attention") else kept,
            pairs=attending * keys,
            map_pairs=mapped * {"none": 0, "one": 1, "all": entering}[self.map_rows],
        )


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates by part; `kv` is the key and value projections together, `proj` the output projection."""

    patch_embed: float
    q: float
    kv: float
    qk: float
    av: float
    proj: float
    mlp: float
    head: float

    @property
    def total(self) -> float:
        """Sum of the parts."""
        parts: list[float] = list(asdict(self).values())
        return sum(parts)

    def as_dict(self) -> dict[str, float]:
        """The parts by name, and `total`."""
        return {**asdict(self), "total": self.total}


def layer_rules(depth: int, routed: Iterable[int], rule: LayerRule) -> list[LayerRule]:
    """`rule` for the routed layers (zero-based), dense for the others."""
    chosen = set(routed)
    return [rule if layer in chosen else LayerRule() for layer in range(depth)]


def nominal_tokens(shape: ModelShape, rules: Sequence[LayerRule], kept: int | Mapping[int, int]) -> list[LayerTokens]:
    """Counts per layer when every routed layer keeps what its capacity says and no token is removed for good.

    Args:
        rules: one rule per layer.
        kept: kept tokens of every routed layer, or of each by its zero-based index.
    """
    counts = dict.fromkeys(range(len(rules)), kept) if isinstance(kept, int) else kept
    return [
        rule.tokens(shape.tokens, shape.tokens if rule.sublayer is None else counts[layer])
        for layer, rule in enumerate(rules)
    ]


def dense_macs(shape: ModelShape) -> Macs:
    """Cost of the backbone without routing."""
    return routed_macs(shape, [LayerRule().tokens(shape.tokens, shape.tokens)] * shape.depth)


def routed_macs(shape: ModelShape, layers: Sequence[LayerTokens]) -> Macs:
    """Cost with the given counts, one entry per layer; integer counts give exact integers.

    Raises ValueError when the number of entries is not the depth.
    """
    if len(layers) != shape.depth:
        raise ValueError(f"counts for {len(layers)} layers were given; the backbone has {shape.depth}")
    width, query_width, kv_width = shape.width, shape.query_width, shape.kv_width
    attended = sum(layer.pairs for layer in layers) * query_width
    return Macs(
        patch_embed=shape.positions * shape.patch_inputs * width,
        q=sum(layer.queries for layer in layers) * width * query_width,
        kv=sum(layer.keys + layer.values for layer in layers) * width * kv_width,
        qk=attended + sum(layer.map_pairs for layer in layers) * query_width,
        av=attended,
        proj=sum(layer.outputs for layer in layers) * query_width * width,
        mlp=sum(layer.mlp for layer in layers) * shape.mlp_matrices * width * shape.mlp_hidden,
        head=shape.head_tokens * shape.classes * width,
    )


def block_macs(shape: ModelShape, layers: Sequence[LayerTokens]) -> float:
    """`routed_macs` of the blocks alone, without patch embedding and head."""
    return routed_macs(replace(shape, patch_inputs=0, classes=0), layers).total


def speedup_ceiling(shape: ModelShape, rules: Sequence[LayerRule], kept: int = 0) -> float:
    """Dense over routed cost as capacities go to zero: what a placement can gain at most, at most 2 for `alternate`.

    Args:
        rules: one rule per layer.
        kept: tokens that stay in every routed layer all the same, for instance protected ones.
    """
    return dense_macs(shape).total / routed_macs(shape, nominal_tokens(shape, rules, kept)).total
