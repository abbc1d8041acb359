"""One page that shows what every layer kept: `python -m routing_lab.look RUN... [--images 16] [--out page.html]`.

The images are the first of the test split in the order of a seed, so that none is picked by hand; several runs are
shown side by side on the same images. The page is one file, works offline and is driven by the keyboard.

Exit codes: 0 written; 2 a run cannot be opened or the runs have different data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from routing_lab.config import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and print its path; returns the exit code."""
    options = _parser().parse_args(arguments)

    from routing_lab.probes.opening import look

    try:
        out = options.out or options.runs[0] / "probes" / "look.html"
        print(look(options.runs, out, options.images, options.seed))
    except (ConfigError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m routing_lab.look", description="A page that shows what every layer of some runs kept."
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs on the same data")
    parser.add_argument("--images", type=int, default=16, help="how many test images (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the images (default: 0)")
    parser.add_argument("--out", type=Path, help="the page (default: <first run>/probes/look.html)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
