"""Properties of every batch method, on batches that hypothesis makes up."""

import io
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import depth
from thresher import AdaSelection, BatchPlan, RandomBackprop, SelectiveBackprop
from thresher.methods.selective_backprop import percentile

hard = settings(max_examples=depth(30, 100))

tied = st.sampled_from([0.0, -0.0, 0.1, 0.25, 1.0, 3.0, math.nan, math.inf, -math.inf])
loss = st.one_of(tied, st.floats(width=32))
ids = st.integers(0, 2**62)
batch = st.lists(st.tuples(ids, loss), min_size=1, max_size=24, unique_by=lambda row: row[0])
stream = st.lists(batch, min_size=1, max_size=4)
seeds = st.integers(0, 2**62)

METHODS = [
    RandomBackprop(),
    RandomBackprop(0.01),
    SelectiveBackprop(),
    SelectiveBackprop(0.29),
    SelectiveBackprop(1.0),
    SelectiveBackprop(beta=0.43, history=5),
    SelectiveBackprop(beta=2.0, min_probability=0.25, warmup_steps=1),
    AdaSelection(0.29),
    AdaSelection.variant("literal"),
]
roster = pytest.mark.parametrize("method", METHODS, ids=str)


def signals_of(rows: list[tuple[int, float]]) -> dict[str, torch.Tensor]:
    numbers, values = zip(*rows, strict=True)
    return {"id": torch.tensor(numbers), "loss": torch.tensor(values, dtype=torch.float32)}


def plans_of(
    method: Any, batches: Any, seed: int = 0, state: Any = None
) -> tuple[list[BatchPlan], Any]:
    state, plans, generator = (
        method.init_state() if state is None else state,
        [],
        torch.Generator().manual_seed(seed),
    )
    for step, rows in enumerate(batches):
        plan, state = method.plan_batch(signals_of(rows), state, step=step, generator=generator)
        plans.append(plan)
    return plans, state


