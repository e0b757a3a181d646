"""CIFAR-10 and CIFAR-100 from the files of their authors: the python version, which consists of pickles, or the binary one.

Reading a pickle here never runs code that the file names: each name stands for a placeholder object that only stores the
arguments in the file, and other names are refused; see `_Unpickler`.
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

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Names of the classes of CIFAR-10, in the order of their numbers."""
CIFAR100_CLASSES = (
    "apple", "aquarium fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest",
    "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn mower", "leopard", "lion", "lizard",
    "lobster", "man", "maple tree", "motorcycle", "mountain", "mouse", "mushroom", "oak tree", "orange", "orchid",
    "otter", "palm tree", "pear", "pickup truck", "pine tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit",
    "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake",
    "spider", "squirrel", "streetcar", "sunflower", "sweet pepper", "table", "tank", "telephone", "television", "tiger",
    "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow tree", "wolf", "woman", "worm",
)  # fmt: skip
"""Names of the classes of CIFAR-100, in the order of their numbers."""

PIXELS = 3 * 32 * 32
"""Bytes of an image: 32 x 32 of red, then of green, then of blue."""

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
"""Errors that reading a damaged pickle may raise; the documentation of Python does not limit them."""

LabelledImages = tuple[NDArray[np.uint8], NDArray[np.generic]]
"""Images of shape (N, 3, 32, 32) and labels of shape (N,)."""


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets.

    Args:
        name: Name of the task.
        classes: Number of classes; labels are 0 to `classes` - 1.
        labels: Key of the labels in a pickle.
        label_bytes: Number of bytes before the pixels of an image in the binary version; the last of them is the label.
        python: Name of the folder of the python version.
        binary: Name of the folder of the binary version; its files have the same names with the suffix .bin.
        train: Names of the training files.
        test: Name of the test file.
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
        """Returns the folder with all files of one version; the python version is preferred.

        Args:
            folder: This folder or its parent. Default: the environment variable THRESHER_DATA, if it is set.

        Raises:
            FileNotFoundError: See `find_files`.
        """
        return find_files(self.name, folder, {self.python: self._files(""), self.binary: self._files(".bin")})

    def load(self, folder: Path | None = None) -> Data:
        """Returns normalised images of shape (3, 32, 32) and their classes; those of CIFAR-100 are the fine classes.

        Raises:
            FileNotFoundError: See `find`.
            ValueError: A file is truncated, damaged, or of another kind; the message names it.
        """
        found = self.find(folder)
        is_python = all((found / name).is_file() for name in self._files(""))
        read, suffix = (self._read_pickle, "") if is_python else (self._read_binary, ".bin")
        *train, test = [read(found / name) for name in self._files(suffix)]
        images, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
        return normalised({"train": (images, labels), "test": test})

    def _files(self, suffix: str) -> list[str]:
        return [name + suffix for name in (*self.train, self.test)]

    def _read_pickle(self, path: Path) -> LabelledImages:
        batch = _unpickle(path)
        if not isinstance(batch, dict) or not {b"data", self.labels} <= batch.keys():
            got = [*batch] if isinstance(batch, dict) else type(batch).__name__
            raise ValueError(f"{path}: no batch of {self.name}: a dict with b'data' and {self.labels} is wanted, got {got}")
        return self._checked(path, _pixels(path, batch[b"data"]), batch[self.labels])

    def _read_binary(self, path: Path) -> LabelledImages:
        content = np.fromfile(path, np.uint8)
        record = self.label_bytes + PIXELS
        if len(content) % record:
            raise ValueError(f"{path}: truncated or damaged: {len(content)} bytes, not a multiple of {record}")
        records = content.reshape(-1, record)
        return self._checked(path, records[:, self.label_bytes :], records[:, self.label_bytes - 1].tolist())

    def _checked(self, path: Path, pixels: NDArray[np.uint8], labels: Any) -> LabelledImages:
        if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < self.classes for label in labels):
            raise ValueError(f"{path}: damaged: the labels are not a list of whole numbers from 0 to {self.classes - 1}")
        if not labels or len(labels) != len(pixels):
            raise ValueError(f"{path}: damaged: {len(labels)} labels for {len(pixels)} images")
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


class _Placeholder:
    """Stands for an object in a pickle: stores its arguments and its state, and does nothing with them."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _encode(text: str, _: str) -> bytes:
    """Returns the bytes that Python 3 writes as text into a pickle for Python 2."""
    return text.encode("latin1")


NAMES = {
    "numpy.core.multiarray._reconstruct": _Placeholder,
    "numpy._core.multiarray._reconstruct": _Placeholder,
    "numpy.ndarray": _Placeholder,
    "numpy.dtype": _Placeholder,
    "_codecs.encode": _encode,
}
"""Names that a pickle of CIFAR may contain, and their substitutes: numpy is never called with arguments from a file."""


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python; the one in C would allocate as much memory as a damaged file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module}.{name}"
        if wanted not in NAMES:
            raise pickle.UnpicklingError(f"it asks for {wanted}, and may ask for {', '.join(NAMES)} only")
        return NAMES[wanted]


def _pixels(path: Path, stored: Any) -> NDArray[np.uint8]:
    """Returns the array that numpy would have built from the arguments and the state of a placeholder."""
    match stored:
        case _Placeholder(state=(*_, (int(count), width), _Placeholder(arguments=(b"u1" | "u1", *_)), by_column, bytes(raw))):
            if width == PIXELS and len(raw) == count * PIXELS:
                return np.frombuffer(raw, np.uint8).reshape((count, PIXELS), order="F" if by_column else "C")
    raise ValueError(f"{path}: damaged: the pixels are not an array of bytes of shape (images, {PIXELS})")
