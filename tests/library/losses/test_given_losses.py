"""Losses that the loop computed itself: positions that count or not, divisors, and what is refused."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from thresher.attribution.rows import RowLayout
from thresher.losses.given import GivenLosses
from thresher.records import NEVER_SEEN

THREE = torch.tensor([[1.0, 2.0], [6.0, 9.0], [4.0, 4.0]], dtype=torch.float64)
"""Losses of three samples, of which two positions, one and none count."""
COUNTED = torch.tensor([[True, True], [True, False], [False, False]])


def given_losses(losses, valid, total, *, flat):
    """The losses and the layout of their rows; flat as tokens of several samples one after the other."""
    layout = RowLayout(len(losses), losses.shape[1] if flat else 1)
    return GivenLosses(
        losses.flatten() if flat else losses, valid.flatten() if flat else valid, total
    ), layout


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize(
    ("weights", "chosen", "total", "expected"),
    [
        ([1, 1, 1], None, None, (1 + 2 + 6) / 3),
        ([2, 1, 4], None, None, (2 * 3 + 6) / 3),
        ([2, 1, 4], [0], None, 2 * 3 / 2),
        ([2, 1, 4], [1], None, 6),
        ([2, 0.5, 4], [1, 1, 0], None, (0.5 * 6 + 0.5 * 6 + 2 * 3) / 4),
        ([2, 1, 4], [2], None, 0),
        ([2, 1, 4], [], None, 0),
        ([1, 1, 1], None, 6, (1 + 2 + 6) / 6),
        ([2, 1, 4], None, 2.5, (2 * 3 + 6) / 2.5),
        ([2, 1, 4], [1], 6, 6 / 1 * 3 / 6),
        ([2, 1, 4], [1, 1, 0], 6, (6 + 6 + 2 * 3) / 4 * 3 / 6),
        ([2, 1, 4], [2], 6, 0),
    ],
)
def test_the_scalar_of_all_samples_and_of_some(weights, chosen, total, expected, dtype, flat):
    given, layout = given_losses(THREE, COUNTED.to(dtype), total, flat=flat)
    rows = None if chosen is None else torch.tensor(chosen, dtype=torch.int64)
    of_rows = torch.tensor(weights, dtype=torch.float32)
    value = given.value(layout, of_rows if rows is None else of_rows[rows], rows)
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert given.plain().item() == pytest.approx(9 / (total or 3), rel=1e-12)
    assert given.means(layout).tolist() == [1.5, 6.0, NEVER_SEEN]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("chosen", [None, [0, 2]])
def test_without_a_position_that_counts_the_mean_is_nan_and_the_sum_0(chosen, flat):
    rows = None if chosen is None else torch.tensor(chosen)
    for total, expected in ((None, math.nan), (5, 0.0)):
        given, layout = given_losses(THREE, torch.zeros_like(COUNTED), total, flat=flat)
        for value in (given.value(layout, None, rows), given.plain()):
            assert value.item() == pytest.approx(expected, nan_ok=True)
        assert given.means(layout).tolist() == [NEVER_SEEN] * 3


def test_the_value_and_the_gradient_are_those_of_cross_entropy():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5, 9, requires_grad=True), torch.randint(5, (6, 9))
    labels[torch.rand(6, 9) < 0.5] = -100
    labels[2] = -100
    losses = F.cross_entropy(logits, labels, reduction="none")
    value = GivenLosses(losses, labels != -100).value(RowLayout(6))
    expected = F.cross_entropy(logits, labels)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(value, logits), torch.autograd.grad(expected, logits), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_values_at_positions_that_do_not_count_do_not_matter():
    losses = torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]], requires_grad=True)
    given = GivenLosses(losses, torch.tensor([[True, False], [False, True]]))
    value = given.value(RowLayout(2))
    assert value.item() == 2.0 and given.means(RowLayout(2)).tolist() == [1.0, 3.0]
    (gradient,) = torch.autograd.grad(value, losses)
    assert gradient.tolist() == [[0.5, 0.0], [0.0, 0.5]]


def test_weights_of_positions():
    """The value and the gradient are those of a cross-entropy with class weights, of all rows and of some."""
    torch.manual_seed(0)
    logits, labels, weight = (
        torch.randn(6, 5, 9, requires_grad=True),
        torch.randint(5, (6, 9)),
        torch.rand(5) * 3,
    )
    weight[1], labels[0] = 0.0, 1
    losses = F.cross_entropy(logits, labels, reduction="none")
    given = GivenLosses(losses, weight[labels])
    for chosen in (None, torch.tensor([1, 3, 4])):
        value, rows = (
            given.value(RowLayout(6), chosen=chosen),
            slice(None) if chosen is None else chosen,
        )
        expected = F.cross_entropy(logits[rows], labels[rows], weight)
        torch.testing.assert_close(value, expected)
        for ours, theirs in zip(
            torch.autograd.grad(value, logits, retain_graph=True),
            torch.autograd.grad(expected, logits),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
    assert given.means(RowLayout(6))[0] == NEVER_SEEN
    torch.testing.assert_close(
        given.means(RowLayout(6))[2], F.cross_entropy(logits[2:3], labels[2:3], weight).detach()
    )
    torch.testing.assert_close(
        GivenLosses(losses, weight[labels], 7).plain(), (losses * weight[labels]).sum() / 7
    )
    kept = torch.rand(6, 9) < 0.5
    torch.testing.assert_close(
        GivenLosses(losses, weight[labels], keep=kept).plain(),
        F.cross_entropy(logits, labels.where(kept, -100), weight),
    )


def test_losses_that_are_not_finite_are_not_taken_for_missing_ones():
    given = GivenLosses(
        torch.tensor([[-torch.inf, 1.0], [torch.nan, 1.0], [2.0, 1.0]]), torch.tensor([1, 0])
    )
    assert torch.equal(given.means(RowLayout(3)).nan_to_num(7.0), torch.tensor([7.0, 7.0, 2.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_low_precision_are_exact(dtype):
    """In the dtype itself, 300 would be counted as 256 in bfloat16, and 80,000 would be infinite in float16."""
    losses = torch.full((4, 300), 100.0, dtype=dtype)
    given = GivenLosses(losses, torch.ones(4, 1, dtype=dtype))
    assert given.value(RowLayout(4)).item() == 100.0 and given.value(RowLayout(4)).dtype == dtype
    assert given.means(RowLayout(4)).tolist() == [100.0] * 4


@pytest.mark.parametrize(
    "valid",
    [torch.tensor(True), torch.tensor([True, False, True]), torch.ones(1, 3), torch.ones(2, 1)],
)
def test_a_mask_is_broadcast(valid):
    losses = torch.arange(6.0).view(2, 3)
    whole = valid.bool().expand(2, 3)
    assert GivenLosses(losses, valid).plain() == losses[whole].mean()
    assert torch.equal(
        GivenLosses(losses, valid).means(RowLayout(2)),
        torch.stack([losses[i][whole[i]].mean() for i in (0, 1)]),
    )


def test_one_position_per_row():
    given = GivenLosses(
        torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1, 0, 1]), total=torch.tensor(4)
    )
    assert given.value(RowLayout(3)).item() == 7 / 4
    assert given.means(RowLayout(3)).tolist() == [1.0, NEVER_SEEN, 6.0]


LOSSES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("losses", "valid", "error", "message"),
    [
        (1.0, None, TypeError, "`per_sample_losses` must be a tensor, got float"),
        (torch.ones(()), None, ValueError, "is a scalar"),
        (LOSSES, [[1, 0, 1]], TypeError, "`valid` must be a tensor.*got list"),
        (LOSSES, torch.ones(3, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (LOSSES, torch.ones(3, requires_grad=True), ValueError, "requires a gradient"),
        (LOSSES, torch.ones(3, device="meta"), ValueError, "is on meta and the losses are on cpu"),
        (
            LOSSES,
            torch.ones(2),
            ValueError,
            r"of shape \(2,\) does not fit losses of shape \(2, 3\)",
        ),
        (LOSSES, torch.ones(4, 3), ValueError, "does not fit"),
        (LOSSES, torch.ones(1, 2, 3), ValueError, "does not fit"),
        (torch.ones(3, 3), torch.ones(3), ValueError, r"per row or per position.*valid\[:, None\]"),
        (
            LOSSES,
            torch.tensor([1, 0, -100]),
            ValueError,
            "`valid` has numbers below 0, or not finite",
        ),
        (
            LOSSES,
            torch.tensor([1.0, 0.5, torch.nan]),
            ValueError,
            "`valid` has numbers below 0, or not finite",
        ),
    ],
)
def test_losses_and_masks_that_are_refused(losses, valid, error, message):
    with pytest.raises(error, match=message):
        GivenLosses(losses, valid)


@pytest.mark.parametrize(
    ("total", "error", "message"),
    [
        (0, ValueError, "`total` must be finite and above 0, got 0"),
        (-2.5, ValueError, "got -2.5"),
        (math.nan, ValueError, "got nan"),
        (math.inf, ValueError, "got inf"),
        (torch.tensor(0), ValueError, "got 0"),
        (torch.tensor(-1.0), ValueError, "got -1"),
        (
            torch.tensor([3]),
            ValueError,
            r"a tensor of shape \(\) without gradient, got torch.int64 of shape \(1,\)",
        ),
        (torch.tensor(True), ValueError, "got torch.bool"),
        (torch.tensor(3.0, requires_grad=True), ValueError, "with gradient"),
        (torch.tensor(3, device="meta"), ValueError, "is on meta.*would wait"),
        (True, TypeError, "got bool"),
        ("3", TypeError, "got str"),
    ],
)
def test_totals_that_are_refused(total, error, message):
    with pytest.raises(error, match=message):
        GivenLosses(LOSSES, None, total)


@pytest.mark.parametrize(
    "total", [4, 4.0, torch.tensor(4), torch.tensor(4.0), np.int64(4), np.float32(4)]
)
def test_totals_of_all_kinds(total):
    assert GivenLosses(LOSSES, None, total).value(RowLayout(2)).item() == 1.5


def test_what_only_a_device_could_tell_is_never_read():
    """Tensors of the device "meta" have no values: reading one would be an error."""
    losses, mask = torch.ones(2, 3, device="meta"), torch.ones(2, 3, device="meta")
    given = GivenLosses(losses, mask, torch.ones((), device="meta"))
    chosen = torch.zeros(1, dtype=torch.int64, device="meta")
    assert given.value(RowLayout(2), torch.ones(1, device="meta"), chosen).shape == ()
    assert given.means(RowLayout(2)).shape == (2,)


def test_what_a_device_finds_wrong_makes_the_value_nan():
    given = GivenLosses(LOSSES, torch.ones(3), 4)
    given._on_device.append(torch.tensor(True))
    assert given.value(RowLayout(2)).item() == given.plain().item() == 1.5
    given._on_device.append(torch.tensor(False))
    assert given.value(RowLayout(2)).isnan() and given.plain().isnan()
