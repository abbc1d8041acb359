"""Run folders with invented numbers, for tests and benchmarks of what reads them.

    python -m tests.evidence.synthetic

writes again the small set that is stored in `tests/evidence/data/runs`.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from routing_lab.runs import records

CONFIG: dict[str, Any] = {
    "backbone": {"name": "vit_micro", "_target_": "a.B", "image_size": 8, "width": 64, "depth": 6, "heads": 4},
    "router": {"name": "linear", "bias": False, "corrupt": "none", "corrupt_phase": "both"},
    "scaling": {"name": "multiply", "normalize": "raw"},
    "capacity": {"name": "topk", "fraction": 0.5, "protect": "prefix"},
    "placement": {"name": "alternate", "first": 1, "stride": 2},
    "bypass": {"name": "skip"},
    "visibility": {"name": "kept"},
    "data": {"name": "digits", "num_classes": 10, "image_size": 8},
    "init": {"kind": "scratch"},
    "train": {"name": "quick", "epochs": 4, "lr": 0.002},
    "seed": 0,
    "study": None,
    "arm": None,
    "name": None,
    "paths": {"runs": "runs"},
}

ROUTERS: dict[str, dict[str, Any]] = {
    "dense": {"name": "dense"},
    "linear": {"name": "linear", "bias": False, "corrupt": "none", "corrupt_phase": "both"},
    "amod": {"name": "amod", "head_reduction": "mean", "corrupt": "none", "corrupt_phase": "both"},
    "random": {"name": "random", "mode": "iid", "corrupt": "none", "corrupt_phase": "both"},
}


def configuration(changes: Mapping[str, Any]) -> dict[str, Any]:
    """`CONFIG` with dotted keys changed; `router` takes the name of one of `ROUTERS`."""
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = copy.deepcopy(ROUTERS[value]) if key == "router" else value
    return config


def write_run(
    root: Path,
    changes: Mapping[str, Any],
    seed: int,
    accuracy: float,
    *,
    status: str = "finished",
    examples: int = 0,
    epochs: int = 0,
    noise: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One run folder under `root`, with predictions and history where `examples` and `epochs` ask for them."""
    config = configuration(changes) | {"seed": seed} | dict(extra or {})
    label = "-".join(
        f"{key.rsplit('.', 1)[-1]}_{value}" for key, value in changes.items() if key not in ("study", "arm")
    )
    study = f"{changes['study']}-" if changes.get("study") else ""
    name = f"{study}{label or 'run'}-s{seed}"
    folder = root / name
    folder.mkdir(parents=True)
    record = records.new_record(config, run_id=name, name=name, command=f"python -m routing_lab.train seed={seed}")
    is_dense = config["router"]["name"] == "dense"
    fraction = 1.0 if is_dense else float(config["capacity"]["fraction"])
    layers = [] if is_dense else [1, 3, 5]
    macs = 1_000_000 * (0.5 + 0.5 * fraction)
    record |= {"status": status, "data": {"fingerprint": "digits-1"}, "init": {"hash": f"seed-{seed}"}}
    record["routing"] = {"routed_layers": layers, "kept_fraction": {str(layer): fraction for layer in layers}}
    if status == "finished":
        rng = np.random.default_rng([seed, noise])
        if examples:
            target = np.random.default_rng(0).integers(0, 10, examples)
            is_right = rng.permutation(examples) < round(accuracy * examples)
            prediction = np.where(is_right, target, (target + 1) % 10)
            loss = np.where(is_right, 0.1, 2.0)
            np.savez(
                folder / "predictions.npz", index=np.arange(examples), target=target, prediction=prediction, loss=loss
            )
            accuracy = float(np.mean(is_right))
        record["metrics"] = {"val/acc": max(0.0, accuracy - 0.01), "test/acc": accuracy, "test/loss": 1 - accuracy}
        record["cost"] = {"params": 10_000, "macs_dense": 1_000_000, "macs_nominal": macs, "macs_measured": macs}
    if epochs:
        curve = accuracy * (1 - 0.5 ** np.arange(1, epochs + 1))
        rows = [f"{epoch},{1 - value},{value}" for epoch, value in enumerate(curve)]
        (folder / "history.csv").write_text("\n".join(["epoch,train/loss,val/acc", *rows]) + "\n")
    (folder / "run.json").write_text(json.dumps(record))
    return record


def write_arms(
    root: Path, arms: Mapping[str, tuple[Mapping[str, Any], float]], seeds: Sequence[int], **options: Any
) -> None:
    """Runs of several arms, given as label to (changes, accuracy), paired: a seed moves all arms by the same amount."""
    for number, (_, (changes, accuracy)) in enumerate(arms.items()):
        for seed in seeds:
            shift = np.random.default_rng([seed, 1]).normal(0, 0.01)
            own = np.random.default_rng([seed, number, 2]).normal(0, 0.002)
            value = float(np.clip(accuracy + shift + own, 0, 1))
            write_run(root, changes, seed, value, noise=number, **options)


STORED = Path(__file__).parent / "data" / "runs"
STORED_ARMS: dict[str, tuple[dict[str, Any], float]] = {
    "dense": ({"router": "dense"}, 0.96),
    "linear_none": ({"router": "linear", "scaling.name": "none"}, 0.93),
    "linear_multiply": ({"router": "linear"}, 0.935),
    "amod_none": ({"router": "amod", "scaling.name": "none"}, 0.955),
    "amod_multiply": ({"router": "amod"}, 0.95),
}


def write_stored(root: Path) -> None:
    """Four seeds of five arms that name the study `confound` at toy scale, one failed run, one half-written record."""
    named = {
        arm: ({**changes, "study": "confound.toy", "arm": arm}, accuracy)
        for arm, (changes, accuracy) in STORED_ARMS.items()
    }
    write_arms(root, named, range(4), examples=60, epochs=4)
    write_run(root, {"router": "random"}, 0, 0.0, status="failed")
    broken = root / "half-written"
    broken.mkdir()
    (broken / "run.json").write_text('{"schema": 1, "run_id"')


if __name__ == "__main__":
    shutil.rmtree(STORED, ignore_errors=True)
    write_stored(STORED)
