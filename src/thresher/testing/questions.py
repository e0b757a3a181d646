"""Hard questions for methods: values of signals that are tied, huge or not finite; and answers that can be compared."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.plans import BatchPlan, EpochPlan

CPU = torch.device("cpu")

SignalGenerator = Callable[[np.random.Generator, int], NDArray[Any]]
"""Function `(generator, n) -> (n,)` that draws random values of one signal."""

SIGNAL_GENERATORS: dict[str, SignalGenerator] = {
    "loss": lambda r, n: r.gamma(1.0, 1.0, n),
    "grad_norm": lambda r, n: r.gamma(1.0, 0.5, n),
    "alignment": lambda r, n: r.normal(size=n),
    "el2n": lambda r, n: r.uniform(0, math.sqrt(2), n),
    "entropy": lambda r, n: r.gamma(1.0, 0.5, n),
    "uncertainty": lambda r, n: r.random(n),
    "margin": lambda r, n: r.uniform(-1, 1, n),
    "confidence": lambda r, n: r.random(n),
    "batch_confidence": lambda r, n: r.random(n),
    "batch_loss": lambda r, n: r.gamma(4.0, 0.25, n),
    "label": lambda r, n: r.integers(0, 4, n),
    "correct": lambda r, n: r.random(n) < 0.8,
}
VALUE_KINDS = ("tied", "smooth", "equal", "zero", "huge", "spoilt", "lost")
"""Kinds of values: rounded to eighths, as drawn, all equal, all 0, up to 1e31, some not finite, none finite."""


def signal_values(generator: SignalGenerator, kind: str, seed: tuple[int, ...], n: int) -> Tensor:
    """Draws values of one signal; different signals with the same n are not finite in different places.

    Args:
        generator: Function that draws the values.
        kind: Kind of values, one of `VALUE_KINDS`.
        seed: Random seed of the values, which starts with the number of the signal.
        n: Number of values.

    Returns:
        Values, shape (n,), float32, bool or int64.

    Example:
        >>> signal_values(SIGNAL_GENERATORS["loss"], "equal", (0, 1), 3)
        tensor([2.5000, 2.5000, 2.5000])
    """
    r = np.random.default_rng(seed)
    values = np.asarray(generator(r, n))
    if values.dtype == np.bool_:
        return torch.from_numpy(np.ones(n, dtype=np.bool_) if kind in ("equal", "zero") else values)
    if values.dtype.kind == "i":
        return torch.from_numpy(values.astype(np.int64) * (kind not in ("equal", "zero")))
    values = values.astype(np.float32)
    if kind != "smooth":
        values = np.round(values * 8) / 8  # sums of eighths are exact in any order
    if kind in ("equal", "zero"):
        values = np.full(n, 0.0 if kind == "zero" else values[0])
    if kind == "huge":
        values = values * np.float32(1e30)
    places = np.random.default_rng([*seed[1:], n])
    if kind in ("spoilt", "lost"):
        bad = places.random(n) < (0.2 if kind == "spoilt" else 2.0)
        values[bad] = places.choice([math.nan, math.inf, -math.inf], int(bad.sum()))
    return torch.from_numpy(values.astype(np.float32))


def signals_of_kind(generators: Mapping[str, SignalGenerator], kind: str, seed: int, n: int) -> dict[str, Tensor]:
    """Draws values of several signals.

    Args:
        generators: Function that draws the values, by the name of the signal.
        kind: Kind of values, one of `VALUE_KINDS`.
        seed: Random seed of the values.
        n: Number of values.

    Returns:
        Values by the name of the signal, each of shape (n,).

    Example:
        >>> signals_of_kind(SIGNAL_GENERATORS, "zero", 0, 2)["margin"]
        tensor([0., 0.])
    """
    return {
        name: signal_values(generator, kind, (i, seed), n) for i, (name, generator) in enumerate(sorted(generators.items()))
    }


def graded_signals(names: Iterable[str], grades: NDArray[Any]) -> dict[str, Tensor]:
    """Makes signals that rise or fall together: samples of the same grade are tied in all of them.

    Args:
        names: Names of the signals.
        grades: Grades of the samples, shape (n,), integers 0 to 4; a higher grade is harder.

    Returns:
        Values by the name of the signal, each of shape (n,).

    Example:
        >>> graded_signals(["confidence"], np.array([0, 4, 0]))
        {'confidence': tensor([0.8750, 0.3750, 0.8750])}
    """
    rising = torch.from_numpy((grades + 1) / 8).float()
    falling = {"confidence": 1 - rising, "margin": 1 - rising, "correct": rising < 0.5}
    return {name: falling.get(name, rising) for name in names}


def full_pass_columns(kind: str, seed: tuple[int, ...], n: int) -> dict[str, Tensor]:
    """Draws the results of a full pass over n samples by a classifier of 4 classes.

    Args:
        kind: Kind of values, one of `VALUE_KINDS`.
        seed: Random seed of the values.
        n: Number of samples.

    Returns:
        "error": p - y, shape (n, 4); "feature": shape (n, 5), both float32; "label": shape (n,), int64.

    Example:
        >>> {name: tuple(column.shape) for name, column in full_pass_columns("tied", (0, 0), 3).items()}
        {'error': (3, 4), 'feature': (3, 5), 'label': (3,)}
    """
    r = np.random.default_rng(seed)
    chances = np.exp(r.normal(size=(n, 4)))
    error = chances / chances.sum(1, keepdims=True) - np.eye(4)[r.integers(0, 4, n)]
    scale = signal_values(lambda _, k: np.ones(k), kind, seed, n)[:, None]
    found = {"error": error, "feature": r.normal(size=(n, 5))}
    label = torch.from_numpy(error.argmin(1))
    if kind == "equal":
        found = {name: np.broadcast_to(rows[:1], rows.shape) for name, rows in found.items()}
    if kind != "smooth":
        found = {name: np.round(rows * 8) / 8 for name, rows in found.items()}
    return {name: torch.tensor(rows, dtype=torch.float32) * scale for name, rows in found.items()} | {"label": label}


def comparable(value: Any) -> Any:
    """Returns a copy that `==` compares bit by bit, except that all NaN are equal and -0.0 equals 0.0.

    Args:
        value: Tensor, plain value, or nested dicts, lists and tuples of these.

    Example:
        >>> comparable({"a": torch.tensor([0.0])}) == comparable({"a": torch.tensor([-0.0])})
        True
    """
    if isinstance(value, Tensor):
        if value.is_floating_point():
            value = torch.where(value.isnan(), torch.nan, value + 0.0)
        plain = value.float() if value.dtype is torch.bfloat16 else value  # NumPy has no bfloat16
        return str(value.dtype), tuple(value.shape), plain.detach().cpu().numpy().tobytes()
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def comparable_plan(plan: EpochPlan | BatchPlan) -> Any:
    """Returns a copy of the contents of a plan that `==` compares; lots, which follow from the ids, are left out.

    Args:
        plan: Plan of an epoch or a batch.

    Example:
        >>> comparable_plan(BatchPlan(torch.tensor([0, 2]))) == comparable_plan(BatchPlan(torch.tensor([0, 1])))
        False
    """
    contents = {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(plan).items()}
    return comparable({name: value for name, value in contents.items() if name != "lots"})
