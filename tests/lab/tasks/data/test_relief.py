import numpy as np
import pytest
import torch
from scipy.io import netcdf_file

from thresher_lab.tasks import relief
from thresher_lab.tasks.relief import BLOCK, BOUNDS, BOX, PATCH

SMALL = (520, 640)
BEGIN = 2 * 520 * 640 + 4
"""Bytes from the end of a file of them to where it says where they begin."""


@pytest.fixture(scope="module")
def made():
    return relief.relief_made()


@pytest.fixture
def small(monkeypatch):
    """An Earth of fewer pixels: two by three blocks, the last ones cut off."""
    monkeypatch.setattr(relief, "SHAPE", SMALL)
    monkeypatch.setattr(relief, "LATITUDES", slice(4, 516))


def write(path, elevation, *, name=relief.VARIABLE, kind="i2"):
    with netcdf_file(path, "w") as file:
        for axis, size in zip("yx", elevation.shape, strict=True):
            file.createDimension(axis, size)
        file.createVariable(name, kind, ("y", "x"))[:] = elevation.astype(kind)
    return path


def hilly():
    return relief.made_elevation(SMALL, seed=1)


def signed_log(value):
    return np.sign(value) * np.log1p(np.abs(value))


def test_inputs_tell_the_shape_of_the_ground():
    slope = np.tile(4.0 * np.arange(40, dtype=np.float32)[:, None] - 7000, (1, 50))
    north, east, bend, above = relief.elevation_inputs(slope)[:, 10:30]
    assert north == pytest.approx(np.log1p(4.0), abs=1e-4)
    assert np.abs([east, bend, above]).max() < 1e-2
    peak = np.zeros((40, 50), np.float32)
    peak[20, 30] = BOX**2
    north, east, bend, above = relief.elevation_inputs(peak)
    assert north[19:22, 30] == pytest.approx(signed_log(BOX**2 * np.array([0.5, 0, -0.5])))
    assert east[20, 29:32] == pytest.approx(signed_log(BOX**2 * np.array([0.5, 0, -0.5])))
    assert bend[20, 29:32] == pytest.approx(signed_log(BOX**2 * np.array([1.0, -4, 1])))
    assert above[20, 20:32] == pytest.approx(
        signed_log(np.array([0.0, 0, *[-1] * 8, BOX**2 - 1, -1])), abs=1e-4
    )


def test_a_map_goes_round_the_planet():
    elevation = np.random.default_rng(0).normal(0, 500, (30, 60)).astype(np.float32)
    turned = relief.elevation_inputs(np.roll(elevation, 17, 1))
    assert np.allclose(np.roll(relief.elevation_inputs(elevation), 17, 2), turned, atol=1e-3)


def test_a_bound_is_of_the_class_above():
    heights = np.array([[-9000, -200.5, -200, -0.5, 0, 999, 1000, 8000]], np.float32)
    assert relief.elevation_classes(heights).tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
    assert len(relief.CLASSES) == len(BOUNDS) + 1


def test_the_made_planet_is_the_same_every_time(made):
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    again = relief.relief_made()
    assert torch.equal(torch.get_rng_state(), state[0]) and np.array_equal(
        np.random.get_state()[1], state[1]
    )
    assert torch.equal(again.train.tensors[0], made.train.tensors[0]) and torch.equal(
        again.test_targets, made.test_targets
    )


def test_the_made_planet_is_like_the_earth(made):
    inputs, targets = made.train.tensors
    assert (inputs.shape, targets.shape) == ((1664, 4, PATCH, PATCH), (1664, PATCH, PATCH))
    assert (made.test_inputs.shape, made.test_targets.shape) == (
        (384, 4, PATCH, PATCH),
        (384, PATCH, PATCH),
    )
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert (
        inputs.mean((0, 2, 3)).abs().max() < 1e-4
        and inputs.std((0, 2, 3)).sub(1).abs().max() < 1e-4
    )
    ocean, shelf, land, high = (targets.flatten().bincount(minlength=4) / targets.numel()).tolist()
    assert 0.5 < ocean < 0.8 and 0.03 < shelf < 0.12 and 0.1 < land < 0.35 and 0.02 < high < 0.2
    single = (targets.flatten(1).amax(1) == targets.flatten(1).amin(1)).float().mean()
    assert 0.3 < single < 0.9


