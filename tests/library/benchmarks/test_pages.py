"""What docs/evidence/results.md quotes from the comparisons is what the committed results say."""

import copy

import pytest
from benchmarks import pages


@pytest.fixture
def found():
    return pages.load()


def test_the_page_is_that_of_the_results(found):
    page = pages.PAGE.read_text()
    assert pages.with_results(page, found) == page, "run python -m benchmarks.pages"


def test_the_page_follows_the_results(found, tmp_path, monkeypatch):
    changed = copy.deepcopy(found)
    row = next(row for row in changed["fashion-cnn"]["summary"] if row["method"] == "kakurenbo")
    row |= {
        "finding": "no loss",
        "difference": 0.0123,
        "ci95": [0.001, 0.02],
        "verdict": "no loss; better than everything",
    }
    changed["fashion-cnn"]["left_out"] = [
        {"method": "random_backprop", "control": "placebo", "why": "Nothing to permute"}
    ]
    monkeypatch.setattr(pages, "load", lambda: changed)
    file = tmp_path / "page.md"
    file.write_text(pages.PAGE.read_text())
    pages.main(["--page", str(file)])
    assert "+1.23 [+0.10, +2.00] | 0.892 | no loss; better than everything |" in file.read_text()
    assert "Skipped the placebo control of random_backprop: Nothing to permute." in file.read_text()


def test_those_that_fell_short_come_first(found):
    findings = [one.row["finding"] for one in pages.entries(found)]
    assert findings == sorted(findings, key=pages.FINDINGS.index) and {"loses", "no loss"} <= set(
        findings
    )
    losing = [
        one.row["difference"] for one in pages.entries(found) if one.row["finding"] == "loses"
    ]
    assert losing == sorted(losing)
