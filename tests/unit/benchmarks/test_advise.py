"""The benchmark of what advise foretells: its arithmetic, and that it runs and judges."""

import json

import numpy as np
import pytest
import torch
from benchmarks import advise as bench

from thresher.experiments.training.specs import parse_methods

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


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (judged(ok=True), []),
        (judged(ok=False), ["input: uniform:keep=0.5"]),
        (
            judged(ok=True, sentences=[]),
            ["input: sentences on methods that select in the batch and on methods that plan epochs"],
        ),
    ],
)
def test_it_judges_writes_and_prints(monkeypatch, tmp_path, capsys, found, missed):
    asked = []
    monkeypatch.setattr(bench, "compare", lambda *given: (asked.append(given), found)[1])
    assert bench.main(["--quick", "--only", "input", "--out", str(tmp_path / "found.json")]) == bool(missed)
    assert asked == [(bench.TASKS["input"], 2, 1)]
    written, printed = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    assert written["missed"] == missed and written["quick"] and written["found"]["input"]["again"] == 0.011
    assert f"{len(missed)} predictions missed" in printed and "input, 6 epochs; A/A +1.1" in printed
    assert "largest: 40.0 predicted, 38.0 measured" in printed
    assert [word for line in printed.splitlines() if "uniform:keep=0.5 " in line for word in line.split()] == [
        "uniform:keep=0.5", "40.0", "45.0", "38.0", "36.0", "ok" if found["rows"][0]["ok"] else "MISSED",
    ]  # fmt: skip
    assert all(sentence in printed for sentence in found["advice"]["sentences"])


def test_advice_must_name_what_helps_of_the_input_bound_training_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "compare", lambda *_: judged(ok=True, sentences=[]))
    assert bench.main(["--only", "resnet8", "--out", str(tmp_path / "found.json")]) == 0


def test_pictures_that_are_decompressed_are_the_digits():
    pixels = np.arange(128, dtype=np.uint8).reshape(2, 8, 8) % 17
    data = bench.Compressed(pixels, [3, 7])
    picture, label = data[1]
    assert len(data) == 2 and label == 7
    assert torch.equal(picture, torch.from_numpy(pixels[1].flatten()).float() / 16)


def test_savings_of_a_real_task_are_shares_of_full_training():
    specs = parse_methods("uniform:keep=0.25,selective_backprop:keep=0.5:forward_passes=once")
    found = bench.saved("digits@128", specs, epochs=1, repeats=2)
    assert list(found) == ["again", *(spec.label for spec in specs)]
    shares = [share for clocks in found.values() for clock in ("wall", "cpu") for share in clocks[clock]]
    assert len(shares) == 12 and all(share < 1 for share in shares)
