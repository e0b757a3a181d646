"""What samples look like, as a user's own function shows them: small pictures and short texts in one file per run."""

import base64
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from thresher.sheet import picture_or_text
from thresher_lab.training.samples import SHOWN_SUSPECTS, RunHistory, standing_out, suspects
from thresher_lab.training.store import write_json

SIDE = 64
"""Largest width and height of a picture, in pixels."""
LONGEST_TEXT = 200
"""Largest number of characters of a text."""
ALLOWED = "a PIL image, a tensor or an array of shape (H, W), (H, W, 3), (3, H, W) or (1, H, W), or a text"

Show = Callable[[int], Any]
"""A function from the id of a sample to a picture or a text."""
Shown = dict[str, str]
"""A small picture, {"png": PNG file in base64}, or a text, {"text": text}."""


class UnshowableError(ValueError):
    """What a function returned is no picture and no text; the message continues a sentence that begins with the function."""


def shown(given: Any) -> Shown:
    """Makes a picture small, or a text short.

    Args:
        given: Picture or text, see `ALLOWED`. Whole numbers from 0 to 255 and fractions from 0 to 1 are black to white; where a
            picture has other values, its smallest becomes black and its largest white.

    Raises:
        UnshowableError: It is none of what is allowed.

    Example:
        >>> shown("a short text")
        {'text': 'a short text'}
    """
    seen = picture_or_text(given)
    if seen is None:
        shape = getattr(given, "shape", None)
        if shape is None:
            kind = type(given).__name__
        else:
            kind = f"an array of shape {tuple(shape)}"
        raise UnshowableError(f"must return {ALLOWED}; got {kind}")
    if isinstance(seen, str):
        return {"text": seen if len(seen) <= LONGEST_TEXT else seen[: LONGEST_TEXT - 1] + "…"}
    seen.thumbnail((SIDE, SIDE))
    return {"png": as_png(seen)}


def write_shown(path: Path, show: Show, ids: Iterable[int]) -> None:
    """Writes what samples look like to a JSON file.

    A sample for which the function fails is shown as the text of its error: the run is trained by then, and must not be lost.

    Args:
        path: Path of the file.
        show: Function that shows a sample.
        ids: Ids of the samples.
    """
    write_json(
        path, {"shown": {str(number): _shown_or_error(show, number) for number in sorted(ids)}}
    )


def ids_to_show(history: RunHistory, full: RunHistory | None = None) -> set[int]:
    """Returns the ids of all samples that a report may show of a run.

    Args:
        history: History of the samples of the run.
        full: History of full training with the same seed, which tells what was left out by the loader alone. None: it is not
            known yet.
    """
    views = (history, history.beside(full))
    rows = [
        *suspects(history)[:SHOWN_SUSPECTS],
        *(row for view in views for one in standing_out(view).values() for row in one),
    ]
    return {int(history.ids[row]) for row in rows}


def _shown_or_error(show: Show, number: int) -> Shown:
    try:
        return shown(show(number))
    except Exception as error:
        return shown(f"show({number}): {type(error).__name__}: {error}")


def as_png(image: Image.Image) -> str:
    """Returns an image as a PNG file in base64."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
