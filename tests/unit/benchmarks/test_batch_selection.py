"""The benchmark of whole epochs: its arithmetic, and that it runs and judges."""

import json

import pytest
from benchmarks import batch_selection


def test_what_is_counted_is_seen_where_nothing_but_backward_passes_changes():
    forward, backward, keep, rest = 2.0, 3.0, 0.25, 1.0
    seconds = {
        "full": [forward + backward + rest] * 2,
        "again": [forward + backward + rest] * 2,
        "once": [forward + keep * backward + rest] * 2,
        "twice": [forward + keep * (forward + backward) + rest] * 2,
        "forward": [forward] * 2,
        "both": [forward + backward] * 2,
    }
    found = batch_selection.ratios(seconds, keep)
    assert found["backward_to_forward"] == [1.5, 1.5]
    assert found["again"] == [1, 1]
    assert found["seen_once"] == pytest.approx([1, 1])
    assert found["seen_twice"] == pytest.approx([1, 1])
    assert found["once"] == pytest.approx([3.75 / 6] * 2)


def test_work_beside_the_passes_shows():
    seconds = {
        name: [value] for name, value in {"full": 10, "again": 10, "once": 8, "twice": 9, "forward": 4, "both": 9}.items()
    }
    assert batch_selection.ratios(seconds, 0.5)["seen_once"] == [2 / 2.5]


@pytest.mark.parametrize(("seen", "code"), [(0.96, 0), (0.94, 1)])
def test_it_judges_writes_and_prints(monkeypatch, tmp_path, capsys, seen, code):
    interval = {"median": seen, "low": seen, "high": seen, "coverage": 1.0}
    names = ("backward_to_forward", "again", "once", "twice", "seen_once", "seen_twice")
    monkeypatch.setattr(batch_selection, "measure", lambda name, *_: {"task": name, **dict.fromkeys(names, interval)})
    assert batch_selection.main(["--only", "fashion-mnist", "--out", str(tmp_path / "found.json")]) == code
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["missed"] == ["fashion-mnist"] * code
    assert written["measured"][0]["seen_once"]["median"] == seen
    assert f"{code} limits missed" in capsys.readouterr().out


def test_epochs_of_a_real_task(monkeypatch):
    monkeypatch.setattr(batch_selection, "built_in", lambda _: batch_selection_task())
    found = batch_selection.measure("digits", 128, 2)
    assert found["seconds"]["full"] > 0
    assert found["keep"] == pytest.approx(21 / 64)
    assert found["once"]["low"] <= found["once"]["median"] <= found["once"]["high"]


def batch_selection_task():
    from thresher.experiments.tasks import task_of

    return task_of("digits@128")
