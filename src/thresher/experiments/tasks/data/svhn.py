"""Street View House Numbers, the cropped digits, from the MATLAB files of their authors.

The files are not read by scipy, whose reader may end the process at a damaged tag. This module reads only the part of MATLAB's
format that arrays of numbers need: a file is a header of 128 bytes and elements. An element is a tag with type and size, and
content. A variable is an element that contains elements, compressed or not: flags, shape, name, numbers.
"""

import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thresher.experiments.tasks.data.base import Data
from thresher.experiments.tasks.data.images import find_files, normalised

FILES = ("train_32x32.mat", "test_32x32.mat")

BYTE_ORDERS = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}
"""Byte orders by the last bytes of the header, which are version 1 of the format and the byte order."""
VARIABLE, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""Types of numpy by the other types of elements."""


def find_svhn(folder: Path | None = None) -> Path:
    """Returns the folder with the two files.

    Args:
        folder: This folder, or the parent of a subfolder `svhn`. Default: the environment variable THRESHER_DATA, if it is
            set.

    Raises:
        FileNotFoundError: See `find_files`.
    """
    return find_files("svhn", folder, {"svhn": FILES})


def svhn(folder: Path | None = None) -> Data:
    """Returns digits of house numbers, normalised images of shape (3, 32, 32): 73,257 for training and 26,032 for testing.

    Raises:
        FileNotFoundError: See `find_svhn`.
        ValueError: A file is truncated, damaged, or another one; the message names it.
    """
    found = find_svhn(folder)
    train, test = (_read_svhn(found / name) for name in FILES)
    return normalised({"train": train, "test": test})


def _read_svhn(path: Path) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """Returns images of shape (N, 3, 32, 32), uint8, and labels of shape (N,); a zero has the label 10 in the file."""
    found = _variables(path)
    images, labels = found.get(b"X"), found.get(b"y")
    match images, labels:
        case np.ndarray(dtype=np.uint8, shape=(32, 32, 3, count)), np.ndarray(shape=(rows, 1)) if rows == count:
            pass
        case _:
            wanted = "X of bytes of shape (32, 32, 3, images) and y of shape (images, 1)"
            raise ValueError(f"{path}: {wanted} are wanted, got {_dtype_and_shape(images)} and {_dtype_and_shape(labels)}")
    if not len(labels) or not np.isin(labels, range(1, 11)).all():
        raise ValueError(f"{path}: the labels in y are not whole numbers from 1 to 10")
    return images.transpose(3, 2, 0, 1), labels[:, 0].astype(np.int64) % 10


def _dtype_and_shape(values: NDArray[np.generic] | None) -> str:
    return "none" if values is None else f"{values.dtype} of shape {values.shape}"


def _variables(path: Path) -> dict[bytes, NDArray[np.generic]]:
    """Returns the variables X and y of a file, by name."""
    content = path.read_bytes()
    order = BYTE_ORDERS.get(content[124:128])
    if order is None:
        raise ValueError(f"{path}: truncated, damaged, or not a MATLAB file of version 5 to 7.2")
    try:
        variables = [_variable(*element, order) for element in _elements(memoryview(content)[128:], order)]
    except (ValueError, struct.error, zlib.error) as error:
        raise ValueError(f"{path}: truncated or damaged: {error}") from error
    return {name: values for name, values in variables if values is not None}


def _variable(kind: int, content: memoryview, order: str) -> tuple[bytes, NDArray[np.generic] | None]:
    """Returns the name and the values of a variable; the values are None unless the name is X or y."""
    if kind == COMPRESSED:
        # Not every version of MATLAB ends the stream, which `zlib.decompress` would refuse.
        [(kind, content)] = _elements(memoryview(zlib.decompressobj().decompress(content)), order)
    if kind != VARIABLE:
        raise ValueError(f"an element of type {kind} instead of a variable")
    parts = _elements(content, order)
    _, (_, shape), (_, name) = islice(parts, 3)
    if name not in (b"X", b"y"):
        return bytes(name), None
    (kind, numbers), *_ = parts
    if kind not in NUMBERS:
        raise ValueError(f"{bytes(name).decode()} is not of numbers: it has elements of type {kind}")
    values = np.frombuffer(numbers, order + NUMBERS[kind])
    return bytes(name), values.reshape(np.frombuffer(shape, order + "i4").tolist(), order="F")


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yields the type and the content of each element."""
    while content:
        kind, size = struct.unpack_from(order + "II", content)
        begin, end = 8, 8 + size
        if kind >> 16:
            kind, begin, end = kind & 0xFFFF, 4, 4 + (kind >> 16)
        if end > len(content):
            raise ValueError(f"an element of {end} bytes, and {len(content)} are left")
        yield kind, content[begin:end]
        content = content[end if kind == COMPRESSED else end + -end % 8 :]
