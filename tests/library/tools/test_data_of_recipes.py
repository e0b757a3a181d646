"""The tools that make data for recipes: drawn atoms, and the files of DeepCAM as the recipe reads them."""

import sys
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image
from tools import deepcam, visual_atoms

from thresher_lab.recipes.datasets import ArrayDataset, _pairs


def test_an_atom_is_a_closed_wave_on_orbits():
    """Without waves and noise it is an ellipse; two images of a class differ in place and size alone."""
    circle = visual_atoms.Atom(frequencies=(0, 0), oval=(1, 2), orbits=1, corners=400, noise=0)
    drawn = np.asarray(circle.draw(200, np.random.default_rng(0)))
    rows, columns = drawn.nonzero()
    assert np.ptp(rows) / np.ptp(columns) == pytest.approx(2, rel=0.05)
    inside = drawn[rows.min() + np.ptp(rows) // 2, columns.min() + np.ptp(columns) // 2]
    assert inside == 0 and len(rows) < 1500
    more = visual_atoms.Atom(frequencies=(0, 0), oval=(1, 2), orbits=5, corners=400, noise=0)
    assert (np.asarray(more.draw(200, np.random.default_rng(0))) > 0).sum() > 2 * len(rows)
    waves = visual_atoms.Atom(frequencies=(5, 5), oval=(1, 1), orbits=1, corners=400, noise=0)
    bent = np.stack(np.asarray(waves.draw(200, np.random.default_rng(0))).nonzero())
    distance = np.linalg.norm(bent - bent.mean(1, keepdims=True), axis=0)
    assert distance.max() / distance.min() == pytest.approx(3, rel=0.15)


def test_classes_fill_pictures_and_do_not_depend_on_how_many_there_are(tmp_path):
    visual_atoms.write(tmp_path / "two", classes=2, images=4, size=32)
    visual_atoms.write(tmp_path / "one", classes=1, images=4, size=32)
    paths = sorted((tmp_path / "two" / "train").rglob("*.png"))
    assert [path.parent.name for path in paths] == ["00000"] * 4 + ["00001"] * 4
    images = [np.asarray(Image.open(path)) for path in paths]
    assert all(image.shape == (32, 32) and 0 < image.mean() < 255 for image in images)
    assert not np.array_equal(images[0], images[1]) and not np.array_equal(images[0], images[4])
    again = [
        np.asarray(Image.open(path)) for path in sorted((tmp_path / "one" / "train").rglob("*.png"))
    ]
    assert all(map(np.array_equal, again, images[:4]))


def test_the_command_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    (tmp_path / "train" / "00000").mkdir(parents=True)
    (tmp_path / "00001.partial").mkdir()
    monkeypatch.setattr(
        sys,
        "argv",
        ["visual_atoms", str(tmp_path), "--classes", "2", "--images", "3", "--size", "32"],
    )
    visual_atoms.main()
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
