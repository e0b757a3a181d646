"""Planted problems: small tasks with a known solution, on which one kind of method must beat random samples of equal cost.

- "redundant": nearly all samples are easy and alike; the test samples are like a few hard ones, for which the easy feature is
  misleading. Methods that prefer hard samples win.
- "noisy": a part of the labels is wrong, and there are too few samples to average that out. Methods that avoid samples that
  cannot be learned win.
- "outliers": a regression in which a part of the targets is grossly wrong. Methods that prefer small losses win.
- "skewed": a regression in which nearly all of the gradient comes from a few noisy targets, and "rare": a classification
  in which it comes from a few wrong labels. Small batches have few of these samples or none. The result is the loss over the
  training samples themselves. Methods that reduce the variance of the gradient, by weights or by their choice, get closer to
  the least possible loss.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from thresher import rng
from thresher.methods.full import FullData
from thresher.methods.random_backprop import RandomBackprop
from thresher.methods.registry import no_such
from thresher.methods.uniform import UniformSubset
from thresher.run.attach import attach


@dataclass(frozen=True, eq=False)
class Toy:
    """A planted problem, as `planted` returns it.

    Args:
        name: Name of the problem.
        seed: Random seed of the samples and their order.
        x: Inputs, shape (N, D), float32.
        y: Targets, shape (N,).
        evaluate: Function that returns the score of a trained model; larger is better.
        criterion: Loss.
        outputs: Number of outputs of the linear model.
        lr: Learning rate of plain gradient descent.
        batch: Batch size.
        epochs: Number of epochs of the training run.
        held_out: Inputs and targets of more samples of the same kind.

    Example:
        >>> toy = planted("noisy", seed=0)
        >>> len(toy.x), toy.model(), toy.evaluate(toy.model())
        (256, Linear(in_features=40, out_features=2, bias=False), 0.49725)
    """

    name: str
    seed: int
    x: Tensor
    y: Tensor
    evaluate: Callable[[nn.Module], float]
    criterion: nn.Module
    outputs: int
    lr: float
    batch: int
    epochs: int
    held_out: tuple[Tensor, Tensor]

    def loader(self) -> DataLoader[Any]:
        """Returns a loader whose order of samples depends only on the seed."""
        draws = torch.Generator().manual_seed(self.seed)
        return DataLoader(TensorDataset(self.x, self.y), self.batch, shuffle=True, generator=draws)

    def model(self) -> nn.Module:
        """Returns an untrained linear model whose weights are all zero."""
        linear = nn.Linear(self.x.shape[1], self.outputs, bias=False)
        nn.init.zeros_(linear.weight)
        if self.outputs > 1:
            return linear
        return nn.Sequential(linear, nn.Flatten(0))


class Outcome(NamedTuple):
    """Results of one training run.

    Attributes:
        score: Score of the trained model; larger is better.
        cost: Cost as a share of the cost of full training, as `train_model` returns it.

    Example:
        >>> Outcome(score=0.9, cost=0.5).score
        0.9
    """

    score: float
    cost: float


class Contest(NamedTuple):
    """Comparison of a method with random samples of the same cost.

    Attributes:
        method: Scores of the method, one per seed; larger is better.
        uniform: Scores of random samples, one per seed.
        cost: Cost of the method as a share of the cost of full training, the mean over the seeds.

    Example:
        >>> contest = Contest(method=(0.8, 0.9), uniform=(0.7, 0.7), cost=0.5)
        >>> print(f"{contest.gain:.2f} +- {contest.standard_error:.2f}")
        0.15 +- 0.05
    """

    method: tuple[float, ...]
    uniform: tuple[float, ...]
    cost: float

    @property
    def gain(self) -> float:
        """The mean difference between the scores of the method and the scores of random samples."""
        return float(np.mean(np.subtract(self.method, self.uniform)))

    @property
    def standard_error(self) -> float:
        """The standard error of the gain, with seeds paired; infinite with one seed."""
        differences = np.subtract(self.method, self.uniform)
        if len(differences) > 1:
            return float(np.std(differences, ddof=1) / np.sqrt(len(differences)))
        return float("inf")


def _as_tensors(*arrays: Any) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)


def _accuracy(x: Tensor, y: Tensor) -> Callable[[nn.Module], float]:
    def evaluate(model: nn.Module) -> float:
        return (model(x).argmax(1) == y).double().mean().item()

    return evaluate


def _redundant(r: np.random.Generator) -> dict[str, Any]:
    d = 12
    n = 1024
    share = 0.04
    direction = r.normal(size=d) / np.sqrt(d)

    def samples(count: int, hard: float) -> tuple[Tensor, ...]:
        x = r.normal(size=(count, d))
        is_hard = r.random(count) < hard
        y = (x @ direction > 0).astype(np.int64)
        easy = r.integers(0, 2, count)
        y = np.where(is_hard, y, easy)
        sign = 2.0 * y - 1
        first = np.where(is_hard, -sign, 3 * sign)
        rest = np.where(is_hard[:, None], x, 0.1 * x)
        return _as_tensors(np.column_stack([first, rest]).astype(np.float32), y)

    x, y = samples(n, share)
    test = samples(4000, 1.0)
    return {
        "x": x, "y": y, "evaluate": _accuracy(*test), "criterion": nn.CrossEntropyLoss(), "outputs": 2, "lr": 0.2, "batch": 64,
        "epochs": 12, "held_out": samples(n, share),
    }  # fmt: skip


def _noisy(r: np.random.Generator) -> dict[str, Any]:
    d = 40
    n = 256
    wrong = 0.3
    direction = r.normal(size=d)
    direction /= np.linalg.norm(direction)

    def samples(count: int, flipped: float) -> tuple[Tensor, ...]:
        y = r.integers(0, 2, count)
        x = r.normal(size=(count, d)) + np.outer(2.0 * (2 * y - 1), direction)
        return _as_tensors(x.astype(np.float32), np.where(r.random(count) < flipped, 1 - y, y))

    x, y = samples(n, wrong)
    test = samples(4000, 0.0)
    return {
        "x": x, "y": y, "evaluate": _accuracy(*test), "criterion": nn.CrossEntropyLoss(), "outputs": 2, "lr": 0.3, "batch": 32,
        "epochs": 30, "held_out": samples(4 * n, wrong),
    }  # fmt: skip


def _outliers(r: np.random.Generator) -> dict[str, Any]:
    d = 10
    n = 512
    wrong = 0.15
    direction = r.normal(size=d) / np.sqrt(d)

    def samples(count: int, gross: float) -> tuple[Tensor, ...]:
        x = r.normal(size=(count, d)).astype(np.float32)
        y = x @ direction + 0.1 * r.normal(size=count)
        y = np.where(r.random(count) < gross, y + r.choice([-10.0, 10.0], count), y)
        return _as_tensors(x, y.astype(np.float32))

    x, y = samples(n, wrong)
    clean, aims = samples(4000, 0.0)

    def evaluate(model: nn.Module) -> float:
        return -np.log10((model(clean) - aims).square().mean().item())

    return {
        "x": x, "y": y, "evaluate": evaluate, "criterion": nn.MSELoss(), "outputs": 1, "lr": 0.02, "batch": 32, "epochs": 20,
        "held_out": samples(n, wrong),
    }  # fmt: skip


def _skewed(r: np.random.Generator) -> dict[str, Any]:
    d = 20
    n = 1024
    rare = 0.05
    direction = r.normal(size=d) / np.sqrt(d)

    def samples(count: int) -> tuple[Tensor, ...]:
        x = r.normal(size=(count, d))
        noise = np.where(r.random(count) < rare, 8.0, 0.05) * r.normal(size=count)
        return _as_tensors(x.astype(np.float32), (x @ direction + noise).astype(np.float32))

    x, y = samples(n)
    best = torch.linalg.lstsq(x.double(), y.double()[:, None]).solution[:, 0]

    def evaluate(model: nn.Module) -> float:
        above = model(x).double() - x.double() @ best
        return -np.log10(above.square().mean().item())

    return {
        "x": x, "y": y, "evaluate": evaluate, "criterion": nn.MSELoss(), "outputs": 1, "lr": 0.01, "batch": 16, "epochs": 8,
        "held_out": samples(n),
    }  # fmt: skip


def _rare(r: np.random.Generator) -> dict[str, Any]:
    d = 20
    n = 1024
    rare = 0.05
    direction = r.normal(size=d)
    direction /= np.linalg.norm(direction)

    def samples(count: int) -> tuple[Tensor, ...]:
        y = r.integers(0, 2, count)
        x = 0.7 * r.normal(size=(count, d)) + np.outer(2.0 * (2 * y - 1), direction)
        return _as_tensors(x.astype(np.float32), np.where(r.random(count) < rare, 1 - y, y))

    x, y = samples(n)
    least = _least_loss(x.double().numpy(), 2.0 * y.numpy() - 1)

    def evaluate(model: nn.Module) -> float:
        excess = nn.functional.cross_entropy(model(x).double(), y).item() - least
        return -np.log10(excess)

    return {
        "x": x, "y": y, "evaluate": evaluate, "criterion": nn.CrossEntropyLoss(), "outputs": 2, "lr": 0.3, "batch": 16,
        "epochs": 8, "held_out": samples(n),
    }  # fmt: skip


def _least_loss(x: Any, sign: Any) -> float:
    """Returns the least mean logistic loss of a linear model, by Newton's method."""
    w = np.zeros(x.shape[1])
    for _ in range(50):
        wrong = 1 / (1 + np.exp(sign * (x @ w)))
        curvature = (x.T * (wrong * (1 - wrong))) @ x / len(x)
        w += np.linalg.solve(curvature, x.T @ (wrong * sign) / len(x))
    return float(np.logaddexp(0, -sign * (x @ w)).mean())