def test_patches_are_inputs_and_classes_of_the_same_pixels(small, tmp_path):
    elevation = np.round(hilly())
    data = relief.relief(write(tmp_path / "etopo5.cdf", elevation))
    inputs, classes = (
        relief.elevation_inputs(elevation)[:, 4:516],
        relief.elevation_classes(elevation)[4:516],
    )
    place = {
        classes[y : y + PATCH, x : x + PATCH].tobytes(): (y, x)
        for y in range(0, 512, PATCH)
        for x in range(0, 640, PATCH)
    }
    mixed = [
        number for number, target in enumerate(data.train.tensors[1]) if len(target.unique()) > 2
    ]
    assert len(data.train) + len(data.test_targets) == 16 * 20 and len(mixed) > 5
    for number in mixed:
        patch, target = (tensor[number].numpy() for tensor in data.train.tensors)
        y, x = place[target.tobytes()]
        seen = inputs[:, y : y + PATCH, x : x + PATCH].reshape(4, -1)
        assert all(
            np.corrcoef(*pair)[0, 1] > 0.9999
            for pair in zip(patch.reshape(4, -1), seen, strict=True)
        )


def test_blocks_are_for_training_or_for_testing_as_a_whole(small, tmp_path, monkeypatch):
    def block_of(elevation):
        rows, columns = np.indices(elevation.shape) // BLOCK
        return rows * 3 + columns

    monkeypatch.setattr(relief, "elevation_classes", block_of)
    data = relief.relief(write(tmp_path / "etopo5.cdf", hilly()))
    train, test = (
        set(targets.unique().tolist()) for targets in (data.train.tensors[1], data.test_targets)
    )
    assert train | test == set(range(6)) and not train & test and len(test) == 1


def test_relief_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(relief, "DEBIAN_FILE", tmp_path / "etopo5.cdf")
    with pytest.raises(FileNotFoundError, match="apt install ferret-datasets.*relief-made"):
        relief.find_relief()
    (tmp_path / "etopo5.cdf").touch()
    assert relief.find_relief() == tmp_path / "etopo5.cdf"


@pytest.mark.parametrize(
    ("elevation", "settings", "message"),
    [
        (np.zeros(SMALL), {"name": "elevation"}, "truncated or damaged: KeyError: 'ROSE'"),
        (
            np.zeros((520, 641)),
            {},
            r"damaged: ROSE has \(520, 641\) values instead of \(520, 640\)",
        ),
        (
            np.full(SMALL, -12_001),
            {},
            "damaged: heights from -12001 to -12001 m, not within -12000 to 9000",
        ),
        (np.full(SMALL, 9_001), {}, "damaged: heights from 9001 to 9001 m"),
        (np.full(SMALL, np.nan), {"kind": "f4"}, "damaged: heights from nan to nan m"),
    ],
)
def test_files_of_something_else(small, tmp_path, elevation, settings, message):
    with pytest.raises(ValueError, match=f"etopo5.cdf: {message}"):
        relief.relief(write(tmp_path / "etopo5.cdf", elevation, **settings))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"no netCDF at all",
        lambda content: content[:3],
        lambda content: content[:30],
        lambda content: content[:60],
        lambda content: content[:-100],
        lambda content: content[:4] + b"\xff" * 40 + content[44:],
        lambda content: content[:8] + b"\x00\x00\x00\x07" + content[12:],
        lambda content: content.replace(b"ROSE", b"\xff\xfe\xfd\xfc"),
        lambda content: content[:-BEGIN] + b"\xff" * 4 + content[-BEGIN + 4 :],
    ],
)
def test_damaged_files_are_named(small, tmp_path, damage):
    path = write(tmp_path / "etopo5.cdf", np.zeros(SMALL))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="etopo5.cdf: truncated or damaged: "):
        relief.relief(path)


@pytest.mark.skipif(
    not relief.DEBIAN_FILE.is_file(), reason="Debian's ferret-datasets is not installed"
)
def test_the_earth():
    elevation = relief.read_elevation(relief.find_relief())
    classes = relief.elevation_classes(elevation[relief.LATITUDES])
    assert classes.shape == (60 * PATCH, 135 * PATCH)
    everest = elevation[(90 + 28) * 12, 87 * 12]
    assert everest > 3000 and elevation[(90 + 11) * 12 + 4, 142 * 12 + 2] < -7000
    assert np.bincount(classes.ravel()) / classes.size == pytest.approx(
        [0.64, 0.07, 0.21, 0.08], abs=0.05
    )
