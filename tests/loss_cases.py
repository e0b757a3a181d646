"""Criteria, inputs and targets of every kind with a reference in plain Python, and what must hold for each of them."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.attribution.rows import RowLayout
from thresher.losses import adapt
from thresher.losses.base import Criterion, LossAndSignals

# A reference that goes position by position in Python floats


@dataclass
class Position:
    """One loss, with and without class weights, and its share in the mean."""

    loss: float
    plain: float
    share: float = 1.0
    valid: bool = True


Reference = Callable[[np.ndarray, np.ndarray], list[Position]]
"""Function of the outputs, (C, ...) or (...), and the targets of one sample that returns its positions."""


def log_softmax(z: np.ndarray) -> list[float]:
    top = max(z)
    total = math.log(math.fsum(math.exp(v - top) for v in z)) + top
    return [v - total for v in z]


def of_classes(
    *, weight: Any = None, smoothing: float = 0.0, ignore: int = -100, softmax: bool = True
) -> Reference:
    def positions(outputs: np.ndarray, targets: np.ndarray) -> list[Position]:
        c = outputs.shape[0]
        w = [1.0] * c if weight is None else list(weight)
        columns = outputs.reshape(c, -1).T
        soft = np.issubdtype(targets.dtype, np.floating)
        wanted = targets.reshape(c, -1).T if soft else targets.reshape(-1)
        found = []
        for z, y in zip(columns, wanted, strict=True):
            logp = log_softmax(z) if softmax else list(z)
            if not soft and y == ignore:
                found.append(Position(0.0, 0.0, 0.0, valid=False))
                continue
            p = [float(v) for v in y] if soft else [float(k == y) for k in range(c)]
            p = [(1 - smoothing) * v + smoothing / c for v in p]
            loss = math.fsum(-w[k] * p[k] * logp[k] for k in range(c))
            if not soft and not smoothing:
                loss = -w[y] * logp[y]
            plain = math.fsum(-p[k] * logp[k] for k in range(c))
            # torch divides the losses of targets that are probabilities by their number.
            found.append(Position(loss, plain, 1.0 if soft else w[y]))
        return found

    return positions


def of_elements(loss: Callable[[float, float, int], float]) -> Reference:
    def positions(outputs: np.ndarray, targets: np.ndarray) -> list[Position]:
        pairs = zip(outputs.reshape(-1), targets.reshape(-1), strict=True)
        return [
            Position(value, value)
            for value in (loss(float(o), float(t), k) for k, (o, t) in enumerate(pairs))
        ]

    return positions


def squared(o: float, t: float, _: int) -> float:
    return (o - t) ** 2


def absolute(o: float, t: float, _: int) -> float:
    return abs(o - t)


def smooth(o: float, t: float, _: int, beta: float = 0.5) -> float:
    d = abs(o - t)
    return d * d / (2 * beta) if d < beta else d - beta / 2


def huber(o: float, t: float, _: int, delta: float = 0.7) -> float:
    d = abs(o - t)
    return d * d / 2 if d < delta else delta * (d - delta / 2)


def bernoulli(
    o: float, t: float, k: int, *, weight: Any = None, pos_weight: Any = None, logits: bool = False
) -> float:
    p = 1 / (1 + math.exp(-o)) if logits else o
    positive = 1.0 if pos_weight is None else pos_weight[k % len(pos_weight)]
    factor = 1.0 if weight is None else weight[k % len(weight)]
    return -factor * (positive * t * math.log(p) + (1 - t) * math.log(1 - p))


def divergence(o: float, t: float, _: int) -> float:
    return t * (math.log(t) - o)


def divergence_of_logs(o: float, t: float, _: int) -> float:
    return math.exp(t) * (t - o)


# The cases


@dataclass
class Case:
    make: Callable[[str], nn.Module]
    outputs: Tensor
    targets: Tensor
    reference: Reference
    reductions: tuple[str, ...] = ("mean", "sum", "none")
    class_weights: bool = False

    @property
    def n(self) -> int:
        return len(self.outputs)

    def positions(self, outputs: Tensor) -> list[list[Position]]:
        targets = self.targets.double() if self.soft else self.targets
        rows = zip(outputs.detach().double().numpy(), targets.numpy(), strict=True)
        return [self.reference(np.asarray(o), np.asarray(t)) for o, t in rows]

    @property
    def soft(self) -> bool:
        return self.targets.is_floating_point()

    def scalar(self, outputs: Tensor, v: list[float], reduction: str) -> float:
        """Returns sum(v s m) / sum(s), with class weights sum(v s m) / sum(v s)."""
        samples = self.positions(outputs)
        total = math.fsum(
            vi * p.loss for vi, sample in zip(v, samples, strict=True) for p in sample
        )
        if reduction == "sum":
            return total
        if reduction == "none":
            return total / sum(map(len, samples))
        if reduction == "batchmean":
            return total / len(samples)
        shares = [math.fsum(p.share for p in sample) for sample in samples]
        return (
            total / math.fsum(vi * s for vi, s in zip(v, shares, strict=True))
            if self.class_weights
            else total / sum(shares)
        )

    def losses(self, outputs: Tensor, reduction: str) -> list[float]:
        """Returns the losses that are recorded: means over valid positions, without class weights."""
        found = []
        for sample in self.positions(outputs):
            valid = [p.plain for p in sample if p.valid]
            count = 1 if reduction == "batchmean" else len(valid)
            found.append(math.fsum(valid) / count if valid else -math.inf)
        return found


GENERATOR = torch.Generator().manual_seed(0)
B, C, T = 6, 4, 5
WEIGHT = torch.tensor([0.5, 2.0, 1.25, 3.0])


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR) * 0.9 + 0.05


def indices(*shape: int, ignore: int | None = None) -> Tensor:
    """Class indices; with `ignore`, about a third of them ignored: all of sample 1, none of sample 0."""
    found = torch.randint(0, C, shape, generator=GENERATOR)
    if ignore is not None:
        holes = torch.rand(shape, generator=GENERATOR) < 0.3
        holes[0], holes[1] = False, True
        found[holes] = ignore
    return found


def cross_entropy(**settings: Any) -> Callable[[str], nn.Module]:
    return lambda reduction: nn.CrossEntropyLoss(**settings, reduction=reduction)


def nll(**settings: Any) -> Callable[[str], nn.Module]:
    return lambda reduction: nn.NLLLoss(**settings, reduction=reduction)


def module(kind: type[nn.Module], **settings: Any) -> Callable[[str], nn.Module]:
    return lambda reduction: kind(**settings, reduction=reduction)


SMOOTH = {"label_smoothing": 0.1}
CLASSES = {
    "ce": Case(cross_entropy(), randn(B, C), indices(B), of_classes()),
    "ce-large": Case(cross_entropy(), 200 * randn(B, C), indices(B), of_classes()),
    "ce-smoothing": Case(
        cross_entropy(**SMOOTH), randn(B, C), indices(B), of_classes(smoothing=0.1)
    ),
    "ce-weights": Case(
        cross_entropy(weight=WEIGHT),
        randn(B, C),
        indices(B),
        of_classes(weight=WEIGHT.tolist()),
        class_weights=True,
    ),
    "ce-ignore": Case(cross_entropy(), randn(B, C), indices(B, ignore=-100), of_classes()),
    "ce-ignore-2": Case(
        cross_entropy(ignore_index=2), randn(B, C), indices(B, ignore=2), of_classes(ignore=2)
    ),
    "ce-ignore-minus-1": Case(
        cross_entropy(ignore_index=-1),
        randn(B, C),
        indices(B, ignore=-1),
        of_classes(ignore=-1),
        reductions=("mean",),
    ),
    "ce-all": Case(
        cross_entropy(weight=WEIGHT, ignore_index=-1, **SMOOTH),
        randn(B, C),
        indices(B, ignore=-1),
        of_classes(weight=WEIGHT.tolist(), smoothing=0.1, ignore=-1),
        class_weights=True,
    ),
    "ce-probabilities": Case(cross_entropy(), randn(B, C), randn(B, C).softmax(1), of_classes()),
    "ce-probabilities-all": Case(
        cross_entropy(weight=WEIGHT, **SMOOTH),
        randn(B, C),
        randn(B, C).softmax(1),
        of_classes(weight=WEIGHT.tolist(), smoothing=0.1),
        class_weights=True,
    ),
    "ce-probabilities-dense": Case(
        cross_entropy(), randn(B, C, T), randn(B, C, T).softmax(1), of_classes()
    ),
    "ce-dense": Case(cross_entropy(), randn(B, C, T), indices(B, T), of_classes()),
    "ce-dense-ignore": Case(
        cross_entropy(), randn(B, C, T), indices(B, T, ignore=-100), of_classes()
    ),
    "ce-dense-weights": Case(
        cross_entropy(weight=WEIGHT, ignore_index=1),
        randn(B, C, T),
        indices(B, T, ignore=1),
        of_classes(weight=WEIGHT.tolist(), ignore=1),
        class_weights=True,
    ),
    "ce-dense-all": Case(
        cross_entropy(weight=WEIGHT, **SMOOTH),
        randn(B, C, T),
        indices(B, T, ignore=-100),
        of_classes(weight=WEIGHT.tolist(), smoothing=0.1),
        class_weights=True,
    ),
    "ce-image": Case(
        cross_entropy(), randn(B, C, 2, 3), indices(B, 2, 3, ignore=-100), of_classes()
    ),
    "nll": Case(nll(), randn(B, C).log_softmax(1), indices(B), of_classes(softmax=False)),
    "nll-weights": Case(
        nll(weight=WEIGHT, ignore_index=3),
        randn(B, C).log_softmax(1),
        indices(B, ignore=3),
        of_classes(weight=WEIGHT.tolist(), ignore=3, softmax=False),
        class_weights=True,
    ),
    "nll-dense": Case(
        nll(), randn(B, C, T).log_softmax(1), indices(B, T, ignore=-100), of_classes(softmax=False)
    ),
}
ELEMENTS = {
    "bce": Case(module(nn.BCELoss), rand(B), rand(B), of_elements(bernoulli)),
    "bce-labels": Case(
        module(nn.BCELoss, weight=torch.tensor([0.5, 2.0, 1.0])),
        rand(B, 3),
        rand(B, 3).round(),
        of_elements(functools.partial(bernoulli, weight=[0.5, 2.0, 1.0])),
    ),
    "bce-logits": Case(
        module(nn.BCEWithLogitsLoss),
        randn(B),
        rand(B),
        of_elements(functools.partial(bernoulli, logits=True)),
    ),
    "bce-logits-pos-weight": Case(
        module(nn.BCEWithLogitsLoss, pos_weight=torch.tensor([0.5, 2.0, 4.0])),
        randn(B, 3),
        rand(B, 3),
        of_elements(functools.partial(bernoulli, pos_weight=[0.5, 2.0, 4.0], logits=True)),
    ),
    "mse": Case(module(nn.MSELoss), randn(B), randn(B), of_elements(squared)),
    "mse-column": Case(module(nn.MSELoss), randn(B, 1), randn(B, 1), of_elements(squared)),
    "mse-dense": Case(module(nn.MSELoss), randn(B, 3, T), randn(B, 3, T), of_elements(squared)),
    "l1": Case(module(nn.L1Loss), randn(B, 3), randn(B, 3), of_elements(absolute)),
    "smooth-l1": Case(
        module(nn.SmoothL1Loss, beta=0.5), randn(B, 3), randn(B, 3), of_elements(smooth)
    ),
    "huber": Case(module(nn.HuberLoss, delta=0.7), randn(B, 3), randn(B, 3), of_elements(huber)),
    "kl": Case(
        module(nn.KLDivLoss),
        randn(B, C).log_softmax(1),
        randn(B, C).softmax(1),
        of_elements(divergence),
        reductions=("mean", "batchmean", "sum", "none"),
    ),
    "kl-logs": Case(
        module(nn.KLDivLoss, log_target=True),
        randn(B, C).log_softmax(1),
        randn(B, C).log_softmax(1),
        of_elements(divergence_of_logs),
        reductions=("mean", "batchmean"),
    ),
}
CASES = CLASSES | ELEMENTS
PLAN_WEIGHTS = [2.0, 1.0, 0.25, 3.0, 1.0, 7.5]


@contextmanager
def named(case: str) -> Iterator[None]:
    """Adds the name of the case to whatever fails inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {case}")
        raise


