"""The benchmark of large datasets: it measures what it says, judges, writes, and models what it counted."""

import json
from pathlib import Path

import pytest
from benchmarks import many_ranks, scale
from benchmarks.many_ranks import Size

from depth import depth

N = depth(100_000, 1_000_000)


@pytest.mark.parametrize("size", [Size(5000, 3), Size(2**14, 16), Size(100_000, 7)])
def test_what_travels_is_what_the_formulas_say(size):
    counted = many_ranks.traffic(size)
    assert counted == many_ranks.traffic_of(size, counted["counts"])
    assert counted["marks"] - 24 >= size.n / 8 and counted["places"] >= size.n / 512


def test_signals_that_wait_and_travel():
    """Ids, 4 bytes for the place on the way, loss, correct and confidence; and how often the sample was trained on."""
    assert many_ranks.home() == {"noted": (8 + 4 + 1 + 4 + 1) + (8 + 4 + 1), "sent": (4 + 4 + 1 + 4) + (4 + 4)}


def test_memory_of_a_rank():
    assert many_ranks.memory(Size(2**20, 4), 31.0) == {
        "records": 13 * 2**18,
        "marks": 2**17,
        "places": 8 * 2**10,
        "noted": 31.0 * 2**18,
    }


def test_the_page_shows_the_results():
    results = json.loads(scale.RESULTS.read_text())
    page = Path(scale.__file__).parents[1] / "docs" / "scale.md"
    assert results["n"] == scale.N and not results["missed"]
    assert "\n".join((scale.MARKS[0], "", scale.page_part(results), "", scale.MARKS[1])) in page.read_text()
