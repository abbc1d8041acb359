"""Pictures of what every layer kept: arrays, PNG sheets, and one page that works from a file, offline.

Shape legend: B images, L layers, P patches on a grid of R rows and C columns.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment
from PIL import Image
from scipy.stats import rankdata
from torch import Tensor

from routing_lab.probes.base import Examples, traced
from routing_lab.probes.metrics import Array
from routing_lab.routing.measures import at, is_patch, positions, ran
from routing_lab.routing.model import RoutedModel
from routing_lab.routing.trace import Trace

GONE, SKIPPED, KEPT, MERGED = range(4)
"""States of a patch at a layer: removed before it; bypassed; computed; computed inside a token that stands for it."""

STATES = ("removed", "skipped", "kept", "inside another token")


@dataclass(frozen=True)
class Picture:
    """What one model did with some images.

    Args:
        label: of the arm.
        states: uint8 [B, L, P], one of `GONE`, `SKIPPED`, `KEPT`, `MERGED`.
        scores: float64 [B, L, P], NaN in dense layers and for patches that are gone.
        routed: zero-based routed layers.
        predictions: [B] predicted classes; empty where the output is no class.
    """

    label: str
    states: np.ndarray
    scores: Array
    routed: list[int]
    predictions: list[int]


def picture(model: RoutedModel, examples: Examples, label: str) -> Picture:
    """Run `model` on the examples, in evaluation mode and without gradients, and note what became of every patch."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output, trace = traced(model, examples)
    finally:
        model.train(was_training)
    patches = is_patch(trace)
    states, scores = [], []
    for layer, (part, position, computed) in enumerate(zip(trace.layers, positions(trace), ran(trace), strict=False)):
        states.append(_states(trace, layer, position, computed)[:, patches])
        if part.scores is None:
            scores.append(torch.full_like(position, torch.nan, dtype=torch.float64)[:, patches])
        else:
            scores.append(at(part.scores.double(), position).masked_fill(position < 0, torch.nan)[:, patches])
    classes = output.argmax(dim=-1).tolist() if isinstance(output, Tensor) and output.dim() == 2 else []
    return Picture(
        label,
        torch.stack(states, dim=1).to(torch.uint8).cpu().numpy(),
        torch.stack(scores, dim=1).cpu().numpy(),
        model.routed_layers,
        classes,
    )


def _states(trace: Trace, layer: int, position: Tensor, computed: Tensor) -> Tensor:
    """[B, N0] state of each token that entered the model, at one layer."""
    own = trace[0].origin
    stands_there = torch.where(position < 0, -1, at(trace[layer].origin, position))
    state = torch.where(computed, KEPT, SKIPPED)
    state = torch.where(computed & (stands_there != own), MERGED, state)
    return torch.where(position < 0, GONE, state)


