"""Turns, events, ties and settings of Forgetting; the whole of it is in tests/reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from thresher import Forgetting
from thresher.methods.forgetting import UNSEEN_TURNS, fewest, turns
from thresher.records import Records
from thresher.rng import seeded
from thresher.scores.forgetting import events_in_turns


def test_published_defaults() -> None:
    method = Forgetting()
    assert method == Forgetting(fraction=0.1, start=20, hide="each_epoch", never_learned="keep")
    assert method.requires.refresh == "eval" and Forgetting(hide="once").requires.refresh is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float32])
def test_turns(dtype: torch.dtype, kind: torch.dtype) -> None:
    """From wrong to right and back; the last bit is whether it is right."""
    old = torch.tensor([UNSEEN_TURNS, UNSEEN_TURNS, 0, 0, 1, 1, 2, 2, 3], dtype=dtype)
    new = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 0]).to(kind)
    before = old.clone()
    found = turns(old, new)
    assert found.tolist() == [0, 1, 0, 1, 1, 2, 2, 3, 4]
    assert found.dtype == dtype and torch.equal(old, before)


@pytest.mark.parametrize(("dtype", "most"), [(torch.int8, 127), (torch.int16, 32_767)])
def test_turns_that_do_not_fit_stay_at_the_most(dtype: torch.dtype, most: int) -> None:
    column, right = torch.tensor([most - 2], dtype=dtype), most - 2
    counts = []
    for step in range(9):
        column = turns(column, torch.tensor([step % 2 == 1]))  # wrong first: it was right
        assert (int(column) % 2 == 1) == (step % 2 == 1)
        counts.append(int(events_in_turns(column)))
    assert right % 2 == 1
    assert counts == [most // 2] * 9


def test_events() -> None:
    column = torch.tensor([UNSEEN_TURNS, 0, 1, 2, 3, 4, 5, 32_767], dtype=torch.int16)
    assert events_in_turns(column).tolist() == [0, 0, 0, 1, 1, 2, 2, 16_383]
    assert events_in_turns(column).dtype == torch.int64


@pytest.mark.parametrize(
    ("counts", "k", "always", "never"),
    [
        ([3, 1, 2, 0], 2, {1, 3}, {0, 2}),
        ([0, 0, 0, 1], 3, {0, 1, 2}, {3}),
        ([0, 0, 0, 1], 2, set(), {3}),
        ([0, 5, 5, 5, 9], 2, {0}, {4}),
        ([-1, -1, 4, 0], 2, {2, 3}, {0, 1}),
        ([-1, -1, 4, 0], 4, {2, 3}, {0, 1}),
        ([-1, -1], 1, set(), {0, 1}),
        ([1, 2], 0, set(), {0, 1}),
        ([], 1, set(), set()),
    ],
)
def test_fewest(counts: list[int], k: int, always: set[int], never: set[int]) -> None:
    found = [fewest(np.array(counts, np.int64), k, seeded(key)) for key in range(60)]
    marked = [set(np.flatnonzero(mask).tolist()) for mask in found]
    assert {len(one) for one in marked} == {min(k, sum(count >= 0 for count in counts))}
    assert set.intersection(*marked) == always  # the others go by lot
    assert set(range(len(counts))) - set.union(*marked) == never


def test_ties_are_broken_evenly() -> None:
    counts = np.array([0, 7, 7, 9, 7, 7])
    share = np.mean([fewest(counts, 3, seeded(key)) for key in range(3000)], axis=0)
    assert share[0] == 1 and share[3] == 0
    assert np.abs(share[[1, 2, 4, 5]] - 0.5).max() < 5 * math.sqrt(0.25 / 3000)


@pytest.mark.parametrize(
    ("start", "epochs", "first"),
    [
        (20, 100, 20),
        (0.2, 100, 20),
        (0.29, 100, 29),
        (0.3, 7, 3),
        (0.5, 1, 1),
        (1, 10, 1),
        (0, 10, 1),
        (200, 10, None),
    ],
)
def test_when_it_hides(start: float, epochs: int, first: int | None) -> None:
    method = Forgetting(fraction=0.5, start=start)
    records = Records(method.columns(), 4, torch.device("cpu"))
    records.write(torch.arange(4), {"correct": torch.tensor([True] * 4)})
    hiding = [
        epoch
        for epoch in range(epochs + 2)
        if len(method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(0)).ids) < 4
    ]
    assert hiding == ([] if first is None else list(range(first, epochs + 2)))


def test_what_it_remembers() -> None:
    assert (
        Records(Forgetting().columns(), 3, torch.device("cpu")).bytes_per_sample
        == Forgetting.card.bytes_per_sample
        == 2
    )
    assert Records(Forgetting(hide="once").columns(), 3, torch.device("cpu")).bytes_per_sample == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            (
                {"fraction": value},
                rf"`fraction` must be a number within \[0, 1\), got {value}",
            )
            for value in (-0.1, 1.0, math.nan)
        ),
        *(
            (
                {"start": value},
                rf"`start` must be the number of an epoch .* or a share of all epochs .*, got {value}",
            )
            for value in (-1, -0.5, 1.5, math.nan, math.inf)
        ),
        ({"hide": "never"}, r"`hide` must be one of \('each_epoch', 'once'\), got 'never'"),
        ({"never_learned": "inf"}, r"`never_learned` must be one of \('keep', 'cut'\), got 'inf'"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Forgetting: {message}"):
        Forgetting(**settings)
