"""An epoch as arrays: batches, their ends, what a plan keeps of an order, and the rows of each process."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import depth
from thresher import EpochPlan
from thresher.loading.epoch import ComposedEpoch, Epoch, choose, ends_of_rank, pad
from thresher.loading.epoch_batches import OrderedBatches
from thresher.loading.packed_plan import PackedPlan
from thresher.samplers.epochs import cut

hard = settings(max_examples=depth(60, 400))


@given(st.integers(1, 40), st.integers(1, 12), st.booleans(), st.integers(0, 3))
def test_batches_are_those_of_torch(n, size, drop_last, first):
    ids = np.random.default_rng(n).permutation(n)
    expected = [*torch.utils.data.BatchSampler(ids.tolist(), size, drop_last)]
    epoch = Epoch(ids, cut(n, size, drop_last=drop_last))
    assert len(epoch) == len(expected)
    rows = int(epoch.ends[min(first, len(epoch))])
    found = OrderedBatches(lambda: epoch, size=size, candidates=n, rows=rows).ids()
    assert [one.tolist() for one in found] == expected[first:]


@given(st.integers(1, 40), st.integers(1, 12), st.booleans(), st.integers(0, 12))
def test_the_end_of_the_ids_is_met_where_torch_meets_it(n, size, drop_last, taken):
    """RandomSampler draws a second permutation there, from the generator of the user."""

    def count(batches):
        for _ in range(taken):
            next(batches, None)
        return len(ends)

    ends = []

    def ids():
        yield from range(n)
        ends.append(1)

    expected = count(iter(torch.utils.data.BatchSampler(ids(), size, drop_last)))  # pyright: ignore
    ends.clear()
    layout = cut(n, size, drop_last=drop_last)
    epoch = Epoch(np.arange(n), layout, finish=lambda: ends.append(1))
    batches = OrderedBatches(lambda: epoch, size=size, candidates=n)
    assert count(batches.ids()) == expected
    batches.finish()
    batches.finish()
    assert len(ends) == (taken > 0)


def test_a_last_batch_of_too_few_rows_is_left_out():
    assert cut(9, 4, least=2).tolist() == [0, 4, 8]
    assert cut(10, 4, least=2).tolist() == [0, 4, 8, 10]


def opened(ids, rows):
    epoch = Epoch(np.array(ids), cut(len(ids), 2))
    batches = OrderedBatches(lambda: epoch, size=2, candidates=len(ids), rows=rows)
    batches.open()
    return batches


def test_a_position_is_between_two_batches():
    assert [opened(range(5), rows).left for rows in (0, 2, 4, 5)] == [None, 3, 1, 0]
    for rows in (3, 6):
        with pytest.raises(
            ValueError, match=f"trained on {rows} rows in each process, after which"
        ):
            opened(range(5), rows)


def test_checksums_of_equal_beginnings_are_equal():
    one = [4, 2, 0, 1, 3, 5]
    other = [4, 2, 0, 1, 5, 3]
    assert opened(one, 4).checksum == opened(other, 4).checksum
    assert opened(one, 6).checksum != opened(other, 6).checksum


@hard
@given(st.data(), st.integers(1, 200))
def test_what_a_plan_keeps_has_the_order_of_the_sampler(data, n):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    order = np.random.default_rng(n).permutation(n)
    plan = PackedPlan.of(EpochPlan(torch.from_numpy(np.flatnonzero(mask))), n)
    kept = [*choose(lambda begin, end: order[begin:end], n, plan)]
    assert np.concatenate(kept).tolist() == order[mask[order]].tolist()


@hard
@given(st.integers(1, 60), st.integers(1, 7), st.booleans(), st.integers(1, 9))
def test_rows_are_those_of_a_distributed_sampler(n, size, drop_last, piece):
    order = np.random.default_rng(n).permutation(100)[:n]
    pieces = [order[begin : begin + piece] for begin in range(0, n, piece)]
    rows = pad(n, size, drop_last=drop_last)
    for rank in range(size):
        own = ComposedEpoch(pieces, n, np.array([0, rows]), by_rows=True).deal(rank, size)
        sampler = torch.utils.data.DistributedSampler(
            order,  # pyright: ignore[reportArgumentType]
            size,
            rank,
            shuffle=False,
            drop_last=drop_last,
        )
        expected = order[list(sampler)].tolist() if not drop_last or n >= size else []
        assert own.tolist() == expected


@hard
@given(
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 9),
)
def test_batches_are_dealt_as_by_accelerate(total, size, batch, drop_last, piece):
    """Batch number s * W + r is step s of rank r."""
    unit = size * batch
    steps = total // unit if drop_last else -(-total // unit)
    whole = [100 + place % total for place in range(steps * unit)]
    order = np.arange(100, 100 + total)
    pieces = [order[begin : begin + piece] for begin in range(0, total, piece)]
    ends = np.arange(steps * size + 1) * batch
    for rank in range(size):
        own = [
            whole[(step * size + rank) * batch + row]
            for step in range(steps)
            for row in range(batch)
        ]
        found = ComposedEpoch(pieces, total, ends, by_rows=False).deal(rank, size)
        assert found.tolist() == own


@hard
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_batches_of_any_sizes_are_dealt_whole(total, size, piece, seed):
    generator = np.random.default_rng(seed)
    inner = generator.choice(total, generator.integers(total), replace=False)
    ends = np.unique(np.concatenate([[0], inner, [total]]))
    order = generator.permutation(total)
    pieces = [order[begin : begin + piece] for begin in range(0, total, piece)]
    batches = np.split(order, ends[1:-1])
    for rank in range(size):
        found = ComposedEpoch(pieces, total, ends, by_rows=False).deal(rank, size)
        own = batches[rank::size]
        assert found.tolist() == [row for batch in own for row in batch.tolist()]
        sizes = np.diff(ends_of_rank(ends, rank, size, by_rows=False))
        assert sizes.tolist() == [*map(len, own)]
