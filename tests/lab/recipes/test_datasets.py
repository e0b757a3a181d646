import re

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import TensorDataset

from subset_cases import optional
from thresher_lab.recipes import datasets
from thresher_lab.recipes.schema import Recipe
from thresher_lab.tasks.base import Data

FOLDER = {"name": "images", "kind": "folder", "samples": 4, "classes": 2}
ARRAYS = {"name": "arrays", "kind": "arrays", "samples": 2, "shape": [3, 4, 8], "classes": 2}
TASK = {
    "name": "CIFAR-10",
    "kind": "task",
    "task": "cifar10",
    "samples": 8,
    "shape": [3, 4, 4],
    "classes": 2,
}
REST = """
title: a recipe
paper: {title: a paper, where: a table}
model: {source: thresher, name: resnet20}
method: full
epochs: 2
batch: {per_worker: 2}
optimizer: {name: sgd, lr: 0.1}
published: []
"""


def recipe(data, **more):
    return Recipe.model_validate(yaml.safe_load(REST) | {"data": data} | more)


@pytest.fixture(autouse=True)
def vision():
    optional("torchvision.transforms")


@pytest.fixture
def folder(tmp_path):
    """Two classes: black images and white ones, of several sizes."""
    for part in ("train", "val"):
        for name, gray in (("black", 0), ("white", 255)):
            (tmp_path / part / name / "deeper").mkdir(parents=True)
            Image.new("L", (9, 6), gray).save(tmp_path / part / name / "a.png")
            Image.new("RGB", (6, 12), (gray,) * 3).save(
                tmp_path / part / name / "deeper" / "b.JPG", "JPEG"
            )
            (tmp_path / part / name / "notes.txt").write_text("no image")
    return tmp_path


@pytest.fixture
def arrays(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        for name in ("x", "y"):
            np.save(tmp_path / part / f"data-{name}.npy", np.full((3, 4, 8), 2.0))
            np.save(tmp_path / part / f"label-{name}.npy", np.eye(4, 8, dtype=np.uint8))
    return tmp_path


PLAIN = {"train_crop": 4, "test_resize": 4, "test_crop": 4, "mean": [0, 0, 0], "std": [1, 1, 1]}


def test_a_folder_of_images(folder):
    found = datasets.read_folder(recipe(FOLDER, pictures=PLAIN), folder)
    assert found.train.targets == [0, 0, 1, 1] == found.test.targets
    for part in (found.train, found.test):
        for x, y in part:
            assert (
                x.shape == (3, 4, 4)
                and x.dtype == torch.float32
                and torch.equal(x, torch.full_like(x, y))
            )


def test_soft_targets(folder):
    loss = {"label_smoothing": 0.2, "soft_targets": True}
    found = datasets.read_folder(recipe(FOLDER, pictures=PLAIN, loss=loss), folder)
    assert torch.allclose(found.train[3][1], torch.tensor([0.1, 0.9]))
    assert found.test[3][1] == 1 and found.train.targets == [0, 0, 1, 1]


def test_a_part_of_the_training_images_is_tested(folder):
    found = datasets.read_folder(recipe(FOLDER | {"test_every": 3}, pictures=PLAIN), folder)
    assert (found.train.targets, found.test.targets) == ([0, 0, 1], [1])


def test_where_there_is_no_data(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match="data: images is not there by itself: --data DIR with train/ with a folder",
    ):
        datasets.find_folder(recipe(FOLDER), None)
    (tmp_path / "train").mkdir()
    wanted = f"data: no folder {re.escape(str(tmp_path / 'val'))}; --data DIR is a folder with train/ .*; val/ with data-NAME.npy"
    with pytest.raises(FileNotFoundError, match=wanted):
        datasets.find_folder(recipe(ARRAYS), tmp_path)
    assert datasets.find_folder(recipe(FOLDER | {"test_every": 3}), tmp_path) == tmp_path


def test_images_that_do_not_fit(folder):
    with pytest.raises(ValueError, match=r"data.classes: 3, but .*train has 2 folders of classes"):
        datasets.read_folder(recipe(FOLDER | {"classes": 3}, pictures=PLAIN), folder)
    (folder / "val" / "white").rename(folder / "val" / "gray")
    with pytest.raises(ValueError, match="have different classes: 'gray' is in one of them"):
        datasets.read_folder(recipe(FOLDER, pictures=PLAIN), folder)
    for path in (folder / "train" / "black").rglob("*.*"):
        path.unlink()
    with pytest.raises(
        ValueError,
        match=r"data: .* no valid file for the classes black\..* it is to be train/ with a folder",
    ):
        datasets.read_folder(recipe(FOLDER, pictures=PLAIN), folder)
    (folder / "empty" / "train").mkdir(parents=True)
    (folder / "empty" / "val").mkdir()
    with pytest.raises(
        ValueError,
        match="data: .* find any class folder in .*empty.*; it is to be train/ with a folder",
    ):
        datasets.read_folder(recipe(FOLDER, pictures=PLAIN), folder / "empty")


@pytest.mark.parametrize("content", [b"", b"no image", "truncated"])
def test_a_damaged_image_is_named(folder, content):
    file = folder / "train" / "black" / "a.png"
    file.write_bytes(file.read_bytes()[:45] if content == "truncated" else content)
    found = datasets.read_folder(recipe(FOLDER, pictures=PLAIN), folder)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: not an image that can be read"):
        _ = found.train[0]
    assert found.train[1][1] == 0


def test_arrays(arrays):
    found = datasets.read_folder(recipe(ARRAYS), arrays)
    x, y = found.train[1]
    assert (x.shape, x.dtype, y.dtype, len(found.test)) == (
        (3, 4, 8),
        torch.float32,
        torch.int64,
        2,
    )
    assert torch.equal(y, torch.eye(4, 8, dtype=torch.int64)) and bool((x == 2).all())


def damaged(arrays, name, content):
    file = arrays / "train" / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.save(file, content, allow_pickle=True)
    return file


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "data-x.npy",
            np.zeros((3, 8, 4)),
            "shape (3, 8, 4); data.shape of the recipe is (3, 4, 8)",
        ),
        (
            "label-x.npy",
            np.zeros((4, 4), np.uint8),
            "shape (4, 4); data.shape of the recipe is (4, 8)",
        ),
        ("label-x.npy", np.full((4, 8), 2), "classes are whole numbers from 0 to 1; it has others"),
        (
            "label-x.npy",
            np.full((4, 8), -1),
            "classes are whole numbers from 0 to 1; it has others",
        ),
        ("label-x.npy", np.zeros((4, 8)), "classes are whole numbers from 0 to 1; it has others"),
        ("data-x.npy", b"", "not a NumPy file that can be read"),
        ("data-x.npy", np.array([{"run": "me"}]), "not a NumPy file that can be read"),
    ],
)
def test_a_damaged_array_is_named(arrays, name, content, message):
    file = damaged(arrays, name, content)
    found = datasets.read_folder(recipe(ARRAYS), arrays)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{file}: {message}')}"):
        _ = found.train[0]


