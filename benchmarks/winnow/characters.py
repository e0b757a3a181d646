"""Characters drawn from free fonts: a task of 94 classes, with test fonts that were not trained on."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import TensorDataset

from benchmarks.winnow.tasks import Sets

CHARACTERS = [chr(code) for code in range(33, 127)]
"""The printable characters of ASCII: 94 classes."""
SIZE, DRAWN_AT = 28, 56
"""Pixels of an image, and of the font, which is drawn large and made smaller."""
TRAIN, CHOICE = 60, 25
"""Number of font families that are trained on, and that rates are chosen with; the others are for testing."""
FOLDER = Path("/usr/share/fonts")
LIST = Path(__file__).with_name("fonts.txt")
"""The font families, a line each: Debian's package, and the file in its folder of fonts. Other fonts would be another task."""


@cache
def families() -> list[Path]:
    """Returns one font file of each family, in the order of the list.

    Raises:
        FileNotFoundError: A font is not installed.
    """
    listed = [line.split() for line in LIST.read_text(encoding="utf-8").splitlines()]
    missing = sorted({package for package, file in listed if not (FOLDER / file).is_file()})
    if missing:
        raise FileNotFoundError(
            f"Fonts are missing. On Debian: apt-get install --no-install-recommends {' '.join(missing)}"
        )
    return [FOLDER / file for _, file in listed]


def _drawn(file: Path, character: str) -> NDArray[np.uint8]:
    """Returns an image of a character, in the middle, as large as fits."""
    image = Image.new("L", (2 * DRAWN_AT, 2 * DRAWN_AT))
    ImageDraw.Draw(image).text(
        (DRAWN_AT, DRAWN_AT), character, 255, ImageFont.truetype(file, DRAWN_AT), anchor="mm"
    )
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX))


@cache
def characters() -> Sets:
    """Returns images of all characters, shape (N, 1, 28, 28), and their classes; a sample is a character of a font family."""
    images = np.stack(
        [[_drawn(file, character) for character in CHARACTERS] for file in families()]
    )
    inputs = torch.from_numpy(images).float().div(255).sub(0.1).div(0.25)
    targets = torch.arange(len(CHARACTERS)).expand(len(inputs), -1)
    parts = [
        (inputs[some].reshape(-1, 1, SIZE, SIZE), targets[some].reshape(-1))
        for some in (slice(TRAIN), slice(TRAIN, TRAIN + CHOICE), slice(TRAIN + CHOICE, None))
    ]
    return Sets(TensorDataset(*parts[0]), *parts[1:])