def write_page(
    path: Path | str,
    images: Tensor | Sequence[Sequence[str]],
    pictures: Sequence[Picture],
    *,
    title: str,
    captions: Sequence[str] = (),
    class_names: Sequence[str] = (),
    grid: tuple[int, int] | None = None,
) -> Path:
    """One self-contained HTML page: every image beside itself for every arm, with a slider over the layers.

    Args:
        path: of the page.
        images: [B, C, H, W], in any range; each is stretched to its own. Or texts, each as its tokens, which are then
            what is called patches elsewhere.
        pictures: one an arm, all of these images.
        title: heading of the page.
        captions: one an image.
        class_names: names of the predicted classes.
        grid: rows and columns of the patches; None: a square.

    Raises:
        ValueError: the patches make no square and no grid is given.
    """
    count = pictures[0].states.shape[2]
    are_texts = not isinstance(images, Tensor)
    shown = [_data_url(image) for image in images] if isinstance(images, Tensor) else [list(text) for text in images]
    rows, columns = (1, count) if are_texts else grid or _square(count)
    data = {
        "rows": rows,
        "columns": columns,
        "layers": max(item.states.shape[1] for item in pictures),
        "states": list(STATES),
        "unit": "tokens" if are_texts else "patches",
        "images": shown,
        "captions": [str(text) for text in captions],
        "first": min((layer for item in pictures for layer in item.routed), default=0),
        "arms": [_arm(item, class_names) for item in pictures],
    }
    source = resources.files("routing_lab.probes").joinpath("page.html.j2").read_text("utf-8")
    # `<` never ends the script that holds the data.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = Environment(autoescape=True).from_string(source).render(title=title, data=text)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def write_sheet(path: Path | str, images: Tensor, item: Picture, grid: tuple[int, int] | None = None) -> Path:
    """A PNG of one arm: a row an image, a column a layer; what was not computed is darkened, merged patches tinted."""
    from matplotlib.figure import Figure

    batch, layers, count = item.states.shape
    rows, columns = grid or _square(count)
    figure = Figure(figsize=(1.3 * (layers + 1), 1.35 * batch), layout="constrained")
    axes = figure.subplots(batch, layers + 1, squeeze=False)
    for b in range(batch):
        pixels = _pixels(images[b])
        for column, axis in enumerate(axes[b]):
            axis.set_axis_off()
            axis.imshow(pixels, extent=(0, columns, rows, 0))
            if column:
                axis.imshow(_shade(item.states[b, column - 1].reshape(rows, columns)), extent=(0, columns, rows, 0))
            if b == 0:
                routed = column - 1 in item.routed
                axis.set_title("input" if not column else f"layer {column - 1}{' *' if routed else ''}", fontsize=7)
    figure.suptitle(f"{item.label} (* routed layer)", fontsize=8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    return path


def _shade(states: np.ndarray) -> np.ndarray:
    colours: Mapping[int, tuple[float, float, float, float]] = {
        GONE: (0, 0, 0, 0.88),
        SKIPPED: (0, 0, 0, 0.6),
        KEPT: (0, 0, 0, 0),
        MERGED: (0.1, 0.45, 0.9, 0.45),
    }
    return np.array([[colours[int(state)] for state in row] for row in states])


def _arm(item: Picture, class_names: Sequence[str]) -> dict[str, Any]:
    names = [class_names[c] if c < len(class_names) else f"class {c}" for c in item.predictions]
    return {
        "label": item.label,
        "routed": item.routed,
        "predictions": names,
        "states": [["".join(map(str, layer)) for layer in image] for image in item.states.tolist()],
        "ranks": [[_ranks(layer) for layer in image] for image in item.scores],
    }


def _ranks(scores: Array) -> str:
    """A digit a patch: the tenth of the image's scores that it belongs to, 9 the highest; `-` where it has none."""
    finite = np.isfinite(scores)
    if not finite.any():
        return ""
    order = rankdata(np.where(finite, scores, -np.inf)) - (~finite).sum() - 0.5
    tenth = (order * 10 // int(finite.sum())).astype(int)
    return "".join(str(value) if there else "-" for value, there in zip(tenth.tolist(), finite.tolist(), strict=True))


def _square(count: int) -> tuple[int, int]:
    side = round(count**0.5)
    if side**2 != count:
        raise ValueError(f"{count} patches make no square: give the grid as (rows, columns)")
    return side, side


def _pixels(image: Tensor) -> np.ndarray:
    """uint8 [H, W, 3] of an image [C, H, W], stretched to its own range."""
    values = image.detach().float().cpu().numpy()
    low, high = float(values.min()), float(values.max())
    pixels = np.round((values - low) / max(high - low, 1e-12) * 255).astype(np.uint8).transpose(1, 2, 0)
    return pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels[..., :3]


def _data_url(image: Tensor) -> str:
    buffer = io.BytesIO()
    Image.fromarray(_pixels(image)).save(buffer, "PNG" if image.shape[-1] <= 64 else "JPEG")
    kind = "png" if image.shape[-1] <= 64 else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
