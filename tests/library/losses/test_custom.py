"""Criteria that draw random numbers, remember something, are compiled, or are changed by the loop."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from loss_cases import measure, signals
from thresher.losses import adapt

N, B, C = 24, 8, 3


class Noisy(nn.Module):
    """Draws noise, and remembers a running mean and the number of its calls."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction, self.calls = reduction, 0
        self.scale = nn.Parameter(torch.ones(()))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        losses = (
            F.cross_entropy(outputs + torch.randn_like(outputs), targets, reduction="none")
            * self.scale
            + self.mean
        )
        self.mean.mul_(0.9).add_(losses.detach().mean())
        return losses if self.reduction == "none" else getattr(losses, self.reduction)()


class NoisyByItsOwn(Noisy):
    """Draws from a generator of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(
            outputs + torch.rand(outputs.shape, generator=self.generator), targets
        )


class NoisyFunction:
    """The same as a callable."""

    def __init__(self) -> None:
        self.module = Noisy("none")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.module(outputs, targets)


def train(criterion: Any, method: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = nn.Linear(4, C)
    data = TensorDataset(torch.randn(N, 4), torch.arange(N) % C)
    loader: Any = DataLoader(data, B, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, call = net, criterion
    if method is not None:
        run = thresher.attach(
            method, loader=loader, criterion=criterion, model=net, optimizer=optimizer, epochs=2
        )
        loader, model, call = run.loader, run.model, run.criterion
    for _ in range(2):
        for x, y in loader:
            loss = call(model(x), y)
            (loss if loss.dim() == 0 else loss.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    module = getattr(criterion, "module", criterion)
    return net.weight, torch.get_rng_state(), module.calls, module.mean, module.scale.grad


@pytest.mark.parametrize(
    "make", [Noisy, NoisyByItsOwn, lambda: Noisy("sum"), lambda: Noisy("none"), NoisyFunction]
)
@pytest.mark.parametrize(
    "method", [thresher.FullData(), thresher.Kakurenbo(max_fraction=0.0, adjust_lr=False)]
)
def test_selecting_nothing_calls_a_random_criterion_as_the_loop_does(
    make: Any, method: Any
) -> None:
    for attached, alone in zip(train(make(), method), train(make(), None), strict=True):
        assert torch.equal(torch.as_tensor(attached), torch.as_tensor(alone))


@pytest.mark.parametrize("make", [Noisy, NoisyByItsOwn, NoisyFunction])
def test_the_losses_of_samples_are_those_of_the_scalar(make: Any) -> None:
    outputs, targets = torch.randn(B, C), torch.arange(B) % C
    for _ in range(2):
        value, found = measure(adapt(make()), outputs, targets, B)
        torch.testing.assert_close(found["loss"].mean(), value.detach())


def test_weighted_losses_call_it_once() -> None:
    criterion = Noisy()
    outputs, targets = torch.randn(B, C), torch.arange(B) % C
    value, found = measure(adapt(criterion), outputs, targets, B, weights=torch.full((B,), 2.0))
    torch.testing.assert_close(2 * found["loss"].mean(), value)
    assert criterion.calls == 1 and criterion.reduction == "mean"


def test_a_criterion_that_cannot_be_copied() -> None:
    criterion = Noisy()
    criterion.last = torch.ones(1, requires_grad=True) * 2  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"cannot be copied .*Pass a callable .*or use run.reduce"):
        measure(adapt(criterion), torch.randn(B, C), torch.arange(B) % C, B)
    assert criterion.calls == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", torch.tensor([1.0, 5.0, 0.2])),
        ("label_smoothing", 0.3),
        ("ignore_index", 1),
        ("reduction", "sum"),
        ("reduction", "none"),
    ],
)
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_settings_are_read_in_every_call(kind: Any, name: str, value: Any) -> None:
    if kind is nn.NLLLoss and name == "label_smoothing":
        return
    torch.manual_seed(0)
    criterion, net = kind(), nn.Sequential(nn.Linear(4, C), nn.LogSoftmax(1))
    loader = DataLoader(TensorDataset(torch.randn(N, 4), torch.arange(N) % C), N)
    run = thresher.attach(
        thresher.FullData(), loader=loader, criterion=criterion, model=net, epochs=1
    )
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    run.criterion(outputs, y)
    setattr(criterion, name, value)
    assert torch.equal(run.criterion(outputs, y), criterion(outputs, y))
    expected = F.cross_entropy(
        outputs, y, reduction="none", label_smoothing=getattr(criterion, "label_smoothing", 0)
    )
    losses = signals(adapt(criterion), outputs, y, N)["loss"]
    counted = y != criterion.ignore_index
    torch.testing.assert_close(losses[counted], expected[counted].detach())
    assert not losses[~counted].isfinite().any()


def test_changed_settings_of_other_losses() -> None:
    criterion = nn.MSELoss()
    adapter, pair = adapt(criterion), (torch.randn(B, C), torch.randn(B, C))
    criterion.reduction = "sum"
    value, found = measure(adapter, *pair, B)
    assert torch.equal(value, F.mse_loss(*pair, reduction="sum"))
    torch.testing.assert_close(found["loss"], (pair[0] - pair[1]).square().mean(1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when its compiler is loaded
@pytest.mark.parametrize("own", [nn.CrossEntropyLoss, nn.SmoothL1Loss, Noisy])
def test_a_compiled_criterion_stays_as_it_is(own: Any) -> None:
    compiled: Any = torch.compile(own())
    adapter = adapt(compiled)
    targets = torch.randn(B, C).softmax(1) if own is not Noisy else torch.arange(B) % C
    measure(adapter, torch.randn(B, C), targets, B)
    assert compiled._orig_mod.reduction == "mean"


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CTCLoss(),
        nn.TripletMarginLoss(),
        nn.TripletMarginWithDistanceLoss(),
        nn.CosineEmbeddingLoss(),
        nn.MarginRankingLoss(),
        nn.GaussianNLLLoss(),
        nn.AdaptiveLogSoftmaxWithLoss(4, 8, [4]),
        F.ctc_loss,
        F.triplet_margin_loss,
        F.triplet_margin_with_distance_loss,
        F.cosine_embedding_loss,
        F.margin_ranking_loss,
        F.gaussian_nll_loss,
    ],
)
def test_criteria_with_other_arguments_are_refused_at_once(criterion: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`criterion` is .*more than outputs and targets.*call run.reduce"
    ):
        adapt(criterion)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")


class Contrastive(nn.Module):
    reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            outputs @ outputs.T, torch.arange(len(outputs)), reduction=self.reduction
        )


def once(criterion: Any) -> Any:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(N, 4), torch.arange(N) % C), B)
    method = thresher.SelectiveBackprop(keep=0.5)
    return thresher.attach(
        method,
        loader=loader,
        criterion=criterion,
        model=nn.Linear(4, C),
        epochs=1,
        forward_passes="once",
    )


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize("criterion", [contrastive, Contrastive()])
def test_a_loss_that_depends_on_the_rest_of_the_batch_is_refused(criterion: Any) -> None:
    run = once(criterion)
    x, y = next(iter(run.loader))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"depends on the other samples.*forward_passes='twice'.*run.reduce"
        ):
            run.criterion(run.model(x), y)
    assert not run.trained.any()


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize(
    "criterion", [lambda o, t: F.cross_entropy(o, t, reduction="none"), Noisy(), NoisyFunction()]
)
def test_a_loss_of_each_sample_alone_is_not(criterion: Any) -> None:
    run = once(criterion)
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
    assert int(run.trained.sum()) == N // 2


@pytest.mark.parametrize(
    ("criterion", "scale"), [(lambda o, t: o[:, 0], 1.0), (nn.NLLLoss(), -1.0)]
)
def test_losses_of_minus_infinity_are_not_finite(criterion: Any, scale: float) -> None:
    loader = DataLoader(TensorDataset(torch.ones(N, 4), torch.zeros(N, dtype=torch.int64)), B)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=criterion,
        model=nn.Identity(),
        epochs=1,
        on_nonfinite="raise",
    )
    with pytest.raises(FloatingPointError, match="24 samples have a loss that is not finite"):
        for x, y in run.loader:
            run.criterion(run.model(x) * -torch.inf * scale, y)


def test_reduced_losses_of_minus_infinity_are_not_finite() -> None:
    loader = DataLoader(TensorDataset(torch.ones(N, 4), torch.zeros(N, dtype=torch.int64)), B)
    run = thresher.attach(
        thresher.FullData(), loader=loader, criterion=None, epochs=1, on_nonfinite="raise"
    )
    with pytest.raises(FloatingPointError, match="24 samples have a loss that is not finite"):
        for x, y in run.loader:
            run.reduce(x[:, 0] * -torch.inf, targets=y)


def test_the_count_of_trainings_does_not_wrap() -> None:
    loader = DataLoader(TensorDataset(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)), 2)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=nn.Linear(4, C),
        epochs=2,
    )
    run.trained.fill_(2**15 - 1)
    for x, y in run.loader:
        run.criterion(run.model(x), y)
    assert run.trained.tolist() == [2**15, 2**15]
