"""The report in a real browser: it opens offline, fits a phone, draws its figures and prints."""

from __future__ import annotations

from pathlib import Path

from tests.evidence.browser import measure, print_to_pdf
from tests.evidence.synthetic import write_arms
from tests.evidence.test_report import ARMS
from tests.evidence.test_study import CONTENT, write_study

from routing_lab.evidence.report import build_report, write_report
from routing_lab.evidence.study import parse_study
from routing_lab.runs.records import read_records


def test_report_fits_phone_and_desk_draws_and_prints(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_arms(runs, ARMS, range(4), epochs=5)
    write_study(runs, {"amod_none": 0.93, "amod_multiply": 0.92}, epochs=3)
    report = build_report(read_records(runs), studies=[parse_study(CONTENT)])
    (page,) = write_report(report, tmp_path / "out", ["html"])

    found = measure(page, (390, 1200), tmp_path / "browser")
    assert set(found) == {"390", "1200"}
    for width, seen in found.items():
        assert seen["page_width"] <= int(width)
        assert len(seen["svgs"]) == 8
        assert all(w > 0.6 * min(int(width), 640) and h > 50 for w, h in seen["svgs"])
        assert seen["headings"] == ["Summary", "Study: confound", "Runs on digits"]
        assert seen["font"] >= 12
        assert seen["resources"] == []
    assert found["390"]["figure_font"] >= 6
    assert found["1200"]["figure_font"] >= 10

    pdf = print_to_pdf(page, tmp_path / "report.pdf", tmp_path / "browser")
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") + pdf.count(b"/Type/Page/") >= 1
