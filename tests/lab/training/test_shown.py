import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from thresher_lab.training.samples import SHOWN_SUSPECTS, RunHistory, standing_out, suspects
from thresher_lab.training.shown import UnshowableError, ids_to_show, shown, write_shown

GREY = np.arange(20, dtype=np.uint8).reshape(4, 5)
COLOR = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


def seen(given):
    [(kind, png)] = shown(given).items()
    assert kind == "png"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (GREY, GREY),
        (GREY.astype(np.int64), GREY),
        (torch.from_numpy(GREY), GREY),
        (torch.from_numpy(GREY / 255).to(torch.float64), GREY),
        (torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16, requires_grad=True), [[0, 255]]),
        (COLOR, COLOR),
        (COLOR.transpose(2, 0, 1), COLOR),
        (torch.from_numpy(COLOR).permute(2, 0, 1), COLOR),
        (np.array([[True, False]]), [[255, 0]]),
        (np.array([[-1.0, 0.0, 3.0]]), [[0, 64, 255]]),
        (np.array([[7000, 7000]]), [[255, 255]]),
        (Image.fromarray(GREY), GREY),
        (Image.fromarray(COLOR), COLOR),
        (Image.fromarray(np.array([[0, 256, 512]], np.uint16)), [[0, 128, 255]]),
        (Image.fromarray(np.array([[-2.0, 2.0]], np.float32)), [[0, 255]]),
        (Image.new("RGBA", (1, 1), (9, 9, 9, 0)), [[[255, 255, 255]]]),
        (Image.new("1", (1, 1), 1), [[255]]),
    ],
)
def test_pictures_stay_as_they_are(given, expected):
    expected = np.asarray(expected)
    color = expected if expected.ndim == 3 else expected[:, :, None].repeat(3, 2)
    np.testing.assert_array_equal(seen(given), color)


def test_pictures_and_texts_become_small():
    large = Image.new("RGB", (640, 320), (9, 99, 199))
    assert seen(large).shape == (32, 64, 3) and large.size == (640, 320)
    assert shown("a" * 200) == {"text": "a" * 200} and shown("a" * 201) == {"text": "a" * 199 + "…"}


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (None, "got NoneType"),
        ([[1, 2]], "got list"),
        (np.zeros(3), r"got an array of shape \(3,\)"),
        (torch.zeros(2, 8, 8), r"got an array of shape \(2, 8, 8\)"),
        (np.zeros((0, 4)), r"got an array of shape \(0, 4\)"),
        (np.zeros((2, 2), complex), r"got an array of shape \(2, 2\)"),
    ],
)
def test_what_is_no_picture_is_refused(given, got):
    with pytest.raises(UnshowableError, match=f"must return .*{got}"):
        shown(given)


def test_a_sample_that_fails_is_shown_as_its_error(tmp_path):
    def show(number):
        return {1: "one", 2: None}[number]

    write_shown(tmp_path / "a.shown", show, {3, 1, 2})
    written = json.loads((tmp_path / "a.shown").read_text())["shown"]
    assert [*written] == ["1", "2", "3"] and written["1"] == {"text": "one"}
    assert written["2"]["text"].startswith("show(2): UnshowableError: must return a PIL image")
    assert written["3"] == {"text": "show(3): KeyError: 3"}


def test_ids_are_those_of_the_sheets_with_and_without_full_training():
    rng = np.random.default_rng(0)
    trained = rng.integers(0, 2, (200, 4)).astype(np.uint8)
    own = RunHistory(
        np.arange(200) + 7, np.arange(200) % 3, rng.random((200, 4), np.float32), trained
    )
    full = RunHistory(
        own.ids, own.targets, own.losses, (rng.random((200, 4)) < 0.8).astype(np.uint8)
    )
    alone, beside = (
        {int(of.ids[row]) for rows in standing_out(of).values() for row in rows}
        for of in (own, own.beside(full))
    )
    to_check = {int(own.ids[row]) for row in suspects(own)[:SHOWN_SUSPECTS]}
    assert len(to_check) == SHOWN_SUSPECTS and to_check - alone - beside
    assert (
        beside - alone
        and ids_to_show(own) == alone | to_check
        and ids_to_show(own, full) == alone | beside | to_check
    )
