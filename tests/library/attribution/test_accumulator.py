"""What is written late says what was true when it was said."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B, C = 480, 8, 4


def make(method, *, optimizer=True, shuffle=True):
    torch.manual_seed(0)
    net = nn.Linear(6, C)
    sgd = torch.optim.SGD(net.parameters(), 0.1) if optimizer else None
    data = TensorDataset(torch.randn(N, 6), torch.arange(N) % C)
    run = thresher.attach(
        method,
        loader=DataLoader(data, B, shuffle=shuffle),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=sgd,
        epochs=4,
    )
    return run, net, sgd


@pytest.mark.parametrize("method", [thresher.FullData(), thresher.Kakurenbo(adjust_lr=False)])
@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("read", [False, True])
def test_records_are_what_each_step_saw(method, optimizer, read):
    """Whether written at once or many steps later; the network moves on in between."""
    run, net, sgd = make(method, optimizer=optimizer)
    expected = torch.zeros(N)
    confidence = torch.zeros(N)
    for x, y in run.loader:
        outputs = run.model(x)
        run.criterion(outputs, y).backward()
        expected[run.ids] = F.cross_entropy(outputs, y, reduction="none").detach()
        confidence[run.ids] = outputs.softmax(1).amax(1).detach()
        if sgd is None:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
        else:
            sgd.step()
        net.zero_grad()
        y.zero_()  # the loop may reuse its targets once the loss is out
        outputs.detach().zero_()
        if read:
            torch.testing.assert_close(run.records["loss"][run.ids], expected[run.ids])
    torch.testing.assert_close(run.records["loss"], expected)
    if "confidence" in run.records:
        torch.testing.assert_close(run.records["confidence"], confidence)


def test_the_last_of_two_steps_on_one_batch_stays():
    run, net, sgd = make(thresher.Kakurenbo(adjust_lr=False))
    x, y = next(iter(run.loader))
    for _ in range(3):
        outputs = run.model(x)
        run.criterion(outputs, y).backward()
        sgd.step()
        sgd.zero_grad()
    torch.testing.assert_close(
        run.records["loss"][run.ids], F.cross_entropy(outputs, y, reduction="none").detach()
    )
    assert run.cost.forward - run.cost.comparing == 3 * B
    assert run.cost.steps == 3


def test_ignored_labels_are_not_scored():
    run, *_ = make(thresher.FullData(), shuffle=False)
    seen = []
    for i, (x, y) in enumerate(run.loader):
        labels = y.clone()
        labels[::2] = -100
        run.criterion(run.model(x), labels, ids=run.ids) if i % 2 else run.criterion(
            run.model(x), y
        )
        seen += [i * B + j for j in range(B) if not i % 2 or j % 2]
    assert torch.isfinite(run.records["loss"]).nonzero().flatten().tolist() == seen


def test_what_waits_is_bounded():
    run, net, sgd = make(thresher.Kakurenbo(adjust_lr=False))
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        sgd.step()
        waiting = sum(entry.signals.log_probs.numel() for entry in run._parts.accumulator._waiting)
        assert waiting <= 2**15
    assert len(run._parts.accumulator._waiting) == 0  # the epoch is over: everything was written


@pytest.mark.parametrize("passes", [17, 200])
def test_many_forward_passes_before_their_losses(passes):
    """As with one sample per pass and two heads: every loss finds the pass that it is of."""
    torch.manual_seed(0)
    x, y = torch.randn(passes, 5), torch.arange(passes) % 3
    heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
    net = nn.Sequential(nn.Identity())
    net.forward = lambda inputs: [head(inputs) for head in heads]
    run = thresher.attach(
        thresher.FullData(),
        loader=DataLoader(TensorDataset(x, y), passes),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        epochs=1,
    )
    for inputs, targets in run.loader:
        made = [run.model(one) for one in inputs.split(1)]
        pairs = [
            (out, one) for outs, one in zip(made, targets.split(1), strict=True) for out in outs
        ]
        sum(run.criterion(out, one) for out, one in pairs).backward()
    expected = sum(
        nn.functional.cross_entropy(head(x), y, reduction="none") for head in heads
    ).detach()
    torch.testing.assert_close(run.records["loss"], expected)
    assert (run.cost.forward, run.cost.backward) == (passes, passes)
