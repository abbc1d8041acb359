"""Published numbers stand in one file, with their sources, and the page is what is made of it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "published.py"))


def test_the_page_is_written_from_the_file() -> None:
    assert (ROOT / "docs" / "published.md").read_text(encoding="utf-8") == SCRIPT["page"](SCRIPT["read"]())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method,model\nEViT,DeiT-S\n", "columns"),
        ("method,model,setting,accuracy,gmacs,recipe,source\nEViT,DeiT-S,,79.5,3.0,,\n", "line 2"),
    ],
)
def test_a_number_without_a_source_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "published.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        SCRIPT["read"](path)
