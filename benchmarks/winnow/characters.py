"""Characters drawn from the free fonts that are installed: a task of 94 classes, with test fonts that were not trained on."""

import hashlib
import subprocess
from functools import cache

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
FEWEST = 120
"""Number of font families below which there is no such task."""


@cache
def families() -> list[str]:
    """Returns one font file of each installed family that has all characters, in an order that its name decides.

    Raises:
        FileNotFoundError: Fewer than `FEWEST` families are installed.
    """
    listed = subprocess.run(["fc-list", ":lang=en:style=Regular", "file", "family"], capture_output=True, text=True, check=True)
    files: dict[str, str] = {}
    for line in sorted(listed.stdout.splitlines()):
        file, _, family = line.partition(": ")
        if file.endswith((".ttf", ".otf")):
            files.setdefault(family.split(",")[0].split()[0], file)  # one of the fonts that are cuts of another
    named = sorted(files, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    found = [files[name] for name in named if _has_all(files[name])]
    if len(found) < FEWEST:
        raise FileNotFoundError(f"{len(found)} font families are installed; the task needs {FEWEST} (Debian: fonts-*)")
    return found


def _has_all(file: str) -> bool:
    """Whether a font draws every character, each in its own way."""
    drawn = {_drawn(file, character).tobytes() for character in "AaBbQq0189{}@&#%;~"}
    return len(drawn) == 18 and all(any(image) for image in drawn)


def _drawn(file: str, character: str) -> NDArray[np.uint8]:
    """Returns an image of a character, in the middle, as large as fits."""
    image = Image.new("L", (2 * DRAWN_AT, 2 * DRAWN_AT))
    try:
        ImageDraw.Draw(image).text((DRAWN_AT, DRAWN_AT), character, 255, ImageFont.truetype(file, DRAWN_AT), anchor="mm")
    except OSError:
        return np.zeros((SIZE, SIZE), dtype=np.uint8)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX))


@cache
def characters() -> Sets:
    """Returns images of all characters, shape (N, 1, 28, 28), and their classes; a sample is a character of a font family."""
    images = np.stack([[_drawn(file, character) for character in CHARACTERS] for file in families()])
    inputs = torch.from_numpy(images).float().div(255).sub(0.1).div(0.25)
    targets = torch.arange(len(CHARACTERS)).expand(len(inputs), -1)
    parts = [
        (inputs[some].reshape(-1, 1, SIZE, SIZE), targets[some].reshape(-1))
        for some in (slice(TRAIN), slice(TRAIN, TRAIN + CHOICE), slice(TRAIN + CHOICE, None))
    ]
    return Sets(TensorDataset(*parts[0]), *parts[1:])
