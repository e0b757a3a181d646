"""Smaller batches: as many steps as full training, of sizes that differ by one at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import depth
from thresher.loading.smaller_batches import smaller_batches


def dealt(n, plan, *, batch_size=4, drop_last=False, least=1):
    return smaller_batches(len(plan), n, batch_size, drop_last=drop_last, least=least)


@given(st.integers(1, 500), st.integers(1, 20), st.floats(0.1, 1))
def test_batches_differ_by_one_row_at_most(n, batch_size, share):
    kept = round(share * n)
    if kept < -(-n // batch_size):
        return
    ends = dealt(n, range(kept), batch_size=batch_size)
    if ends is None:
        return
    sizes = ends[1:] - ends[:-1]
    assert ends[0] == 0 and ends[-1] == kept and len(sizes) == -(-n // batch_size)
    assert sizes.max() - sizes.min() <= 1


def test_full_training_has_full_batches():
    assert dealt(18, range(18)) is None
    assert dealt(18, range(18), drop_last=True) is None


@pytest.mark.parametrize(
    ("n", "kept", "drop_last", "steps", "rows"),
    [(16, 8, False, 4, 8), (18, 9, False, 5, 9), (18, 9, True, 4, 8), (18, 7, False, 5, 7)],
)
def test_the_samples_of_a_plan_are_all_dealt(n, kept, drop_last, steps, rows):
    found = dealt(n, range(kept), drop_last=drop_last)
    assert found is not None and (len(found) - 1, found[-1]) == (steps, rows)


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
    assert found is None or found[-1] >= least * steps
    assert named <= min(1, 1.01 * least * steps / most)


@given(st.integers(1, depth(200, 2000)), st.integers(1, 64), st.floats(0.05, 1.0), st.booleans())
def test_the_cost_is_the_share(n, batch_size, share, drop_last):
    """Within one sample of the epoch, whatever does not divide."""
    steps = n // batch_size if drop_last else -(-n // batch_size)
    most = steps * batch_size if drop_last else n
    if not most or share * most - 1 < steps:
        return
    found = dealt(n, range(round(share * n)), batch_size=batch_size, drop_last=drop_last)
    rows = most if found is None else int(found[-1])
    assert abs(rows / most - share) <= 1 / most + 1e-9
    assert found is None or (len(found) - 1 == steps and found[-1] <= most)
