"""Every preset: on every kind of vision transformer, against the dense model, and as a starting point to override."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tests.routing.tiny import images, vit
from timm.models.deit import VisionTransformerDistilled

from routing_lab.assembly import attach, backbone_facts
from routing_lab.axes import AXES, OUTSIDE
from routing_lab.axes import LOSSES as SPECS
from routing_lab.backbones import adapt
from routing_lab.config import Composer, ConfigError, conf_path
from routing_lab.config.load import check_overrides
from routing_lab.config.problems import Problem
from routing_lab.routing.losses import LOSSES
from routing_lab.routing.model import RoutedModel

FILES: dict[str, Any] = {path.stem: OmegaConf.load(path) for path in sorted((conf_path() / "method").glob("*.yaml"))}
METHODS = [name for name, file in FILES.items() if "defaults" in file]
"""Presets over the axes; the others build a dense model of a given cost."""

VARIANTS: dict[str, dict[str, Any]] = {
    "class": {},
    "registers": {"reg_tokens": 2},
    "distilled": {"kind": VisionTransformerDistilled},
    "layer_scale": {"init_values": 0.5, "qk_norm": True},
    "average": {"class_token": False, "global_pool": "avg"},
}

READS_CLASS_TOKEN = ("cls_attention", "value_attention")
"""Routers of presets that cannot do without a class token."""

KEEPS_EVERYTHING: dict[str, list[str] | None] = {
    "topk": ["capacity.fraction=1.0"],
    "gumbel": ["capacity.fraction=1.0"],
    "threshold": ["router.gamma=0", "router.beta=1000"],  # nothing ever halts
    "percentile": ["capacity.fraction=1.0", "capacity.compare=ge"],
    "argmax": None,  # as many as the router likes
    "inverse_transform": None,  # as many as the points hit
    "never": None,
}
"""Capacity of a preset -> its setting that keeps everything."""


def chosen(method: str) -> dict[str, str]:
    """Axis -> the member that a preset chooses."""
    choices = {}
    for entry in FILES[method].defaults:
        for key, value in entry.items():
            axis = str(key).removeprefix("override /")
            if axis in AXES:
                choices[axis] = value
    return choices


class Remembering(Composer):
    """Composes the same overrides once."""

    @cache  # noqa: B019 - there is one, and it lives as long as the tests
    def _composed(self, overrides: tuple[str, ...]) -> tuple[DictConfig, list[Problem]]:
        return super().compose(overrides)

    def compose(self, overrides: Sequence[str]) -> tuple[DictConfig, list[Problem]]:
        config, problems = self._composed(tuple(overrides))
        return config, list(problems)


COMPOSER = Remembering()


@cache
def attempt(*given: str) -> tuple[dict[str, Any], list[Problem]]:
    """The resolved configuration, or what is wrong with it."""
    try:
        return check_overrides(COMPOSER, given).resolved, []
    except ConfigError as error:
        return {}, error.problems


def routed(given: Sequence[str], variant: str) -> RoutedModel:
    """A tiny model of a kind, its learned routers with weights that matter."""
    backbone = adapt(vit(**VARIANTS[variant]))
    model = attach(backbone, check_overrides(COMPOSER, given, backbone_facts(backbone)).config)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def flat(node: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    if not isinstance(node, Mapping):
        return {path: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= flat(value, f"{path}.{key}".lstrip("."))
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", METHODS)
def test_runs_on_every_kind_of_vision_transformer(method: str, variant: str) -> None:
    if variant == "average" and reads_class_token(method):
        with pytest.raises(ConfigError, match="reads the class token, which this backbone does not have"):
            routed([f"method={method}"], variant)
        return
    model = routed([f"method={method}"], variant).train()
    found, trace = model(images(), return_trace=True)
    found = found if isinstance(found, tuple) else (found,)
    task = {"example_losses": found[0].detach().square().mean(dim=1)}
    losses = [LOSSES[name](trace, **(task if SPECS[name].facts.follows_task else {})) for name in losses_of(method)]
    sum(part.square().mean() for part in found).add(sum(losses)).backward()
    assert all(part.shape == (3, 5) and part.isfinite().all() for part in found)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    heads = [parameter for name, parameter in model.named_parameters() if "head" in name or "patch_embed" in name]
    assert all(parameter.grad is not None for parameter in heads)
    assert all(layer.tokens <= layer.origin.shape[1] + 1 for layer in trace.layers)


@pytest.mark.parametrize("method", METHODS)
def test_is_the_dense_model_when_it_keeps_everything(method: str) -> None:
    choice = chosen(method)
    setting = KEEPS_EVERYTHING[choice.get("capacity", "topk")]
    if setting is None or choice["scaling"] == "multiply" or choice["router"] == "random":
        # The preset has no such setting; with the usual budget and output rule it keeps everything all the same.
        setting = ["capacity=topk", "capacity.fraction=1.0", "capacity.depth_schedule=constant", "scaling=none"]
        setting.append("scaling.target=update")
    if choice["bypass"] == "merge":
        setting = [*setting, "bypass.merged=0"]
    if FILES[method].get("capacity", {}).get("evaluate") == "choice":
        setting = [*setting, "capacity.evaluate=budget"]
    for variant in VARIANTS:
        if variant == "average" and reads_class_token(method):
            continue
        model = routed([f"method={method}", *setting], variant).double()
        pictures = images(dtype=torch.float64)
        torch.testing.assert_close(model(pictures), model.backbone(pictures), rtol=0, atol=1e-10)


OTHERS: dict[str, tuple[str, ...]] = {
    "router": ("linear", "random"),
    "scaling": ("none", "straight_through"),
    "capacity": ("topk", "percentile"),
    "placement": ("later", "alternate"),
    "bypass": ("skip", "drop"),
    "visibility": ("kept", "all"),
}
"""Members to choose over a preset's."""


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("method", METHODS)
def test_is_a_starting_point(method: str, axis: str) -> None:
    """`method=X router=linear` is X in everything but the router."""
    before, _ = attempt(f"method={method}")
    other = next(name for name in OTHERS[axis] if name != before[axis]["name"])
    after, problems = attempt(f"method={method}", f"{axis}={other}")
    # Two members of different axes may not go together: the line names one, and says why.
    assert {problem.key.split(".")[0] for problem in problems} <= {*AXES, "losses"}
    assert all(len(problem.message) > 20 for problem in problems)
    if problems:
        return
    changed = {key for key in flat(before) | flat(after) if flat(before).get(key, "") != flat(after).get(key, "")}
    assert f"{axis}.name" in changed
    assert {key.split(".")[0] for key in changed} == {axis}
    own = OmegaConf.load(conf_path() / axis / f"{other}.yaml")
    for key in set(OUTSIDE[axis].model_fields) - {"name", "class_path"} - set(own):
        assert after[axis][key] == before[axis][key], f"the preset's {axis}.{key} is gone"


