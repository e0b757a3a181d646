"""Planted problems: small tasks whose answer is known, on which a kind of method must beat random samples of equal cost.

- "redundant": nearly all samples are easy and say the same; what is asked later is decided by a few hard ones, to which the
  easy feature is misleading. Methods that prefer hard samples win.
- "noisy": a part of the labels is wrong, and there are too few samples to ignore it. Methods that avoid what cannot be
  learnt win.
- "outliers": a regression in which a part of the targets is grossly wrong. Methods that prefer small losses win.
- "skewed": a regression in which nearly all of the gradient comes from a few noisy targets, and "rare": a classification
  in which it comes from a few wrong labels; small batches have few of them or none. The loss over these very samples is what
  counts. Methods that reduce the variance of the gradient, by weights or by their choice, get closer to the least loss.
"""

import warnings
from collections.abc import Callable, Sequence
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
from thresher.methods.uniform import UniformSubset
from thresher.run.attach import attach


@dataclass(frozen=True, eq=False)
class Toy:
    """A planted problem.

    Args:
        name: Which.
        seed: Of its samples and their order.
        x: Inputs, shape (N, D), float32.
        y: Targets, shape (N,).
        evaluate: How good a trained model is; larger is better.
        criterion: The loss.
        outputs: Of the linear model.
        lr: Learning rate of plain gradient descent.
        batch: Size of the batches.
        epochs: Of the training.
        held_out: More samples of the same kind: inputs and targets.
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
        """The samples in an order that depends on the seed alone."""
        draws = torch.Generator().manual_seed(self.seed)
        return DataLoader(TensorDataset(self.x, self.y), self.batch, shuffle=True, generator=draws)

    def model(self) -> nn.Module:
        """A linear model that knows nothing yet."""
        linear = nn.Linear(self.x.shape[1], self.outputs, bias=False)
        nn.init.zeros_(linear.weight)
        return linear if self.outputs > 1 else nn.Sequential(linear, nn.Flatten(0))


class Outcome(NamedTuple):
    """What one training reached, and its cost; see `trained`."""

    score: float
    cost: float


class Contest(NamedTuple):
    """A method against random samples of the same cost.

    Args:
        method: Its scores, one a seed; larger is better.
        uniform: Those of random samples.
        cost: Of the method, as a share of full training's; the mean over the seeds.
    """

    method: tuple[float, ...]
    uniform: tuple[float, ...]
    cost: float

    @property
    def gain(self) -> float:
        """Mean difference of the scores."""
        return float(np.mean(np.subtract(self.method, self.uniform)))

    @property
    def standard_error(self) -> float:
        """Of the gain, seeds paired; infinite with one seed."""
        differences = np.subtract(self.method, self.uniform)
        return float(np.std(differences, ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else float("inf")


def _tensors(*arrays: Any) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)


def _accuracy(x: Tensor, y: Tensor) -> Callable[[nn.Module], float]:
    def evaluate(model: nn.Module) -> float:
        return (model(x).argmax(1) == y).double().mean().item()

    return evaluate


def _redundant(r: np.random.Generator) -> dict[str, Any]:
    d, n, share = 12, 1024, 0.04
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
        return _tensors(np.column_stack([first, rest]).astype(np.float32), y)

    x, y = samples(n, share)
    asked = samples(4000, 1.0)
    return {
        "x": x, "y": y, "evaluate": _accuracy(*asked), "criterion": nn.CrossEntropyLoss(), "outputs": 2, "lr": 0.2, "batch": 64,
        "epochs": 12, "held_out": samples(n, share),
    }  # fmt: skip


def _noisy(r: np.random.Generator) -> dict[str, Any]:
    d, n, wrong = 40, 256, 0.3
    direction = r.normal(size=d)
    direction /= np.linalg.norm(direction)

    def samples(count: int, flipped: float) -> tuple[Tensor, ...]:
        y = r.integers(0, 2, count)
        x = r.normal(size=(count, d)) + np.outer(2.0 * (2 * y - 1), direction)
        return _tensors(x.astype(np.float32), np.where(r.random(count) < flipped, 1 - y, y))

    x, y = samples(n, wrong)
    asked = samples(4000, 0.0)
    return {
        "x": x, "y": y, "evaluate": _accuracy(*asked), "criterion": nn.CrossEntropyLoss(), "outputs": 2, "lr": 0.3, "batch": 32,
        "epochs": 30, "held_out": samples(4 * n, wrong),
    }  # fmt: skip


def _outliers(r: np.random.Generator) -> dict[str, Any]:
    d, n, wrong = 10, 512, 0.15
    direction = r.normal(size=d) / np.sqrt(d)

    def samples(count: int, gross: float) -> tuple[Tensor, ...]:
        x = r.normal(size=(count, d)).astype(np.float32)
        y = x @ direction + 0.1 * r.normal(size=count)
        y = np.where(r.random(count) < gross, y + r.choice([-10.0, 10.0], count), y)
        return _tensors(x, y.astype(np.float32))

    x, y = samples(n, wrong)
    clean, aims = samples(4000, 0.0)

    def evaluate(model: nn.Module) -> float:
        return -np.log10((model(clean) - aims).square().mean().item())

    return {
        "x": x, "y": y, "evaluate": evaluate, "criterion": nn.MSELoss(), "outputs": 1, "lr": 0.02, "batch": 32, "epochs": 20,
        "held_out": samples(n, wrong),
    }  # fmt: skip


def _skewed(r: np.random.Generator) -> dict[str, Any]:
    d, n, rare = 20, 1024, 0.05
    direction = r.normal(size=d) / np.sqrt(d)

    def samples(count: int) -> tuple[Tensor, ...]:
        x = r.normal(size=(count, d))
        noise = np.where(r.random(count) < rare, 8.0, 0.05) * r.normal(size=count)
        return _tensors(x.astype(np.float32), (x @ direction + noise).astype(np.float32))

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
    d, n, rare = 20, 1024, 0.05
    direction = r.normal(size=d)
    direction /= np.linalg.norm(direction)

    def samples(count: int) -> tuple[Tensor, ...]:
        y = r.integers(0, 2, count)
        x = 0.7 * r.normal(size=(count, d)) + np.outer(2.0 * (2 * y - 1), direction)
        return _tensors(x.astype(np.float32), np.where(r.random(count) < rare, 1 - y, y))

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
    """The least mean logistic loss of a linear model, by Newton's method."""
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
    """A planted problem.

    Args:
        name: "redundant", "noisy", "outliers", "skewed" or "rare".
        seed: Of its samples.

    Raises:
        ValueError: No such problem.
    """
    if name not in PLANTED:
        raise ValueError(f"no planted problem {name!r}; there are {', '.join(PLANTED)}")
    return Toy(name, seed, **PLANTED[name](np.random.default_rng([seed, *name.encode()])))


