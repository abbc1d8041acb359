"""Figures of a report: forest plots of effects, Pareto sets, training curves with bands, kept fraction per layer.

Axes are plain: linear, labelled with units, not cut or broken. Arms are told apart by marker and line as well as by
colour, so that a figure survives a black-and-white printer. A figure becomes SVG text that can stand inside an HTML
page, with the same bytes for the same numbers.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from routing_lab.evidence import formatting, statistics
from routing_lab.evidence.arms import Arm, metric_of
from routing_lab.runs.records import read_history

MAX_ROWS = 40
"""Rows of a forest plot; of more, those with the largest differences are drawn."""

MAX_ARMS = 12
"""Arms that one figure tells apart."""

EQUAL_COST = 0.01
"""Arms whose costs lie closer than this part of the axis are drawn side by side."""

_WIDTH = 5.6
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),
    *("#000000", "#7f7f7f", "#882255", "#117733", "#332288", "#999933"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
_LINES = ("-", "--", "-.", ":")
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "routing_lab",
}


@dataclass(frozen=True)
class Drawing:
    """A finished figure: SVG text, and the caption that says what it shows."""

    name: str
    caption: str
    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.svg


@dataclass(frozen=True)
class Measure:
    """What the axis of a forest plot shows: its heading, what stored values are multiplied by, the value that means no
    effect, and the margin around it.
    """

    heading: str
    factor: float = 1.0
    neutral: float = 0.0
    margin: float = math.nan

    @staticmethod
    def of_difference(metric: str, margin: float = math.nan) -> Measure:
        """Differences in a metric."""
        shown = formatting.metric(metric)
        return Measure(shown.difference_heading, shown.factor, 0.0, margin)


@dataclass(frozen=True)
class Row:
    """One line of a forest plot: an estimate with its interval, the value under each seed, the smallest effect that
    would be found, and whether a decision reads it.
    """

    label: str
    estimate: float
    low: float
    high: float
    points: tuple[float, ...] = ()
    detectable: float = math.nan
    is_read: bool = True


def forest(rows: Sequence[Row], measure: Measure, caption: str, name: str = "forest") -> Drawing | None:
    """Effects with their intervals; a hollow mark has none. None without rows.

    Dots are the seeds, triangles the smallest effect that would be found, the shaded zone the margin; grey effects are
    read by no rule.
    """
    known = [row for row in rows if not math.isnan(row.estimate)]
    if not known:
        return None
    parts = ["lines: intervals" if any(not math.isnan(row.low) for row in known) else ""]
    parts += ["dots: one a seed"] if any(row.points for row in known) else []
    parts += (
        ["triangles: smallest effect found with probability 0.8"] if any(_is_known(r.detectable) for r in known) else []
    )
    parts += ["shaded: within the margin"] if _is_known(measure.margin) else []
    parts += ["grey: read by no rule"] if not all(row.is_read for row in known) else []
    caption = f"{caption} ({'; '.join(filter(None, parts))})" if any(parts) else caption
    if len(known) > MAX_ROWS:
        size = [abs(row.estimate - measure.neutral) for row in known]
        largest = set(sorted(range(len(known)), key=lambda i: -size[i])[:MAX_ROWS])
        caption = f"{caption}. The {MAX_ROWS} largest of {len(known)} effects; the table has all"
        known = [row for i, row in enumerate(known) if i in largest]
    has_points = any(row.points for row in known)
    figure, axes = _figure(0.9 + (0.36 if has_points else 0.26) * len(known))
    factor, zero = measure.factor, measure.factor * measure.neutral
    if _is_known(measure.margin):
        axes.axvspan(zero - factor * measure.margin, zero + factor * measure.margin, color="#eeeeee", linewidth=0)
    axes.axvline(zero, color="#444444", linewidth=0.8)
    for y, row in enumerate(reversed(known)):
        has_interval = not math.isnan(row.low)
        colour = _COLOURS[0] if row.is_read else "#8a8a8a"
        if row.points:
            axes.plot([factor * x for x in row.points], [y - 0.24] * len(row.points), ".", color=colour, markersize=3.5)
        if _is_known(row.detectable):
            for side, mark in ((-1, 8), (1, 9)):  # carets that open towards the middle
                x = zero + side * factor * row.detectable
                axes.plot([x], [y], marker=mark, color="#b06000", markersize=4, linestyle="none")
        if has_interval:
            axes.plot([factor * row.low, factor * row.high], [y, y], color=colour, linewidth=1.6)
        face = colour if has_interval else "none"
        axes.plot([factor * row.estimate], [y], "o", color=colour, markerfacecolor=face, markersize=5)
    axes.set_yticks(range(len(known)), [_short(row.label, 44) for row in reversed(known)])
    axes.set_ylim(-0.7, len(known) - 0.3)
    axes.set_xlabel(measure.heading)
    axes.grid(axis="y", visible=False)
    return _drawing(figure, name, caption)


def pareto(arms: Sequence[Arm], metric: str, cost: str, caption: str, name: str = "pareto") -> Drawing | None:
    """Quality over measured cost with t intervals; filled: on the front, grey: its band reaches the front, hollow:
    dominated.

    `cost` is a key as in `Arm.values`; one that is declared better when higher, a throughput, counts so. None with
    fewer than two arms that have both numbers.
    """
    points = [arm for arm in arms if arm.values(metric) and arm.values(cost)]
    if len(points) < 2:
        return None
    quality = formatting.metric(metric)
    priced = formatting.metric(cost)
    x = np.array([arm.mean(cost) for arm in points])
    reach = formatting.bounds(quality)
    summaries = [statistics.summarize(list(arm.values(metric).values()), bounds=reach) for arm in points]
    sign = 1 if quality.higher_is_better else -1
    spans = [sorted((sign * s.low, sign * s.high)) for s in summaries]
    standings = statistics.pareto(
        -x if priced.higher_is_better else x,
        [sign * s.mean for s in summaries],
        [low for low, _ in spans],
        [high for _, high in spans],
    )
    unit, size = _unit(float(np.max(np.abs(x))))
    figure, axes = _figure(3.6)
    front = [i for i, point in enumerate(standings) if point.standing == "front"]
    named = list(range(len(points))) if len(points) <= MAX_ARMS else front[:MAX_ARMS]
    others = sorted(set(range(len(points))) - set(named))
    beside = _side_by_side([float(x[i]) for i in named])
    if any(beside):
        caption = f"{caption}. Arms of equal {priced.label} are drawn side by side"
    means = quality.factor * np.array([summary.mean for summary in summaries])
    drawn_at = x.copy()
    drawn_at[named] += beside
    line = sorted((drawn_at[i] / size, means[i]) for i in front)
    axes.plot(*zip(*line, strict=True), color="#bbbbbb", linewidth=1.0, zorder=1)
    axes.plot(x[others] / size, means[others], ".", color="#999999", markersize=4, zorder=1)
    for style, i in enumerate(named):
        summary, colour = summaries[i], _COLOURS[style]
        ends = np.array([[summary.low], [summary.high]])
        face = {"front": colour, "tied": "#cccccc", "dominated": "none"}[standings[i].standing]
        axes.errorbar(
            [drawn_at[i] / size],
            [means[i]],
            yerr=None if math.isnan(summary.high) else quality.factor * np.abs(ends - summary.mean),
            fmt=_MARKERS[style],
            color=colour,
            markerfacecolor=face,
            markersize=6,
            elinewidth=1.0,
            capsize=2,
            label=_short(points[i].label, 48),
        )
    if others:
        caption = f"{caption}. Dots: {len(others)} more arms"
    axes.set_xlabel(", ".join(part for part in (priced.label, f"{unit} {priced.unit}".strip()) if part))
    axes.set_ylabel(quality.heading)
    _legend(figure, axes)
    return _drawing(figure, name, caption)


def curves(arms: Sequence[Arm], metric: str, caption: str, name: str = "curves") -> Drawing | None:
    """Mean training curve of each arm over its seeds, with a 95 % t band where three seeds or more have a value."""
    drawn = []
    for arm in arms:
        histories = [read_history(record) for record in arm.finished.values()]
        kept = [history for history in histories if history.get(metric)]
        if kept:
            drawn.append((arm, kept))
        if len(drawn) == MAX_ARMS:
            break
    if not drawn:
        return None
    shown = formatting.metric(metric)
    figure, axes = _figure(3.4)
    for n, (arm, kept) in enumerate(drawn):
        length = max(len(history[metric]) for history in kept)
        values = np.full((len(kept), length), math.nan)
        for row, history in zip(values, kept, strict=True):
            row[: len(history[metric])] = history[metric]
        longest = max(kept, key=lambda history: len(history[metric]))
        epochs = np.array(longest["epoch"]) + 1 if "epoch" in longest else np.arange(1, length + 1)
        points = [
            statistics.summarize(column[~np.isnan(column)], bounds=formatting.bounds(shown)) for column in values.T
        ]
        seen = [i for i, point in enumerate(points) if point.n]
        mean = shown.factor * np.array([points[i].mean for i in seen])
        colour, style = _COLOURS[n], _LINES[n % len(_LINES)]
        axes.plot(epochs[seen], mean, style, color=colour, linewidth=1.4, label=_short(arm.label, 48))
        banded = [i for i in seen if points[i].n >= statistics.MIN_SEEDS]
        low = shown.factor * np.array([points[i].low for i in banded])
        high = shown.factor * np.array([points[i].high for i in banded])
        axes.fill_between(epochs[banded], low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel(shown.heading)
    _legend(figure, axes)
    if len(drawn) == MAX_ARMS < len(arms):
        caption = f"{caption}. The first {MAX_ARMS} of {len(arms)} arms"
    return _drawing(figure, name, caption)


def kept_fractions(arms: Sequence[Arm], caption: str, name: str = "kept") -> Drawing | None:
    """Fraction of tokens kept at each routed layer (zero-based), measured on the test split."""
    drawn = [arm for arm in arms if arm.kept_fraction][:MAX_ARMS]
    if not drawn:
        return None
    figure, axes = _figure(3.0)
    width = min(0.08, 0.7 / len(drawn))
    for n, arm in enumerate(drawn):
        layers = [layer + width * (n - (len(drawn) - 1) / 2) for layer in arm.kept_fraction]
        kept = list(arm.kept_fraction.values())
        style = f"{_MARKERS[n]}{_LINES[n % len(_LINES)]}"
        axes.plot(layers, kept, style, color=_COLOURS[n], markersize=5, linewidth=1.0, label=_short(arm.label, 48))
    axes.set_xticks(sorted({layer for arm in drawn for layer in arm.kept_fraction}))
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("routed layer (zero-based)")
    axes.set_ylabel("fraction of tokens kept")
    _legend(figure, axes)
    caption = f"{caption}. Arms are drawn side by side at every layer" if len(drawn) > 1 else caption
    routed = sum(bool(arm.kept_fraction) for arm in arms)
    if routed > len(drawn):
        caption = f"{caption}. The first {MAX_ARMS} of {routed} routed arms"
    return _drawing(figure, name, caption)


def over_lengths(arms: Sequence[Arm], metric: str, key: str, caption: str, name: str) -> Drawing | None:
    """A number of each arm over the lengths of text that it was tested at, with a 95 % t band over its seeds. None
    where no arm has two lengths.

    Args:
        metric: that says which lengths there are, see `Arm.lengths`.
        key: of the number that is drawn.
    """
    drawn = [arm for arm in arms if len(arm.lengths(metric)) > 1][:MAX_ARMS]
    if not drawn:
        return None
    shown = formatting.metric(key)
    figure, axes = _figure(3.4)
    for n, arm in enumerate(drawn):
        lengths = arm.lengths(metric)
        found = [list(arm.values(key + suffix).values()) for suffix in lengths.values()]
        points = [statistics.summarize(values, bounds=formatting.bounds(shown)) for values in found]
        by_length = {length: point for length, point in zip(lengths, points, strict=True) if point.n}
        x = sorted(by_length)
        seen = [by_length[length] for length in x]
        mean = shown.factor * np.array([point.mean for point in seen])
        colour, style = _COLOURS[n], f"{_MARKERS[n]}{_LINES[n % len(_LINES)]}"
        axes.plot(x, mean, style, color=colour, markersize=5, linewidth=1.2, label=_short(arm.label, 48))
        low, high = (shown.factor * np.array([getattr(point, end) for point in seen]) for end in ("low", "high"))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xticks(sorted({length for arm in drawn for length in arm.lengths(metric)}))
    axes.set_xlabel("tokens of a text")
    axes.set_ylabel(shown.heading)
    _legend(figure, axes)
    return _drawing(figure, name, caption)


def has_values(arms: Iterable[Arm], key: str) -> bool:
    """Whether any finished record has the metric or cost."""
    return any(not math.isnan(metric_of(record, key)) for arm in arms for record in arm.finished.values())


def numbered(drawing: Drawing, prefix: str) -> Drawing:
    """The drawing with identifiers that start with `prefix`, so that several can stand in one page."""
    svg = re.sub(r'\bid="', f'id="{prefix}-', drawing.svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    return replace(drawing, svg=svg)


def _figure(height: float) -> tuple[Figure, Axes]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        return figure, figure.add_subplot()


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 1 if max(map(len, labels)) > 30 else 2
        with mpl.rc_context(_STYLE):
            figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=8)
            width, height = figure.get_size_inches()
            figure.set_size_inches(width, height + 0.17 * math.ceil(len(labels) / columns))


def _drawing(figure: Figure, name: str, caption: str) -> Drawing:
    text = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    title = f"<title>{escape(caption)}</title>"
    svg = re.sub(r"(<svg\b)([^>]*>)", lambda m: f'{m[1]} role="img"{m[2]}{title}', svg, count=1)
    return Drawing(name, caption, svg.rstrip() + "\n")


def _unit(largest: float) -> tuple[str, float]:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if largest >= size:
            return unit, size
    return "", 1.0


def _side_by_side(values: Sequence[float]) -> list[float]:
    """Shifts along the axis that tell equal values apart: those within `EQUAL_COST` of it stand in a row."""
    reach = max(values) - min(values) or abs(values[0]) or 1.0
    shifts = [0.0] * len(values)
    order = sorted(range(len(values)), key=lambda i: values[i])
    groups = [[order[0]]]
    for i in order[1:]:
        if values[i] - values[groups[-1][0]] <= EQUAL_COST * reach:
            groups[-1].append(i)
        else:
            groups.append([i])
    for group in groups:
        for place, i in enumerate(sorted(group)):
            shifts[i] = 0.025 * reach * (place - (len(group) - 1) / 2)
    return shifts


def _is_known(value: float) -> bool:
    return not math.isnan(value)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
