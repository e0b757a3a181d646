"""Criteria as losses of single samples: the user's own scalar bit for bit, and the weighted one against plain Python sums."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.attribution.rows import RowLayout
from thresher.losses.adapt import adapt
from thresher.losses.base import unreadable

# A reference that goes position by position in Python floats


@dataclass
class Position:
    """One loss: with and without class weights, and what it counts for in the mean."""

    loss: float
    plain: float
    share: float = 1.0
    valid: bool = True


Reference = Callable[[np.ndarray, np.ndarray], list[Position]]
"""Outputs (C, ...) or (...) of one sample and its targets -> its positions."""


def log_softmax(z: np.ndarray) -> list[float]:
    top = max(z)
    total = math.log(math.fsum(math.exp(v - top) for v in z)) + top
    return [v - total for v in z]


def of_classes(*, weight: Any = None, smoothing: float = 0.0, ignore: int = -100, softmax: bool = True) -> Reference:
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
        return [Position(value, value) for value in (loss(float(o), float(t), k) for k, (o, t) in enumerate(pairs))]

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


def bernoulli(o: float, t: float, k: int, *, weight: Any = None, pos_weight: Any = None, logits: bool = False) -> float:
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
        """Design: sum(v s m) / sum(s), with class weights / sum(v s)."""
        samples = self.positions(outputs)
        total = math.fsum(vi * p.loss for vi, sample in zip(v, samples, strict=True) for p in sample)
        if reduction == "sum":
            return total
        if reduction == "none":
            return total / sum(map(len, samples))
        if reduction == "batchmean":
            return total / len(samples)
        shares = [math.fsum(p.share for p in sample) for sample in samples]
        return total / math.fsum(vi * s for vi, s in zip(v, shares, strict=True)) if self.class_weights else total / sum(shares)

    def losses(self, outputs: Tensor, reduction: str) -> list[float]:
        """What is remembered: means over valid positions, no class weights."""
        found = []
        for sample in self.positions(outputs):
            valid = [p.plain for p in sample if p.valid]
            count = 1 if reduction == "batchmean" else len(valid)
            found.append(math.fsum(valid) / count if valid else -math.inf)
        return found


G = torch.Generator().manual_seed(0)
B, C, T = 6, 4, 5
WEIGHT = torch.tensor([0.5, 2.0, 1.25, 3.0])


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=G)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=G) * 0.9 + 0.05


def indices(*shape: int, ignore: int | None = None) -> Tensor:
    """Class indices; with `ignore`, about a third of them ignored: all of sample 1, none of sample 0."""
    found = torch.randint(0, C, shape, generator=G)
    if ignore is not None:
        holes = torch.rand(shape, generator=G) < 0.3
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
CASES = {
    "ce": Case(cross_entropy(), randn(B, C), indices(B), of_classes()),
    "ce-large": Case(cross_entropy(), 200 * randn(B, C), indices(B), of_classes()),
    "ce-smoothing": Case(cross_entropy(**SMOOTH), randn(B, C), indices(B), of_classes(smoothing=0.1)),
    "ce-weights": Case(
        cross_entropy(weight=WEIGHT), randn(B, C), indices(B), of_classes(weight=WEIGHT.tolist()), class_weights=True
    ),
    "ce-ignore": Case(cross_entropy(), randn(B, C), indices(B, ignore=-100), of_classes()),
    "ce-ignore-2": Case(cross_entropy(ignore_index=2), randn(B, C), indices(B, ignore=2), of_classes(ignore=2)),
    "ce-ignore-minus-1": Case(
        cross_entropy(ignore_index=-1), randn(B, C), indices(B, ignore=-1), of_classes(ignore=-1), reductions=("mean",)
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
    "ce-probabilities-dense": Case(cross_entropy(), randn(B, C, T), randn(B, C, T).softmax(1), of_classes()),
    "ce-dense": Case(cross_entropy(), randn(B, C, T), indices(B, T), of_classes()),
    "ce-dense-ignore": Case(cross_entropy(), randn(B, C, T), indices(B, T, ignore=-100), of_classes()),
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
    "ce-image": Case(cross_entropy(), randn(B, C, 2, 3), indices(B, 2, 3, ignore=-100), of_classes()),
    "nll": Case(nll(), randn(B, C).log_softmax(1), indices(B), of_classes(softmax=False)),
    "nll-weights": Case(
        nll(weight=WEIGHT, ignore_index=3),
        randn(B, C).log_softmax(1),
        indices(B, ignore=3),
        of_classes(weight=WEIGHT.tolist(), ignore=3, softmax=False),
        class_weights=True,
    ),
    "nll-dense": Case(nll(), randn(B, C, T).log_softmax(1), indices(B, T, ignore=-100), of_classes(softmax=False)),
    "bce": Case(module(nn.BCELoss), rand(B), rand(B), of_elements(bernoulli)),
    "bce-labels": Case(
        module(nn.BCELoss, weight=torch.tensor([0.5, 2.0, 1.0])),
        rand(B, 3),
        rand(B, 3).round(),
        of_elements(functools.partial(bernoulli, weight=[0.5, 2.0, 1.0])),
    ),
    "bce-logits": Case(module(nn.BCEWithLogitsLoss), randn(B), rand(B), of_elements(functools.partial(bernoulli, logits=True))),
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
    "smooth-l1": Case(module(nn.SmoothL1Loss, beta=0.5), randn(B, 3), randn(B, 3), of_elements(smooth)),
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
GRID = [
    pytest.param(name, reduction, id=f"{name}-{reduction}") for name, case in CASES.items() for reduction in case.reductions
]
grid = pytest.mark.parametrize(("name", "reduction"), GRID)
# torch itself says that the mean of KLDiv is a peculiar one.
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")


def own_scalar(criterion: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    value = criterion(outputs, targets)
    return value.mean() if value.dim() else value


def leaf(outputs: Tensor) -> Tensor:
    return outputs.clone().requires_grad_()


def everything(name: str) -> set[str]:
    """All signals that the criterion gives."""
    return set() if name.startswith(("mse", "l1", "smooth", "huber")) else {"correct", "confidence"}


@grid
def test_without_weights_the_value_and_gradient_are_the_users_own_bit_for_bit(name: str, reduction: str) -> None:
    case = CASES[name]
    criterion = case.make(reduction)
    for wanted in (set(), everything(name)):
        mine, own = leaf(case.outputs), leaf(case.outputs)
        measured = adapt(criterion).measure(mine, case.targets, RowLayout(case.n), weights=None, wanted=wanted)
        value = own_scalar(criterion, own, case.targets)
        assert measured.value.dtype == value.dtype
        assert torch.equal(measured.value, value)
        measured.value.backward()
        value.backward()
        assert mine.grad is not None and own.grad is not None
        assert torch.equal(mine.grad, own.grad)
        assert measured.signals.keys() == {"loss"} | wanted


@grid
def test_the_reference_agrees_with_torch(name: str, reduction: str) -> None:
    case = CASES[name]
    expected = own_scalar(case.make(reduction).double(), case.outputs.double(), doubled(case.targets)).item()
    assert case.scalar(case.outputs, [1.0] * case.n, reduction) == pytest.approx(expected, rel=1e-9)


def doubled(targets: Tensor) -> Tensor:
    return targets.double() if targets.is_floating_point() else targets


PLAN_WEIGHTS = [2.0, 1.0, 0.25, 3.0, 1.0, 7.5]


@grid
def test_weighted_value_and_gradient(name: str, reduction: str) -> None:
    case = CASES[name]
    adapter = adapt(case.make(reduction).double())
    outputs, v = leaf(case.outputs.double()), torch.tensor(PLAN_WEIGHTS)
    measured = adapter.measure(outputs, doubled(case.targets), RowLayout(case.n), weights=v, wanted=everything(name))
    assert measured.value.shape == ()
    assert measured.value.item() == pytest.approx(case.scalar(outputs, PLAN_WEIGHTS, reduction), rel=1e-9)
    measured.value.backward()
    assert outputs.grad is not None
    direction = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = 1e-6
    ahead, behind = (case.scalar(outputs + sign * step * direction, PLAN_WEIGHTS, reduction) for sign in (1, -1))
    assert (outputs.grad * direction).sum().item() == pytest.approx((ahead - behind) / (2 * step), rel=1e-5, abs=1e-8)


@grid
@pytest.mark.parametrize("weights", [None, torch.tensor(PLAN_WEIGHTS)], ids=["plain", "weighted"])
def test_the_loss_of_a_sample_is_its_plain_mean(name: str, reduction: str, weights: Tensor | None) -> None:
    case = CASES[name]
    outputs = leaf(case.outputs.double())
    adapter = adapt(case.make(reduction).double())
    measured = adapter.measure(outputs, doubled(case.targets), RowLayout(case.n), weights=weights, wanted=set())
    assert measured.signals["loss"].tolist() == pytest.approx(case.losses(outputs, reduction), rel=1e-9, abs=1e-12)
    assert not measured.signals["loss"].requires_grad
    refreshed = adapter.signals(outputs, doubled(case.targets), RowLayout(case.n, None), set())
    assert torch.allclose(refreshed["loss"], measured.signals["loss"], rtol=1e-12)


@grid
def test_weights_of_one_change_nothing(name: str, reduction: str) -> None:
    case = CASES[name]
    adapter = adapt(case.make(reduction))
    ones = torch.ones(case.n)
    weighted = adapter.measure(case.outputs, case.targets, RowLayout(case.n), weights=ones, wanted=set())
    plain = adapter.measure(case.outputs, case.targets, RowLayout(case.n), weights=None, wanted=set())
    torch.testing.assert_close(weighted.value, plain.value)
    torch.testing.assert_close(weighted.signals["loss"], plain.signals["loss"])


class Table(nn.Module):
    """A model whose output for input i is row i of its parameter."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows.clone())

    def forward(self, i: Tensor) -> Tensor:
        return self.rows[i]


