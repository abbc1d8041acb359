"""Ratios of running times on a busy machine: alternating repetitions, medians of the ratios within a round."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def arguments(description: str | None, **numbers: int) -> argparse.Namespace:
    """Options of a benchmark: `--threads`, `--repetitions` and whole numbers of its own."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    for name, default in {"threads": 2, "repetitions": 11, **numbers}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"PyTorch {torch.__version__}, float32, {options.threads} threads, {options.repetitions} repetitions")
    return options


def ratios(functions: Mapping[str, Callable[[], object]], repetitions: int = 11) -> dict[str, float]:
    """Time of each function over that of the first one, the median over `repetitions` rounds.

    Every round runs each function once, so that what slows the machine down slows all of them.
    """
    for function in functions.values():
        function()
    first, *_ = functions
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repetitions):
        seconds = {}
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name] = time.perf_counter() - start
        for name, value in seconds.items():
            found[name].append(value / seconds[first])
    return {name: statistics.median(values) for name, values in found.items()}


def show(title: str, columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """A small table on the terminal, in Markdown."""
    print(f"\n{title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row) + " |")
