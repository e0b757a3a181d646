import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from thresher import BatchPlan, EpochPlan

IDS = torch.tensor([0, 2, 5])


def test_what_a_plan_says_by_default() -> None:
    plan = EpochPlan(IDS)
    assert plan.weights is None and plan.refresh is None
    assert (plan.lr_scale, plan.drawn, dict(plan.facts)) == (1.0, False, {})
    plan.check(6)


def test_scalars_become_plain() -> None:
    """Histories and states load with weights_only=True only where values are Python's own."""
    plan = EpochPlan(
        IDS,
        lr_scale=np.float64(1.25),
        facts={"a": np.float32(0.5), "b": torch.tensor(2.0), "c": np.int64(3), "d": 1},
    )
    assert type(plan.lr_scale) is float and plan.lr_scale == 1.25
    assert dict(plan.facts) == {"a": 0.5, "b": 2.0, "c": 3, "d": 1}
    assert [type(value) for value in plan.facts.values()] == [float, float, int, int]


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EpochPlan(IDS).lr_scale = 2.0


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (
            TypeError,
            r"`ids` must be int64, got torch.float32: ids are never floats",
            {"ids": IDS.float()},
        ),
        (TypeError, r"`ids` must be int64, got torch.int32", {"ids": IDS.int()}),
        (
            TypeError,
            r"`refresh` must be int64, got torch.bool",
            {"ids": IDS, "refresh": torch.ones(3, dtype=torch.bool)},
        ),
        (ValueError, r"`ids` must have one dimension, got shape \(1, 3\)", {"ids": IDS[None]}),
        (
            ValueError,
            r"`refresh` must have one dimension, got shape \(\)",
            {"ids": IDS, "refresh": torch.tensor(1)},
        ),
        (
            TypeError,
            r"`weights` must be float32, got torch.float64",
            {"ids": IDS, "weights": torch.ones(3).double()},
        ),
        (
            ValueError,
            r"`weights` must be aligned with `ids`, got shapes \(2,\) and \(3,\)",
            {"ids": IDS, "weights": torch.ones(2)},
        ),
        (ValueError, r"`lr_scale` must be a positive number, got 0.0", {"ids": IDS, "lr_scale": 0}),
        (
            ValueError,
            r"`lr_scale` must be a positive number, got nan",
            {"ids": IDS, "lr_scale": math.nan},
        ),
        (
            ValueError,
            r"`lr_scale` must be a positive number, got inf",
            {"ids": IDS, "lr_scale": math.inf},
        ),
        (ValueError, r"`lr_scale` must be a positive number, got -1", {"ids": IDS, "lr_scale": -1}),
    ],
)
def test_refused_when_made(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^EpochPlan: {message}"):
        EpochPlan(**arguments)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"`ids` must be ascending without repeats", {"ids": IDS.flip(0)}),
        (r"`ids` must be ascending without repeats", {"ids": torch.tensor([1, 1, 2])}),
        (
            r"`refresh` must be ascending without repeats",
            {"ids": IDS, "refresh": torch.tensor([4, 3])},
        ),
        (
            r"`refresh` must be ascending without repeats",
            {"ids": IDS, "drawn": True, "refresh": torch.tensor([4, 3])},
        ),
        (r"`ids` must be within \[0, 6\), got 0 to 6", {"ids": torch.tensor([0, 6])}),
        (r"`ids` must be within \[0, 6\), got -1 to 3", {"ids": torch.tensor([-1, 3])}),
        (
            r"`ids` must be within \[0, 6\), got 2 to 9",
            {"ids": torch.tensor([9, 2, 2]), "drawn": True},
        ),
        (
            r"`refresh` must be within \[0, 6\), got 3 to 7",
            {"ids": IDS, "refresh": torch.tensor([3, 7])},
        ),
        (r"`ids` is empty; an epoch needs at least one sample", {"ids": IDS[:0]}),
    ],
)
def test_refused_for_a_dataset(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^EpochPlan: {message}"):
        EpochPlan(**arguments).check(6)


def test_accepted_for_a_dataset() -> None:
    EpochPlan(torch.tensor([5, 1, 1]), drawn=True).check(6)
    EpochPlan(IDS, refresh=torch.tensor([], dtype=torch.int64)).check(6)
    EpochPlan(IDS, refresh=torch.tensor([1, 3, 4])).check(6)


ROWS = torch.tensor([0, 2, 5])


def test_what_a_batch_plan_says_by_default() -> None:
    plan = BatchPlan(ROWS)
    assert plan.rows is ROWS
    assert plan.weights is None and dict(plan.facts) == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.weights = torch.ones(3)


def test_a_batch_may_train_on_nothing() -> None:
    assert len(BatchPlan(ROWS[:0]).rows) == 0
    assert BatchPlan(ROWS[:0], weights=torch.ones(0)).weights is not None


def test_scalars_of_a_batch_plan_become_plain() -> None:
    plan = BatchPlan(
        ROWS, weights=torch.ones(3), facts={"a": np.float32(0.5), "b": np.int64(3), "c": 1}
    )
    assert dict(plan.facts) == {"a": 0.5, "b": 3, "c": 1}
    assert [type(value) for value in plan.facts.values()] == [float, int, int]


def test_a_batch_plan_is_made_without_a_look_at_its_values() -> None:
    """On the meta device there is nothing to look at."""
    plan = BatchPlan(
        torch.empty(3, dtype=torch.int64, device="meta"), weights=torch.empty(3, device="meta")
    )
    assert plan.rows.is_meta


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (
            TypeError,
            r"`rows` must be int64, got torch.bool: for a mask, pass mask",
            {"rows": ROWS > 1},
        ),
        (TypeError, r"`rows` must be int64, got torch.int32", {"rows": ROWS.int()}),
        (
            ValueError,
            r"`rows` must have one dimension, got shape \(3, 1\)",
            {"rows": ROWS[:, None]},
        ),
        (
            TypeError,
            r"`weights` must be float32, got torch.float64",
            {"rows": ROWS, "weights": torch.ones(3).double()},
        ),
        (
            ValueError,
            r"`weights` must be aligned with `rows`, got shapes \(6,\) and \(3,\)",
            {"rows": ROWS, "weights": torch.ones(6)},
        ),
        (
            TypeError,
            r"`facts` must be plain numbers, got a tensor for 'kept': reading it would wait for the device",
            {"rows": ROWS, "facts": {"kept": torch.tensor(3)}},
        ),
    ],
)
def test_a_batch_plan_refused_when_made(
    error: type[Exception], message: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(error, match=f"^BatchPlan: {message}"):
        BatchPlan(**arguments)
