"""`subset_backward` inside training loops: random draws, mixed precision, accumulation, checkpoints, batch norm."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from subset_cases import (
    Calls,
    Recurrent,
    SmallResNet,
    ViT,
    distance,
    masked,
    numbers,
    outcome,
    same_as_plain,
    traced,
    wrap,
)
from thresher.subset import mixes_samples

pytestmark = pytest.mark.usefixtures("shared_traces")
X = numbers(7, 6)
ROWS = torch.tensor([1, 4, 5])


def perceptron(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


class Statistics:
    calls = 0


def test_a_forward_that_counts_its_calls_counts_those_of_the_loop() -> None:
    model = Calls(
        lambda m, x: (setattr(m.statistics, "calls", m.statistics.calls + 1), m.linear(x))[1]
    ).double()
    model.statistics = Statistics()
    loader = DataLoader(TensorDataset(numbers(40, 6), torch.arange(40) % 6), 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=1,
        forward_passes="once",
    )
    with pytest.warns(
        UserWarning, match=r"using the plain Calls.*its forward changes model\.statistics\.calls"
    ):
        for x, y in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            optimizer.step()
    assert model.statistics.calls == 5


def test_dropout_rates_and_modes_are_noticed_when_they_change() -> None:
    sub = wrap(perceptron(0.5))
    same_as_plain(sub, X, rows=ROWS)
    sub.wrapped[2].p = 0.1
    same_as_plain(sub, X, rows=ROWS)
    sub.eval()
    same_as_plain(sub, X, rows=ROWS)
    assert traced(sub) == 3
    sub.train()
    same_as_plain(sub, X, rows=ROWS)
    assert traced(sub) == 3 and sub.training and sub.wrapped[2].training


def test_parts_in_another_mode_stay_in_it() -> None:
    sub = wrap(
        nn.Sequential(
            nn.Linear(6, 4), nn.BatchNorm1d(4).eval(), nn.Dropout(0.5), nn.Dropout(0.5).eval()
        )
    )
    same_as_plain(sub, X, rows=ROWS)
    assert [part.training for part in sub.wrapped] == [True, False, True, False]
    assert sub.fallback is None and mixes_samples(sub) == ()


@pytest.mark.parametrize("kind", depth([nn.LSTM], [nn.LSTM, nn.GRU, nn.RNN]))
def test_recurrent_layers_drop_the_values_that_the_plain_model_drops(kind) -> None:
    torch.manual_seed(0)
    sub = wrap(Recurrent(kind, batch_first=True, dropout=0.3))
    same_as_plain(sub, numbers(6, 3, 4), rows=ROWS)


def test_a_recurrent_layer_of_inputs_in_single_precision() -> None:
    """For these inputs torch's own decomposition of an LSTM has no backward on CPUs."""
    sub = wrap(Recurrent(nn.LSTM, batch_first=True), dtype=torch.float32)
    sub(numbers(6, 2, 4).float())
    assert sub.fallback is None


@pytest.mark.parametrize("dtype", depth([torch.bfloat16], [torch.bfloat16, torch.float16]))
def test_autocast(dtype) -> None:
    torch.manual_seed(0)
    sub, x = wrap(ViT(), dtype=torch.float32), numbers(6, 3, 8, 8, dtype=torch.float32)
    exact = outcome(sub.wrapped, (x,), {}, ROWS).gradients
    found = []
    for model in (sub.wrapped, sub):
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            out = model(x)
        assert out.dtype is dtype
        masked(out.float(), ROWS).backward()
        found.append({name: p.grad for name, p in sub.wrapped.named_parameters()})
    assert distance(exact, found[1]) <= 2 * distance(exact, found[0]) + 1e-3
    assert distance(exact, found[0]) > 1e-5
    assert not torch.equal(sub(x), out.float()) and traced(sub) == 2


