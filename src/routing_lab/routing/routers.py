"""Score sources. A score is one number per token; a higher one is kept first.

Shape legend: B batch, N tokens, H heads, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from routing_lab.attention import StatisticsRequest
from routing_lab.axes.facts import RouterTraits
from routing_lab.axes.routers import (
    AttentionMedADRouterConfig,
    AttentionReceivedRouterConfig,
    AttentionVarianceRouterConfig,
    ClassAttentionRouterConfig,
    ConstantRouterConfig,
    DenseRouterConfig,
    HaltingRouterConfig,
    HeadReduction,
    LinearRouterConfig,
    MixRouterConfig,
    MLPRouterConfig,
    OracleRouterConfig,
    PredictorRouterConfig,
    RandomRouterConfig,
    SubspaceRouterConfig,
    ValueAttentionRouterConfig,
)
from routing_lab.routing.base import LayerSpec, Router, RouterInput, TwoWayRouter
from routing_lab.routing.tokens import Tokens


class DenseRouter(Router):
    """No routing: every layer is the backbone's own. It is never asked for a score."""

    traits: ClassVar[RouterTraits] = DenseRouterConfig.facts

    def score(self, inputs: RouterInput) -> Tensor:
        return torch.ones(inputs.tokens.x.shape[:2], device=inputs.tokens.x.device)


class LinearRouter(Router):
    """r_i = w^T x_i (+ b): the router of Mixture-of-Depths (Raposo et al. 2024, Eq. 1) on the residual stream.

    Args:
        bias: add a learned bias (one more parameter).
        init_std: standard deviation of the initial weights.
        normalize_input: apply a parameter-free layer norm to x first.
        auxiliary: a second projection, with a bias, of the token without its gradient, predicts whether the token will
            be kept, and chooses in evaluation (the second remedy of section 3.5); `losses=bce_auxiliary` teaches it.
    """

    traits: ClassVar[RouterTraits] = LinearRouterConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        bias: bool = False,
        init_std: float = 0.02,
        normalize_input: bool = False,
        auxiliary: bool = False,
    ) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.randn(1, spec.width) * init_std)
        self.bias = nn.Parameter(torch.zeros(1)) if bias else None
        self.normalize_input = normalize_input
        self.auxiliary = nn.Linear(spec.width, 1) if auxiliary else None

    def predicted(self, inputs: RouterInput) -> Tensor | None:
        if self.auxiliary is None:
            return None
        x = _router_input(inputs.tokens.x.detach(), self.auxiliary.weight, self.normalize_input)
        return _linear(x, self.auxiliary.weight, self.auxiliary.bias).squeeze(-1)

    def score(self, inputs: RouterInput) -> Tensor:
        x = _router_input(inputs.tokens.x, self.weight, self.normalize_input)
        return _linear(x, self.weight, self.bias).squeeze(-1)


class MLPRouter(TwoWayRouter):
    """p_i = softmax(W_2 SiLU(W_1 x_i + b_1) + b_2)_0: the two-way router of DTRNet (Eq. 1), attend or bypass.

    Args:
        hidden: hidden width; None: half the width of the residual stream.
        normalize_input: apply a parameter-free layer norm to x first.
        norm: before the activation, `rms`: a learned root-mean-square norm (D-LLM), or `none`.
        init_bias: initial values of b_2, of keeping first; None: drawn as torch does.
    """

    traits: ClassVar[RouterTraits] = MLPRouterConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        hidden: int | None = None,
        normalize_input: bool = False,
        norm: Literal["none", "rms"] = "none",
        init_bias: Sequence[float] | None = None,
    ) -> None:
        super().__init__(spec)
        hidden = hidden or spec.width // 2
        self.fc1 = nn.Linear(spec.width, hidden)
        self.fc2 = nn.Linear(hidden, 2)
        self.norm = nn.RMSNorm(hidden, eps=1e-5) if norm == "rms" else None
        self.normalize_input = normalize_input
        if init_bias is not None:
            with torch.no_grad():
                self.fc2.bias.copy_(torch.tensor(list(init_bias)))

    def logits(self, inputs: RouterInput) -> Tensor:
        x = _router_input(inputs.tokens.x, self.fc1.weight, self.normalize_input)
        hidden = _linear(x, self.fc1.weight, self.fc1.bias)
        if self.norm is not None:
            weight = self.norm.weight.to(hidden.dtype)
            hidden = nn.functional.rms_norm(hidden, self.norm.normalized_shape, weight, self.norm.eps)
        return _linear(nn.functional.silu(hidden), self.fc2.weight, self.fc2.bias)


