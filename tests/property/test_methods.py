"""Properties of every epoch method, on records that hypothesis makes up."""

import copy
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from depth import depth
from thresher import EpochPlan, FullData, InfoBatch, Kakurenbo, UniformSubset
from thresher.records import Records

CPU = torch.device("cpu")
hard = settings(max_examples=depth(50, 200))

tied = st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0, math.nan, math.inf, -math.inf])
loss = st.one_of(tied, st.floats(0, 100, width=32))
confidence = st.one_of(
    st.sampled_from([0.0, 0.7, 1.0, float(np.float32(0.7))]), st.floats(0, 1, width=32)
)
sample = st.tuples(loss, st.booleans(), confidence)
samples = st.lists(sample, min_size=1, max_size=40)
hundredths = st.integers(0, 99)
epochs = st.integers(1, 100)


def distinct(n: int) -> st.SearchStrategy[list[Any]]:
    values = st.lists(st.integers(0, 10**6), min_size=n, max_size=40, unique=True)
    return values.flatmap(
        lambda v: st.tuples(
            *(st.tuples(st.just(x / 1000), st.booleans(), confidence) for x in v)
        ).map(list)
    )


def records_of(method: Any, rows: list[tuple[float, bool, float]]) -> Records:
    records = Records(method.columns(), len(rows), CPU)
    for name, values in zip(
        ("loss", "correct", "confidence"), zip(*rows, strict=True), strict=True
    ):
        if name in records:
            records[name].copy_(torch.tensor(values))
    return records


def plan_of(method: Any, rows: Any, epoch: int = 1, of: int = 100, seed: int = 0) -> EpochPlan:
    return method.plan_epoch(
        records_of(method, rows),
        epoch=epoch,
        epochs=of,
        generator=torch.Generator().manual_seed(seed),
    )


def left_out(plan: EpochPlan, n: int) -> set[int]:
    return set(range(n)) - set(plan.ids.tolist())


METHODS = [
    FullData(),
    UniformSubset(0.7),
    UniformSubset(0.01),
    Kakurenbo(),
    Kakurenbo(0.29, move_back=False, reduce_fraction=False, first_epoch_hides=True),
    Kakurenbo(0.5, merge="sum", lr_fraction="scheduled", drop_top=0.07, warmup_epochs=2),
    Kakurenbo(0.999, tau=0.0),
    InfoBatch(),
    InfoBatch(0.9, 1.0, 0.8, "ratio"),
]


def short(method: Any) -> str:
    """The settings that are not the default's, as a test id."""
    default = type(method)()
    changed = [
        f"{name}={value}" for name, value in vars(method).items() if value != getattr(default, name)
    ]
    return "-".join([type(method).__name__, *changed])


roster = pytest.mark.parametrize("method", METHODS, ids=short)


@roster
@hard
@given(rows=samples, epoch=st.integers(0, 99), seed=st.integers(0, 2**62))
def test_a_plan_is_valid_and_depends_on_its_arguments_alone(
    method: Any, rows: Any, epoch: int, seed: int
) -> None:
    n, plan = len(rows), plan_of(method, rows, epoch, seed=seed)
    plan.check(n)
    again = plan_of(copy.deepcopy(method), rows, epoch, seed=seed)
    for mine, other in (
        (plan.ids, again.ids),
        (plan.weights, again.weights),
        (plan.refresh, again.refresh),
    ):
        assert (mine is None) == (other is None)
        assert mine is None or (other is not None and torch.equal(mine, other))
    assert (plan.lr_scale, dict(plan.facts)) == (again.lr_scale, dict(again.facts))
    if plan.weights is not None:
        assert bool((plan.weights >= 1).all())


@roster
@hard
@given(rows=samples, epoch=st.integers(0, 99))
def test_samples_without_a_finite_loss_are_never_chosen_against(
    method: Any, rows: Any, epoch: int
) -> None:
    if isinstance(method, UniformSubset):
        return  # looks at no loss
    bad = {i for i, row in enumerate(rows) if not math.isfinite(row[0])}
    assert bad.isdisjoint(left_out(plan_of(method, rows, epoch), len(rows)))


@hard
@given(
    rows=samples,
    percent=hundredths,
    epoch=st.integers(0, 99),
    tau=st.sampled_from([0.0, 0.5, 0.7, 1.0]),
)
def test_kakurenbo_leaves_out_at_most_the_share_and_refreshes_what_it_leaves_out(
    rows: Any, percent: int, epoch: int, tau: float
) -> None:
    n = len(rows)
    plan = plan_of(Kakurenbo(percent / 100, tau, reduce_fraction=False), rows, epoch)
    refreshed = set() if plan.refresh is None else set(plan.refresh.tolist())
    assert refreshed == left_out(plan, n)
    assert len(refreshed) <= math.floor(Fraction(percent, 100) * n)
    for i in refreshed:
        value, right, sure = rows[i]
        assert math.isfinite(value) and right and np.float32(sure) >= np.float32(tau)
    assert plan.lr_scale == n / (n - len(refreshed))


@hard
@given(rows=samples, percent=st.integers(1, 99))
def test_without_moving_back_the_share_is_met(rows: Any, percent: int) -> None:
    finite = sum(math.isfinite(row[0]) for row in rows)
    wanted = min(math.floor(Fraction(percent, 100) * len(rows)), finite)
    assume(wanted < len(rows))
    plan = plan_of(Kakurenbo(percent / 100, move_back=False, reduce_fraction=False), rows)
    assert len(left_out(plan, len(rows))) == wanted