def test_a_truncated_array_is_named(arrays):
    file = arrays / "train" / "data-x.npy"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: not a NumPy file"):
        _ = datasets.read_folder(recipe(ARRAYS), arrays).train[0]


def test_arrays_without_partners(arrays):
    (arrays / "val" / "label-y.npy").unlink()
    with pytest.raises(ValueError, match=r"data: .*data-y.npy has no label-y.npy beside it"):
        datasets.read_folder(recipe(ARRAYS), arrays)
    for path in (arrays / "val").glob("data-*"):
        path.unlink()
    with pytest.raises(
        ValueError, match=r"data: .*val has no data-NAME.npy; it is to be val/ with data-NAME.npy"
    ):
        datasets.read_folder(recipe(ARRAYS), arrays)


@pytest.fixture
def bytes_and_data():
    """Pictures with the whole range of bytes in every channel, and the same as a task has them."""
    pixels = torch.randint(256, (8, 3, 4, 4), generator=torch.Generator().manual_seed(0))
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 0, 255
    std, mean = torch.std_mean(pixels.float(), (0, 2, 3), keepdim=True)
    normal, labels = (pixels.float() - mean) / std, torch.arange(8) % 2
    return pixels, Data(TensorDataset(normal, labels), normal[4:], labels[4:])


def test_images_of_a_task_become_bytes_again(bytes_and_data):
    pixels, data = bytes_and_data
    train, test = datasets.as_bytes(data)
    assert torch.equal(train, pixels.byte()) and torch.equal(test, pixels[4:].byte())


def test_images_of_a_task_are_normalized_by_themselves(bytes_and_data):
    _, data = bytes_and_data
    found = datasets.from_task(recipe(TASK, pictures={"flip": 1.0}), data)
    x, y = found.test[1]
    assert torch.allclose(x, data.test_inputs[1], atol=1e-5) and y == 1
    assert torch.allclose(found.train[5][0], data.train[5][0].flip(2), atol=1e-5)


def test_data_of_a_task_as_it_is(bytes_and_data):
    _, data = bytes_and_data
    found = datasets.from_task(recipe(TASK), data)
    assert found.train is data.train and torch.equal(found.test[2][0], data.test_inputs[2])


def test_data_of_a_task_of_another_shape(bytes_and_data):
    with pytest.raises(
        ValueError,
        match=r"data.shape: \(3, 8, 8\), but samples of the task cifar10 have shape \(3, 4, 4\)",
    ):
        datasets.from_task(recipe(TASK | {"shape": [3, 8, 8]}), bytes_and_data[1])
