"""The walk over the autograd graph: operations that can move rows, between what the model returned and the criterion."""

import pytest
import torch

from thresher.attribution.autograd import MOST_OPERATIONS, moves_rows, reordered_by

ORDER = torch.tensor([2, 0, 1])


@pytest.fixture
def returned():
    return torch.arange(6.0).reshape(3, 2).requires_grad_() * 1.0


def walk(outputs, *returned):
    return reordered_by(outputs, {tensor.grad_fn._sequence_nr() for tensor in returned})


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda t: t[ORDER], "Index"),
        (lambda t: t.index_select(0, ORDER), "IndexSelect"),
        (lambda t: t.index_select(-2, ORDER), "IndexSelect"),
        (lambda t: t.gather(0, ORDER.unsqueeze(1).expand(-1, 2)), "Gather"),
        (lambda t: t.sort(0).values, "Sort"),
        (lambda t: t.flip(-2), "Flip"),
        (lambda t: t.flip((1, 0)), "Flip"),
        (lambda t: t.roll(1, 0), "Roll"),
        (lambda t: t.roll(1), "Roll"),
        (lambda t: t.take(torch.tensor([5, 0])), "Take"),
        (lambda t: t.masked_select(torch.tensor([[True, False]])), "MaskedSelect"),
    ],
)
def test_operations_that_can_move_rows(returned, operation, name):
    """Also where others stand before and after them."""
    assert walk(operation(returned.sigmoid() + 1) * 2, returned).startswith(name)


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t[torch.arange(3)],
        lambda t: t[:, [1, 0]],
        lambda t: t.index_select(1, torch.tensor([1, 0])),
        lambda t: t.gather(1, torch.zeros(3, 1, dtype=torch.int64)),
        lambda t: t.sort(1).values,
        lambda t: t.flip(1),
        lambda t: t.roll(1, -1),
        lambda t: t.reshape(-1).sigmoid(),
    ],
)
def test_operations_that_keep_rows_in_their_order(returned, operation):
    assert walk(operation(returned), returned) is None
    assert not moves_rows(operation(returned).grad_fn)


def test_what_happened_before_the_model_returned_does_not_count(returned):
    assert walk(returned[ORDER] * 1.0, returned[ORDER]) is None


def test_a_tensor_that_is_not_connected():
    other = torch.ones(3, 2, requires_grad=True)[ORDER]
    later = torch.ones(3, 2, requires_grad=True) * 1.0
    assert walk(other, later) is None
    assert reordered_by(other, set()) is None
    assert reordered_by(torch.ones(3), {1}) is None


def test_the_walk_ends(returned):
    outputs = returned[ORDER]
    for _ in range(MOST_OPERATIONS):
        outputs = outputs + 1
    assert walk(outputs, returned) is None
