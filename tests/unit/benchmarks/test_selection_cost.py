"""The benchmark of choosing rows: whom it measures, and that it judges."""

import json
from dataclasses import replace

import pytest
from benchmarks import selection_cost

from thresher import methods


def test_every_batch_method_is_measured():
    registered = {name for name, info in methods.infos().items() if info.stage == "batch"}
    assert {*selection_cost.candidates(), "big_loss"} == registered


def test_who_may_take_longer_says_why():
    for name in selection_cost.CARD_SAYS_WHY:
        card = methods.load(name).card
        assert "times" in f"{card.forwards} {card.caveat} {' '.join(card.differences)}"


@pytest.mark.parametrize("over", [False, True])
def test_it_runs_judges_and_writes(monkeypatch, tmp_path, capsys, over):
    original = selection_cost.compare

    def judged(*args, **settings):
        return [replace(row, limit=0.0 if over else None) for row in original(*args, **settings)]

    monkeypatch.setattr(selection_cost, "compare", judged)
    out = tmp_path / "found.json"
    assert selection_cost.main(["--quick", "--out", str(out)]) == int(over)
    written = json.loads(out.read_text())
    assert bool(written["missed"]) == over
    assert {row["name"] for row in written["measured"]} >= {"ada_selection", "obftf"}
    assert "limits missed" in capsys.readouterr().out
