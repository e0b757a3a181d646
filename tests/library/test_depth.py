"""Combinations of parameters that `make test` runs."""

import itertools

import pytest

from depth import DEEP, covering_pairs, crossed


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 4), (2, 3, 3, 2), (1, 5, 2)])
def test_every_pair_of_values_is_met(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = covering_pairs(*axes)
    for first, second in itertools.combinations(range(len(axes)), 2):
        met = {(row[first], row[second]) for row in rows}
        assert met == {*itertools.product(axes[first], axes[second])}
    assert rows == covering_pairs(*axes)
    assert len(set(rows)) == len(rows) <= len([*itertools.product(*axes)])


def test_pairs_are_fewer_than_the_grid() -> None:
    assert len(covering_pairs(range(3), range(3), range(3))) < 14


def test_two_axes_meet_each_of_their_values() -> None:
    assert covering_pairs("abc", [1, 2]) == [("a", 1), ("b", 2), ("c", 1)]


def test_verify_runs_the_whole_grid() -> None:
    assert (len(crossed("abc", [1, 2])) == 6) is DEEP