PLANTED: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "redundant": _redundant,
    "noisy": _noisy,
    "outliers": _outliers,
    "skewed": _skewed,
    "rare": _rare,
}


def planted(name: str, seed: int) -> Toy:
    """Returns a planted problem.

    Args:
        name: Name of the problem: "redundant", "noisy", "outliers", "skewed" or "rare".
        seed: Random seed of the samples and their order.

    Raises:
        ValueError: There is no problem of this name.

    Example:
        >>> toy = planted("redundant", seed=0)
        >>> tuple(toy.x.shape), toy.epochs, toy.batch
        ((1024, 13), 12, 64)
    """
    if name not in PLANTED:
        raise ValueError(no_such("planted problem", name, PLANTED))
    return Toy(name, seed, **PLANTED[name](np.random.default_rng([seed, *name.encode()])))


def train_steps(run: Any, optimizer: torch.optim.Optimizer, epochs: int) -> Iterator[Tensor]:
    """Trains to the end of an epoch, and yields the loss of each step.

    Args:
        run: Run whose loader, model and criterion are used.
        optimizer: Optimizer.
        epochs: Number of epochs after which training ends.

    Example:
        >>> from thresher import attach
        >>> toy = planted("noisy", seed=0)
        >>> model = toy.model()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=toy.lr)
        >>> parts = {"loader": toy.loader(), "criterion": toy.criterion, "model": model, "optimizer": optimizer}
        >>> run = attach(UniformSubset(keep=0.5), epochs=2, **parts)
        >>> len(list(train_steps(run, optimizer, epochs=2)))
        8
        >>> run.detach()
    """
    while run.epoch < epochs:
        for x, y in run.loader:
            optimizer.zero_grad()
            loss = run.criterion(run.model(x), y)
            loss.backward()
            optimizer.step()
            yield loss.detach()


