import numpy as np
import pytest
import torch

from lab.tasks.data.test_images import write_fashion
from thresher_lab.tasks import contours, images
from thresher_lab.tasks.base import training_subset
from thresher_lab.tasks.contours import CLASSES, SIDE, TEST, TRAIN, Contour


@pytest.fixture(scope="module")
def drawn():
    return contours.contours()


def test_contours_have_as_many_of_each_class(drawn):
    inputs, labels = drawn.train.tensors
    assert inputs.shape == (CLASSES * TRAIN, 1, SIDE, SIDE) and drawn.test_inputs.shape == (
        CLASSES * TEST,
        1,
        SIDE,
        SIDE,
    )
    assert (
        labels.bincount().tolist() == [TRAIN] * CLASSES
        and drawn.test_targets.bincount().tolist() == [TEST] * CLASSES
    )
    assert (
        inputs.dtype == torch.float32
        and inputs.mean().abs() < 1e-3
        and inputs.std() == pytest.approx(1, abs=1e-3)
    )


def test_contours_are_the_same_every_time_and_no_two_alike(drawn):
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    again = contours.contours()
    assert torch.equal(torch.get_rng_state(), state[0]) and np.array_equal(
        np.random.get_state()[1], state[1]
    )
    assert torch.equal(again.train.tensors[0], drawn.train.tensors[0]) and torch.equal(
        again.test_inputs, drawn.test_inputs
    )
    images = torch.cat([drawn.train.tensors[0], drawn.test_inputs])
    assert len({image.numpy().tobytes() for image in images}) == len(images)


def test_classes_differ_in_frequencies_or_orbits():
    kinds = contours.random_contours(300, np.random.default_rng(1))
    assert len({(kind.frequencies, kind.orbits) for kind in kinds}) == 300
    assert all(first < second for first, second in (kind.frequencies for kind in kinds))


def test_a_contour_without_waves_is_ovals_about_the_middle():
    images = Contour((1, 2), (0.0, 0.0), 2).draw(20, np.random.default_rng(0))
    assert images.min() == 0 and images.max() == 1 and images.dtype == np.float32
    y, x = np.indices((SIDE, SIDE)) + 0.5 - SIDE / 2
    distance = np.hypot(x, y)
    reach = SIDE / 2 - contours.SHIFT
    white = [distance[image > 0] for image in images]
    furthest, nearest = max(map(np.max, white)), min(map(np.min, white))
    assert reach - 1 < furthest < reach * 1.1 + 2**0.5 * contours.SHIFT + 1
    assert nearest > reach / 2 * contours.SQUEEZE * 0.9 - 2**0.5 * contours.SHIFT - 1 > 0
    widest = np.array([np.ptp(np.argwhere(image > 0), axis=0).max() for image in images])
    assert ((widest > 2 * reach * 0.7) & (widest < SIDE)).all()


def test_waves_go_round_as_often_as_they_are_asked_to(monkeypatch):
    for name in ("NOISE", "SHIFT"):
        monkeypatch.setattr(contours, name, 0.0)
    monkeypatch.setattr(contours, "SQUEEZE", 1.0)
    [image] = Contour((5, 1), (0.3, 0.0), 1).draw(1, np.random.default_rng(0))
    y, x = np.indices((SIDE, SIDE)) + 0.5 - SIDE / 2
    angle = np.arctan2(y, x)[image > 0]
    spectrum = [
        abs(np.sum(np.hypot(x, y)[image > 0] * np.exp(1j * waves * angle)))
        for waves in range(1, 13)
    ]
    assert np.argmax(spectrum) == 4


def test_digits_are_enlarged(drawn):
    loaded, digits = contours.contours_and_digits(), images.digits()
    enlarged = loaded.downstream.train.tensors[0]
    assert torch.equal(loaded.train.tensors[0], drawn.train.tensors[0]) and torch.equal(
        loaded.test_targets, drawn.test_targets
    )
    assert enlarged.shape == (1438, 1, SIDE, SIDE) and loaded.downstream.test_inputs.shape == (
        359,
        1,
        SIDE,
        SIDE,
    )
    assert torch.equal(loaded.downstream.train.tensors[1], digits.train.tensors[1])
    assert torch.allclose(
        torch.nn.functional.avg_pool2d(enlarged, 4), digits.train.tensors[0], atol=1.2
    )
    assert (enlarged.mean() - digits.train.tensors[0].mean()).abs() < 0.05


def test_a_part_is_of_the_contours_only():
    loaded = contours.contours_and_digits()
    some = training_subset(loaded, 100)
    assert len(some.train) == 100 and some.downstream is loaded.downstream


def test_fashion_gets_a_black_margin(tmp_path, monkeypatch):
    monkeypatch.setattr(contours, "FASHION", 10)
    loaded = contours.contours_and_fashion(write_fashion(tmp_path))
    real = loaded.downstream
    assert real.train.tensors[0].shape == (10, 1, SIDE, SIDE) and real.test_inputs.shape == (
        10,
        1,
        SIDE,
        SIDE,
    )
    margin = real.test_inputs.clone()
    margin[..., 2:-2, 2:-2] = real.test_inputs.min()
    assert (margin == real.test_inputs.min()).all()
    whole = images.fashion_mnist(tmp_path)
    assert torch.equal(real.test_inputs[..., 2:-2, 2:-2], whole.test_inputs) and torch.equal(
        real.test_targets, whole.test_targets
    )
