"""The guards of Winnow in a training loop: planted trainings in which they must speak, and others in which they must not."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import thresher
from helpers import assert_same
from thresher import Winnow
from thresher.experiments.training.specs import MethodSpec
from thresher.methods._placebo import placebo_of
from thresher.rng import seeded
from thresher.testing.check import comparable_plan

N = 300


def attached(method: Any, *, n: int = N, epochs: int = 12, batch_size: int = 30, model: Any = None, **settings: Any) -> Any:
    """Returns a run on two overlapping classes, and its optimizer."""
    torch.manual_seed(0)
    x = torch.randn(n, 5)
    y = (x[:, 0] + 0.5 * torch.randn(n) > 0).long()
    model = model or nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    loading: dict[str, Any] = {"shuffle": True} | settings
    loader = DataLoader(TensorDataset(x, y), batch_size, **loading)
    run = thresher.attach(
        method, loader=loader, criterion=nn.CrossEntropyLoss(), model=model, optimizer=optimizer, epochs=epochs
    )
    return run, optimizer


def trained(
    run: Any,
    optimizer: Any,
    epochs: int,
    *,
    lr: float = 0.02,
    bad_from: int | None = None,
    stop: tuple[int, int] | None = None,
) -> list[Any]:
    """Trains, and returns the ids of each epoch.

    Args:
        run: Run in any epoch.
        optimizer: Its optimizer.
        epochs: Number of epochs of the whole training.
        lr: Learning rate.
        bad_from: First epoch in which the learning rate is much too high.
        stop: Epoch and number of batches after which the training is interrupted.
    """
    seen = []
    while run.epoch < epochs:
        for group in optimizer.param_groups:
            group["lr"] = lr if bad_from is None or run.epoch < bad_from else 8.0
        seen.append([])
        for number, (x, y) in enumerate(run.loader, start=1):
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            seen[-1] += run.ids.tolist()
            if (run.epoch, number) == stop:
                return seen
        assert run.history
    return seen


@pytest.fixture(autouse=True)
def _trusting() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Loss and uncertainty of the samples")
        yield


# The agreement of loss and uncertainty


def of_four_classes(wrong: float, apart: float, *, least_agreement: float = 0.5) -> Any:
    """Trains on four classes that lie so far apart, a share of whose labels are replaced, and returns the run."""
    torch.manual_seed(0)
    labels = torch.arange(400) % 4
    x = torch.randn(400, 6) + apart * torch.nn.functional.one_hot(labels, 6)
    given = torch.where(torch.rand(400) < wrong, torch.randint(4, (400,)), labels)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run = thresher.attach(
        Winnow(least_agreement=least_agreement),
        loader=DataLoader(TensorDataset(x, given), 40, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=10,
    )
    trained(run, optimizer, 10, lr=0.05)
    return run


def test_many_wrong_labels_make_the_draw_uniform_and_are_said_once():
    with pytest.warns(UserWarning, match=r"rank correlation below 0\.5 .* draws uniformly in such epochs") as given:
        run = of_four_classes(wrong=0.6, apart=4.0)
    assert len(given) == 1
    assert [entry["uniform"] for entry in run.history[1:]] == [0, 0] + 7 * [1]
    assert max(entry["agreement"] for entry in run.history[3:]) < 0.5
    assert min(entry["spread"] for entry in run.history[3:]) > 0.14


def test_clean_labels_are_trusted_and_so_is_whoever_switches_the_guard_off():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clean = of_four_classes(wrong=0.0, apart=4.0)
        wrong = of_four_classes(wrong=0.6, apart=4.0, least_agreement=-1)
    assert min(entry["agreement"] for entry in clean.history[3:]) > 0.85
    assert not any(entry["uniform"] for run in (clean, wrong) for entry in run.history[1:])


def test_where_all_samples_are_as_uncertain_as_each_other_nothing_is_said():
    """The classes lie on top of each other: labels are not wrong, and inputs do not tell them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = of_four_classes(wrong=0.0, apart=0.0)
    assert max(entry["agreement"] for entry in run.history[3:]) < 0.5
    assert max(entry["spread"] for entry in run.history[1:]) < 0.14
    assert not any(entry["uniform"] for entry in run.history[1:])


