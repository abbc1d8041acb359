"""What a record says about the machine and the software it was made with."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch

import routing_lab

VERSIONS = ("routing_lab", "python", "torch", "timm", "lightning", "cpu")
"""Entries of `environment` with which equal commands may give other bits."""


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Versions, processor, threads and, where it is known, device."""
    found = {
        "routing_lab": routing_lab.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "lightning": version("lightning"),
        "platform": platform.platform(),
        "cpu": _processor(),
        "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device is not None:
        found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return found


def other_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs of code, packages and processor between two records: [before, now] by name."""
    pairs = {name: (before["environment"].get(name), now["environment"].get(name)) for name in VERSIONS}
    pairs["commit"] = (before["git"].get("commit"), now["git"].get("commit"))
    return {name: [old, new] for name, (old, new) in pairs.items() if old is not None and old != new}


def command_line() -> str:
    """The command of this process as a person would type it."""
    program, *arguments = sys.argv
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return shlex.join(["python", "-m", spec.name.removesuffix(".__main__"), *arguments])
    return shlex.join([Path(program).name, *arguments])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
