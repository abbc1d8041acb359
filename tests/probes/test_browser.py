"""The page of what every layer kept, in Chromium: no errors, nothing cut, the keyboard moves through the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.evidence.browser import inspect
from tests.probes.test_probes import examples
from tests.routing.tiny import routed

from routing_lab.probes.pictures import Picture, picture, write_page

WIDTHS = (1280, 400)
SCRIPT = """
function inspect(page) {
  const window = page.defaultView, slider = page.getElementById("layer"), view = page.getElementById("view");
  const captions = () => [...page.querySelectorAll("figcaption")].map(caption => caption.textContent);
  const before = captions();
  slider.focus();
  const focused = page.activeElement === slider;
  slider.stepUp();
  slider.dispatchEvent(new window.Event("input"));
  const after = captions();
  view.focus();
  view.value = "ranks";
  view.dispatchEvent(new window.Event("change"));
  return {
    errors: window.errors, before, after, focused, reached: page.activeElement === view,
    where: page.getElementById("where").textContent,
    width: page.documentElement.scrollWidth,
    labels: [...page.querySelectorAll("canvas")].every(canvas => canvas.getAttribute("aria-label")),
    resources: window.performance.getEntriesByType("resource").map(entry => entry.name)
      .filter(name => !name.startsWith("data:")),
  };
}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, some = tmp_path_factory.mktemp("look"), examples(batch=2)
    arms = [picture(routed(["router=amod"]), some, "amod"), picture(routed(["router=random"]), some, "random")]
    page = write_page(folder / "page.html", some.inputs, arms, title="What every layer kept", captions=["a", "b"])
    return inspect(page, WIDTHS, SCRIPT, folder / "chromium")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_works_at_both_widths(found: dict[str, Any], width: int) -> None:
    page = found[str(width)]
    assert page["errors"] == []
    assert page["resources"] == []
    assert page["width"] <= width
    assert page["focused"]
    assert page["reached"]
    assert page["labels"]
    assert len(page["before"]) == 4
    assert page["before"][0].startswith("amod: layer 1 is routed, 7 of 16 patches computed")
    assert page["after"][0].startswith("amod: layer 2 is dense, 16 of 16 patches computed")
    assert page["where"] == "2 of 0 to 3"


def test_the_largest_page_stays_under_five_megabytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    states = rng.integers(0, 4, (16, 12, 196)).astype(np.uint8)
    arms = [Picture(f"arm {i}", states, rng.random((16, 12, 196)), list(range(12)), [0] * 16) for i in range(4)]
    page = write_page(tmp_path / "page.html", torch.rand(16, 3, 224, 224), arms, title="t")
    assert page.stat().st_size < 5e6
