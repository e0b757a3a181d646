"""Loops of all kinds: how they end an epoch, ask for batches ahead, and come back to it, and what the run makes of them."""

import gc
import itertools
import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import thresher
from helpers import assert_same
from thresher import EpochPlan

N, B, C, EPOCHS = 40, 8, 4, 5


@dataclass(frozen=True)
class Hiding(thresher.Kakurenbo):
    """Hides a fourth of the samples."""

    max_fraction: float = 0.25
    tau: float = 0.0
    move_back: bool = False
    reduce_fraction: bool = False


@dataclass(frozen=True)
class Scaled:
    """A method that hides the first samples and scales the learning rate."""

    stage = "epoch"
    hidden: int = 8
    requires: thresher.Requirements = field(
        default_factory=lambda: thresher.Requirements(optimizer=True)
    )

    def columns(self):
        return {"loss": thresher.Column(torch.float32, fill=float("-inf"))}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        return EpochPlan(
            torch.arange(self.hidden, N), refresh=torch.arange(self.hidden), lr_scale=2.0
        )


def make(method=None, *, epochs=EPOCHS, n=N, batch=B, optimizer=True, loader=None, **settings):
    torch.manual_seed(0)
    net = nn.Linear(6, C)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    data = TensorDataset(torch.randn(n, 6), torch.arange(n) % C)
    run = thresher.attach(
        method or Hiding(),
        loader=loader or DataLoader(data, batch, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=sgd if optimizer else None,
        epochs=epochs,
        **settings,
    )
    return run, net, sgd


def step(run, optimizer, batch):
    x, y = batch
    run.criterion(run.model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def until_exhausted(run):
    yield from run.loader


def counted(run):
    for _, batch in zip(range(len(run.loader)), run.loader, strict=False):
        yield batch


def sliced(run):
    yield from itertools.islice(run.loader, len(run.loader))


def broken(run):
    last = len(run.loader)
    for i, batch in enumerate(run.loader, 1):
        yield batch
        if i == last:
            break


def held(run):
    batches = iter(run.loader)
    for _ in range(len(run.loader)):
        yield next(batches)


LOOPS = {"zip": counted, "islice": sliced, "break": broken, "next": held}


def result(run, net):
    return {
        "net": net.state_dict(),
        "plan": run.plan.ids,
        "records": dict(run.records),
        "history": run.history,
        "trained": run.trained,
        "cost": {**vars(run.cost), "backward_to_forward": None},
        "epoch": run.epoch,
        "progress": run.progress,
    }


def trained(loop, method=None, *, workers=0, **settings):
    run, net, optimizer = make(method, **settings)
    if workers:
        data = TensorDataset(
            torch.randn(N, 6, generator=torch.Generator().manual_seed(1)), torch.arange(N) % C
        )
        run, net, optimizer = make(
            method, loader=DataLoader(data, B, shuffle=True, num_workers=workers), **settings
        )
    for _ in range(EPOCHS):
        for batch in loop(run):
            step(run, optimizer, batch)
    return result(run, net)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (Hiding(), {}),
        (thresher.UniformSubset(keep=0.6), {}),
        ([Hiding(), thresher.RandomBackprop(keep=0.5)], {"forward_passes": "twice"}),
    ],
)
def test_every_end_of_an_epoch_is_the_same(name, method, settings):
    """Plans, refreshes, records, counts and history are those of the plain loop."""
    assert_same(
        trained(LOOPS[name], method, **settings), trained(until_exhausted, method, **settings)
    )


def test_with_workers():
    assert_same(trained(counted, workers=2), trained(until_exhausted, workers=2))


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "next"])
def test_between_epochs_the_next_one_is_shown(name):
    run, _, optimizer = make()
    for batch in LOOPS[name](run):
        assert run.epoch == 0
        step(run, optimizer, batch)
        assert len(run.plan.ids) == N
        assert len(run.loader) == 5
    assert run.epoch == 1
    assert run.progress == 1 / EPOCHS
    assert len(run.loader) == 4
    assert len(run.plan.ids) == N - 10
    assert [entry["complete"] for entry in run.history] == [True]
    for batch in LOOPS[name](run):
        step(run, optimizer, batch)
    assert run.cost.refresh == 10
    assert (run.cost.full_forward, run.history[1]["refreshed"]) == (2 * N, 10)