@dataclass(frozen=True)
class Weighing:
    """Keeps everything, with given weights, and asks for given signals."""

    stage = "epoch"
    weights: tuple[float, ...] | None
    wanted: frozenset[str]

    def columns(self) -> dict[str, thresher.Column]:
        types = {"loss": torch.float64, "correct": torch.bool, "confidence": torch.float32}
        return {name: thresher.Column(dtype) for name, dtype in types.items() if name == "loss" or name in self.wanted}

    def plan_epoch(self, records: Any, **_: Any) -> thresher.EpochPlan:
        weights = None if self.weights is None else torch.tensor(self.weights)
        return thresher.EpochPlan(torch.arange(len(records["loss"])), weights=weights)


@grid
@pytest.mark.parametrize("weights", [None, tuple(PLAN_WEIGHTS)], ids=["plain", "weighted"])
@pytest.mark.parametrize("asks", [False, True], ids=["losses", "signals"])
def test_in_the_loop(name: str, reduction: str, weights: tuple[float, ...] | None, asks: bool) -> None:
    """The same through run.criterion, which may take shortcuts: values, gradients and records, in two batches."""
    case = CASES[name]
    wanted = everything(name) if asks else set()
    criterion, model, own = case.make(reduction), Table(case.outputs), leaf(case.outputs)
    loader = DataLoader(TensorDataset(torch.arange(B), case.targets), batch_size=3)
    run = thresher.attach(Weighing(weights, frozenset(wanted)), loader=loader, criterion=criterion, model=model, epochs=1)
    for at, (i, targets) in zip((0, 3), run.loader, strict=True):
        value = run.criterion(run.model(i), targets)
        value.backward()
        if weights is None:
            expected = own_scalar(criterion, own[i], targets)
            assert torch.equal(value, expected)
            expected.backward()
            continue
        part = replace(case, outputs=case.outputs[at : at + 3], targets=case.targets[at : at + 3])
        assert value.item() == pytest.approx(part.scalar(part.outputs, list(weights[at : at + 3]), reduction), rel=1e-4)
    if weights is None:
        assert model.rows.grad is not None and own.grad is not None
        assert torch.equal(model.rows.grad, own.grad)
    assert run.records["loss"].tolist() == pytest.approx(case.losses(case.outputs, reduction), rel=1e-4, abs=1e-5)
    assert run.cost.forward == run.cost.backward == B
    found = adapt(criterion).signals(case.outputs, case.targets, RowLayout(B), wanted)
    for signal in wanted:
        torch.testing.assert_close(run.records[signal], found[signal])


