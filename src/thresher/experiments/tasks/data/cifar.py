"""CIFAR-10 and CIFAR-100 in the files of their authors: the python version, which is pickles, or the binary one.

The pickles are read without running what they name: a name is looked up in a list, and stands for an object that only
keeps what the file says, see `_Unpickler`.
"""

import io
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thresher.experiments.tasks.data.base import Data
from thresher.experiments.tasks.data.images import find_files, normalised

PIXELS = 3 * 32 * 32
"""Of a picture: 32 x 32 of red, then of green, then of blue."""

DAMAGE = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    AssertionError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
)
"""What reading a damaged pickle raises; Python's documentation does not narrow it down."""

Batch = tuple[NDArray[np.uint8], NDArray[np.generic]]
"""Pictures of shape (N, 3, 32, 32) and labels of shape (N,)."""


@dataclass(frozen=True)
class Cifar:
    """One of the two sets.

    Args:
        name: Of the task.
        classes: Labels are 0 to one less.
        labels: The key of the labels in a pickle.
        label_bytes: Bytes before the pixels of a picture in the binary version, the last of which is the label.
        python: Folder of the python version.
        binary: Folder of the binary version; its files have the same names and end in .bin.
        train: Names of the files to train on.
        test: Name of the file to test on.
    """

    name: str
    classes: int
    labels: bytes
    label_bytes: int
    python: str
    binary: str
    train: tuple[str, ...]
    test: str

    def find(self, folder: Path | None = None) -> Path:
        """The folder with all files of one version; that of the python version, where both are there.

        Args:
            folder: It, or the one that it lies in. Default: the environment variable THRESHER_DATA, where it is set.

        Raises:
            FileNotFoundError: See `find_files`.
        """
        return find_files(self.name, folder, {self.python: self._files(""), self.binary: self._files(".bin")})

    def load(self, folder: Path | None = None) -> Data:
        """Pictures of shape (3, 32, 32), normalised, and their classes; of CIFAR-100 the fine ones.

        Raises:
            FileNotFoundError: See `find`.
            ValueError: A file is truncated, damaged, or of another kind; the message names it.
        """
        found = self.find(folder)
        is_python = all((found / name).is_file() for name in self._files(""))
        read, suffix = (self._read_pickle, "") if is_python else (self._read_binary, ".bin")
        *train, test = [read(found / name) for name in self._files(suffix)]
        pictures, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
        return normalised({"train": (pictures, labels), "test": test})

    def _files(self, suffix: str) -> list[str]:
        return [name + suffix for name in (*self.train, self.test)]

    def _read_pickle(self, path: Path) -> Batch:
        batch = _unpickle(path)
        if not isinstance(batch, dict) or not {b"data", self.labels} <= batch.keys():
            got = [*batch] if isinstance(batch, dict) else type(batch).__name__
            raise ValueError(f"{path}: no batch of {self.name}: a dict with b'data' and {self.labels} is wanted, got {got}")
        return self._checked(path, _pixels(path, batch[b"data"]), batch[self.labels])

    def _read_binary(self, path: Path) -> Batch:
        content = np.fromfile(path, np.uint8)
        record = self.label_bytes + PIXELS
        if len(content) % record:
            raise ValueError(f"{path}: truncated or damaged: {len(content)} bytes, not a multiple of {record}")
        records = content.reshape(-1, record)
        return self._checked(path, records[:, self.label_bytes :], records[:, self.label_bytes - 1].tolist())

    def _checked(self, path: Path, pixels: NDArray[np.uint8], labels: Any) -> Batch:
        if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < self.classes for label in labels):
            raise ValueError(f"{path}: damaged: the labels are not a list of whole numbers from 0 to {self.classes - 1}")
        if not labels or len(labels) != len(pixels):
            raise ValueError(f"{path}: damaged: {len(labels)} labels for {len(pixels)} pictures")
        return pixels.reshape(-1, 3, 32, 32), np.array(labels)


CIFAR10 = Cifar(
    name="cifar10",
    classes=10,
    labels=b"labels",
    label_bytes=1,
    python="cifar-10-batches-py",
    binary="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
)
CIFAR100 = Cifar(
    name="cifar100",
    classes=100,
    labels=b"fine_labels",
    label_bytes=2,
    python="cifar-100-python",
    binary="cifar-100-binary",
    train=("train",),
    test="test",
)


def _unpickle(path: Path) -> Any:
    stream = io.BytesIO(path.read_bytes())
    try:
        found = _Unpickler(stream, encoding="bytes").load()
    except DAMAGE as error:
        raise ValueError(f"{path}: truncated, damaged, or not a pickle of CIFAR: {error!r}") from error
    if stream.read(1):
        raise ValueError(f"{path}: damaged: the file goes on behind the end of the pickle")
    return found


class _Kept:
    """Stands for whatever a pickle builds: keeps the arguments and the state, and does nothing with them."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _encode(text: str, _: str) -> bytes:
    """Bytes as Python 3 writes them into a pickle that Python 2 can read."""
    return text.encode("latin1")


NAMES = {
    "numpy.core.multiarray._reconstruct": _Kept,
    "numpy._core.multiarray._reconstruct": _Kept,
    "numpy.ndarray": _Kept,
    "numpy.dtype": _Kept,
    "_codecs.encode": _encode,
}
"""All that a batch names, and what stands for it here: numpy itself is never called with what a file says."""


class _Unpickler(pickle._Unpickler):
    """Python's own, as the one in C takes memory for the largest number that a damaged file gives to an object."""

    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module}.{name}"
        if wanted not in NAMES:
            raise pickle.UnpicklingError(f"it asks for {wanted}, and may ask for {', '.join(NAMES)} only")
        return NAMES[wanted]


def _pixels(path: Path, stored: Any) -> NDArray[np.uint8]:
    """The array that numpy would have built of the arguments and the state that were kept."""
    match stored:
        case _Kept(state=(*_, (int(count), width), _Kept(arguments=(b"u1" | "u1", *_)), by_column, bytes(raw))):
            if width == PIXELS and len(raw) == count * PIXELS:
                return np.frombuffer(raw, np.uint8).reshape((count, PIXELS), order="F" if by_column else "C")
    raise ValueError(f"{path}: damaged: the pixels are not an array of bytes of shape (pictures, {PIXELS})")
