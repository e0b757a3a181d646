"""A run whose BatchNorm layers weigh the drawn rows: what they compute, what stays as it was, and what is refused and said."""

import copy
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, default_collate

import thresher
from helpers import assert_same

N, BATCH = 70, 12
WEIGHTED = thresher.Winnow(0.5, batch_norm="weighted", least_agreement=-1)
DRAWN = thresher.Winnow(0.5, least_agreement=-1)


@pytest.fixture(autouse=True)
def _drawn_is_said():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Winnow trains on drawn rows")
        yield


def network():
    first = nn.Sequential(nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(first, nn.Linear(12, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 2))


def attached(method=WEIGHTED, *, epochs=4, model=None, seed=0, **settings):
    torch.manual_seed(seed)
    x = torch.randn(N, 1, 5)
    data = TensorDataset(x, (x[:, 0, 0] > 0).long())
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = DataLoader(data, BATCH, **({"shuffle": True} | settings))
    run = thresher.attach(
        method, loader=loader, criterion=nn.CrossEntropyLoss(), model=model, optimizer=optimizer, epochs=epochs
    )
    return run, optimizer


def plain(run, x, y):
    run.criterion(run.model(x), y).backward()


def in_two_parts(run, x, y):
    """Two forward and two backward passes in a step."""
    for part in (slice(0, len(x), 2), slice(1, len(x), 2)):
        run.criterion(run.model(x[part]), y[part]).backward()


def epoch(run, optimizer, step=plain):
    for x, y in run.loader:
        optimizer.zero_grad()
        step(run, x, y)
        optimizer.step()


def layers(model):
    return [part for part in model.modules() if isinstance(part, nn.BatchNorm1d)]


def transcribed_weights(plan, drawn, candidates):
    """Weight of each drawn sample: the inverse of its chance to have a smaller key than every candidate that is left out."""
    keys, scores = plan.keys.double().tolist(), plan.scores.double().tolist()
    left_out = min((keys[i] for i in candidates if i not in drawn), default=math.inf)
    chance = {i: 1.0 if keys[i] < 0 else -math.expm1(-scores[i] * left_out) for i in drawn}
    return {i: min(1 / chance[i], 20.0) for i in drawn}


class Witness:
    """Follows the layers of a model by hooks, and computes their running statistics with NumPy."""

    def __init__(self, model):
        self.weights, self.ids, self.errors = {}, [], []
        self.statistics = {layer: [0.0, 1.0, 0] for layer in layers(model)}
        for layer in self.statistics:
            layer.register_forward_hook(self.follow)

    def follow(self, layer, inputs, outputs):
        values = inputs[0].detach().double().numpy()
        weights = np.array([self.weights.get(i, 1.0) for i in self.ids])
        count = weights.reshape(-1, 1, *[1] * (values.ndim - 2)) * np.ones_like(values)
        over = tuple(axis for axis in range(values.ndim) if axis != 1)
        total = count.sum(over)
        mean = (count * values).sum(over) / total
        around = (1, -1, *[1] * (values.ndim - 2))
        squares = (count * (values - mean.reshape(around)) ** 2).sum(over)
        scale = layer.weight.detach().double().numpy() / np.sqrt(squares / total + layer.eps)
        expected = (values - mean.reshape(around)) * scale.reshape(around) + layer.bias.detach().numpy().reshape(around)
        self.errors.append(np.abs(outputs.detach().numpy() - expected).max())
        known = self.statistics[layer]
        known[2] += 1
        momentum = 1 / known[2] if layer.momentum is None else layer.momentum
        corrected = squares / (total - (count**2).sum(over) / total)
        known[0] = (1 - momentum) * known[0] + momentum * mean
        known[1] = (1 - momentum) * known[1] + momentum * corrected


@pytest.mark.parametrize("parts", [1, 2])
def test_outputs_and_running_statistics_are_those_of_numpy(parts):
    """Over three epochs, whose steps have five or six rows, in one pass or in two passes a step."""
    run, optimizer = attached(shuffle=False)
    witness = Witness(run.model)
    heaviest = 0.0
    for _ in range(3):
        plan = run.plan
        for number, (x, y) in enumerate(run.loader):
            ids = run.ids.tolist()
            candidates = range(number * N // 6, (number + 1) * N // 6)
            witness.weights = {} if plan.scores is None else transcribed_weights(plan, ids, candidates)
            heaviest = max(heaviest, *witness.weights.values(), 0.0)
            optimizer.zero_grad()
            for part in range(parts):
                witness.ids = ids[part::parts]
                run.criterion(run.model(x[part::parts]), y[part::parts]).backward()
            optimizer.step()
    assert heaviest > 3 and max(witness.errors) < 1e-5
    for layer, (mean, variance, passes) in witness.statistics.items():
        assert int(layer.num_batches_tracked) == passes == 18 * parts
        np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(layer.running_var.numpy(), variance, rtol=1e-4)


def test_where_nothing_is_drawn_by_scores_it_changes_nothing():
    """The first epoch draws uniformly, share=1 keeps everything, and without BatchNorm there is nothing to weigh."""
    for share, epochs in ((0.5, 1), (1.0, 3)):
        states = []
        for mode in ("drawn", "weighted"):
            run, optimizer = attached(thresher.Winnow(share, batch_norm=mode))
            for _ in range(epochs):
                epoch(run, optimizer)
            states.append(run.model.state_dict())
        assert_same(*map(dict, states))
    states = []
    for mode in ("drawn", "weighted"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
        run, optimizer = attached(thresher.Winnow(0.5, batch_norm=mode), model=model)
        for _ in range(3):
            epoch(run, optimizer)
        states.append(run.model.state_dict())
    assert_same(*map(dict, states))


def test_two_passes_in_a_step_and_one_pass_have_other_statistics():
    """So that the test above can fail."""
    states = []
    for step in (plain, in_two_parts):
        run, optimizer = attached()
        for _ in range(3):
            epoch(run, optimizer, step)
        states.append(layers(run.model)[0].running_mean)
    assert not torch.allclose(*states, atol=1e-3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_in_the_middle_of_an_epoch_is_exact(workers, tmp_path):
    whole, own = attached(num_workers=workers)
    for _ in range(4):
        epoch(whole, own)
    first, optimizer = attached(num_workers=workers)
    epoch(first, optimizer)
    epoch(first, optimizer)
    for number, (x, y) in enumerate(first.loader):
        optimizer.zero_grad()
        plain(first, x, y)
        optimizer.step()
        if number == 2:
            break
    torch.save([first.state_dict(), first.model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    run, own_optimizer = attached(seed=9, num_workers=workers)
    run.loader.dataset.tensors = first.loader.dataset.tensors
    state, of_model, of_optimizer = torch.load(tmp_path / "state.pt", weights_only=True)
    run.model.load_state_dict(of_model)
    own_optimizer.load_state_dict(of_optimizer)
    run.load_state_dict(state)
    assert run.plan.scores is not None
    epoch(run, own_optimizer)
    epoch(run, own_optimizer)
    assert_same(dict(run.model.state_dict()), dict(whole.model.state_dict()))


def test_other_passes_are_those_of_torch():
    """Passes in evaluation mode, without gradients, between epochs, and after the run is detached."""
    run, optimizer = attached(epochs=5)
    for _ in range(2):
        epoch(run, optimizer)
    x, y = next(iter(run.loader))
    tests = torch.randn(9, 1, 5)

    def compare(prepare=lambda model: None, inputs=tests, *, gradients=False):
        own = copy.deepcopy(run.model)
        prepare(run.model), prepare(own)
        with torch.set_grad_enabled(gradients):
            assert_same(run.model(inputs), own(inputs))
        assert_same(dict(run.model.state_dict()), dict(own.state_dict()))
        run.model.train()

    compare(lambda model: model.eval(), gradients=True)
    compare(inputs=x)
    compare()
    optimizer.zero_grad()
    plain(run, x, y)
    optimizer.step()
    assert not any("forward" in vars(layer) for layer in layers(run.model))
    epoch(run, optimizer)
    compare(inputs=x, gradients=True)
    epoch(run, optimizer)
    run.detach()
    compare(inputs=x, gradients=True)
    assert not any("forward" in vars(layer) for layer in layers(run.model))


def test_a_detached_run_weighs_nothing():
    run, optimizer = attached()
    for _ in range(2):
        epoch(run, optimizer)
    x, _ = next(iter(run.loader))
    run.detach()
    own = copy.deepcopy(run.model)
    assert_same(run.model(x), own(x))


def test_several_rows_of_a_sample_weigh_the_same():
    """A model of tokens, whose inputs are flattened."""
    found = []
    for flattened in (True, False):
        torch.manual_seed(3)
        norm, parts = nn.BatchNorm1d(2), [nn.Linear(1, 2), nn.Unflatten(0, (-1, 5)), nn.Flatten(), nn.Linear(10, 2)]
        model = nn.Sequential(parts[0], norm, *parts[1:])
        if not flattened:
            model = nn.Sequential(parts[0], Turned(norm), *parts[2:])
        run, optimizer = attached(model=model)
        for _ in range(3):
            epoch(run, optimizer, tokens if flattened else lambda run, x, y: plain(run, x[:, 0].unsqueeze(2), y))
        found.append([norm.running_mean, norm.running_var])
    torch.testing.assert_close(*found)


class Turned(nn.Module):
    """Normalises inputs of shape (rows, places, channels)."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def tokens(run, x, y):
    run.criterion(run.model(x.view(-1, 1)), y).backward()


def test_layers_that_are_frozen_need_no_rows():
    run, optimizer = attached()
    for _ in range(3):
        for layer in layers(run.model):
            layer.eval()
        before = [layer.running_mean.clone() for layer in layers(run.model)]
        epoch(run, optimizer, lambda run, x, y: plain(run, x + 0, y))
        assert_same(before, [layer.running_mean for layer in layers(run.model)])


class Recomputed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.inner, self.head, self.reentrant = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2), reentrant

    def forward(self, x):
        return self.head(checkpoint(self.inner, x.flatten(1).requires_grad_(), use_reentrant=self.reentrant))


class Twice(nn.Module):
    """Puts every sample twice through its normalisation, in an order that nobody knows."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.inner(torch.cat([x.flatten(1)] * 2)).unflatten(0, (2, -1)).sum(0))


def around(run, x, y):
    """A pass by another name than `run.model`."""
    run.criterion(run.model.module(x), y).backward()


def inside_a_transform(run, x, y):
    torch.func.vmap(run.model, randomness="different")(x.unsqueeze(0))


@pytest.mark.parametrize(
    ("step", "model", "why"),
    [
        (
            lambda run, x, y: plain(run, x + 0, y),
            None,
            "are not known: a tensor that this run did not yield. Give",
        ),
        (
            lambda run, x, y: plain(run, x.mul_(2), y),
            None,
            "are not known: outputs of the model for inputs that were",
        ),
        (
            around,
            None,
            r"a batch that was not put through it. Call run.model\(inputs\) in the loop, or use Winnow\(",
        ),
        (inside_a_transform, None, "are not known: it is inside of a torch.func transform"),
        (plain, Twice, r"'inner' was called for an input of shape \(10, 5\) in a forward pass of run.model of 5 samples"),
        (plain, lambda: Recomputed(reentrant=True), r"'inner.1' was called without gradients in a forward pass of run.model"),
        (plain, lambda: Recomputed(reentrant=False), "A different number of tensors was saved"),
    ],
)
def test_passes_whose_rows_are_not_known_are_refused(step, model, why):
    torch.manual_seed(0)
    run, optimizer = attached(model=None if model is None else model())
    epoch(run, optimizer)
    before = copy.deepcopy(dict(run.model.state_dict()))
    with pytest.raises((thresher.AttributionError, RuntimeError), match=why):
        epoch(run, optimizer, step)
    assert not any("forward" in vars(layer) for layer in layers(run.model))
    if step is not around and model is None:
        assert_same(before, dict(run.model.state_dict()))


def test_rows_that_a_collate_function_moves_are_refused():
    run, optimizer = attached(collate_fn=lambda rows: default_collate(rows[::-1]))
    epoch(run, optimizer, lambda run, x, y: run.criterion(run.model(x), y, ids=run.ids.flip(0)).backward())
    with pytest.raises(thresher.AttributionError, match="are not known: .*collate_fn.*Give run.model the inputs as"):
        epoch(run, optimizer)


def test_needs_are_checked_before_anything_is_changed():
    loader = DataLoader(TensorDataset(torch.randn(N, 1, 5), torch.arange(N) % 2), BATCH, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"loader": loader, "criterion": nn.CrossEntropyLoss(), "optimizer": optimizer, "epochs": 3}
    with pytest.raises(ValueError, match=r"Winnow weighs the rows of BatchNorm layers: pass attach\(model=...\), or use"):
        thresher.attach(WEIGHTED, **settings)
    with pytest.raises(ValueError, match=r"and BigLoss chooses among these rows: attach one of the two methods, or use Winnow"):
        thresher.attach([WEIGHTED, thresher.BigLoss()], model=model, **settings)
    with pytest.raises(ValueError, match=r"to be weighted, and the model \(SubsetContainer\) is traced"):
        thresher.attach(WEIGHTED, model=thresher.subset_backward(model), **settings)
    sampler = WeightedRandomSampler(torch.ones(N), N)
    with pytest.raises(ValueError, match="sampler can yield a sample several times in an epoch: use shuffle=True, or "):
        thresher.attach(WEIGHTED, model=model, **(settings | {"loader": DataLoader(loader.dataset, BATCH, sampler=sampler)}))
    run = thresher.attach(WEIGHTED, model=model, **settings)
    assert "weighted_statistics" not in run.method.requires.optional and not optimizer.state


def test_scores_that_are_not_declared_are_refused():
    class Undeclared(thresher.Winnow):
        requires = property(lambda self: replace(super().requires, weighted_statistics=False))

    run, optimizer = attached(Undeclared(0.5, batch_norm="weighted"))
    with pytest.raises(ValueError, match=r"`scores`, and does not declare it: requires = Requirements\(weighted_st"):
        for _ in range(2):
            epoch(run, optimizer)


def said(method, model=None, **settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached(method, model=model, **settings)
    return [str(one.message) for one in caught]


def test_statistics_of_drawn_rows_are_told_once():
    (text,) = said(thresher.Winnow(0.5))
    assert text == (
        "Winnow trains on drawn rows, and the BatchNorm layers of the model learn with their statistics: do not compute these "
        "anew on all samples after the training, as torch.optim.swa_utils.update_bn does, which costs accuracy, or use "
        "Winnow(batch_norm='weighted')."
    )
    assert said(0.5) == [text]
    for method in (WEIGHTED, thresher.Winnow(1.0), thresher.Winnow(0.5, width=1.0), thresher.UniformSubset(0.5)):
        assert not said(method)
    assert not said(thresher.Winnow(0.5), nn.Sequential(nn.Flatten(), nn.Linear(5, 2)))
    (only,) = said(thresher.Winnow(0.5), epochs=1)
    assert "draws uniformly in a training of one epoch" in only


# A planted case: the rows that the network is unsure of lie elsewhere


def planted(n, generator):
    hard = torch.rand(n, generator=generator) < 0.25
    labels = torch.randint(0, 2, (n,), generator=generator)
    side = 2.0 * labels - 1
    x = torch.randn(n, 6, generator=generator) * 0.5
    x[:, 0] += torch.where(hard, 0.0, 3 * side)
    x[:, 1] += torch.where(hard, 0.5 * side, 0.0)
    x[:, 2:] += torch.where(hard, 2.0, 0.0).unsqueeze(1)
    return x, labels


def change_by_update_bn(mode, seed):
    """How far the outputs of a trained network move when its statistics are computed anew, in their standard deviations."""
    generator = torch.Generator().manual_seed(seed)
    (x, y), (tests, _) = planted(1024, generator), planted(2000, generator)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader, method = (
        DataLoader(TensorDataset(x, y), 128, shuffle=True),
        thresher.Winnow(0.5, batch_norm=mode, least_agreement=-1),
    )
    criterion = nn.CrossEntropyLoss()
    run = thresher.attach(method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=8)
    for number in range(8):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - number / 7)
        epoch(run, optimizer)
    run.detach()
    with torch.no_grad():
        own = model.eval()(tests)
        update_bn(((part,) for part in x.split(128)), model)
        return float((model.eval()(tests) - own).abs().mean() / own.std())


def test_statistics_that_are_computed_anew_change_little_where_rows_were_weighted():
    for seed in range(2):
        assert change_by_update_bn("drawn", seed) > 0.2
        assert change_by_update_bn("weighted", seed) < 0.1
