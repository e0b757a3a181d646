import io
import math

import pytest
import torch

from thresher import Column
from thresher.records import NEVER_SEEN, Records

CPU = torch.device("cpu")
COLUMNS = {
    "loss": Column(torch.float32, fill=NEVER_SEEN),
    "correct": Column(torch.bool),
    "confidence": Column(torch.float32, signal="batch_confidence"),
    "seen": Column(torch.uint8, signal="correct", merge="sum"),
}


def values(*losses: float, correct: bool = True) -> dict[str, torch.Tensor]:
    n = len(losses)
    return {
        "loss": torch.tensor(losses, dtype=torch.float64),
        "correct": torch.full((n,), correct),
        "batch_confidence": torch.full((n,), 0.25),
        "confidence": torch.full((n,), 0.75),
    }


def test_a_mapping_of_live_columns() -> None:
    records = Records(COLUMNS, 5, CPU)
    assert list(records) == ["loss", "correct", "confidence", "seen"]
    assert len(records) == 4 and "loss" in records and "margin" not in records
    assert records["loss"].tolist() == [-math.inf] * 5
    assert records["correct"].tolist() == [False] * 5
    assert [column.dtype for column in records.values()] == [
        torch.float32,
        torch.bool,
        torch.float32,
        torch.uint8,
    ]
    assert records.signals == {"loss", "correct", "batch_confidence"}
    assert records.bytes_per_sample == 10
    assert repr(records) == (
        "Records(loss: torch.float32, correct: torch.bool, confidence: torch.float32, seen: torch.uint8, 10 B/sample)"
    )
    live = records["loss"]
    records.write(torch.tensor([3]), values(2.0))
    assert live[3] == 2
    with pytest.raises(KeyError):
        records["margin"]


def test_written_rows_and_no_others() -> None:
    records = Records(COLUMNS, 5, CPU)
    records.write(torch.tensor([4, 1]), values(0.1, math.nan))
    assert records["loss"][4] == torch.tensor(0.1)
    assert records["loss"][1].isnan()
    assert records["loss"][[0, 2, 3]].tolist() == [-math.inf] * 3
    assert records["confidence"].tolist() == [
        0,
        0.25,
        0,
        0,
        0.25,
    ]  # from the signal that the column names
    assert (
        records["correct"].tolist()
        == records["seen"].bool().tolist()
        == [False, True, False, False, True]
    )


def test_a_second_sight_replaces_or_adds() -> None:
    records = Records(COLUMNS, 3, CPU)
    records.write(torch.tensor([0, 1]), values(1.0, 2.0))
    records.write(torch.tensor([1, 2]), values(5.0, 6.0))
    assert records["loss"].tolist() == [1, 5, 6]
    assert records["seen"].tolist() == [1, 2, 1]
    records.write(torch.tensor([2, 2]), values(7.0, 7.0))
    assert records["seen"].tolist() == [1, 2, 3]
    records.start_epoch()
    assert records["seen"].tolist() == [0, 0, 0]
    assert records["loss"].tolist() == [1, 5, 7]


def test_writing_again_adds_the_difference() -> None:
    """Two criteria in one step: the second call writes the larger loss, not one more."""
    columns = {
        "loss": Column(torch.float32, merge="sum"),
        "last": Column(torch.float32, signal="loss"),
    }
    records = Records(columns, 2, CPU)
    records.write(torch.tensor([1]), values(1.0))
    records.write(torch.tensor([1]), values(3.5), before=values(1.0))
    assert records["loss"].tolist() == [0, 3.5]
    assert records["last"].tolist() == [0, 3.5]


def test_state_is_a_copy_and_comes_back() -> None:
    records = Records(COLUMNS, 4, CPU)
    records.write(torch.tensor([0, 2]), values(0.5, math.inf))
    buffer = io.BytesIO()
    torch.save(records.state_dict(), buffer)
    buffer.seek(0)
    state = records.state_dict()
    records.write(torch.tensor([0]), values(9.0))
    assert state["loss"][0] == 0.5
    other = Records(COLUMNS, 4, CPU)
    live = other["loss"]
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert live.tolist() == [0.5, -math.inf, math.inf, -math.inf]
    assert other["seen"].tolist() == [1, 0, 1, 0]


# Columns that merge by a function, that plans write, and that say when


def larger(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.maximum(old, new)


def test_a_function_merges_once_a_step() -> None:
    columns = {
        "loss": Column(torch.float32),
        "worst": Column(torch.float32, signal="loss", merge=larger),
    }
    records = Records(columns, 4, CPU)
    ids = torch.tensor([0, 2])
    records.write(ids, values(3.0, 1.0))
    records.write(ids, values(2.0, 5.0))
    assert records["worst"].tolist() == [3, 0, 5, 0]
    records.write(ids, values(9.0, 9.0), before=values(2.0, 5.0), first=False)
    assert records["worst"].tolist() == [3, 0, 5, 0]
    records.write(ids, values(8.0, 8.0), first=torch.tensor([False, True]))
    assert records["worst"].tolist() == [3, 0, 8, 0]
    assert records["loss"].tolist() == [8, 0, 8, 0]
    records.start_epoch()
    assert records["worst"].tolist() == [3, 0, 8, 0]


def test_a_column_that_says_when() -> None:
    records = Records({"seen": Column(torch.int16, fill=-1, signal="epoch")}, 3, CPU)
    assert records.signals == set()
    records.write(torch.tensor([0, 1]), {})
    records.epoch = 7
    records.write(torch.tensor([1]), values(0.5))
    assert records["seen"].tolist() == [0, 7, -1]


def test_a_column_that_plans_write() -> None:
    records = Records(
        {"loss": Column(torch.float32), "weight": Column(torch.float32, merge="plan")}, 3, CPU
    )
    assert records.signals == {"loss"}
    live = records["weight"]
    records.remember({"weight": torch.tensor([0.0, 2.0, 1.0])})
    records.write(torch.tensor([1]), values(5.0))
    assert live.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("remember", "message"),
    [
        (
            {"loss": torch.zeros(3)},
            r"`remember` has 'loss'; columns with merge='plan' are \['weight'\]",
        ),
        ({"other": torch.zeros(3)}, "`remember` has 'other'"),
        (
            {"weight": torch.zeros(2)},
            r"`remember\['weight'\]` must be torch.float32 of shape \(3,\), got .* of shape \(2,\)",
        ),
        ({"weight": torch.zeros(3, dtype=torch.int64)}, "must be torch.float32 of shape"),
    ],
)
def test_columns_that_a_plan_may_not_write(remember: dict[str, torch.Tensor], message: str) -> None:
    records = Records(
        {"loss": Column(torch.float32), "weight": Column(torch.float32, fill=1, merge="plan")},
        3,
        CPU,
    )
    with pytest.raises(ValueError, match=message):
        records.remember({"weight": torch.zeros(3), **remember})
    assert records["weight"].tolist() == [1, 1, 1]
