"""Claims of papers, each tied to the effects that test it; a claim's verdict is computed from what these are shown to
be.

A study may bear on several claims, and its verdict answers its own question; a claim therefore names the effect of a
study that is its test, and what the effect must be if the claim holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from routing_lab.evidence.effects import describe
from routing_lab.evidence.rules import parse_condition
from routing_lab.evidence.study import StudyError
from routing_lab.evidence.tables import Column, Table
from routing_lab.evidence.verdict import StudyResult

NOT_RUN = "not run"
"""Verdict of a claim none of whose studies has all its cells."""

NOT_ASKED = "not asked"
"""Reading of a study that was registered before it asked for the effect that tests the claim."""


class ClaimTest(BaseModel):
    """An effect that tests a claim: `expected` is the condition (see `rules.CONDITIONS`) that it meets if the claim
    holds, by the margin of its study.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    study: Annotated[str, Field(min_length=1)]
    effect: Annotated[str, Field(min_length=1)]
    expected: Annotated[str, Field(min_length=1)]

    @field_validator("expected")
    @classmethod
    def _can_be_read(cls, value: str) -> str:
        parse_condition(value)
        return value

    def reading(self, result: StudyResult) -> str:
        """What a complete result says of the claim: `supports` where the condition is shown, `contradicted` where its
        contrary is; `insensitive` and `invalid` as the study; `NOT_ASKED` where the study as registered has no such
        effect.
        """
        if self.effect not in result.effects:
            return NOT_ASKED
        effect = result.effects[self.effect]
        if result.verdict.name in ("invalid", "insensitive"):
            return result.verdict.name
        if effect.insensitive:
            return "insensitive"
        condition = parse_condition(self.expected).relative_to(effect.neutral)
        if condition.holds(effect.evidence):
            return "supports"
        return "contradicted" if condition.is_refuted(effect.evidence) else "inconclusive"


class Claim(BaseModel):
    """A sentence that someone published, where, and the effects that test it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    claim: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]
    tests: Annotated[list[ClaimTest], Field(min_length=1)]


@dataclass(frozen=True)
class ClaimFinding:
    """A claim with what its studies found."""

    claim: Claim
    verdict: str
    results: tuple[StudyResult, ...]


def load_claims(path: Path | str) -> list[Claim]:
    """Read `claims.yaml`: a list under `claims`.

    Raises:
        StudyError: the file cannot be read, or has unknown or missing keys.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        entries = content["claims"] if isinstance(content, dict) and set(content) == {"claims"} else None
        if not isinstance(entries, list):
            raise StudyError(str(path), ["a list under the one key 'claims' is expected"])
        return [Claim.model_validate(entry) for entry in entries]
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise StudyError(str(path), lines) from None
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise StudyError(str(path), [" ".join(str(error).split())]) from error


def judge(claims: Iterable[Claim], results: Sequence[StudyResult]) -> list[ClaimFinding]:
    """The verdict of each claim from the complete results of its studies.

    `supports` beside `contradicted` gives `mixed`; otherwise what decided wins over what did not. Without a complete
    study the claim is `not run`.
    """
    findings = []
    for claim in claims:
        named = {test.study for test in claim.tests}
        found = tuple(result for result in results if result.study.name in named)
        readings = {
            test.reading(result)
            for test in claim.tests
            for result in found
            if result.study.name == test.study and result.verdict.is_complete
        } - {NOT_ASKED}
        findings.append(ClaimFinding(claim, _combined(readings), found))
    return findings


def claims_table(findings: Sequence[ClaimFinding]) -> Table:
    """One row per test of a claim and study result, each claim shown once; claims that nothing has tested yet are
    there too.
    """
    rows: list[tuple[Any, ...]] = []
    for finding in findings:
        claim = finding.claim
        for test in claim.tests:
            head = (finding.verdict, claim.claim, claim.source, test.study, f"{test.effect}: {test.expected}")
            results = [result for result in finding.results if result.study.name == test.study]
            rows += [(*head, result.scale, *_study_cells(test, result)) for result in results]
            if not results:
                rows.append((*head, None, NOT_RUN, None))
    columns = (
        Column("verdict", "verdict"),
        Column("claim", "claim"),
        Column("source", "source"),
        Column("study", "study"),
        Column("test", "holds if"),
        Column("scale", "scale"),
        Column("reading", "reading"),
        Column("says", "what was found"),
    )
    scales = ", ".join(sorted({result.scale for finding in findings for result in finding.results})) or NOT_RUN
    notes = ("verdicts are computed from the records of the studies; they hold at the scale shown",)
    return Table("claims", f"Claims and what the studies found, scale: {scales}", columns, tuple(rows), notes, once=3)


def _combined(readings: set[str]) -> str:
    if not readings:
        return NOT_RUN
    if {"supports", "contradicted"} <= readings:
        return "mixed"
    order = ("supports", "contradicted", "invalid", "insensitive", "inconclusive")
    return next(reading for reading in order if reading in readings)


def _study_cells(test: ClaimTest, result: StudyResult) -> tuple[str, str]:
    if not result.verdict.is_complete:
        return "incomplete", result.verdict.says
    if test.effect not in result.effects:
        return NOT_ASKED, "the study was registered without this effect"
    marked = " (exploratory)" if result.verdict.exploratory else ""
    return test.reading(result) + marked, describe(result.effects[test.effect])
