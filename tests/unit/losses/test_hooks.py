"""Hooks of a criterion are called as in the loop without a run: once per loss, with what the loop sees."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.loss_cases import Weighing
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B, C = 24, 8, 4
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % C
WEIGHTS = tuple(1.0 + i % 3 for i in range(N))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses if self.reduction == "none" else losses.mean()


class OneHot(nn.MSELoss):
    """A loss whose arguments are those of a classifier."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(outputs, F.one_hot(targets, C).float())


CRITERIA = [nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, Own, OneHot]


def train(criterion: nn.Module, *, attached: bool, method: Any = None, **settings: Any) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, C), nn.LogSoftmax(1))
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    call, feed, loss_of, losses = net, DataLoader(TensorDataset(X, Y), B, shuffle=True), criterion, []
    if attached:
        settings |= {"loader": feed, "criterion": criterion, "model": net, "optimizer": optimizer, "epochs": 2}
        run = thresher.attach(method or thresher.FullData(), **settings)
        call, feed, loss_of = run.model, run.loader, run.criterion
    for _ in range(2):
        for x, y in feed:
            loss = loss_of(call(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            with torch.no_grad():
                losses.append(loss_of(call(x), y).item())
    return losses, net.state_dict()


@pytest.mark.parametrize("kind", CRITERIA)
@pytest.mark.parametrize("hook", ["forward", "of all modules", "before", "result", "backward"])
def test_hooks_see_and_change_what_they_do_without_a_run(kind: Any, hook: str) -> None:
    found = []
    for attached in (False, True):
        criterion, seen = kind(), []
        note = lambda module, _, result, seen=seen, own=criterion: seen.append(result.item()) if module is own else None  # noqa: E731
        handle = None
        if hook == "forward":
            criterion.register_forward_hook(note)
        elif hook == "of all modules":
            handle = register_module_forward_hook(note)
        elif hook == "before":
            criterion.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(0) or (2 * given[0], given[1]))
        elif hook == "result":
            criterion.register_forward_hook(lambda _, __, result, seen=seen: seen.append(0) or 0.5 * result)
        else:
            criterion.register_full_backward_hook(lambda _, grad, __, seen=seen: seen.append(grad[0].sum().item()))
        try:
            losses, state = train(criterion, attached=attached)
        finally:
            if handle is not None:
                handle.remove()
        found.append((seen, losses, state))
    (seen, losses, state), (ours, our_losses, our_state) = found
    assert len(seen) == (2 * N // B if hook == "backward" else 4 * N // B)
    assert ours == seen and our_losses == losses
    assert all(torch.equal(our_state[key], state[key]) for key in state)


@pytest.mark.parametrize("kind", CRITERIA)
def test_hooks_see_the_weighted_loss(kind: Any) -> None:
    criterion, seen, gradients = kind(), [], []
    criterion.register_forward_hook(lambda _, __, result: seen.append(result.item()))
    criterion.register_full_backward_hook(lambda *_: gradients.append(0))
    losses, _ = train(criterion, attached=True, method=Weighing(WEIGHTS, frozenset()))
    assert seen == losses and len(gradients) == 2 * N // B
    assert losses == pytest.approx(train(kind(), attached=True, method=Weighing(WEIGHTS, frozenset()))[0])


@pytest.mark.parametrize("kind", CRITERIA)
def test_hooks_see_the_loss_of_the_kept_rows(kind: Any) -> None:
    criterion, seen = kind(), []
    criterion.register_forward_hook(lambda _, __, result: seen.append(result.item()))
    settings = {"method": thresher.SelectiveBackprop(keep=0.5), "forward_passes": "once"}
    losses, _ = train(criterion, attached=True, **settings)
    assert [value for value in seen if value in losses] == losses and len(seen) <= len(losses) + 1


def test_records_are_of_the_arguments_that_hooks_left() -> None:
    criterion, net = nn.CrossEntropyLoss(), nn.Linear(5, C)
    criterion.register_forward_pre_hook(lambda _, given: (2 * given[0], given[1]))
    loader = DataLoader(TensorDataset(X, Y), B)
    run = thresher.attach(thresher.FullData(), loader=loader, criterion=criterion, model=net, epochs=1)
    for x, y in run.loader:
        run.criterion(run.model(x), y)
    torch.testing.assert_close(run.records["loss"], F.cross_entropy(2 * net(X), Y, reduction="none").detach())


def test_a_forward_of_the_instance_is_put_back_after_an_error() -> None:
    criterion = nn.CrossEntropyLoss()
    criterion.register_forward_hook(lambda *_: None)
    own = criterion.forward
    criterion.forward = lambda outputs, targets: own(outputs, targets)  # pyright: ignore[reportAttributeAccessIssue]
    patched = criterion.forward
    run = thresher.attach(
        thresher.FullData(), loader=DataLoader(TensorDataset(X, Y), B), criterion=criterion, model=nn.Linear(5, C), epochs=1
    )
    x, y = next(iter(run.loader))
    with pytest.raises(IndexError):
        run.criterion(run.model(x)[:, :1], y)
    assert criterion.forward is patched
