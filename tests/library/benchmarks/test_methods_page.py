import json
from itertools import pairwise

import pytest
from benchmarks import methods_page
from benchmarks.methods_page import Beside, Trial, in_words, standing

from thresher import methods


def beside(finding, difference=0.1, control="fewer epochs"):
    return Beside(control, finding, difference, difference - 0.2, difference + 0.2)


def trial(*found, task="a"):
    return Trial("one.json", task, "m", 0.5, found)


BETTER, WORSE, TIED = (trial(beside(finding)) for finding in ("better", "worse", "unclear"))


@pytest.mark.parametrize(
    ("found", "now"),
    [
        ((), None),
        ((TIED,), 0),
        ((trial(beside("no better")),), 0),
        ((trial(beside("better"), beside("worse")),), 0),
        ((trial(beside("better"), beside("unclear")),), 1),
        ((TIED, WORSE), -1),
        ((WORSE, WORSE, BETTER), 1),
    ],
)
def test_a_method_stands_where_its_best_decided_trial_does(found, now):
    assert standing(found) == now


def test_the_figure_is_that_to_the_strongest_control():
    won = trial(beside("better", 0.5), beside("unclear", 0.3, "smaller batches"), task="won")
    more = trial(beside("better", 0.4), task="more")
    lost = trial(beside("worse", -1), task="lost")
    figure = "+0.40 [+0.20, +0.60] to fewer epochs on `more` at 0.50 of the cost (one.json)"
    worst = "-1.00 [-1.20, -0.80] to fewer epochs on `lost` at 0.50 of the cost (one.json)"
    assert (
        in_words([won, more, lost])
        == f"better in 2, worse in 1 of 3; best: {figure}; worst: {worst}"
    )
    assert in_words([more]) == f"better in 1, worse in 0 of 1; best: {figure}"
    assert in_words([lost, trial(beside("worse", -0.5)), trial(beside("unclear", -9))]).endswith(
        f" of 3; worst: {worst}"
    )
    assert in_words([TIED]).startswith("better in 0, worse in 0 of 1; +0.10 [")
    low = trial(beside("unclear", -0.3), task="low")
    said = in_words([TIED, low, trial(Beside("random samples", "unclear", 0.7, None, None))])
    assert (
        "from -0.30 [-0.50, -0.10] to fewer epochs on `low`" in said
        and "up to +0.70 to random samples on `a`" in said
    )


def test_the_page_is_that_of_the_results_and_has_every_method_once():
    text = methods_page.PAGE.read_text(encoding="utf-8")
    assert text == methods_page.page(), (
        "docs/methods/README.md differs; run `python -m benchmarks.methods_page`"
    )
    for name in methods.BUILT_IN | methods.FOR_POSITIONS:
        assert text.count(f"\n| [{name}]({name}.md) |") == 1
    titles = [f"## {title}" for title in (*methods_page.TITLES.values(), methods_page.UNTRIED)]
    assert all(text.index(one) < text.index(other) for one, other in pairwise(titles))


def test_trials_against_a_second_reading_of_the_results():
    found = methods_page.trials()
    league = json.loads((methods_page.RESULTS / "league.json").read_text())["rows"]
    lost = {
        (row["task"])
        for row in league
        if row["method"] == "ucb"
        and "worse"
        in {
            row["against"][kind]["finding"]
            for kind in ("shorter@time", "shorter", "smaller", "uniform")
            if kind in row["against"]
        }
    }
    assert {one.task for one in found["ucb"] if one.sign == -1} == lost and lost
    of_winnow = [row["task"] for row in league if row["method"] == "winnow"]
    assert [one.task for one in found["winnow"] if one.source == "league.json"] == of_winnow
    verdict = json.loads((methods_page.RESULTS / "winnow-second.json").read_text())["verdict"]
    won = {
        *verdict["better than smaller batches"],
        *verdict["better than fewer epochs in the same time"],
    }
    own = [one for one in found["winnow"] if one.source == "winnow-second.json"]
    assert {one.task for one in own if one.sign == 1} == won
    summary = json.loads((methods_page.RESULTS / "fashion-cnn.json").read_text())["summary"]
    [row] = [row for row in summary if row["method"] == "selective_backprop:keep=0.33 once"]
    [best] = [
        one
        for one in found["selective_backprop"]
        if one.source == "fashion-cnn.json" and one.sign == 1
    ]
    assert best.strongest.difference == pytest.approx(
        100 * min(one["difference"] for one in row["against"].values())
    )


def test_it_is_written_to_a_file(tmp_path):
    methods_page.main(["--page", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == methods_page.PAGE.read_text()
