import json

import pytest
from benchmarks import compiled as bench
from benchmarks.measure import Interval

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PAGE = f"before\n{bench.MARKS[0]}\nold\n{bench.MARKS[1]}\nafter\n"


def test_a_value_is_judged_by_its_whole_interval() -> None:
    judged = [
        bench.row_of("steps", "lm", "x", Interval(1.0, low, high, 0.95), limit).judged
        for low, high, limit in (
            (0.9, 1.1, 1.1),
            (1.11, 1.2, 1.1),
            (0.9, 1.2, 1.1),
            (0.9, 9.0, None),
        )
    ]
    assert judged == ["met", "missed", "cannot tell", ""]
    assert bench.Row("lengths", "lm", "x", 1.2, 1.1).judged == "missed"


def test_a_hundred_lengths_in_a_fixed_order() -> None:
    lengths = bench.lengths_of(500, 160)
    assert (
        len(lengths) == 500
        and len(set(lengths)) == 100
        and max(lengths) <= 160
        and min(lengths) >= 61
    )
    assert lengths == bench.lengths_of(500, 160) and lengths[:100] != sorted(lengths[:100])
    assert set(bench.lengths_of(6, 24)) <= set(range(9, 25))


def test_rows_of_parts_that_are_not_measured_stay(tmp_path) -> None:
    path = tmp_path / "compiled.json"
    assert bench.measured_before(path, "steps", quick=False) == []
    path.write_text(
        json.dumps(
            {
                "quick": False,
                "rows": [{"part": "steps", "value": 1}, {"part": "lengths", "value": 2}],
            }
        )
    )
    assert bench.measured_before(path, "steps", quick=False) == [{"part": "steps", "value": 1}]
    assert bench.measured_before(path, "steps", quick=True) == []


def test_all_values_are_named_and_have_their_limits() -> None:
    assert set(bench.STEP_LIMITS.values()) == {1.10, 1.15} and set(bench.STEP_LIMITS) <= set(
        bench.TASKS
    )
    assert (
        list(bench.parts(True))
        == list(bench.parts(False))
        == ["lengths", "memory", "steps", "exactness", "compilations"]
    )
