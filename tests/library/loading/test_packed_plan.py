"""A plan with bits in place of ids: nothing of it is lost, values are found without ids, and damaged states are refused."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thresher import EpochPlan
from thresher.loading.packed_plan import PackedPlan, count, pack, unpack
from thresher.selection import CHUNK, ids_of
from thresher.trees import differing_part


@given(st.data(), st.integers(1, 300))
def test_ids_are_packed_and_counted(data, n):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    ids = np.flatnonzero(mask)
    bits = pack(ids, n)
    assert bits.tolist() == np.packbits(mask, bitorder="little").tolist()
    assert count(torch.from_numpy(bits)) == mask.sum() and unpack(bits).tolist() == ids.tolist()


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, 2 * CHUNK + 13])
def test_many_ids_are_packed_in_pieces(n):
    ids = np.flatnonzero(np.random.default_rng(n).random(n) < 0.3)
    assert unpack(pack(ids, n)).tolist() == ids.tolist()


@given(st.data(), st.integers(1, 100), st.booleans())
def test_a_plan_comes_back(data, n, valued):
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    ids = torch.from_numpy(np.flatnonzero(kept))
    plan = EpochPlan(
        ids,
        weights=torch.rand(len(ids)) if valued else None,
        refresh=torch.from_numpy(np.flatnonzero(~kept)[::2]) if valued else None,
        lr_scale=1.5,
        facts={"fraction": 0.5},
        smaller_batches=True,
        note="a note",
    )
    held = PackedPlan.of(plan, n)
    assert held.ids.dtype == torch.uint8 and len(held.ids) == -(-n // 8) and held.rows == len(ids)
    assert held.everything == kept.all() and held.refreshed == (
        0 if plan.refresh is None else len(plan.refresh)
    )
    assert differing_part(held.unpacked(), plan) is None
    again = PackedPlan(**held.state_dict())
    assert differing_part(again.unpacked(), plan) is None
    assert again.keeps(np.arange(n)).tolist() == kept.tolist()
    found = again.weights_by_id()
    assert (found is None) == (not valued)
    assert found is None or torch.equal(found[ids], plan.weights)


@given(st.integers(1, 5), st.integers(0, 30))
def test_processes_refresh_equal_parts(size, refreshed):
    refresh = torch.arange(refreshed) * 2 + 1
    held = PackedPlan.of(EpochPlan(torch.arange(61)[::2], refresh=refresh), 61)
    parts = [held.refresh_ids(rank, size) for rank in range(size)]
    assert torch.cat(parts).tolist() == refresh.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ids_that_were_drawn_stay_ids():
    plan = EpochPlan(
        torch.tensor([4, 1, 4]),
        weights=torch.tensor([2.0, 1, 2]),
        refresh=torch.tensor([0, 3]),
        drawn=True,
    )
    held = PackedPlan.of(plan, 5)
    assert held.ids is plan.ids and held.rows == 3 and not held.everything
    assert differing_part(held.unpacked(), plan) is None
    found = held.weights_by_id()
    assert found is not None and found[torch.tensor([1, 4])].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", ["ids", "refresh"])
@pytest.mark.parametrize("bits", [torch.tensor([3, 0], dtype=torch.uint8), torch.tensor([1, 2])])
def test_other_numbers_of_bits_are_refused(name, bits):
    held = PackedPlan.of(EpochPlan(torch.tensor([1, 3])), 5)
    with pytest.raises(
        ValueError,
        match=f"`{name}` must be one bit for each of 5 samples, a torch.uint8 tensor of shape",
    ):
        replace(held, **{name: bits})


def test_what_is_held_of_a_plan():
    """A quarter of a byte per sample; ids would take eight."""
    n = 1_000_000
    hidden = np.random.default_rng(0).random(n) < 0.3
    plan = EpochPlan(ids_of(~hidden), refresh=ids_of(hidden))
    tracemalloc.start()
    held = PackedPlan.of(plan, n)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size <= 0.3 * n and peak <= n
    assert held.refreshed == hidden.sum() and np.array_equal(
        held.refresh_ids(), np.flatnonzero(hidden)
    )
