import base64
import io

import numpy as np
import pytest
from PIL import Image

from thresher.report import sheets
from thresher.report.loading import RunHistory
from unit.report.cases import comparison


def of(losses, trained):
    return RunHistory(
        np.arange(len(losses)), np.arange(len(losses)) % 2, np.array(losses, np.float32), np.array(trained, np.uint8)
    )


SMALL = of([[3, 3], [1, 1], [2, 4], [np.nan, np.nan]], [[1, 1], [1, 0], [1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (sheets.easiest_first, [1, 0, 2, 3]),
        (sheets.hardest_first, [0, 2, 1]),
        (sheets.most_hidden_first, [3, 1]),
        (sheets.never_hidden_first, [0, 2]),
        (sheets.lowest_combined_rank_first, [1, 3, 0, 2]),
    ],
)
def test_orders(order, expected):
    assert order(SMALL).tolist() == expected


def test_where_nothing_is_left_out_there_are_no_sheets_of_it():
    always = of([[1], [2]], [[1], [1]])
    assert not len(sheets.most_hidden_first(always)) and not len(sheets.never_hidden_first(always))


def test_sheets_are_of_the_first_seed_of_each_method():
    results, samples = comparison()
    found = sheets.sheets(results, samples, None)
    assert [*found] == ["kakurenbo", "infobatch", "full"]
    assert [len(sheet.cards) for sheet in found["full"]] == [sheets.CARDS_PER_SHEET] * 3
    first = samples["runs/3.parquet"]
    card = found["kakurenbo"][0].cards[0]
    at = int(first.mean_loss.argmin())
    assert (card.id, card.target, card.trained) == (at, first.targets[at], first.trained[at].sum())
    assert card.loss == pytest.approx(first.mean_loss.min()) and card.hidden == first.hidden[at] and card.image is None


@pytest.mark.parametrize(("of_methods", "cards"), [(0, 12), (1, 12), (10, 12), (11, 10), (21, 5), (200, 1)])
def test_sheets_are_smaller_where_there_are_many(of_methods, cards):
    assert sheets.cards_per_sheet(of_methods) == cards


def test_rows_are_as_many_whatever_there_is():
    results, samples = comparison({"full": 0.0} | {f"m{number}": 0.2 for number in range(10)}, seeds=(0,), controls=False)
    images = np.zeros((50, 8, 8), np.uint8)
    for held, cards in ((None, sheets.CARDS_PER_SHEET), (images, 10)):
        found = sheets.sheets(results, samples, held)
        assert {len(of_method[0].cards) for of_method in found.values()} == {cards}


def test_images_are_those_of_the_samples():
    results, samples = comparison()
    images = np.arange(50, dtype=np.uint8).reshape(-1, 1, 1).repeat(8, 1).repeat(8, 2)
    card = sheets.sheets(results, samples, images)["full"][0].cards[0]
    held = Image.open(io.BytesIO(base64.b64decode(card.image.removeprefix("data:image/png;base64,"))))
    assert (np.asarray(held) == card.id).all() and held.size == (8, 8)


def test_training_images_other_data_are_not_shown():
    results, samples = comparison()
    cards = sheets.sheets(results, samples, np.zeros((49, 8, 8), np.uint8))["full"][0].cards
    assert all(card.image is None for card in cards)
