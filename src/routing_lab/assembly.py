"""From a configuration to a model: `route` for a model in hand, `build_model` for the training command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from routing_lab.axes.base import locate
from routing_lab.axes.facts import SUBLAYERS, BackboneFacts
from routing_lab.backbones import adapt
from routing_lab.config import Config, ConfigError, load
from routing_lab.config.backbones import BackboneConfig
from routing_lab.config.refusals import backbone_allows
from routing_lab.routing.backbone import Backbone
from routing_lab.routing.base import LayerSpec
from routing_lab.routing.layer import RoutedLayer
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.routers import Corruption
from routing_lab.streams import stream_seed


def route(model: nn.Module, overrides: Sequence[str] = ()) -> RoutedModel:
    """A routed version of `model`, which keeps its parameters and stays reachable as `.backbone`.

    Args:
        model: one of the kinds that `routing_lab.backbones.FAMILIES` lists.
        overrides: what the command line takes, from the same groups: `["method=amod", "capacity.fraction=0.5"]`. Keys
            that describe training, data or another backbone have no effect here.

    Raises:
        ConfigError: with all problems of the overrides at once.
        ValueError: for a model of another kind.
    """
    backbone = adapt(model)
    config = load(overrides, facts=backbone_facts(backbone)).config
    return attach(backbone, config)


def build_model(config: Config, num_classes: int, pretrained: bool = False) -> RoutedModel:
    """The model a checked configuration describes, with a head for `num_classes`.

    The backbone is initialised from the "initialisation" stream of `config.seed` and each router from a stream of its
    own, so that all arms of a seed share the backbone's weights. The global generator is left as it was.

    Args:
        pretrained: load published weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, "initialisation"))
        module = build_backbone(config.backbone, num_classes, pretrained)
    return attach(adapt(module), config)


def build_backbone(config: BackboneConfig, num_classes: int, pretrained: bool = False) -> nn.Module:
    """The dense model of a backbone configuration, initialised from torch's global generator.

    Args:
        num_classes: outputs of the head; 0: no head. A decoder ignores it.
        pretrained: load published weights.

    Raises:
        ValueError: see the builders in `routing_lab.backbones.build`.
    """
    module: nn.Module = locate(config.builder)(num_classes=num_classes, pretrained=pretrained, **config.arguments)
    return module


def attach(backbone: Backbone, config: Config) -> RoutedModel:
    """The axes of `config` on an adapted backbone."""
    router, placement = config.router, config.placement
    lacking = list(backbone_allows(placement, router, backbone_facts(backbone)))
    if lacking:
        raise ConfigError(lacking)
    router_class = locate(router.class_path)
    routed: list[int] = []
    if router_class.traits.routes:
        routed = placement.routed(backbone.depth)
    layers: dict[int, RoutedLayer] = {}
    for rank, layer in enumerate(routed):
        spec = LayerSpec(
            width=backbone.width,
            heads=backbone.heads,
            layer=layer,
            prefix=backbone.prefix,
            rank=rank,
            num_routed=len(routed),
            seed=stream_seed(config.seed, "routing"),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(config.seed, "initialisation", layer + 1))
            layers[layer] = _routed_layer(config, spec)

    sources: dict[int, int] = {}
    request = layers[routed[0]].router.request() if routed else None
    if request is not None:
        request = replace(request, detach=router.detach)
        sources = placement.sources(routed, backbone.depth)
    model = RoutedModel(
        backbone,
        layers,
        sources,
        request,
        fill=placement.attention_fill,
        active=placement.active,
        random_attention=stream_seed(config.seed, "routing", 1) if router.attention == "random" else None,
    )
    model.set_attention(config.runtime.attention)
    parameter = next(backbone.module.parameters())
    model.layers.to(device=parameter.device, dtype=parameter.dtype)
    return model.train(backbone.module.training)


def backbone_facts(backbone: Backbone) -> BackboneFacts:
    """What the configuration checks need to know of an adapted model."""
    blocks = [backbone.block(layer) for layer in range(backbone.depth)]
    return BackboneFacts(
        backbone.depth,
        backbone.width,
        backbone.heads,
        backbone.prefix,
        causal=backbone.causal,
        sublayers=tuple(part for part in SUBLAYERS if all(part in block.sublayers for block in blocks)),
        one_map=all(block.one_map for block in blocks),
    )


def _routed_layer(config: Config, spec: LayerSpec) -> RoutedLayer:
    router = locate(config.router.class_path)(spec, **config.router.options)
    capacity_class = locate(config.capacity.class_path)
    # Token choice follows the router's own decision, which the router states and the capacity does not know.
    choice: dict[str, Any] = {"boundary": router.traits.boundary} if config.capacity.needs_choice else {}
    if capacity_class.traits.relaxes:
        choice["scale"] = router.traits.scale
    capacity = capacity_class(spec, **config.capacity.options, **choice)
    bypass_class = locate(config.bypass.class_path)
    corruption = None
    if config.router.corrupt != "none":
        corruption = Corruption(
            spec,
            kind=config.router.corrupt,
            phase=config.router.corrupt_phase,
            strength=config.router.corrupt_strength,
            token=config.router.corrupt_token,
            num_protected=capacity.num_protected,
        )
    return RoutedLayer(
        router,
        capacity,
        locate(config.scaling.class_path)(**config.scaling.options),
        bypass_class(*([spec] if bypass_class.traits.placed else []), **config.bypass.options),
        locate(config.visibility.class_path)(**config.visibility.options),
        sublayer=config.placement.sublayer,
        corruption=corruption,
    )
