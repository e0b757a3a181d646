"""Classes of relief, pixel by pixel: tasks of our own making, in the place of DeepCAM's masks of the weather.

What is to be told is how high a pixel lies: deep ocean, shelf, land or high land. What is seen is the shape of the ground
alone: slopes, curvature, and the height above the mean around it. Large parts are of one class and easy, the shelf is rare
and hard: the redundancy and the imbalance of DeepCAM, at the scale of one core.

`relief` is the Earth between 80 degrees north and south: 8,100 patches of 32 x 32 pixels of ETOPO5 (NOAA, five minutes of arc
a pixel), which the Debian package ferret-datasets brings. `relief-made` is 2,048 patches of a made-up planet and needs no
file. Of the squares of 256 x 256 pixels a fifth is for testing: no test patch lies amid training patches.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.io import netcdf_file
from scipy.ndimage import correlate1d, laplace, uniform_filter
from torch import Tensor
from torch.utils.data import TensorDataset

from thresher.experiments.tasks.data.base import Data

CLASSES = ("deep ocean", "shelf", "land", "high land")
BOUNDS = (-200.0, 0.0, 1000.0)
"""Metres between the classes; a pixel at a bound is of the class above."""
PATCH, BLOCK, BOX = 32, 256, 17
"""Sides in pixels: of a sample, of what is for training or for testing as a whole, of the surroundings of a pixel."""

DEBIAN_FILE = Path("/usr/share/ferret-vis/data/etopo5.cdf")
VARIABLE, SHAPE = "ROSE", (2161, 4320)
LATITUDES = slice(120, 2040)
"""Rows from 80 degrees south up to 80 degrees north."""
LOWEST, HIGHEST = -12_000, 9_000

MADE_SHAPE = (1024, 2048)
ROUGHNESS = 1.8
"""Waves of the made-up planet are as high as they are long to this power."""
HYPSOMETRY = ((-4.0, -6000.0), (0.2, -3000.0), (0.36, -200.0), (0.55, 0.0), (1.4, 1000.0), (4.0, 9000.0))
"""Its heights in metres at normal deviates; classes have about the Earth's shares, 64, 7, 21 and 8 in a hundred."""

Map = NDArray[np.float32]
"""Metres above the sea, shape (rows, columns); the columns go round the planet."""


def find_relief() -> Path:
    """The file that ferret-datasets brings.

    Raises:
        FileNotFoundError: It is not there.
    """
    if DEBIAN_FILE.is_file():
        return DEBIAN_FILE
    raise FileNotFoundError(
        f"relief is made of {DEBIAN_FILE}, which is not there; a Debian package brings it: apt install ferret-datasets. "
        "The task relief-made is of the same kind and needs no file"
    )


def relief(path: Path | None = None) -> Data:
    """8,100 patches of the Earth.

    Raises:
        FileNotFoundError: See `find_relief`.
        ValueError: See `read_elevation`.
    """
    return _split(read_elevation(path or find_relief()), LATITUDES)


def relief_made(_: Path | None = None) -> Data:
    """2,048 patches of a made-up planet, the same every time."""
    return _split(made_elevation())


def read_elevation(path: Path) -> Map:
    """The whole Earth, from south to north.

    Raises:
        ValueError: The file is truncated, damaged or another one; the message names it.
    """
    content = io.BytesIO(path.read_bytes())
    try:
        with netcdf_file(content, mmap=False) as file:
            elevation = np.asarray(file.variables[VARIABLE].data, np.float32)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path}: truncated or damaged: {type(error).__name__}: {error}") from error
    if elevation.shape != SHAPE:
        raise ValueError(f"{path}: damaged: {VARIABLE} has {elevation.shape} values instead of {SHAPE}")
    lowest, highest = elevation.min(), elevation.max()
    if not LOWEST <= lowest <= highest <= HIGHEST:
        raise ValueError(f"{path}: damaged: heights from {lowest:g} to {highest:g} m, not within {LOWEST} to {HIGHEST}")
    return elevation


def made_elevation(shape: tuple[int, int] = MADE_SHAPE, seed: int = 0) -> Map:
    """Fractal noise with the Earth's shares of heights; the rows go round as well."""
    noise = np.random.default_rng(seed).standard_normal(shape)
    frequency = np.hypot(np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1]))
    frequency[0, 0] = np.inf
    surface = np.fft.irfft2(np.fft.rfft2(noise) * frequency**-ROUGHNESS, s=shape)
    return np.interp(surface / surface.std(), *np.transpose(HYPSOMETRY)).astype(np.float32)


def inputs_of(elevation: Map) -> NDArray[np.float32]:
    """What is seen of a map: sign(v) log(1 + |v|) of four values v in metres.

    Returns:
        Shape (4, rows, columns): half the difference between the neighbours in the north and the south, and in the east and
        the west; the Laplacian; and the height above the mean of 17 x 17 pixels.
    """
    around: Any = ("nearest", "wrap")
    half = (-0.5, 0.0, 0.5)
    values = (
        correlate1d(elevation, half, axis=0, mode=around[0]),
        correlate1d(elevation, half, axis=1, mode=around[1]),
        laplace(elevation, mode=around),
        elevation - uniform_filter(elevation, BOX, mode=around),
    )
    return np.stack([np.sign(value) * np.log1p(np.abs(value)) for value in values])


def classes_of(elevation: Map) -> NDArray[np.int64]:
    """Positions in `CLASSES`, one a pixel."""
    return np.digitize(elevation, BOUNDS)


def _split(elevation: Map, rows: slice = slice(None)) -> Data:
    """The patches of some rows, their inputs normalised by those for training."""
    inputs = _patches(inputs_of(elevation)[:, rows])
    targets = _patches(classes_of(elevation[rows])[None]).squeeze(1)
    test = _of_test_blocks(*(side // PATCH for side in elevation[rows].shape))
    std, mean = torch.std_mean(inputs[~test], (0, 2, 3), keepdim=True)
    scaled = (inputs - mean) / std
    return Data(TensorDataset(scaled[~test], targets[~test]), scaled[test], targets[test])


def _patches(maps: NDArray[np.generic]) -> Tensor:
    """Shape (channels, rows, columns) to (patches, channels, PATCH, PATCH), row by row of patches."""
    channels, rows, columns = maps.shape
    grid = maps.reshape(channels, rows // PATCH, PATCH, columns // PATCH, PATCH)
    return torch.from_numpy(grid.transpose(1, 3, 0, 2, 4).reshape(-1, channels, PATCH, PATCH))


def _of_test_blocks(rows: int, columns: int) -> Tensor:
    """Which of so many patches are for testing, row by row."""
    side = BLOCK // PATCH
    blocks = -(-rows // side), -(-columns // side)
    order = np.random.default_rng(0).permutation(blocks[0] * blocks[1]).reshape(blocks)
    return torch.from_numpy((order < order.size // 5).repeat(side, 0).repeat(side, 1)[:rows, :columns].ravel())
