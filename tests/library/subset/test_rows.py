import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import depth
from thresher.subset.graphs import Layout, Taker


@st.composite
def cases(draw):
    """A tensor made of one block a sample, its layout, and some rows."""
    n = draw(st.integers(1, 7))
    per, inner = draw(st.sampled_from([1, 2, 3])), draw(st.booleans())
    before, after = (
        draw(st.lists(st.integers(1, 3), max_size=2)),
        draw(st.lists(st.integers(0, 3), max_size=2)),
    )
    layout = Layout(len(before), per, inner and per > 1)
    drawing = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    blocks = torch.randint(-1, 2, (n, per, *before, *after), generator=drawing).double()
    rows = torch.tensor(sorted(draw(st.sets(st.integers(0, n - 1)))), dtype=torch.int64)
    return n, layout, blocks, rows


def join(blocks, layout):
    """The tensor whose sample i is blocks[i], by plain concatenation."""
    if not len(blocks):
        shape = list(blocks.shape[2:])
        return blocks.new_zeros((*shape[: layout.axis], 0, *shape[layout.axis :]))
    order = (
        [(i, j) for j in range(blocks.shape[1]) for i in range(len(blocks))]
        if layout.inner
        else None
    )
    order = order or [(i, j) for i in range(len(blocks)) for j in range(blocks.shape[1])]
    return torch.stack([blocks[i, j] for i, j in order], layout.axis)


@given(cases())
@settings(max_examples=depth(60, 200))
def test_rows_are_taken_put_and_looked_at_as_by_hand(case) -> None:
    n, layout, blocks, rows = case
    whole = join(blocks, layout)
    some = layout.take(whole, rows, n)
    assert torch.equal(some, join(blocks[rows], layout))
    if len(rows):
        emptied = torch.zeros_like(blocks)
        emptied[rows] = blocks[rows]
        assert torch.equal(layout.put(some, rows, n), join(emptied, layout))
    assert torch.equal(
        layout.carries(whole, n), (blocks != 0).reshape(n, -1 if blocks.numel() else 0).any(1)
    )
    labels = torch.arange(n).view(n, *[1] * (blocks.dim() - 1)).expand_as(blocks)
    assert torch.equal(layout.labels(whole, n), join(labels, layout))
    if layout.axis == 0:
        taker = Taker(rows, n)
        for _ in range(2):
            assert torch.equal(taker(whole, layout), join(blocks[rows], layout))


@given(cases(), st.integers(0, 3))
@settings(max_examples=depth(40, 100))
def test_memory_that_is_not_in_the_order_of_dimensions(case, at) -> None:
    n, layout, blocks, rows = case
    whole = join(blocks, layout)
    moved = whole.movedim(layout.axis, -1).contiguous().movedim(-1, layout.axis)
    spaced = torch.stack([whole, whole], -1)[..., at % 2]
    for value in (moved, spaced):
        assert torch.equal(layout.take(value, rows, n), join(blocks[rows], layout))
        assert torch.equal(Taker(rows, n)(value, layout), join(blocks[rows], layout))
        assert torch.equal(layout.carries(value, n), layout.carries(whole, n))


@pytest.mark.parametrize("layout", [Layout(0), Layout(0, 2), Layout(0, 2, inner=True)])
def test_an_expanded_tensor_stays_without_memory(layout) -> None:
    whole = torch.arange(3.0).expand(4 * layout.per, 3)
    some = layout.take(whole, torch.tensor([1, 3]), 4)
    assert some.shape == (2 * layout.per, 3) and some.stride(0) == 0
    assert torch.equal(some, whole[: 2 * layout.per])


@pytest.mark.parametrize("layout", [Layout(0), Layout(0, 2), Layout(1), Layout(1, 2, inner=True)])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_other_expanded_dimensions_stay_expanded(layout, at) -> None:
    """Strides are those of the whole, as attention kernels need them, and nothing is copied as often as it is shown."""
    sizes = [3, 3, 1, 2, 5]
    sizes[layout.axis], sizes[at] = 4 * layout.per, 1
    whole = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    sizes[at] = 7
    rows = torch.tensor([0, 2, 3])
    expected = layout.take(whole.expand(sizes).contiguous(), rows, 4)
    some = layout.take(whole.expand(sizes), rows, 4)
    assert (
        torch.equal(some, expected)
        and some.stride(at) == 0
        and some.untyped_storage().nbytes() * 7 == expected.nbytes
    )
    if layout == Layout(0):
        assert some.stride() == whole.expand(sizes).stride()


def test_the_memory_format_is_kept() -> None:
    rows = torch.tensor([0, 2, 3])
    whole = torch.randn(5, 4, 3, 2).to(memory_format=torch.channels_last)
    assert Layout(0).take(whole, rows, 5).is_contiguous(memory_format=torch.channels_last)
    time_major = torch.randn(3, 5, 4).transpose(0, 1)
    assert Layout(0).take(time_major, rows, 5).stride() == (4, 12, 1)
    assert torch.equal(Layout(0).take(time_major, rows, 5), time_major[rows])


def test_nan_and_infinity_carry() -> None:
    value = torch.zeros(4, 2)
    value[1, 0], value[2, 1] = torch.nan, torch.inf
    assert Layout(0).carries(value, 4).tolist() == [False, True, True, False]


def test_memory_shown_twice_is_taken_once() -> None:
    value = torch.arange(24.0).view(4, 3, 2)
    taker = Taker(torch.tensor([1, 2]), 4)
    a, b, c = (
        taker(value, Layout(0)),
        taker(value.view(12, 2), Layout(0, 3)),
        taker(value.view(4, 6), Layout(0)),
    )
    assert a.data_ptr() == b.data_ptr() == c.data_ptr()
    assert (
        torch.equal(a, value[1:3])
        and torch.equal(b, value.view(12, 2)[3:9])
        and torch.equal(c, value.view(4, 6)[1:3])
    )
    assert not torch.equal(taker(value.int(), Layout(0)), torch.zeros(2, 3, 2))
