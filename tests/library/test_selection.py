"""Counts, smallest, largest, cuts and draws, by hand. Properties are in tests/property."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from thresher import rng
from thresher.selection import (
    CHUNK,
    chosen,
    chunks,
    draw_lots,
    ids_of,
    kth_smallest,
    largest,
    on_host,
    quantile_cut,
    share,
    smallest,
)


def test_share_repairs_every_percentage() -> None:
    """All whole percentages of all sizes up to 400, among them those whose float product falls below: .29 * 100."""
    broken = 0
    for percent in range(101):
        for n in range(401):
            exact = math.floor(Fraction(percent, 100) * n)
            assert share(percent / 100, n) == exact
            broken += int(percent / 100 * n) != exact
    assert broken > 20
    assert share(0.3, 1_281_167) == 384_350
    assert share(0.999999, 10) == 9


@pytest.mark.parametrize(
    ("values", "k", "marked"),
    [
        ([3, 1, 2], 0, []),
        ([3, 1, 2], 2, [1, 2]),
        ([3, 1, 2], 5, [0, 1, 2]),
        ([1, 1, 1, 1], 2, [0, 1]),
        ([2, 1, 2, 0, 2], 3, [0, 1, 3]),
        ([math.nan, 1, -math.inf, math.inf, 0], 3, [1, 4]),
        ([math.nan, math.inf], 1, []),
        ([], 1, []),
        ([0.0, -0.0, 0.0], 2, [0, 1]),
        ([-1, 5], -1, []),
    ],
)
def test_smallest(values: list[float], k: int, marked: list[int]) -> None:
    for dtype in (np.float32, np.float64):
        assert np.flatnonzero(smallest(np.array(values, dtype), k)).tolist() == marked


@pytest.mark.parametrize(
    ("values", "k", "marked"),
    [
        ([3, 1, 2], 2, [0, 2]),
        ([1, 1, 1, 1], 2, [2, 3]),
        ([math.nan, 1, -math.inf, math.inf, 0], 1, [1]),
        ([math.nan, 1, -math.inf, math.inf, 0], 9, [1, 4]),
        ([1, 2], 0, []),
    ],
)
def test_largest(values: list[float], k: int, marked: list[int]) -> None:
    assert np.flatnonzero(largest(np.array(values), k)).tolist() == marked


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, np.int16, np.int64, np.uint8, np.uint32]
)
def test_kth_smallest(dtype: type) -> None:
    info = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.finfo(dtype)
    values = np.array([3, 0, 1, info.max, info.min, 7, 1, 2], dtype)
    found = [kth_smallest(values, k) for k in range(len(values))]
    assert found == sorted(values.tolist()) and {one.dtype for one in found} == {np.dtype(dtype)}


@pytest.mark.parametrize("n", [0, 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_chunks_cover_the_numbers(n: int) -> None:
    assert [i for part in chunks(n) for i in range(n)[part]] == [*range(n)]


def test_inputs_are_left_alone() -> None:
    values = np.array([3.0, math.nan, 1.0, 2.0])
    before = values.copy()
    smallest(values, 2)
    largest(values, 2)
    np.testing.assert_array_equal(values, before)


@pytest.mark.parametrize(
    ("q", "cut"), [(0.1, 10.0), (0.2, 11.0), (0.29, 12.0), (0.7, 16.0), (0.999, 18.0)]
)
def test_quantile_cut(q: float, cut: float) -> None:
    """floor(q * 9) of nine values lie before it."""
    values = np.random.default_rng(0).permutation(np.arange(10.0, 19.0))
    assert quantile_cut(values, q) == cut
    assert (values < cut).sum() == math.floor(q * 9)


def test_quantile_cut_of_one_value() -> None:
    assert quantile_cut(np.array([5.0]), 0.99) == 5.0


def test_chosen_draws_without_replacement_and_evenly() -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(6000):
        mask = chosen(4, 2, torch.Generator().manual_seed(seed))
        assert mask.dtype == np.bool_ and mask.sum() == 2
        counts[tuple(np.flatnonzero(mask).tolist())] += 1
    assert len(counts) == 6
    assert all(abs(count - 1000) < 5 * math.sqrt(1000) for count in counts.values())


def test_chosen_all_and_none() -> None:
    assert chosen(7, 7, torch.Generator()).all()
    assert not chosen(7, 0, torch.Generator()).any()
    assert chosen(0, 0, torch.Generator()).shape == (0,)


def test_lots_draw_without_replacement_and_evenly() -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(6000):
        mask = draw_lots(2, torch.Generator().manual_seed(seed), 4)
        assert mask.dtype == np.bool_ and mask.sum() == 2
        counts[tuple(np.flatnonzero(mask).tolist())] += 1
    assert len(counts) == 6
    assert all(abs(count - 1000) < 5 * math.sqrt(1000) for count in counts.values())


def test_lots_among_some_samples() -> None:
    among = np.array([True, False, True, True, False])
    for k in range(5):
        mask = draw_lots(k, torch.Generator().manual_seed(k), 5, among)
        assert mask.sum() == min(k, 3) and not (mask & ~among).any()
    assert not draw_lots(0, torch.Generator(), 5).any()


def test_of_equal_lots_the_lower_ids_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "lots", lambda base, ids: np.full(len(ids), 2**32 - 1, np.uint32))
    mask = draw_lots(3, torch.Generator(), 6, np.array([False, True, True, False, True, True]))
    assert np.flatnonzero(mask).tolist() == [1, 2, 4]


def test_ids_of() -> None:
    ids = ids_of(np.array([True, False, True]))
    assert ids.dtype == torch.int64 and ids.tolist() == [0, 2]
    assert ids_of(np.zeros(3, np.bool_)).shape == (0,)


def test_on_host_shares_memory_of_the_cpu() -> None:
    column = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        values = on_host(column)
        column[1] = 4
    assert values[1] == 4
