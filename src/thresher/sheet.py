"""Sheets of samples, as PNG or HTML: pictures or texts, with ids, files and classes."""

import base64
import importlib
import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, islice
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.rng import undisturbed

SIDE = 128
"""Largest width and height of a picture, in pixels."""
LONGEST_TEXT = 300
"""Largest number of characters of a text."""
SIDE_BY_SIDE = "\x1e"
"""Separates texts. An HTML page shows them side by side, a PNG file one below the other."""
PER_ROW = 8
"""Number of samples in a row of a PNG file. The sizes below are those of a PNG file, in pixels."""
GAP = 10
"""Distance from the left edge."""
WIDTH = 150
"""Width of a sample."""
LINE_HEIGHT = 14
"""Height of a line of text."""
TEXT_WIDTH = WIDTH - 2 * GAP
"""Largest width of a line of text."""
CAPTION_LINES = 5
"""Number of lines below a picture."""

PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px/1.3 sans-serif; margin: 1.5rem; color: #222; background: #fff; }}
ul {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 1rem; }}
li {{ width: 12rem; overflow-wrap: anywhere; }}
img {{ width: 128px; height: 128px; object-fit: contain; object-position: left; image-rendering: pixelated; }}
p {{ white-space: pre-wrap; }}
li:has(p + p) {{ width: 100%; display: grid; grid-template-columns: 1fr 1fr 1fr; gap: 0 1rem; }}
li:has(p + p) div {{ grid-column: 1 / -1; }}
li[data-wrong=true] {{ outline: 3px solid #c33; }}
li[data-wrong=false] {{ outline: 3px solid #393; }}
</style>
<p>{title}</p>
<ul>
{items}
</ul>
<p>Is the label wrong or right? <button id="save">Save the answers</button></p>
<script>
for (const button of document.querySelectorAll("li button"))
  button.onclick = () => {{ button.closest("li").dataset.wrong = button.value; }};
document.getElementById("save").onclick = () => {{
  const rows = [...document.querySelectorAll("li")].map(({{ dataset }}) => [dataset.id, dataset.rank, dataset.wrong ?? ""]);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([["id,rank,wrong", ...rows].join("\\n") + "\\n"]));
  link.download = "answers.csv";
  link.click();
}};
</script>
</html>
"""
CARD = """<li data-id="{id}" data-rank="{rank}">{shown}<div>{caption}</div>
<button value="true">wrong</button> <button value="false">right</button></li>"""


@dataclass(frozen=True)
class SampleCard:
    """What a sheet shows of one sample.

    Args:
        lines: Id, label and predicted class, numbers of the data map, and end of the path of the file, if they are known.
        shown: PIL image of at most 128 x 128 pixels, or text.

    Example:
        >>> SampleCard(["7", "cat → dog"], "a text").image is None
        True
    """

    lines: Sequence[str]
    shown: Any

    @property
    def image(self) -> str | None:
        """Picture as the data URI of a PNG file; None if there is a text."""
        if isinstance(self.shown, str):
            return None
        buffer = io.BytesIO()
        self.shown.save(buffer, "PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def plot_package(name: str) -> Any:
    """Returns a module that the extra `plot` installs.

    Raises:
        ImportError: The module is not installed.

    Example:
        >>> plot_package("PIL.Image").__name__
        'PIL.Image'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"pictures need the module {name}, which is missing: pip install 'thresher[plot]'"
        ) from error


def read_sample(number: int, dataset: Any, show: Callable[[int], Any] | None, row: str) -> Any:
    """Returns a sample as a small PIL image or as a text. Global random states stay as they are.

    Args:
        number: Id of the sample.
        dataset: Map-style dataset; None: it is not known.
        show: Function from the id of a sample to a picture or a text. Default: the dataset is read.
        row: Text for a sample that is neither.

    Raises:
        TypeError: `show` returns neither a picture nor a text, or the dataset returns an array that is no picture.

    Example:
        >>> read_sample(0, [("a text", 1)], None, "loss 2"), read_sample(0, [(3.5, 1)], None, "loss 2")
        ('a text', 'loss 2')
    """
    with undisturbed(torch.device("cuda" if torch.cuda.is_initialized() else "cpu")):
        if show is not None:
            given = show(number)
        elif dataset is not None:
            given = dataset[number]
        else:
            return row
    if isinstance(given, Mapping) and given.keys() >= {"chosen", "rejected"}:
        return text_of_pair(given)
    if isinstance(given, tuple | list) and given:
        given = given[0]
    parts = given if isinstance(given, tuple | list) else (given,)
    if isinstance(given, Mapping):
        parts = given.values()
    shown = [part for part in map(picture_or_text, parts) if part is not None]
    shown.sort(key=lambda part: isinstance(part, str))
    if shown and not isinstance(shown[0], str):
        return shown[0]
    if not shown and (show is not None or getattr(given, "ndim", 0) > 1):
        shape = getattr(given, "shape", None)
        kind = type(given).__name__ if shape is None else f"array of shape {tuple(shape)}"
        raise TypeError(
            f"sheet: sample {number} must be a text, a PIL image, or an array or tensor of shape (H, W) or with 1 or 3 channels, "
            f"got {kind}; pass show=, a function that returns one of them for an id"
        )
    text = " | ".join(shown) or row
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def text_of_pair(row: Mapping[str, Any]) -> str:
    """Returns the end of what the answers of a pair begin with, and how each goes on, with at most 300 characters each.

    Args:
        row: Texts or lists of messages by the names "chosen", "rejected" and perhaps "prompt".

    Example:
        >>> row = {"prompt": "Where?", "chosen": " It is here.", "rejected": " It is there."}
        >>> text_of_pair(row).split(SIDE_BY_SIDE)
        ['prompt: Where? It is ', 'chosen: here.', 'rejected: there.']
    """
    prompt = _as_text(row.get("prompt", ""))
    # RewardTrainer of TRL puts the prompt before the answers as well.
    chosen = prompt + _as_text(row["chosen"]).removeprefix(prompt)
    rejected = prompt + _as_text(row["rejected"]).removeprefix(prompt)
    start = max(len(prompt), commonprefix([chosen, rejected]).rfind(" ") + 1)  # noqa: RUF071
    texts = [
        f"prompt: {chosen[:start][-LONGEST_TEXT:]}",
        f"chosen: {chosen[start:][:LONGEST_TEXT]}",
        f"rejected: {rejected[start:][:LONGEST_TEXT]}",
    ]
    return SIDE_BY_SIDE.join(texts)


def _as_text(given: Any) -> str:
    """Returns a text, or the messages of a conversation as a text."""
    if isinstance(given, str):
        return given
    return "".join(f"{message['role']}: {message['content']}\n" for message in given)


def write_sheet(path: Path, title: str, cards: Sequence[SampleCard], ranks: Sequence[int]) -> None:
    """Writes samples to a file.

    Args:
        path: File that ends in .png or .html.
        title: Sentence above the samples.
        cards: Samples in order, at least one.
        ranks: Rank of each by its suspicion, which the answers of an HTML page have.
    """
    if path.suffix.lower() == ".png":
        _draw(title, cards).save(path)
        return
    items = []
    for card, rank in zip(cards, ranks, strict=True):
        image = card.image
        shown = f'<img src="{image}" alt="">'
        if image is None:
            shown = f"<p>{escape(card.shown).replace(SIDE_BY_SIDE, '</p><p>')}</p>"
        caption = "<br>".join(map(escape, card.lines))
        items.append(CARD.format(id=card.lines[0], rank=rank, shown=shown, caption=caption))
    path.write_text(PAGE.format(title=escape(title), items="\n".join(items)), encoding="utf-8")


def _draw(title: str, cards: Sequence[SampleCard]) -> Any:
    """Returns samples as one PIL image."""
    images, drawing, fonts, operations = (
        plot_package(f"PIL.Image{name}") for name in ("", "Draw", "Font", "Ops")
    )
    # Pillow's own font has no arrow and no letters with accents.
    folder = plot_package("matplotlib").get_data_path()
    font = fonts.truetype(f"{folder}/fonts/ttf/DejaVuSans.ttf", 11)
    height = SIDE + (CAPTION_LINES + 1) * LINE_HEIGHT
    rows = -(-len(cards) // PER_ROW)
    sheet = images.new("RGB", (PER_ROW * WIDTH, 2 * LINE_HEIGHT + rows * height), "white")
    draw = drawing.Draw(sheet)

    def write(top: int, lines: Sequence[str], most: int) -> None:
        wrapped = chain.from_iterable(wrap(line, font.getlength) for line in lines)
        draw.text((left, top), "\n".join(islice(wrapped, most)), "black", font, spacing=2)

    draw.text((GAP, GAP), title, "black", font)
    for place, card in enumerate(cards):
        left = GAP + place % PER_ROW * WIDTH
        top = 2 * LINE_HEIGHT + place // PER_ROW * height
        if isinstance(card.shown, str):
            write(top, card.shown.splitlines(), SIDE // LINE_HEIGHT)
        else:
            # Small pictures are enlarged without blurring their pixels.
            enlarged = operations.contain(card.shown, (SIDE, SIDE), images.Resampling.NEAREST)
            sheet.paste(enlarged, (left, top))
        write(top + SIDE, card.lines, CAPTION_LINES)
    return sheet


def wrap(line: str, measure: Callable[[str], float]) -> Iterator[str]:
    """Yields the parts of a line that are at most `TEXT_WIDTH` wide, broken at spaces or within a word that is wider.

    Args:
        line: The line.
        measure: Function that returns the width of a text, in pixels.

    Example:
        >>> list(wrap("a long text, iiiii", lambda text: 20 * len(text)))
        ['a long', 'text,', 'iiiii']
    """
    rest = line.strip()
    while rest:
        end = bisect_right(range(1, len(rest) + 1), TEXT_WIDTH, key=lambda end: measure(rest[:end]))
        space = rest.rfind(" ", 0, end + 1)
        if end < len(rest) and space > 0:
            end = space
        end = max(1, end)
        yield rest[:end].rstrip()
        rest = rest[end:].lstrip()


def picture_or_text(given: Any) -> Any:
    """Returns a small PIL image, or a text; None for an object that is neither.

    Args:
        given: Text, PIL image, or array or tensor of shape (H, W), (1, H, W), (3, H, W), (H, W, 1) or (H, W, 3). Integers from 0 to
            255 and fractions from 0 to 1 are black to white; of other values, the smallest becomes black and the largest white.

    Example:
        >>> picture_or_text("a text"), picture_or_text(torch.zeros(3, 4, 5)).size, picture_or_text(None)
        ('a text', (5, 4), None)
    """
    if isinstance(given, str):
        return given
    images = plot_package("PIL.Image")
    if isinstance(given, images.Image):
        if given.mode[0] not in "IF":
            return _small(images, given)
        given = np.asarray(given)
    if isinstance(given, Tensor):
        # NumPy has no bfloat16.
        given = (given.float() if given.is_floating_point() else given).numpy(force=True)
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "biuf" or not given.size:
        return None
    if given.ndim == 3 and 1 in given.shape[::2]:
        given = given.squeeze(0 if given.shape[0] == 1 else 2)
    if given.ndim == 3 and given.shape[2] != 3:
        given = given.transpose(1, 2, 0)
    if given.ndim != 2 and given.shape[2:] != (3,):
        return None
    if not np.isfinite(given).all():
        return f"a picture of shape {given.shape} with NaN or infinity"
    return _small(images, images.fromarray(_bytes(given)))


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns values as bytes; if they are neither bytes nor fractions, the smallest becomes 0 and the largest 255."""
    low = float(values.min())
    high = float(values.max())
    white = 255.0 if values.dtype.kind in "iu" else 1.0
    if low >= 0 and high <= white:
        low = 0.0
        high = white
    return np.rint(np.interp(values, (low, high), (0, 255))).astype(np.uint8)


def _small(images: Any, image: Any) -> Any:
    """Returns a PIL image in color, on white, of at most `SIDE` pixels in each direction."""
    small = image.convert("RGBA")
    small.thumbnail((SIDE, SIDE))
    white = images.new("RGBA", small.size, "white")
    return images.alpha_composite(white, small).convert("RGB")
