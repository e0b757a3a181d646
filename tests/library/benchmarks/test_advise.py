"""The benchmark of what advise foretells: its arithmetic, and that it runs and judges."""

import pytest
from benchmarks import advise as bench

HELPS = ["Methods that select in the batch load every candidate: they cannot help.", "Of the others, uniform can help."]


def foretold(method="uniform:keep=0.5", saves=0.4, at_most=0.45):
    return {"method": method, "saves": saves, "at_most": at_most}


@pytest.mark.parametrize(
    ("saves", "at_most", "cpu", "ok"),
    [
        (0.40, 0.45, [0.31, 0.33, 0.35], True),
        (0.40, 0.45, [0.27, 0.29, 0.99], False),
        (0.40, 0.45, [0.49], True),
        (0.40, 0.45, [0.51], False),
        (0.40, 0.20, [0.31], False),
        (0.40, 0.22, [0.31], True),
        (-0.10, 0.0, [-0.19], True),
        (-0.10, 0.0, [-0.21], False),
    ],
)
def test_ten_points_off_are_allowed_and_no_more_above_the_most(saves, at_most, cpu, ok):
    row = bench.row_of(foretold(saves=saves, at_most=at_most), {"cpu": cpu, "wall": [0.2]})
    assert (row["ok"], row["cpu"], row["wall"], row["repeats"]) == (ok, sorted(cpu)[len(cpu) // 2], 0.2, cpu)


def test_the_largest_savings_and_full_training_again_stand_beside_the_rows(monkeypatch):
    rows = [foretold("kakurenbo", 0.1), foretold("infobatch", 0.3)]
    measured = {"again": {"cpu": [0.01, 0.03], "wall": [0.0, 0.0]}}
    measured |= {"kakurenbo": {"cpu": [0.2], "wall": [0.1]}, "infobatch": {"cpu": [0.25], "wall": [0.3]}}
    monkeypatch.setattr(bench, "advise", lambda name, specs, *, epochs: {"methods": rows, "epochs": epochs})
    monkeypatch.setattr(bench, "saved", lambda name, specs, epochs, repeats: measured)
    found = bench.compare("digits", epochs=2, repeats=2)
    assert found["again"] == pytest.approx(0.02)
    assert found["largest"] == {"predicted": 0.3, "measured": 0.25}
    assert [row["method"] for row in found["rows"]] == ["kakurenbo", "infobatch"]


@pytest.mark.parametrize(("sentences", "helps"), [(HELPS, True), (HELPS[:1], False), (HELPS[1:], False)])
def test_advice_on_an_input_bound_training_must_name_what_helps(sentences, helps):
    assert bench.names_what_helps({"sentences": sentences}) == helps


def judged(ok, sentences=HELPS):
    row = {**foretold(), "cpu": 0.38, "wall": 0.36, "ok": ok}
    advice = {"epochs": 6, "sentences": sentences}
    return {"advice": advice, "again": 0.011, "largest": {"predicted": 0.4, "measured": 0.38}, "rows": [row]}
