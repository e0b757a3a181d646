"""Sheets of suspects: what is shown of a sample, below it, and in the two kinds of files."""

import base64
import io
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import thresher
from thresher import DataMap, sheet

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")

GREY = np.arange(20, dtype=np.uint8).reshape(4, 5)
COLOR = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


def columns(n=3):
    return {
        "id": np.arange(n),
        "times_seen": np.ones(n, dtype=np.int64),
        "suspicion": np.linspace(0, 1, n),
    }


def shown(sample, **settings):
    return DataMap(columns(), [sample] * 3).card(1, **settings).shown


class Digits(Dataset):
    """Pictures of one value, and their classes."""

    classes = ["cat", "dog", "<b>"]

    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return torch.full((1, 8, 8), i / len(self)), self.targets[i]


def observed(dataset, trained_on=None):
    """The data map of an epoch in which the network predicts class 1 for each sample."""
    run = thresher.observe(
        loader=DataLoader(dataset, 2),
        criterion=nn.CrossEntropyLoss(),
        model=nn.Flatten(),
        epochs=1,
    )
    for x, y in run.loader:
        outputs = run.model(x)[:, :3] * 0 + torch.tensor([0.0, 1.0, 0.0])
        run.criterion(outputs, y if trained_on is None else trained_on[y], ids=run.ids)
    return run.data_map()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (GREY, GREY),
        (GREY[None], GREY),
        (GREY[:, :, None], GREY),
        (GREY.astype(np.int64), GREY),
        (torch.from_numpy(GREY / 255).to(torch.float64), GREY),
        (torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16, requires_grad=True), [[0, 255]]),
        (COLOR, COLOR),
        (torch.from_numpy(COLOR).permute(2, 0, 1), COLOR),
        (np.array([[True, False]]), [[255, 0]]),
        (np.array([[-1.0, 0.0, 3.0]]), [[0, 64, 255]]),
        (Image.fromarray(GREY), GREY),
        (Image.fromarray(COLOR), COLOR),
        (Image.fromarray(np.array([[0, 256, 512]], np.uint16)), [[0, 128, 255]]),
        (Image.new("RGBA", (1, 1), (9, 9, 9, 0)), [[255]]),
        (Image.new("1", (1, 1), 1), [[255]]),
    ],
)
def test_pictures_stay_as_they_are(given, expected):
    expected = np.asarray(expected)
    color = expected if expected.ndim == 3 else expected[:, :, None].repeat(3, 2)
    for sample in (given, (given, 7), {"name": "a", "image": given}, ((given, given), 7)):
        np.testing.assert_array_equal(np.asarray(shown(sample)), color)


def test_large_pictures_and_long_texts_become_small():
    large = Image.new("RGB", (640, 320), (9, 99, 199))
    assert shown(large).size == (128, 64) and large.size == (640, 320)
    assert shown("a" * 300) == "a" * 300 and shown("a" * 301) == "a" * 300 + "…"


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (("a text", 1), "a text"),
        ({"premise": "a", "hypothesis": "b", "label": 1}, "a | b"),
        ((["two", "words"], 1), "two | words"),
        (np.array([[np.nan, 1.0]]), "a picture of shape (1, 2) with NaN or infinity"),
    ],
)
def test_texts(sample, expected):
    assert shown(sample) == expected


@pytest.mark.parametrize(
    "sample", [(torch.zeros(5), 1), {"age": 3}, 7, None, object(), (), np.zeros(3), [[1, 2], 3]]
)
def test_anything_else_is_its_row_of_the_table(sample):
    row = "times_seen 1\nsuspicion 0.5"
    assert shown(sample) == row and DataMap(columns()).card(1).shown == row
    assert shown(sample, show=lambda i: f"sample {i}") == "sample 1"


@pytest.mark.parametrize(
    ("sample", "got"),
    [
        (torch.zeros(2, 8, 8), r"got array of shape \(2, 8, 8\)"),
        (np.zeros((0, 4)), r"got array of shape \(0, 4\)"),
        (np.zeros((2, 2), complex), r"got array of shape \(2, 2\)"),
    ],
)
def test_an_array_that_is_no_picture_needs_show(sample, got):
    with pytest.raises(TypeError, match=f"sheet: sample 1 must be a text.*{got}; pass show="):
        shown((sample, 0))
    assert shown((sample, 0), show=lambda i: GREY).size == (5, 4)


@pytest.mark.parametrize(("given", "got"), [(None, "NoneType"), (np.zeros(3), r"array of shape")])
def test_show_returns_a_picture_or_a_text(given, got):
    with pytest.raises(TypeError, match=f"sample 1 must be a text.* got {got}"):
        shown("a text", show=lambda i: given)


