"""A steady step never waits for the GPU: torch counts the waits, by their place in the library."""

import collections
import contextlib
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from devices import needs_cuda
from pretended_cuda import place
from thresher import AdaSelection, FullData, SelectiveBackprop

pytestmark = [needs_cuda, pytest.mark.usefixtures("torch_may_warn")]
COMPARED = ("subset/verify.py", "passes/loss_comparison.py", "passes/extra_passes.py:repeat")
"""Places that wait in calls 1, 2, 4, ... and then in every 256th."""
WARM_UP, BATCH = 6, 32


@contextlib.contextmanager
def counted_waits() -> Iterator[collections.Counter[str]]:
    """Counts what waits for the GPU, by the innermost line of the library; "loop" is none of it."""
    waits: collections.Counter[str] = collections.Counter()

    def note(message, *_, **__):
        if "synchronizing CUDA operation" in str(message):
            waits[place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)


def waits_of_steps(device, method, *, kind, half, **settings):
    """Waits in the steps after the first ones of three epochs, without the comparisons and the ends of epochs."""
    torch.manual_seed(0)
    x = torch.randn(640, 20)
    y = (x[:, 0] > 0).long()
    if kind == "tensors":
        loader = thresher.TensorLoader(x.to(device), y.to(device), batch_size=BATCH, drop_last=True)
    else:
        loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True, drop_last=True)
    model, steady, steps = (
        nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10)).to(device),
        collections.Counter(),
        0,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {
        "loader": loader,
        "criterion": nn.CrossEntropyLoss(),
        "model": model,
        "optimizer": optimizer,
    }
    run = thresher.attach(method, epochs=3, **given, **settings)
    with counted_waits() as waits:
        for _ in range(3):
            batches = iter(run.loader)
            with contextlib.suppress(StopIteration):
                for number in range(sys.maxsize):
                    inputs, targets = next(batches)
                    if (
                        kind == "host"
                    ):  # moving a batch of memory that is not pinned is no wait of the library
                        inputs, targets = (
                            one.to(device, non_blocking=True) for one in (inputs, targets)
                        )
                    if number == 0:
                        waits.clear()  # the end of the last epoch, and the plan of this one
                    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
                        loss = run.criterion(run.model(inputs), targets)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
                    if steps > WARM_UP:
                        steady.update(waits)
                    waits.clear()
    assert steps > 2 * WARM_UP
    return {
        name: count for name, count in steady.items() if not name.startswith(COMPARED)
    }, steps - WARM_UP


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "host"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FullData(), {}),
        (0.5, {}),
        (0.5, {"spend": "steps"}),
        ("infobatch", {}),
        ("kakurenbo", {}),
        (FullData(), {"observe": True}),
        (SelectiveBackprop(keep=0.33), {"forward_passes": "once"}),
        (AdaSelection(keep=0.3), {"forward_passes": "once"}),
    ],
)
def test_steps_wait_for_nothing(device, method, settings, kind, half):
    waits, _ = waits_of_steps(device, method, kind=kind, half=half, **settings)
    assert not waits, waits


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (SelectiveBackprop(keep=0.33), {"forward_passes": "twice"}),
        (SelectiveBackprop(beta=1.0), {"forward_passes": "once"}),
    ],
)
def test_steps_wait_once_for_the_rows_that_were_chosen(device, method, settings):
    waits, steps = waits_of_steps(device, method, kind="tensors", half=False, **settings)
    assert sum(waits.values()) <= 1.15 * steps, waits


def test_a_wait_is_counted_at_its_place(device):
    """So that the tests above are about something."""
    values = torch.arange(3, device=device)
    with counted_waits() as waits:
        values.sum().item()
    assert waits == {"loop": 1}
