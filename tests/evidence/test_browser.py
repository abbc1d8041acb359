"""The report in a real browser: nothing that it found lies outside a window or is broken, and it prints."""

from __future__ import annotations

from pathlib import Path

from tests.evidence.browser import measure, print_to_pdf
from tests.evidence.synthetic import write_arms
from tests.evidence.test_report import ARMS
from tests.evidence.test_study import CONTENT, write_study

from routing_lab.evidence.claims import load_claims
from routing_lab.evidence.registration import read_plans
from routing_lab.evidence.report import build_report, write_report
from routing_lab.evidence.study import parse_study
from routing_lab.runs.records import read_records

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_the_committed_study_and_every_claim_fit_phone_and_desk(tmp_path: Path) -> None:
    runs = EXPERIMENTS / "results" / "confound_2x2.toy" / "runs"
    claims = load_claims(EXPERIMENTS / "claims.yaml")
    report = build_report(read_records(runs), plans=read_plans(runs), claims=claims)
    (page,) = write_report(report, tmp_path / "out", ["html"])
    for width, seen in measure(page, (400, 1280), tmp_path / "browser").items():
        assert seen["page_width"] <= int(width)
        assert seen["cut"] == []
        assert seen["broken"] == []


def test_report_fits_phone_and_desk_draws_and_prints(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_arms(runs, ARMS, range(4), epochs=5)
    write_study(runs, {"amod_none": 0.93, "amod_multiply": 0.92}, epochs=3)
    report = build_report(read_records(runs), studies=[parse_study(CONTENT)])
    (page,) = write_report(report, tmp_path / "out", ["html"])

    found = measure(page, (400, 1280), tmp_path / "browser")
    assert set(found) == {"400", "1280"}
    for width, seen in found.items():
        assert seen["page_width"] <= int(width)
        assert seen["cut"] == []
        assert seen["broken"] == []
        assert len(seen["svgs"]) == 8
        assert all(w > 0.6 * min(int(width), 640) and h > 50 for w, h in seen["svgs"])
        assert seen["headings"] == ["Summary", "Study: confound", "Runs on digits"]
        assert seen["font"] >= 12
        assert seen["resources"] == []
    assert found["400"]["figure_font"] >= 6
    assert found["1280"]["figure_font"] >= 10

    pdf = print_to_pdf(page, tmp_path / "report.pdf", tmp_path / "browser")
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") + pdf.count(b"/Type/Page/") >= 1
