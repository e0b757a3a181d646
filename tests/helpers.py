"""Functions that tests of several folders share."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """Adds a note to what fails inside, so that a failure in a loop says where."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


def over_instances(numbers: Iterable[int]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test for many instances as one test; a failure names the number of its instance.

    Args:
        numbers: Numbers of the instances; see `depth`.

    Returns:
        A decorator. The first parameter of the test is the instance number, the others are fixtures and parameters of pytest.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def over_all(**arguments: Any) -> None:
            for number in numbers:
                with noted(f"instance {number}"):
                    test(number, **arguments)

        signature = inspect.signature(test)
        over_all.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
        return over_all

    return decorate


def assert_same(a, b, path=""):
    """Checks that two nested structures are equal bit for bit; the message names the place where they differ."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, np.ndarray):
        assert (a == b).all(), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    else:
        assert a == b, path


def changed(state, **fields):
    """A saved state of one process with other values of what this process has by itself."""
    (own,) = state["ranks"]
    return {**state, "ranks": ({**own, **fields},)}
