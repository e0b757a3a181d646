"""`DataMap.review` and `DataMap.precision`: how many labels are wrong, from a person's answers."""

import re

import numpy as np
import pytest

from depth import DEEP
from thresher import DataMap
from thresher.reviewing import bounds


def ranked(samples, *, unseen=0):
    """Returns a data map whose sample 0 is the most suspicious one; the last samples were never seen."""
    seen = np.arange(samples) < samples - unseen
    suspicion = np.linspace(1, 0, samples)
    return DataMap(
        {"id": np.arange(samples), "suspicion": suspicion, "times_seen": seen.astype(int)}
    )


SHARES = {
    "gradual": lambda place: 1 / (1 + np.exp(12 * (place - 0.17))),
    "sharp": lambda place: np.where(place < 0.05, 0.95, 0.003),
    "flat": lambda place: np.full_like(place, 0.15),
    "none": lambda place: np.full_like(place, 0.001),
}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("answers", [20, 50, 100])
@pytest.mark.parametrize("samples", [500, *[10_000, 100_000] * DEEP])
def test_intervals_cover_the_truth(share, answers, samples):
    truth = SHARES[share]((np.arange(samples) + 0.5) / samples)
    found = ranked(samples)
    generator = np.random.default_rng(0)
    rounds = 400 if DEEP else 100
    numbers = []
    shares = []
    for seed in range(rounds):
        wrong = generator.random(samples) < truth
        drawn = found.review(answers, seed=seed)["id"].tolist()
        table = found.precision({one: bool(wrong[one]) for one in drawn})
        first = table["first"]
        number = np.cumsum(wrong)[first - 1]
        numbers.append((table["low"] <= number) & (number <= table["high"]))
        at = truth[first - 1]
        shares.append((table["share_low"] <= at) & (at <= table["share_high"]))
    # 0.94, less two standard deviations of the simulation.
    least = 0.94 - 2 * (0.95 * 0.05 / rounds) ** 0.5
    assert np.mean(numbers, axis=0).min() >= least and np.mean(shares, axis=0).min() >= least


def test_samples_are_spread_over_the_ranking():
    found = ranked(10_000, unseen=100)
    drawn = found.review(50)
    assert drawn["id"].dtype == np.int64 and len(np.unique(drawn["id"])) == 50
    assert np.array_equal(drawn["rank"], drawn["id"] + 1) and drawn["rank"].max() <= 9900
    ends = [25, 112, 497, 2219, 9900]
    assert np.histogram(drawn["rank"], [0.5, *np.add(ends, 0.5)])[0].tolist() == [10] * 5
    again, other = found.review(50), found.review(50, seed=1)
    assert np.array_equal(again["id"], drawn["id"]) and not np.array_equal(other["id"], drawn["id"])
    # The first block has 25 samples; the others share the rest.
    counts = np.histogram(found.review(300)["rank"], [0.5, *np.add(ends, 0.5)])[0]
    assert counts.tolist() == [25, 69, 69, 68, 69]


def test_the_number_is_exact_where_every_sample_has_an_answer():
    wrong = [True, True, False, True, False, False, False, False]
    table = ranked(8).precision(dict(enumerate(wrong)))
    assert [table[name].tolist() for name in ("first", "wrong", "low", "high")] == [
        [8],
        [3],
        [3],
        [3],
    ]
    # Of the falling shares 1, 1, 1/2, 1/2, 0, ..., the fourth is the last of at least one in five.
    assert table.depth == 4 and table["share"] == 0
    assert repr(table).splitlines()[-1] == "Fewer than one in five labels is wrong after rank 4."


@pytest.mark.parametrize("samples", [26, 40, 60, 400])
@pytest.mark.parametrize("count", [5, 20, 28, 50])
def test_a_short_ranking_gives_as_many_samples_as_asked_for(samples, count):
    ranks = ranked(samples).review(count)["rank"]
    assert len(np.unique(ranks)) == len(ranks) == min(samples, count)
    assert (np.diff(ranks) > 0).all() and ranks[0] >= 1 and ranks[-1] <= samples


@pytest.mark.parametrize("reviewed", [20, 50])
def test_nothing_is_said_about_ranks_without_an_answer(reviewed):
    found = ranked(10_000)
    drawn = found.review(50)
    ids = drawn["id"][:reviewed].tolist()
    table = found.precision(dict.fromkeys(ids, True))
    last = drawn["rank"][reviewed - 1]
    assert table.depth == last
    assert repr(table).splitlines()[-1] == (
        f"At least one in five labels is wrong up to rank {last:,}, the last one with an answer."
    )


@pytest.mark.parametrize("first", [27, 28, 29])
def test_a_few_first_answers_do_not_count_for_a_block(first):
    with pytest.raises(ValueError, match="do not cover the ranks 26 to 112 evenly"):
        ranked(10_000).precision(dict.fromkeys(range(first), True))
    whole = ranked(10_000)
    for seed in range(50):  # all answers of a review cover every block
        drawn = whole.review(10, seed=seed)
        whole.precision(dict.fromkeys(drawn["id"].tolist(), True))


