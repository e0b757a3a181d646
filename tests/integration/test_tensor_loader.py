"""`TensorLoader`: the batches of a DataLoader over the same tensors, with every method and in a resumed epoch."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import FullData, TensorLoader, methods
from thresher.methods import requirements_of

N, SIZE = 103, 8
X, Y = torch.randn(N, 6, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3


def default(name):
    """A method with its default settings; None where it needs some, such as scores."""
    try:
        return methods.load(name)()
    except TypeError:
        return None


def trained(loader, method=None, *, epochs=3, **settings):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer, criterion = (
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        nn.CrossEntropyLoss(),
    )
    batches, called, reduce = loader, model, criterion
    if method is not None:
        given = {"loader": loader, "criterion": criterion, "model": model, "optimizer": optimizer}
        run = thresher.attach(method, epochs=epochs, **given, **settings)
        batches, called, reduce = run.loader, run.model, run.criterion
    seen = []
    for _ in range(epochs):
        for x, y in batches:
            reduce(called(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((x, y))
    return seen, model.state_dict(), torch.get_rng_state()


def same(a, b):
    assert len(a[0]) == len(b[0])
    for left, right in zip(a[0], b[0], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
    assert all(torch.equal(a[1][name], b[1][name]) for name in a[1]) and torch.equal(a[2], b[2])


@pytest.mark.parametrize("settings", [{}, {"drop_last": True}, {"generator": 3}])
def test_its_batches_are_those_of_a_dataloader_with_and_without_a_run(settings):
    def pair():
        own = {
            name: torch.Generator().manual_seed(3) if name == "generator" else value
            for name, value in settings.items()
        }
        other = copy.copy(own)
        if "generator" in own:
            other["generator"] = torch.Generator().manual_seed(3)
        return TensorLoader(X, Y, batch_size=SIZE, **own), DataLoader(
            TensorDataset(X, Y), SIZE, shuffle=True, **other
        )

    tensors, plain = pair()
    wanted = trained(plain)
    same(trained(tensors), wanted)
    same(trained(pair()[0], FullData()), wanted)


@pytest.mark.parametrize("name", [name for name in methods.names() if default(name) is not None])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_methods_train_on_it_as_on_a_dataloader(name):
    method = default(name)
    settings = (
        {"forward_passes": "twice"}
        if method.stage == "batch" and requirements_of(method).signals
        else {}
    )
    wanted = trained(DataLoader(TensorDataset(X, Y), SIZE, shuffle=True), method, **settings)
    same(trained(TensorLoader(X, Y, batch_size=SIZE), method, **settings), wanted)


RESUMED = [
    ("infobatch", {}),
    (0.5, {}),
    ("selective_backprop:keep=0.5", {"forward_passes": "twice"}),
]


@pytest.mark.parametrize(("method", "settings"), RESUMED)
def test_a_resumed_epoch_goes_on_exactly(method, settings):
    def begin(seed):
        torch.manual_seed(seed)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        # Selected rows that wait are read again, so that a transform would draw other numbers for them.
        noisy = (
            None if settings else lambda batch: [batch[0] + torch.randn_like(batch[0]), batch[1]]
        )
        loader = TensorLoader(X, Y, batch_size=SIZE, transform=noisy)
        given = {
            "loader": loader,
            "criterion": nn.CrossEntropyLoss(),
            "model": model,
            "optimizer": optimizer,
        }
        return model, optimizer, thresher.attach(method, epochs=3, **given, **settings)

    def go(model, optimizer, run, stop=None):
        ids = []
        for _ in range(run.epoch, 3):
            for x, y in run.loader:
                run.criterion(run.model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                ids.append(run.ids.tolist())
                if stop is not None and len(ids) == stop:
                    states = (
                        model.state_dict(),
                        optimizer.state_dict(),
                        run.state_dict(),
                        torch.get_rng_state(),
                    )
                    return ids, copy.deepcopy(states)
        return ids, copy.deepcopy(model.state_dict())

    whole_ids, whole = go(*begin(0))
    first_ids, (weights, steps, state, random) = go(*begin(0), stop=len(whole_ids) // 2)
    model, optimizer, run = begin(5)
    model.load_state_dict(weights)
    optimizer.load_state_dict(steps)
    run.load_state_dict(state)
    torch.set_rng_state(random)
    rest_ids, resumed = go(model, optimizer, run)
    assert first_ids + rest_ids == whole_ids
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ((), ValueError, "got none"),
        ((X, Y[:5]), ValueError, r"got \(103, 6\) on cpu, \(5,\) on cpu"),
        ((torch.tensor(1.0),), ValueError, r"got \(\) on cpu"),
        ((X, Y.to("meta")), ValueError, r"\(103,\) on meta"),
        ((X, [1, 2]), TypeError, "must be tensors, got list"),
    ],
)
def test_tensors_that_are_no_rows_are_refused(tensors, kind, message):
    with pytest.raises(kind, match=message):
        TensorLoader(*tensors, batch_size=2)


def test_a_loader_written_by_hand_is_refused_and_the_error_names_it():
    class ByHand:
        def __iter__(self):
            return iter([(X[:8], Y[:8])])

        def __len__(self):
            return 1

    with pytest.raises(
        TypeError,
        match="got ByHand. For tensors that lie entirely on the device, use thresher.TensorLoader",
    ):
        thresher.attach(FullData(), loader=ByHand(), criterion=nn.CrossEntropyLoss(), epochs=1)


def test_the_loop_of_the_page_trains():
    page = (Path(__file__).parents[2] / "docs" / "fast-loops.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    torch.manual_seed(0)
    names = {}
    exec(code, names)
    assert (
        names["run"].cost.steps == 8
        and names["run"].cost.backward == 4096
        and names["x"].shape == (512, 3, 32, 32)
    )
    batch = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32).remainder(256).to(torch.uint8)
    x, y = names["crop_and_flip"]([batch, torch.tensor([3, 4])])
    assert x.shape == batch.shape and y.tolist() == [3, 4]
