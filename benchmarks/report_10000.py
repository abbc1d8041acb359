"""Time and memory of the report over many records.

    python benchmarks/report_10000.py [--runs 10000] [--formats html md csv]

Writes invented run folders into a temporary folder, then runs `python -m routing_lab.report` on them in a fresh
process, and prints seconds and peak memory of reading alone and of each set of formats.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The generator of invented run folders is part of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.evidence.synthetic import write_arms

SEEDS = 5
EXTRA = {"more": {f"key_{i}": 0.5 for i in range(90)}}
"""Brings the invented configurations to the size of real ones, about 125 keys."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--formats", nargs="*", default=["html", "md", "csv"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        started = time.perf_counter()
        write_many(runs, options.runs)
        print(f"{options.runs} run folders written in {time.perf_counter() - started:.1f} s")
        read = "import sys; from routing_lab.runs.records import read_records; read_records(sys.argv[1])"
        measure("read_records", [sys.executable, "-c", read, str(runs)])
        for formats in ([name] for name in options.formats):
            flags = [f"--{name}" for name in formats]
            measure(" ".join(flags), [sys.executable, "-m", "routing_lab.report", str(runs), *flags])
        flags = [f"--{name}" for name in options.formats]
        measure(" ".join(flags), [sys.executable, "-m", "routing_lab.report", str(runs), *flags])
        size = (runs / "report" / "report.html").stat().st_size if (runs / "report" / "report.html").exists() else 0
        print(f"report.html: {size / 1e6:.1f} MB")


def write_many(runs: Path, count: int) -> None:
    """`count` runs in arms of `SEEDS` seeds, over two data sets, with a history of ten epochs each."""
    rates = itertools.count(1)
    choices = itertools.cycle(itertools.product(("dense", "amod", "linear", "random"), ("digits", "cifar10")))
    for number in range(0, count, SEEDS):
        router, data = next(choices)
        changes = {"router": router, "data.name": data, "train.lr": 1e-6 * next(rates)}
        seeds = range(min(SEEDS, count - number))
        write_arms(runs, {"arm": (changes, 0.9 + 0.00001 * (number % 5000))}, seeds, epochs=10, extra=EXTRA)


def measure(what: str, command: list[str]) -> None:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak = after.ru_maxrss / 1024
    print(f"{what}: {seconds:.2f} s ({busy:.2f} s of CPU), largest process so far {peak:.0f} MiB")


if __name__ == "__main__":
    main()
