"""A criterion with reduction="none": the loop gets the losses before they are averaged, and reduces them itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.loss_cases import Weighing
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B, C, T = 24, 8, 4, 3
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.25, 3.0])
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % C
WEIGHTS = tuple(1.0 + i % 3 for i in range(N))
WEIGHING: Any = Weighing(WEIGHTS, frozenset())


class Weighted(nn.Module):
    """A criterion of the user's own, with a reduction."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none") * CLASS_WEIGHT[targets]
        return losses if self.reduction == "none" else losses.mean()


def classes(targets: Tensor) -> Tensor:
    return targets.argmax(1) if targets.is_floating_point() else targets


ONE_HOT = F.one_hot(Y, C).float()
CRITERIA: dict[str, tuple[nn.Module, Tensor]] = {
    "cross-entropy": (nn.CrossEntropyLoss(reduction="none"), Y),
    "class weights": (
        nn.CrossEntropyLoss(weight=CLASS_WEIGHT, label_smoothing=0.1, reduction="none"),
        Y,
    ),
    "nll": (nn.NLLLoss(reduction="none"), Y),
    "mse": (nn.MSELoss(reduction="none"), ONE_HOT),
    "bce": (nn.BCEWithLogitsLoss(reduction="none"), ONE_HOT),
    "own": (Weighted("none"), Y),
}
REDUCED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda losses, _: losses.mean(),
    "sum by number": lambda losses, y: losses.sum() / len(y),
    "weights of classes": lambda losses, y: (
        (losses.flatten(1) if losses.dim() > 1 else losses[:, None])
        .mean(1)
        .mul(CLASS_WEIGHT[y])
        .sum()
        / CLASS_WEIGHT[y].sum()
    ),
    "mask": lambda losses, y: losses[y != 3].mean(),
}


def loader_of(targets: Tensor = Y) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, targets), B, shuffle=True)


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("reduce", REDUCED)
def test_selecting_nothing_gives_the_losses_bit_for_bit(name: str, reduce: str) -> None:
    criterion, targets = CRITERIA[name]

    def loop(attached: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        net, seen = nn.Linear(5, C), []
        optimizer, call, feed, loss_of = (
            torch.optim.SGD(net.parameters(), 0.5),
            net,
            loader_of(targets),
            criterion,
        )
        if attached:
            run = thresher.attach(
                thresher.FullData(),
                loader=feed,
                criterion=criterion,
                model=net,
                optimizer=optimizer,
                epochs=2,
            )
            call, feed, loss_of = run.model, run.loader, run.criterion
        for _ in range(2):
            for x, y in feed:
                losses = loss_of(call(x), y)
                REDUCED[reduce](losses, classes(y)).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    seen += [losses.detach(), loss_of(call(x), y)]
        return seen, net.state_dict()

    ours, plain = loop(attached=True), loop(attached=False)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], plain[0], strict=True))
    assert all(torch.equal(ours[1][key], plain[1][key]) for key in plain[1])


@pytest.mark.parametrize("name", CRITERIA)
def test_weights_of_samples_are_in_the_losses(name: str) -> None:
    criterion, targets = CRITERIA[name]
    net = nn.Linear(5, C)
    run = thresher.attach(
        WEIGHING, loader=loader_of(targets), criterion=criterion, model=net, epochs=1
    )
    for x, y in run.loader:
        losses = run.criterion(run.model(x), y)
        plain = criterion(net(x), y)
        weights = torch.tensor(WEIGHTS)[run.ids]
        torch.testing.assert_close(
            losses, plain * (weights if plain.dim() == 1 else weights[:, None])
        )
        losses.mean().backward()
    assert run.trained.eq(1).all()


def test_weights_of_flattened_tokens() -> None:
    targets = torch.arange(N * T).view(N, T) % C
    net = nn.Sequential(nn.Linear(5, T * C), nn.Unflatten(1, (T, C)))
    criterion = nn.CrossEntropyLoss(reduction="none")
    loader = loader_of(targets)
    run = thresher.attach(WEIGHING, loader=loader, criterion=criterion, model=net, epochs=1)
    for x, y in run.loader:
        losses = run.criterion(run.model(x).view(-1, C), y.view(-1))
        plain = criterion(net(x).view(-1, C), y.view(-1))
        torch.testing.assert_close(
            losses, plain * torch.tensor(WEIGHTS)[run.ids].repeat_interleave(T)
        )


def test_the_mean_of_a_loop_is_what_a_method_with_weights_means() -> None:
    """InfoBatch with the losses averaged in the loop trains as with reduction="mean"."""

    def train(reduction: str) -> Tensor:
        torch.manual_seed(0)
        net = nn.Linear(5, C)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        criterion = nn.CrossEntropyLoss(reduction=reduction)
        run = thresher.attach(
            thresher.InfoBatch(),
            loader=loader_of(),
            criterion=criterion,
            model=net,
            optimizer=optimizer,
            epochs=4,
        )
        for _ in range(4):
            for x, y in run.loader:
                run.criterion(run.model(x), y).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert run.cost.backward < 4 * N
        return net.weight.detach()

    torch.testing.assert_close(train("none"), train("mean"))


def test_a_method_that_chooses_before_the_loop() -> None:
    criterion, net = nn.CrossEntropyLoss(reduction="none"), nn.Linear(5, C)
    settings: Any = {"forward_passes": "twice", "model": net, "criterion": criterion, "epochs": 1}
    run = thresher.attach(thresher.SelectiveBackprop(keep=0.5), loader=loader_of(), **settings)
    for x, y in run.loader:
        assert torch.equal(run.criterion(run.model(x), y), criterion(net(x), y))


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(reduction="none"), Weighted("none")])
def test_a_method_that_chooses_after_the_forward_pass_is_refused(criterion: nn.Module) -> None:
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=loader_of(),
        criterion=criterion,
        model=nn.Linear(5, C),
        epochs=1,
        forward_passes="once",
    )
    x, y = next(iter(run.loader))
    ways_out = r"reduction='mean'.*forward_passes='twice'.*run.reduce\(losses, outputs=...\)"
    with pytest.raises(
        ValueError, match=f"SelectiveBackprop keeps some rows .* has reduction='none'.*{ways_out}"
    ):
        run.criterion(run.model(x), y)
    assert not run.trained.any()
    outputs = run.model(x)
    run.reduce(F.cross_entropy(outputs, y, reduction="none"), outputs=outputs).backward()
    assert run.trained.sum() == B // 2