def test_lines_name_the_classes():
    found = observed(Digits([0, 1, 2, 0]))
    assert [found.card(i).lines[1] for i in range(3)] == ["cat → dog", "dog", "<b> → dog"]
    assert found.card(0, classes=["A", "B", "C"]).lines == ["0", "A → B", "confidence 0.212"]
    part = observed(Subset(Digits([0, 1, 2, 0]), [2, 1]))
    assert [part.card(i).lines[1] for i in range(2)] == ["<b> → dog", "dog"]
    numbers = TensorDataset(torch.zeros(2, 3), torch.tensor([0, 1]))
    assert [observed(numbers).card(i).lines[1] for i in range(2)] == ["0 → 1", "1"]


def test_names_of_other_classes_are_not_used():
    with pytest.warns(UserWarning, match="differ from the labels that the criterion gets"):
        found = observed(Digits([0, 1, 2, 0]), trained_on=torch.tensor([1, 0, 0]))
    assert [found.card(i).lines[1] for i in range(3)] == ["1", "0 → 1", "0 → 1"]


class Words(Digits):
    """The same pictures, with classes that are stored as words."""

    classes = None
    names = ["ant", "bee", "cow"]

    def __getitem__(self, i):
        return torch.zeros(1, 8, 8), self.names.index(self.targets[i])


def test_labels_that_are_words_name_the_predicted_class():
    found = observed(Words(["ant", "bee", "cow", "ant"]))
    assert [found.card(i).lines[1] for i in range(3)] == ["ant → bee", "bee", "cow → bee"]


def test_what_is_not_known_is_left_out():
    found = columns() | {"label": np.array([-1, 2, 2]), "predicted": np.array([1, -1, 2])}
    lines = [DataMap(found).card(i).lines for i in range(3)]
    assert [line[1:-1] for line in lines] == [[" → 1"], ["2"], ["2"]]
    assert DataMap(columns()).card(0).lines == ["0", "suspicion 0"]
    files = {**columns(), "file": np.array(["/data/cat/1.png"] * 3, dtype=object)}
    assert DataMap(files).card(2).lines == ["2", "suspicion 1", "cat/1.png"]
    with pytest.raises(KeyError, match="card: no sample 7; use one of the column id"):
        DataMap(columns()).card(7)


def test_files_of_the_dataset_are_named(tmp_path):
    data = Digits([0, 1])
    (tmp_path / "0.png").touch()
    data.samples = [(str(tmp_path / f"{i}.png"), i) for i in range(2)]
    assert observed(data).card(1).lines[-1] == f"{tmp_path.name}/1.png"


def test_a_page_has_the_suspects_in_their_order(tmp_path):
    found = observed(Digits([0, 1, 2, 0]))
    found.sheet(tmp_path / "suspects.html", 2)
    page = (tmp_path / "suspects.html").read_text(encoding="utf-8")
    assert "The 2 most suspicious of 4 samples, read from the dataset, augmentation" in page
    images = [part.partition('"')[0] for part in page.split("base64,")[1:]]
    values = [np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))).max() for one in images]
    assert values == [round(255 * i / 4) for i in found.suspects(2)] and len(values) == 2
    found.sheet(str(tmp_path / "suspects.html"), by_class=True, show=lambda i: f"<i>{i}")
    page = (tmp_path / "suspects.html").read_text(encoding="utf-8")
    order = [page.index(f"<p>&lt;i&gt;{i}</p>") for i in found.suspects(by_class=True)]
    assert order == sorted(order) and "&lt;b&gt; → dog" in page and "read from show=" in page