def test_the_number_adds_up_the_blocks():
    found = ranked(10_000)
    drawn = found.review(50)
    answers = {
        int(one): rank <= 25 or one % 2 == 0 for one, rank in zip(*drawn.values(), strict=True)
    }
    table = found.precision(answers)
    expected = 0.0
    for start, end, number in zip(
        [0, *table["first"]], table["first"], table["wrong"], strict=False
    ):
        block = [wrong for one, wrong in answers.items() if start <= one < end]
        expected += (end - start) * np.mean(block)
        assert number == round(expected)


def test_an_interval_is_that_of_clopper_and_pearson():
    stats = pytest.importorskip("scipy.stats")
    for wrong, count in ((0, 4), (4, 4), (2, 10), (49, 50), (1700, 3000)):
        exact = stats.binomtest(wrong, count).proportion_ci(0.95, "exact")
        assert bounds(wrong, count) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_thousands_of_answers_are_counted():
    wrong = np.arange(6000) < 900
    table = ranked(6000).precision({number: bool(one) for number, one in enumerate(wrong)})
    assert table["wrong"][-1] == table["low"][-1] == table["high"][-1] == 900


def test_answers_are_read_from_the_file_of_a_sheet(tmp_path):
    found = ranked(6)
    path = tmp_path / "answers.csv"
    path.write_text("id,rank,wrong\n0,1,true\n1,2,\n3,4,false\n")
    table = found.precision(path)
    assert (
        repr(table)
        == repr(found.precision({0: True, 3: False}))
        == repr(found.precision(str(path)))
    )


def test_answers_about_wrong_labels_only_are_named(tmp_path):
    path = tmp_path / "answers.csv"
    path.write_text("id,rank,wrong\n0,1,true\n1,2,\n2,3,\n3,4,true\n4,5,\n")
    with pytest.warns(UserWarning, match='all answers are "wrong", and 2 samples between them'):
        ranked(6).precision(path)


class OtherPath:
    """A path that is no `pathlib.Path`."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffid,rank,wrong\r\n0,1,true\r\n3,4,false\r\n",
        "id,rank,wrong\r\n0,1,TRUE\r\n1,2,\r\n3,4,FALSE\r\n",
    ],
)
def test_answers_are_read_as_spreadsheets_save_them(text, tmp_path):
    path = tmp_path / "answers.csv"
    path.write_text(text, encoding="utf-8", newline="")
    found = ranked(6)
    assert repr(found.precision(OtherPath(path))) == repr(found.precision({0: True, 3: False}))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("id;rank;wrong\n0;1;true\n", "must have the columns id, rank, wrong, separated by commas"),
        ("id,wrong\n0,true\n", "must have the columns id, rank, wrong"),
        ("", "must have the columns id, rank, wrong"),
        ("id,rank,wrong\n0,1,true\n0,1,false\n", "has two answers about a sample; keep one"),
    ],
)
def test_files_of_answers_that_are_refused(text, match, tmp_path):
    path = tmp_path / "answers.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        ranked(6).precision(path)


def test_a_sheet_has_the_ids_and_ranks_of_a_review(tmp_path):
    found = DataMap(dict(ranked(400)), [f"text {i}" for i in range(400)])
    drawn = found.review(20)
    found.sheet(tmp_path / "review.html", drawn)
    page = (tmp_path / "review.html").read_text()
    assert "20 of 400 samples, spread over the ranking" in page
    cards = re.findall(r'data-id="(\d+)" data-rank="(\d+)"><p>text (\d+)<', page)
    pairs = zip(drawn["id"].tolist(), drawn["rank"].tolist(), strict=True)
    assert [tuple(map(int, card)) for card in cards] == [(one, rank, one) for one, rank in pairs]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda found, _: found.review(4), ValueError, "`n` must be 5 or more"),
        (lambda _, __: ranked(3, unseen=3).review(), ValueError, "got 50 and 0 samples"),
        (
            lambda found, _: found.precision([1, 2]),
            TypeError,
            "pass a mapping from ids to booleans",
        ),
        (
            lambda found, _: found.precision({1: 1}),
            TypeError,
            "pass a mapping from ids to booleans",
        ),
        (lambda found, _: found.precision({}), ValueError, "no sample has an answer"),
        (
            lambda found, _: found.precision({1000: True}),
            ValueError,
            "sample 1000 has the rank None",
        ),
        (lambda found, path: found.precision(path), ValueError, "sample 3 has the rank 4 in this"),
        (
            lambda found, path: found.precision(path.with_name("odd.csv")),
            ValueError,
            "has the answer 'maybe'; use true, false, or nothing",
        ),
        # The first 300 of 1,000, and none of a block.
        (
            lambda found, _: found.precision(dict.fromkeys(range(300), True)),
            ValueError,
            "do not cover the ranks 159 to 398 evenly",
        ),
        (lambda found, _: found.precision({0: True, 900: False}), ValueError, "the ranks 26 to 63"),
    ],
)
def test_what_is_refused(call, kind, message, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("id,rank,wrong\n3,9,true\n")
    (tmp_path / "odd.csv").write_text("id,rank,wrong\n3,4,maybe\n")
    with pytest.raises(kind, match=message):
        call(ranked(1000), path)
