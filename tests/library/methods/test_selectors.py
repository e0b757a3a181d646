"""The base selectors by hand; the whole of them is in tests/reference."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thresher import (
    AdaBoost,
    BatchPlan,
    BigLoss,
    CoresetCenter,
    CoresetExtremes,
    GradientNorm,
    SelectiveBackprop,
    SmallLoss,
)
from thresher.methods.ada_boost import HEADROOM, boost_weights
from thresher.methods.coreset_center import closeness
from thresher.methods.coreset_extremes import rank_distance
from thresher.rng import seeded

NAN, INF = math.nan, math.inf
KINDS = [BigLoss, SmallLoss, GradientNorm, AdaBoost, CoresetExtremes, CoresetCenter]
every = pytest.mark.parametrize("kind", KINDS)


def planned(method: Any, values: Any, ids: Any = None) -> BatchPlan:
    values = torch.as_tensor(values)
    ids = torch.arange(len(values)) if ids is None else torch.as_tensor(ids)
    plan, state = method.plan_batch(
        {"id": ids, method.requires.signals[0]: values}, {}, step=0, generator=seeded(0)
    )
    assert state == {}
    return plan


@every
def test_defaults(kind: Any) -> None:
    method = kind()
    assert method.keep == 0.5 and method.stage == "batch" and method.init_state() == {}
    assert method.requires.signals == (("grad_norm",) if kind is GradientNorm else ("loss",))
    assert method.card.bytes_per_sample == 0


@every
@pytest.mark.parametrize("keep", [0, -0.1, 1.01, NAN, "half", True])
def test_a_share_out_of_range(kind: Any, keep: Any) -> None:
    message = rf"^{kind.__name__}: `keep` is the share kept, within \(0, 1\], got {keep!r}$"
    with pytest.raises(ValueError, match=message):
        kind(keep)


def test_an_unknown_way_to_weigh() -> None:
    with pytest.raises(
        ValueError,
        match=r"^AdaBoost: `weights` must be one of \('scaled', 'paper_abs'\), got 'exact'$",
    ):
        AdaBoost(weights="exact")


@every
@pytest.mark.parametrize(
    ("n", "keep", "count"),
    [
        (100, 0.29, 29),
        (100, 0.57, 57),
        (3, 0.5, 1),
        (3, 0.1, 1),
        (1, 0.01, 1),
        (9, 1.0, 9),
        (9, 1, 9),
    ],
)
def test_counts(kind: Any, n: int, keep: float, count: int) -> None:
    plan = planned(kind(keep), torch.randperm(n, generator=seeded(n)).float())
    assert len(plan.rows) == kind(keep).count(n) == count
    assert plan.facts == pytest.approx(
        {"scheduled_fraction": 1 - keep, "actual_fraction": 1 - count / n}
    )
    assert plan.weights is None


@pytest.mark.parametrize(
    ("method", "values", "rows"),
    [
        (BigLoss(0.4), [3, 1, 2, 5, 4], [3, 4]),
        (SmallLoss(0.4), [3, 1, 2, 5, 4], [1, 2]),
        (GradientNorm(0.4), [3, 1, 2, 5, 4], [3, 4]),
        (AdaBoost(0.4, "scaled"), [3, 1, 2, 5, 4], [3, 4]),
        (AdaBoost(0.4, "scaled"), [-3, -1, -2, -5, -4], [1, 2]),
        (AdaBoost(0.4), [3, 1, 2, 5, 0.9], [1, 4]),
        (AdaBoost(0.4), [0.5, 0.1, 0, 50, 2], [0, 4]),
        (CoresetExtremes(0.4), [3, 1, 2, 5, 4], [1, 3]),
        (CoresetExtremes(0.6), [3, 1, 2, 5, 4], [1, 3, 4]),
        (CoresetExtremes(0.8), [3, 1, 2, 5, 4], [1, 2, 3, 4]),
        (CoresetExtremes(0.2), [3, 1, 2, 5, 4], [3]),
        (CoresetCenter(0.4), [3, 1, 2, 9, 4], [0, 4]),
        (CoresetCenter(0.4), [0, 0, 100, 101, 99], [2, 4]),
    ],
    ids=str,
)
def test_by_hand(method: Any, values: list[float], rows: list[int]) -> None:
    assert planned(method, torch.tensor(values, dtype=torch.float32)).rows.tolist() == rows


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        (BigLoss(), [1, 2]),
        (GradientNorm(), [1, 2]),
        (AdaBoost(), [1, 2]),
        (AdaBoost(weights="scaled"), [1, 2]),
        (SmallLoss(), [0, 3]),
        (CoresetCenter(), [0, 3]),
        (CoresetExtremes(), [0, 2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("value", [0.0, 0.25, 1.0, 1e38])
def test_ties_go_by_id(method: Any, rows: list[int], value: float) -> None:
    """One order by (value, id): the largest are at its upper end, the smallest at its lower one."""
    assert planned(method, [value] * 4, ids=[7, 9, 2**40, 8]).rows.tolist() == rows


def test_equally_far_from_the_mean_the_lower_id_is_kept() -> None:
    assert planned(CoresetCenter(0.25), [1.0, 3.0, 0.0, 4.0], ids=[5, 4, 1, 2]).rows.tolist() == [1]


def test_big_and_small_losses_part_a_batch() -> None:
    loss = torch.randint(3, (40,), generator=seeded(0)).float()
    big, small = (
        planned(kind(keep), loss).rows.tolist() for kind, keep in ((BigLoss, 0.3), (SmallLoss, 0.7))
    )
    assert sorted(big + small) == list(range(40))


@pytest.mark.parametrize("weights", ["scaled", "paper_abs"])
@every
def test_what_is_not_finite_comes_first_and_counts_for_nothing(kind: Any, weights: str) -> None:
    for values in (
        [5, NAN, 7, -INF, INF, 6, 1, 6.5],
        [0, NAN, 0, -INF, INF, 0, 0, 0],
        [1, NAN, 1, -INF, INF, 1, 1, 1],
    ):
        extra = {"weights": weights} if kind is AdaBoost else {}
        values = torch.tensor(values, dtype=torch.float32)
        assert planned(kind(3 / 8, **extra), values).rows.tolist() == [1, 3, 4]
        finite = [0, 2, 5, 6, 7]
        alone = planned(kind(0.4, **extra), values[finite]).rows.tolist()
        assert planned(kind(5 / 8, **extra), values).rows.tolist() == sorted(
            [1, 3, 4, *(finite[row] for row in alone)]
        )


@every
def test_a_batch_without_a_finite_value(kind: Any) -> None:
    rows = planned(kind(), [NAN, INF, -INF, NAN]).rows.tolist()
    assert rows == ([0, 1] if kind in (SmallLoss, CoresetCenter) else [2, 3])


@every
def test_an_empty_batch(kind: Any) -> None:
    plan = planned(kind(), torch.empty(0))
    assert len(plan.rows) == 0 and plan.facts["actual_fraction"] == 1


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions(kind: Any, dtype: torch.dtype) -> None:
    values = torch.tensor([0.25, 3, 1.5, 0, 2.5, 7, 0.125, 1])
    assert torch.equal(planned(kind(), values.to(dtype)).rows, planned(kind(), values).rows)


def test_big_loss_is_selective_backprop_with_a_fixed_share() -> None:
    loss = torch.rand(31, generator=seeded(4))
    assert torch.equal(planned(BigLoss(0.3), loss).rows, planned(SelectiveBackprop(0.3), loss).rows)


def test_gradient_norm_looks_at_no_loss() -> None:
    signals = {
        "id": torch.arange(4),
        "loss": torch.tensor([9.0, 8, 7, NAN]),
        "grad_norm": torch.tensor([1.0, 2, 3, 0]),
    }
    assert GradientNorm().plan_batch(signals, {}, step=0, generator=seeded(0))[0].rows.tolist() == [
        1,
        2,
    ]


def test_boost_weights() -> None:
    loss = torch.tensor([0.0, 1e-30, 0.5, 0.9, -0.5])
    ratio = (loss.double() / (loss[3].double() * (1 + HEADROOM))).tolist()
    assert boost_weights(loss, "scaled").tolist() == pytest.approx(
        [math.atanh(x) for x in ratio], rel=1e-5, abs=0
    )
    exact = [math.atanh(x) for x in loss.tolist()]
    assert boost_weights(loss).tolist() == pytest.approx(exact, rel=1e-5, abs=1e-7)


def test_the_smallest_losses_keep_their_order_when_scaled() -> None:
    weights = boost_weights(torch.tensor([1e-20, 2e-20, 1e-10, 1.0]), "scaled")
    assert bool((weights[1:] > weights[:-1]).all())


def test_boost_weights_at_the_poles() -> None:
    weights = boost_weights(torch.tensor([1.0, -1.0, 3e38, 0.0]), "paper_abs").tolist()
    assert weights == pytest.approx([44.01, -44.01, 0, 0], abs=0.01)
    assert boost_weights(torch.zeros(3), "scaled").tolist() == [0, 0, 0]
    assert boost_weights(torch.tensor([3e38, 1.5e38]), "scaled").tolist() == pytest.approx(
        [4.9518, 0.5492], abs=1e-4
    )


@pytest.mark.parametrize("weights", ["scaled", "paper_abs"])
def test_what_is_not_finite_has_no_boost_weight(weights: Any) -> None:
    loss = torch.tensor([0.5, NAN, INF, -INF, 0.25])
    found = boost_weights(loss, weights)
    assert found.isfinite().tolist() == [True, False, False, False, True]
    assert torch.equal(found[[0, 4]], boost_weights(loss[[0, 4]], weights))


def test_rank_distances() -> None:
    assert rank_distance(torch.tensor([0.3, 0.1, 0.2, 0.5, 0.4])).tolist() == pytest.approx(
        [0, 0.8, 0.4, 1, 0.6]
    )
    assert rank_distance(torch.tensor([0.3, 0.1, 0.2, 0.5])).tolist() == pytest.approx(
        [0.5, 0.75, 0.25, 1]
    )
    assert rank_distance(torch.tensor([1.0, 1, 1])).tolist() == pytest.approx([2 / 3, 0, 1])
    found = rank_distance(torch.tensor([INF, 0.3, -INF, 0.1, NAN])).tolist()
    assert [found[1], found[3]] == pytest.approx([1, 0.5]) and all(
        math.isnan(found[i]) for i in (0, 2, 4)
    )


def test_closeness() -> None:
    found = closeness(torch.tensor([1.0, 2, 6, NAN, INF, -INF])).tolist()
    assert found[:3] == [-2, -1, -3] and all(math.isnan(value) for value in found[3:])
    huge = closeness(torch.tensor([3e38, 3e38, 3e38, -3e38]))
    assert huge[:3].tolist() == pytest.approx([-1.5e38] * 3) and math.isfinite(huge[3])


class Reads(TorchDispatchMode):
    """Counts what must wait for the device: values read on the host, and shapes that depend on values."""

    WAITING = {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
        "unique_dim",
        "_unique2",
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
