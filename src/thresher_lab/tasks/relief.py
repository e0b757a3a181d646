"""Segmentation of relief: a small substitute for the weather masks of DeepCAM.

The target is the height class of each pixel: deep ocean, shelf, land or high land. The inputs describe only the shape of the
ground: slopes, curvature, and the height above the mean of the surroundings. Large areas belong to one class and are easy,
while the shelf is rare and hard. This resembles the redundancy and the imbalance of DeepCAM, at a size for one core.

`relief` is the Earth between 80 degrees north and south: 8,100 patches of 32 x 32 pixels of ETOPO5 (NOAA, five minutes of arc
per pixel), a file of the Debian package ferret-datasets. `relief-made` consists of 2,048 patches of an artificial planet and
needs no file. One in five squares of 256 x 256 pixels is for testing, so that test patches lie together.
"""

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.io import netcdf_file
from scipy.ndimage import correlate1d, laplace, uniform_filter
from torch import Tensor
from torch.utils.data import TensorDataset

from thresher_lab.tasks.base import Data, Task, pixel_mean_iou, without_folder
from thresher_lab.tasks.networks import UNet

CLASSES = ("deep ocean", "shelf", "land", "high land")
BOUNDS = (-200.0, 0.0, 1000.0)
"""Heights between the classes, in metres; a pixel at a bound belongs to the higher class."""
PATCH = 32
BLOCK = 256
BOX = 17
"""Sides, in pixels, of a sample, of a square that is for training or for testing as a whole, and of a pixel's surroundings."""

DEBIAN_FILE = Path("/usr/share/ferret-vis/data/etopo5.cdf")
VARIABLE = "ROSE"
SHAPE = (2161, 4320)
LATITUDES = slice(120, 2040)
"""Rows from 80 degrees south up to 80 degrees north."""
LOWEST = -12_000
HIGHEST = 9_000

MADE_SHAPE = (1024, 2048)
ROUGHNESS = 1.8
"""Exponent of the artificial planet: the height of a wave is proportional to this power of its length."""
HYPSOMETRY = (
    (-4.0, -6000.0),
    (0.2, -3000.0),
    (0.36, -200.0),
    (0.55, 0.0),
    (1.4, 1000.0),
    (4.0, 9000.0),
)
"""Heights of the artificial planet, in metres, at quantiles of the normal distribution; the classes have about the same shares
as on the Earth, 64, 7, 21 and 8 percent."""

Map = NDArray[np.float32]
"""Heights above the sea in metres, shape (rows, columns); the last column is next to the first."""


def find_relief() -> Path:
    """Returns the path of the file of ferret-datasets.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if DEBIAN_FILE.is_file():
        return DEBIAN_FILE
    raise FileNotFoundError(
        f"relief is made of {DEBIAN_FILE}, which is not there; a Debian package brings it: apt install ferret-datasets. "
        "The task relief-made is of the same kind and needs no file"
    )


def relief(path: Path | None = None) -> Data:
    """Returns 8,100 patches of the Earth.

    Raises:
        FileNotFoundError: See `find_relief`.
        ValueError: See `read_elevation`.
    """
    return _train_and_test(read_elevation(path or find_relief()), LATITUDES)


def relief_made(_: Path | None = None) -> Data:
    """Returns 2,048 patches of an artificial planet, always the same."""
    return _train_and_test(made_elevation())


def read_elevation(path: Path) -> Map:
    """Returns the heights of the whole Earth, from south to north.

    Raises:
        ValueError: The file is truncated, damaged or another one; the message names it.
    """
    content = io.BytesIO(path.read_bytes())
    try:
        with netcdf_file(content, mmap=False) as file:
            elevation = np.asarray(file.variables[VARIABLE].data, np.float32)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"{path}: truncated or damaged: {type(error).__name__}: {error}"
        ) from error
    if elevation.shape != SHAPE:
        raise ValueError(
            f"{path}: damaged: {VARIABLE} has {elevation.shape} values instead of {SHAPE}"
        )
    lowest = elevation.min()
    highest = elevation.max()
    if not LOWEST <= lowest <= highest <= HIGHEST:
        raise ValueError(
            f"{path}: damaged: heights from {lowest:g} to {highest:g} m, not within {LOWEST} to {HIGHEST}"
        )
    return elevation


def made_elevation(shape: tuple[int, int] = MADE_SHAPE, seed: int = 0) -> Map:
    """Returns fractal noise with about the distribution of heights of the Earth; the last row is next to the first, too."""
    noise = np.random.default_rng(seed).standard_normal(shape)
    frequency = np.hypot(np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1]))
    frequency[0, 0] = np.inf
    surface = np.fft.irfft2(np.fft.rfft2(noise) * frequency**-ROUGHNESS, s=shape)
    return np.interp(surface / surface.std(), *np.transpose(HYPSOMETRY)).astype(np.float32)


def elevation_inputs(elevation: Map) -> NDArray[np.float32]:
    """Returns the inputs of the network: sign(v) log(1 + |v|) of four values v in metres.

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


def elevation_classes(elevation: Map) -> NDArray[np.int64]:
    """Returns the class of each pixel, an index of `CLASSES`."""
    return np.digitize(elevation, BOUNDS)


def _train_and_test(elevation: Map, rows: slice = slice(None)) -> Data:
    """Returns the patches of some rows, with inputs that are normalized over the training patches."""
    inputs = _patches(elevation_inputs(elevation)[:, rows])
    targets = _patches(elevation_classes(elevation[rows])[None]).squeeze(1)
    test = _test_patches(*(side // PATCH for side in elevation[rows].shape))
    std, mean = torch.std_mean(inputs[~test], (0, 2, 3), keepdim=True)
    scaled = (inputs - mean) / std
    return Data(TensorDataset(scaled[~test], targets[~test]), scaled[test], targets[test])


def _patches(maps: NDArray[np.generic]) -> Tensor:
    """Cuts maps of shape (channels, rows, columns) into patches, shape (patches, channels, PATCH, PATCH), row by row."""
    channels, rows, columns = maps.shape
    grid = maps.reshape(channels, rows // PATCH, PATCH, columns // PATCH, PATCH)
    return torch.from_numpy(grid.transpose(1, 3, 0, 2, 4).reshape(-1, channels, PATCH, PATCH))


def _test_patches(rows: int, columns: int) -> Tensor:
    """Returns a mask of the patches that are for testing, row by row."""
    side = BLOCK // PATCH
    blocks = -(-rows // side), -(-columns // side)
    order = np.random.default_rng(0).permutation(blocks[0] * blocks[1]).reshape(blocks)
    return torch.from_numpy(
        (order < order.size // 5).repeat(side, 0).repeat(side, 1)[:rows, :columns].ravel()
    )


RELIEF_TASKS = tuple(
    Task(
        name,
        partial(without_folder, name, find),
        load,
        partial(UNet, 4, width=8, classes=len(CLASSES)),
        lr=4e-3,
        batch_size=32,
        weight_decay=0.01,
        optimize="adamw",
        evaluate=pixel_mean_iou,
        metric="mean_iou",
        has_images=False,
    )
    for name, find, load in (
        ("relief", find_relief, relief),
        ("relief-made", lambda: None, relief_made),
    )
)
