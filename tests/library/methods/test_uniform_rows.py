"""A uniform share of each batch, as of a stream: how many rows, and which."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_same
from thresher import UniformRows
from thresher.methods.contract import BatchMethod


def chosen_rows(method: UniformRows, sizes: list[int], seed: int = 0) -> list[torch.Tensor]:
    state, found = method.init_state(), []
    for step, n in enumerate(sizes):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        plan, state = method.plan_batch(
            {"id": torch.arange(n)}, state, step=step, generator=generator
        )
        found.append(plan.rows)
    return found


@st.composite
def streams(draw: st.DrawFn) -> tuple[float, int, int, list[int]]:
    """A share of at least `least` rows a batch, the batch size, `least`, and the sizes of the batches of some epochs."""
    least = draw(st.integers(1, 2))
    size = draw(st.integers(least, 40))
    share = draw(st.integers(-(-1000 * least // size), 1000)) / 1000
    epoch = [size] * draw(st.integers(0, 12)) + draw(st.lists(st.integers(1, size), max_size=1))
    return share, size, least, epoch * draw(st.integers(1, 5))


@given(streams())
def test_the_share_is_carried_from_batch_to_batch(stream):
    share, size, least, sizes = stream
    rows = [len(chosen) for chosen in chosen_rows(UniformRows(share, least), sizes)]
    full = [k for k, n in zip(rows, sizes, strict=True) if n == size]
    smaller = len(sizes) - len(full)
    assert all(share * size - 1 < k < share * size + 1 and k >= least for k in full)
    assert all(min(least, n) <= k <= n for k, n in zip(rows, sizes, strict=True))
    assert -1 < sum(rows) - share * sum(sizes) <= 1 + least * smaller
    if share * size == int(share * size):
        assert set(full) <= {int(share * size)}


def test_what_a_small_batch_had_too_much_is_made_up_for():
    rows = [len(chosen) for chosen in chosen_rows(UniformRows(0.25), [6, 6, 6, 1] * 4)]
    assert rows == [1, 2, 1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1] and sum(rows) == 0.25 * 76


@given(st.integers(1, 30), st.integers(1, 100), st.integers(0, 9))
def test_rows_are_ascending_and_distinct_and_the_state_is_not_changed(n, hundredths, seed):
    kept = -(-7 * hundredths // 100)
    method, state = UniformRows(hundredths / 100), {"seen": 7, "kept": kept}
    answers = [
        method.plan_batch(
            {"id": torch.arange(n) + 5},
            state,
            step=3,
            generator=torch.Generator().manual_seed(seed),
        )
        for _ in range(2)
    ]
    (plan, after), (again, _) = answers
    rows = plan.rows.tolist()
    assert rows == sorted(set(rows)) and rows[0] >= 0 and rows[-1] < n
    assert state == {"seen": 7, "kept": kept} and after == {"seen": 7 + n, "kept": kept + len(rows)}
    assert_same(plan.rows, again.rows)


def test_each_row_is_drawn_equally_often():
    drawn = torch.zeros(8)
    for seed in range(500):
        for rows in chosen_rows(UniformRows(0.25), [8], seed):
            drawn[rows] += 1
    assert drawn.sum() == 1000 and ((drawn - 125).abs() < 4 * (500 * 0.25 * 0.75) ** 0.5).all()


def test_it_is_a_batch_method():
    method = UniformRows(0.5)
    assert isinstance(method, BatchMethod) and method.stage == "batch" and method.count(8) is None


def test_a_least_number_below_1_is_refused():
    with pytest.raises(ValueError, match="`least` is a number of rows, 1 or more, got 0"):
        UniformRows(0.5, least=0)
