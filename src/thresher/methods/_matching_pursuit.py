"""Orthogonal matching pursuit with weights above zero: a few vectors whose weighted sum comes close to a target.

Vectors ("atoms") are known by their inner products alone, so that the gradient of a whole layer is never written down: that of
a sample is the outer product of its error e (the gradient at the layer's outputs) and its feature h (the layer's input), and
<e_i x h_i, e_j x h_j> = <e_i, e_j> <h_i, h_j>. All arithmetic is in double precision.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thresher.selection import Values

ROUNDING = 1e-12
"""What is left of the target, as a share of its squared norm, from which on it is the rounding of float32 gradients."""
DEPENDENT = 1e-9
"""Squared sine of the angle to the atoms taken below which another one brings nothing new."""
RUN_BLOCK = 2**24
"""Numbers of run gradients that are written down at a time: 128 MiB."""


class Atoms(NamedTuple):
    """Vectors and a target, by their inner products.

    Attributes:
        row: From the position of an atom to its inner products with all n of them, shape (n,), float64.
        correlation: Inner products of the atoms with the target, shape (n,), float64.
        energy: Inner product of the target with itself.
    """

    row: Callable[[int], Values]
    correlation: Values
    energy: float


class Match(NamedTuple):
    """Atoms taken.

    Attributes:
        chosen: Positions, in the order in which they were taken, shape (k,), int64.
        weights: Their factors, above zero, shape (k,), float64.
        residual: Squared norm of what they leave of the target.
    """

    chosen: NDArray[np.int64]
    weights: Values
    residual: float


class _Basis:
    """The atoms taken so far, and the inverse of their Gram matrix, which grows and shrinks by one atom at a time."""

    def __init__(self, atoms: Atoms, size: int, penalty: float) -> None:
        self.atoms, self.penalty = atoms, penalty
        self.chosen: list[int] = []
        self._rows = np.empty((size, len(atoms.correlation)))
        self._inverse = np.empty((0, 0))

    @property
    def rows(self) -> Values:
        """Inner products of the atoms taken with all, shape (k, n)."""
        return self._rows[: len(self.chosen)]

    def add(self, atom: int) -> bool:
        """Take an atom, unless it is a sum of the others."""
        row, k = self.atoms.row(atom), len(self.chosen)
        cross, own = row[self.chosen], row[atom] + self.penalty
        step = self._inverse @ cross
        rest = own - cross @ step
        if not rest > DEPENDENT * own:
            return False
        inverse = np.empty((k + 1, k + 1))
        inverse[:k, :k] = self._inverse + np.outer(step, step / rest)
        inverse[:k, k] = inverse[k, :k] = -step / rest
        inverse[k, k] = 1 / rest
        self._rows[k], self._inverse = row, inverse
        self.chosen.append(atom)
        return True

    def drop(self, i: int) -> None:
        """Give the i-th atom taken back."""
        others = np.arange(len(self.chosen)) != i
        column, pivot = self._inverse[i, others], self._inverse[i, i]
        self._inverse = self._inverse[np.ix_(others, others)] - np.outer(column, column / pivot)
        self._rows[i : len(self.chosen) - 1] = self._rows[i + 1 : len(self.chosen)]
        del self.chosen[i]

    def solve(self) -> Values:
        """The best weights whatever their signs, refined once."""
        wanted = self.atoms.correlation[self.chosen]
        weights = self._inverse @ wanted
        return weights + self._inverse @ (wanted - self.rows[:, self.chosen] @ weights - self.penalty * weights)


def match(atoms: Atoms, budget: int, *, penalty: float = 0.0, tolerance: float = 0.0) -> Match:
    """Take the atom that points most along what is left of the target, weigh all taken anew, and go on.

    An atom whose weight is not above zero is given back, the lowest first; no atom is taken twice. It ends with the budget,
    when little enough is left, or when no atom points along what is left.

    Args:
        atoms: What there is.
        budget: How many to take at most.
        penalty: lambda, on the squared norm of the weights: min |target - sum of weighted atoms|^2 + lambda |weights|^2.
        tolerance: Norm of what may be left over the target's own.

    Returns:
        The atoms taken; ties go to the lower position.
    """
    n = len(atoms.correlation)
    basis, weights = _Basis(atoms, min(budget, n), penalty), np.empty(0)
    free = np.ones(n, dtype=np.bool_)
    left, residual = atoms.correlation, atoms.energy
    enough, least = max(tolerance**2, ROUNDING) * residual, ROUNDING * left.max(initial=0.0)
    while len(basis.chosen) < min(budget, n) and residual > enough:
        best = int(np.where(free, left, -np.inf).argmax())
        if not (free[best] and left[best] > least):
            break
        free[best] = False
        if not basis.add(best):
            continue
        weights = basis.solve()
        while len(weights) and weights.min() <= 0:
            basis.drop(int(weights.argmin()))
            weights = basis.solve()
        left = atoms.correlation - weights @ basis.rows
        residual = atoms.energy - float(weights @ (atoms.correlation + left)[basis.chosen])
    return Match(np.array(basis.chosen, dtype=np.int64), weights, max(0.0, residual))


def sample_atoms(error: Values, feature: Values) -> Atoms:
    """The gradient of each sample is an atom, their sum the target.

    Args:
        error: Shape (n, C).
        feature: Shape (n, D).
    """
    error, feature = error.astype(np.float64), feature.astype(np.float64)
    total = error.T @ feature

    def row(i: int) -> Values:
        return (error @ error[i]) * (feature @ feature[i])

    return Atoms(row, np.einsum("nd,nd->n", error @ total, feature), float(np.vdot(total, total)))


def run_atoms(error: Values, feature: Values, size: int) -> Atoms:
    """The mean gradient of each run of `size` samples is an atom, their sum the target; the last run may be shorter.

    The inner products of R runs are a matrix of R^2 numbers, summed up over blocks of the features.

    Args:
        error: Shape (n, C).
        feature: Shape (n, D).
        size: Samples of a run.
    """
    n, runs = len(error), -(-len(error) // size)
    counts = np.full(runs, float(size))
    counts[-1:] = n - (runs - 1) * size

    def cut(values: Values) -> Values:
        padded = np.zeros((runs * size, values.shape[1]))
        padded[:n] = values
        return padded.reshape(runs, size, -1)

    errors = (cut(error) / counts[:, None, None]).transpose(0, 2, 1)
    gram, width = np.zeros((runs, runs)), max(1, RUN_BLOCK // max(1, runs * error.shape[1]))
    for start in range(0, feature.shape[1], width):
        means = (errors @ cut(feature[:, start : start + width])).reshape(runs, -1)
        gram += means @ means.T
    return Atoms(lambda i: gram[i], gram.sum(1), float(gram.sum()))


def with_bias(feature: Values) -> Values:
    """Features with a one in front, which makes the gradient of the bias a part of the gradient of the weights."""
    return np.hstack([np.ones((len(feature), 1), feature.dtype), feature])


def match_runs(
    error: Values, feature: Values, order: Values, size: int, budget: int, *, penalty: float = 0.0, tolerance: float = 0.0
) -> tuple[Values, float]:
    """Match the sum of the mean gradients of mini-batches by ceil(budget / size) of them.

    Args:
        error: Gradient of each sample's loss at the outputs, shape (n, C), finite.
        feature: Input of the last layer, shape (n, D), finite; D may be 0, for the bias alone.
        order: Samples in the order that is cut into mini-batches, shape (n,).
        size: Samples of a mini-batch; the last may have fewer.
        budget: Samples wanted.
        penalty: On the squared norm of the weights.
        tolerance: Relative distance to the target that is close enough.

    Returns:
        Weight of each sample, shape (n,), 0 where not chosen; and the relative distance to the target that is left.
    """
    atoms = run_atoms(error[order], with_bias(feature[order]), size)
    found = match(atoms, math.ceil(budget / size), penalty=penalty, tolerance=tolerance)
    of_runs, weight = np.zeros(len(atoms.correlation)), np.zeros(len(error))
    of_runs[found.chosen] = found.weights
    weight[order] = np.repeat(of_runs, size)[: len(error)]
    return weight, _relative(found.residual, atoms.energy)


def match_classes(
    error: Values,
    feature: Values,
    labels: Values,
    budget: int,
    *,
    own_row: bool,
    penalty: float = 0.0,
    tolerance: float = 0.0,
) -> tuple[Values, float]:
    """Match the sum of the gradients of each class by ceil(budget * share of the class) of its samples.

    Args:
        error: As for `match_runs`.
        feature: As for `match_runs`.
        labels: Class of each sample, shape (n,), an output's number.
        budget: Samples wanted; the classes' own add up to as many or a few more.
        own_row: Whether to match the gradient of the class's own output alone.
        penalty: On the squared norm of the weights.
        tolerance: Relative distance to a target that is close enough.

    Returns:
        As for `match_runs`.
    """
    weight, residual, energy = np.zeros(len(error)), 0.0, 0.0
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        outputs = slice(label, label + 1) if own_row else slice(None)
        atoms = sample_atoms(error[rows, outputs], with_bias(feature[rows]))
        found = match(atoms, -(-budget * len(rows) // len(error)), penalty=penalty, tolerance=tolerance)
        weight[rows[found.chosen]] = found.weights
        residual, energy = residual + found.residual, energy + atoms.energy
    return weight, _relative(residual, energy)


def _relative(residual: float, energy: float) -> float:
    return math.sqrt(residual / energy) if energy > 0 else 0.0
