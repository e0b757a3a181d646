"""The pass over the data: order, modes, random numbers, and what it refuses."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from thresher import subset_backward
from thresher.scores import Scores, disagreement, el2n, grand, irreducible, memorisation, prototypes

N = 11
X = torch.arange(float(N)).unsqueeze(1)
Y = torch.arange(N) % 3


class Echo(nn.Module):
    """A model of three classes that records the inputs that it is given and the modes in which it runs."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(1), nn.Dropout(0.5)
        self.head = nn.Linear(1, 3)
        self.seen, self.modes = [], []

    def forward(self, x):
        self.seen += x[:, 0].tolist()
        self.modes.append((self.training, self.drop.training, torch.is_grad_enabled()))
        return self.head(self.drop(self.norm(x)))


def loader(dataset=None, **settings):
    return DataLoader(
        TensorDataset(X, Y) if dataset is None else dataset,
        **({"batch_size": 4, "shuffle": True} | settings),
    )


def collate_with_noise(samples):
    x, y = default_collate(samples)
    return x * 1.0, y


CALLS = {
    "el2n": lambda model, data: el2n(model, data),
    "grand last": lambda model, data: grand(model, data, nn.CrossEntropyLoss()),
    "grand all": lambda model, data: grand(model, data, nn.CrossEntropyLoss(), layer="all"),
    "irreducible": lambda model, data: irreducible(model, data, nn.CrossEntropyLoss()),
    "memorisation": lambda model, data: memorisation(model, [torch.arange(5)], data),
    "disagreement": lambda model, data: disagreement(model, data),
    "prototypes": lambda model, data: prototypes(model, data, 2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_trace_is_left(call):
    model = Echo()
    model.drop.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    generator = torch.Generator().manual_seed(5)
    states = (
        torch.get_rng_state(),
        generator.get_state(),
        random.getstate(),
        np.random.get_state()[1].copy(),
    )
    found = call(model, loader(generator=generator, drop_last=True))
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(
        generator.get_state(), states[1]
    )
    assert random.getstate() == states[2] and (np.random.get_state()[1] == states[3]).all()
    assert model.training and not model.drop.training and model.norm.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model._forward_pre_hooks and not model.head._forward_pre_hooks
    assert model.seen == list(map(float, range(N)))
    assert {mode[:2] for mode in model.modes} == {(False, False)}
    assert (
        found.ids.tolist() == list(range(N)) and torch.equal(found.labels, Y) and found.forward == N
    )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_loader_does_not_matter(call):
    model = Echo()
    once = call(model, loader(batch_size=1))
    sampler = BatchSampler(RandomSampler(range(N)), 4, drop_last=False)
    for other in (
        loader(),
        loader(batch_size=N),
        DataLoader(TensorDataset(X, Y), batch_sampler=sampler),
    ):
        assert call(model, other).values.tolist() == pytest.approx(
            once.values.tolist(), abs=1e-6, nan_ok=True
        )


def test_workers_and_collate_are_kept():
    model = Echo()
    kept = loader(num_workers=1, collate_fn=collate_with_noise, persistent_workers=True)
    assert el2n(model, kept).values.tolist() == pytest.approx(el2n(model, loader()).values.tolist())
    assert kept._iterator is None


def test_modes_come_back_after_an_error():
    model = Echo()
    state = torch.get_rng_state()

    def fail(model, batch):
        model(batch[0])
        torch.rand(1)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        grand(model, loader(), nn.CrossEntropyLoss(), forward=fail)
    assert model.training and model.drop.training and not model.head._forward_pre_hooks
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()


def test_a_model_with_another_backward_pass():
    model = Echo()
    wrapped = subset_backward(model)
    assert el2n(wrapped, loader()).values.tolist() == el2n(model, loader()).values.tolist()
    assert wrapped.training and model.training and model.drop.training


def test_batches_of_another_structure():
    class Rows(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return {"x": X[i], "y": Y[i], "name": str(i)}

    model = Echo()
    rows = loader(Rows())
    own = {"forward": lambda model, batch: (model(batch["x"]), batch["y"])}
    plain = loader()
    assert el2n(model, rows, **own).values.tolist() == el2n(model, plain).values.tolist()
    whole = grand(model, rows, nn.CrossEntropyLoss(), layer="all", **own)
    assert whole.values.tolist() == pytest.approx(
        grand(model, plain, nn.CrossEntropyLoss(), layer="all").values.tolist()
    )
    with pytest.raises(
        ValueError, match="a batch that is dict is not a pair of inputs and targets. Pass forward="
    ):
        el2n(model, rows)


def test_probabilities_are_labels_by_their_largest():
    soft = nn.functional.one_hot(Y, 3).float()
    model = Echo()
    found = el2n(model, loader(TensorDataset(X, soft)))
    assert torch.equal(found.labels, Y) and found.values.tolist() == pytest.approx(
        el2n(model, loader()).values.tolist(), abs=1e-6
    )


def test_ignored_targets_have_no_score():
    ignored = Y.clone()
    ignored[3] = -100
    for name in ("el2n", "grand last", "grand all", "irreducible"):
        found = CALLS[name](Echo(), loader(TensorDataset(X, ignored))).values
        assert found.isnan().nonzero().flatten().tolist() == [3], name


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("models", "data", "error", "message"),
    [
        ([], loader(), TypeError, "`models` must be one torch.nn.Module or more, got none"),
        ([Echo(), "model"], loader(), TypeError, "got Echo, str"),
        (Echo(), [(X, Y)], TypeError, "`loader` must be a torch.utils.data.DataLoader, got list"),
        (
            Echo(),
            DataLoader(Stream()),
            TypeError,
            "`loader` iterates over Stream: its samples have no indices",
        ),
        (
            Echo(),
            loader(batch_size=None, shuffle=False),
            ValueError,
            "`loader` has batch_size=None",
        ),
        (
            Echo(),
            loader(TensorDataset(X[:0], Y[:0]), shuffle=False),
            ValueError,
            "the dataset is empty",
        ),
        (
            Echo(),
            loader(
                collate_fn=lambda samples: default_collate(
                    sorted(samples, key=lambda s: -s[0].item())
                )
            ),
            ValueError,
            "sorts or mixes the samples of a batch.*cannot be assigned to samples",
        ),
    ],
)
def test_what_it_refuses(models, data, error, message):
    with pytest.raises(error, match=message):
        el2n(models, data)


def test_a_collate_that_leaves_samples_out_is_refused():
    def first(samples):
        return default_collate(samples[:3])

    with pytest.raises(
        ValueError,
        match="`loader` yielded 3 targets for 4 samples: they cannot be assigned to samples",
    ):
        el2n(Echo(), loader(collate_fn=first))


def test_values_of_another_number_are_refused():
    with pytest.raises(
        ValueError, match=r"4 samples gave values of shape \(1,\); expected one row per sample"
    ):
        disagreement(Echo(), loader(), forward=lambda model, batch: (model(batch[0])[:1], batch[1]))


def test_what_it_cost_and_where_it_comes_from():
    found = el2n([Echo(), Echo()], loader(), trained=(100, 90), provenance={"epochs": 2})
    assert isinstance(found, Scores) and (found.forward, found.backward) == (100 + 2 * N, 90)
    assert (
        found.provenance["models"] == 2
        and found.provenance["model"] == "Echo"
        and found.provenance["epochs"] == 2
    )
    assert set(found.provenance["versions"]) == {"thresher", "torch"}
    for wrong in ((1,), (1, -1), (1.5, 2)):
        with pytest.raises(
            ValueError,
            match=r"el2n: `trained` must be two whole numbers of 0 or more \(forward, backward\)",
        ):
            el2n(Echo(), loader(), trained=wrong)


@pytest.mark.usefixtures("group_of_one")
def test_passes_run_inside_of_ddp_whose_calls_wait_for_other_processes():
    model, calls = Echo(), []
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel.register_forward_pre_hook(lambda *_: calls.append(1))
    assert torch.equal(el2n(parallel, loader()).values, el2n(model, loader()).values)
    assert calls == [] and parallel.training and model.training
