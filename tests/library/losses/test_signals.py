"""Signals against loops over samples, positions and labels."""

import math

import numpy as np
import pytest
import torch

from thresher.losses.signals import batch_confidence, batch_loss, classes, labels


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def by_loops(
    logits: np.ndarray, targets: np.ndarray, ignore: int | None, right_share: float
) -> tuple[list[bool], list[float]]:
    """(B, C, ...) logits and (B, ...) indices or (B, C, ...) probabilities."""
    soft = targets.shape == logits.shape
    correct, confidence = [], []
    for z, y in zip(logits, targets, strict=True):
        columns = z.reshape(len(z), -1).T
        wanted = y.reshape(len(z), -1).argmax(0) if soft else y.reshape(-1)
        right, top = [], []
        for column, target in zip(columns, wanted, strict=True):
            if target == ignore:
                continue
            right.append(int(column.argmax()) == target)
            top.append(softmax(column).max())
        correct.append(bool(right) and sum(right) / len(right) >= right_share)
        confidence.append(sum(top) / len(top) if top else 0.0)
    return correct, confidence


@pytest.mark.parametrize("right_share", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("ignore", [None, -100, 1])
@pytest.mark.parametrize("shape", [(40, 3), (40, 3, 4), (40, 3, 2, 2)], ids=str)
def test_classes(shape: tuple[int, ...], ignore: int | None, right_share: float) -> None:
    r = np.random.default_rng(len(shape))
    targets = r.integers(0, 3, (shape[0], *shape[2:]))
    logits = r.normal(size=shape) + 0.7 * np.moveaxis(np.eye(3)[targets], -1, 1)
    if ignore is not None:
        targets[r.random(targets.shape) < 0.4] = ignore
        targets[0] = ignore
    correct, confidence = by_loops(logits, targets, ignore, right_share)
    assert len(set(correct)) == 2 or (right_share == 0 and ignore is None)
    log_probs = torch.from_numpy(logits).log_softmax(1)
    found = classes(
        log_probs, torch.from_numpy(targets), n=40, ignore_index=ignore, right_share=right_share
    )
    if len(shape) == 2 and ignore is None:
        correct = (
            logits.argmax(1) == targets
        ).tolist()  # one position: a share of it makes no sense
    assert found["correct"].dtype == torch.bool
    assert found["correct"].tolist() == correct
    assert found["confidence"].tolist() == pytest.approx(confidence, rel=1e-6, abs=1e-7)


def test_half_of_the_positions_is_right_by_default() -> None:
    log_probs = torch.tensor([[0.9, 0.1], [0.9, 0.1]]).T.log().expand(1, 2, 2)
    for targets, right in (([0, 0], True), ([0, 1], True), ([1, 1], False)):
        assert classes(log_probs, torch.tensor([targets]), n=1)["correct"].item() is right


@pytest.mark.parametrize("shape", [(20, 3), (20, 3, 4)], ids=str)
def test_soft_targets(shape: tuple[int, ...]) -> None:
    r = np.random.default_rng(1)
    logits, targets = r.normal(size=shape), r.dirichlet(np.ones(3), size=(shape[0], *shape[2:]))
    targets = np.moveaxis(targets, -1, 1)
    found = classes(torch.from_numpy(logits).log_softmax(1), torch.from_numpy(targets), n=20)
    correct, confidence = by_loops(logits, targets, None, 0.5)
    assert found["correct"].tolist() == correct
    assert found["confidence"].tolist() == pytest.approx(confidence, rel=1e-6)


def test_flattened_positions_belong_to_their_sample() -> None:
    r = np.random.default_rng(2)
    logits, targets = r.normal(size=(10, 3, 4)), r.integers(0, 3, (10, 4))
    flat = torch.from_numpy(np.moveaxis(logits, 1, 2).reshape(40, 3).copy()).log_softmax(1)
    found = classes(flat, torch.from_numpy(targets.reshape(40)), n=10)
    correct, confidence = by_loops(logits, targets, None, 0.5)
    assert found["correct"].tolist() == correct
    assert found["confidence"].tolist() == pytest.approx(confidence, rel=1e-6)


def test_labels() -> None:
    r = np.random.default_rng(3)
    probs, targets = r.random((50, 2)), r.integers(0, 2, (50, 2)).astype(float)
    found = labels(torch.from_numpy(probs), torch.from_numpy(targets), n=50)
    assert found["correct"].tolist() == [
        all((p >= 0.5) == (t >= 0.5) for p, t in zip(*row, strict=True))
        for row in zip(probs, targets, strict=True)
    ]
    assert found["confidence"].tolist() == pytest.approx(
        [np.mean([max(p, 1 - p) for p in row]) for row in probs]
    )
    assert len(set(found["correct"].tolist())) == 2


def test_one_label_a_sample() -> None:
    probs, targets = torch.tensor([0.5, 0.2, 0.7]), torch.tensor([1.0, 1.0, 0.0])
    for shape in ((3,), (3, 1)):
        found = labels(probs.reshape(shape), targets.reshape(shape), n=3)
        assert found["correct"].tolist() == [True, False, False]
        assert found["confidence"].tolist() == pytest.approx([0.5, 0.8, 0.7])


@pytest.mark.parametrize(("right_share", "right"), [(0.5, True), (0.51, False)])
def test_dense_labels(right_share: float, right: bool) -> None:
    """A pixel is right where all of its labels are; here one of two."""
    probs = torch.tensor([[[0.9, 0.9], [0.9, 0.1]]])
    found = labels(probs, torch.ones(1, 2, 2), n=1, right_share=right_share)
    assert found["correct"].item() is right
    assert found["confidence"].item() == pytest.approx(0.9)


def test_batch_confidence() -> None:
    logits = np.random.default_rng(4).normal(size=(6, 3, 2))
    found = batch_confidence(torch.from_numpy(logits), n=6)
    expected = []
    for b in range(6):
        tops = []
        for position in range(2):
            columns = [softmax(logits[:, c, position]) for c in range(3)]
            tops.append(max(column[b] for column in columns))
        expected.append(math.fsum(tops) / 2)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert batch_confidence(torch.randn(1, 5), n=1).item() == 1


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ([1, 3, 5], 3),
        ([7], 7),
        (
            [0.1] * 3,
            0.1,
        ),  # the mean of these is above each of them, in single precision too for some numbers
        ([1, -math.inf, 3], 2),
        ([-math.inf, -math.inf], math.nan),
        ([1, math.nan], math.nan),
        ([1, math.inf], math.inf),
    ],
)
def test_batch_loss(loss: list[float], expected: float) -> None:
    found = batch_loss(torch.tensor(loss))
    assert found.shape == (len(loss),)
    np.testing.assert_array_equal(found.numpy(), np.full(len(loss), np.float32(expected)))


def test_no_sample_of_equal_losses_is_below_the_batch() -> None:
    for n in range(1, 300):
        for value in (0.1, 1 / 3, 2.3, 1e-7):
            loss = torch.full((n,), value)
            assert not (loss < batch_loss(loss)).any()


def test_batch_loss_of_no_samples() -> None:
    assert batch_loss(torch.empty(0)).shape == (0,)
