"""The map from papers to code, and the page of limits, name things that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("code_map.md", "limits.md")]
NAMES = sorted({name for page in PAGES for name in re.findall(r"`([^`]+)`", page)})
CONF = ROOT / "conf"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("tests/", "experiments/"))])
def test_files_exist(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize("name", [name for name in NAMES if ".py:" in name])
def test_code_exists(name: str) -> None:
    path, _, wanted = name.partition(":")
    tree = ast.parse((ROOT / "src" / "routing_lab" / path).read_text(encoding="utf-8"))
    assert wanted in {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


@pytest.mark.parametrize("name", [name for name in NAMES if "=" in name])
def test_presets_exist(name: str) -> None:
    for override in name.split():
        key, _, value = override.partition("=")
        if (CONF / key).is_dir():
            assert (CONF / key / f"{value}.yaml").exists(), override
