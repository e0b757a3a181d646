"""The tools that make data for recipes: drawn fractals, and the files of DeepCAM as the recipe reads them."""

import sys
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image
from tools import deepcam, fractals

from thresher_lab.recipes.datasets import ArrayDataset, _pairs


def test_points_of_known_maps_lie_on_their_attractor():
    """The Sierpinski triangle: a point lies in one of three half-size copies, and none in the middle."""
    half = [[0.5, 0, 0, 0.5, e, f] for e, f in ((0, 0), (0.5, 0), (0, 0.5))]
    points = fractals.draw_points(np.array(half), 5_000, np.random.default_rng(0))
    assert (
        points.shape == (5_000, 2) and (points > -1e-5).all() and (points.sum(1) < 1 + 1e-5).all()
    )
    for _ in range(
        6
    ):  # the inverse of the map that a point comes from leads to a point of the attractor again
        points = 2 * points - (points >= 0.5)
        assert (points.sum(1) < 1 + 1e-3).all()


def test_maps_without_an_attractor_have_no_cells():
    grows = np.array([[2.0, 0, 0, 2.0, 1, 1]])
    assert (
        fractals.cells_of(fractals.draw_points(grows, 5_000, np.random.default_rng(0)), 32) is None
    )


def test_classes_fill_pictures_and_do_not_depend_on_how_many_there_are(tmp_path):
    fractals.write(tmp_path / "two", classes=2, images=4, size=32)
    fractals.write(tmp_path / "one", classes=1, images=4, size=32)
    paths = sorted((tmp_path / "two" / "train").rglob("*.png"))
    assert [path.parent.name for path in paths] == ["00000"] * 4 + ["00001"] * 4
    images = [np.asarray(Image.open(path)) for path in paths]
    assert all(image.shape == (32, 32) and set(np.unique(image)) == {0, 255} for image in images)
    assert not np.array_equal(images[0], images[1]) and not np.array_equal(images[0], images[4])
    again = [
        np.asarray(Image.open(path)) for path in sorted((tmp_path / "one" / "train").rglob("*.png"))
    ]
    assert all(map(np.array_equal, again, images[:4]))


def test_the_command_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    (tmp_path / "train" / "00000").mkdir(parents=True)
    (tmp_path / "00001.partial").mkdir()
    monkeypatch.setattr(
        sys, "argv", ["fractals", str(tmp_path), "--classes", "2", "--images", "3", "--size", "32"]
    )
    fractals.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train"]
    assert [len(list((tmp_path / "train" / name).iterdir())) for name in ("00000", "00001")] == [
        0,
        3,
    ]


class H5py:
    """Reads what was stored as a file of DeepCAM, as h5py does."""

    def __init__(self, stored):
        self.stored = stored

    @contextmanager
    def File(self, path, mode):  # noqa: N802
        assert mode == "r"
        yield {"climate": {name: {(): value} for name, value in self.stored[path].items()}}


@pytest.fixture
def published(tmp_path):
    generator, stored = np.random.default_rng(0), {}
    low, high = np.array([0.0, -1.0]), np.array([1.0, 3.0])
    stored[tmp_path / "stats.h5"] = {"minval": low, "maxval": high}
    for part, name in (("train", "a"), ("train", "b"), ("validation", "c")):
        (tmp_path / part).mkdir(exist_ok=True)
        path = tmp_path / part / f"data-{name}.h5"
        path.touch()
        labels = generator.integers(0, 3, (4, 6))
        stored[path] = {
            "data": generator.uniform(low, high, (4, 6, 2)),
            "labels_0": labels.astype(np.float32),
        }
    return tmp_path, stored


def test_files_of_deepcam_become_those_of_the_recipe(published, tmp_path):
    source, stored = published
    deepcam.convert(source, tmp_path / "out", H5py(stored))
    data = ArrayDataset(_pairs(tmp_path / "out" / "train"), (2, 4, 6), 3)
    values, labels = data[1]
    original = stored[source / "train" / "data-b.h5"]
    assert len(data) == 2 and np.array_equal(labels, original["labels_0"])
    assert np.allclose(values[0], original["data"][..., 0]) and np.allclose(
        4 * values[1] - 1, original["data"][..., 1], atol=1e-6
    )
    assert len(ArrayDataset(_pairs(tmp_path / "out" / "val"), (2, 4, 6), 3)) == 1


def test_converted_files_are_left_alone(published, tmp_path):
    source, stored = published
    deepcam.convert(source, tmp_path / "out", H5py(stored))
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.npy")}
    stored[source / "train" / "data-a.h5"].clear()
    deepcam.convert(source, tmp_path / "out", H5py(stored))
    assert written == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.suffix
    }