@pytest.mark.parametrize("name", ["zip", "islice", "break"])
def test_resumed_between_epochs(name):
    """The saved run goes on with the next epoch, not with an empty rest of the last one."""
    run, net, optimizer = make()
    for _ in range(2):
        for batch in LOOPS[name](run):
            step(run, optimizer, batch)
    state, weights = (
        run.state_dict(),
        {key: value.clone() for key, value in net.state_dict().items()},
    )
    other, net, optimizer = make()
    net.load_state_dict(weights)
    with pytest.warns(UserWarning, match="but before the end of the loop over run.loader"):
        other.load_state_dict(state)
    assert other.epoch == 2
    for _ in range(EPOCHS - 2):
        sizes = [step(other, optimizer, batch) or len(batch[0]) for batch in LOOPS[name](other)]
        assert sum(sizes) == N - 10
    assert_same(result(other, net), trained(until_exhausted))


def test_after_a_break_the_plan_s_samples_are_refreshed():
    run, _, optimizer = make(epochs=9)
    for _ in range(4):
        for batch in itertools.islice(run.loader, 3):
            step(run, optimizer, batch)
    next(iter(run.loader))
    assert [entry["complete"] for entry in run.history] == [False] * 4
    assert [entry["refreshed"] for entry in run.history] == [0, 10, 10, 10]
    assert run.cost.refresh == 30


def test_the_step_of_the_last_batch_comes_before_the_plan():
    """Behind a prefetcher, whose last batches are trained on when the loader has run out."""
    run, net, optimizer = make()
    seen = []
    run.model.register_forward_hook(lambda *_: None)
    net.register_forward_hook(lambda module, *_: seen.append(module.training))
    for _ in range(2):
        for batch in list(run.loader):
            step(run, optimizer, batch)
    assert seen == [True] * (5 + 4 + 1)  # one more forward pass is compared with the loop's
    assert torch.isfinite(run.records["loss"]).all()
    assert seen == [True] * 10 + [False, False]
    assert run.history[1]["steps"] == 4


def test_saved_before_the_last_batch_was_trained():
    """An interruption in the last batch: a resumed run begins the next epoch, and says that this batch is lost."""
    run, _, optimizer = make()
    for i, batch in zip(range(5), run.loader, strict=False):
        if i < 4:
            step(run, optimizer, batch)
    with pytest.warns(UserWarning, match="has not computed the loss of a batch"):
        state = run.state_dict()
    assert state["ranks"][0]["epoch"] == 1


def test_detach_ends_the_last_epoch():
    run, _, optimizer = make(epochs=2)
    for _ in range(2):
        for batch in counted(run):
            step(run, optimizer, batch)
    run.detach()
    assert [(entry["complete"], entry["refreshed"]) for entry in run.history] == [
        (True, 0),
        (True, 10),
    ]
    assert run.cost.refresh == 10


# The learning rate


@pytest.mark.parametrize("name", ["zip", "islice", "break", "exhausted", "prefetched"])
def test_steps_between_epochs_are_not_scaled(name):
    loops = {**LOOPS, "exhausted": until_exhausted, "prefetched": lambda run: list(run.loader)}
    run, _, optimizer = make(Scaled(), epochs=2)
    rates = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for _ in range(2):
        for batch in loops[name](run):
            step(run, optimizer, batch)
        optimizer.step()
    assert rates == ([0.2] * 4 + [0.1]) * 2


def test_the_step_of_a_rest_of_accumulated_batches_is_scaled():
    run, _, optimizer = make(Scaled(), epochs=1)
    rates = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for i, (x, y) in enumerate(run.loader, 1):
        run.criterion(run.model(x), y).backward()
        if i % 3 == 0:
            optimizer.step()
    optimizer.step()
    optimizer.step()
    assert rates == [0.2, 0.2, 0.1]


# Coming back


