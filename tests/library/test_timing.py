"""Where the time of a training goes."""

import itertools
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import timing
from thresher.timing import LOADING, OUTSIDE, REFRESH, STEPS, Timing, time_by_part


class Clock:
    """A clock that goes on only when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def __call__(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def epoch(made, clock):
    """One pass over a loader: 4 times 1 second for a batch, and 3 for a step."""
    for _ in range(4):
        made.switch(LOADING)
        clock(1.0)
        made.switch(STEPS)
        clock(3.0)
    made.switch(OUTSIDE)


def test_the_seconds_of_an_epoch_are_those_of_its_parts(clock):
    made = Timing()
    epoch(made, clock)
    before = made.switch(REFRESH)
    clock(7.0)
    assert made.switch(before) == REFRESH and before == OUTSIDE
    clock(50.0)  # an evaluation of the loop is no part of it
    made.attribution_s += 2.0
    found = made.close(epoch=3, tracing_s=4.0)
    assert found["epoch"] == 3 and found["seconds"] == 16 + 7 and made.entries == [found]
    own = {"planning_s": 0, "refresh_s": 7, "scoring_s": 0, "tracing_s": 4, "attribution_s": 2}
    assert found == {"epoch": 3, "seconds": 23, "loading_s": 4, "steps_s": 12 - 4 - 2, **own}
    epoch(made, clock)
    assert made.close(epoch=4, tracing_s=99.0)["steps_s"] == 0, (
        "what is in the steps is no more than they took"
    )
    made.forget()
    assert made.entries == []


def test_a_part_inside_of_a_step_is_taken_out_of_it(clock):
    made = Timing()
    made.switch(STEPS)
    clock(1.0)
    step = made.switch(REFRESH)
    clock(5.0)
    assert step == STEPS and made.switch(step) == REFRESH
    clock(1.0)
    found = made.close(epoch=0, tracing_s=0.0)
    assert (found["seconds"], found["steps_s"], found["refresh_s"]) == (7, 2, 5)


def test_a_pass_that_was_no_training_is_dropped(clock):
    made = Timing()
    epoch(made, clock)
    made.drop()
    epoch(made, clock)
    assert made.close(epoch=0, tracing_s=0.0)["seconds"] == 16


def test_parts_that_took_nearly_nothing_are_not_printed():
    assert time_by_part(
        [{"seconds": 3.2, "steps_s": 1.88, "tracing_s": 1.3, "planning_s": 0.02}]
    ) == ("3.2 s of wall time (steps 1.88 s, tracing 1.3 s)")


# In a training


def attached(method, *, epochs=3, samples=640, batch=10, **settings):
    torch.manual_seed(0)
    x = torch.randn(samples, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    run = thresher.attach(
        method,
        loader=loader,
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        **settings,
    )
    return run, optimizer


def train(run, optimizer, epochs=3):
    sizes = []
    for _ in range(epochs):
        for x, y in run.loader:
            sizes.append(len(x))
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sizes


def test_every_epoch_of_a_share_has_the_same_steps():
    run, optimizer = attached(0.5)
    sizes = train(run, optimizer)
    assert sizes == 3 * 64 * [5]
    assert all(
        sum(entry[f"{part}_s"] for part in timing.PARTS) == pytest.approx(entry["seconds"])
        for entry in run.times
    )


def test_selection_in_the_loops_forward_pass_keeps_its_count_in_every_step():
    run, optimizer = attached(thresher.SelectiveBackprop(keep=0.3), forward_passes="once")
    train(run, optimizer, 2)
    assert [entry["backward"] for entry in run.history] == [64 * 3] * 2


@pytest.mark.parametrize(
    "method", [0.5, thresher.SelectiveBackprop(keep=0.3), thresher.UniformSubset(keep=0.5)]
)
@pytest.mark.parametrize("after", [5, 12, 40, 70])
def test_a_state_goes_on_with_the_same_steps(method, after):
    spend = {"spend": "batches"} if isinstance(method, thresher.UniformSubset) else {}

    def rows(run, optimizer, loops):
        for x, y in loops:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield run.ids.tolist(), run.cost.backward

    def batches(run):
        while True:
            yield from run.loader

    run, optimizer = attached(method, **spend)
    whole = [*itertools.islice(rows(run, optimizer, batches(run)), 2 * 64)]
    run, optimizer = attached(method, **spend)
    first = [*itertools.islice(rows(run, optimizer, batches(run)), after)]
    state = (
        run.state_dict(),
        {name: value.clone() for name, value in run.model.state_dict().items()},
    )
    run, optimizer = attached(method, **spend)
    run.load_state_dict(state[0])
    run.model.load_state_dict(state[1])
    rest = [*itertools.islice(rows(run, optimizer, batches(run)), 2 * 64 - after)]
    assert [ids for ids, _ in first + rest] == [ids for ids, _ in whole] and rest[-1][1] == whole[
        -1
    ][1]


def test_a_trace_that_came_to_nothing_is_booked_once():
    """From the second epoch on another selection makes own passes, and traces nothing."""

    class Untraceable(nn.Linear):
        def forward(self, x):
            return super().forward(x) if float(x.detach().sum()) < 1e9 else x

    torch.manual_seed(0)
    model = Untraceable(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(96, 6), torch.arange(96) % 3), 8, shuffle=True)
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=3,
    )
    with pytest.warns(UserWarning, match="using the plain Untraceable"):
        for _ in range(3):
            for x, y in run.loader:
                optimizer.zero_grad()
                run.criterion(run.model(x), y).backward()
                optimizer.step()
    assert [entry["tracing_s"] > 0 for entry in run.times] == [True, False, False]


def test_losses_that_are_written_when_the_loop_has_left_are_attribution(monkeypatch):
    run, optimizer = attached(thresher.FullData(), epochs=1)
    accumulator, booked_on = run._timeline._parts.accumulator, []
    flush = accumulator.flush

    def noted():
        booked_on.append((run._timeline.timing._part, len(accumulator._waiting)))
        flush()

    monkeypatch.setattr(accumulator, "flush", noted)
    train(run, optimizer, 1)
    assert run.history and sum(waiting for _, waiting in booked_on) > 0
    assert [name for name, waiting in booked_on if waiting][-1] == timing.ATTRIBUTION


def test_work_before_a_batch_is_yielded_is_not_taken_out_of_the_steps(monkeypatch):
    run, optimizer = attached(thresher.FullData(), epochs=1)
    attributor = run._timeline._parts.attributor
    yielded = attributor.yielded

    def slow(*args):
        time.sleep(0.02)
        return yielded(*args)

    monkeypatch.setattr(attributor, "yielded", slow)
    train(run, optimizer, 1)
    assert run.times[0]["steps_s"] > 0


def test_stratified_batches_are_written_to_the_records_together():
    """Their plan has an order, like one that draws samples several times, and no sample comes twice."""
    run, optimizer = attached(thresher.Winnow(0.5), samples=640)
    train(run, optimizer, 1)
    assert run._timeline._parts.config.strata is not None
    assert not run._timeline._parts.accumulator.ids_repeat


@pytest.mark.parametrize("share", [0.2, 0.22, 0.3])
def test_each_step_has_the_rows_that_batchnorm_needs(share):
    torch.manual_seed(0)
    x = torch.randn(640, 6)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 10, shuffle=True)
    given_ = {
        "loader": loader,
        "criterion": nn.CrossEntropyLoss(),
        "model": model,
        "optimizer": optimizer,
        "epochs": 2,
    }
    with pytest.raises(
        ValueError,
        match=r"fewer than two per batch, which BatchNorm needs: the smallest share is 0\.2",
    ):
        thresher.attach(0.05, **given_)
    run = thresher.attach(share, **given_)
    assert min(train(run, optimizer, 1)) == int(10 * share)
