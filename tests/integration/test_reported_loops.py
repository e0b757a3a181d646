"""Loops from public reports whose counts, gradients or buffers were wrong."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao import quantization
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B = 40, 5


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


class ReturnsLoss(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.layer = form, nn.Linear(4, 2)

    def forward(self, x, y):
        loss = F.cross_entropy(self.layer(torch.stack(x) if isinstance(x, list) else x), y)
        return {"dict": {"loss": loss}, "one entry": loss[None]}.get(self.form, loss)


@pytest.mark.filterwarnings("ignore:.*got no loss in:UserWarning")
@pytest.mark.parametrize("form", ["scalar", "one entry", "dict", "list of rows"])
@pytest.mark.parametrize("method", [thresher.FullData(), thresher.UniformSubset(0.5)], ids=str)
def test_models_that_return_their_loss(form, method):
    x, y = data()
    model = ReturnsLoss(form)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = thresher.attach(
        method,
        loader=DataLoader(TensorDataset(torch.arange(N), x, y), B, shuffle=True),
        criterion=None,
        model=model,
        optimizer=optimizer,
        epochs=2,
    )
    truth = torch.zeros(N, dtype=torch.int32)
    for _ in range(2):
        for number, (ids, inputs, targets) in enumerate(run.loader):
            optimizer.zero_grad()
            result = run.model(list(inputs) if form == "list of rows" else inputs, targets)
            (result["loss"] if form == "dict" else result.sum()).backward()
            if number == 1:  # given up
                continue
            optimizer.step()
            truth[ids] += 1
    assert torch.equal(run.trained, truth)


def test_a_step_without_losses_whose_samples_are_not_known():
    """Detection models get lists of images; one of three channels is no batch of three samples."""
    images = torch.randn(N, 3, 4, 4)
    model = nn.Conv2d(3, 2, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = thresher.attach(
        thresher.FullData(),
        loader=DataLoader(list(images), 3, collate_fn=lambda samples: [one + 0 for one in samples]),
        criterion=None,
        model=model,
        optimizer=optimizer,
        epochs=1,
    )
    with pytest.warns(UserWarning, match="run.trained counts only samples that run.model gets"):
        for batch in run.loader:
            optimizer.zero_grad()
            torch.stack([run.model(image[None]).mean() for image in batch]).mean().backward()
            optimizer.step()
        run.detach()
    assert not run.trained.any()


@pytest.mark.parametrize(("method", "cost"), [(0.5, 0.75), (thresher.UniformSubset(0.5), 0.5)])
def test_the_cost_with_as_many_unlabeled_rows_in_each_step(method, cost):
    """Half the labeled rows in as many steps save a quarter; in half the steps, they save half of the unlabeled rows, too."""
    x, y = data()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = thresher.attach(
        method,
        loader=DataLoader(TensorDataset(x, y), B, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=2,
    )
    for _ in range(2):
        for inputs, targets in run.loader:
            optimizer.zero_grad()
            outputs = run.model(torch.cat([inputs, torch.randn(B, 4)]))
            loss = run.criterion(outputs[: len(inputs)], targets)
            (loss + outputs[len(inputs) :].softmax(1).pow(2).mean()).backward()
            optimizer.step()
    assert run.cost.ratio() == pytest.approx(cost, abs=0.02)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reduce", [False, True])
def test_a_compiled_step_around_the_criterion(reduce):
    torch._dynamo.reset()
    x, y = data()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=DataLoader(TensorDataset(x, y), 8, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=1,
    )

    @torch.compile(backend="eager")
    def loss_of(inputs, targets):
        outputs = run.model(inputs)
        if reduce:
            return run.reduce(F.cross_entropy(outputs, targets, reduction="none"), targets=targets)
        return run.criterion(outputs, targets)

    for inputs, targets in run.loader:
        optimizer.zero_grad()
        loss_of(inputs, targets).backward()
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        expected = torch.autograd.grad(losses.topk(4).values.mean(), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        optimizer.step()
    assert run.cost.ratio() == pytest.approx(1.0)  # the compiled backward pass takes all rows
    assert int(run.trained.sum()) == N // 2


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.layer, self.leave = (
            quantization.QuantStub(), nn.Linear(4, 2), quantization.DeQuantStub(),
        )  # fmt: skip

    def forward(self, x):
        return self.leave(self.layer(self.enter(x)))


def test_observers_of_a_quantization_do_not_move_in_added_passes():
    """Their fused kernel writes buffers without a new version."""
    x, y = data()
    x = x * torch.linspace(0.5, 3.0, N)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will move them to another package
        model = Quantized().train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=DataLoader(TensorDataset(x, y), 8, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=3,
        forward_passes="twice",
    )
    after = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            for inputs, targets in run.loader:
                now = {name: buffer.clone() for name, buffer in model.named_buffers()}
                assert after is None or all(
                    torch.equal(now[name], after[name])
                    for name in now
                    if "scale" in name or "val" in name
                )
                optimizer.zero_grad()
                run.criterion(run.model(inputs), targets).backward()
                optimizer.step()
                after = {name: buffer.clone() for name, buffer in model.named_buffers()}
