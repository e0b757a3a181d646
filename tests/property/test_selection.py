"""Properties of the pure selection functions, on inputs that hypothesis makes up."""

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import depth
from thresher.methods.infobatch import well_learned
from thresher.methods.kakurenbo import hiding_candidates
from thresher.selection import chosen, largest, quantile_cut, share, smallest

hard = settings(max_examples=depth(60, 300))

# Few distinct values, so that ties are the rule; every kind of value that is not finite.
tied = st.sampled_from([0.0, -0.0, 0.1, 0.25, 1.0, 3.0, -2.0, 1e30, math.nan, math.inf, -math.inf])
losses = st.lists(st.one_of(tied, st.floats(width=32)), max_size=40)
hundredths = st.integers(0, 99)


def ordered(values: list[float]) -> list[int]:
    """Ids of the finite values by (value, id)."""
    return [
        i for _, i in sorted((value, i) for i, value in enumerate(values) if math.isfinite(value))
    ]


def marked(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()


@hard
@given(losses, st.integers(-3, 50))
def test_smallest_and_largest_are_the_ends_of_the_sorted_ids(values: list[float], k: int) -> None:
    array = np.array(values, np.float32)
    order = ordered(array.tolist())
    assert marked(smallest(array, k)) == sorted(order[: max(k, 0)])
    assert marked(largest(array, k)) == sorted(
        order[len(order) - k :] if 0 < k <= len(order) else order if k > 0 else []
    )


@hard
@given(losses, st.integers(0, 40))
def test_smallest_and_the_largest_rest_do_not_overlap(values: list[float], k: int) -> None:
    """Hidden and dropped samples stay apart while there are enough finite losses."""
    array = np.array(values, np.float32)
    finite = int(np.isfinite(array).sum())
    k = min(k, finite)
    low, high = smallest(array, k), largest(array, finite - k)
    assert not (low & high).any()
    assert int((low | high).sum()) == finite


@hard
@given(hundredths, st.integers(0, 10**7))
def test_share_is_exact_for_hundredths(percent: int, n: int) -> None:
    assert share(percent / 100, n) == math.floor(Fraction(percent, 100) * n)


@hard
@given(losses, hundredths)
def test_easiest_by_threshold_is_closed_under_ties(values: list[float], percent: int) -> None:
    array = np.array(values, np.float32)
    sort, threshold = (
        hiding_candidates(array, percent / 100),
        hiding_candidates(array, percent / 100, by_threshold=True),
    )
    assert not (sort & ~threshold).any()
    finite = np.isfinite(array)
    assert not (threshold & ~finite).any()
    assert set(array[threshold].tolist()).isdisjoint(array[finite & ~threshold].tolist())
    if sort.any():
        assert array[threshold].max() == array[sort].max()


@hard
@given(losses, st.one_of(st.just("mean"), st.integers(1, 99)))
def test_well_learned_is_a_lower_set_that_is_never_everything(
    values: list[float], threshold: int | str
) -> None:
    array = np.array(values, np.float32)
    below = well_learned(array, threshold if isinstance(threshold, str) else threshold / 100)
    finite = np.isfinite(array)
    assert not (below & ~finite).any()
    rest = finite & ~below
    assert rest.any() == finite.any()  # the largest finite loss is never below the cut
    if below.any():
        assert array[below].max() < array[rest].min()


@hard
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.integers(1, 99),
)
def test_as_many_values_as_the_quantile_says_lie_before_the_cut(
    values: list[float], percent: int
) -> None:
    cut, count = (
        quantile_cut(np.array(values), percent / 100),
        math.floor(Fraction(percent, 100) * len(values)),
    )
    assert sorted(values)[count] == cut
    assert sum(value < cut for value in values) <= count


@hard
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 2**32))
def test_chosen_has_its_count_and_repeats_with_its_generator(n: int, k: int, seed: int) -> None:
    drawn = [chosen(n, min(k, n), torch.Generator().manual_seed(seed)) for _ in range(2)]
    assert (drawn[0] == drawn[1]).all()
    assert drawn[0].shape == (n,) and drawn[0].sum() == min(k, n)
