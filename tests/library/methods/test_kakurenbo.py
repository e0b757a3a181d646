"""Parts of KAKURENBO by hand; the whole of it is in tests/reference."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from thresher import EpochPlan, Kakurenbo
from thresher.methods.kakurenbo import SCHEDULE, hiding_candidates, trusted
from thresher.records import Records

CPU = torch.device("cpu")


def planned(method: Kakurenbo, epoch: int = 1, epochs: int = 10, **columns: Any) -> EpochPlan:
    records = Records(method.columns(), len(columns["loss"]), CPU)
    for name, values in columns.items():
        if name in records:
            records[name].copy_(torch.tensor(values))
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=torch.Generator())


EASY = {"loss": [0.1 * i for i in range(10)], "correct": [True] * 10, "confidence": [1.0] * 10}


def test_published_defaults() -> None:
    method = Kakurenbo()
    assert (method.max_fraction, method.tau, method.drop_top, method.warmup_epochs) == (
        0.3,
        0.7,
        0.0,
        0,
    )
    assert method.schedule == SCHEDULE == ((0, 1.0), (0.3, 0.8), (0.6, 0.6), (0.8, 0.4))
    assert (
        method.move_back
        and method.reduce_fraction
        and method.adjust_lr
        and not method.first_epoch_hides
    )


@pytest.mark.parametrize("bits", ["".join(bits) for bits in product("1", "01", "01", "01")])
def test_variants(bits: str) -> None:
    method = Kakurenbo.variant(f"v{bits}", max_fraction=0.4)
    assert method == Kakurenbo.variant(bits, max_fraction=0.4)
    assert (method.move_back, method.reduce_fraction, method.adjust_lr) == tuple(
        bit == "1" for bit in bits[1:]
    )
    assert method.max_fraction == 0.4
    assert method.requires.optimizer == method.adjust_lr


@pytest.mark.parametrize("bits", ["v0111", "v111", "v11111", "v1112", "", "v", "full", "vv1111"])
def test_not_a_variant(bits: str) -> None:
    with pytest.raises(
        ValueError, match=f"^Kakurenbo.variant: expected v1000 to v1111, got '{bits}'$"
    ):
        Kakurenbo.variant(bits)


def test_columns_of_the_switches() -> None:
    def names(**settings: Any) -> dict[str, tuple[Any, Any, Any]]:
        columns = Kakurenbo(**settings).columns()
        return {name: (c.dtype, c.signal or name, c.merge) for name, c in columns.items()}

    assert names() == {
        "loss": (torch.float32, "loss", "last"),
        "correct": (torch.bool, "correct", "last"),
        "confidence": (torch.float32, "confidence", "last"),
    }
    assert names(move_back=False) == {"loss": (torch.float32, "loss", "last")}
    assert names(confidence="batch", merge="sum") == {
        "loss": (torch.float32, "loss", "sum"),
        "correct": (torch.uint8, "correct", "sum"),
        "confidence": (torch.float32, "batch_confidence", "sum"),
    }
    assert Kakurenbo().columns()["loss"].fill == -math.inf
    assert Kakurenbo(first_epoch_hides=True).columns()["loss"].fill == 1.0


def test_the_first_epoch() -> None:
    keeps = planned(Kakurenbo(0.3, move_back=False), epoch=0, loss=[1.0] * 10)
    assert (
        keeps.ids.tolist() == list(range(10))
        and keeps.lr_scale == 1
        and keeps.facts["scheduled_fraction"] == 0
    )
    hides = planned(
        Kakurenbo(0.3, move_back=False, first_epoch_hides=True), epoch=0, loss=[1.0] * 10
    )
    assert hides.ids.tolist() == list(range(3, 10)) and hides.lr_scale == pytest.approx(10 / 7)
    back = planned(Kakurenbo(0.3, first_epoch_hides=True), epoch=0, loss=[1.0] * 10)
    assert len(back.ids) == 10 and back.facts["moved_back"] == 3


def test_trusted_is_inclusive_in_the_precision_of_the_records() -> None:
    """float32(0.7) is below 0.7: a recorded confidence of 0.7 must still count as 0.7."""
    at = np.float32(0.7)
    assert float(at) < 0.7
    confidence = np.array([at, np.nextafter(at, np.float32(0)), 1.0, np.nan], np.float32)
    assert trusted(np.ones(4, np.bool_), confidence, 0.7).tolist() == [True, False, True, False]
    assert not trusted(np.zeros(4, np.bool_), confidence, 0.0).any()
    assert trusted(np.array([2, 1], np.uint8), np.float32([1.4, 0.1]), 0.7).tolist() == [
        True,
        False,
    ]


def test_easiest_of_losses_that_are_not_finite() -> None:
    loss = np.array([math.nan, 2, -math.inf, 1, math.inf, 3])
    for by_threshold in (False, True):
        assert np.flatnonzero(hiding_candidates(loss, 0.4, by_threshold=by_threshold)).tolist() == [
            1,
            3,
        ]
        assert np.flatnonzero(hiding_candidates(loss, 0.9, by_threshold=by_threshold)).tolist() == [
            1,
            3,
            5,
        ]
        assert not hiding_candidates(np.full(3, math.nan), 0.9, by_threshold=by_threshold).any()


def test_the_warm_up_has_no_learning_rate_correction() -> None:
    method = Kakurenbo(0.5, warmup_epochs=3)
    scales = [planned(method, epoch=epoch, epochs=10, **EASY).lr_scale for epoch in range(10)]
    assert scales[:3] == [1, 1, 1]
    assert scales[3:] == pytest.approx([10 / 6, 10 / 6, 10 / 6, 10 / 7, 10 / 7, 10 / 8, 10 / 8])


def test_the_dropped_are_the_hardest_with_a_finite_loss() -> None:
    loss = [0.5, 9.0, math.inf, 0.1, 9.0, 3.0, math.nan, 0.2, 0.3, 0.4]
    plan = planned(
        Kakurenbo(0.1, drop_top=0.1), loss=loss, correct=[True] * 10, confidence=[1.0] * 10
    )
    assert plan.refresh is not None
    assert plan.refresh.tolist() == [
        3,
        4,
    ]  # of the two nines the later one, as sorting by (loss, id) has it
    assert plan.facts["scheduled_fraction"] == pytest.approx(0.1)
    assert plan.facts["actual_fraction"] == pytest.approx(0.1) == plan.facts["dropped_fraction"]
    assert plan.lr_scale == pytest.approx(10 / 9)


@pytest.mark.parametrize("lr_fraction", ["actual", "scheduled"])
def test_the_dropped_do_not_raise_the_learning_rate(lr_fraction: Any) -> None:
    """0.4 of the samples hidden and 0.1 dropped: 1 / 0.6, not 1 / 0.5."""
    easy = {"loss": [0.1 * i for i in range(10)], "correct": [True] * 10, "confidence": [1.0] * 10}
    plan = planned(Kakurenbo(0.4, drop_top=0.1, lr_fraction=lr_fraction), **easy)
    assert len(plan.ids) == 5 and plan.lr_scale == pytest.approx(1.6667, abs=1e-4)
    assert plan.facts["actual_fraction"] == pytest.approx(0.4)
    assert "dropped_fraction" not in planned(Kakurenbo(0.4), **easy).facts


def test_nothing_left_to_train_on() -> None:
    """F = 0 by the published threshold hides whatever is right and confident."""
    with pytest.raises(
        ValueError,
        match="^Kakurenbo: nothing is left to train on of 10 samples; lower `max_fraction` or",
    ):
        planned(Kakurenbo(0.0, candidates="threshold"), **EASY)


def test_a_schedule_may_be_a_list() -> None:
    assert Kakurenbo(schedule=[(0, 1), (30, 0.8)]) == Kakurenbo(schedule=((0.0, 1.0), (30.0, 0.8)))