@pytest.mark.parametrize("weights", [None, tuple(PLAN_WEIGHTS)], ids=["plain", "weighted"])
@pytest.mark.parametrize("asks", [False, True], ids=["losses", "signals"])
@pytest.mark.parametrize("ignore", [-100, -1])
def test_targets_that_the_loop_masks(weights: tuple[float, ...] | None, asks: bool, ignore: int) -> None:
    """No target of the batch is ignored when it is yielded, one is when the criterion is called."""
    wanted = frozenset({"correct", "confidence"} if asks else ())
    outputs, criterion = randn(B, C), nn.CrossEntropyLoss(ignore_index=ignore)
    model = Table(outputs)
    loader = DataLoader(TensorDataset(torch.arange(B), indices(B)), batch_size=B)
    run = thresher.attach(Weighing(weights, wanted), loader=loader, criterion=criterion, model=model, epochs=1)
    for i, targets in run.loader:
        targets[2] = ignore
        value = run.criterion(run.model(i), targets, ids=run.ids)
        valid = targets != ignore
        factors = torch.ones(B) if weights is None else torch.tensor(weights)
        losses = F.cross_entropy(outputs, targets, ignore_index=ignore, reduction="none")
        torch.testing.assert_close(value.detach(), (factors * losses).sum() / valid.sum())
        assert weights is not None or torch.equal(value, criterion(outputs, targets))
        torch.testing.assert_close(run.records["loss"].float(), losses.where(valid, -torch.inf))


