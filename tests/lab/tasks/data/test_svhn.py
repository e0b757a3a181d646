import numpy as np
import pytest
from scipy.io import savemat

from thresher_lab.tasks.images import FILES, find_svhn, svhn

A_FILE = pytest.mark.parametrize("name", FILES)


def digits(n=20, seed=0):
    images = np.random.default_rng(seed).integers(0, 256, (32, 32, 3, n), np.uint8)
    return {"X": images, "y": (1 + (seed + np.arange(n, dtype=np.uint8)) % 10)[:, None]}


def write(path, compressed=True, **variables):
    savemat(path, variables, do_compression=compressed)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("THRESHER_DATA", raising=False)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "svhn"
    path.mkdir()
    for seed, name in enumerate(FILES):
        write(path / name, **digits(seed=seed))
    return path


def test_reads_both_files_and_normalizes_each_channel(folder):
    loaded = svhn(folder)
    inputs, targets = loaded.train.tensors
    assert targets.tolist() == 2 * [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert loaded.test_targets.tolist() == 2 * [2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    train, test = (
        digits(seed=seed)["X"].transpose(3, 2, 0, 1).astype(np.float64) for seed in (0, 1)
    )
    mean, std = train.mean((0, 2, 3), keepdims=True), train.std((0, 2, 3), keepdims=True, ddof=1)
    np.testing.assert_allclose(inputs, (train - mean) / std, atol=1e-5)
    np.testing.assert_allclose(loaded.test_inputs, (test - mean) / std, atol=1e-5)
    assert inputs.is_contiguous()


def test_found_in_the_folder_in_the_one_above_and_by_the_variable(folder, tmp_path, monkeypatch):
    assert find_svhn(folder) == find_svhn(tmp_path) == folder
    monkeypatch.setenv("THRESHER_DATA", str(tmp_path))
    assert find_svhn() == folder


def test_absent_files(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="svhn: no folder was given") as caught:
        find_svhn()
    assert all(text in str(caught.value) for text in (*FILES, "--data DIR or THRESHER_DATA"))
    with pytest.raises(
        FileNotFoundError,
        match=f"svhn: none of its files is in {tmp_path / 'other'}. It is read from train_32",
    ):
        svhn(tmp_path / "other")
    (folder / FILES[1]).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"svhn: no test_32x32.mat in {folder}. It is read from"
    ):
        svhn(tmp_path)


@A_FILE
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("end", [0, 10, 125, 140, 200, 3000, -200, -8])
def test_truncated_files(folder, name, compressed, end):
    write(folder / name, compressed, **digits())
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:end])
    with pytest.raises(ValueError, match=rf"{name}: "):
        svhn(folder)


@A_FILE
@pytest.mark.parametrize(
    "content",
    [
        bytes(1000),
        b"PK" + bytes(range(1, 251)),
        b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM",
        b"a" * 200,
    ],
    ids=["zeros", "zip", "7.3", "text"],
)
def test_files_of_another_kind(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{name}: truncated, damaged, or not a MATLAB file of version 5 to 7.2"
    ):
        svhn(folder)


@A_FILE
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"X": np.zeros((32, 32, 3), np.uint8)},
            r"got uint8 of shape \(32, 32, 3\) and uint8 of shape \(20, 1\)",
        ),
        ({"X": np.zeros((3, 32, 32, 20), np.uint8)}, r"got uint8 of shape \(3, 32, 32, 20\) and"),
        ({"X": np.zeros((32, 32, 3, 20))}, r"got float64 of shape \(32, 32, 3, 20\) and"),
        ({"X": "text"}, r"got <U4 of shape \(1,\) and"),
        (
            {"y": np.ones((19, 1), np.uint8)},
            r"got uint8 of shape \(32, 32, 3, 20\) and uint8 of shape \(19, 1\)",
        ),
        ({"y": np.ones((20, 2), np.uint8)}, r"and uint8 of shape \(20, 2\)"),
        ({"y": np.zeros((20, 1), np.uint8)}, "the labels in y are not whole numbers from 1 to 10"),
        (
            {"y": np.full((20, 1), 11, np.uint8)},
            "the labels in y are not whole numbers from 1 to 10",
        ),
        ({"y": np.full((20, 1), 1.5)}, "the labels in y are not whole numbers from 1 to 10"),
        ({"y": np.full((20, 1), np.nan)}, "the labels in y are not whole numbers from 1 to 10"),
        (
            {"X": np.zeros((32, 32, 3, 0), np.uint8), "y": np.zeros((0, 1), np.uint8)},
            "the labels in y|got",
        ),
    ],
)
def test_variables_that_are_not_of_svhn(folder, name, changes, message):
    write(folder / name, **{**digits(), **changes})
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        svhn(folder)


@pytest.mark.parametrize("missing", ["X", "y"])
def test_a_variable_that_is_not_there(folder, missing):
    variables = digits()
    variables["other"] = variables.pop(missing)
    write(folder / FILES[0], **variables)
    with pytest.raises(ValueError, match=rf"{FILES[0]}: .* are wanted, got .*none"):
        svhn(folder)
