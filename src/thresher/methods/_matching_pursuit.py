"""Orthogonal matching pursuit with positive weights: finds a few vectors whose weighted sum is close to a target.

Vectors ("atoms") are represented by their inner products only, so the gradient of a whole layer is never stored. The
gradient of a sample is the outer product of its error e (the gradient at the outputs of the layer) and its feature h (the input
of the layer), and <e_i x h_i, e_j x h_j> = <e_i, e_j> <h_i, h_j>. All arithmetic is in double precision.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thresher.selection import Values

ROUNDING = 1e-12
"""Residuals up to this share of the squared norm of the target count as rounding errors of float32 gradients."""
DEPENDENT = 1e-9
"""An atom counts as a linear combination of the chosen atoms if the squared sine of its angle to their span is below this."""
RUN_BLOCK = 2**24
"""Number of values of mini-batch gradients that are in memory at a time: 128 MiB."""


class Atoms(NamedTuple):
    """Vectors and a target, represented by their inner products.

    Attributes:
        row: Function from the position of an atom to its inner products with all n atoms, shape (n,), float64.
        correlation: Inner products of the atoms with the target, shape (n,), float64.
        energy: Inner product of the target with itself.
    """

    row: Callable[[int], Values]
    correlation: Values
    energy: float


class Match(NamedTuple):
    """Atoms that were chosen, with their weights.

    Attributes:
        chosen: Positions of the atoms in the order of the choice, shape (k,), int64.
        weights: Weights of the atoms, above zero, shape (k,), float64.
        residual: Squared norm of the difference between the target and the weighted sum.
    """

    chosen: NDArray[np.int64]
    weights: Values
    residual: float


class _Basis:
    """The atoms chosen so far and the inverse of their Gram matrix, which grows and shrinks by one atom at a time."""

    def __init__(self, atoms: Atoms, size: int, penalty: float) -> None:
        self.atoms = atoms
        self.penalty = penalty
        self.chosen: list[int] = []
        self._rows = np.empty((size, len(atoms.correlation)))
        self._inverse = np.empty((0, 0))

    @property
    def rows(self) -> Values:
        """Inner products of the chosen atoms with all atoms, shape (k, n)."""
        return self._rows[: len(self.chosen)]

    def add(self, atom: int) -> bool:
        """Adds an atom, unless it is a linear combination of the chosen ones; returns whether it was added."""
        row = self.atoms.row(atom)
        k = len(self.chosen)
        cross = row[self.chosen]
        squared_norm = row[atom] + self.penalty
        step = self._inverse @ cross
        rest = squared_norm - cross @ step
        if not rest > DEPENDENT * squared_norm:
            return False
        inverse = np.empty((k + 1, k + 1))
        inverse[:k, :k] = self._inverse + np.outer(step, step / rest)
        inverse[:k, k] = inverse[k, :k] = -step / rest
        inverse[k, k] = 1 / rest
        self._rows[k] = row
        self._inverse = inverse
        self.chosen.append(atom)
        return True

    def drop(self, i: int) -> None:
        """Removes the i-th chosen atom."""
        others = np.arange(len(self.chosen)) != i
        column = self._inverse[i, others]
        pivot = self._inverse[i, i]
        self._inverse = self._inverse[np.ix_(others, others)] - np.outer(column, column / pivot)
        self._rows[i : len(self.chosen) - 1] = self._rows[i + 1 : len(self.chosen)]
        del self.chosen[i]

    def solve(self) -> Values:
        """Returns the least-squares weights of the chosen atoms, of any sign, after one step of iterative refinement."""
        wanted = self.atoms.correlation[self.chosen]
        weights = self._inverse @ wanted
        return weights + self._inverse @ (
            wanted - self.rows[:, self.chosen] @ weights - self.penalty * weights
        )


def match(atoms: Atoms, budget: int, *, penalty: float = 0.0, tolerance: float = 0.0) -> Match:
    """Finds atoms whose weighted sum is close to the target.

    The residual is the target minus the weighted sum so far. Each step adds the atom with the largest inner product with the
    residual. Atoms whose weight is not above 0 are removed, the lowest weight first; no atom is chosen twice. The search ends
    when the budget is used up, when the residual is small enough, or when no atom has a positive inner product with it.

    Args:
        atoms: Atoms and the target.
        budget: Largest number of atoms.
        penalty: Factor lambda on the squared norm of the weights: min |target - sum of weighted atoms|^2 + lambda |weights|^2.
        tolerance: Norm of the residual, divided by the norm of the target, at which the search ends.

    Returns:
        Chosen atoms and their weights. A tie goes to the atom with the lower position.
    """
    n = len(atoms.correlation)
    basis = _Basis(atoms, min(budget, n), penalty)
    weights = np.empty(0)
    free = np.ones(n, dtype=np.bool_)
    left = atoms.correlation
    residual = atoms.energy
    enough = max(tolerance**2, ROUNDING) * residual
    least = ROUNDING * left.max(initial=0.0)
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
    """Returns the gradients of the samples as atoms, and their sum as the target.

    Args:
        error: Gradient of each sample's loss at the outputs, shape (n, C).
        feature: Input of the last layer, shape (n, D).
    """
    error = error.astype(np.float64)
    feature = feature.astype(np.float64)
    total = error.T @ feature

    def row(i: int) -> Values:
        return (error @ error[i]) * (feature @ feature[i])

    return Atoms(row, np.einsum("nd,nd->n", error @ total, feature), float(np.vdot(total, total)))


def run_atoms(error: Values, feature: Values, size: int) -> Atoms:
    """Returns the mean gradients of mini-batches as atoms, and their sum as the target.

    A mini-batch (run) is `size` consecutive samples; the last one may be smaller. The inner products of R runs are a matrix of
    R^2 numbers, summed over blocks of the features.

    Args:
        error: Gradient of each sample's loss at the outputs, shape (n, C).
        feature: Input of the last layer, shape (n, D).
        size: Number of samples per run, 1 or more.
    """
    n = len(error)
    runs = -(-len(error) // size)
    counts = np.full(runs, float(size))
    counts[-1:] = n - (runs - 1) * size

    def cut(values: Values) -> Values:
        padded = np.zeros((runs * size, values.shape[1]))
        padded[:n] = values
        return padded.reshape(runs, size, -1)

    errors = (cut(error) / counts[:, None, None]).transpose(0, 2, 1)
    gram = np.zeros((runs, runs))
    width = max(1, RUN_BLOCK // max(1, runs * error.shape[1]))
    for start in range(0, feature.shape[1], width):
        means = (errors @ cut(feature[:, start : start + width])).reshape(runs, -1)
        gram += means @ means.T
    return Atoms(lambda i: gram[i], gram.sum(1), float(gram.sum()))


def with_bias(feature: Values) -> Values:
    """Prepends a 1 to each feature vector. The gradient of the weights then includes the gradient of the bias."""
    return np.hstack([np.ones((len(feature), 1), feature.dtype), feature])


def match_runs(
    error: Values,
    feature: Values,
    order: Values,
    size: int,
    budget: int,
    *,
    penalty: float = 0.0,
    tolerance: float = 0.0,
) -> tuple[Values, float]:
    """Chooses ceil(budget / size) mini-batches whose weighted gradients add up to nearly the sum of all their gradients.

    Args:
        error: Gradient of each sample's loss at the outputs, shape (n, C), finite.
        feature: Input of the last layer, shape (n, D), finite; D may be 0, for the bias alone.
        order: Positions of the samples in the order that is cut into mini-batches, shape (n,).
        size: Number of samples per mini-batch; the last may have fewer.
        budget: Number of samples wanted.
        penalty: Factor on the squared norm of the weights. Default 0.
        tolerance: Relative distance to the target at which the search ends. Default 0.

    Returns:
        Weight of each sample, shape (n,), 0 for samples that are not chosen, and the relative distance to the target.
    """
    atoms = run_atoms(error[order], with_bias(feature[order]), size)
    matched = match(atoms, math.ceil(budget / size), penalty=penalty, tolerance=tolerance)
    of_runs = np.zeros(len(atoms.correlation))
    weight = np.zeros(len(error))
    of_runs[matched.chosen] = matched.weights
    weight[order] = np.repeat(of_runs, size)[: len(error)]
    return weight, _relative(matched.residual, atoms.energy)


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
    """Chooses ceil(budget * share of the class) samples of each class whose weighted gradients match the sum of the class.

    Args:
        error: Gradient of each sample's loss at the outputs, shape (n, C), finite.
        feature: Input of the last layer, shape (n, D), finite; D may be 0, for the bias alone.
        labels: Class of each sample, which is the number of an output, shape (n,), int64.
        budget: Number of samples wanted; the numbers of the classes add up to this or a few more.
        own_row: Whether to match only the gradient of the weights of the output that belongs to the class.
        penalty: Factor on the squared norm of the weights. Default 0.
        tolerance: Relative distance to a target at which the search ends. Default 0.

    Returns:
        Weight of each sample, shape (n,), 0 for samples that are not chosen, and the relative distance to the targets.
    """
    weight = np.zeros(len(error))
    residual = 0.0
    energy = 0.0
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        outputs = slice(label, label + 1) if own_row else slice(None)
        atoms = sample_atoms(error[rows, outputs], with_bias(feature[rows]))
        matched = match(
            atoms, -(-budget * len(rows) // len(error)), penalty=penalty, tolerance=tolerance
        )
        weight[rows[matched.chosen]] = matched.weights
        residual = residual + matched.residual
        energy = energy + atoms.energy
    return weight, _relative(residual, energy)


def _relative(residual: float, energy: float) -> float:
    return math.sqrt(residual / energy) if energy > 0 else 0.0