@pytest.mark.parametrize("method", METHODS)
def test_says_what_it_is(method: str) -> None:
    text = (conf_path() / "method" / f"{method}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    assert FILES[method].method == method
    assert set(chosen(method)) == set(AXES), "every axis is stated"


def test_documentation_has_a_row_for_every_method() -> None:
    table = (conf_path().parent / "README.md").read_text()
    table = table[table.index("## Methods") : table.index("## From runs to a verdict")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for cell in cells for name in cell.replace("`", "").replace(",", " ").split()) == sorted(FILES)


def test_controls_differ_from_their_reference_in_what_they_control() -> None:
    own = ("method", "name", "_target_")

    def differing(one: str, other: str) -> set[str]:
        a, b = (flat(attempt(f"method={name}")[0]) for name in (one, other))
        return {key for key in a | b if a.get(key, "") != b.get(key, "") and key.split(".")[-1] not in own}

    assert differing("mod", "mod_double_residual") == {"scaling.target"}
    assert differing("amod", "amod_multiply") == {"scaling.normalize"}
    assert differing("amod", "shuffled") == {"router.corrupt"}
    assert differing("mod", "linear_straight_through") == {"scaling.form", "scaling.normalize"}
    assert {key.split(".")[0] for key in differing("amod", "random")} == {"router"}
    assert differing("random", "uniform") == {"router.mode"}
    assert differing("avit", "avit_code") == {
        "bypass.average",
        "losses.halting_prior.form",
        "losses.halting_prior.skip_first_sample",
    }


def reads_class_token(method: str) -> bool:
    query = FILES[method].get("router", {}).get("query", "cls")
    return chosen(method)["router"] in READS_CLASS_TOKEN or (
        chosen(method)["router"] in ("attention_variance", "attention_medad") and query == "cls"
    )


def losses_of(method: str) -> list[str]:
    entries = [entry for entry in FILES[method].defaults if "override /losses" in entry]
    return [str(name) for entry in entries for name in entry["override /losses"]]
