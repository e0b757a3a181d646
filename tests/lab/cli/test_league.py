"""`thresher league`: what it passes on to the league, and what it needs."""

import sys
from importlib import import_module

import pytest
from typer.testing import CliRunner

from thresher_lab.cli import league
from thresher_lab.cli.app import app


def test_it_passes_its_options_on(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = {}
    row = import_module("benchmarks.league.row")
    monkeypatch.setattr(row, "run", lambda *call, **options: given.update(call=call, **options))
    words = ["league", "seta:target=0.5", "--all", "--without", "text", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    say = given.pop("say")
    assert given == {
        "call": ("seta:target=0.5", tmp_path),
        "every_task": True,
        "without": "text",
        "jobs": 2,
        "cluster": None,
    }
    assert say("a line") is None


def test_without_a_clone_it_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["thresher_lab.cli.league"], "ROOT", tmp_path)
    with pytest.raises(ValueError, match="are in the repository. Clone it, and install the clone"):
        league.league("seta")
