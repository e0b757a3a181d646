import io
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from thresher_lab.tasks.images import CIFAR10, CIFAR100

KINDS = pytest.mark.parametrize("kind", [CIFAR10, CIFAR100], ids=lambda kind: kind.name)
A_FILE = pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])


class Python2(pickle._Pickler):
    """Writes what Python 2 wrote: strings are bytes, in protocol 2, and numpy's names are those of its first version."""

    def _string(self, text):
        raw = text.encode() if isinstance(text, str) else text
        short = len(raw) < 256
        self.write(
            pickle.SHORT_BINSTRING + bytes([len(raw)])
            if short
            else pickle.BINSTRING + struct.pack("<i", len(raw))
        )
        self.write(raw)
        self.memoize(text)

    dispatch = {**pickle._Pickler.dispatch, str: _string, bytes: _string}


def python2(batch):
    stream = io.BytesIO()
    Python2(stream, protocol=2).dump(batch)
    return stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def samples(kind, n, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 3072), np.uint8)
    return pixels, [(seed + number) % kind.classes for number in range(n)]


def batch_of(kind, n=4, seed=0):
    pixels, labels = samples(kind, n, seed)
    others = {"coarse_labels": [0] * n} if kind is CIFAR100 else {}
    return {
        "batch_label": "a batch",
        kind.labels: labels,
        "data": pixels,
        "filenames": ["a.png"] * n,
        **others,
    }


def write_python(kind, folder):
    path = folder / kind.python
    path.mkdir(parents=True)
    for seed, name in enumerate((*kind.train, kind.test)):
        (path / name).write_bytes(python2(batch_of(kind, seed=seed)))
    (path / "batches.meta").write_bytes(b"not read")
    return path


def write_binary(kind, folder):
    path = folder / kind.binary
    path.mkdir(parents=True)
    for seed, name in enumerate((*kind.train, kind.test)):
        pixels, labels = samples(kind, 4, seed)
        before = [[200] * (kind.label_bytes - 1) + [label] for label in labels]
        (path / f"{name}.bin").write_bytes(
            np.hstack([np.array(before, np.uint8), pixels]).tobytes()
        )
    return path


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("THRESHER_DATA", raising=False)


@KINDS
@pytest.mark.parametrize("write", [write_python, write_binary])
def test_reads_all_files_in_order_and_normalizes_each_channel(tmp_path, kind, write):
    loaded = kind.load(write(kind, tmp_path))
    inputs, targets = loaded.train.tensors
    parts = [samples(kind, 4, seed) for seed in range(len(kind.train) + 1)]
    assert targets.tolist() == [label for _, labels in parts[:-1] for label in labels]
    assert loaded.test_targets.tolist() == parts[-1][1]
    pixels = (
        np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32).astype(np.float64)
    )
    train = pixels[: len(inputs)]
    expected = (pixels - train.mean((0, 2, 3), keepdims=True)) / train.std(
        (0, 2, 3), keepdims=True, ddof=1
    )
    assert inputs.shape[1:] == (3, 32, 32) and inputs.dtype.is_floating_point
    np.testing.assert_allclose(np.concatenate([inputs, loaded.test_inputs]), expected, atol=1e-5)


def test_reads_pickles_of_python_3(tmp_path):
    folder = write_python(CIFAR10, tmp_path)
    expected = CIFAR10.load(folder)
    for seed, name in enumerate((*CIFAR10.train, CIFAR10.test)):
        batch = batch_of(CIFAR10, seed=seed)
        batch["data"] = np.asfortranarray(batch["data"])
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2 + seed % 3))
    assert CIFAR10.load(folder).train.tensors[0].equal(expected.train.tensors[0])


@KINDS
def test_found_in_the_folder_in_the_one_above_and_by_the_variable(tmp_path, monkeypatch, kind):
    binary = write_binary(kind, tmp_path)
    assert kind.find(tmp_path) == kind.find(binary) == binary
    python = write_python(kind, tmp_path)
    assert kind.find(tmp_path) == kind.find(python) == python
    monkeypatch.setenv("THRESHER_DATA", str(tmp_path))
    assert kind.find() == python
    assert kind.find(binary) == binary


@KINDS
def test_absent_files(tmp_path, kind):
    with pytest.raises(
        FileNotFoundError, match=f"{kind.name}: no folder was given. It is read from"
    ) as caught:
        kind.find()
    assert str(caught.value).endswith(
        f"torchvision.datasets.{kind.name.upper()} with download=True downloads it to DIR"
    )
    names = (
        kind.python,
        kind.binary,
        *kind.train,
        f"{kind.test}.bin",
        "--data DIR or THRESHER_DATA",
    )
    assert all(name in str(caught.value) for name in names)
    with pytest.raises(
        FileNotFoundError, match=f"{kind.name}: none of its files is in {tmp_path}. It is read from"
    ):
        kind.find(tmp_path)
    folder = write_python(kind, tmp_path)
    (folder / kind.test).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"{kind.name}: no {kind.test} in {folder}. It is read from"
    ):
        kind.load(tmp_path)


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def payloads(path):
    return {
        "posix.system": Payload(os.system, f"touch {path}"),
        "builtins.exec": Payload(exec, f"import os; os.mkdir({str(path)!r})"),
        "posix.mkdir": Payload(os.mkdir, str(path)),
    }


