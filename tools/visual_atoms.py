"""Draws visual atoms, a folder for each class, after arXiv:2303.01112: data for `deit-tiny-fractal3k`.

    python -m tools.visual_atoms DIR                     # 3,000 classes of 1,000 images in DIR/train, 362 x 362 pixels
    python -m tools.visual_atoms DIR --classes 10 --images 20 --size 64

A class is a closed curve, the sum of two sinusoidal waves on a circle, drawn as polygons on concentric orbits: it has two
frequencies, an oval shape, and numbers of orbits and of corners of each. The images of a class differ in place, size, brightness and in the
noise of their corners. These are not the published images of Fractal-3K, which were drawn with other random numbers. Classes
that are there are left alone, so the same command goes on where it was stopped.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

FREQUENCIES = 21
ORBITS = 200
CORNERS = (200, 1000)
OVAL = (1.0, 2.0)
NOISE = 0.1
"""Number of frequencies, from 0; largest number of orbits; ranges of the corners and of the axes; largest noise, in radii."""


@dataclass(frozen=True)
class Atom:
    """What the images of a class have in common.

    Args:
        frequencies: Numbers of waves around the circle of the two sinusoids.
        oval: Lengths of the horizontal and the vertical axis.
        orbits: Number of concentric curves.
        corners: Number of corners of a curve.
        noise: Standard deviation of the radius of a corner, in radii.
    """

    frequencies: tuple[int, int]
    oval: tuple[float, float]
    orbits: int
    corners: int
    noise: float

    def draw(self, size: int, generator: np.random.Generator) -> Image.Image:
        """Returns an image of `size` x `size` pixels, gray."""
        angle = np.linspace(0, 2 * np.pi, self.corners, endpoint=False)
        wave = sum(np.sin(frequency * angle) for frequency in self.frequencies) / 4
        place = generator.uniform(0.25, 0.75, 2) * size
        largest = generator.uniform(0.25, 0.5) * size / max(self.oval)
        circle = np.stack([np.cos(angle), np.sin(angle)], axis=1) * self.oval
        image = Image.new("L", (size, size))
        pen = ImageDraw.Draw(image)
        for orbit in range(1, self.orbits + 1):
            radius = 1 + wave + generator.normal(0, self.noise, self.corners)
            curve = place + largest * orbit / self.orbits * radius[:, None] * circle
            pen.polygon(curve.ravel().tolist(), outline=int(generator.integers(64, 256)))
        return image


def random_atom(generator: np.random.Generator) -> Atom:
    """Returns a class."""
    first, second = generator.integers(0, FREQUENCIES, 2)
    wide, high = generator.uniform(*OVAL, 2)
    return Atom(
        frequencies=(int(first), int(second)),
        oval=(wide, high),
        orbits=int(generator.integers(1, ORBITS + 1)),
        corners=int(generator.integers(*CORNERS)),
        noise=generator.uniform(0, NOISE),
    )


def write(folder: Path, classes: int, images: int, size: int) -> None:
    """Writes images as `train/CLASS/NUMBER.png` in a folder; class c is the same for any number of classes.

    Args:
        folder: The folder.
        classes: Number of classes.
        images: Number of images of a class.
        size: Height and width of an image.
    """
    for number in range(classes):
        final, partial = folder / "train" / f"{number:05}", folder / f"{number:05}.partial"
        if final.exists():
            continue
        partial.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng((2303, number))
        atom = random_atom(generator)
        for index in range(images):
            atom.draw(size, generator).save(partial / f"{index:04}.png")
        final.parent.mkdir(exist_ok=True)
        partial.rename(final)  # a class is there as a whole or not at all


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for name, default in (("classes", 3000), ("images", 1000), ("size", 362)):
        parser.add_argument(f"--{name}", type=int, default=default)
    write(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
