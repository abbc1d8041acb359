"""`python -m routing_lab.report <folder|study>`: tables, figures and verdicts from the records of runs.

Reads records only: nothing is trained, and torch is not imported. `wandb:<entity>/<project>` stands for the mirrored
runs of a Weights & Biases project wherever a folder of runs is asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routing_lab.evidence.claims import Claim
    from routing_lab.evidence.report import Report
    from routing_lab.evidence.study import Study

FORMATS = ("html", "md", "csv", "latex")
DEFAULT_FORMATS = ("html", "md", "csv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report, print its summary and the files; the exit code is 2 where there is nothing to report on."""
    options = _parser().parse_args(arguments)

    from routing_lab.evidence.report import write_report
    from routing_lab.evidence.study import StudyError
    from routing_lab.runs.records import RecordError

    try:
        _check_places(options)
        is_study = options.target.suffix in (".yaml", ".yml")
        report, out = _of_study(options) if is_study else _of_folder(options)
        formats = [name for name in FORMATS if getattr(options, name)] or DEFAULT_FORMATS
        written = write_report(report, options.out or out, formats)
    except (RecordError, StudyError, OSError) as error:
        from routing_lab.config.problems import lines_of

        print(lines_of(error), file=sys.stderr)
        return 2
    print("\n".join([*report.sections[0].lines, *map(str, written)]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m routing_lab.report",
        description="Tables, figures and verdicts from the records of runs. Nothing is trained.",
    )
    parser.add_argument("target", type=Path, help="folder of runs, wandb:<entity>/<project>, or a study file")
    for name in FORMATS:
        where = "report.tex" if name == "latex" else "one file per table" if name == "csv" else f"report.{name}"
        parser.add_argument(f"--{name}", action="store_true", help=f"write {where} (default: html, md and csv)")
    parser.add_argument(
        "--out", type=Path, help="folder to write to (default: <folder>/report, <study>.report, <project>.report)"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="runs of a study, as for the target (default: runs)"
    )
    parser.add_argument("--experiments", type=Path, default=Path("experiments"), help="folder of the study files")
    parser.add_argument("--claims", type=Path, help="claims to judge (default: claims.yaml among the study files)")
    return parser


def _check_places(options: argparse.Namespace) -> None:
    """Refuse claims that are not there and a folder that cannot be written to, before anything is read."""
    from routing_lab.places import unwritable
    from routing_lab.runs.records import RecordError

    if options.claims is not None and not options.claims.is_file():
        raise RecordError(f"--claims = {options.claims}: no such file")
    if options.out is not None and (reason := unwritable(options.out)) is not None:
        raise RecordError(f"--out = {options.out}: {reason}")


def _of_folder(options: argparse.Namespace) -> tuple[Report, Path]:
    from routing_lab.evidence.registration import read_plans
    from routing_lab.evidence.report import build_report
    from routing_lab.evidence.wandb_source import is_wandb

    records = _not_empty(_read(options.target), options.target)
    plans = read_plans(options.target)
    studies = _named_studies(options.experiments, records)
    claims = _claims(options) if plans or studies or options.claims else []
    out = Path(f"{options.target.name}.report") if is_wandb(options.target) else options.target / "report"
    return build_report(records, plans=plans, studies=studies, claims=claims), out


def _of_study(options: argparse.Namespace) -> tuple[Report, Path]:
    from routing_lab.evidence.registration import find_plan
    from routing_lab.evidence.report import build_report
    from routing_lab.evidence.study import load_study

    study = load_study(options.target)
    plans = [plan for scale in study.scales if (plan := find_plan(options.runs, study.name, scale))]
    names = {study.name, *(study.key(scale) for scale in study.scales)}
    planned = {cell.run_id for plan in plans for cell in plan.cells}
    records = [record for record in _read(options.runs) if record["study"] in names or record["run_id"] in planned]
    _not_empty(records, options.runs, f" of study {study.name}")
    claims = [
        claim for claim in _claims(options, options.target.parent) if study.name in {t.study for t in claim.tests}
    ]
    report = build_report(records, plans=plans, studies=[study], claims=claims, title=f"Study {study.name}")
    return report, options.target.parent / f"{study.name}.report"


def _read(runs: Path) -> list[dict[str, Any]]:
    from routing_lab.evidence.wandb_source import WITHOUT_PREDICTIONS, is_wandb, read_source

    if is_wandb(runs):
        print(f"{runs}: {WITHOUT_PREDICTIONS}", file=sys.stderr)
    return read_source(runs)


def _not_empty(records: list[dict[str, Any]], runs: Path, which: str = "") -> list[dict[str, Any]]:
    from routing_lab.runs.records import RecordError

    if not records:
        raise RecordError(f"{runs}: no runs{which} there")
    return records


def _named_studies(folder: Path, records: Sequence[Mapping[str, Any]]) -> list[Study]:
    """The study files that some record names."""
    from routing_lab.evidence.study import load_study

    names = sorted({str(record["study"]).split(".", 1)[0] for record in records if record["study"]})
    return [load_study(path) for name in names if (path := folder / f"{name}.yaml").exists()]


def _claims(options: argparse.Namespace, folder: Path | None = None) -> list[Claim]:
    from routing_lab.evidence.claims import load_claims

    default = (folder or options.experiments) / "claims.yaml"
    if options.claims is None and not default.exists():
        return []
    return load_claims(options.claims or default)


if __name__ == "__main__":
    sys.exit(main())
