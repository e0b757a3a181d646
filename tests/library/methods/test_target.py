"""The share that a whole training leaves out: what is due in each epoch, what is counted, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thresher import EpochPlan, Ies, InfoBatch, RePb, SeTa
from thresher.methods._target import LEFT_OUT, MOST, Target, counted
from thresher.records import Records
from thresher.rng import seeded

N = 1000


def table(left_out: int = 0) -> Records:
    records = Records(LEFT_OUT, N, torch.device("cpu"))
    records["left_out"].fill_(left_out)
    return records


@given(
    share=st.floats(0, 0.7),
    start=st.integers(0, 3),
    epochs=st.integers(12, 60),
    stop=st.integers(11, 12),
)
def test_what_is_due_adds_up_to_the_share(share: float, start: int, stop: int, epochs: int) -> None:
    stop = epochs - 12 + stop
    try:
        target = Target(None, share, start, stop, epochs)
    except ValueError:
        assert share > MOST * (stop - start) / epochs
        return
    records, total = table(), 0
    for epoch in range(epochs):
        due = target.due(records, epoch)
        assert due == 0 or start <= epoch < stop
        total += due
        plan = target.counted(EpochPlan(torch.arange(N)), np.arange(N) >= due, records, epoch)
        assert plan.facts["left_out_so_far"] == pytest.approx(total / N / (epoch + 1))
        assert not plan.note
        records.remember(plan.remember)
    assert abs(total / N / epochs - share) < 0.5 / N


def test_each_epoch_leaves_out_as_much_where_nothing_is_in_the_way() -> None:
    target, records = Target(None, 0.4, 1, 9, 10), table()
    for epoch in range(1, 9):
        assert target.due(records, epoch) == 500
        records["left_out"][:500] += 1


def test_what_was_left_out_so_far_is_read_from_the_records_alone() -> None:
    """Half of the epochs, with more than the share already: nothing is due; with nothing yet: the most that is allowed."""
    target = Target(None, 0.5, 0, 10, 10)
    assert target.due(table(5), 5) == 0
    assert target.due(table(0), 5) == MOST * N
    assert target.due(table(4), 5) == 200


def test_a_share_that_was_missed_is_said_in_the_last_epoch_that_leaves_out() -> None:
    target, kept = Target(InfoBatch(), 0.5, 0, 4, 5), np.ones(N, dtype=np.bool_)
    notes = [
        target.counted(EpochPlan(torch.arange(N)), kept, table(1), epoch).note for epoch in range(5)
    ]
    assert notes[:3] == ["", "", ""]
    assert notes[3].startswith(
        "InfoBatch(target=0.5) leaves out 0.200 of the samples over the whole training: samples without"
    )


def test_counts_of_many_samples_are_those_of_each() -> None:
    n = 3 * 2**16 + 5
    records = Records(LEFT_OUT, n, torch.device("cpu"))
    records["left_out"].copy_(torch.arange(n) % 7)
    kept = np.random.default_rng(0).random(n) < 0.5
    found = counted(records, kept)["left_out"]
    assert found.dtype == torch.int16
    assert np.array_equal(found.numpy(), np.arange(n) % 7 + ~kept)
    assert records["left_out"].sum() == (torch.arange(n) % 7).sum(), "the records stay as they are"


@pytest.mark.parametrize("kind", [InfoBatch, SeTa, RePb, Ies])
@pytest.mark.parametrize("target", [-0.1, 0.91, math.nan, "half", True])
def test_a_target_out_of_range_is_refused(kind: Any, target: Any) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^{kind.__name__}: `target` is the share of the samples that the whole run",
    ):
        kind(target=target)


@pytest.mark.parametrize("kind", [InfoBatch, SeTa, RePb, Ies])
def test_a_target_that_the_epochs_cannot_meet_is_refused_in_the_first_plan(kind: Any) -> None:
    method = kind(target=0.8)
    records = Records(method.columns(), 10, torch.device("cpu"))
    with pytest.raises(
        ValueError,
        match=rf"^{kind.__name__}: `target`=0.8 cannot be met in 5 epochs: only \d of them leave out",
    ):
        method.plan_epoch(records, epoch=0, epochs=5, generator=seeded(0))


@pytest.mark.parametrize(
    "settings", [{"prune_fraction": 0.0}, {"threshold": 0.5}, {"rescale": "ratio"}]
)
def test_infobatch_refuses_settings_that_contradict_a_target(settings: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^InfoBatch: `target`=0.5 chooses the threshold and the weights: set"
    ):
        InfoBatch(target=0.5, **settings)


def test_infobatch_with_a_target_stays_unbiased() -> None:
    """The sum of the weights is that of all samples, and each of them has the expected weight 1."""
    method, n = InfoBatch(target=0.5), 40
    records = Records(method.columns(), n, torch.device("cpu"))
    records["loss"].copy_(torch.linspace(0, 1, n))
    total = torch.zeros(n)
    for key in range(2000):
        plan = method.plan_epoch(records, epoch=1, epochs=20, generator=seeded(key))
        assert plan.weights is not None and float(plan.weights.sum()) == pytest.approx(n)
        total[plan.ids] += plan.weights
    mean = total / 2000
    assert mean[-2:].tolist() == [1, 1]
    assert float((mean - 1).abs().max()) < 4 * math.sqrt(1.5 / 2000)


@pytest.mark.parametrize("method", [RePb(), InfoBatch(target=0.1)], ids=["RePb", "InfoBatch"])
def test_more_epochs_than_can_be_counted_are_refused(method: Any) -> None:
    records = Records(method.columns(), 4, torch.device("cpu"))
    method.plan_epoch(records, epoch=0, epochs=32_767, generator=seeded(0))
    with pytest.raises(
        ValueError,
        match=r"counts in 16 bits how often .* got 32,768 epochs: train for 32,767 or fewer",
    ):
        method.plan_epoch(records, epoch=0, epochs=32_768, generator=seeded(0))