def train_model(
    method: Any, toy: Toy, *, epochs: int | None = None, **settings: Any
) -> tuple[nn.Module, float]:
    """Trains the model of a planted problem with a method attached.

    Args:
        method: Method, in any form that `thresher.attach` accepts.
        toy: Planted problem.
        epochs: Number of epochs. Default: the epochs of the problem.
        **settings: Other arguments of `thresher.attach`.

    Returns:
        The model; and the cost as a share of the cost of full training over the epochs of the problem. A backward pass counts
        as much as 2 forward passes.

    Example:
        >>> _, cost = train_model(UniformSubset(keep=0.5), planted("noisy", seed=0), epochs=3)
        >>> round(cost, 3)  # half of the samples in a tenth of the epochs
        0.05
    """
    epochs = toy.epochs if epochs is None else epochs
    with rng.undisturbed(torch.device("cpu")), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # on so small a model scoring costs more than it saves
        torch.manual_seed(toy.seed)
        model = toy.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=toy.lr)
        common: dict[str, Any] = {
            "loader": toy.loader(),
            "criterion": toy.criterion,
            "seed": toy.seed,
        }
        run = attach(method, model=model, optimizer=optimizer, epochs=epochs, **common, **settings)
        deque(train_steps(run, optimizer, epochs), maxlen=0)
        cost = run.cost.ratio() * epochs / toy.epochs
        run.detach()
    return model, cost


