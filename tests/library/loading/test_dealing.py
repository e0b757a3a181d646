"""Smaller batches: as many steps as full training, of sizes that differ by one at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import depth
from thresher.loading.smaller_batches import StepSizes, smaller_sizes


@given(st.integers(1, 50), st.integers(0, 500))
def test_parts_add_up_and_differ_by_one_at_most(steps, total):
    sizes = list(StepSizes(steps, total).parts())
    assert len(sizes) == steps and sum(sizes) == total and max(sizes) - min(sizes) <= 1


def dealt(n, plan, *, batch_size=4, drop_last=False, least=1):
    return smaller_sizes(lambda: len(plan), n, batch_size, drop_last, least=least)


def test_full_training_has_full_batches():
    assert dealt(18, range(18)) is None
    assert dealt(18, range(18), drop_last=True) is None


@pytest.mark.parametrize(
    ("n", "kept", "drop_last", "steps", "rows"),
    [(16, 8, False, 4, 8), (18, 9, False, 5, 9), (18, 9, True, 4, 8), (18, 7, False, 5, 7)],
)
def test_the_samples_of_a_plan_are_all_dealt(n, kept, drop_last, steps, rows):
    found = dealt(n, range(kept), drop_last=drop_last)
    assert found is not None and (found.steps, found.rows) == (steps, rows)


@given(st.integers(1, 4000), st.integers(1, 64), st.integers(1, 2), st.booleans())
def test_the_smallest_share_that_is_named_is_enough(n, batch_size, least, drop_last):
    """One row less than one (or two) a batch is refused."""
    steps = n // batch_size if drop_last else -(-n // batch_size)
    most = steps * batch_size if drop_last else n

    def spent(share):
        return dealt(
            n, range(round(share * n)), batch_size=batch_size, drop_last=drop_last, least=least
        )

    too_little = (least * steps - 1) / max(1, most)
    if not 0 < too_little < 1 or round(too_little * n) == 0:
        return
    few = (
        "less than one a batch" if least == 1 else "fewer than two per batch, which BatchNorm needs"
    )
    with pytest.raises(ValueError, match=f"{few}: the smallest share is") as said:
        spent(too_little)
    named = float(str(said.value).split("the smallest share is ")[1].split(". Give")[0])
    found = spent(named)
    assert found is None or found.rows >= least * steps
    assert named <= min(1, 1.01 * least * steps / most)


def test_an_order_of_unknown_length_is_refused():
    def unknown():
        raise TypeError("the length of this epoch is not known")

    with pytest.raises(
        ValueError, match="number of samples of an epoch, and the length of this epoch is not known"
    ):
        smaller_sizes(unknown, 16, 4, False)


@given(st.integers(1, depth(200, 2000)), st.integers(1, 64), st.floats(0.05, 1.0), st.booleans())
def test_the_cost_is_the_share(n, batch_size, share, drop_last):
    """Within one sample of the epoch, whatever does not divide."""
    steps = n // batch_size if drop_last else -(-n // batch_size)
    most = steps * batch_size if drop_last else n
    if not most or share * most - 1 < steps:
        return
    found = dealt(n, range(round(share * n)), batch_size=batch_size, drop_last=drop_last)
    rows = most if found is None else found.rows
    assert abs(rows / most - share) <= 1 / most + 1e-9
    assert found is None or (found.steps == steps and found.rows <= most)


def test_smaller_batches_go_on_after_any_step():
    cases = [(1, 1), (3, 4), (7, 7), (10, 33), (9, 100)]
    for sizes in (StepSizes(steps, rows) for steps, rows in cases):
        parts = list(sizes.parts())
        assert sizes.ends().tolist() == [sum(parts[:step]) for step in range(sizes.steps + 1)]
        for step in range(sizes.steps + 1):
            assert sizes.step_after(sum(parts[:step])) == step
            assert list(sizes.parts(first=step)) == parts[step:]


def test_the_step_at_a_number_of_rows():
    sizes = StepSizes(steps=3, rows=4)
    assert [sizes.step_at(rows) for rows in (0, 1, 2, 4)] == [0, 1, 2, 3]
    with pytest.raises(
        ValueError, match="trained on 3 rows, which does not fit an epoch with 4 rows in 3"
    ):
        sizes.step_at(3)
