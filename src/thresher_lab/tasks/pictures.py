"""Training samples as images, and images as PNG files."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from thresher_lab.tasks import TASKS, built_in
from thresher_lab.training.shown import as_png

ImageArray = NDArray[np.uint8]
"""Images of the training samples, shape (N, H, W) or (N, H, W, 3)."""


def training_images(task: str, folder: Path | None = None) -> ImageArray | None:
    """Returns the training images of a task of this package.

    Args:
        task: Name of the task, as in results.json.
        folder: Folder with the data, for tasks that take one.

    Returns:
        Grey images, shape (N, H, W), or color images, shape (N, H, W, 3), uint8. None for tasks without images, and for a
        user's own training, whose code is not run.

    Raises:
        FileNotFoundError: The data is not there; the message says where to get it.
    """
    name = task.partition("@")[0]
    if name not in TASKS or not TASKS[name].has_images:
        return None
    task_of_name = built_in(task)
    inputs = task_of_name.load(task_of_name.find(folder)).train.tensors[0]
    low = inputs.amin((0, 2, 3), keepdim=True)
    high = inputs.amax((0, 2, 3), keepdim=True)
    pixels = (255 * (inputs - low) / (high - low)).round().to(torch.uint8).numpy()
    if pixels.shape[1] == 1:
        return pixels[:, 0]
    return pixels.transpose(0, 2, 3, 1)


def png_base64(pixels: NDArray[np.uint8]) -> str:
    """Returns a gray image, shape (H, W), or a color image, shape (H, W, 3), as a PNG file in base64."""
    return as_png(Image.fromarray(np.ascontiguousarray(pixels)))


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """Returns an image, as for `png_base64`, as a data URI of a PNG file."""
    return f"data:image/png;base64,{png_base64(pixels)}"


def contact_sheet(
    images: ImageArray, columns: int = 10, zoom: int = 3, gap: int = 4
) -> NDArray[np.uint8]:
    """Returns images side by side as one image, row by row, on white.

    Args:
        images: Images, shape (n, H, W) or (n, H, W, 3), at least one.
        columns: Number of images per row, 1 or more. Default: 10.
        zoom: Factor on the size of each image, 1 or more. Default: 3.
        gap: Number of white pixels between images. Default: 4.
    """
    large = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
    height = large.shape[1] + gap
    width = large.shape[2] + gap
    rows = -(-len(large) // columns)
    across = min(columns, len(large))
    sheet = np.full(
        (rows * height - gap, across * width - gap, *large.shape[3:]), 255, dtype=np.uint8
    )
    for number, image in enumerate(large):
        top = number // columns * height
        left = number % columns * width
        sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    return sheet
