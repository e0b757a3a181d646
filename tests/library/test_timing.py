"""What a run tells of its time."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import timing
from thresher.timing import OUTSIDE, REFRESH, STEPS, SmallStep, TimeTold, Timing, told, whole_steps


class Clock:
    """A clock that goes on only when a test says so; CPU time runs at half of the speed."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.time, "process_time", lambda: self.now / 2)

    def __call__(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def epoch(made, clock, steps, *, start=2.0, load=1.0):
    """One pass over a loader: steps are (rows, seconds, whole)."""
    made.begin()
    clock(start)
    for rows, seconds, whole in steps:
        made.asked()
        before = made.load()
        clock(load)
        made.switch(before)
        made.yielded(rows, whole=whole)
        clock(seconds)
    made.asked()
    made.end()


CLOSED = {"epoch": 0, "rows": 40, "loads": False, "size": 10, "small": False, "tracing_s": 0.0}


def test_full_batches_forecast_as_many_steps_as_full_training_has(clock):
    made = Timing(torch.device("cpu"))
    epoch(made, clock, 4 * [(10, 3.0, True)])
    found = made.close(full=80, **CLOSED)
    # The first batch is waited for once an epoch, whatever the number of batches; three loads and four steps come twice.
    assert found["seconds"] == 2 + 4 + 12 and found["full_seconds"] == 2 + 1 + 2 * 3 + 2 * 12
    assert found["cpu_seconds"] == 9 and found["full_cpu_seconds"] == found["full_seconds"] / 2
    assert found["time_error"] == timing.NOISE and "time_unknown" not in found
    made.attribution_s = 4.5
    epoch(made, clock, 4 * [(10, 3.0, True)])
    found = made.close(full=40, **CLOSED)
    assert found["full_seconds"] == 18 - 4.5 and found["time_error"] == timing.NOISE + timing.INDIRECT / 3


def test_loading_every_candidate_is_not_multiplied(clock):
    made = Timing(torch.device("cpu"))
    epoch(made, clock, 4 * [(10, 3.0, True)])
    assert made.close(full=80, **CLOSED | {"loads": True})["full_seconds"] == 2 + 1 + 3 + 2 * 12


def test_own_parts_are_no_part_of_full_training(clock):
    made = Timing(torch.device("cpu"))
    epoch(made, clock, 4 * [(10, 3.0, True)])
    before = made.switch(REFRESH)
    clock(7.0)
    assert made.switch(before) == REFRESH and before == OUTSIDE
    clock(50.0)  # an evaluation of the loop is part of neither
    made.attribution_s += 2.0
    found = made.close(full=40, **CLOSED | {"tracing_s": 4.0})
    assert found["seconds"] == 18 + 7 and found["full_seconds"] == 18 - 2 - 4
    assert (found["refresh_s"], found["tracing_s"], found["attribution_s"]) == (7, 4, 2)


def test_waiting_in_attribution_is_that_of_the_steps(clock, monkeypatch):
    """A system interrupts a process where it asks for the time: between steps, in attribution."""
    monkeypatch.setattr(timing.time, "process_time", lambda: cpu.now)
    cpu = Clock.__new__(Clock)
    cpu.now = 0.0
    made = Timing(torch.device("cpu"))
    made.begin()
    for _ in range(4):
        made.asked()
        made.load()
        made.switch(timing.ATTRIBUTION)
        clock(5.0)  # of which it waits for 4.5
        cpu.now += 0.5
        made.yielded(10, whole=True)
        clock(3.0)
        cpu.now += 3.0
    made.end()
    found = made.close(full=40, **CLOSED)
    assert found["attribution_s"] == pytest.approx(4 * 0.5) and found["seconds"] == 4 * 8
    assert found["full_seconds"] == pytest.approx(4 * 7.5) and found["full_cpu_seconds"] == pytest.approx(4 * 3)


def test_attribution_on_a_busy_machine_takes_its_part_of_the_cpu_time(clock, monkeypatch):
    made = Timing(torch.device("cpu"))
    made.attribution_s = 2.0  # of 12 s, half of which other processes had
    epoch(made, clock, 4 * [(10, 3.0, True)], start=0.0, load=0.0)
    found = made.close(full=40, **CLOSED)
    assert found["full_seconds"] == 10 and found["full_cpu_seconds"] == 5


def test_a_busy_machine_is_noted(clock, monkeypatch):
    made = Timing(torch.device("cpu"))
    for load, busy in ((0.0, False), (1e9, True)):
        monkeypatch.setattr(timing.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        epoch(made, clock, 4 * [(10, 3.0, True)])
        assert made.close(full=40, **CLOSED).get("busy", False) is busy
    assert told(made.entries).busy and not told(made.entries[:1]).busy


def test_a_part_inside_of_a_step_is_taken_out_of_it(clock):
    made = Timing(torch.device("cpu"))
    made.begin()
    made.asked()
    made.yielded(10, whole=True)
    clock(1.0)
    step = made.switch(REFRESH)
    clock(5.0)
    assert step == STEPS and made.switch(step) == REFRESH
    clock(1.0)
    made.asked()
    found = made.close(full=10, **CLOSED | {"rows": 10})
    assert (found["seconds"], found["full_seconds"], found["refresh_s"]) == (7, 2, 5)


def small_epoch(made, clock, whole=(2, 5, 8), *, small=1.5, of_whole=2.0):
    steps = [(10, of_whole, True) if step in whole else (4, small, False) for step in range(12)]
    epoch(made, clock, steps, start=0.0, load=0.0)
    return sum(rows for rows, *_ in steps)


def test_smaller_batches_take_their_time_from_the_whole_ones(clock):
    made = Timing(torch.device("cpu"))
    rows = small_epoch(made, clock)
    found = made.close(full=120, **CLOSED | {"rows": rows, "small": True})
    assert found["full_seconds"] == pytest.approx(12 * 2.0) and found["seconds"] == pytest.approx(9 * 1.5 + 3 * 2.0)
    assert made.small_step == SmallStep(rows=0.4, wall=0.75, cpu=0.75, error=timing.NOISE, cpu_error=timing.NOISE)
    epoch(made, clock, 12 * [(7, 1.75, False)], start=0.0, load=0.0)  # on the line between 4 and 10 rows
    later = made.close(full=120, **CLOSED | {"rows": 84, "small": True})
    assert later["full_seconds"] == pytest.approx(24)
    assert [one["seconds"] for one in made.entries] == [found["seconds"], later["seconds"]]
    made.forget()
    assert made.small_step is None and made.entries == []


def test_an_outlier_does_not_change_what_a_step_takes(clock):
    made = Timing(torch.device("cpu"))
    steps = [(10, 90.0 if step == 5 else 2.0, True) if step in (2, 5, 8) else (4, 1.5, False) for step in range(12)]
    epoch(made, clock, steps, start=0.0, load=0.0)
    made.close(full=120, **CLOSED | {"rows": 66, "small": True})
    assert made.small_step is not None and made.small_step.wall == 0.75


@pytest.mark.parametrize("whole", [(), (3,), (3, 4)])
def test_too_few_whole_steps_are_unknown(clock, whole):
    made = Timing(torch.device("cpu"))
    rows = small_epoch(made, clock, whole)
    found = made.close(full=120, **CLOSED | {"rows": rows, "small": True})
    assert "full_seconds" not in found and "too few of them trained on all rows" in found["time_unknown"]


def test_samples_that_were_not_counted_are_unknown(clock):
    made = Timing(torch.device("cpu"))
    epoch(made, clock, 4 * [(10, 3.0, True)])
    assert "are not known" in made.close(full=40, **CLOSED | {"rows": None})["time_unknown"]


def test_a_pass_that_was_no_training_is_dropped(clock):
    made = Timing(torch.device("cpu"))
    epoch(made, clock, 4 * [(10, 3.0, True)])
    made.drop()
    epoch(made, clock, 4 * [(10, 3.0, True)])
    assert made.close(full=40, **CLOSED)["seconds"] == 18


@given(st.integers(0, 3000), st.integers(0, 12))
def test_whole_steps_are_few_and_inside_of_the_epoch(steps, most):
    found = whole_steps(steps, most)
    assert list(found) == sorted(set(found)) and len(found) <= min(8, most, steps // 8) and len(found) != 1 != len(found) - 1
    assert all(0 < step < min(steps, timing.SPREAD_OVER) for step in found)


def test_whole_steps_do_not_all_fall_on_a_multiple():
    for every in range(2, 9):
        places = [step % every for step in whole_steps(500, 8)]
        assert len(set(places)) > 1


def entry(seconds, full, **more):
    return {"seconds": seconds, "full_seconds": full, "time_error": 0.02, **more}


@pytest.mark.parametrize(
    ("history", "line"),
    [
        ([], "not known: no epoch is over yet"),
        ([{"seconds": 1.0, "time_unknown": "the reason"}], "not known: the reason"),
        (
            [entry(1.0, 2.0), entry(1.0, 2.0)],
            "50% ± 1% shorter than full training would have taken (steps 2 s; forecast of full training 4 s)",
        ),
        (
            [entry(3.2, 2.9, tracing_s=1.3)],
            "10% ± 2% longer than full training would have taken (steps 1.9 s, tracing 1.3 s; forecast of full training 2.9 s)",
        ),
        (
            [entry(1.01, 1.0)],
            "about the same (± 2%) as full training would have taken (steps 1.01 s; forecast of full training 1 s)",
        ),
        (
            [entry(1.0, 2.0, cpu_seconds=3.0, full_cpu_seconds=2.0, cpu_time_error=0.1)],
            "50% ± 1% shorter than full training would have taken (steps 1 s; forecast of full training 2 s); "
            "CPU time 50% more",
        ),
        (
            [entry(1.0, 2.0, cpu_seconds=3.0, full_cpu_seconds=2.0, cpu_time_error=0.5)],
            "50% ± 1% shorter than full training would have taken (steps 1 s; forecast of full training 2 s)",
        ),
        (
            [entry(1.0, 2.0), {"seconds": 1.0, "time_unknown": "the reason"}],
            "50% ± 1% shorter than full training would have taken (steps 1 s; forecast of full training 2 s); some epochs "
            "are left out, because the reason",
        ),
        (
            [entry(1.0, 2.0, busy=True)],
            "about 50% shorter than full training would have taken (steps 1 s; forecast of full training 2 s); the machine was "
            "busy, so that this is rough",
        ),
        (
            [entry(1.01, 1.0, busy=True)],
            "about the same as full training would have taken (steps 1.01 s; forecast of full training 1 s); the machine was "
            "busy, so that this is rough",
        ),
        (
            [entry(1.5, 1.0, attribution_s=0.2)],
            "at least 50% longer than full training would have taken (steps 1.3 s, attribution 0.2 s; "
            "forecast of full training 1 s)",
        ),
        (
            [entry(1.0, 1.2, attribution_s=0.2) | {"time_error": 0.5}],
            "not known: it took 1 s, and the forecast of full training, 1.2 s, may be wrong by 50%, because attributing "
            "samples is a large part of such short steps",
        ),
        (
            [entry(1.0, 1.2) | {"time_error": 0.5, "busy": True}],
            "not known: it took 1 s, and the forecast of full training, 1.2 s, may be wrong by 50%, because the "
            "machine was busy",
        ),
        (
            [entry(1.0, 1.2) | {"time_error": 0.5}],
            "not known: it took 1 s, and the forecast of full training, 1.2 s, may be wrong by 50%, because equal steps took "
            "different times",
        ),
    ],
)
def test_the_line(history, line):
    assert str(told(history)) == line


def test_a_difference_is_told_where_it_is_larger_than_the_error():
    def made(seconds, error):
        return TimeTold(1, seconds, 1.0, None, error, {}, "")  # parts decide about words only

    assert made(1.3, 0.2).is_told_from_full and not made(1.1, 0.2).is_told_from_full
    assert made(0.7, 0.2).is_told_from_full and not made(0.9, 0.2).is_told_from_full
    assert made(0.5, math.inf).is_told_from_full is False


# In a training


def attached(method, *, epochs=3, samples=640, batch=10, **settings):
    torch.manual_seed(0)
    x = torch.randn(samples, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs, **settings
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


def test_the_first_epoch_of_a_share_has_whole_steps_and_keeps_to_its_budget():
    run, optimizer = attached(0.5)
    sizes = train(run, optimizer)
    assert len(sizes) == 3 * 64 and sum(sizes[:64]) == sum(sizes[64:128]) == 320
    assert [step for step, size in enumerate(sizes) if size == 10] == list(whole_steps(64, 8))
    assert [entry["whole_steps"] for entry in run.history] == [8, 0, 0]
    assert all(entry["full_seconds"] > 0 for entry in run.times) and run._epochs.timing.small_step.rows < 0.5


def test_a_short_epoch_has_none_and_says_that_the_time_is_not_known():
    run, optimizer = attached(0.5, samples=200)
    assert max(train(run, optimizer)) == 5
    assert "time           not known: the steps train on fewer rows" in run.summary()


def test_selection_in_the_loops_forward_pass_trains_whole_steps_by_the_model_itself():
    run, optimizer = attached(thresher.SelectiveBackprop(keep=0.3), forward_passes="once")
    calls, steps = [], []
    plain = type(run.model.module)._call_plain

    def noted(self, *args, **kwargs):
        calls.append(len(steps))
        return plain(self, *args, **kwargs)

    type(run.model.module)._call_plain = noted
    try:
        for _ in range(2):
            for x, y in run.loader:
                before = run.cost.backward
                run.criterion(run.model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append(run.cost.backward - before)
    finally:
        type(run.model.module)._call_plain = plain
    whole = list(whole_steps(64, 8))
    assert calls == whole and [step for step, rows in enumerate(steps) if rows == 10] == whole
    assert {rows for step, rows in enumerate(steps) if step not in whole} == {3}
    assert run.times[0]["full_seconds"] > 0 and run._epochs.timing.small_step.rows == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("method", [0.5, thresher.SelectiveBackprop(keep=0.3), thresher.UniformSubset(keep=0.5)])
@pytest.mark.parametrize("after", [5, 12, 40, 70])
def test_a_state_goes_on_with_the_same_whole_steps(method, after):
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
    state = run.state_dict(), {name: value.clone() for name, value in run.model.state_dict().items()}
    run, optimizer = attached(method, **spend)
    run.load_state_dict(state[0])
    run.model.load_state_dict(state[1])
    rest = [*itertools.islice(rows(run, optimizer, batches(run)), 2 * 64 - after)]
    assert [ids for ids, _ in first + rest] == [ids for ids, _ in whole] and rest[-1][1] == whole[-1][1]


def test_time_in_the_loop_is_not_told_as_own(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS_TO_WARN", 0.0)
    run, optimizer = attached(thresher.FullData())
    train(run, optimizer)  # FullData saves nothing, and so warns of nothing
    assert [entry["epoch"] for entry in run.times] == [0, 1, 2]
    assert all(0 < entry["full_seconds"] < entry["seconds"] for entry in run.times)


def test_a_slower_training_is_said_once_with_its_reason(monkeypatch):
    monkeypatch.setattr("thresher.run.epochs.SECONDS_TO_WARN", 0.0)
    parts = dict.fromkeys(timing.PARTS, 0.0) | {timing.STEPS: 9.0, timing.REFRESH: 6.0}
    longer = timing.TimeTold(2, seconds=15.0, full=10.0, cpu=None, error=0.01, parts=parts, unknown="")
    monkeypatch.setattr("thresher.run.epochs.told", lambda _: longer)
    run, optimizer = attached(thresher.Kakurenbo(max_fraction=0.01), epochs=5)
    with pytest.warns(UserWarning, match=r"takes .* longer than .* The refresh takes the most: use a method") as said:
        train(run, optimizer, 5)
    assert sum("longer than" in str(one.message) for one in said) == 1


def test_smaller_batches_that_save_little_are_said_once_with_the_way_out(monkeypatch):
    monkeypatch.setattr("thresher.run.epochs.SECONDS_TO_WARN", 0.0)
    monkeypatch.setattr("thresher.run.epochs.ENOUGH_STEPS", 0)
    parts = dict.fromkeys(timing.PARTS, 0.0) | {timing.STEPS: 9.0}
    little = timing.TimeTold(2, seconds=9.0, full=10.0, cpu=None, error=0.01, parts=parts, unknown="")
    monkeypatch.setattr("thresher.run.epochs.told", lambda _: little)
    run, optimizer = attached(0.5, epochs=5)
    with pytest.warns(UserWarning, match=r"takes 10% ± 1% shorter .* full-size batches in 50% of the steps save more") as said:
        train(run, optimizer, 5)
    assert sum("save more" in str(one.message) for one in said) == 1


def test_fewer_rows_than_were_measured_take_a_part_of_that_at_least():
    """A step on .4 of the rows took .2 of the time: the line through both would be below 0 at .2 of the rows."""
    step = SmallStep(rows=0.4, wall=0.2, cpu=0.2, error=0.02, cpu_error=0.02)
    assert (
        step.at(0.2, 0) == pytest.approx(0.1)
        and step.at(0.4, 0) == pytest.approx(0.2)
        and step.at(0.7, 1) == pytest.approx(0.6)
    )
    assert SmallStep(rows=0.4, wall=0.7, cpu=0.7, error=0.02, cpu_error=0.02).at(0.2, 0) == pytest.approx(0.6)


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
    assert [time["tracing_s"] > 0 for time in run.times if "tracing_s" in time] == [True]


def test_a_part_of_the_epochs_is_not_the_training():
    entries = [
        {"seconds": 1.3, "full_seconds": 0.5, "time_error": 0.05},
        *[{"seconds": 0.4, "time_unknown": "too few of them"}] * 7,
    ]
    assert str(told(entries)) == "not known: too few of them"
    assert str(told(entries[:3])).startswith("160% ± 13% longer than full training")


def test_losses_that_are_written_when_the_loop_has_left_are_attribution(monkeypatch):
    run, optimizer = attached(thresher.FullData(), epochs=1)
    accumulator, booked_on = run._epochs._accumulator, []
    flush = accumulator.flush

    def noted():
        booked_on.append((run._epochs.timing._now, len(accumulator._waiting)))
        flush()

    monkeypatch.setattr(accumulator, "flush", noted)
    train(run, optimizer, 1)
    assert run.history and sum(waiting for _, waiting in booked_on) > 0
    assert {name for name, waiting in booked_on if waiting} == {timing.ATTRIBUTION}


def test_stratified_batches_are_written_to_the_records_together():
    """Their plan has an order, like one that draws samples several times, and no sample comes twice."""
    run, optimizer = attached(thresher.Winnow(0.5), samples=640)
    train(run, optimizer, 1)
    assert run._epochs.config.strata is not None
    assert not run._epochs._accumulator.ids_repeat


@pytest.mark.parametrize("share", [0.2, 0.22, 0.3])
def test_whole_steps_leave_each_other_step_the_rows_that_batchnorm_needs(share):
    torch.manual_seed(0)
    x = torch.randn(640, 6)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 10, shuffle=True)
    given_ = {"loader": loader, "criterion": nn.CrossEntropyLoss(), "model": model, "optimizer": optimizer, "epochs": 2}
    with pytest.raises(ValueError, match=r"less than the two a batch that BatchNorm needs: the smallest share is 0\.2"):
        thresher.attach(0.05, **given_)
    run = thresher.attach(share, **given_)
    assert min(train(run, optimizer, 1)) == 2
