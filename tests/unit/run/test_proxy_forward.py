"""`attach(proxy=Proxy(...))`: a small model chooses the rows, learns from them, and its cost counts."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import BigLoss, Proxy, Scoring

N, B, C = 40, 8, 3
pytestmark = pytest.mark.usefixtures("shared_traces")


def samples(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(n, 4, generator=generator), torch.arange(n) % C)


def large() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, C))


def small() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(4, C)


def made(proxy: Proxy | None = None, method: Any = None, *, model: Any = None, data: Any = None, **settings: Any) -> Any:
    model = model or large()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = settings.pop("criterion", None) or nn.CrossEntropyLoss()
    loader = DataLoader(data or samples(), B)
    proxy = proxy or proxied(small())
    common: dict[str, Any] = {"model": model, "optimizer": optimizer, "criterion": criterion, "epochs": 3}
    run = thresher.attach(method or BigLoss(keep=0.5), loader=loader, proxy=proxy, **common, **settings)
    return run, optimizer


def proxied(model: nn.Module, every: int = 2, **settings: Any) -> Proxy:
    return Proxy(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), every, **settings)


def train(run: Any, optimizer: Any, epochs: int = 1) -> list[list[int]]:
    seen = []
    for _ in range(epochs):
        for x, y in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            seen.append(sorted(run.ids.tolist()))
    return seen


@pytest.mark.parametrize("divide", ["kept", "batch"])
def test_it_is_the_loop_of_airbench(divide: Any):
    """Proxy forward; the largest half by its losses; each second batch it steps on these; the model sees the half only."""
    model, proxy = large(), small()
    expected, own = copy.deepcopy(model), copy.deepcopy(proxy)
    run, optimizer = made(proxied(proxy), model=model, divide=divide)
    seen = train(run, optimizer, epochs=2)
    steps = torch.optim.SGD(expected.parameters(), lr=0.1), torch.optim.SGD(own.parameters(), lr=0.5, momentum=0.5)
    x, y = samples().tensors
    for step in range(10):
        ids = torch.arange(N)[step % 5 * B :][:B]
        losses = F.cross_entropy(own(x[ids]), y[ids], reduction="none")
        kept = losses.detach().argsort(stable=True)[-B // 2 :].sort().values
        divisor = B if divide == "batch" else B // 2
        if step % 2 == 0:
            steps[1].zero_grad()
            (losses[kept].sum() / divisor).backward()
            steps[1].step()
        ids = ids[kept]
        assert seen[step] == ids.tolist()
        steps[0].zero_grad()
        (F.cross_entropy(expected(x[ids]), y[ids], reduction="sum") / divisor).backward()
        steps[0].step()
    for one, other in zip([*model.parameters(), *proxy.parameters()], [*expected.parameters(), *own.parameters()], strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_what_it_costs():
    proxy = proxied(small(), every=4)
    run, optimizer = made(proxy)
    train(run, optimizer)
    ratio = (4 * C) / (4 * 32 + 32 * C)
    assert run.cost.scoring == pytest.approx(ratio * N, abs=1)
    assert run.cost.forward == run.cost.scoring + N // 2
    assert run.cost.backward == pytest.approx(N // 2 + ratio * 2 * B // 2, abs=1)
    assert run.cost.full_forward == run.cost.full_backward == N
    train(run, optimizer, epochs=2)
    assert run.cost.scoring == pytest.approx(ratio * 3 * N, abs=1), "parts of samples add up"


def test_a_cost_that_is_given_counts():
    run, optimizer = made(proxied(small(), every=1, cost=0.25))
    train(run, optimizer)
    assert (run.cost.scoring, run.cost.forward, run.cost.backward) == (N // 4, N // 4 + N // 2, N // 8 + N // 2)


def test_without_operations_that_torch_counts_a_pass_is_a_whole_one():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(C))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :C] * self.scale

    run, optimizer = made(proxied(Plain()))
    train(run, optimizer)
    assert run.cost.scoring == N


def test_rows_fill_batches_where_that_is_asked_for():
    run, optimizer = made(forward_passes="twice")
    assert [len(ids) for ids in train(run, optimizer)] == [8, 8, 4]
    run, optimizer = made()
    assert [len(ids) for ids in train(run, optimizer)] == [4] * 5


def test_smaller_inputs_of_the_proxy():
    images = TensorDataset(torch.randn(N, 1, 4, 4), torch.arange(N) % C)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, C))
    proxy = nn.Sequential(nn.Flatten(), nn.Linear(4, C))
    run, optimizer = made(proxied(proxy), model=model, data=images, scoring=Scoring(input_scale=0.5))
    train(run, optimizer)
    assert run.cost.scoring == pytest.approx(N / 4, abs=1)


def test_the_loop_does_not_notice_its_random_numbers_and_modes():
    class Dropping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.training
            return super().forward(F.dropout(x, 0.5, self.training))

    proxy = Dropping(4, C)
    proxy.eval()
    run, optimizer = made(proxied(proxy, cost=1.0))
    torch.manual_seed(7)
    train(run, optimizer)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    for _ in DataLoader(samples(), B):
        pass
    assert torch.equal(torch.get_rng_state(), after)
    assert not proxy.training


def test_a_loss_that_is_not_finite_does_not_spoil_it():
    data = samples()
    data.tensors[0][0] = math.inf
    proxy = small()
    before = copy.deepcopy(proxy.state_dict())
    run, optimizer = made(proxied(proxy, every=1), data=data, method=BigLoss(keep=0.5))
    x, _ = next(iter(run.loader))
    assert bool(x.isinf().any()), "the row without a finite loss is kept"
    assert all(torch.equal(proxy.state_dict()[name], value) for name, value in before.items())
    for _ in run.loader:
        pass
    assert all(bool(value.isfinite().all()) for value in proxy.state_dict().values())
    assert optimizer is not None


def test_weights_of_the_rows_are_weights_of_the_proxy():
    method = thresher.ThresholdKeep(keep=0.5)
    proxy = small()
    run, optimizer = made(proxied(proxy, every=1), method=method)
    train(run, optimizer)
    assert bool(proxy.weight.isfinite().all()) and not torch.equal(proxy.weight, small().weight)


def test_a_saved_training_goes_on_the_same():
    def parts() -> Any:
        model, proxy = large(), proxied(small())
        run, optimizer = made(proxy, model=model)
        return run, optimizer, model, proxy

    run, optimizer, model, proxy = parts()
    train(run, optimizer)
    saved = copy.deepcopy([one.state_dict() for one in (run, optimizer, model, proxy.model, proxy.optimizer)])
    train(run, optimizer, epochs=2)
    again = parts()
    for one, state in zip((*again[:3], again[3].model, again[3].optimizer), saved, strict=True):
        one.load_state_dict(state)
    train(*again[:2], epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again[2].parameters(), strict=True))
    assert {**vars(again[0].cost), "backward_to_forward": 0} == {**vars(run.cost), "backward_to_forward": 0}


def test_inactive_batches_are_whole_and_cost_nothing():
    run, optimizer = made(method=thresher.SelectiveBackprop(keep=0.5, start=0.5))
    assert [len(ids) for ids in train(run, optimizer)] == [8] * 5
    assert run.cost.scoring == 0


def test_a_criterion_that_the_loop_reduces():
    run, optimizer = made(criterion=nn.CrossEntropyLoss(reduction="none"))
    for x, y in run.loader:
        optimizer.zero_grad()
        run.criterion(run.model(x), y).mean().backward()
        optimizer.step()
    assert run.cost.steps == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": thresher.UniformSubset()}, "`proxy` is for methods that choose in the batch by losses .*; none was given"),
        ({"method": thresher.RandomBackprop()}, "`proxy` is for methods .*; RandomBackprop does not"),
        ({"forward_passes": "once"}, "`proxy` chooses before the loop's forward pass, and forward_passes='once' in it"),
        ({"scoring": Scoring(every_epochs=2)}, "`proxy` gives the losses to choose by: of `scoring` it takes"),
        ({"scoring": Scoring(model=nn.Linear(4, C))}, "`proxy` gives the losses to choose by"),
        ({"scoring": Scoring(losses=torch.zeros(N))}, "`proxy` gives the losses to choose by"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        made(**settings)


def test_it_needs_a_model_and_an_optimizer_of_its_own():
    model = large()
    with pytest.raises(ValueError, match="`proxy` has the model that attach was given"):
        made(proxied(model), model=model)
    with pytest.raises(TypeError, match=r"`proxy` must be a thresher.Proxy\(model, optimizer\), got Linear"):
        made(small())  # type: ignore[arg-type]


def test_several_processes_are_refused():
    from thresher.run.proxy import check_proxy

    two: Any = SimpleNamespace(size=2)
    with pytest.raises(ValueError, match="`proxy` is trained by one process, and 2 processes would each train another one"):
        check_proxy(proxied(small()), BigLoss(), "auto", None, large(), None, two)


def test_settings_out_of_range_are_refused():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"Proxy: `model` must be a torch.nn.Module, got int"):
        Proxy(3, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Proxy: `optimizer` must be a torch.optim.Optimizer, got float"):
        Proxy(model, 0.1)  # type: ignore[arg-type]
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match="Proxy: `every` must be a whole number of 1 or more, got"):
            Proxy(model, optimizer, every)  # type: ignore[arg-type]
    for cost in (0, -1.0, math.inf, math.nan, True, "x"):
        with pytest.raises(ValueError, match="Proxy: `cost` must be a finite number above 0, or None, got"):
            Proxy(model, optimizer, cost=cost)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="Proxy: `optimizer` must have parameters of the proxy and no others, got 0 of its own"
    ):
        Proxy(nn.Linear(2, 2), optimizer)
