"""Golden cases: numbers that our code has to reproduce, and where they lie.

A case is a folder with `case.json`, `arrays.npz` and `weights.safetensors`. The project's own cases in `data/` hold
what the tests read: large parts that several cases share lie once in `data/objects`, under the first digits of their
SHA-256, and `case.json` refers to them under `objects`. `python -m tests.golden.cases FOLDER ...` copies cases so.
"""

from __future__ import annotations

import hashlib
import io
import json
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor, nn

OWN = Path(__file__).parent / "data"
FURTHER = Path(__file__).parents[3] / "shared" / "golden"
"""More cases, where the checkout has them beside it."""

LEFT_OUT = (
    *("x_out_*", "mask_*", "margin_*", "count_*"),
    *("gumbel_soft_*", "grad_fp32.model.*", "grad.model.embed_tokens.*", "grad.model.layers.*.mlp.*"),
)
"""Arrays that are not copied: too large, or the same as others."""


@dataclass(frozen=True)
class Case:
    """One golden case."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.folder / "case.json").read_text())

    @property
    def options(self) -> dict[str, Any]:
        return self.facts["options"]

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        arrays = dict(np.load(self.folder / "arrays.npz"))
        objects = self.facts.get("objects", {})
        if "input" in objects:
            arrays["input"] = np.load(self.folder.parent / objects["input"])
        return arrays

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        objects = self.facts.get("objects", {})
        path = self.folder.parent / objects["weights"] if "weights" in objects else self.folder / "weights.safetensors"
        return {name: torch.from_numpy(value.copy()) for name, value in safetensors.numpy.load_file(path).items()}

    def expected(self, key: str, layer: int | None = None) -> Tensor | None:
        """The array `key` (of a layer) in double precision, from its `_fp64` twin if it has one; None: not given."""
        name = key if layer is None else f"{key}_{layer}"
        for candidate in (f"{name}_fp64", name):
            if candidate in self.arrays:
                value = torch.from_numpy(self.arrays[candidate])
                return value.double() if value.is_floating_point() else value
        return None

    def is_double(self, key: str, layer: int | None = None) -> bool:
        """Whether the expected array was computed, and is stored, in double precision."""
        name = key if layer is None else f"{key}_{layer}"
        return f"{name}_fp64" in self.arrays or self.arrays[name].dtype == np.float64

    def backbone(self) -> nn.Module:
        """The case's model, its weights still random."""
        spec = self.facts["backbone"]
        if spec["kind"].startswith("transformers"):
            from transformers import LlamaConfig, LlamaForCausalLM

            return LlamaForCausalLM(LlamaConfig(**spec["kwargs"]))
        return pkgutil.resolve_name(spec["kind"])(**spec["kwargs"])


def find(families: dict[str, Callable[..., None]]) -> list[tuple[Case, Callable[..., None]]]:
    """Every case of a known family with its check: the project's own cases, and those beside the checkout."""
    found: dict[str, tuple[Case, Callable[..., None]]] = {}
    for root in (OWN, FURTHER):
        for path in sorted(root.glob("*/case.json")) if root.is_dir() else []:
            case = Case(path.parent)
            check = next((check for pattern, check in families.items() if fnmatch(case.name, pattern)), None)
            if check is not None:
                found.setdefault(case.name, (case, check))
    return list(found.values())


def copy(folder: Path) -> None:
    """Copy one case into `data/`, without what the tests can do without."""
    source = Case(folder)
    target = OWN / source.name
    target.mkdir(parents=True, exist_ok=True)
    arrays = {key: value for key, value in source.arrays.items() if not any(fnmatch(key, part) for part in LEFT_OUT)}
    facts = {key: value for key, value in source.facts.items() if key not in ("arrays", "sha256", "margins")}
    buffer = io.BytesIO()
    np.save(buffer, arrays.pop("input" if "input" in arrays else "input_ids"))
    facts["objects"] = {
        "input": _store(buffer.getvalue(), ".npy"),
        "weights": _store((folder / "weights.safetensors").read_bytes(), ".safetensors"),
    }
    (target / "case.json").write_text(json.dumps(facts, indent=1) + "\n")
    np.savez_compressed(target / "arrays.npz", **arrays)


def _store(content: bytes, suffix: str) -> str:
    path = OWN / "objects" / f"{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path.relative_to(OWN))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        copy(Path(argument))