@pytest.mark.parametrize("batch", [B, N // 2, N])
def test_cycle_is_refused(batch):
    run, _, optimizer = make(thresher.UniformSubset(keep=0.9), batch=batch)
    batches = itertools.cycle(run.loader)
    for _ in range(len(run.loader)):
        step(run, optimizer, next(batches))
    with pytest.raises(
        RuntimeError, match=r"earlier epoch.*itertools.cycle.*while True: for batch in run.loader"
    ):
        step(run, optimizer, next(batches))
    assert run.cost.backward == 36


def test_a_second_loss_of_a_prefetched_batch_is_no_cycle():
    run, _, optimizer = make()
    for x, y in list(run.loader):
        for half in (slice(0, 4), slice(4, 8)):
            outputs = run.model(x[half])
            (run.criterion(outputs, y[half]) + run.criterion(2 * outputs, y[half])).backward()
            optimizer.step()
    assert run.cost.backward == N


def test_a_look_at_a_batch_is_no_epoch():
    run, _, optimizer = make(thresher.UniformSubset(keep=0.5))
    expected = make(thresher.UniformSubset(keep=0.5))[0].plan.ids
    next(iter(run.loader))
    for _ in zip(range(2), run.loader, strict=False):
        pass
    assert run.cost.full_forward == 0
    for batch in run.loader:
        assert run.epoch == 0
        step(run, optimizer, batch)
    assert torch.equal(run.trained.nonzero().flatten(), expected)
    assert [entry["complete"] for entry in run.history] == [True]
    assert run.cost.full_forward == run.cost.full_backward == N


def test_a_look_at_a_batch_leaves_nothing_in_the_history():
    run, _, optimizer = make(thresher.SelectiveBackprop(keep=0.5), forward_passes="twice")
    next(iter(run.loader))
    for batch in run.loader:
        step(run, optimizer, batch)
    assert run.history[0]["candidates"] == N
    assert run.history[0]["selected"] == run.history[0]["backward"] == N // 2


def test_a_look_at_the_only_batch_is_no_epoch():
    run, _, optimizer = make(thresher.FullData(), batch=N)
    next(iter(run.loader))
    assert run.epoch == 0
    for batch in run.loader:
        step(run, optimizer, batch)
    assert run.epoch == len(run.history) == 1


# Threads


class Background:
    """Asks for batches in another thread."""

    def __init__(self, loader, epochs):
        self._loader, self._epochs, self._queue = loader, epochs, []
        self._ready, self._room = threading.Semaphore(0), threading.Semaphore(2)
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        for _ in range(self._epochs):
            for batch in self._loader:
                self._room.acquire()
                self._queue.append(batch)
                self._ready.release()

    def __iter__(self):
        while True:
            self._ready.acquire()
            self._room.release()
            yield self._queue.pop(0)


def test_another_thread_that_iterates_is_refused():
    run, _, optimizer = make()
    with pytest.raises(RuntimeError, match=r"in another.*num_workers"):
        for batch in Background(run.loader, 2):
            step(run, optimizer, batch)
    assert run.cost.steps == 1


def test_another_thread_does_not_end_an_epoch():
    run, _, optimizer = make()
    for batch in counted(run):
        step(run, optimizer, batch)
    seen = []
    thread = threading.Thread(
        target=lambda: seen.append((run.cost.steps, len(run.plan.ids), len(run.loader)))
    )
    thread.start()
    thread.join()
    assert seen == [(5, N, 5)]
    assert len(run.plan.ids) == N - 10


@pytest.mark.parametrize("optimizer", [False, True])
def test_a_loop_that_trains_in_its_own_thread(optimizer):
    """One thread after another, each of which iterates and trains."""
    run, _, sgd = make(thresher.UniformSubset(keep=0.5), optimizer=optimizer)
    errors = []

    def epoch():
        try:
            for batch in run.loader:
                step(run, sgd, batch)
        except RuntimeError as error:
            errors.append(str(error))

    for _ in range(2):
        thread = threading.Thread(target=epoch)
        thread.start()
        thread.join()
    if optimizer:
        assert not errors
        assert len(run.history) == 2
    else:
        assert "If attach gets no optimizer=, call it in that thread" in errors[0]


# Counts of epochs


def test_an_epoch_too_many_is_said_once():
    run, _, optimizer = make(thresher.FullData(), epochs=1)
    for batch in run.loader:
        step(run, optimizer, batch)
    with pytest.warns(
        UserWarning, match=r"Epoch 2 begins, but the run was created with epochs=1.*given once"
    ) as found:
        for batch in (*run.loader, *run.loader):
            step(run, optimizer, batch)
    assert len(found) == 1


class Counting(list):
    looks = 0

    def __iter__(self):
        Counting.looks += 1
        return super().__iter__()


def test_closing_an_epoch_does_not_read_the_history():
    run, _, optimizer = make(thresher.FullData(), epochs=9)
    run._timeline._history.entries = Counting()
    for _ in range(9):
        for batch in run.loader:
            step(run, optimizer, batch)
    assert run.history[-1]["forward"] == N
    assert len(run.history) == 9
    assert Counting.looks == 0


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.randn(6), torch.tensor(i % C)) for i in range(N))

    def __len__(self):
        return N


