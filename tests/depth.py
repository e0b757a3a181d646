"""How deep the tests go: `make test` runs some of the instances, `make verify` (THRESHER_VERIFY=1) runs all of them."""

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

DEEP = os.environ.get("THRESHER_VERIFY") == "1"


in_verify = pytest.mark.skipif(not DEEP, reason="make verify runs it")
"""Mark of a test that `make test` leaves out."""


def depth(quick: T, full: T) -> T:
    """Returns the number of instances, examples or seeds that a test looks at, or the list of its cases.

    Args:
        quick: Number or cases in `make test`.
        full: Number or cases in `make verify`.
    """
    return full if DEEP else quick
