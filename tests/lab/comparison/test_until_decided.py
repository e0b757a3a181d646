"""Comparisons that add seeds until their verdicts are decided."""

import pytest

from thresher_lab.comparison import compare as until_decided
from thresher_lab.comparison.compare import compare_until_decided, look_sizes, undecided
from thresher_lab.comparison.statistics import Paired, against_controls, findings


def row(finding, against=(), method="m", control_of=None):
    return {
        "method": method,
        "control_of": control_of,
        "finding": finding,
        "against": {k: {"finding": k} for k in against},
    }


@pytest.mark.parametrize(
    ("first", "most", "sizes"),
    [(3, 12, [3, 5, 8, 12]), (1, 3, [1, 2, 3]), (5, 5, [5]), (3, 4, [3, 4])],
)
def test_looks(first, most, sizes):
    assert look_sizes(first, most) == sizes


def test_what_is_undecided():
    rows = [
        row(None, method="full"),
        row("no loss", ["better", "no better"]),
        row("loses", ["unclear"], "n"),
    ]
    rows += [row("unclear", method="o"), row("unclear", method="uniform@0.5", control_of="m")]
    assert undecided({"summary": rows}) == ["n", "o"]


def compared(monkeypatch, decided_at):
    """Puts a comparison in the place of `compare` that is decided with so many seeds; returns what it was called with."""
    calls = []

    def compare(task, methods, seeds, epochs, out, **options):
        calls.append((list(seeds), options))
        return {
            "summary": [row("no loss" if len(seeds) >= decided_at else "unclear")],
            "seeds": len(seeds),
        }

    monkeypatch.setattr(until_decided, "compare", compare)
    return calls


@pytest.mark.parametrize(("decided_at", "last"), [(3, 3), (4, 5), (8, 8), (99, 12)])
def test_seeds_are_added_until_it_is_decided(monkeypatch, tmp_path, decided_at, last):
    calls = compared(monkeypatch, decided_at)
    found = compare_until_decided("digits", [], [0, 1, 2], 3, tmp_path, most=12, margin=0.5)
    assert found["seeds"] == last == len(calls[-1][0])
    assert calls[-1][0] == list(range(last)) and all(
        options == {"looks": [3, 5, 8, 12], "margin": 0.5} for _, options in calls
    )


def test_own_seeds_come_first(monkeypatch, tmp_path):
    calls = compared(monkeypatch, 99)
    compare_until_decided("digits", [], [7, 1], 3, tmp_path, most=5)
    assert calls[-1][0] == [7, 1, 0, 2, 3]


def test_fewer_seeds_than_given_are_refused(monkeypatch, tmp_path):
    calls = compared(monkeypatch, 1)
    with pytest.raises(
        ValueError, match="--max-seeds 2 is less than the 3 seeds of --seeds; give at least as many"
    ):
        compare_until_decided("digits", [], [0, 1, 2], 3, tmp_path, most=2)
    assert calls == []


def test_every_look_costs_certainty():
    """A difference that one look shows is not shown by one of several."""
    paired = Paired.of([0.010, 0.030, 0.024, 0.012, 0.002])
    assert 0.0062 < paired.chance(0.0) < 0.025
    assert against_controls({"m": paired}, 0.005) == {"m": "better"}
    assert against_controls({"m": paired}, 0.005, looks=4) == {"m": "unclear"}
    assert findings({"m": paired}, 0.0001) == {"m": "no loss"} and findings(
        {"m": paired}, 0.0001, looks=4
    ) == {"m": "unclear"}
