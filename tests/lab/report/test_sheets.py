import base64
import io

import numpy as np
import pytest
from PIL import Image

from lab.report.cases import comparison
from thresher_lab.report import sheets
from thresher_lab.training.samples import MOST_OF_A_CLASS, MOST_TOGETHER, standing_out


def test_sheets_are_of_the_first_seed_of_each_method():
    results, samples = comparison()
    found = sheets.sheets(results, samples, None)
    assert [*found] == ["kakurenbo", "infobatch", "full"]
    assert [len(sheet.cards) for sheet in found["full"]] == [MOST_TOGETHER] * 3
    first = samples["runs/3.parquet"]
    card = found["kakurenbo"][0].cards[0]
    at = int(first.mean_loss.argmin())
    assert (card["id"], card["target"], card["trained"]) == (
        at,
        str(first.targets[at]),
        first.trained[at].sum(),
    )
    assert (
        card["loss"] == pytest.approx(first.mean_loss.min())
        and card["hidden"] == first.hidden[at]
        and card["image"] is None
    )


@pytest.mark.parametrize(
    ("of_methods", "cards"), [(0, 12), (1, 12), (10, 12), (11, 10), (21, 5), (200, 1)]
)
def test_sheets_are_smaller_where_there_are_many(of_methods, cards):
    assert sheets.cards_per_sheet(of_methods) == cards


def test_rows_are_as_many_whatever_there_is():
    results, samples = comparison(
        {"full": 0.0} | {f"m{number}": 0.2 for number in range(10)}, seeds=(0,), controls=False
    )
    images = np.zeros((50, 8, 8), np.uint8)
    for held, cards in ((None, MOST_TOGETHER), (images, 10)):
        found = sheets.sheets(results, samples, held)
        assert {len(of_method[0].cards) for of_method in found.values()} == {cards}


def test_images_are_those_of_the_samples():
    results, samples = comparison()
    images = np.arange(50, dtype=np.uint8).reshape(-1, 1, 1).repeat(8, 1).repeat(8, 2)
    card = sheets.sheets(results, samples, images)["full"][0].cards[0]
    held = Image.open(
        io.BytesIO(base64.b64decode(card["image"].removeprefix("data:image/png;base64,")))
    )
    assert (np.asarray(held) == card["id"]).all() and held.size == (8, 8)


def test_training_images_other_data_are_not_shown():
    results, samples = comparison()
    cards = sheets.sheets(results, samples, np.zeros((49, 8, 8), np.uint8))["full"][0].cards
    assert all(card["image"] is None for card in cards)


def test_sheets_are_those_that_stand_out():
    results, samples = comparison()
    cards = {
        sheet.title: [card["id"] for card in sheet.cards]
        for sheet in sheets.sheets(results, samples, None)["full"]
    }
    assert cards == {
        title: rows.tolist() for title, rows in standing_out(samples["runs/0.parquet"]).items()
    }
    ids = [number for of_sheet in cards.values() for number in of_sheet]
    targets = samples["runs/0.parquet"].targets
    assert len(ids) == len({*ids}) and all(
        np.bincount(targets[held]).max() <= MOST_OF_A_CLASS for held in cards.values()
    )


def test_classes_have_their_names():
    results, samples = comparison(classes=3)
    found = sheets.sheets(results | {"classes": ["cat", "dog", "<b>"]}, samples, None)
    assert {card["target"] for sheet in found["full"] for card in sheet.cards} == {
        "cat",
        "dog",
        "<b>",
    }


def test_a_run_shows_its_own_samples():
    results, samples = comparison(seeds=(1, 0))
    for run in results["runs"]:
        if (run["method"], run["seed"]) in (("full", 1), ("kakurenbo", 0)):
            run["shown"] = f"{run['method']}.json"
    easiest = int(samples["runs/0.parquet"].mean_loss.argmin())
    second = int(samples["runs/0.parquet"].mean_loss.argsort()[1])
    shown = {
        "full.json": {easiest: {"png": "AAAA"}, second: {"text": "<b>"}},
        "kakurenbo.json": {easiest: {"text": "other seed"}},
    }
    found = sheets.sheets(results, samples, None, shown)
    cards = {card["id"]: card for card in found["full"][0].cards}
    assert (cards[easiest]["image"], cards[easiest]["text"]) == ("data:image/png;base64,AAAA", None)
    assert (cards[second]["image"], cards[second]["text"]) == (None, "<b>")
    assert found["full"][0].shows and not found["full"][1].shows
    assert not any(sheet.shows for sheet in found["kakurenbo"])