def test_a_stream_with_a_length():
    run, _, optimizer = make(thresher.RandomBackprop(keep=0.5), loader=DataLoader(Stream(), B))
    for _ in range(2):
        for batch in counted(run):
            step(run, optimizer, batch)
    assert run.epoch == 2
    assert [entry["complete"] for entry in run.history] == [True, True]


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "prefetcher"])
@pytest.mark.parametrize("skips", [False, True], ids=["all batches", "not the last batch"])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_results_do_not_depend_on_what_was_read_before(accumulated, skips, ahead):
    """Also where the last group of an accumulation stays unfinished, and where a prefetcher reads before its last step."""

    def train(reads):
        torch.manual_seed(0)
        net = nn.Linear(10, 4)
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        x = torch.randn(64, 10)
        loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 8, shuffle=True)
        run = thresher.attach(
            thresher.Kakurenbo(max_fraction=0.4),
            loader=loader,
            criterion=nn.CrossEntropyLoss(),
            model=net,
            optimizer=optimizer,
            epochs=4,
        )
        count = 0
        for _ in range(4):
            for batch, last in looked_ahead(run.loader, ahead):
                if reads:
                    str(run.cost), len(run.history)
                if skips and last:
                    continue
                run.criterion(run.model(batch[0]), batch[1]).backward()
                count += 1
                if count % accumulated == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return run, net

    (one, net), (other, same) = train(reads=False), train(reads=True)
    assert torch.equal(net.weight, same.weight)
    before = str(one.cost).split(",")[:4]
    len(one.history)
    assert str(one.cost).split(",")[:4] == before
    assert one.cost.refresh == other.cost.refresh and torch.equal(
        one.records["loss"], other.records["loss"]
    )
    assert len(one.history) == len(other.history)


def looked_ahead(loader, ahead):
    """Yields batches, and whether each is the last one; `ahead`: after it has asked for the next one."""
    number = len(loader)
    batches = iter(loader)
    if not ahead:
        for i, batch in enumerate(batches):
            yield batch, i == number - 1
        return
    following = next(batches)
    while following is not None:
        batch, following = following, next(batches, None)
        yield batch, following is None


@pytest.mark.parametrize(
    "method", [0.5, thresher.FullData(), thresher.SelectiveBackprop(keep=0.5)], ids=str
)
def test_a_step_leaves_nothing_for_the_garbage_collector(method):
    """A cycle would keep batches, and the order of the epoch that their ids are views of, until it happens to run."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.arange(64) % 3), 8, shuffle=True)
    run = thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=3,
        stratify=None,
    )
    for epoch in range(3):
        if epoch == 2:
            gc.collect()
            # What earlier tests left may become garbage now.
            gc.freeze()
            gc.disable()
        for x, y in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            optimizer.step()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    left = {type(one).__name__ for one in gc.garbage} & {"YieldedBatch", "Attribution", "Rows"}
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    gc.unfreeze()
    assert not left