@pytest.mark.parametrize("weights", [None, torch.tensor(PLAN_WEIGHTS)], ids=["plain", "weighted"])
def test_flattened_positions(weights: Tensor | None) -> None:
    """(B * T, C) outputs and (B * T,) targets of B samples are what (B, C, T) and (B, T) are."""
    case = CASES["ce-dense-all"]
    adapter, wanted = adapt(case.make("mean")), {"correct", "confidence"}
    flat = case.outputs.transpose(1, 2).reshape(B * T, C), case.targets.reshape(B * T)
    mine = adapter.measure(*flat, RowLayout(B, T), weights=weights, wanted=wanted)
    dense = adapter.measure(case.outputs, case.targets, RowLayout(B), weights=weights, wanted=wanted)
    torch.testing.assert_close(mine.value, dense.value)
    for name, signal in dense.signals.items():
        torch.testing.assert_close(mine.signals[name], signal)


def test_flattened_batch_mean_of_divergences() -> None:
    """'batchmean' divides by rows, of which a flattened sample has several."""
    criterion = nn.KLDivLoss(reduction="batchmean")
    outputs, targets = randn(B * T, C).log_softmax(1), randn(B * T, C).softmax(1)
    measured = adapt(criterion).measure(outputs, targets, RowLayout(B, T), weights=torch.ones(B), wanted=set())
    torch.testing.assert_close(measured.value, criterion(outputs, targets))
    rows = F.kl_div(outputs, targets, reduction="none").sum(1).reshape(B, T)
    torch.testing.assert_close(measured.signals["loss"], rows.mean(1))


@pytest.mark.parametrize("name", ["ce", "ce-smoothing", "ce-weights", "mse"])
def test_autocast(name: str) -> None:
    case = CASES[name]
    criterion = case.make("mean")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = case.outputs.bfloat16()
        mine, own = leaf(outputs), leaf(outputs)
        measured = adapt(criterion).measure(mine, case.targets, RowLayout(case.n), weights=None, wanted=everything(name))
        value = criterion(own, case.targets)
    assert measured.value.dtype == value.dtype
    assert torch.equal(measured.value, value)
    measured.value.backward()
    value.backward()
    assert mine.grad is not None and own.grad is not None
    assert torch.equal(mine.grad, own.grad)


def test_a_batch_without_any_valid_position_is_the_users_nan() -> None:
    adapter, targets = adapt(nn.CrossEntropyLoss()), torch.full((2, T), -100)
    for weights in (None, torch.tensor([1.0, 2.0])):
        measured = adapter.measure(randn(2, C, T), targets, RowLayout(2), weights=weights, wanted={"correct", "confidence"})
        assert measured.value.isnan()
        assert measured.signals["loss"].tolist() == [-math.inf, -math.inf]
        assert not measured.signals["correct"].any()


@pytest.mark.parametrize("ignore", [-100, 0])
@pytest.mark.parametrize("shape", [(2,), (2, T)], ids=["single", "dense"])
def test_a_sample_that_is_ignored_is_not_right(ignore: int, shape: tuple[int, ...]) -> None:
    """Also where the ignored index is a class, and the model predicts it."""
    outputs = torch.zeros(2, C, *shape[1:])
    outputs[:, 0] = 9.0
    targets = torch.full(shape, ignore)
    targets[1] = 1
    adapter, wanted = adapt(nn.CrossEntropyLoss(ignore_index=ignore)), {"correct", "confidence"}
    refreshed = adapter.signals(outputs, targets, RowLayout(2), wanted)
    for weights in (None, torch.ones(2)):
        for found in (refreshed, adapter.measure(outputs, targets, RowLayout(2), weights=weights, wanted=wanted).signals):
            assert found["loss"][0] == -math.inf and found["loss"][1] > 5
            assert found["correct"].tolist() == [False, False]