class PredictorRouter(TwoWayRouter):
    """log p_i of keeping, from the token and the mean of all that are still there (DynamicViT, Rao et al. 2021).

        z = GELU(W_in LN(x));  z = [first half of z_i, mean over patches j of the second half of z_j]
        log p = log softmax(W_3 GELU(W_2 GELU(W_1 z)))_0

    The mean is weighed by the decision of the layers before. The score is a logarithm.

    Args:
        init_std: standard deviation of the initial weights (truncated normal); biases start at zero.
    """

    traits: ClassVar[RouterTraits] = PredictorRouterConfig.facts

    def __init__(self, spec: LayerSpec, *, init_std: float = 0.02) -> None:
        super().__init__(spec)
        width = spec.width
        self.in_norm = nn.LayerNorm(width)
        self.in_fc = nn.Linear(width, width)
        self.out_fc1 = nn.Linear(width, width // 2)
        self.out_fc2 = nn.Linear(width // 2, width // 4)
        self.out_fc3 = nn.Linear(width // 4, 2)
        for linear in (self.in_fc, self.out_fc1, self.out_fc2, self.out_fc3):
            nn.init.trunc_normal_(linear.weight, std=init_std)
            nn.init.zeros_(linear.bias)

    def logits(self, inputs: RouterInput) -> Tensor:
        tokens = inputs.tokens
        x = _router_input(tokens.x, self.in_fc.weight, normalize=False)
        norm = self.in_norm
        x = nn.functional.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
        x = nn.functional.gelu(_linear(x, self.in_fc.weight, self.in_fc.bias))
        local, rest = x.tensor_split([x.shape[-1] // 2], dim=-1)
        present = _present_patches(tokens).to(x.dtype).unsqueeze(-1)
        mean = (rest * present).sum(dim=1, keepdim=True) / present.sum(dim=1, keepdim=True).clamp_min(1)
        x = torch.cat([local, mean.expand_as(rest)], dim=-1)
        x = nn.functional.gelu(_linear(x, self.out_fc1.weight, self.out_fc1.bias))
        x = nn.functional.gelu(_linear(x, self.out_fc2.weight, self.out_fc2.bias))
        return _linear(x, self.out_fc3.weight, self.out_fc3.bias)


class AttentionReceivedRouter(Router):
    """r_i = 1 / (H N) sum_h sum_j A_h[j, i]: attention received in the source layer (A-MoD, Eq. 4). No parameters.

    Args:
        head_reduction: how heads are combined: `mean` (Eq. 4), `max`, `median` (lower), or one `head`.
        head: which head, for head_reduction=head.
        exclude_queries: token kinds whose rows do not count (`class`, `distillation`, `registers`, `prefix`, `self`).
        exclude_keys: token kinds left out as keys, the others of each row renormalised.
    """

    traits: ClassVar[RouterTraits] = AttentionReceivedRouterConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        head_reduction: HeadReduction = "mean",
        head: int | None = None,
        exclude_queries: Sequence[str] = (),
        exclude_keys: Sequence[str] = (),
    ) -> None:
        super().__init__(spec)
        self.head_reduction = head_reduction
        self.head = head
        self.exclude_queries = tuple(exclude_queries)
        self.exclude_keys = tuple(exclude_keys)

    def request(self) -> StatisticsRequest:
        return StatisticsRequest(
            received=True,
            skip_queries=_positions(self.exclude_queries, self.spec.prefix),
            skip_keys=_positions(self.exclude_keys, self.spec.prefix),
            skip_self="self" in self.exclude_queries or "self" in self.exclude_keys,
        )

    def score(self, inputs: RouterInput) -> Tensor:
        assert inputs.attention is not None
        assert inputs.attention.received is not None
        return reduce_heads(inputs.attention.received, self.head_reduction, self.head)


class ClassAttentionRouter(Router):
    """r_i = 1 / H sum_h A_h[class, i]: the class token's attention in the source layer (EViT). No parameters.

    Args:
        head_reduction: how heads are combined, as for `amod`.
        head: which head, for head_reduction=head.
    """

    traits: ClassVar[RouterTraits] = ClassAttentionRouterConfig.facts

    def __init__(self, spec: LayerSpec, *, head_reduction: HeadReduction = "mean", head: int | None = None) -> None:
        super().__init__(spec)
        self.head_reduction = head_reduction
        self.head = head

    def score(self, inputs: RouterInput) -> Tensor:
        assert inputs.attention is not None
        assert inputs.attention.class_row is not None
        return reduce_heads(inputs.attention.class_row, self.head_reduction, self.head)


class ValueAttentionRouter(ClassAttentionRouter):
    """r_i = a_i |v_i| / sum_j a_j |v_j| over patches j, a the class token's attention in the source layer (ATS).

    |v_i| is the norm of the token's value over all heads together. No parameters.

    Args:
        head_reduction, head: how the heads of a are combined, as for `amod`.
    """

    traits: ClassVar[RouterTraits] = ValueAttentionRouterConfig.facts

    def score(self, inputs: RouterInput) -> Tensor:
        assert inputs.attention is not None
        assert inputs.attention.value_norm is not None
        weight = super().score(inputs) * inputs.attention.value_norm
        patches = weight[:, inputs.tokens.num_prefix :]
        if inputs.tokens.valid is not None:
            patches = patches * inputs.tokens.valid[:, inputs.tokens.num_prefix :]
        total = patches.sum(dim=1, keepdim=True)
        return weight / torch.where(total > 0, total, 1.0)  # where no patch is left, the weights are the scores


class HaltingRouter(Router):
    """r_i = 1 - sum of h over the routed layers so far, the halting mass a token has left (A-ViT, Yin et al. 2022).

    After each routed layer a token spends h_i = sigmoid(gamma x_i[channel] - beta) of its mass, x_i being the state in
    which it leaves. No parameters: one channel of the residual stream is the gate.

    Args:
        gamma, beta: scale and shift of the gate.
        channel: coordinate of the residual stream.
    """

    traits: ClassVar[RouterTraits] = HaltingRouterConfig.facts

    def __init__(self, spec: LayerSpec, *, gamma: float = 10.0, beta: float = 30.0, channel: int = 0) -> None:
        super().__init__(spec)
        self.gamma = gamma
        self.beta = beta
        self.channel = channel

    def score(self, inputs: RouterInput) -> Tensor:
        return inputs.tokens.masses()

    def halting(self, tokens: Tokens) -> Tensor:
        gate = tokens.x[..., self.channel]
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return (self.gamma * gate - self.beta).sigmoid()


class AttentionVarianceRouter(Router):
    """Spread over heads of the attention each token gets from the class token (2507.19175, Eq. 5 and 6). No parameters.

    With a_h the attention of the query over the tokens in head h and m its mean over heads:

    Args:
        form: `squared`: 1 / H sum_h (a_h - m)^2, the population variance that Eq. 6 means; `sample`: over H - 1, which
            selects the same tokens; `absolute`: 1 / H sum_h |a_h - m|; `literal`: Eq. 6 as printed, 1 / H sum_h (a_h -
            m), which is zero for every token: exactly zero is returned instead of its rounding noise, and the selection
            is that of the capacity's tie rule.
        query: whose attention: `cls`, the class token; `gap`, the mean over patches; `all`, the mean over all tokens.
    """

    traits: ClassVar[RouterTraits] = AttentionVarianceRouterConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        form: Literal["squared", "sample", "absolute", "literal"] = "squared",
        query: Literal["cls", "gap", "all"] = "cls",
    ) -> None:
        super().__init__(spec)
        self.form = form
        self.query = query

    def request(self) -> StatisticsRequest:
        return _query_request(self.query, self.spec.prefix)

    def score(self, inputs: RouterInput) -> Tensor:
        attention = _query_attention(inputs)
        deviation = attention - attention.mean(dim=1, keepdim=True)
        if self.form == "literal":
            return torch.zeros_like(attention[:, 0])
        if self.form == "sample":
            return attention.var(dim=1, correction=1)
        return (deviation.abs() if self.form == "absolute" else deviation.square()).mean(dim=1)


class AttentionMedADRouter(Router):
    """Median absolute deviation over heads of the class token's attention (2507.19175, Eq. 7). No parameters.

    s_i = median_h |a_hi - c|, with the centre c chosen by `inner`.

    Args:
        inner: median over `heads` of each token, over `patches` of each head, or `global` over both.
        median: of an even number of values: `mid`, the mean of the middle two, or `lower`.
        query: as for `attention_variance`.
    """

    traits: ClassVar[RouterTraits] = AttentionMedADRouterConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        inner: Literal["heads", "patches", "global"] = "heads",
        median: Literal["mid", "lower"] = "mid",
        query: Literal["cls", "gap", "all"] = "cls",
    ) -> None:
        super().__init__(spec)
        self.inner = inner
        self.median = median
        self.query = query

    def request(self) -> StatisticsRequest:
        return _query_request(self.query, self.spec.prefix)

    def score(self, inputs: RouterInput) -> Tensor:
        attention = _query_attention(inputs)
        lower = self.median == "lower"
        patches = attention[..., inputs.tokens.num_prefix :]
        if self.inner == "heads":
            centre = _median(attention, 1, lower)
        elif self.inner == "patches":
            centre = _median(patches, 2, lower)
        else:
            centre = _median(patches.flatten(1), 1, lower).unsqueeze(2)
        return _median((attention - centre).abs(), 1, lower).squeeze(1)


class SubspaceRouter(Router):
    """r_i = mean of the coordinates `dims` of x_i: part of the hidden state read as a logit (Self-Routing). No
    parameters.

    Args:
        dims: coordinates of the residual stream.
    """

    traits: ClassVar[RouterTraits] = SubspaceRouterConfig.facts

    def __init__(self, spec: LayerSpec, *, dims: Sequence[int] = (0,)) -> None:
        super().__init__(spec)
        self.dims = list(dims)

    def score(self, inputs: RouterInput) -> Tensor:
        return inputs.tokens.x[..., self.dims].mean(dim=-1)


class MixRouter(AttentionReceivedRouter):
    """r_i = (1 - alpha) attention received + alpha w^T x_i: attention with a small learned correction.

    alpha = 0 is `amod` and alpha = 1 is `linear`, bit by bit.

    Args:
        alpha: weight of the learned part.
        learn_alpha: make alpha a parameter, one per layer.
        bias, init_std, normalize_input: as for `linear`.
        head_reduction, head, exclude_queries, exclude_keys: as for `amod`.
    """

    traits: ClassVar[RouterTraits] = MixRouterConfig.facts

    def __init__(
        self,
        spec: LayerSpec,
        *,
        alpha: float = 0.5,
        learn_alpha: bool = False,
        bias: bool = False,
        init_std: float = 0.02,
        normalize_input: bool = False,
        head_reduction: HeadReduction = "mean",
        head: int | None = None,
        exclude_queries: Sequence[str] = (),
        exclude_keys: Sequence[str] = (),
    ) -> None:
        super().__init__(
            spec,
            head_reduction=head_reduction,
            head=head,
            exclude_queries=exclude_queries,
            exclude_keys=exclude_keys,
        )
        self.linear = LinearRouter(spec, bias=bias, init_std=init_std, normalize_input=normalize_input)
        self.alpha: nn.Parameter | float = nn.Parameter(torch.tensor(alpha)) if learn_alpha else alpha

    def score(self, inputs: RouterInput) -> Tensor:
        attention = super().score(inputs)
        learned = self.linear.score(inputs)
        return (1 - self.alpha) * attention + self.alpha * learned


class RandomRouter(Router):
    """Scores that know nothing of the token: the control every learned score is compared with.

    Args:
        mode: `iid`, uniform noise, new at every step and for every sample (in evaluation: fixed per sample);
            `fixed`, uniform noise drawn once per layer for all samples and steps;
            `strided`, the van der Corput sequence of the position: the highest k are spread evenly over the tokens.
    """

    traits: ClassVar[RouterTraits] = RandomRouterConfig.facts

    def __init__(self, spec: LayerSpec, *, mode: Literal["iid", "fixed", "strided"] = "iid") -> None:
        super().__init__(spec)
        self.mode = mode

    def score(self, inputs: RouterInput) -> Tensor:
        tokens = inputs.tokens
        noise, spec = inputs.state.noise, self.spec
        number: int | Tensor = tokens.x.shape[1]
        if tokens.position is not None and tokens.source is None:
            number = tokens.position  # of a text that is padded or decoded
        if self.mode == "iid":
            return noise.uniform(number, spec.seed, spec.layer)
        if self.mode == "fixed":
            return noise.fixed(number, spec.seed, spec.layer)
        if isinstance(number, int):
            number = torch.arange(number, device=tokens.x.device).expand(tokens.x.shape[:2])
        return _van_der_corput(number - tokens.num_prefix)


class OracleRouter(Router):
    """r_i = 1 + u_i where token i is, or came from, one that decides the answer, u_i elsewhere: a bound, no method.

    It is told what no model can be told: a task in which it is no better than `random` cannot show that one router
    selects better tokens than another. The noise u_i in (0, 1) chooses the rest of the budget at random.
    """

    traits: ClassVar[RouterTraits] = OracleRouterConfig.facts

    def score(self, inputs: RouterInput) -> Tensor:
        informative = inputs.state.informative
        if informative is None:
            raise ValueError("router=oracle has to be told which patches decide the class: forward(informative=...)")
        origin = inputs.tokens.origins()
        noise = inputs.state.noise.uniform(origin.shape[1], self.spec.seed, self.spec.layer)
        return noise + (informative.gather(1, origin.clamp_min(0)) & (origin >= 0))


class ConstantRouter(Router):
    """The same score for every token: top-k keeps the first ones, a percentile keeps all (ties).

    Args:
        value: the score.
    """

    traits: ClassVar[RouterTraits] = ConstantRouterConfig.facts

    def __init__(self, spec: LayerSpec, *, value: float = 1.0) -> None:
        super().__init__(spec)
        self.value = value

    def score(self, inputs: RouterInput) -> Tensor:
        x = inputs.tokens.x
        return torch.full(x.shape[:2], self.value, device=x.device)


class Corruption(nn.Module):
    """Spoils the scores of any router: a falsifier that keeps the budget and everything else.

    Args:
        spec: the layer.
        kind: `shuffle` permutes the scores of the unprotected tokens within each sample (the multiset of scores is
            preserved); `sink` moves the share `strength` of the total score onto one patch; `noise` adds normal noise
            of `strength` standard deviations of the sample's scores.
        phase: when it acts: `train`, `eval` or `both`.
        strength: see kind; for `sink` in [0, 1]; for `shuffle` the share of samples that are shuffled, in [0, 1].
        token: the patch that becomes the sink, counted from 0 after the prefix tokens.
        num_protected: leading tokens that are kept whatever their score; `shuffle` leaves them in place.
    """

    def __init__(
        self,
        spec: LayerSpec,
        *,
        kind: Literal["shuffle", "sink", "noise"],
        phase: Literal["train", "eval", "both"] = "both",
        strength: float = 1.0,
        token: int = 0,
        num_protected: int = 0,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.kind = kind
        self.phase = phase
        self.strength = strength
        self.token = token
        self.num_protected = num_protected

    def forward(self, scores: Tensor, inputs: RouterInput) -> Tensor:
        """[B, N] the spoiled scores."""
        if self.phase != "both" and (self.phase == "train") != inputs.state.training:
            return scores
        noise, spec = inputs.state.noise, self.spec
        tokens = scores.shape[1]
        if self.kind == "shuffle":
            order = noise.uniform(tokens - self.num_protected, spec.seed, spec.layer, purpose=1).argsort(dim=1)
            rest = scores[:, self.num_protected :]
            shuffled = rest.gather(1, order)
            if self.strength < 1:
                chosen = noise.uniform(1, spec.seed, spec.layer, purpose=2) < self.strength
                shuffled = torch.where(chosen, shuffled, rest)
            return torch.cat([scores[:, : self.num_protected], shuffled], dim=1)
        if self.kind == "sink":
            position = inputs.tokens.num_prefix + self.token
            if position >= tokens:
                patches = tokens - inputs.tokens.num_prefix
                raise ValueError(
                    f"router.corrupt_token = {self.token}: the layer has {patches} patches, 0 to {patches - 1}"
                )
            sink = torch.zeros(tokens, dtype=scores.dtype, device=scores.device)
            sink[position] = 1
            return (1 - self.strength) * scores + self.strength * scores.sum(dim=1, keepdim=True) * sink
        spread = scores.std(dim=1, keepdim=True)
        return scores + self.strength * spread * noise.normal(tokens, spec.seed, spec.layer, purpose=3).to(scores.dtype)


def reduce_heads(statistic: Tensor, reduction: HeadReduction, head: int | None = None) -> Tensor:
    """[B, N] from a per-head statistic [B, H, N]; `median` of an even number of heads is the lower one."""
    if reduction == "mean":
        return statistic.mean(dim=1)
    if reduction == "max":
        return statistic.amax(dim=1)
    if reduction == "median":
        return statistic.median(dim=1).values
    heads = statistic.shape[1]
    if head is None or not 0 <= head < heads:
        raise ValueError(f"router.head = {head}: head_reduction=head needs one of 0 to {heads - 1}")
    return statistic[:, head]


def _router_input(x: Tensor, weight: Tensor, normalize: bool) -> Tensor:
    x = x.to(torch.promote_types(weight.dtype, torch.float32))
    return nn.functional.layer_norm(x, x.shape[-1:]) if normalize else x


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map in x's precision, which is at least float32 also in a half-precision model."""
    return nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _present_patches(tokens: Tokens) -> Tensor:
    """[B, N] 1 at patches that are there and 0 at the others, with the gradient of the decision about them."""
    present = tokens.policy
    if present is None:
        present = torch.ones(tokens.x.shape[:2], device=tokens.x.device) if tokens.valid is None else tokens.valid
    return present * (torch.arange(tokens.x.shape[1], device=tokens.x.device) >= tokens.num_prefix)


def _query_request(query: str, prefix: tuple[str, ...]) -> StatisticsRequest:
    if query == "cls":
        return StatisticsRequest(class_row=True)
    return StatisticsRequest(received=True, skip_queries=tuple(range(len(prefix))) if query == "gap" else ())


def _query_attention(inputs: RouterInput) -> Tensor:
    """[B, H, N] attention of the chosen query to every token."""
    assert inputs.attention is not None
    attention = inputs.attention.received if inputs.attention.class_row is None else inputs.attention.class_row
    assert attention is not None
    return attention


def _median(x: Tensor, dim: int, lower: bool) -> Tensor:
    """The median along a dimension, which is kept; of an even number of values the mean of the middle two, or the
    lower.
    """
    count = x.shape[dim]
    ordered = x.sort(dim=dim).values
    middle = ordered.narrow(dim, (count - 1) // 2, 1)
    return middle if lower or count % 2 else (middle + ordered.narrow(dim, count // 2, 1)) / 2


def _positions(kinds: Sequence[str], prefix: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(prefix) if kind in kinds or "prefix" in kinds)


def _van_der_corput(patch: Tensor) -> Tensor:
    """[B, N] float32: 1 - v(n) with v the base-2 radical inverse of the patch index; prefix tokens come first, at 1."""
    inverse = torch.zeros(patch.shape, device=patch.device)
    for bit in range(24):  # as many as the significand holds
        inverse = inverse + ((patch >> bit) & 1) * 2.0 ** -(bit + 1)
    return torch.where(patch < 0, 1.0, 1 - inverse)
