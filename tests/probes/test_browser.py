"""The page of what every layer kept, in Chromium: no errors, nothing cut, the keyboard moves through the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.evidence.browser import inspect
from tests.probes.test_probes import examples
from tests.routing.tiny import llama, routed, token_ids

from routing_lab.probes.base import Examples
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

TEXT_SCRIPT = """
function inspect(page) {
  const first = page.querySelector(".text");
  return {
    errors: page.defaultView.errors, width: page.documentElement.scrollWidth,
    texts: [...page.querySelectorAll(".text")].map(text => text.textContent),
    caption: page.querySelector("figcaption").textContent,
    classes: [...first.querySelectorAll("span")].map(span => span.className),
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


def test_texts_are_shown_as_their_tokens(tmp_path: Path) -> None:
    ids = token_ids(2, 12)
    some = Examples(ids, ids.roll(-1, dims=1), torch.arange(2))
    words = [[f"w{token} " for token in row] for row in ids.tolist()]
    page = write_page(tmp_path / "page.html", words, [picture(routed([], llama()), some, "lm")], title="Texts")
    found = inspect(page, (400,), TEXT_SCRIPT, tmp_path / "chromium")["400"]
    assert found["errors"] == []
    assert found["width"] <= 400
    assert found["texts"] == ["".join(row) for row in words]
    assert found["caption"] == "lm: layer 1 is routed, 6 of 12 tokens computed"
    assert sorted(found["classes"]) == ["s1"] * 6 + ["s2"] * 6
