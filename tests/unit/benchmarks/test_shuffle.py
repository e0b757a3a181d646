"""The benchmark of the computed shuffle: that it measures what it says, judges and writes."""

import json

import pytest
from benchmarks import shuffle

import thresher
from thresher.permutation import PIECE, Permutation

TINY = ["--quick", "--ids", "3000", "--n", "4000"]


@pytest.mark.parametrize(("limits", "code"), [((1e9, 1e9), 0), ((0.0, 0.0), 1)])
def test_it_runs_judges_and_writes(monkeypatch, tmp_path, capsys, limits, code):
    monkeypatch.setattr(shuffle, "MOST_NS", limits[0])
    monkeypatch.setattr(shuffle, "MOST_S", limits[1])
    out = tmp_path / "results" / "shuffle.json"
    assert shuffle.main([*TINY, "--out", str(out)]) == code
    written, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert written["missed"] == (["Shuffle", "FullData, Shuffle", "UniformSubset(0.5), Shuffle"] if code else [])
    assert f"{len(written['missed'])} limits missed" in printed
    assert all(row["ns"] > 0 for row in written["per_id"]) and all(row["cpu_s"] > 0 for row in written["resumed"])
    assert [row["bytes"] for row in written["per_id"]][1:] == [None, 8 * 3000]


def test_every_piece_of_an_epoch_is_made(monkeypatch):
    made, piece = [], Permutation.piece
    monkeypatch.setattr(Permutation, "piece", lambda self, *places: (made.append(places), piece(self, *places))[1])
    shuffle.pieces(2 * PIECE + 5)
    assert made == [(0, PIECE), (PIECE, 2 * PIECE), (2 * PIECE, 2 * PIECE + 5)]


@pytest.mark.parametrize("computed", [False, True])
def test_the_state_is_one_of_the_middle(computed):
    state = shuffle.middle_of(thresher.UniformSubset(keep=0.5), 4000, computed=computed)
    (own,) = state["ranks"]
    assert own["active"] and 2000 <= own["consumed"] <= 2600 and 0.45 < own["stayed"] / own["consumed"] < 0.55
    run = shuffle.attached(thresher.UniformSubset(keep=0.5), 4000, shuffle.BATCH, computed=computed)
    run.load_state_dict(state)
    assert len(next(iter(run.loader))) == shuffle.BATCH
