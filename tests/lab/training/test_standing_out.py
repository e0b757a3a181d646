import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thresher_lab.training import samples as standing_out
from thresher_lab.training.samples import MOST_OF_A_CLASS, MOST_TOGETHER, RunHistory


def of(losses, trained):
    return RunHistory(
        np.arange(len(losses)),
        np.arange(len(losses)) % 2,
        np.array(losses, np.float32),
        np.array(trained, np.uint8),
    )


SMALL = of([[3, 3], [1, 1], [2, 4], [np.nan, np.nan]], [[1, 1], [1, 0], [1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (standing_out.easiest_first, [1, 0, 2, 3]),
        (standing_out.hardest_first, [0, 2]),
        (standing_out.once_hardest_first, [1]),
        (standing_out.most_hidden_first, [3, 1]),
        (standing_out.never_hidden_first, [0, 2]),
        (standing_out.lowest_combined_rank_first, [1, 3, 0, 2]),
    ],
)
def test_orders(order, expected):
    assert order(SMALL).tolist() == expected


def test_where_nothing_is_left_out_there_are_no_sheets_of_it():
    always = of([[1], [2]], [[1], [1]])
    assert not len(standing_out.most_hidden_first(always)) and not len(
        standing_out.never_hidden_first(always)
    )
    assert standing_out.hardest_first(always).tolist() == [1, 0] and not len(
        standing_out.once_hardest_first(always)
    )


@st.composite
def histories(draw):
    samples, epochs = draw(st.integers(1, 80)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    classes = draw(st.sampled_from([0, 1, 2, 10]))
    losses = np.where(
        rng.random((samples, epochs)) < 0.1, np.nan, rng.integers(0, 5, (samples, epochs))
    ).astype(np.float32)
    targets = rng.integers(classes, size=samples) if classes else None
    ids = np.sort(rng.choice(1000, samples, replace=False))
    return RunHistory(ids, targets, losses, rng.integers(0, 2, (samples, epochs)).astype(np.uint8))


@given(histories(), st.integers(1, MOST_TOGETHER))
def test_sheets_take_the_first_that_are_allowed(history, most):
    """The same by one loop over the samples."""
    expected, shown = {}, set()
    for title, order in standing_out.ORDERS.items():
        of_class, rows = {}, []
        for row in order(history).tolist():
            target = row if history.targets is None else int(history.targets[row])
            if row in shown or of_class.get(target, 0) >= MOST_OF_A_CLASS or len(rows) >= most:
                continue
            of_class[target] = of_class.get(target, 0) + 1
            rows.append(row)
        shown |= {*rows}
        if rows:
            expected[title] = rows
    found = standing_out.standing_out(history, most)
    assert {title: rows.tolist() for title, rows in found.items()} == expected


@given(histories(), st.integers(1, MOST_TOGETHER))
def test_smaller_sheets_show_no_others(history, most):
    smaller, larger = (
        {int(row) for rows in standing_out.standing_out(history, size).values() for row in rows}
        for size in (most, MOST_TOGETHER)
    )
    assert smaller <= larger
