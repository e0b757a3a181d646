"""How deep the tests go: `make test` runs some of the instances, `make verify` (THRESHER_VERIFY=1) runs all of them."""

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

DEEP = os.environ.get("THRESHER_VERIFY") == "1"


VERIFY_RUNS_IT = "make verify runs it"

in_verify = pytest.mark.skipif(not DEEP, reason=VERIFY_RUNS_IT)
"""Mark of a test that `make test` leaves out."""


def depth(quick: T, full: T) -> T:
    """Returns the number of instances, examples or seeds that a test looks at, or the list of its cases.

    Args:
        quick: Number or cases in `make test`.
        full: Number or cases in `make verify`.
    """
    return full if DEEP else quick


def crossed(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns combinations of one value per axis: all of them in `make verify`, those of `covering_pairs` in `make test`."""
    return depth(covering_pairs(*axes), list(product(*axes)))


def covering_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns few combinations in which every value of an axis meets every value of every other axis.

    Two axes have each of their values instead: all pairs would be the whole grid.
    """
    if len(axes) < 3:
        number = max(len(axis) for axis in axes)
        return [tuple(axis[row % len(axis)] for axis in axes) for row in range(number)]
    grid = list(product(*(range(len(axis)) for axis in axes)))
    missing = {pair for row in grid for pair in _pairs(row)}
    rows = []
    while missing:
        row = max(grid, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(row)
        rows.append(row)
    return [
        tuple(axis[place] for axis, place in zip(axes, row, strict=True)) for row in sorted(rows)
    ]


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(row), 2))


def verify_note(left_out: int) -> str:
    """Returns what `make verify` adds to the tests that just ran.

    Args:
        left_out: Number of tests that were skipped because `make verify` runs them.
    """
    return (
        f"make verify also runs {left_out} skipped tests, whole grids of parameters, all instances and seeds, "
        "and new random examples."
    )