# Signals besides the loss


def test_signals_of_each_kind() -> None:
    wanted = {"correct", "confidence"}
    logits, y = torch.tensor([[2.0, 0, 0], [0, 0, 1]]), torch.tensor([0, 1])
    top = [math.exp(2) / (math.exp(2) + 2), math.e / (math.e + 2)]
    for criterion, outputs, targets in (
        (nn.CrossEntropyLoss(), logits, y),
        (nn.CrossEntropyLoss(label_smoothing=0.1), logits, y),
        (nn.CrossEntropyLoss(), logits, F.one_hot(y, 3).float()),
        (nn.NLLLoss(), logits.log_softmax(1), y),
        (nn.KLDivLoss(reduction="batchmean"), logits.log_softmax(1), F.one_hot(y, 3).float()),
        (nn.KLDivLoss(reduction="batchmean", log_target=True), logits.log_softmax(1), F.one_hot(y, 3) * 20.0 - 20),
        (nn.MultiMarginLoss(), logits, y),
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), logits, y),
    ):
        found = adapt(criterion).signals(outputs, targets, RowLayout(2), wanted)
        assert found["correct"].tolist() == [True, False], criterion
        assert found["confidence"].tolist() == pytest.approx(top, rel=1e-5), criterion
    labels, y = torch.tensor([[1.0, -2], [3, 1]]), torch.tensor([[1.0, 0], [1, 0]])
    sure = [(1 / (1 + math.exp(-1)) + 1 / (1 + math.exp(-2))) / 2, (1 / (1 + math.exp(-3)) + 1 / (1 + math.exp(-1))) / 2]
    for criterion, outputs in ((nn.BCEWithLogitsLoss(), labels), (nn.BCELoss(), labels.sigmoid())):
        found = adapt(criterion).signals(outputs, y, RowLayout(2), wanted)
        assert found["correct"].tolist() == [True, False]
        assert found["confidence"].tolist() == pytest.approx(sure, rel=1e-5)


def test_batch_confidence_beside_the_own_value() -> None:
    case = CASES["ce"]
    adapter = adapt(nn.CrossEntropyLoss())
    measured = adapter.measure(case.outputs, case.targets, RowLayout(B), weights=None, wanted={"batch_confidence", "correct"})
    expected = np.exp(case.outputs.numpy())
    expected /= expected.sum(0, keepdims=True)
    np.testing.assert_allclose(measured.signals["batch_confidence"].numpy(), expected.max(1), rtol=1e-5)
    assert torch.equal(measured.value, nn.CrossEntropyLoss()(case.outputs, case.targets))


# What is taken


def test_functions_of_torch() -> None:
    pairs = {
        F.cross_entropy: "ce",
        F.nll_loss: "nll",
        F.binary_cross_entropy: "bce",
        F.binary_cross_entropy_with_logits: "bce-logits",
        F.mse_loss: "mse",
        F.l1_loss: "l1",
        F.smooth_l1_loss: "l1",
        F.huber_loss: "l1",
        F.kl_div: "kl",
    }
    for function, name in pairs.items():
        case = CASES[name]
        adapter = adapt(function)
        measured = adapter.measure(case.outputs, case.targets, RowLayout(B), weights=None, wanted=everything(name))
        assert torch.equal(measured.value, function(case.outputs, case.targets)), function
        assert measured.signals["loss"].shape == (B,)
        assert adapter.kind != "unknown"


def test_callables() -> None:
    outputs, targets = leaf(randn(B, 3)), randn(B, 3)
    measured = adapt(lambda o, t: (o - t).square()).measure(
        outputs, targets, RowLayout(B), weights=torch.tensor(PLAN_WEIGHTS), wanted=set()
    )
    squares = (outputs - targets).detach().square().mean(1)
    torch.testing.assert_close(measured.signals["loss"], squares)
    torch.testing.assert_close(measured.value, (squares * torch.tensor(PLAN_WEIGHTS)).mean())
    plain = adapt(lambda o, t: (o - t).square()).measure(outputs, targets, RowLayout(B), weights=None, wanted=set())
    assert torch.equal(plain.value, (outputs - targets).square().mean())


