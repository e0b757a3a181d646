"""The benchmark of whole epochs: its arithmetic, and that it runs and judges."""

import json
from types import SimpleNamespace

import pytest
from benchmarks import batch_selection

from thresher.experiments.recipes.running import task_of

FIGURES = ("backward_to_forward", "again", "once", "twice", "known", "of_possible", "seen_once", "seen_twice")


def test_what_is_counted_is_seen_where_nothing_but_backward_passes_changes():
    forward, backward, keep, rest = 2.0, 3.0, 0.25, 1.0
    seconds = {
        "full": forward + backward + rest,
        "again": forward + backward + rest,
        "once": forward + keep * backward + rest,
        "twice": forward + keep * (forward + backward) + rest,
        "known": forward + keep * backward + rest,
        "forward": forward,
        "both": forward + backward,
    }
    found = {name: figure(seconds, keep) for name, figure in batch_selection.FIGURES.items()}
    assert found == pytest.approx(
        {
            "backward_to_forward": 1.5,
            "again": 1,
            "once": 3.75 / 6,
            "twice": 4.25 / 6,
            "known": 3.75 / 6,
            "of_possible": 1,
            "seen_once": 1,
            "seen_twice": 1,
        }
    )


def test_work_beside_the_passes_shows():
    seconds = {"full": 10, "again": 10, "once": 8, "twice": 9, "forward": 4, "both": 9}
    assert batch_selection.seen_once(seconds, 0.5) == 2 / 2.5
    assert batch_selection.of_possible(seconds | {"known": 7}, 0.5) == 2 / 3
    assert batch_selection.seen_twice(seconds, 0.5) == 1 / 0.5


def test_both_full_sides_are_what_is_compared_with():
    seconds = {"full": 9, "again": 11, "once": 8, "twice": 9, "forward": 4, "both": 9}
    assert batch_selection.seen_once(seconds, 0.5) == 2 / 2.5
    assert batch_selection.FIGURES["once"](seconds, 0.5) == 0.8


@pytest.mark.parametrize(
    ("low", "high", "code", "untold"),
    [(0.92, 0.96, 0, False), (0.9, 0.9, 0, False), (0.85, 0.95, 0, True), (0.8, 0.89, 1, False)],
)
def test_it_judges_the_interval_writes_and_prints(monkeypatch, tmp_path, capsys, low, high, code, untold):
    interval = {"median": (low + high) / 2, "low": low, "high": high, "coverage": 1.0}
    monkeypatch.setattr(batch_selection, "measure", lambda name, *_: {"task": name, **dict.fromkeys(FIGURES, interval)})
    assert batch_selection.main(["--only", "fashion-mnist", "--out", str(tmp_path / "found.json")]) == code
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["missed"] == ["fashion-mnist"] * code and written["cannot_tell"] == ["fashion-mnist"] * untold
    assert written["measured"][0]["of_possible"]["low"] == low
    printed = capsys.readouterr().out
    assert f"{code} limits missed" in printed and ("fashion-mnist: cannot tell" in printed) == untold


def test_tasks_that_are_not_measured_keep_their_figures(monkeypatch, tmp_path, capsys):
    interval = {"median": 1.0, "low": 1.0, "high": 1.0, "coverage": 1.0}
    monkeypatch.setattr(batch_selection, "measure", lambda name, *_: {"task": f"{name}@5"} | dict.fromkeys(FIGURES, interval))
    out = tmp_path / "found.json"
    old = {"task": "fashion-mnist-resnet8@7"} | {name: interval | {"high": 0.8} for name in FIGURES}
    out.write_text(json.dumps({"measured": [old, {"task": "fashion-mnist@1"}], "quick": False}))
    assert batch_selection.main(["--only", "fashion-mnist", "--out", str(out)]) == 1
    written = json.loads(out.read_text())
    assert [row["task"] for row in written["measured"]] == ["fashion-mnist@5", "fashion-mnist-resnet8@7"]
    assert written["missed"] == ["fashion-mnist-resnet8@7"]
    with pytest.raises(SystemExit):
        batch_selection.main(["--quick", "--only", "fashion-mnist", "--out", str(out)])
    assert "was measured without --quick: give another --out" in " ".join(capsys.readouterr().err.split())
    assert json.loads(out.read_text()) == written


def test_epochs_of_a_real_task(monkeypatch):
    monkeypatch.setattr(batch_selection, "built_in", lambda _: task_of("digits@192"))
    seconds = batch_selection.seconds_of("digits", 192, 2)
    assert set(seconds) == {"full", "again", "once", "twice", "known", "forward", "both"}
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    with pytest.raises(ValueError, match="digits@320: the 2 steps of two passes do not divide its 5 batches"):
        monkeypatch.setattr(batch_selection, "built_in", lambda _: task_of("digits@320"))
        batch_selection.seconds_of("digits", 320, 2)


def test_the_figure_of_each_process_makes_one_value(monkeypatch):
    monkeypatch.setattr(batch_selection, "get_context", lambda _: SimpleNamespace(Pool=Here))
    answers = iter(
        [{"full": [9.0, 11.0], "once": [4.0, 6.0]}, {"full": [4.0, 4.0], "once": [2.0, 4.0]}, {"full": [8], "once": [6]}]
    )
    monkeypatch.setattr(batch_selection, "seconds_of", lambda *_: next(answers))
    monkeypatch.setattr(batch_selection, "FIGURES", {"saved": lambda s, keep: keep * s["once"] / s["full"]})
    found = batch_selection.measure("fashion-mnist", 256, 2, 3)
    keep = 84 / 256
    assert found["keep"] == pytest.approx(keep)
    assert found["seconds"] == {"full": [10, 4, 4], "once": [5, 3, 3]}
    assert [found["saved"][name] / keep for name in ("low", "median", "high")] == pytest.approx([0.5, 0.75, 0.75])
    assert found["saved"]["coverage"] == 1 - 2 / 8
    assert found["processes"] == 3


class Here:
    """A pool that is no process of its own."""

    def __init__(self, _):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def apply(self, function, arguments):
        return function(*arguments)


def test_the_share_that_is_kept():
    assert batch_selection.kept_share(100, 64) == (21 + 11) / 100
    assert batch_selection.kept_share(3, 4) == 1 / 3
