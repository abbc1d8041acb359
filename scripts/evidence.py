"""Write the pages, tables and figures of the committed studies again, and the README's "What we found".

    python scripts/evidence.py

Reads `experiments/results/*/runs`; trains nothing. The exit code is 2 where a registration or the claims are broken.
"""

from __future__ import annotations

import sys
from pathlib import Path

from routing_lab.evidence.found import write_evidence
from routing_lab.evidence.study import StudyError

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Write everything and name the files."""
    try:
        written = write_evidence(ROOT / "experiments", ROOT / "README.md")
    except StudyError as error:
        print(error, file=sys.stderr)
        return 2
    print(*(path.relative_to(ROOT) for path in written), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