def trained(method: Any, toy: Toy, *, epochs: int | None = None, **settings: Any) -> tuple[nn.Module, float]:
    """Train the toy's model with a method attached.

    Args:
        method: As `thresher.attach` takes it.
        toy: The problem.
        epochs: Instead of the toy's own.
        **settings: Others of `thresher.attach`.

    Returns:
        The model, and the cost as a share of full training's over the toy's own epochs, at 2 forward passes a backward.
    """
    epochs = toy.epochs if epochs is None else epochs
    with rng.undisturbed(torch.device("cpu")), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that scoring costs more than it saves on a model this small
        torch.manual_seed(toy.seed)
        model = toy.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=toy.lr)
        common: dict[str, Any] = {"loader": toy.loader(), "criterion": toy.criterion, "seed": toy.seed}
        run = attach(method, model=model, optimizer=optimizer, epochs=epochs, **common, **settings)
        for _ in range(epochs):
            for x, y in run.loader:
                optimizer.zero_grad()
                run.criterion(run.model(x), y).backward()
                optimizer.step()
        cost = run.cost.ratio() * epochs / toy.epochs
        run.detach()
    return model, cost


def train(method: Any, toy: Toy, *, epochs: int | None = None, **settings: Any) -> Outcome:
    """Train the toy's model as `trained` does, and say how good it is."""
    model, cost = trained(method, toy, epochs=epochs, **settings)
    with torch.no_grad():
        return Outcome(toy.evaluate(model), cost)


@cache
def _control(stage: str, name: str, seed: int, cost: float) -> float:
    toy = planted(name, seed)
    if cost >= 1:
        return train(FullData(), toy, epochs=round(cost * toy.epochs)).score
    return train(RandomBackprop(keep=cost) if stage == "batch" else UniformSubset(keep=cost), toy).score


def beats_uniform(method: Any, toy: str, seeds: Sequence[int] = (0, 1, 2), **settings: Any) -> Contest:
    """Let a method compete with random samples at the cost that was counted for it.

    The control of a method that decides in the batch is a random part of every batch, that of all others a random subset
    each epoch; of one that costs more than full training, full training for more epochs.

    Args:
        method: The method, or a function of the `Toy` that makes it.
        toy: Name of a planted problem.
        seeds: One training each.
        **settings: Others of `thresher.attach`, for the method.
    """
    scores, controls, costs = [], [], []
    for seed in seeds:
        problem = planted(toy, seed)
        own = method(problem) if callable(method) else method
        score, cost = train(own, problem, **settings)
        stage = getattr(own[-1] if isinstance(own, list | tuple) else own, "stage", "epoch")
        scores.append(score)
        controls.append(_control(stage, toy, seed, round(cost, 3)))
        costs.append(cost)
    return Contest(tuple(scores), tuple(controls), float(np.mean(costs)))