# The cost of a probe


@pytest.mark.parametrize(
    ("share", "n", "epochs", "probe", "times", "drop_last"),
    [
        (0.5, 200, 4, 32, 3, False),
        (0.35, 307, 6, 40, 8, False),
        (0.35, 307, 6, 40, 8, True),
        (0.8, 307, 9, 50, 4, True),
        (0.2, 611, 5, 64, 50, False),
        (0.62, 411, 5, 130, 3, True),
    ],
)
def test_the_cost_with_the_evaluations_is_the_share(share, n, epochs, probe, times, drop_last):
    method = Winnow(share, probe=probe, probe_times=times)
    run, optimizer = attached(method, n=n, epochs=epochs, drop_last=drop_last)
    trained(run, optimizer, epochs)
    assert [entry["guard"] for entry in run.history] == [0] * epochs
    assert run.cost.refresh == probe * min(times, epochs - 1)
    assert run.cost.forward == run.cost.backward + run.cost.refresh
    assert run.cost.steps == epochs * (n // 30 if drop_last else -(-n // 30))
    assert abs(run.cost.ratio() - share) <= 0.01 + 1 / n


def test_samplers_of_some_samples_and_a_sampler_that_repeats():
    half = list(range(0, N, 2))
    run, optimizer = attached(Winnow(probe=40), sampler=SubsetRandomSampler(half), shuffle=None)
    seen = trained(run, optimizer, 12)
    assert all(i % 2 == 0 for ids in seen for i in ids) and len({i for ids in seen for i in ids}) == 110
    assert abs(run.cost.ratio() - 0.5) <= 0.01 + 1 / len(half)
    with pytest.raises(ValueError, match="Smaller batches need the number of samples of an epoch"):
        attached(Winnow(probe=40), sampler=WeightedRandomSampler([1.0] * N, N), shuffle=None)


# What is trained on


def test_held_back_samples_are_never_trained_on_and_the_order_stays():
    run, optimizer = attached(Winnow(probe=60))
    held = run.plan.ids
    seen = trained(run, optimizer, 12)
    assert len(held) == N - 60 and {i for ids in seen for i in ids} == set(held.tolist())
    assert int((run.trained > 0).sum()) == N - 60
    watched = torch.ones(N, dtype=torch.bool).index_fill(0, held, False)
    assert bool((run.records["loss"][watched] >= 0).all())
    full, own = attached(thresher.FullData())
    torch.manual_seed(5)
    order = trained(full, own, 1)[0]
    run, optimizer = attached(Winnow(probe=60))
    torch.manual_seed(5)
    places = [order.index(i) for i in trained(run, optimizer, 1)[0]]
    assert places == sorted(places)


def test_share_1_holds_nothing_back():
    run, optimizer = attached(Winnow(1.0, probe=60), epochs=2)
    plain, own = attached(Winnow(1.0), epochs=2)
    assert set(run.records) == {"uncertainty", "loss"} and Winnow(1.0, probe=60).requires.refresh is None
    for one, its in ((run, optimizer), (plain, own)):
        torch.manual_seed(1)
        trained(one, its, 2)
    assert_same(list(run.model.parameters()), list(plain.model.parameters()))


def test_without_a_probe_nothing_is_passed_or_remembered():
    run, optimizer = attached(Winnow(), epochs=4)
    trained(run, optimizer, 4)
    assert run.cost.refresh == 0 and set(run.records) == {"uncertainty", "loss"} and "guard" not in run.history[-1]


# When it returns to full batches


def test_a_training_that_goes_well_keeps_its_budget():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The network gets worse")
        run, optimizer = attached(Winnow(probe=80))
        trained(run, optimizer, 12)
    assert all(entry["guard"] == 0 and entry["kept"] < N / 2 for entry in run.history)
    assert run.history[-1]["probe_loss"] < run.history[2]["probe_loss"]


def test_a_training_that_goes_wrong_returns_to_full_batches_and_says_so_once():
    run, optimizer = attached(Winnow(probe=80))
    with pytest.warns(UserWarning, match=r"samples that Winnow\(probe=80\) holds back") as given:
        seen = trained(run, optimizer, 12, bad_from=5)
    own = [str(one.message) for one in given if "holds back" in str(one.message)]
    first = next(number for number, entry in enumerate(run.history) if entry["guard"])
    assert 7 <= first <= 8 and [entry["guard"] for entry in run.history] == [0] * first + [1] * (12 - first)
    assert len(own) == 1 and f"From epoch {first + 1} on" in own[0]
    expected = 0.5 + 0.5 * (12 - first) / 12
    assert f"about {expected:.2f} of full training instead of 0.5" in own[0]
    assert run.cost.ratio() == pytest.approx(expected, abs=0.02)
    assert all(sorted(ids) == list(range(N)) for ids in seen[first:])
    assert all(len(ids) < N / 2 for ids in seen[:first])
    assert {entry["lr_scale"] for entry in run.history} == {0.5**0.25}
    assert all(entry["refreshed"] == 0 for entry in run.history[first:])


def test_losses_that_are_not_finite_end_it_too():
    run, optimizer = attached(Winnow(probe=80))
    trained(run, optimizer, 4)
    with torch.no_grad():
        next(run.model.parameters()).fill_(float("nan"))
    with pytest.warns(UserWarning, match="have a loss that is not finite"), pytest.warns(UserWarning, match="holds back"):
        trained(run, optimizer, 12)
    assert run.history[-1]["guard"] == 1
    assert all(torch.tensor(entry.get("probe_loss", 0.0)).isfinite() for entry in run.history)


def test_a_regression_can_be_watched():
    model = nn.Linear(5, 1)
    data = torch.randn(N, 5)
    loader = DataLoader(TensorDataset(data, data[:, 0]), 20, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.warns(UserWarning, match="Winnow has no `uncertainty`"):
        run = thresher.attach(
            Winnow(probe=50),
            loader=loader,
            criterion=nn.MSELoss(),
            model=model,
            optimizer=optimizer,
            epochs=6,
            forward=lambda model, batch: (model(batch[0])[:, 0], batch[1]),
        )
    while run.epoch < 6:
        for x, y in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(x)[:, 0], y).backward()
            optimizer.step()
        assert run.history
    losses = [entry["probe_loss"] for entry in run.history if "probe_loss" in entry]
    assert len(losses) == 5 and losses[-1] < losses[0]


# Resuming, and chance


@pytest.mark.parametrize(("stop", "bad_from"), [((0, 3), None), ((5, 7), None), ((7, 4), 5), ((11, 2), 5)])
def test_resume_in_the_middle_of_an_epoch_is_exact(stop, bad_from, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The network gets worse")
        method = Winnow(probe=60)
        whole, own = attached(method)
        everything = trained(whole, own, 12, bad_from=bad_from)
        first, optimizer = attached(method)
        before = trained(first, optimizer, 12, bad_from=bad_from, stop=stop)
        torch.save([first.state_dict(), first.model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
        state, of_model, of_optimizer = torch.load(tmp_path / "state.pt", weights_only=True)
        run, own_optimizer = attached(method)
        run.model.load_state_dict(of_model)
        own_optimizer.load_state_dict(of_optimizer)
        run.load_state_dict(state)
        after = trained(run, own_optimizer, 12, bad_from=bad_from)
    assert [*before[:-1], before[-1] + after[0], *after[1:]] == everything
    assert_same(list(run.model.parameters()), list(whole.model.parameters()))
    assert [entry["guard"] for entry in run.history] == [entry["guard"] for entry in whole.history]
    assert (run.cost.forward, run.cost.backward, run.cost.refresh) == (
        whole.cost.forward,
        whole.cost.backward,
        whole.cost.refresh,
    )


def test_a_plan_depends_on_the_records_the_epoch_and_the_seed_alone():
    method = Winnow(probe=60)
    run, optimizer = attached(method)
    trained(run, optimizer, 7)
    records = {name: column.clone() for name, column in run.records.items()}

    def plan(epoch: int, key: int = 0) -> Any:
        return method.plan_epoch(records, epoch=epoch, epochs=12, generator=seeded(key, epoch))

    for epoch in range(1, 12):
        assert comparable_plan(plan(epoch)) == comparable_plan(plan(epoch))
        assert torch.equal(plan(epoch).ids, plan(1, key=3).ids)
        assert not torch.equal(plan(epoch).keys, plan(epoch, key=3).keys)
    assert all(torch.equal(records[name], column) for name, column in run.records.items())


def test_a_placebo_leaves_held_back_samples_where_they_are():
    seen = {}

    class Looks(Winnow):
        def plan_epoch(self, records: Any, **settings: Any) -> Any:
            seen.update(records)
            return super().plan_epoch(records, **settings)

    run, optimizer = attached(Winnow(probe=60))
    trained(run, optimizer, 5)
    held = ~run.records["held_back"].isfinite()
    placebo_of(Looks(probe=60)).plan_epoch(run.records, epoch=5, epochs=12, generator=seeded(0, 5))
    for name, column in run.records.items():
        assert torch.equal(seen[name][held], column[held])
        assert torch.equal(seen[name].sort().values, column.sort().values)
    assert not torch.equal(seen["loss"], run.records["loss"])
    assert MethodSpec("winnow", {"probe": 60}, {"placebo": True}).create().probe == 60


# What is refused


def test_what_is_refused_at_attach():
    with pytest.raises(ValueError, match="`probe` compares 3 evaluations at least, and a training of 3 epochs has 2"):
        attached(Winnow(probe=40), epochs=3)
    with pytest.raises(ValueError, match=r"less than one a batch\. Give the loader larger batches"):
        attached(Winnow(0.1, probe=40), batch_size=10)
    with pytest.raises(ValueError, match="`probe` holds back 200 of 300 samples, .*hold back fewer samples"):
        attached(Winnow(probe=200))
    settings = {"loader": DataLoader(TensorDataset(torch.randn(N, 5), torch.zeros(N).long()), 20), "epochs": 12}
    with pytest.raises(ValueError, match=r"forward passes: pass attach\(model=...\), or use Winnow\(probe=0\)"):
        thresher.attach(Winnow(probe=40, lr_scale=1), criterion=nn.CrossEntropyLoss(), **settings)
    with pytest.raises(ValueError, match=r"forward passes: pass attach\(criterion=...\), or use Winnow\(probe=0\)"):
        thresher.attach(Winnow(probe=40, lr_scale=1), criterion=None, model=nn.Linear(5, 2), **settings)


def test_samples_of_a_stream_cannot_be_held_back():
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            yield from ((torch.zeros(5), 0) for _ in range(40))

    model = nn.Linear(5, 2)
    settings = {"loader": DataLoader(Stream(), 10), "criterion": nn.CrossEntropyLoss(), "model": model, "epochs": 12}
    with pytest.raises(ValueError, match=r"Winnow evaluates samples .* use a map-style dataset, or use Winnow\(probe=0\)"):
        thresher.attach(Winnow(probe=40, lr_scale=1), **settings)
    run = thresher.attach(Winnow(1.0, probe=40, lr_scale=1), **settings)
    assert sum(len(x) for x, _ in run.loader) == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probe": 31}, r"`probe` is a whole number of 32 or more \(0 switches it off\), got 31"),
        ({"probe": -1}, "`probe` .*got -1"),
        ({"probe": 0.1}, "`probe` .*got 0.1"),
        ({"probe": True}, "`probe` .*got True"),
        ({"probe_times": 2}, "`probe_times` is a whole number of 3 or more, got 2"),
        ({"probe_times": 4.0}, "`probe_times` .*got 4.0"),
        ({"probe_times": 0}, "`probe_times` .*got 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^Winnow: {message}"):
        Winnow(**settings)
