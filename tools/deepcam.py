"""Converts the HDF5 files of DeepCAM to the NumPy files that the recipe `deepcam` reads.

    python -m tools.deepcam SOURCE DIR     # SOURCE has stats.h5 and the folders train and validation, as published; needs h5py

Each `data-NAME.h5` becomes `data-NAME.npy`, float32, shape (16, 768, 1152), scaled to [0, 1] per channel by the smallest and
largest values in stats.h5 as in the reference implementation of MLPerf, and `label-NAME.npy`, uint8, shape (768, 1152). Files
that are there are left alone, so the same command goes on where it was stopped.
"""

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTS = {"train": "train", "validation": "val"}
"""Folders of the published data, and those of the recipe."""


def scaled(data: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.float32]:
    """Returns an image with the channels first, each scaled so that its smallest and largest values become 0 and 1.

    Args:
        data: Image, shape (H, W, C).
        low: Smallest value of each channel, shape (C,).
        high: Largest value of each channel, shape (C,).
    """
    return np.ascontiguousarray(np.moveaxis((data - low) / (high - low), -1, 0), dtype=np.float32)


def save(path: Path, values: NDArray[Any]) -> None:
    """Writes an array to a file that is there as a whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, values)
    partial.rename(path)


def convert(source: Path, folder: Path, h5py: Any = None) -> None:
    """Converts all files.

    Args:
        source: Folder of the published data.
        folder: Folder to write to.
        h5py: Module that reads the files. Default: h5py.
    """
    h5py = importlib.import_module("h5py") if h5py is None else h5py
    with h5py.File(source / "stats.h5", "r") as stats:
        low, high = stats["climate"]["minval"][()], stats["climate"]["maxval"][()]
    for part, target in PARTS.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for path in sorted((source / part).glob("data-*.h5")):
            name = path.stem.removeprefix("data-")
            data_file, label_file = (
                folder / target / f"{kind}-{name}.npy" for kind in ("data", "label")
            )
            if data_file.exists():  # written last
                continue
            with h5py.File(path, "r") as file:
                data, labels = file["climate"]["data"][()], file["climate"]["labels_0"][()]
            save(label_file, labels.astype(np.uint8))
            save(data_file, scaled(data, low, high))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    convert(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
