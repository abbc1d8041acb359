"""How often the decision rules of the shipped studies are wrong, and how often they decide: simulated, table committed.

    python benchmarks/verdicts.py            # a few minutes on one core; writes benchmarks/verdicts.md

Each study of `experiments/` is made up many times, with nothing between the arms (null) and with exactly what a rule
says (effects of the margin, and of twice the margin), over 3 to 40 seeds and over looks, with noise that is normal,
heavy-tailed, or seen through 360 or 8,192 test examples; its rules are applied as they are to records. A verdict is
false when what its rule asks for is not true of the effects that were put in. Nothing here is timed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from routing_lab.evidence.formatting import metric
from routing_lab.evidence.power import Noise, Simulation, simulate, true_values
from routing_lab.evidence.study import Study, load_study
from routing_lab.runs.files import write_text

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (3, 6, 12, 24, 40)
LOOKS = (5, 10, 15, 20, 25, 30, 35, 40)
NOISES: tuple[tuple[str, Noise, int], ...] = (
    ("normal", "normal", 0),
    ("heavy-tailed", "heavy-tailed", 0),
    ("360 examples", "discrete", 360),
    ("8,192 examples", "discrete", 8192),
)
NULL_DRAWS, DRAWS = 10_000, 2_000


def main() -> int:
    """Write the table; the exit code is 1 where a false-verdict rate under the null is above its nominal one."""
    studies = [study for path in sorted((ROOT / "experiments").glob("*.yaml")) if (study := _simulated(path))]
    null, above = _null_table(studies)
    text = "\n".join([_HEAD, *null, "", _POWER_HEAD, *_power_table(studies), ""])
    print(write_text(Path(__file__).with_suffix(".md"), text))
    for line in above:
        print(f"above nominal: {line}", file=sys.stderr)
    return int(bool(above))


def _simulated(path: Path) -> Study | None:
    """The study in a file, if every effect that its rules read is a sum of measured results."""
    if path.stem == "claims":
        return None
    study = load_study(path)
    is_linear = set(study.read_effects) <= study.weights.keys()
    return study if is_linear and not metric(study.metric).is_exact else None


def _null_table(studies: list[Study]) -> tuple[list[str], list[str]]:
    """False verdicts per 100 studies without any effect, and the cells above nominal by two standard errors."""
    lines = [f"| study | seeds | {' | '.join(name for name, _, _ in NOISES)} |", f"|---|---|{'---:|' * len(NOISES)}"]
    above = []
    for study in studies:
        for label, sizes in _designs():
            cells = []
            for name, noise, examples in NOISES:
                truth = dict.fromkeys(study.arms, 0.0)
                rate = _simulation(study, truth, sizes, noise, examples, NULL_DRAWS).false
                nominal = study.decision.alpha * len(study.family.ways)
                if rate > nominal + 2 * math.sqrt(nominal / NULL_DRAWS):
                    above.append(f"{study.name}, {label} seeds, {name}: {100 * rate:.2f} %")
                cells.append(f"{100 * rate:.2f}")
            lines.append(f"| {study.name} | {label} | {' | '.join(cells)} |")
    return lines, above


def _power_table(studies: list[Study]) -> Iterator[str]:
    """Power and false verdicts, per 100 studies in which exactly what a rule says is true, under normal noise."""
    designs = _designs()
    yield f"| study | rule | effects | {' | '.join(label for label, _ in designs)} |"
    yield f"|---|---|---|{'---:|' * len(designs)}"
    for study in studies:
        for number, branch in enumerate(study.branches):
            for size in (1, 2):
                truth = true_values(study, branch, size * study.margin_size)
                if truth is None:
                    continue
                found = [_simulation(study, truth, sizes, "normal", 0, DRAWS) for _, sizes in designs]
                cells = [
                    f"{100 * done.rates[number]:.0f} ({100 * done.false_word:.1f}; {100 * done.false:.1f})"
                    for done in found
                ]
                yield f"| {study.name} | {number + 1}: {branch.verdict} | {size} margin | {' | '.join(cells)} |"


def _designs() -> list[tuple[str, tuple[int, ...]]]:
    return [*((str(n), (n,)) for n in SEEDS), (f"looks at {LOOKS[0]}, {LOOKS[1]}, ..., {LOOKS[-1]}", LOOKS)]


def _simulation(
    study: Study, truth: dict[str, float], sizes: tuple[int, ...], noise: Noise, examples: int, draws: int
) -> Simulation:
    """At a spread of one margin, where rules decide neither always nor never."""
    return simulate(study, truth, sizes, study.margin_size, noise=noise, examples=examples, draws=draws)


_HEAD = f"""\
# Error rates and power of the shipped studies

Written by `python benchmarks/verdicts.py`; see there. Spread of a difference under one seed: one margin.

## False verdicts without any effect

Of 100 studies whose arms are all equal ({NULL_DRAWS:,} simulated for each number; its standard error is 0.22 at 5).
Every verdict word is held to 5; a study that could claim two of them falsely may come to more, and says so by its
family.
"""

_POWER_HEAD = f"""\
## Power, and false verdicts in brackets: of the word that is wrong most often; of all

Of 100 studies in which exactly what the rule says is true ({DRAWS:,} simulated for each number): signs of one or two
margins, nothing where equivalence is asked for. A sign of one margin lies on the border of equivalence, where it may be
called equivalent in 5 of 100. Where two effects lie there and lead to different wrong words, each word comes in 5 of
100, and one or the other in up to 10: the first number is what a study is held to (standard error 0.49 at 5), the
second the sum over its words.
"""

if __name__ == "__main__":
    sys.exit(main())