def train_and_score(
    method: Any, toy: Toy, *, epochs: int | None = None, **settings: Any
) -> Outcome:
    """Trains the model of a planted problem as `train_model` does, and evaluates it.

    Args:
        method: Method, in any form that `thresher.attach` accepts.
        toy: Planted problem.
        epochs: Number of epochs. Default: the epochs of the problem.
        **settings: Other arguments of `thresher.attach`.

    Example:
        >>> outcome = train_and_score(FullData(), planted("noisy", seed=0), epochs=6)
        >>> f"accuracy {outcome.score:.1f}, cost {outcome.cost:.1f}"
        'accuracy 0.8, cost 0.2'
    """
    model, cost = train_model(method, toy, epochs=epochs, **settings)
    with torch.no_grad():
        return Outcome(toy.evaluate(model), cost)


@cache
def _control(stage: str, name: str, seed: int, cost: float) -> float:
    toy = planted(name, seed)
    if cost >= 1:
        return train_and_score(FullData(), toy, epochs=round(cost * toy.epochs)).score
    return train_and_score(
        RandomBackprop(keep=cost) if stage == "batch" else UniformSubset(keep=cost), toy
    ).score


def beats_uniform(
    method: Any, toy: str, seeds: Sequence[int] = (0, 1, 2), **settings: Any
) -> Contest:
    """Compares a method with random samples at the same cost, which is counted in the run of the method.

    A method that decides in the batch is compared with a random part of every batch, any other method with a random subset of
    the samples in each epoch. A method that costs more than full training is compared with full training for more epochs.

    Args:
        method: Method, or function of a `Toy` that returns a method.
        toy: Name of a planted problem.
        seeds: Random seeds, one training run for each. Default: (0, 1, 2).
        **settings: Other arguments of `thresher.attach`, used for the method only.

    Returns:
        Scores of both, and the cost.

    Raises:
        ValueError: There is no problem of this name.

    Example:
        >>> from thresher import InfoBatch
        >>> contest = beats_uniform(InfoBatch(prune_fraction=0.8), "redundant", seeds=(0,))
        >>> f"gain {contest.gain:.1f} at {contest.cost:.0%} of the cost"
        'gain 0.1 at 44% of the cost'
    """
    scores = []
    controls = []
    costs = []
    for seed in seeds:
        problem = planted(toy, seed)
        candidate = method(problem) if callable(method) else method
        score, cost = train_and_score(candidate, problem, **settings)
        stage = getattr(
            candidate[-1] if isinstance(candidate, list | tuple) else candidate, "stage", "epoch"
        )
        scores.append(score)
        controls.append(_control(stage, toy, seed, round(cost, 3)))
        costs.append(cost)
    return Contest(tuple(scores), tuple(controls), float(np.mean(costs)))
