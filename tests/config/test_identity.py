"""When two runs are the same run, and what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from routing_lab.config import identity, load, run_folder, run_name
from routing_lab.keys import VOLATILE

BASE = load(["router=amod", "scaling=multiply", "seed=1"])


def reversed_keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return value


def test_identity_is_ten_hexadecimal_digits_and_ignores_the_order_of_keys() -> None:
    assert len(identity(BASE.resolved)) == 10
    assert int(identity(BASE.resolved), 16) >= 0
    assert identity(reversed_keys(BASE.resolved)) == identity(BASE.resolved)


@pytest.mark.parametrize(
    "override",
    [
        *("study=s", "arm=a", "name=n", "rerun=true", "paths.runs=elsewhere", "paths.data=elsewhere"),
        *("wandb.mode=disabled", "runtime.workers=3", "runtime.threads=2", "runtime.accelerator=cpu"),
    ],
)
def test_where_and_how_fast_a_run_executes_does_not_count(override: str) -> None:
    assert identity(load(["router=amod", "scaling=multiply", "seed=1", override]).resolved) == identity(BASE.resolved)


@pytest.mark.parametrize(
    "override",
    [
        *("seed=0", "router=linear", "router.detach=false", "capacity.fraction=0.25", "placement.first=3"),
        *("visibility=all", "train.epochs=9", "backbone.depth=8", "train.lr=0.001", "scaling.normalize=sigmoid"),
    ],
)
def test_what_is_run_counts(override: str) -> None:
    assert identity(load(["router=amod", "scaling=multiply", "seed=1", override]).resolved) != identity(BASE.resolved)


def test_a_whole_number_and_its_decimal_form_are_the_same_value() -> None:
    assert identity(load(["capacity.fraction=1"]).resolved) == identity(load(["capacity.fraction=1.0"]).resolved)
    assert identity(load(["train.min_lr=0"]).resolved) == identity(load(["train.min_lr=0.0"]).resolved)


def test_seed_zero_is_a_seed() -> None:
    loaded = load(["seed=0"])
    assert loaded.config.seed == 0
    assert loaded.resolved["seed"] == 0
    assert run_name(loaded.config).endswith("-s0")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("router=amod scaling=multiply", "amod-multiply-topk0.5-vit_micro-digits-s0"),
        (
            "router=linear capacity=percentile capacity.fraction=0.125 seed=3",
            "linear-none-percentile0.125-vit_micro-digits-s3",
        ),
        ("capacity.fraction=[1,0.5,0.25]", "amod-none-topk1to0.25-vit_micro-digits-s0"),
        ("router=mlp capacity=argmax", "mlp-none-argmax-vit_micro-digits-s0"),
        ("router=dense", "dense-vit_micro-digits-s0"),
        ("name=pilot seed=2", "pilot-s2"),
    ],
)
def test_names_are_for_people(overrides: str, name: str) -> None:
    assert run_name(load(overrides.split()).config) == name


def test_folder() -> None:
    assert run_folder(BASE.config, BASE.resolved) == Path("runs") / f"{run_name(BASE.config)}-{identity(BASE.resolved)}"


def test_volatile_keys_exist() -> None:
    resolved = load(["data=planted"]).resolved
    for key in VOLATILE:
        if "." not in key and key != "hydra":
            assert key in resolved
