"""Every member that ships composes, is valid, and is what the code says it is."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from itertools import combinations
from typing import Any

import pytest
from omegaconf import OmegaConf

from routing_lab.axes import AXES, LOSSES
from routing_lab.axes import MEMBERS as SHIPPED
from routing_lab.config import Composer, ConfigError, check, conf_path, load
from routing_lab.config.compose import LIST_GROUPS, REQUIRED_GROUPS
from routing_lab.data.schema import DATA_SETS

GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(conf_path().iterdir())
    if folder.is_dir() and folder.name not in ("hydra", "probe")  # a probe is no part of a run's configuration
}
MEMBERS = [(group, member) for group, names in GROUPS.items() for member in names]

SHAPES = {
    ("backbone", "timm"): ["backbone.timm_name=vit_tiny_patch16_224"],
    ("backbone", "hf"): ["backbone.model_type=vit"],
    ("placement", "list"): ["placement.layers=[2,4]"],
    ("recipe", "dynamicvit"): ["init=dense"],
    ("init", "run"): ["init.epochs=1"],
}


def needs(group: str, member: str) -> list[str]:
    """What a member needs beside itself to mean anything on the default backbone, by its traits."""
    found = list(SHAPES.get((group, member), []))
    traits = getattr(SHIPPED[group][member], "facts", None) if group in SHIPPED else None
    if traits and "block" not in getattr(traits, "sublayers", "block"):
        found.append(f"placement.sublayer={traits.sublayers[0]}")
    if any(getattr(traits, fact, False) for fact in ("needs_probability", "needs_choice", "relaxes")):
        found.append("router=mlp")
    if getattr(traits, "needs_informative", False):
        found.append("data=planted")
    if group == "backbone" and OmegaConf.load(conf_path() / group / f"{member}.yaml").kind == "llama":
        found.append("task=language")
    if group == "losses":
        reads = LOSSES[member].facts.reads
        reading = {"halting": ["method=avit"], "probability": ["router=mlp"], "logits": ["router=linear"]}
        found += (reading | {"drawn": ["router=linear", "capacity=gumbel"]}).get(reads, [])
    if group == "method":
        found.append("backbone.depth=12")
        found += ["isoflop.tolerance=0.1"] if member == "isoflop_depth" else []  # whole layers are coarse
    return found


def is_on_disk(group: str, member: str) -> bool:
    """Whether the member can be checked without files that a test machine lacks."""
    return (group, member) not in {("init", "checkpoint"), ("init", "pretrained")} and (
        group != "data" or member in ("digits", "planted")
    )


@pytest.mark.parametrize(("group", "member"), [pair for pair in MEMBERS if is_on_disk(*pair)])
def test_each_member_is_valid(group: str, member: str) -> None:
    loaded = load([f"{group}={member}", *needs(group, member)])
    if group in SHIPPED:
        assert getattr(loaded.config, group).name == member


@pytest.mark.parametrize(("group", "member"), [pair for pair in MEMBERS if not is_on_disk(*pair)])
def test_members_that_need_files_compose(group: str, member: str) -> None:
    config, problems = Composer().compose([f"{group}={member}"])
    assert problems == []
    assert config[group]["kind" if group == "init" else "name"] == member
    if group == "data":
        assert member in DATA_SETS


def test_the_files_are_the_members_the_code_knows() -> None:
    assert set(GROUPS["data"]) == set(DATA_SETS)
    assert {*REQUIRED_GROUPS, *LIST_GROUPS, "method"} == set(GROUPS)


@pytest.fixture(scope="module")
def nodes() -> dict[tuple[str, str], dict[str, Any]]:
    """The composed node of every member of every axis."""
    composer = Composer()
    found = {}
    for axis in AXES:
        for member in GROUPS[axis]:
            shape = SHAPES.get((axis, member), [])
            found[axis, member] = OmegaConf.to_container(composer.compose([f"{axis}={member}", *shape])[0][axis])
    return found


@pytest.mark.parametrize(("first", "second"), list(combinations(AXES, 2)))
def test_pairs_of_members_are_valid_or_refused_for_a_reason(
    first: str, second: str, nodes: dict[tuple[str, str], Any]
) -> None:
    base = load().resolved
    for number in range(max(len(GROUPS[first]), len(GROUPS[second]))):
        one, other = (GROUPS[axis][number % len(GROUPS[axis])] for axis in (first, second))
        with suppress(ConfigError):  # whose problems have a key, a value and a reason by construction
            check({**base, first: nodes[first, one], second: nodes[second, other]})


def test_a_method_is_a_preset_and_the_command_line_wins() -> None:
    mod = load(["method=mod"]).config
    assert (mod.router.name, mod.scaling.name, mod.capacity.name) == ("linear", "multiply", "topk")
    amod = load(["method=amod", "scaling=multiply", "capacity.fraction=0.125"]).config
    assert (amod.router.name, amod.scaling.name, amod.capacity.options["fraction"]) == ("amod", "multiply", 0.125)
    assert load(["scaling=multiply", "method=amod"]).resolved == load(["method=amod", "scaling=multiply"]).resolved


def test_launcher_presets_compose() -> None:
    for launcher in ("basic", "joblib", "submitit_local", "submitit_slurm", "ray"):
        config, problems = Composer().compose([f"hydra/launcher={launcher}"])
        assert problems == []
        assert launcher.split("_")[0] in config.hydra.launcher["_target_"].lower()


def test_shape_of_a_backbone_that_is_only_named() -> None:
    backbone = load(
        ["backbone=timm", "backbone.timm_name=vit_small_patch14_reg4_dinov2", "backbone.image_size=28"]
    ).config.backbone
    assert (backbone.width, backbone.depth, backbone.heads, backbone.registers) == (384, 12, 6, 4)
    assert backbone.facts().prefix == ("class", "registers", "registers", "registers", "registers")
    assert backbone.facts().tokens == 5 + 4


def test_checking_a_configuration_needs_no_torch() -> None:
    code = (
        "import sys; from routing_lab.config import load; import routing_lab.train, routing_lab.cli;"
        "load(['router=amod', 'scaling=multiply', 'seed=0']);"
        "print([name for name in ('torch', 'timm', 'lightning', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
