"""A headless Chromium, driven from the command line."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)

_WATCH = "<script>window.errors = []; window.onerror = (text) => { window.errors.push(text); };</script>"

_INSPECT = """
window.onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) found[frame.width] = inspect(frame.contentDocument);
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
};
"""

_MEASURE = """
// Words of which a part stands on another line; hyphens and slashes are places where a word may end.
function brokenWords(page) {
  const found = [], range = page.createRange();
  const walker = page.createTreeWalker(page.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    if (node.parentElement.closest("svg")) continue;
    for (const match of node.textContent.matchAll(/[^\\s\\-\\/]+/g)) {
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      const tops = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (tops.size > 1) found.push(match[0]);
    }
  }
  return found;
}
function inspect(page) {
    const root = page.documentElement;
    const svgs = [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
    return {
      page_width: root.scrollWidth,
      svgs: svgs.map(box => [box.width, box.height]),
      font: parseFloat(getComputedStyle(page.querySelector("td")).fontSize),
      figure_font: Math.min(...[...page.querySelectorAll("svg text")].map(text =>
        parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a)),
      headings: [...page.querySelectorAll("h2")].map(heading => heading.textContent),
      cut: [...page.querySelectorAll("table, p, figcaption, svg")].filter(part => {
        const box = part.getBoundingClientRect();
        return box.width && (box.right > root.clientWidth + 1 || box.left < -1);
      }).map(part => part.textContent.trim().slice(0, 60)),
      broken: brokenWords(page),
      resources: page.defaultView.performance.getEntriesByType("resource").map(entry => entry.name),
    };
}
"""


def chromium() -> str | None:
    """Path of an installed Chromium, None without."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def measure(page: Path, widths: tuple[int, ...], profile: Path) -> dict[str, Any]:
    """Lay a page out at several widths and measure what a reader sees; width (as text) to measurements."""
    return inspect(page, widths, _MEASURE, profile)


def inspect(page: Path, widths: tuple[int, ...], script: str, profile: Path) -> dict[str, Any]:
    """Lay a page out at several widths and return what `inspect(document)` of a script says of each, width (as text) to
    a JSON value; `document.defaultView.errors` holds the page's uncaught errors.
    """
    content = html.escape(_WATCH + page.read_text(encoding="utf-8"))
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{content}"></iframe>' for width in widths)
    wrapper = profile / "measure.html"
    profile.mkdir(parents=True, exist_ok=True)
    wrapper.write_text(f'<!DOCTYPE html><meta charset="utf-8"><script>{script}{_INSPECT}</script><body>{frames}</body>')
    dom = _run("--dump-dom", "--virtual-time-budget=20000", wrapper.as_uri(), profile=profile)
    start = dom.index('<pre id="found">') + len('<pre id="found">')
    found: dict[str, Any] = json.loads(html.unescape(dom[start : dom.index("</pre>", start)]))
    return found


def print_to_pdf(page: Path, target: Path, profile: Path) -> bytes:
    """The page as it would be printed."""
    _run(f"--print-to-pdf={target}", "--no-pdf-header-footer", page.as_uri(), profile=profile)
    return target.read_bytes()


def _run(*arguments: str, profile: Path) -> str:
    command = [str(chromium()), *_FLAGS, f"--user-data-dir={profile / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout
