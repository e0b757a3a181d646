"""Hooks of a criterion are refused by `attach`; those that come later are not called."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.losses import adapt

N, B, C = 8, 4, 4
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % C


class Own(nn.Module):
    """A loss with a reduction of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return losses if self.reduction == "none" else losses.mean()


class Rows(nn.Module):
    """A loss per sample, without a reduction."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


CRITERIA = [nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, Own, Rows]
REGISTER = [
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
]


def attached(criterion: nn.Module) -> Any:
    net, loader = (
        nn.Sequential(nn.Linear(5, C), nn.LogSoftmax(1)),
        DataLoader(TensorDataset(X, Y), B),
    )
    return thresher.attach(
        thresher.FullData(), loader=loader, criterion=criterion, model=net, epochs=1
    )


@pytest.mark.parametrize("kind", CRITERIA)
@pytest.mark.parametrize("register", REGISTER)
def test_hooks_are_refused(kind: Any, register: str) -> None:
    criterion = kind()
    handle = getattr(criterion, register)(lambda *_: None)
    with pytest.raises(
        ValueError,
        match=r"`criterion` .* has hooks.*remove them, or .*call run.reduce\(losses, targets",
    ):
        attached(criterion)
    handle.remove()
    attached(criterion)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when its compiler is loaded
def test_hooks_around_a_compiled_criterion_are_refused() -> None:
    for compiled in (
        torch.compile(nn.CrossEntropyLoss()),
        torch.compile(nn.CrossEntropyLoss())._orig_mod,
    ):  # pyright: ignore
        compiled.register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match="has hooks"):
            adapt(compiled)


@pytest.mark.parametrize("kind", CRITERIA)
def test_later_hooks_and_those_of_all_modules_are_not_called(kind: Any) -> None:
    criterion, seen = kind(), []
    run = attached(criterion)
    for register in REGISTER:
        getattr(criterion, register)(lambda *_: seen.append(0))
    handle = register_module_forward_hook(
        lambda module, *_: seen.append(0) if type(module) is kind else None
    )
    try:
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
    finally:
        handle.remove()
    assert not seen
    assert run.records["loss"].isfinite().all()
