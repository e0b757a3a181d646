"""What samples look like, as a user's own function shows them: small pictures and short texts in one file per run."""

import base64
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

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
    if isinstance(given, str):
        return {"text": given if len(given) <= LONGEST_TEXT else given[: LONGEST_TEXT - 1] + "…"}
    if isinstance(given, Image.Image):
        image = given if given.mode[0] not in "IF" else Image.fromarray(_pixels(np.asarray(given)))
    elif isinstance(given, torch.Tensor):
        values = given.detach().cpu()
        image = Image.fromarray(
            _pixels((values.float() if values.is_floating_point() else values).numpy())
        )
    elif isinstance(given, np.ndarray):
        image = Image.fromarray(_pixels(given))
    else:
        raise UnshowableError(f"must return {ALLOWED}; got {type(given).__name__}")
    return {"png": _small_png(image)}


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


def _pixels(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns values as a gray picture, shape (H, W), or a color picture, shape (H, W, 3)."""
    if values.ndim == 3 and values.shape[0] == 1 and values.shape[2] != 3:
        values = values[0]
    color = values.ndim == 3 and 3 in (values.shape[2], values.shape[0])
    if not (values.ndim == 2 or color) or not values.size or values.dtype.kind not in "biuf":
        raise UnshowableError(
            f"must return {ALLOWED}; got an array of shape {values.shape} and dtype {values.dtype}"
        )
    if not np.isfinite(values).all():
        raise UnshowableError("must return a picture of finite values; got NaN or infinity")
    if color and values.shape[2] != 3:
        values = values.transpose(1, 2, 0)
    low, high = (float(values.min()), float(values.max())) if values.dtype != bool else (0.0, 1.0)
    if values.dtype.kind in "iu" and low >= 0 and high <= 255:
        return values.astype(np.uint8)
    if low >= 0 and high <= 1:
        low = 0.0
        high = 1.0
    return np.rint(255 * ((values.astype(np.float64) - low) / ((high - low) or 1.0))).astype(
        np.uint8
    )


def _small_png(image: Image.Image) -> str:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    small = image.convert("L" if image.mode in ("1", "L") else "RGB")
    small.thumbnail((SIDE, SIDE))
    return as_png(small)


def as_png(image: Image.Image) -> str:
    """Returns an image as a PNG file in base64."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