def test_another_module_with_a_reduction() -> None:
    criterion = nn.SoftMarginLoss(reduction="sum")
    outputs, targets = randn(B, 3), randn(B, 3).sign()
    measured = adapt(criterion).measure(outputs, targets, RowLayout(B), weights=torch.tensor(PLAN_WEIGHTS), wanted=set())
    losses = torch.log(1 + torch.exp(-targets * outputs))
    torch.testing.assert_close(measured.signals["loss"], losses.mean(1))
    torch.testing.assert_close(measured.value, (losses.sum(1) * torch.tensor(PLAN_WEIGHTS)).sum())
    assert criterion.reduction == "sum"


def test_a_subclass_with_its_own_forward_is_called() -> None:
    class Doubled(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return 2 * super().forward(outputs, targets)

    case = CASES["ce"]
    measured = adapt(Doubled()).measure(
        case.outputs, case.targets, RowLayout(B), weights=None, wanted={"correct", "confidence"}
    )
    torch.testing.assert_close(measured.value, 2 * F.cross_entropy(case.outputs, case.targets))
    torch.testing.assert_close(measured.signals["loss"], 2 * F.cross_entropy(case.outputs, case.targets, reduction="none"))


@pytest.mark.parametrize(
    ("criterion", "name"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHT.clone()), "weight"),
        (nn.NLLLoss(weight=WEIGHT.clone()), "weight"),
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHT.clone()), "pos_weight"),
    ],
)
def test_weights_that_change_after_attaching_are_followed(criterion: nn.Module, name: str) -> None:
    """The user's criterion is moved to a device, cast or given other weights: no stale copy may be left."""
    adapter, outputs = adapt(criterion), randn(B, C).double().log_softmax(1)
    targets = randn(B, C).double().sigmoid() if name == "pos_weight" else indices(B)
    criterion.double()
    for _ in range(2):
        measured = adapter.measure(outputs, targets, RowLayout(B), weights=torch.ones(B), wanted=set())
        torch.testing.assert_close(measured.value, criterion(outputs, targets))
        setattr(criterion, name, WEIGHT.flip(0).double())


# What is refused


def test_not_callable() -> None:
    with pytest.raises(TypeError, match=r"`criterion` must be a loss module or a callable .* got str"):
        adapt("cross_entropy")


@pytest.mark.parametrize(
    ("criterion", "allowed"),
    [(nn.MSELoss(reduction="batchmean"), "mean, sum, none$"), (nn.KLDivLoss(reduction="max"), "mean, sum, none, batchmean$")],
)
def test_unknown_reduction(criterion: nn.Module, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"`criterion` has reduction '(batchmean|max)'; allowed are {allowed}"):
        adapt(criterion)


@pytest.mark.parametrize(
    ("criterion", "got"),
    [
        (lambda o, t: F.mse_loss(o, t), r"a tensor of shape \(\)"),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), r"a tensor of shape \(\)"),
        (lambda o, t: 0.5, "float"),
    ],
)
@pytest.mark.parametrize("weights", [None, torch.ones(B)], ids=["plain", "weighted"])
def test_a_callable_that_averages(criterion: Any, got: str, weights: Tensor | None) -> None:
    outputs, targets = randn(B, C), randn(B, C).softmax(1)
    with pytest.raises(ValueError, match=rf"returned {got}: it must return one loss per sample, shape \(rows, \.\.\.\)\. Let it"):
        adapt(criterion).measure(outputs, targets, RowLayout(B), weights=weights, wanted=set())


def test_a_module_that_averages_whatever_its_reduction() -> None:
    class Stubborn(nn.Module):
        reduction = "mean"

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs - targets).square().mean()

    with pytest.raises(
        ValueError, match=r"Stubborn\(\) returned a scalar although its reduction was set to 'none'.*run\.reduce"
    ):
        adapt(Stubborn()).measure(randn(B, 3), randn(B, 3), RowLayout(B), weights=None, wanted=set())


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize(
    "kind",
    [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss],
)
def test_shapes_that_would_broadcast(kind: type[nn.Module]) -> None:
    outputs, targets = rand(B, 1), rand(B)
    message = rf"{kind.__name__}\(\): outputs of shape \({B}, 1\) and targets of shape \({B},\) would be broadcast .* equal"
    with pytest.raises(ValueError, match=message):
        adapt(kind()).measure(outputs, targets, RowLayout(B), weights=torch.ones(B), wanted=set())
    with pytest.raises(ValueError, match=message):
        adapt(kind()).signals(outputs, targets, RowLayout(B), set())
    with pytest.raises(ValueError, match=r"would be broadcast|must be the same as|is different to|deprecated"):
        adapt(kind()).measure(outputs, targets, RowLayout(B), weights=None, wanted=set())