@pytest.mark.parametrize("name", payloads(Path()))
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_names_code_is_refused_and_the_code_does_not_run(tmp_path, name, protocol):
    folder, proof = write_python(CIFAR10, tmp_path), tmp_path / "proof"
    content = pickle.dumps({"data": payloads(proof)[name], "labels": [0]}, protocol)
    (folder / "data_batch_2").write_bytes(content)
    asked = name if protocol == 4 else name.replace("builtins", "__builtin__")
    with pytest.raises(
        ValueError,
        match=rf"data_batch_2: .*it asks for {asked}, and may ask for numpy's arrays only",
    ):
        CIFAR10.load(folder)
    assert not proof.exists()
    pickle.loads(content)
    assert proof.exists(), "it is harmful indeed"


@pytest.mark.parametrize(
    "call",
    [
        b"cnumpy\nndarray\n(I1000000000000\ntR",
        b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR",
        b"c_codecs\nencode\n(Vpixels\nVzip\ntR",
    ],
)
def test_names_that_are_allowed_build_nothing_but_arrays_of_bytes(tmp_path, call):
    folder = write_python(CIFAR10, tmp_path)
    (folder / "test_batch").write_bytes(b"(dS'data'\n" + call + b"sS'labels'\n(lI0\nas.")
    with pytest.raises(
        ValueError,
        match="test_batch: .*(the pixels are not an array of bytes|not a pickle of CIFAR)",
    ):
        CIFAR10.load(folder)


@A_FILE
@pytest.mark.parametrize("end", [0, 1, 40, 500, -3073, -1])
def test_truncated_pickles(tmp_path, name, end):
    path = write_python(CIFAR10, tmp_path) / name
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ValueError, match=f"{name}: truncated, damaged, or not a pickle of CIFAR: "):
        CIFAR10.load(tmp_path)


def test_damage_anywhere_raises_nothing_but_a_value_error_that_names_the_file(tmp_path):
    path = write_python(CIFAR10, tmp_path) / "test_batch"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    pixels = range(whole.index(b"cnumpy") + 150, len(whole) - 80)
    messages = []
    for place in sorted({*range(len(whole))} - {*pixels}):
        damaged = bytearray(whole)
        damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            CIFAR10._read_pickle(path)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 100 and all(message.startswith(f"{path}: ") for message in messages)


def changed(**changes):
    return {**batch_of(CIFAR10), **changes}


@A_FILE
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "no batch of cifar10: a dict with 'data' and 'labels' is wanted, got list"),
        ({"data": 0}, r"no batch of cifar10: .* got \['data'\]"),
        (batch_of(CIFAR100), "no batch of cifar10: .*'fine_labels'"),
        (changed(data=0), "the pixels are not an array of bytes of shape"),
        (
            changed(data=np.zeros((4, 3073), np.uint8)),
            "the pixels are not an array of bytes of shape",
        ),
        (
            changed(data=np.zeros(4 * 3072, np.uint8)),
            "the pixels are not an array of bytes of shape",
        ),
        (
            changed(data=np.zeros((4, 3072), np.int8)),
            "the pixels are not an array of bytes of shape",
        ),
        (
            changed(data=np.zeros((4, 3072), np.float32)),
            "the pixels are not an array of bytes of shape",
        ),
        (changed(data=np.zeros((3, 3072), np.uint8)), "4 labels for 3 images"),
        (changed(labels=[0, 1, 2]), "3 labels for 4 images"),
        (
            changed(data=np.zeros((0, 3072), np.uint8), labels=[]),
            "0 labels for|not an array of bytes",
        ),
        (changed(labels=[0, 1, 2, 10]), "the labels are not a list of whole numbers from 0 to 9"),
        (changed(labels=[0, 1, 2, -1]), "the labels are not a list of whole numbers from 0 to 9"),
        (changed(labels=[0, 1, 2, 3.5]), "the labels are not a list of whole numbers from 0 to 9"),
        (changed(labels=None), "the labels are not a list of whole numbers from 0 to 9"),
    ],
)
def test_batches_that_are_not_of_cifar10(tmp_path, name, batch, message):
    path = write_python(CIFAR10, tmp_path) / name
    path.write_bytes(python2(batch))
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        CIFAR10.load(tmp_path)


def test_cifar100_has_a_hundred_classes(tmp_path):
    path = write_python(CIFAR100, tmp_path) / "test"
    path.write_bytes(python2({**batch_of(CIFAR100), "fine_labels": [0, 1, 2, 100]}))
    with pytest.raises(
        ValueError, match="test: damaged: the labels are not a list of whole numbers from 0 to 99"
    ):
        CIFAR100.load(tmp_path)


@KINDS
def test_damaged_binary_files(tmp_path, kind):
    path = write_binary(kind, tmp_path) / f"{kind.test}.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError,
        match=rf"{kind.test}.bin: truncated or damaged: {len(whole) - 1} bytes, not a multiple of",
    ):
        kind.load(tmp_path)
    label = kind.label_bytes - 1
    path.write_bytes(whole[:label] + bytes([kind.classes]) + whole[label + 1 :])
    with pytest.raises(
        ValueError,
        match=rf"{kind.test}.bin: damaged: the labels are not a list of whole numbers from 0 to",
    ):
        kind.load(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{kind.test}.bin: damaged: 0 labels for 0 images"):
        kind.load(tmp_path)
