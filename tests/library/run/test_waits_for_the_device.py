"""What a step on a GPU waits for, on a CPU that pretends to be one."""

import collections
import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import crossed
from pretended_cuda import pretended_cuda, put_module
from thresher import (
    AdaSelection,
    BatchImportance,
    FullData,
    RandomBackprop,
    SelectiveBackprop,
    ThresholdKeep,
)

COMPARISONS = ("subset/verify.py", "passes/loss_comparison.py", "passes/extra_passes.py:repeat")
WARM_UP = 6
"""Steps after which nothing is tried out or compared any more, but for what comes every 256 steps."""


def waits_per_step(monkeypatch, method, *, half=False, attached=None, **settings):
    """Waits in the steady steps of three epochs, by their place, and their mean number a batch; mixed devices are an error."""
    torch.manual_seed(0)
    x = torch.randn(640, 20)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 32, shuffle=True, drop_last=True)
    model, steady = (
        put_module(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))),
        collections.Counter(),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    given = (
        {"model": model, "optimizer": optimizer} if attached is None else attached(model, optimizer)
    )
    with warnings.catch_warnings(), pretended_cuda(monkeypatch) as device:
        warnings.simplefilter("ignore")
        run = thresher.attach(
            method, loader=loader, criterion=nn.CrossEntropyLoss(), epochs=3, **given, **settings
        )
        steps = counted = 0
        for _ in range(3):
            batches = iter(run.loader)
            device.waits.clear()
            for inputs, targets in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
                    loss = run.criterion(
                        (run.model if "model" in given else model)(inputs), targets
                    )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if steps > WARM_UP:
                    steady.update(device.waits)
                    counted += 1
                device.waits.clear()
        assert not device.mixed, device.mixed
        run.summary()
        run.detach()
    # The end of an epoch, which comes with the `next` after its last step, is not among the counted waits. Results are compared
    # with those of another way to compute them at calls 1, 2, 4, ... and then at every 256th.
    steady = {place: count for place, count in steady.items() if not place.startswith(COMPARISONS)}
    return steady, sum(steady.values()) / counted


WITHOUT_WAITS = [
    (FullData(), {}),
    (0.5, {}),
    (0.5, {"spend": "steps"}),
    ("infobatch", {}),
    ("kakurenbo", {}),
    (FullData(), {"observe": True}),
    (SelectiveBackprop(keep=0.33), {"forward_passes": "once"}),
    (AdaSelection(keep=0.3), {"forward_passes": "once"}),
    (RandomBackprop(0.5), {}),
]


@pytest.mark.parametrize(("case", "half"), crossed(WITHOUT_WAITS, [False, True]))
def test_steps_that_wait_for_nothing(monkeypatch, case, half):
    method, settings = case
    steady, _ = waits_per_step(monkeypatch, method, half=half, **settings)
    assert not steady, steady


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (SelectiveBackprop(keep=0.33), {"forward_passes": "twice"}),
        (AdaSelection(keep=0.3), {"forward_passes": "twice"}),
        (SelectiveBackprop(beta=1.0), {"forward_passes": "once"}),
        (ThresholdKeep(), {"forward_passes": "once"}),
    ],
)
def test_steps_that_wait_once(monkeypatch, method, settings):
    """For the ids of the rows that were chosen, or for their number."""
    steady, each = waits_per_step(monkeypatch, method, **settings)
    assert each <= 1.15, steady


@pytest.mark.parametrize("method", [FullData(), "infobatch"])
def test_without_a_model_the_device_is_that_of_the_optimizer(monkeypatch, method):
    waits_per_step(monkeypatch, method, attached=lambda model, optimizer: {"optimizer": optimizer})


def test_a_loss_on_another_device_than_the_batches_names_both(monkeypatch):
    loader = DataLoader(TensorDataset(torch.randn(64, 20), torch.zeros(64).long()), 16)
    model = put_module(nn.Linear(20, 10))
    with pretended_cuda(monkeypatch):
        run = thresher.attach(FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), epochs=1)
        inputs, targets = next(iter(run.loader))
        with pytest.raises(
            thresher.AttributionError, match='on cpu, and the loss is on cuda:0: .*device="cuda:0"'
        ):
            run.criterion(model(inputs.to("cuda")), targets.to("cuda"))
        loss = run.criterion(model(inputs.to("cuda")), targets.to("cuda"), ids=run.ids)
        loss.backward()
        assert (
            torch.isfinite(run.records["loss"][run.ids]).all()
            and run.records["loss"].device.type == "cpu"
        )
        run.detach()


@pytest.mark.parametrize("method", [ThresholdKeep(), ThresholdKeep(keep=0.4), BatchImportance(0.4)])
def test_methods_that_add_up_choose_alike_in_deterministic_mode(method):
    """CUDA refuses to add up step by step in that mode, so that another operation does it there."""
    signals = {
        "id": torch.arange(40),
        "grad_norm": torch.rand(40, generator=torch.Generator().manual_seed(0)),
    }
    plans = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            with deterministic_sums_only() if deterministic else contextlib.nullcontext():
                generator = torch.Generator().manual_seed(1)
                plans.append(
                    method.plan_batch(signals, method.init_state(), step=0, generator=generator)[0]
                )
        finally:
            torch.use_deterministic_algorithms(False)
    assert torch.equal(plans[0].rows, plans[1].rows)
    torch.testing.assert_close(plans[0].weights, plans[1].weights)


@contextlib.contextmanager
def deterministic_sums_only():
    """Refuses what CUDA refuses in deterministic mode."""
    own = torch.Tensor.cumsum

    def cumsum(values, *args):
        assert not values.is_floating_point(), (
            "cumsum_cuda_kernel does not have a deterministic implementation"
        )
        return own(values, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cumsum", cumsum)
        yield
