"""Preferences with wrong choices: how pairs are made, and that a tiny reward model finds the wrong ones."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("trl")

from benchmarks import preferences

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_a_fifth_of_the_choices_is_against_the_rule():
    pairs = preferences.by_rule(500, np.random.default_rng(0))
    good = [
        [sum(int(word[1:]) >= 10 for word in text.split()) for text in pair]
        for pair in pairs.answers
    ]
    assert all(better > worse for better, worse in good)
    assert 0.15 < pairs.wrong.mean() < 0.25
    table = pairs.table().to_list()
    for (better, worse), wrong, row in zip(pairs.answers, pairs.wrong, table, strict=True):
        assert (row["chosen"], row["rejected"]) == ((worse, better) if wrong else (better, worse))


def test_a_choice_by_ratings_is_wrong_if_the_means_say_otherwise(monkeypatch):
    texts = ["test", "good", "mixed", "bad", "worse", "test again"]
    rated = (texts, [[4, 4], [2, 2], [2, 0], [1, 0], [-9, -9], [3, 3]])
    monkeypatch.setattr(preferences, "read_ratings", lambda path: rated)
    pairs = preferences.by_ratings(200, np.random.default_rng(0), Path(), test=False)
    of = {pair: set(pairs.wrong[[pair == one for one in pairs.answers]]) for pair in pairs.answers}
    # The two ratings of "good" and the first of "mixed" are equal, so that pair is drawn with the second alone.
    assert of == {
        (" good", " mixed"): {False},
        (" good", " bad"): {False},
        (" mixed", " bad"): {False, True},
    }
    held_out = preferences.by_ratings(5, np.random.default_rng(0), Path(), test=True)
    assert held_out.answers == [(" test", " test again")] * 5


def test_a_reward_model_finds_flipped_choices(monkeypatch):
    monkeypatch.setattr(preferences, "PAIRS", {"rule": (200, 50)})
    found = preferences.run("reward model", "rule", 0, Path())
    assert found["auroc"] > 0.7
    assert set(found["accuracy"]) == {"all", "without suspects"}


def test_the_page_has_the_figures_of_the_runs():
    lines = [json.loads(line) for line in preferences.RUNS.read_text().splitlines()]
    page = preferences.PAGE.read_text()
    begin, end = preferences.MARKS
    assert preferences.table(lines) == page.split(begin)[1].split(end)[0].strip()
    assert len(lines) == preferences.SEEDS * len(preferences.MODELS)
