"""What probes found out about a run: files beside its record, `<run>/probes/<name>.json`, read like metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = "probes"
SCHEMA = 1
PREFIX = "probe/"
"""What the keys of findings begin with, where metrics and costs are named too."""


def read_probe(path: Path) -> dict[str, Any] | None:
    """What a probe wrote; None where there is nothing, or nothing that can be read."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA else None


def read_findings(folder: Path | str) -> dict[str, float]:
    """`probe/<probe>/<finding>` -> value, of every probe that has been run on a run."""
    found: dict[str, float] = {}
    for path in sorted((Path(folder) / FOLDER).glob("*.json")):
        content = read_probe(path) or {}
        found |= {f"{PREFIX}{content['probe']}/{item['key']}": item["value"] for item in content.get("findings", ())}
    return found
