"""Seconds until the command answers, each in a fresh process, over those of importing torch, timm and Lightning.

python benchmarks/cold_start.py [--repetitions 5]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from ratios import arguments, show

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import torch, timm, lightning": ["-c", "import torch, timm, lightning.pytorch"],
    "train --cfg job": ["-m", "routing_lab.train", "--cfg", "job"],
    "train --help": ["-m", "routing_lab.train", "--help"],
    "train, refused": ["-m", "routing_lab.train", "capacity.fraction=2"],
}


def main() -> None:
    options = arguments(__doc__, repetitions=5)
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.repetitions):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    base = median["import torch, timm, lightning"]
    show("Cold start", ("command", "seconds", "over importing"), [(n, s, s / base) for n, s in median.items()])


if __name__ == "__main__":
    main()
