"""Street View House Numbers, the cropped digits, in the MATLAB files of their authors.

The files are read here and not by scipy, whose reader ends the process where it meets a damaged tag. Of MATLAB's format
that is what numbers need: a file is a header of 128 bytes and elements, each of them a tag, which has type and size, and
content. A variable is an element of elements, compressed or not: flags, shape, name, numbers.
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
"""By the last bytes of the header: version 1 of the format, and the byte order."""
VARIABLE, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""What the other types are to numpy."""


def find_svhn(folder: Path | None = None) -> Path:
    """The folder with the two files.

    Args:
        folder: It, or the one that it lies in as `svhn`. Default: the environment variable THRESHER_DATA, where it is set.

    Raises:
        FileNotFoundError: See `find_files`.
    """
    return find_files("svhn", folder, {"svhn": FILES})


def svhn(folder: Path | None = None) -> Data:
    """Digits of house numbers, pictures of shape (3, 32, 32), normalised; 73,257 to train on and 26,032 to test.

    Raises:
        FileNotFoundError: See `find_svhn`.
        ValueError: A file is truncated, damaged, or another one; the message names it.
    """
    found = find_svhn(folder)
    train, test = (_read(found / name) for name in FILES)
    return normalised({"train": train, "test": test})


def _read(path: Path) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """Pictures of shape (N, 3, 32, 32), uint8, and labels of shape (N,); the file's label of a zero is 10."""
    found = _variables(path)
    pictures, labels = found.get(b"X"), found.get(b"y")
    match pictures, labels:
        case np.ndarray(dtype=np.uint8, shape=(32, 32, 3, count)), np.ndarray(shape=(rows, 1)) if rows == count:
            pass
        case _:
            wanted = "X of bytes of shape (32, 32, 3, pictures) and y of shape (pictures, 1)"
            raise ValueError(f"{path}: {wanted} are wanted, got {_told(pictures)} and {_told(labels)}")
    if not len(labels) or not np.isin(labels, range(1, 11)).all():
        raise ValueError(f"{path}: the labels in y are not whole numbers from 1 to 10")
    return pictures.transpose(3, 2, 0, 1), labels[:, 0].astype(np.int64) % 10


def _told(values: NDArray[np.generic] | None) -> str:
    return "none" if values is None else f"{values.dtype} of shape {values.shape}"


def _variables(path: Path) -> dict[bytes, NDArray[np.generic]]:
    """Those of a file that are named X or y."""
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
    """Name and values of a variable; of one with another name than X or y there are no values."""
    if kind == COMPRESSED:
        # An object for it, as not every version of MATLAB ends the stream.
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
    """Type and content of each."""
    while content:
        kind, size = struct.unpack_from(order + "II", content)
        begin, end = 8, 8 + size
        if kind >> 16:
            kind, begin, end = kind & 0xFFFF, 4, 4 + (kind >> 16)
        if end > len(content):
            raise ValueError(f"an element of {end} bytes, and {len(content)} are left")
        yield kind, content[begin:end]
        content = content[end if kind == COMPRESSED else end + -end % 8 :]
