"""The finished epochs of a run on the disk: how it trained on every sample, one epoch after the other."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MARK = 16
"""Number of random bytes at the beginning of a file, by which a state recognises its file."""

AT_ONCE = 2**22
"""Number of values that are read at once."""

PER_SAMPLE = 5
"""Number of bytes of a sample in an epoch."""


class SampleRows(NamedTuple):
    """All epochs of some samples.

    Attributes:
        ids: The samples, consecutive ones.
        losses: Last losses at the end of each epoch, shape (len(ids), epochs), float32.
        trained: Number of times that a sample was trained on in each epoch, at most 255, shape (len(ids), epochs), uint8.
    """

    ids: range
    losses: NDArray[np.float32]
    trained: NDArray[np.uint8]


class EpochFile:
    """A file to which the epochs of a run are written as they end: 5 bytes per sample and epoch, of which none stay in memory.

    Args:
        path: Path of the file. One that is there already is replaced when the first epoch is written.
        n: Number of samples.

    Attributes:
        epochs: Number of epochs in the file.
    """

    def __init__(self, path: Path, n: int) -> None:
        self._path, self._n, self._mark = path, n, b""
        self.epochs = 0

    def append(self, losses: NDArray[np.float32], trained: NDArray[np.uint8]) -> None:
        """Writes an epoch, in place of those that were written after the last loaded state.

        Args:
            losses: Last loss of each sample, shape (n,).
            trained: Number of times that each sample was trained on in the epoch, shape (n,).
        """
        if not self.epochs:
            self._mark = os.urandom(MARK)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(self._mark)
        with self._path.open("r+b") as file:
            file.truncate(self._size(self.epochs))
            file.seek(0, os.SEEK_END)
            file.write(losses.data)
            file.write(trained.data)
            file.flush()
            os.fsync(file.fileno())
        self.epochs += 1

    def rows(self) -> Iterator[SampleRows]:
        """Yields all epochs of the samples, some samples at a time."""
        step = max(1, AT_ONCE // max(1, self.epochs))
        with self._path.open("rb") as file:
            for first in range(0, self._n, step):
                ids = range(first, min(first + step, self._n))
                losses = np.empty((len(ids), self.epochs), dtype=np.float32)
                trained = np.empty((len(ids), self.epochs), dtype=np.uint8)
                for epoch in range(self.epochs):
                    begin = self._size(epoch)
                    file.seek(begin + 4 * first)
                    losses[:, epoch] = np.frombuffer(file.read(4 * len(ids)), dtype=np.float32)
                    file.seek(begin + 4 * self._n + first)
                    trained[:, epoch] = np.frombuffer(file.read(len(ids)), dtype=np.uint8)
                yield SampleRows(ids, losses, trained)

    def delete(self) -> None:
        """Deletes the file, if there is one."""
        self._path.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: which file it is of, and how many epochs it has then."""
        return {"mark": self._mark.hex(), "epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes back to a state; epochs that were written later are written again.

        Raises:
            ValueError: The file is not there, is of another training, or has fewer epochs.
        """
        mark, epochs = bytes.fromhex(state_dict["mark"]), state_dict["epochs"]
        found = b""
        if self._path.is_file():
            with self._path.open("rb") as file:
                found = file.read(MARK)
        if epochs and (found != mark or self._path.stat().st_size < self._size(epochs)):
            raise ValueError(
                f"{self._path} does not hold the {epochs} epochs of every sample that belong to the checkpoint: it was "
                "deleted, cut short, or written by another training. Delete the checkpoint, and the training starts anew"
            )
        self._mark, self.epochs = mark, epochs

    def _size(self, epochs: int) -> int:
        return MARK + PER_SAMPLE * self._n * epochs
