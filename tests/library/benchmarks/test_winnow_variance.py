"""The table of variance ratios beside what stratified batches gain."""

import json
from pathlib import Path

import pytest
from benchmarks.marks import between_marks
from benchmarks.winnow import variance
from benchmarks.winnow.second import SEVEN

from depth import in_verify
from thresher_lab.advise.variance import VarianceRatio


def test_the_page_is_that_of_the_results():
    page = (Path(__file__).parents[3] / "docs" / "evidence" / "results.md").read_text()
    ratios = json.loads(variance.RESULTS.read_text())
    assert between_marks(page, *variance.MARKS, variance.text(ratios, variance.gains())) == page


def test_ratios_that_order_the_gains_have_a_correlation_of_minus_one():
    ratios = {task: [0.1 * number, 0.1 * number + 0.02] for number, task in enumerate(SEVEN[1:], 1)} | {SEVEN[0]: []}
    gained = {task: 1.0 - number for number, task in enumerate(SEVEN)}
    text = variance.text(ratios, gained)
    assert "On the 6 tasks" in text and "is -1.00" in text
    assert "| 0.11 (0.10 to 0.12) | +0.00 |" in text and text.index("not known") > text.index("0.11")


@in_verify
@pytest.mark.parametrize("found", [None, VarianceRatio(0.5, 0.4, 0.6)])
def test_it_measures_what_advise_does(monkeypatch, found):
    seen = []

    class Probed:
        def __init__(self, training, *, epochs, seed):
            seen.append((type(training).__name__, epochs, seed))

        def first_epochs(self, specs, seconds):
            seen.append((specs, seconds))

        def variance_ratio(self):
            return found

    monkeypatch.setattr(variance, "Probe", Probed)
    assert variance.measured("characters", 2) == (None if found is None else {"ratio": 0.5, "low": 0.4, "high": 0.6})
    assert seen == [("Training", 8, 2), ([], variance.PROBE_SECONDS)]
