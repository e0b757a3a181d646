"""Rows of bytes by key, in memory or in files that another process can open after this one was killed."""

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

RowBytes = NDArray[np.uint8]
KEY_BYTES = 16
"""Number of bytes of a key."""
FIRST = 64
"""Number of rows that memory is reserved for at first."""


def lock(folder: Path) -> BinaryIO:
    """Keeps others from using a folder until the returned file is closed, or the process ends.

    Args:
        folder: The folder; it is created if needed.

    Raises:
        RuntimeError: Another process, or another cached module, uses the folder.

    Example:
        >>> lock(Path("rows")).close()
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RuntimeError(
            f"cached: {folder} is in use by another process or another cached module. Give each of them a `path` of its own."
        ) from None
    return file


class MemoryRows:
    """Rows in memory.

    Args:
        size: Number of bytes of a row.

    Example:
        >>> rows = MemoryRows(2)
        >>> rows.add([b"a" * 16], np.array([[1, 2]], dtype=np.uint8))
        >>> rows.read([rows.places[b"a" * 16]])
        array([[1, 2]], dtype=uint8)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.places: dict[bytes, int] = {}
        """Place of each row by its key."""
        self._rows = np.empty((FIRST, size), dtype=np.uint8)

    def add(self, keys: list[bytes], rows: RowBytes) -> None:
        """Adds rows with new keys.

        Args:
            keys: Keys, different from each other and from those that are there.
            rows: Rows, shape (len(keys), size).
        """
        begin = len(self.places)
        end = begin + len(keys)
        if end > len(self._rows):
            larger = np.empty((max(end, 2 * len(self._rows)), self.size), dtype=np.uint8)
            larger[:begin] = self._rows[:begin]
            self._rows = larger
        self._rows[begin:end] = rows
        self.places.update(zip(keys, range(begin, end), strict=True))

    def read(self, places: list[int]) -> RowBytes:
        """Returns rows, shape (len(places), size)."""
        return self._rows[places]


class FileRows:
    """Rows in a file with the suffix .rows, and their keys in one with the suffix .keys.

    A row is written before its key, so that a process that is killed leaves no key without its whole row.

    Args:
        path: Path of the files without their suffix.
        size: Number of bytes of a row.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.size = size
        self._rows_path = path.with_suffix(".rows")
        keys_path = path.with_suffix(".keys")
        for file in (self._rows_path, keys_path):
            file.touch()
        self._rows_file = self._rows_path.open("r+b", buffering=0)
        self._keys_file = keys_path.open("r+b", buffering=0)
        whole = keys_path.stat().st_size // KEY_BYTES
        if size:
            whole = min(whole, self._rows_path.stat().st_size // size)
        content = self._keys_file.read(whole * KEY_BYTES)
        keys = (content[begin : begin + KEY_BYTES] for begin in range(0, len(content), KEY_BYTES))
        self.places = {key: place for place, key in enumerate(keys)}
        """Place of each row by its key."""
        self._end = whole
        self._mapped: RowBytes = np.empty((0, size), dtype=np.uint8)

    def add(self, keys: list[bytes], rows: RowBytes) -> None:
        """Adds rows with new keys; see `MemoryRows.add`."""
        os.pwrite(self._rows_file.fileno(), rows.tobytes(), self._end * self.size)
        os.pwrite(self._keys_file.fileno(), b"".join(keys), self._end * KEY_BYTES)
        self.places.update(zip(keys, range(self._end, self._end + len(keys)), strict=True))
        self._end += len(keys)

    def read(self, places: list[int]) -> RowBytes:
        """Returns rows, shape (len(places), size)."""
        if max(places) >= len(self._mapped):
            self._mapped = np.memmap(
                self._rows_path, dtype=np.uint8, mode="r", shape=(self._end, self.size)
            )
        return self._mapped[places]

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files, which lets others open them."""
        self._rows_file.close()
        self._keys_file.close()
