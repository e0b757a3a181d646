"""Functions that tests of several folders share."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from thresher.run.checkpoint import BOOKS, digest_of


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
    """A saved state of one process as if it had been saved with other values of what this process has by itself."""
    (own,) = state["ranks"]
    return signed({**state, "ranks": ({**own, **fields},)})


def signed(state):
    """A state as if it had been saved so."""
    ranks = [
        {**own, "books": own["books"] and {name: digest_of(state[name]) for name in BOOKS}}
        for own in state["ranks"]
    ]
    return {**state, "digest": digest_of(ranks), "ranks": tuple(ranks)}


def lot(base: int, i: int) -> int:
    """The random number of a sample: the upper half of a counter that is mixed (SplitMix64), in plain integers."""
    bits = (i + 1) * 0x9E3779B97F4A7C15 + base
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits %= 2**64
        bits = (bits ^ (bits >> shift)) * factor
    return (bits % 2**64) >> 32


def winners(k: int, generator: torch.Generator, among: Iterable[int]) -> set[int]:
    """The samples that a draw without replacement chooses, which takes one number from the generator."""
    base = int(torch.randint(2**62, (), generator=generator))
    return set(sorted(among, key=lambda i: (lot(base, i), i))[:k])


def hard_losses(kind: str, number: int, most: int = 60) -> list[float]:
    """Losses of one of `HARD_KINDS`, which are hard to order."""
    r = np.random.default_rng([number, *kind.encode()])
    n = 1 if kind == "one" else int(r.integers(2, most))
    loss = r.gamma(0.7, 1.0, n).astype(np.float32)
    if kind == "ties":
        loss = r.choice(np.float32([0.5, 1.0, 1.5, 4]), n)
    if kind == "equal":
        loss[:] = r.choice(np.float32([0, 0.1, 3]))
    if kind in ("nonfinite", "lost"):
        bad = r.random(n) < (0.3 if kind == "nonfinite" else 2)
        loss[bad] = r.choice(np.float32([np.nan, np.inf, -np.inf]), int(bad.sum()))
    if kind == "huge":
        loss *= np.float32(1e37)
    if kind == "tiny":
        loss *= np.float32(1e-42)
    if kind == "negative":
        loss -= np.float32(1.5)
    return loss.tolist()


HARD_KINDS = ("plain", "ties", "one", "equal", "nonfinite", "lost", "huge", "tiny", "negative")
"""Kinds of `hard_losses`."""


def as_if_trained(run: Any) -> None:
    """Has a run take a pass over its loader for one that was trained on, for tests of the loader alone."""
    run._parts.cost.steps += 1
    run._parts.attributor.meter.credited += 1
    run._parts.attributor._batches.recent[-1].credited = True
