"""Models small enough to test every combination of: width 32, depth 4, 16 patches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from routing_lab.assembly import attach, backbone_facts
from routing_lab.axes.facts import BackboneFacts
from routing_lab.backbones import adapt
from routing_lab.config import Config
from routing_lab.config.compose import Composer
from routing_lab.config.load import check_overrides
from routing_lab.routing.base import LayerSpec, RunState
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.noise import NoiseSource

WIDTH, DEPTH, HEADS, PATCHES, CLASSES, VOCABULARY = 32, 4, 4, 16, 5, 23
VIT = {
    "img_size": 8,
    "patch_size": 2,
    "embed_dim": WIDTH,
    "depth": DEPTH,
    "num_heads": HEADS,
    "num_classes": CLASSES,
    "mlp_ratio": 2.0,
}


def vit(seed: int = 0, kind: type[VisionTransformer] = VisionTransformer, **options: Any) -> VisionTransformer:
    """A vision transformer in evaluation mode, of whose parameters none is zero or one as it was initialised."""
    torch.manual_seed(seed)
    return stirred(kind(**{**VIT, **options}))


def llama(seed: int = 0) -> nn.Module:
    """A Llama with grouped queries, in evaluation mode."""
    return decoder("Llama", seed)


def decoder(kind: str, seed: int = 0, **options: Any) -> nn.Module:
    """A decoder with grouped queries, in evaluation mode; kind: Llama, Mistral, Qwen2 or Qwen3."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=32,
        head_dim=WIDTH // HEADS,
        **options,
    )
    return stirred(getattr(transformers, f"{kind}ForCausalLM")(config))


def stirred(model: nn.Module) -> Any:
    """The model with noise on every parameter, so that no layer is the identity or zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    return model.eval()


def images(batch: int = 3, size: int = 8, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, 3, size, size], normal."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def token_ids(batch: int = 3, tokens: int = 12, seed: int = 1) -> Tensor:
    """[B, N] ids of the tiny decoder."""
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def route(module: nn.Module, overrides: Sequence[str]) -> RoutedModel:
    """`routing_lab.route`, composing equal overrides for equal backbones once."""
    backbone = adapt(module)
    return attach(backbone, configured(tuple(overrides), backbone_facts(backbone)))


@cache
def configured(overrides: tuple[str, ...], facts: BackboneFacts) -> Config:
    """The checked configuration of a model's routing."""
    return check_overrides(_Composer(), overrides, facts).config


class _Composer(Composer):
    """Composes equal overrides once, whatever the backbone is that they are then checked for."""

    def compose(self, overrides: Sequence[str]) -> Any:
        return _composed(tuple(overrides))


@cache
def _composed(overrides: tuple[str, ...]) -> Any:
    return Composer().compose(overrides)


def routed(overrides: Sequence[str], module: nn.Module | None = None, double: bool = False) -> RoutedModel:
    """A routed tiny model in evaluation mode; learned routers get weights that matter."""
    model = route(vit() if module is None else module, overrides)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.double() if double else model


def spec(**options: Any) -> LayerSpec:
    """Constants of a routed layer of the tiny vision transformer."""
    return LayerSpec(**{"width": WIDTH, "heads": HEADS, "layer": 1, "prefix": ("class",), **options})


def run_state(
    batch: int = 3, progress: float = 1.0, step: int = 0, training: bool = False, initial_tokens: int = PATCHES + 1
) -> RunState:
    """What a layer is told about the run."""
    return RunState(progress, NoiseSource(step if training else -1, torch.arange(batch)), training, initial_tokens)
