"""Claims of papers, each tied to the studies that test it; a claim's verdict is computed from theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routing_lab.evidence.study import StudyError
from routing_lab.evidence.tables import Column, Table
from routing_lab.evidence.verdict import StudyResult

NOT_RUN = "not run"
"""Verdict of a claim none of whose studies has all its cells."""


class ClaimTest(BaseModel):
    """A study that bears on a claim. `is_opposite`: the study's hypothesis is that the claim is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    study: Annotated[str, Field(min_length=1)]
    is_opposite: bool = False

    def reading(self, verdict: str) -> str:
        """What a verdict on the study says of the claim."""
        swapped = {"supports": "contradicted", "contradicted": "supports"}
        return swapped.get(verdict, verdict) if self.is_opposite else verdict


class Claim(BaseModel):
    """A sentence that someone published, where, and the studies that test it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    claim: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]
    tests: Annotated[list[ClaimTest], Field(min_length=1)]


@dataclass(frozen=True)
class Finding:
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


def judge(claims: Iterable[Claim], results: Sequence[StudyResult]) -> list[Finding]:
    """The verdict of each claim from the complete results of its studies.

    One reading stands as it is. `supports` beside `contradicted`, or any `mixed`, gives `mixed`; otherwise what
    decided wins over `inconclusive`. Without a complete study the claim is `not run`.
    """
    findings = []
    for claim in claims:
        found = tuple(result for test in claim.tests for result in results if result.study.name == test.study)
        opposite = {test.study: test for test in claim.tests}
        readings = {
            opposite[result.study.name].reading(result.verdict.name) for result in found if result.verdict.is_complete
        }
        findings.append(Finding(claim, _combined(readings), found))
    return findings


def claims_table(findings: Sequence[Finding]) -> Table:
    """One row per claim and study result; claims that nothing has tested yet are there too."""
    rows: list[tuple[Any, ...]] = []
    for finding in findings:
        claim = finding.claim
        names: Mapping[str, list[StudyResult]] = {test.study: [] for test in claim.tests}
        for result in finding.results:
            names[result.study.name].append(result)
        for name, results in names.items():
            for result in results:
                rows.append((claim.claim, claim.source, finding.verdict, name, result.scale, *_study_cells(result)))
            if not results:
                rows.append((claim.claim, claim.source, finding.verdict, name, None, NOT_RUN, None))
    columns = (
        Column("claim", "claim"),
        Column("source", "source"),
        Column("verdict", "verdict"),
        Column("study", "study"),
        Column("scale", "scale"),
        Column("study_verdict", "verdict of the study"),
        Column("says", "what it says"),
    )
    scales = ", ".join(sorted({result.scale for finding in findings for result in finding.results})) or NOT_RUN
    notes = ("verdicts are computed from the records of the studies; they hold at the scale shown",)
    return Table("claims", f"Claims and what the studies found, scale: {scales}", columns, tuple(rows), notes)


def _combined(readings: set[str]) -> str:
    if not readings:
        return NOT_RUN
    if "mixed" in readings or {"supports", "contradicted"} <= readings:
        return "mixed"
    decided = readings - {"inconclusive"}
    return decided.pop() if decided else "inconclusive"


def _study_cells(result: StudyResult) -> tuple[str, str]:
    state = result.verdict.name if result.verdict.is_complete else "incomplete"
    return state, result.verdict.says
