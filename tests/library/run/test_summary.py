"""What a run says of itself."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import thresher
from thresher.methods.contract import as_written
from thresher.scores import Scores

N = 40


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(torch.randn(N, 3), torch.arange(N) % 2))


def attached(method, dataset=None, epochs=4, hook=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if hook is not None:
        model.register_forward_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = dataset or TensorDataset(torch.randn(N, 3), torch.arange(N) % 2)
    loader = DataLoader(data, 5, shuffle=None if dataset else True)
    run = thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=epochs,
    )
    return run, optimizer


def trained(run, optimizer, epochs=1):
    for _ in range(epochs):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


@dataclass(frozen=True)
class Planned:
    """Trains on as many samples as is said for each epoch, with scaled learning rates."""

    counts: tuple[int, ...]
    lr_scale: float = 1.0
    note: str = "plain"
    stage = "epoch"

    def columns(self):
        return {"loss": thresher.Column(torch.float32)}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        facts = {"share": self.counts[epoch] / N, "whole": self.counts[epoch] == N}
        return thresher.EpochPlan(
            torch.arange(self.counts[epoch]), lr_scale=self.lr_scale, facts=facts
        )


def lines_of(run):
    return dict(line.split("  ", 1) for line in run.summary().splitlines())


def test_before_anything_was_trained():
    run, _ = attached(thresher.Kakurenbo(max_fraction=0.4))
    found = {name.strip(): value.strip() for name, value in lines_of(run).items()}
    assert found == {
        "method": "Kakurenbo(max_fraction=0.4)",
        "epochs": "0 of 4 are over",
        "samples": "40",
        "cost": "no steps yet, so there is no cost yet",
    }


def test_after_epochs():
    run = trained(*attached(thresher.UniformSubset(keep=0.5)), epochs=2)
    found = {name.strip(): value.strip() for name, value in lines_of(run).items()}
    assert found["epochs"] == "2 of 4 are over"
    assert found["last epoch"] == "planned 20 samples, 50.0%; 20 went backward in 4 steps"
    assert re.fullmatch(r"\S+ s of wall time \(.*steps \S+ s, .*\)", found["time"])
    assert found["saving"] == "thresher compare measures it: it trains with this method and in full"
    assert found["sample passes"] == (
        "50.0% fewer, if a backward pass counts as 2 forward passes: forward 40 of 80 samples, backward 40 of 80, 8 steps"
    )


@pytest.mark.parametrize(
    ("method", "epochs", "why"),
    [
        (
            "infobatch",
            2,
            "InfoBatch kept every sample in every epoch, so nothing was saved. Train for more epochs, or use",
        ),
        (
            thresher.Kakurenbo(tau=1.0),
            3,
            "easy samples were moved back by `tau`: lower it. Train for more epochs",
        ),
        (
            [thresher.FullData(), thresher.SelectiveBackprop(warmup_steps=100)],
            2,
            "SelectiveBackprop kept every sample in every epoch",
        ),
    ],
)
def test_a_run_that_left_out_no_sample_warns_after_its_last_epoch(method, epochs, why):
    run, optimizer = attached(method, epochs=epochs)
    trained(run, optimizer, epochs - 1)
    assert "thresher compare measures it" in run.summary()
    with pytest.warns(UserWarning, match=re.escape(why)):
        trained(run, optimizer)
    assert why in run.summary() and "thresher compare" not in run.summary()


@pytest.mark.parametrize(
    "method",
    [
        thresher.FullData(),
        thresher.SelectiveBackprop(keep=1.0),
        thresher.InfoBatch(),
        thresher.ImportanceSampling(),
    ],
)
def test_a_run_that_saves_or_was_to_save_nothing_does_not_warn(method):
    run = trained(*attached(method, epochs=4), epochs=4)
    assert "nothing was saved" not in run.summary()


def test_a_last_epoch_that_is_unlike_the_others_has_their_mean_beside_it():
    run = trained(*attached(Planned((20, 40)), epochs=2), epochs=2)
    assert (
        "  planned 40 samples, 100.0% (75.0% in all epochs); 40 went backward in 8 steps\n"
        in run.summary()
    )


def test_nothing_is_saved_by_full_training_and_a_device_is_not_waited_for(monkeypatch):
    run = trained(*attached(thresher.FullData()))
    assert "saving" not in run.summary() and "time of the host" not in run.summary()
    monkeypatch.setitem(vars(run._parts), "device", torch.device("cuda"))
    (time,) = [line for line in run.summary().splitlines() if line.startswith("time ")]
    assert re.fullmatch(r"time +\S+ s of wall time \(.* s\); time of the host", time)


def test_the_time_of_scores_is_said_to_be_left_out():
    scores = Scores(torch.arange(40), torch.rand(40, dtype=torch.float64), forward=80, backward=40)
    run = trained(*attached(thresher.Prune(scores, keep=0.5)), epochs=2)
    assert "; what the scores took before it is not in it\n" in run.summary()


@pytest.mark.filterwarnings("ignore:subset_backward. using the plain Linear")
@pytest.mark.parametrize("hook", [None, lambda *_: None])
def test_why_a_model_is_not_traced_is_repeated(hook):
    run = trained(*attached(thresher.SelectiveBackprop(keep=0.4), hook=hook))
    assert ("all rows that are put forward: module 'model' has hooks" in run.summary()) is (
        hook is not None
    )


def test_an_unknown_cost_is_printed_as_unknown():
    run, optimizer = attached(thresher.UniformSubset(keep=0.5))
    with pytest.warns(UserWarning, match="got no loss in an epoch"):
        for _ in run.loader:
            optimizer.step()
    assert "unknown after" in run.summary() and "fewer" not in run.summary()
    assert "last epoch  planned 20 samples, 50.0%; 4 steps\n" in run.summary()
    assert run.cost.to_dict()["ratio"] is None


def test_a_scaled_rate_and_losses_that_are_not_finite_are_said():
    x = torch.randn(N, 3)
    x[3:5] = torch.nan
    run, optimizer = attached(
        Planned((30, 30), lr_scale=4 / 3), TensorDataset(x, torch.arange(N) % 2)
    )
    with pytest.warns(UserWarning, match="2 samples have a loss that is not finite"):
        for inputs, y in run.loader:
            run.criterion(run.model(inputs), y)
            optimizer.step()
    assert "; 6 steps; learning rate times 1.33; 2 losses not finite\n" in run.summary().replace(
        "in 6", "; 6"
    )


def test_a_stream_has_no_number_of_samples():
    run, _ = attached(thresher.RandomBackprop(keep=0.5), Stream())
    assert "a stream" in run.summary() and "a stream" in repr(run.loader)


def test_a_notebook_gets_a_table_and_markup_in_names_is_text():
    run, _ = attached(thresher.UniformSubset(keep=0.5))
    assert (
        run._repr_html_().startswith("<table><tr><th")
        and "UniformSubset(keep=0.5)" in run._repr_html_()
    )
    table = attached(Planned((20,), note="<i>"))[0]._repr_html_()
    assert "note=&#x27;&lt;i&gt;&#x27;" in table and "<i>" not in table


def test_the_loader_says_what_it_is_and_plans_nothing():
    run, _ = attached(thresher.UniformSubset(keep=0.5))
    assert repr(run.loader) == "SelectedLoader(40 samples, DataLoader with batch_size=5)"
    assert run._timeline.planner.current is None


def test_values_stand_below_each_other():
    run = trained(*attached(thresher.UniformSubset(keep=0.5)))
    names = {"method", "epochs", "samples", "last epoch", "time", "saving", "sample passes"}
    width = len("sample passes")
    assert {line[:width].rstrip() for line in run.summary().splitlines()} == names
    assert all(
        line[width : width + 2] == "  " and line[width + 2] != " "
        for line in run.summary().splitlines()
    )


def test_a_method_is_written_with_what_differs():
    @dataclass(frozen=True)
    class Own:
        keep: float
        other: int = 3

    assert (
        as_written(Own(0.5)) == "Own(keep=0.5)"
        and as_written(Own(0.5, 4)) == "Own(keep=0.5, other=4)"
    )
    assert as_written("text") == "'text'"


class Board:
    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, step):
        self.seen[name, step] = value


class Weights:
    def __init__(self):
        self.seen = {}

    def log(self, numbers, step=None):
        self.seen |= {(name, step): value for name, value in numbers.items()}


class Flow(Weights):
    def log_metrics(self, metrics, step=None, synchronous=None):
        Weights.log(self, metrics, step)


@pytest.mark.parametrize("kind", [Board, Weights, Flow])
def test_each_tracker_gets_the_numbers_of_the_last_epoch(kind):
    run = trained(*attached(thresher.UniformSubset(keep=0.5)), epochs=2)
    tracker = kind()
    run.log(tracker)
    run.log(tracker, step=70, prefix="")
    assert tracker.seen["thresher/kept", 1] == 20 and tracker.seen["thresher/run/ratio", 1] == 0.5
    assert tracker.seen["kept", 70] == 20 and tracker.seen["run/steps", 70] == 8
    assert tracker.seen["thresher/seconds", 1] > 0 and tracker.seen["thresher/steps_s", 1] > 0
    assert all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in tracker.seen.values()
    )


def test_log_refuses():
    run, optimizer = attached(thresher.UniformSubset(keep=0.5))
    with pytest.raises(ValueError, match="run.log: no epoch is over yet; call it after"):
        run.log(print)
    with pytest.raises(
        TypeError,
        match=r"`tracker` must have add_scalar, log_metrics or log, or be a .* got int; for",
    ):
        run.log(3)


@pytest.mark.filterwarnings("ignore:.*got no loss in an epoch")
def test_only_numbers_are_logged():
    """No text, no flag, and nothing that is not known."""
    run, optimizer = attached(Planned((40, 20)))
    for _ in run.loader:
        optimizer.step()
    logged = {}
    run.log(lambda numbers, step: logged.update(numbers), prefix="")
    entry = run.history[-1]
    assert (
        entry["whole"] is True
        and run.cost.to_dict()["ratio"] is None
        and isinstance(run.cost.to_dict()["unknown"], str)
    )
    assert logged["share"] == 1.0 and logged["run/steps"] == 8
    assert not {"whole", "run/ratio", "run/unknown"} & set(logged)
    assert {type(value) for value in logged.values()} == {int, float}


def test_the_time_of_a_run_that_loaded_a_state_is_said_to_be_since_then():
    runs = [
        attached(
            thresher.FullData(), TensorDataset(torch.randn(N, 3), torch.arange(N) % 2), epochs=2
        )
        for _ in range(2)
    ]
    (first, optimizer), (resumed, other) = runs
    for run, steps in ((first, optimizer), (resumed, other)):
        for inputs, y in run.loader:
            run.criterion(run.model(inputs), y).backward()
            steps.step()
        if run is first:
            resumed.load_state_dict(first.state_dict())
    assert (
        "since the state was loaded" in resumed.summary()
        and "since the state" not in first.summary()
    )
