"""The table of what skipping saves in GRPOTrainer."""

import json

import pytest
from benchmarks import grpo
from benchmarks.marks import between_marks


def test_ratios_are_those_of_each_turn():
    found = {"plain": [(1.0, 2.0), (2.0, 4.0), (1.0, 1.0)], "skips": [(0.5, 1.8), (0.8, 3.0), (0.6, 0.9)]}
    assert grpo.ratios(found, 0) == [0.5, 0.4, 0.6] and grpo.ratios(found, 1) == pytest.approx([0.9, 0.75, 0.9])
    text = grpo.text({"1/3": found})
    assert "| 1/3 | 0.50 (0.40 to 0.60) | 0.90 (0.75 to 0.90) | at most 0.70 | met |" in text
    assert "missed" in grpo.text({"2/3": found})


def test_the_page_is_that_of_the_results():
    page = (grpo.ROOT / "docs" / "rl.md").read_text()
    assert between_marks(page, *grpo.MARKS, grpo.text(json.loads(grpo.RESULTS.read_text()))) == page
