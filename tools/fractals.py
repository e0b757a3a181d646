"""Draws images of fractals, a folder for each class, as FractalDB does (arXiv:2101.08515): data for `deit-tiny-fractal3k`.

    python -m tools.fractals DIR                     # 3,000 classes of 1,000 images in DIR/train, 362 x 362 pixels
    python -m tools.fractals DIR --classes 10 --images 20 --size 64

A class is an iterated function system: two to eight affine maps, drawn anew until its points cover a fifth of a picture. The
1,000 images of a class have one of its maps changed a little (25 ways), are flipped (4 ways), and show each point as one of ten
patterns of 3 x 3 pixels. These are not the published images, which were drawn with other random numbers. Classes that are there
are left alone, so the same command goes on where it was stopped.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

POINTS, WALKS, COVERED = 100_000, 500, 0.2
"""Number of points of an image, of walks that draw them together, and the smallest share of covered cells of a class."""
SCALES = (0.8, 0.9, 1.1, 1.2)
"""Factors on one kind of number of all maps, a to f; the class itself is the 25th way."""


def draw_points(
    maps: NDArray[np.float64], points: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Draws points of the attractor of some maps.

    Args:
        maps: Maps (x, y) -> (a x + b y + e, c x + d y + f), shape (M, 6), in the order a, b, c, d, e, f.
        points: Number of points.
        generator: Source of the maps that each walk takes: each with a chance proportional to its area.

    Returns:
        Points, shape (points, 2); not finite where the maps have no attractor.
    """
    areas = np.abs(maps[:, 0] * maps[:, 3] - maps[:, 1] * maps[:, 2]) + 1e-3
    steps = 20 + -(-points // WALKS)
    chosen = generator.choice(len(maps), size=(steps, WALKS), p=areas / areas.sum())
    place, places = np.zeros((WALKS, 2)), np.empty((steps, WALKS, 2))
    with np.errstate(over="ignore", invalid="ignore"):
        for step, taken in enumerate(chosen):
            a, b, c, d, e, f = maps[taken].T
            place = np.stack(
                [a * place[:, 0] + b * place[:, 1] + e, c * place[:, 0] + d * place[:, 1] + f],
                axis=1,
            )
            places[step] = place
    return places[20:].reshape(-1, 2)[:points]  # the first steps are on the way to the attractor


def cells_of(points: NDArray[np.float64], size: int) -> NDArray[np.int64] | None:
    """Returns the row and column of each point in a square of `size` cells that the points just fill; None without one."""
    low, high = points.min(0), points.max(0)
    if (
        not np.isfinite([low, high]).all()
        or (high - low).min() < 1e-6
        or np.abs([low, high]).max() > 1e6
    ):
        return None
    return ((points - low) / (high - low) * (size - 1)).astype(np.int64)


def draw_class(generator: np.random.Generator) -> NDArray[np.float64]:
    """Draws maps until their points cover at least `COVERED` of a picture of 64 x 64 cells; shape (M, 6)."""
    while True:
        maps = generator.uniform(-1, 1, (generator.integers(2, 9), 6))
        cells = cells_of(draw_points(maps, 20_000, generator), 64)
        if cells is not None and len(np.unique(cells[:, 0] * 64 + cells[:, 1])) >= COVERED * 64**2:
            return maps


def images_of(
    maps: NDArray[np.float64], count: int, size: int, generator: np.random.Generator
) -> Iterator[Image.Image]:
    """Yields images of a class, gray, of `size` x `size` pixels; fewer than `count` if there are no more ways than that."""
    patterns = generator.random((10, 9)) < 0.5
    changes = [(0, 1.0), *itertools.product(range(6), SCALES)]
    ways = list(itertools.product(changes, range(4), range(10)))
    for number in generator.permutation(len(ways))[:count]:
        (kind, factor), flip, pattern = ways[number]
        changed = maps.copy()
        changed[:, kind] *= factor
        cells = cells_of(draw_points(changed, POINTS, generator), size - 2)
        if cells is None:
            continue  # the change took the attractor away
        image = np.zeros((size, size), dtype=np.uint8)
        for place in np.flatnonzero(patterns[pattern]):
            image[cells[:, 1] + place // 3, cells[:, 0] + place % 3] = 255
        yield Image.fromarray(image[:: 1 if flip % 2 else -1, :: 1 if flip // 2 else -1])


def write(folder: Path, classes: int, images: int, size: int) -> None:
    """Writes images as `train/CLASS/NUMBER.png` in a folder; class c is the same for any number of classes.

    Args:
        folder: The folder.
        classes: Number of classes.
        images: Largest number of images of a class, 1 to 1,000.
        size: Height and width of an image, at least 16.
    """
    for number in range(classes):
        final, partial = folder / "train" / f"{number:05}", folder / f"{number:05}.partial"
        if final.exists():
            continue
        partial.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng((2101, number))
        for index, image in enumerate(images_of(draw_class(generator), images, size, generator)):
            image.save(partial / f"{index:04}.png")
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