@hard
@given(rows=samples, low=hundredths, high=hundredths)
def test_a_larger_share_hides_the_same_samples_and_more(rows: Any, low: int, high: int) -> None:
    low, high = sorted((low, high))
    fewer, more = (left_out(plan_of(Kakurenbo(p / 100), rows), len(rows)) for p in (low, high))
    assert fewer <= more


@hard
@given(rows=samples, percent=hundredths, low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_higher_tau_hides_fewer(rows: Any, percent: int, low: float, high: float) -> None:
    low, high = sorted((low, high))
    more, fewer = (
        left_out(plan_of(Kakurenbo(percent / 100, tau), rows), len(rows)) for tau in (low, high)
    )
    assert fewer <= more


@hard
@given(
    rows=samples,
    data=st.data(),
    percent=hundredths,
    candidates=st.sampled_from(["sort", "threshold"]),
)
def test_raising_one_loss_never_hides_that_sample(
    rows: Any, data: Any, percent: int, candidates: Any
) -> None:
    method, n = Kakurenbo(percent / 100, candidates=candidates, tau=0.5), len(rows)
    rows = [
        (0.0 if i == 0 else value, i > 0 or right, sure)
        for i, (value, right, sure) in enumerate(rows)
    ]
    rows[0] = (
        rows[0][0],
        False,
        0.0,
    )  # one sample is never hidden, so that an epoch is never empty
    which = data.draw(st.integers(0, n - 1))
    value, right, sure = rows[which]
    raised = data.draw(
        st.one_of(st.sampled_from([math.inf, math.nan]), st.floats(0, 1000, width=32))
    )
    assume(math.isfinite(value) and not raised < value)
    before = which in left_out(plan_of(method, rows), n)
    rows[which] = (raised, right, sure)
    after = which in left_out(plan_of(method, rows), n)
    # By the published threshold everything is a candidate where the count is 0: raising cannot add to that either.
    assert before or not after


@pytest.mark.parametrize(
    "method",
    [
        FullData(),
        Kakurenbo(0.4),
        Kakurenbo(0.29, move_back=False),
        Kakurenbo(0.3, candidates="threshold", tau=0.3),
        Kakurenbo(0.4, drop_top=0.1),
    ],
    ids=short,
)
@hard
@given(rows=distinct(2), data=st.data())
def test_permuting_the_samples_permutes_the_answer(method: Any, rows: Any, data: Any) -> None:
    n = len(rows)
    rows[0] = (rows[0][0], False, 0.0)
    order = data.draw(st.permutations(range(n)))
    out = left_out(plan_of(method, rows), n)
    permuted = left_out(plan_of(method, [rows[i] for i in order]), n)
    assert {order[i] for i in permuted} == out


@hard
@given(
    rows=distinct(2),
    data=st.data(),
    percent=st.integers(0, 99),
    quantile=st.one_of(st.none(), st.integers(1, 99)),
)
def test_permuting_the_samples_permutes_whom_infobatch_may_prune(
    rows: Any, data: Any, percent: int, quantile: Any
) -> None:
    """The draw is by position; counts, weights and who is above the cut go with the samples."""
    method = InfoBatch(percent / 100, threshold="mean" if quantile is None else quantile / 100)
    order = data.draw(st.permutations(range(len(rows))))
    plans = [plan_of(method, rows), plan_of(method, [rows[i] for i in order])]
    assert len(plans[0].ids) == len(plans[1].ids)
    if plans[0].weights is None:
        assert plans[1].weights is None
        return
    above = []
    for plan, back in zip(plans, (range(len(rows)), order), strict=True):
        assert plan.weights is not None
        above.append(
            {
                back[i]
                for i, weight in zip(plan.ids.tolist(), plan.weights.tolist(), strict=True)
                if weight == 1
            }
        )
    assert above[0] == above[1]
    assert sorted(plans[0].weights.tolist()) == sorted(plans[1].weights.tolist())


@hard
@given(rows=samples, percent=hundredths, seed=st.integers(0, 1000))
def test_infobatch_keeps_the_total_weight_and_prunes_at_most_the_share(
    rows: Any, percent: int, seed: int
) -> None:
    n, plan = len(rows), plan_of(InfoBatch(percent / 100), rows, seed=seed)
    if plan.weights is None:
        assert len(plan.ids) == n
        return
    assert plan.weights.double().sum().item() == pytest.approx(n, rel=1e-6)
    heavy = plan.weights[plan.weights > 1]
    below = n - (len(plan.ids) - len(heavy))
    assert len(heavy) == max(1, math.floor((1 - Fraction(percent, 100)) * below))


@hard
@given(n=st.integers(1, 300), percent=st.integers(1, 100), seed=st.integers(0, 1000))
def test_a_uniform_subset_has_its_share(n: int, percent: int, seed: int) -> None:
    plan = plan_of(UniformSubset(percent / 100), [(0.0, False, 0.0)] * n, seed=seed)
    assert len(plan.ids) == max(1, math.floor(Fraction(percent, 100) * n))
    assert plan.weights is None and plan.refresh is None and plan.lr_scale == 1