def for_each(cases: dict[str, Case], check: Callable[[str, str], None]) -> None:
    """Makes a check for each case with each of its reductions."""
    for name, case in cases.items():
        for reduction in case.reductions:
            with named(f"{name}, reduction {reduction}"):
                check(name, reduction)


def leaf(outputs: Tensor) -> Tensor:
    return outputs.clone().requires_grad_()


def everything(name: str) -> set[str]:
    """Names of all signals besides the loss that the criterion defines."""
    return set() if name.startswith(("mse", "l1", "smooth", "huber")) else {"correct", "confidence"}


def doubled(targets: Tensor) -> Tensor:
    return targets.double() if targets.is_floating_point() else targets


class Table(nn.Module):
    """A model whose output for input i is row i of its parameter."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows.clone())

    def forward(self, i: Tensor) -> Tensor:
        return self.rows[i]


@dataclass(frozen=True)
class Weighing:
    """A method that keeps everything, with given weights, and needs given signals."""

    stage = "epoch"
    weights: tuple[float, ...] | None
    wanted: frozenset[str]

    def columns(self) -> dict[str, thresher.Column]:
        types = {"loss": torch.float64, "correct": torch.bool, "confidence": torch.float32}
        return {
            name: thresher.Column(dtype)
            for name, dtype in types.items()
            if name == "loss" or name in self.wanted
        }

    def plan_epoch(self, records: Any, **_: Any) -> thresher.EpochPlan:
        weights = None if self.weights is None else torch.tensor(self.weights)
        return thresher.EpochPlan(torch.arange(len(records["loss"])), weights=weights)


# What a criterion makes of outputs and targets


def measure(
    criterion: Criterion,
    outputs: Any,
    targets: Any,
    n: int,
    repeat: int | None = 1,
    *,
    weights: Tensor | None = None,
    wanted: Iterable[str] = (),
) -> LossAndSignals:
    """Returns the scalar and the signals of n samples, each of `repeat` consecutive rows; None if their number is unknown."""
    return criterion.measure(
        outputs, targets, RowLayout(n, repeat), weights=weights, wanted=set(wanted)
    )


def signals(
    criterion: Criterion,
    outputs: Any,
    targets: Any,
    n: int,
    repeat: int | None = 1,
    *,
    wanted: Iterable[str] = (),
) -> dict[str, Tensor]:
    """Returns the signals of n samples; the loss is among them."""
    return criterion.signals(outputs, targets, RowLayout(n, repeat), set(wanted))


def errors(
    criterion: Criterion, outputs: Any, targets: Any, n: int, repeat: int | None = 1
) -> Tensor:
    """Returns the gradient of each sample's mean loss with respect to the outputs, shape (n, ...)."""
    return criterion.errors(outputs, targets, RowLayout(n, repeat))