def same(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(
        torch.equal(a[name].nan_to_num(-1), b[name].nan_to_num(-1)) for name in a
    )


@roster
@hard
@given(batches=stream, seed=seeds)
def test_rows_are_ascending_and_within_the_batch(method: Any, batches: Any, seed: int) -> None:
    for plan, rows in zip(plans_of(method, batches, seed)[0], batches, strict=True):
        found = plan.rows.tolist()
        assert found == sorted(set(found))
        assert set(found) <= set(range(len(rows)))
        assert plan.rows.dtype == torch.int64


@roster
@hard
@given(batches=stream, seed=seeds)
def test_the_seed_decides_and_nothing_else_is_drawn_from(
    method: Any, batches: Any, seed: int
) -> None:
    before = torch.get_rng_state()
    (first, state), (again, other) = (
        plans_of(method, batches, seed),
        plans_of(method, batches, seed),
    )
    assert [plan.rows.tolist() for plan in first] == [plan.rows.tolist() for plan in again]
    assert same(state, other)
    assert torch.equal(torch.get_rng_state(), before)


@roster
@hard
@given(batches=stream, data=st.data(), seed=seeds)
def test_permuting_the_rows_permutes_the_answer(
    method: Any, batches: Any, data: Any, seed: int
) -> None:
    permuted = [data.draw(st.permutations(rows)) for rows in batches]
    (plans, state), (others, after) = (
        plans_of(method, batches, seed),
        plans_of(method, permuted, seed),
    )
    for plan, other, rows, moved in zip(plans, others, batches, permuted, strict=True):
        assert {rows[row][0] for row in plan.rows.tolist()} == {
            moved[row][0] for row in other.rows.tolist()
        }
    assert same(state, after)


@roster
@hard
@given(batches=stream, more=batch, seed=seeds)
def test_a_saved_state_goes_on_the_same(method: Any, batches: Any, more: Any, seed: int) -> None:
    _, state = plans_of(method, batches, seed)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    (plans, after), (others, later) = (
        plans_of(method, [more, more], seed, start) for start in (state, loaded)
    )
    assert [plan.rows.tolist() for plan in plans] == [plan.rows.tolist() for plan in others]
    assert same(after, later)


@hard
@given(rows=batch, percent=st.integers(1, 100))
def test_a_fixed_share_is_met_exactly_and_nothing_left_out_is_larger(
    rows: Any, percent: int
) -> None:
    (plan,), _ = plans_of(SelectiveBackprop(percent / 100), [rows])
    assert len(plan.rows) == max(1, math.floor(Fraction(percent, 100) * len(rows)))
    place = [(value, i) if math.isfinite(value) else (math.inf, i) for i, value in rows]
    kept = set(plan.rows.tolist())
    assert min(place[row] for row in kept) > max(
        (place[row] for row in range(len(rows)) if row not in kept), default=(-math.inf,)
    )


@hard
@given(rows=batch, low=st.integers(1, 100), high=st.integers(1, 100))
def test_a_larger_share_keeps_the_same_rows_and_more(rows: Any, low: int, high: int) -> None:
    low, high = sorted((low, high))
    fewer, more = (
        set(plans_of(SelectiveBackprop(p / 100), [rows])[0][0].rows.tolist()) for p in (low, high)
    )
    assert fewer <= more


@hard
@given(batches=stream, low=st.floats(0, 5), high=st.floats(0, 5), seed=seeds)
def test_a_larger_beta_keeps_fewer(batches: Any, low: float, high: float, seed: int) -> None:
    low, high = sorted((low, high))
    many, few = (plans_of(SelectiveBackprop(beta=beta), batches, seed)[0] for beta in (low, high))
    for more, fewer in zip(many, few, strict=True):
        assert set(fewer.rows.tolist()) <= set(more.rows.tolist())


@hard
@given(batches=stream, size=st.integers(1, 30), beta=st.floats(0, 5), seed=seeds)
def test_the_history_is_as_long_as_told_and_losses_without_a_value_are_kept(
    batches: Any, size: int, beta: float, seed: int
) -> None:
    plans, state = plans_of(SelectiveBackprop(beta=beta, history=size), batches, seed)
    assert len(state["history"]) == min(size, sum(map(len, batches)))
    assert not bool(state["history"].isinf().any())
    for plan, rows in zip(plans, batches, strict=True):
        assert {row for row, (_, value) in enumerate(rows) if not math.isfinite(value)} <= set(
            plan.rows.tolist()
        )


@hard
@given(values=st.lists(loss, max_size=24), history=st.lists(loss, max_size=24))
def test_percentiles_rise_with_the_loss(values: list[float], history: list[float]) -> None:
    q = percentile(
        torch.tensor(values, dtype=torch.float32), torch.tensor(history, dtype=torch.float32)
    ).tolist()
    assert all(0 <= share <= 1 for share in q)
    finite = sorted(
        (value, share) for value, share in zip(values, q, strict=True) if math.isfinite(value)
    )
    assert [share for _, share in finite] == sorted(share for _, share in finite)


everyday = st.one_of(
    st.sampled_from([0.0, 0.25, 1.0, 3.0, math.nan]), st.floats(2**-20, 2**20, width=32)
)
everyday_stream = st.lists(
    st.lists(st.tuples(ids, everyday), min_size=1, max_size=24, unique_by=lambda row: row[0]),
    min_size=1,
    max_size=4,
)


@hard
@given(batches=everyday_stream, seed=seeds, power=st.integers(-30, 30))
def test_the_unit_of_the_loss_is_nothing_to_ada_selection(
    batches: Any, seed: int, power: int
) -> None:
    """By a power of two, with which nothing is rounded."""
    method = AdaSelection(
        0.4, pool=("big_loss", "small_loss", "uniform", "coreset_center", "coreset_extremes")
    )
    scaled = [[(number, value * 2.0**power) for number, value in rows] for rows in batches]
    for one, other in zip(
        plans_of(method, batches, seed)[0], plans_of(method, scaled, seed)[0], strict=True
    ):
        assert torch.equal(one.rows, other.rows)


@hard
@given(batches=everyday_stream, seed=seeds)
def test_weights_of_ada_selection_are_shares(batches: Any, seed: int) -> None:
    method = AdaSelection(0.4, beta=1.0)
    said = method.report(plans_of(method, batches, seed)[1])
    assert 0 <= said.pop("random_share") <= 1
    assert sum(said.values()) == pytest.approx(1, abs=1e-5) and min(said.values()) >= 0