@pytest.mark.parametrize(("count", "size"), [(1, (1200, 240)), (8, (1200, 240)), (9, (1200, 452))])
def test_a_picture_has_every_sample_in_its_place(tmp_path, count, size):
    data = [(np.full((2, 2), i * 20, np.uint8), 0) for i in range(9)]
    DataMap(columns(9), data).sheet(tmp_path / "a.PNG", count)
    drawn = Image.open(tmp_path / "a.PNG")
    assert drawn.size == size
    centers = [(10 + place % 8 * 150 + 64, 28 + place // 8 * 212 + 64) for place in range(count)]
    assert [drawn.getpixel(at)[0] for at in centers] == [160 - 20 * place for place in range(count)]
    assert np.asarray(drawn)[160:200, 10:100].min() < 128  # the lines below the first one


def test_texts_are_drawn(tmp_path):
    DataMap(columns(), ["Ä text\n\nthat is long" * 9] * 3).sheet(tmp_path / "a.png", 1)
    drawn = np.asarray(Image.open(tmp_path / "a.png"))[28:156]
    assert drawn[:, :150].min() < 128 and drawn[:, 160:].min() == 255


def test_the_title_of_texts_mentions_no_augmentation(tmp_path):
    DataMap(columns(), ["a text"] * 3).sheet(tmp_path / "a.html", 1)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "read from the dataset" in page and "augmentation" not in page


@pytest.mark.parametrize("word", ["W" * 60, "WIDE WORDS " * 6, "漢字" * 30])
def test_wide_letters_stay_in_their_column(tmp_path, word):
    names = {"label": np.zeros(3, dtype=np.int64), "predicted": np.ones(3, dtype=np.int64)}
    found = DataMap(columns() | names, [word] * 3)
    found.sheet(tmp_path / "a.png", 1, classes=[word, word])
    drawn = np.asarray(Image.open(tmp_path / "a.png"))[28:]
    assert drawn[:, 10:140].min() < 128 and drawn[:, 141:].min() == 255


def test_lines_are_broken_at_spaces_and_lose_nothing():
    def wrapped(line):
        return list(sheet.wrap(line, lambda text: 13 * len(text)))

    assert wrapped("one two three four five") == ["one two", "three four", "five"]
    assert wrapped("a" * 23 + " b") == ["a" * 10, "a" * 10, "aaa b"]
    assert wrapped("  ") == [] and wrapped("exactly 10") == ["exactly 10"]
    assert list(sheet.wrap("ab", lambda text: 1000.0)) == ["a", "b"]


def test_random_states_stay_as_they_are(tmp_path):
    class Augmented(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return torch.rand(4, 4) * random.random() * np.random.rand(), 0

    def states():
        return thresher.rng.capture(torch.device("cpu"))

    before = states()
    DataMap(columns(), Augmented()).sheet(tmp_path / "a.html", 3)
    assert thresher.rng.equal(before, states())


def test_what_is_refused(tmp_path):
    found = DataMap(columns(), ["a"] * 3)
    with pytest.raises(ValueError, match=r"sheet: `path` must end in .png or .html, got a.jpg"):
        found.sheet("a.jpg")
    for count in (0, np.array([1, 2])):
        with pytest.raises(ValueError, match="sheet: `count` must be 1 or more, or the table of"):
            found.sheet("a.png", count)
    unseen = DataMap({**columns(), "times_seen": np.zeros(3)})
    with pytest.raises(ValueError, match="sheet: no sample has a loss yet; train before"):
        unseen.sheet("a.png")


@pytest.mark.parametrize(
    ("module", "draw"),
    [
        ("PIL.Image", lambda found, path: found.sheet(path)),
        ("matplotlib", lambda found, path: found.sheet(path)),
        ("matplotlib.figure", lambda found, path: found.plot(path)),
    ],
)
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, module, draw):
    table = columns() | {"confidence": np.zeros(3), "variability": np.zeros(3)}
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"need the module {module}.*'thresher\[plot\]'"):
        draw(DataMap(table, [GREY] * 3), tmp_path / "a.png")


CHATS = {
    "prompt": [{"role": "user", "content": "Where?"}],
    "chosen": [{"role": "assistant", "content": "It is here."}],
    "rejected": [{"role": "assistant", "content": "It is <there>."}],
}
BEGINNING = "It was a long story. " * 40
PAIRS = [
    {"prompt": "Where?", "chosen": " Here.", "rejected": " There.", "chosen_ids": [1, 2]},
    {"prompt": "Where?", "chosen": "Where? Here.", "rejected": "Where? There."},
    {"chosen": "Where? Here.", "rejected": "Where? There."},
    CHATS,
    {"chosen": f"{BEGINNING}Yes.", "rejected": f"{BEGINNING}No.{BEGINNING}"},
]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (PAIRS[0], ["prompt: Where? ", "chosen: Here.", "rejected: There."]),
        (PAIRS[1], ["prompt: Where? ", "chosen: Here.", "rejected: There."]),
        (PAIRS[2], ["prompt: Where? ", "chosen: Here.", "rejected: There."]),
        (
            PAIRS[3],
            [
                "prompt: user: Where?\nassistant: It is ",
                "chosen: here.\n",
                "rejected: <there>.\n",
            ],
        ),
        (
            PAIRS[4],
            [
                f"prompt: {BEGINNING[-300:]}",
                "chosen: Yes.",
                f"rejected: {('No.' + BEGINNING)[:300]}",
            ],
        ),
    ],
    ids=["answers", "prompt in the answers", "no prompt", "messages", "long"],
)
def test_a_pair_shows_where_its_answers_differ(row, expected):
    assert sheet.read_sample(0, [row], None, "").split(sheet.SIDE_BY_SIDE) == expected


def test_a_pair_is_shown_side_by_side(tmp_path):
    """In a PNG file, whose samples are narrow, one below the other."""
    columns = {"id": np.arange(5), "suspicion": np.linspace(0, 1, 5), "times_seen": np.ones(5)}
    found = thresher.DataMap(columns)
    found.sheet(tmp_path / "pairs.html", 2, show=lambda number: PAIRS[number])
    page = (tmp_path / "pairs.html").read_text()
    chats = "<p>prompt: user: Where?\nassistant: It is </p><p>chosen: here.\n</p><p>rejected: &lt;there&gt;.\n</p>"
    assert f">{chats}<div>" in page
    found.sheet(tmp_path / "pairs.png", 5, show=lambda number: PAIRS[number])
    assert "\x1e".join("ab").splitlines() == ["a", "b"]