# What must hold for each case and reduction


def value_and_gradient_without_weights_are_the_users_own_bit_for_bit(
    name: str, reduction: str
) -> None:
    case = CASES[name]
    criterion = case.make(reduction)
    for wanted in (set(), everything(name)):
        mine, own = leaf(case.outputs), leaf(case.outputs)
        measured = measure(adapt(criterion), mine, case.targets, case.n, wanted=wanted)
        value = criterion(own, case.targets)
        assert measured.value.dtype == value.dtype
        assert torch.equal(measured.value, value)
        measured.value.mean().backward()
        value.mean().backward()
        assert mine.grad is not None and own.grad is not None
        assert torch.equal(mine.grad, own.grad)
        assert measured.signals.keys() == {"loss"} | wanted


def reference_agrees_with_torch(name: str, reduction: str) -> None:
    case = CASES[name]
    expected = (
        case.make(reduction).double()(case.outputs.double(), doubled(case.targets)).mean().item()
    )
    assert case.scalar(case.outputs, [1.0] * case.n, reduction) == pytest.approx(expected, rel=1e-9)


def weighted_value_and_gradient(name: str, reduction: str) -> None:
    case = CASES[name]
    adapter = adapt(case.make(reduction).double())
    outputs, v = leaf(case.outputs.double()), torch.tensor(PLAN_WEIGHTS)
    measured = measure(
        adapter, outputs, doubled(case.targets), case.n, weights=v, wanted=everything(name)
    )
    scalar = measured.value.mean()  # of losses that the loop reduces
    assert measured.value.shape == (
        case.make("none")(case.outputs, case.targets).shape if reduction == "none" else ()
    )
    assert scalar.item() == pytest.approx(case.scalar(outputs, PLAN_WEIGHTS, reduction), rel=1e-9)
    scalar.backward()
    assert outputs.grad is not None
    direction = torch.randn(
        outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    step = 1e-6
    ahead, behind = (
        case.scalar(outputs + sign * step * direction, PLAN_WEIGHTS, reduction) for sign in (1, -1)
    )
    assert (outputs.grad * direction).sum().item() == pytest.approx(
        (ahead - behind) / (2 * step), rel=1e-5, abs=1e-8
    )


def loss_of_a_sample_is_its_plain_mean(name: str, reduction: str) -> None:
    case = CASES[name]
    outputs = leaf(case.outputs.double())
    adapter = adapt(case.make(reduction).double())
    for weights in (None, torch.tensor(PLAN_WEIGHTS)):
        measured = measure(adapter, outputs, doubled(case.targets), case.n, weights=weights)
        assert measured.signals["loss"].tolist() == pytest.approx(
            case.losses(outputs, reduction), rel=1e-9, abs=1e-12
        )
        assert not measured.signals["loss"].requires_grad
        refreshed = signals(adapter, outputs, doubled(case.targets), case.n, repeat=None)
        assert torch.allclose(refreshed["loss"], measured.signals["loss"], rtol=1e-12)


def weights_of_one_change_nothing(name: str, reduction: str) -> None:
    case = CASES[name]
    adapter = adapt(case.make(reduction))
    ones = torch.ones(case.n)
    weighted = measure(adapter, case.outputs, case.targets, case.n, weights=ones)
    plain = measure(adapter, case.outputs, case.targets, case.n)
    torch.testing.assert_close(weighted.value, plain.value)
    torch.testing.assert_close(weighted.signals["loss"], plain.signals["loss"])


def same_in_the_loop(name: str, reduction: str) -> None:
    for weights, wanted in itertools.product(
        (None, tuple(PLAN_WEIGHTS)), (set(), everything(name))
    ):
        with named(f"weights {weights}, wanted {sorted(wanted)}"):
            check_in_the_loop(name, reduction, weights, wanted)


def check_in_the_loop(
    name: str, reduction: str, weights: tuple[float, ...] | None, wanted: set[str]
) -> None:
    """The same through run.criterion, which may take shortcuts: values, gradients and records, in two batches."""
    case = CASES[name]
    criterion, model, own = case.make(reduction), Table(case.outputs), leaf(case.outputs)
    loader = DataLoader(TensorDataset(torch.arange(B), case.targets), batch_size=3)
    run = thresher.attach(
        Weighing(weights, frozenset(wanted)),
        loader=loader,
        criterion=criterion,
        model=model,
        epochs=1,
    )
    for at, (i, targets) in zip((0, 3), run.loader, strict=True):
        value = run.criterion(run.model(i), targets)
        value.mean().backward()
        if weights is None:
            expected = criterion(own[i], targets)
            assert torch.equal(value, expected)
            expected.mean().backward()
            continue
        part = replace(case, outputs=case.outputs[at : at + 3], targets=case.targets[at : at + 3])
        assert value.mean().item() == pytest.approx(
            part.scalar(part.outputs, list(weights[at : at + 3]), reduction), rel=1e-4
        )
    if weights is None:
        assert model.rows.grad is not None and own.grad is not None
        assert torch.equal(model.rows.grad, own.grad)
    # Nothing is recorded of a sample without a label: the column keeps its fill, 0.
    losses = torch.tensor(case.losses(case.outputs, reduction))
    labeled = losses > -torch.inf
    torch.testing.assert_close(
        run.records["loss"].float(), losses.where(labeled, 0).float(), rtol=1e-4, atol=1e-5
    )
    assert run.cost.forward == run.cost.backward == B
    found = signals(adapt(criterion), case.outputs, case.targets, B, wanted=wanted)
    for signal in wanted:
        values = found[signal]
        known = torch.where(labeled, values, torch.zeros_like(values))
        torch.testing.assert_close(run.records[signal], known)


CHECKS = [
    value_and_gradient_without_weights_are_the_users_own_bit_for_bit,
    reference_agrees_with_torch,
    weighted_value_and_gradient,
    loss_of_a_sample_is_its_plain_mean,
    weights_of_one_change_nothing,
    same_in_the_loop,
]
