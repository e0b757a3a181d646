"""A plan with bits in place of ids: nothing of it is lost, values are found without ids, and damaged states are refused."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thresher import EpochPlan
from thresher.loading.held_plan import HeldPlan
from thresher.selection import ids_of
from thresher.testing.check import comparable_plan


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
    held = HeldPlan.of(plan, n)
    assert held.ids.dtype == torch.uint8 and len(held.ids) == -(-n // 8) and held.rows == len(ids)
    assert held.everything == kept.all() and held.refreshed == (
        0 if plan.refresh is None else len(plan.refresh)
    )
    assert comparable_plan(held.plan()) == comparable_plan(plan)
    again = HeldPlan(**held.state_dict())
    assert comparable_plan(again.plan()) == comparable_plan(plan)
    assert again.keeps(np.arange(n)).tolist() == kept.tolist()
    some = np.flatnonzero(kept)[::-2].copy()
    found = again.weights_of(some)
    assert (found is None) == (not valued)
    assert (
        found is None
        or plan.weights is None
        or torch.equal(found, plan.weights[np.searchsorted(ids.numpy(), some)])
    )


@given(st.integers(1, 5), st.integers(0, 30))
def test_processes_refresh_equal_parts(size, refreshed):
    refresh = torch.arange(refreshed) * 2 + 1
    held = HeldPlan.of(EpochPlan(torch.arange(61)[::2], refresh=refresh), 61)
    parts = [held.refreshing(rank, size)(0, 61) for rank in range(size)]
    assert np.concatenate(parts).tolist() == refresh.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert held.refreshing(0, size)(1, 2).tolist() == parts[0][1:2].tolist()


def test_ids_that_were_drawn_stay_ids():
    plan = EpochPlan(
        torch.tensor([4, 1, 4]),
        weights=torch.tensor([2.0, 1, 2]),
        refresh=torch.tensor([0, 3]),
        drawn=True,
    )
    held = HeldPlan.of(plan, 5)
    assert held.ids is plan.ids and held.rows == 3 and not held.everything
    assert comparable_plan(held.plan()) == comparable_plan(plan)
    assert held.weights_of(np.array([1, 4])).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", ["ids", "refresh"])
@pytest.mark.parametrize("bits", [torch.tensor([3, 0], dtype=torch.uint8), torch.tensor([1, 2])])
def test_other_numbers_of_bits_are_refused(name, bits):
    held = HeldPlan.of(EpochPlan(torch.tensor([1, 3])), 5)
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
    held = HeldPlan.of(plan, n)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size <= 0.3 * n and peak <= n
    assert held.refreshed == hidden.sum() and np.array_equal(
        held.refreshing()(0, n), np.flatnonzero(hidden)
    )
