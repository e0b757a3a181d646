"""The benchmark of whole epochs: its arithmetic, and that it runs and judges."""

import json
from types import SimpleNamespace

import pytest
from benchmarks import batch_selection

FIGURES = (
    "backward_to_forward",
    "again",
    "once",
    "twice",
    "known",
    "of_possible",
    "seen_once",
    "seen_twice",
)


def test_both_full_sides_are_what_is_compared_with():
    seconds = {"full": 9, "again": 11, "once": 8, "twice": 9, "forward": 4, "both": 9}
    assert batch_selection.seen_once(seconds, 0.5) == 2 / 2.5
    assert batch_selection.FIGURES["once"](seconds, 0.5) == 0.8


@pytest.mark.parametrize(
    ("low", "high", "code", "untold"),
    [(0.92, 0.96, 0, False), (0.9, 0.9, 0, False), (0.85, 0.95, 0, True), (0.8, 0.89, 1, False)],
)
def test_it_judges_the_interval_writes_and_prints(
    monkeypatch, tmp_path, capsys, low, high, code, untold
):
    interval = {"median": (low + high) / 2, "low": low, "high": high, "coverage": 1.0}
    monkeypatch.setattr(
        batch_selection,
        "measure",
        lambda name, *_: {"task": name, **dict.fromkeys(FIGURES, interval)},
    )
    assert (
        batch_selection.main(["--only", "fashion-mnist", "--out", str(tmp_path / "found.json")])
        == code
    )
    written = json.loads((tmp_path / "found.json").read_text())
    assert (
        written["missed"] == ["fashion-mnist"] * code
        and written["cannot_tell"] == ["fashion-mnist"] * untold
    )
    assert written["measured"][0]["of_possible"]["low"] == low
    printed = capsys.readouterr().out
    assert (
        f"{code} limits missed" in printed and ("fashion-mnist: cannot tell" in printed) == untold
    )


def test_the_figure_of_each_process_makes_one_value(monkeypatch):
    monkeypatch.setattr(batch_selection, "get_context", lambda _: SimpleNamespace(Pool=Here))
    answers = iter(
        [
            {"full": [9.0, 11.0], "once": [4.0, 6.0]},
            {"full": [4.0, 4.0], "once": [2.0, 4.0]},
            {"full": [8], "once": [6]},
        ]
    )
    monkeypatch.setattr(batch_selection, "seconds_of", lambda *_: next(answers))
    monkeypatch.setattr(
        batch_selection, "FIGURES", {"saved": lambda s, keep: keep * s["once"] / s["full"]}
    )
    found = batch_selection.measure("fashion-mnist", 256, 2, 3)
    keep = 84 / 256
    assert found["keep"] == pytest.approx(keep)
    assert found["seconds"] == {"full": [10, 4, 4], "once": [5, 3, 3]}
    assert [found["saved"][name] / keep for name in ("low", "median", "high")] == pytest.approx(
        [0.5, 0.75, 0.75]
    )
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