def test_a_grad_scaler_skips_the_step_that_overflows() -> None:
    sub = wrap(perceptron(), dtype=torch.float32)
    optimizer = torch.optim.SGD(sub.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    x = X.float()
    plain = copy.deepcopy(sub.wrapped)
    for poison in (1.0, torch.inf, 1.0):
        before = sub.wrapped[0].weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale((sub(x)[ROWS] * poison).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, sub.wrapped[0].weight) == (poison == torch.inf)
    assert scaler.get_scale() == 128.0
    for _ in range(2):
        plain.zero_grad()
        plain(x)[ROWS].square().mean().backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(
        list(plain.parameters()), list(sub.parameters()), rtol=1e-4, atol=1e-6
    )


def gradients(model: nn.Module) -> dict:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_add_up_over_backward_passes_in_any_order() -> None:
    plain = perceptron().double()
    sub = wrap(copy.deepcopy(plain))
    first, second, third = numbers(7, 6, seed=1), numbers(4, 6, seed=2), numbers(1, 6, seed=3)
    for model in (plain, sub):
        a, b, c = model(first), model(second), model(third)
        b[:2].square().sum().backward()
        c.square().sum().backward()
        a[ROWS].square().sum().backward()
    assert distance(gradients(plain), gradients(sub)) < 1e-12
    for model in (plain, sub):
        model.zero_grad()
        (model(first)[ROWS].sum() * model(second)[1:].square().sum()).backward()
    assert distance(gradients(plain), gradients(sub)) < 1e-12
    assert traced(sub) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_wrapped_model(reentrant) -> None:
    plain = perceptron(0.4).double()
    sub = wrap(copy.deepcopy(plain))
    for _ in range(2):
        for model in (plain, sub):
            model.zero_grad()
            x = X.clone().requires_grad_()
            torch.manual_seed(3)
            checkpoint(model, x, use_reentrant=reentrant)[ROWS].square().sum().backward()
        assert distance(gradients(plain), gradients(sub)) < 1e-12


def test_checkpoint_with_dropout_inside() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = perceptron(0.4), nn.Linear(3, 2)

        def forward(self, x):
            return self.outer(checkpoint(self.inner, x, use_reentrant=False))

    sub = wrap(Inside(), strict=False)
    for _ in range(2):
        same_as_plain(sub, X, rows=ROWS)


def test_hooks_of_parameters_and_outputs_are_called_once() -> None:
    sub, called = wrap(perceptron()), []
    weight = sub.wrapped[0].weight
    weight.register_hook(lambda gradient: called.append("tensor") or 2 * gradient)
    weight.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
    out = sub(X)
    out.register_hook(lambda gradient: called.append("output") or 3 * gradient)
    out.retain_grad()
    out[ROWS].sum().backward()
    assert called == ["output", "tensor", "accumulated"]
    found, kept = weight.grad.clone(), out.grad.clone()
    plain = copy.deepcopy(sub.wrapped)
    plain.zero_grad()
    plain[0].weight._backward_hooks = None
    plain(X)[ROWS].sum().backward()
    assert torch.allclose(found, 6 * plain[0].weight.grad, rtol=1e-12)
    assert torch.equal(kept[ROWS], torch.full((3, 3), 3.0)) and not kept[0].any()


def test_weights_of_samples_and_gradients_that_are_not_finite() -> None:
    sub = wrap(perceptron())
    weights = torch.tensor([0.0, 2.0, 0.0, 0.0, 0.5, 1.0, 0.0])
    same_as_plain(sub, X, rows=[], loss=lambda out, _: (out.square().sum(1) * weights).sum())
    for poison in (torch.nan, torch.inf):
        for model in (sub.wrapped, sub):
            model.zero_grad()
            out = model(X)
            out.backward(torch.zeros_like(out).index_fill(0, ROWS[:1], poison))
            assert not sub.wrapped[0].weight.grad.isfinite().any(), model


def test_batches_of_any_size_after_each_other() -> None:
    sub = wrap(perceptron())
    for n in (7, 3, 1, 2, 64, 7, 1):
        same_as_plain(sub, numbers(n, 6, seed=n), rows=[n - 1])
    assert traced(sub) == 1
    sub.zero_grad()
    out = sub(numbers(0, 6))
    out.sum().backward()
    assert out.shape == (0, 3) and not sub.wrapped[0].weight.grad.any()


def test_a_batch_of_one_first_and_branches_on_the_batch_size() -> None:
    def run(model, x, shared):
        h = model.linear(x) * shared[0]
        return h if x.shape[0] > 1 else 2 * h

    sub = wrap(Calls(run), strict=False)
    for n in (8, 1, 5):
        same_as_plain(sub, numbers(n, 6), numbers(3, 6, seed=1), rows=[0])
    large = wrap(Calls(lambda m, x: m.linear(x) if x.shape[0] > 5 else m.linear(x).tanh()))
    for n in (4, 9, 6, 5, 1, 3):
        same_as_plain(large, numbers(n, 6), rows=[0])
    assert traced(large) == 2


def test_a_whole_training_run_is_the_plain_one() -> None:
    torch.manual_seed(0)
    plain = ViT(dropout=0.2).double()
    models = (plain, wrap(copy.deepcopy(plain)))
    for model in models:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(6):
            x = numbers(5 + step % 3, 3, 8, 8, seed=step)
            losses = model(x).square().sum(1)
            kept = losses.detach().argsort(descending=True)[:2].sort().values
            optimizer.zero_grad()
            losses[kept].mean().backward()
            optimizer.step()
    torch.testing.assert_close(
        list(models[1].parameters()), list(plain.parameters()), rtol=1e-8, atol=1e-8
    )
    assert models[1].fallback is None


# Batch normalization


def test_batch_norm_in_training() -> None:
    """Statistics of the whole batch, taken as constants by the kept rows: close to the gradient of the plain model."""
    torch.manual_seed(0)
    sub, n = wrap(SmallResNet()), 128
    x, labels = (
        numbers(n, 3, 8, 8),
        torch.randint(0, 5, (n,), generator=torch.Generator().manual_seed(1)),
    )

    def loss(out, rows):
        return nn.functional.cross_entropy(out, labels, reduction="none")[rows].mean()

    rows = torch.arange(0, n, 3)
    plain, found = (outcome(model, (x,), {}, rows, loss) for model in (sub.wrapped, sub))
    torch.testing.assert_close(found.outputs, plain.outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.buffers, plain.buffers, rtol=1e-12, atol=1e-12)
    assert any("running" in name and value.abs().max() > 0 for name, value in found.buffers.items())
    a, b = (torch.cat([g.flatten() for g in which.gradients.values()]) for which in (plain, found))
    cosine, error = float(a @ b / (a.norm() * b.norm())), float((a - b).norm() / a.norm())
    assert cosine > 0.9 and 1e-3 < error < 0.5
    assert any("BatchNorm2d 'stem.1'" in name for name in mixes_samples(sub))
    same_as_plain(sub, x[:32], rows=range(32))
    sub.eval()
    assert mixes_samples(sub.wrapped) == ()
    same_as_plain(sub, x[:8], rows=[1, 2])


def test_statistics_are_updated_once_and_reach_the_gradient_as_they_were() -> None:
    torch.manual_seed(0)
    sub = wrap(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    plain = copy.deepcopy(sub.wrapped)
    outs = [(sub(numbers(7, 6, seed=i)), plain(numbers(7, 6, seed=i))) for i in range(3)]
    assert int(sub.wrapped[1].num_batches_tracked) == 3
    torch.testing.assert_close(sub.wrapped[1].running_var, plain[1].running_var)
    for a, b in outs:
        a.square().sum().backward()
        b.square().sum().backward()
    assert distance(gradients(plain), gradients(sub)) < 1e-12


def test_batch_norm_beside_what_else_follows_the_batch_size() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.linear(x)).tanh() / x.shape[0]

    sub = wrap(Divided(), strict=False)
    with pytest.warns(UserWarning, match="gradients of some rows differ"):
        sub(X)
    same_as_plain(sub, X, rows=ROWS)
