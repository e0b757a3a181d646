"""Signals with several numbers per sample: where they come from, and what they cannot be had from."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import BatchPlan, DivBS, Requirements, Scoring

N, B, C = 12, 6, 3
pytestmark = pytest.mark.usefixtures("shared_traces")


class Looks:
    """Keeps everything, and what it was shown."""

    stage = "batch"

    def __init__(self, *signals: str) -> None:
        self.requires = Requirements(signals=signals)
        self.seen: list[Any] = []

    def init_state(self) -> dict[str, Any]:
        return {}

    def count(self, n: int) -> int:
        return n

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: Any) -> Any:
        self.seen.append(dict(signals))
        return BatchPlan(torch.arange(len(signals["id"]))), dict(state)


def net(last: Any = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, C) if last is None else last)


def made(method: Any, model: Any = None, **settings: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(N, 4, generator=generator), torch.arange(N) % C)
    criterion = nn.CrossEntropyLoss()
    return thresher.attach(
        method,
        loader=DataLoader(data, B),
        criterion=criterion,
        model=model or net(),
        epochs=1,
        **settings,
    )


def errors(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).softmax(1) - nn.functional.one_hot(y, C)


@pytest.mark.parametrize("passes", ["auto", "twice"])
def test_errors_and_features_of_the_last_layer(passes: Any):
    model, method = net(), Looks("error", "feature")
    run = made(method, model, forward_passes=passes)
    x, y = next(iter(run.loader))
    seen = method.seen[0]
    assert torch.allclose(seen["error"], errors(model, x, y), atol=1e-6)
    assert torch.allclose(seen["feature"], model[:2](x), atol=1e-6)
    assert seen["feature"].dtype == seen["error"].dtype == torch.float32
    assert run.cost.scoring == B


def test_errors_of_the_loops_own_forward_pass():
    model, method = net(), Looks("error")
    run = made(method, model)
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    assert torch.allclose(method.seen[0]["error"], errors(model, x, y), atol=1e-6)
    assert run.cost.scoring == 0


@pytest.mark.parametrize("passes", ["once", "twice"])
def test_errors_may_come_from_the_users_function(passes: Any):
    method = Looks("error")
    run = made(
        method,
        forward_passes=passes,
        signals=lambda outputs, _: {"error": outputs.detach() @ outputs.detach().T},
    )
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    assert method.seen[0]["error"].shape == (B, B)


def test_what_it_cannot_be_had_from():
    with pytest.raises(
        ValueError,
        match="which is unknown in the loop's own forward pass: use forward_passes='twice', or use ",
    ):
        made(DivBS(), forward_passes="once")
    with pytest.raises(
        ValueError,
        match=r"DivBS needs the input of the last nn.Linear, but Identity has none, or use DivBS\(",
    ):
        made(DivBS(), nn.Identity())
    for scoring in (Scoring(every_epochs=2), Scoring(losses=torch.zeros(N))):
        with pytest.raises(
            ValueError, match="`forward_passes`: DivBS chooses by error, feature, which has several"
        ):
            made(DivBS(), forward_passes=scoring)
    assert made(DivBS(gradient="outputs"), forward_passes="once") is not None


def test_errors_must_have_one_row_per_sample():
    run = made(
        Looks("error"),
        signals=lambda *_: {"error": torch.zeros(2, 2)},
        forward_passes="twice",
    )
    with pytest.raises(
        ValueError,
        match=r"`signals` must return tensors of shape \(6,\), got \(2, 2\) for 'error'",
    ):
        next(iter(run.loader))


def test_features_must_have_one_row_per_sample():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(1, C)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x.unsqueeze(2)).mean(1)

    run = made(DivBS(), Tokens())
    with pytest.raises(
        ValueError,
        match=r"has shape \(6, 4, 1\) for 6 samples; one row of features per sample is needed",
    ):
        next(iter(run.loader))
