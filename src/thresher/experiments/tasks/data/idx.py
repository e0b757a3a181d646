"""The IDX format of MNIST and its relatives: a big-endian header and unsigned bytes, gzipped or not."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GZIP = b"\x1f\x8b"
UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Reads a whole file.

    Args:
        path: Path of the file, gzipped or not.
        dimensions: Number of dimensions: 3 for images, 1 for labels.

    Returns:
        The array, with the shape in the header.

    Raises:
        ValueError: The file has another format, is truncated or damaged; the message names the file.
    """
    content = _decompressed(path)
    magic = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if content[:4] != magic:
        raise ValueError(f"{path}: not an IDX file of {dimensions}-D bytes: begins with {content[:4].hex()}, not {magic.hex()}")
    begin = 4 + 4 * dimensions
    if len(content) < begin:
        raise ValueError(f"{path}: truncated: the header has {len(content)} of {begin} bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:begin])
    expected, got = int(np.prod(shape, dtype=object)), len(content) - begin
    if got != expected:
        size = " x ".join(map(str, shape))
        raise ValueError(f"{path}: {'truncated' if got < expected else 'damaged'}: {got} bytes of data for {size}")
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def _decompressed(path: Path) -> bytes:
    raw = path.read_bytes()
    if not raw.startswith(GZIP):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: truncated or damaged gzip file: {error}") from error