@pytest.mark.parametrize(
    ("rows", "group"), [(5, RowLayout(6)), (13, RowLayout(6, 2)), (6, RowLayout(4, 2)), (7, RowLayout(6, None))]
)
def test_losses_that_are_not_one_a_sample(rows: int, group: RowLayout) -> None:
    message = rf"Losses of shape \({rows}, 3\) for {group.n} samples: the first dimension must be the samples'.*run\.reduce"
    with pytest.raises(ValueError, match=message):
        group.rows(torch.zeros(rows, 3))


def test_losses_without_a_dimension() -> None:
    with pytest.raises(ValueError, match=r"Losses of shape \(\) for 1 samples"):
        adapt(nn.CrossEntropyLoss()).measure(randn(C), torch.tensor(1), RowLayout(1), weights=None, wanted=set())


def test_rows_of_a_group() -> None:
    assert RowLayout(6).rows(torch.zeros(6)).shape == (6, 1)
    assert RowLayout(6, 2).rows(torch.zeros(12, 3)).shape == (6, 6)
    assert RowLayout(6, 2).rows(torch.zeros(6, 3)).shape == (6, 3)
    assert RowLayout(6, None).rows(torch.zeros(18)).shape == (6, 3)


@pytest.mark.parametrize(
    ("criterion", "outputs", "targets"),
    [
        (nn.MSELoss(), (B, 3), (B, 3)),
        (lambda o, t: (o - t).square(), (B, 3), (B, 3)),
        (lambda o, t: o["loss"], None, None),
    ],
)
def test_signals_that_cannot_be_read(criterion: Any, outputs: Any, targets: Any) -> None:
    adapter = adapt(criterion)
    pair = ({"loss": rand(B)}, None) if outputs is None else (randn(*outputs), randn(*targets))
    assert adapter.signals(*pair, RowLayout(B), set()).keys() == {"loss"}
    with pytest.raises(ValueError, match=r"not defined for criterion .* attach\(signals=function\) with function") as raised:
        adapter.signals(*pair, RowLayout(B), {"correct", "confidence"})
    assert str(raised.value) == unreadable(criterion, {"correct", "confidence"})


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [((B, 1), (B,)), ((B, T, C), (B, T)), ((B, 1, C), (B, 1)), ((B, C, T), (B, T + 1)), ((B, C), (B + 1,))],
    ids=["one-logit", "classes-last", "classes-last-one-token", "other-positions", "other-rows"],
)
def test_outputs_of_a_callable_that_are_not_classes_along_dimension_one(outputs: Any, targets: Any) -> None:
    """Read as classes, one logit a sample is always right where the target is 0, with confidence 1."""
    adapter = adapt(lambda o, t: o.flatten(1).mean(1))
    with pytest.raises(ValueError, match="`confidence` and `correct` are not defined for criterion"):
        adapter.signals(randn(*outputs), torch.zeros(targets, dtype=torch.int64), RowLayout(B), {"correct", "confidence"})


def test_other_criteria_that_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"broadcast its arguments to losses of shape \(6, 6\).*mixes samples"):
        adapt(nn.PoissonNLLLoss()).signals(torch.rand(6, 1), torch.rand(6), RowLayout(6), set())


@pytest.mark.parametrize(
    ("criterion", "targets", "negatives"),
    [
        (nn.CrossEntropyLoss(), torch.tensor([1, 2]), True),
        (nn.CrossEntropyLoss(ignore_index=0), torch.tensor([0, 2]), False),
        (nn.CrossEntropyLoss(), torch.tensor([[1], [-100]]), False),
        (nn.MSELoss(), torch.tensor([1.0, 2.0]), False),
    ],
)
def test_where_labels_that_are_not_negative_all_count(criterion, targets, negatives):
    assert adapt(criterion).ignores_negatives_of(targets) is negatives
