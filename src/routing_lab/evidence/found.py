"""What the committed studies found: their pages, the page over all of them, and the section of the README.

Everything is written from the records under `experiments/results/<study>/runs`, and from nothing else; the same records
give the same bytes. Each sentence says at which scale it holds, and what could not have been seen there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routing_lab.evidence import formatting
from routing_lab.evidence.claims import NOT_RUN, Claim, ClaimFinding, judge, load_claims
from routing_lab.evidence.effects import Effect, describe
from routing_lab.evidence.registration import read_plans
from routing_lab.evidence.report import build_report, write_report
from routing_lab.evidence.sections import facts_table
from routing_lab.evidence.study import StudyError
from routing_lab.evidence.templates import template
from routing_lab.evidence.verdict import StudyResult, evaluate
from routing_lab.runs.files import write_text
from routing_lab.runs.records import read_records

BEGIN, END = "<!-- what we found: written by `make evidence` -->", "<!-- end of what we found -->"
"""Lines of the README between which the section stands."""


@dataclass(frozen=True)
class Committed:
    """A folder of committed runs with the studies that were registered there."""

    folder: Path
    records: tuple[Mapping[str, Any], ...]
    results: tuple[StudyResult, ...]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name


def committed(results: Path) -> list[Committed]:
    """The committed studies, ordered by name: every folder of `results` that holds `runs`."""
    found = []
    for folder in sorted(path.parent for path in results.glob("*/runs") if path.is_dir()):
        records, plans = read_records(folder / "runs"), read_plans(folder / "runs")
        judged = tuple(evaluate(plan.study, records, plan=plan) for plan in plans)
        found.append(Committed(folder, tuple(records), judged))
    return found


def write_evidence(experiments: Path, readme: Path) -> list[Path]:
    """Write the page, tables and figures of every committed study, the page over all, and the README's section.

    Args:
        experiments: folder of the study files and `claims.yaml`, with the committed studies under `results`.
        readme: a file with the lines `BEGIN` and `END`, between which the section is replaced.

    Raises:
        StudyError: a registration or the claims cannot be read, or the README lacks the lines.
    """
    studies, claims = committed(experiments / "results"), load_claims(experiments / "claims.yaml")
    written = []
    for study in studies:
        own = [claim for claim in claims if {t.study for t in claim.tests} & {r.study.name for r in study.results}]
        report = build_report(study.records, results=study.results, claims=own, title=study.name)
        written += write_report(report, study.folder)
    (experiments / "results").mkdir(exist_ok=True)
    written.append(write_text(experiments / "results" / "README.md", results_page(studies, claims)))
    text = readme.read_text(encoding="utf-8")
    return [*written, write_text(readme, with_section(text, found_section(studies, claims), str(readme)))]


def results_page(studies: Sequence[Committed], claims: Sequence[Claim]) -> str:
    """The page over all committed studies, as Markdown."""
    return _rendered("results.md.j2", studies, claims)


def found_section(studies: Sequence[Committed], claims: Sequence[Claim]) -> str:
    """The section of the README, as Markdown."""
    return _rendered("found.md.j2", studies, claims)


def with_section(text: str, section: str, name: str = "README") -> str:
    """A text with what stands between the lines `BEGIN` and `END` replaced.

    Raises:
        StudyError: the text has not one of each, in this order.
    """
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise StudyError(name, [f"the lines {BEGIN!r} and {END!r} are expected"])
    return f"{before}{begin}{section}{end}{after}"


def sentence(result: StudyResult, effect: Effect) -> str:
    """What an effect was found to be, where, at which cost, and what is excluded or could not have been seen."""
    where = setting(result)
    if effect.refusal or effect.insensitive:
        return f"{effect.name}: {effect.refusal or effect.insensitive} ({where})."
    is_signed = effect.neutral == 0
    unit = " points" if effect.kind == "percent" else ""

    def shown(value: float, *, signed: bool = is_signed) -> str:
        return formatting.number(value, effect.kind, signed=signed)

    level = formatting.level(1 - result.look.levels.two_sided)
    text = f"{effect.name}: {effect.state_text}, {shown(effect.estimate)}{unit}"
    if effect.is_exact:
        return f"{text}, counted ({where})."
    text += (
        f", {level} interval {formatting.interval(effect.low, effect.high, effect.kind, signed=is_signed)} ({where})"
    )
    if effect.is_withheld or effect.state_text not in ("superior", "inferior", "equivalent"):
        text += f"; effects outside {shown(effect.low)} to {shown(effect.high)}{unit} are excluded"
        if not math.isnan(effect.detectable):
            size = shown(effect.detectable, signed=False)
            text += f", and one of {size}{unit} would have been found with probability 0.8"
    elif effect.state_text == "equivalent":
        text += f"; it lies within the margin of {shown(effect.margin, signed=False)}{unit}"
    if effect.unequal:
        text += f"; not at equal cost: {effect.unequal}"
    return f"{text}."


def setting(result: StudyResult) -> str:
    """Scale, backbone, data, seeds and test set of a study in one phrase."""
    facts = dict(facts_table(result).rows)
    parts = [f"{result.scale} scale"]
    if "backbone" in facts:
        parts.append(f"{facts['backbone']} on {facts.get('data', 'unknown data')}")
    parts.append(f"{len(result.look.seeds)} seeds")
    parts += [f"{facts['test set'].replace('examples', 'test examples')}"] if "test set" in facts else []
    return ", ".join(parts)


def _rendered(name: str, studies: Sequence[Committed], claims: Sequence[Claim]) -> str:
    findings = judge(claims, [result for study in studies for result in study.results])
    known = [finding for finding in findings if finding.verdict != NOT_RUN]
    return (
        template(name)
        .render(
            studies=studies,
            known=known,
            open=[finding for finding in findings if finding.verdict == NOT_RUN],
            setting=setting,
            sentences=_sentences,
            outcomes=_outcomes,
            grounds=_grounds,
            scales=lambda finding: ", ".join(dict.fromkeys(result.scale for result in finding.results)),
        )
        .strip()
        + "\n"
    )


def _sentences(result: StudyResult) -> list[str]:
    """A sentence for each effect that the rules read, and one for each positive control."""
    names = dict.fromkeys([*result.study.read_effects, *result.study.controls.positive])
    return [sentence(result, result.effects[name]) for name in names]


def _outcomes(result: StudyResult) -> str:
    """What every effect that the rules read was found to be, and at which cost, in one line."""
    effects = [result.effects[name] for name in result.study.read_effects]
    return "; ".join(f"{describe(e)}{f' ({e.unequal})' if e.unequal else ''}" for e in effects)


def _grounds(finding: ClaimFinding) -> list[str]:
    """What each complete study that asked for it says of a claim, at its scale."""
    return [
        f"{test.reading(result)} in {result.study.name}: {sentence(result, result.effects[test.effect])}"
        for test in finding.claim.tests
        for result in finding.results
        if result.study.name == test.study and result.verdict.is_complete and test.effect in result.effects
    ]
