import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import GradientState
from accelerate.tracking import GeneralTracker
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import thresher
from depth import depth
from thresher.scores import Scores
from thresher_lab.comparison.controls import Job, as_placebo, parse_controls
from thresher_lab.recipes.running import task_of
from thresher_lab.tasks import built_in
from thresher_lab.tasks.base import accuracy, one_cycle
from thresher_lab.tasks.script import Script
from thresher_lab.training import loop
from thresher_lab.training.loop import sizes_of, tracker_name, train, with_costs
from thresher_lab.training.specs import MethodSpec, parse_methods

TIMES = ("cost", "cpu_s", "wall_s")
METHODS = ("full", "kakurenbo", "infobatch")
SAMPLES, STEPS = 720, 12
"""Half of the digits, and their batches of 64."""
FEW = 200


class Tracker(GeneralTracker):
    name, requires_logging_directory = "told", False

    def __init__(self):
        super().__init__()
        self.told, self.config, self.finished = [], None, False

    @property
    def tracker(self):
        return self.told

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step, **_):
        self.told.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture(scope="module")
def digits():
    task = task_of(f"digits@{SAMPLES}")
    return task, task.load(task.find(None))


@pytest.fixture(scope="module")
def few():
    return task_of(f"digits@{FEW}").load(None)


@pytest.fixture(scope="module")
def watched(digits):
    """Each run with its tracker and the calls of its progress function."""
    found = {}
    for name in METHODS:
        tracker, seen = Tracker(), []
        run = train(
            *digits,
            MethodSpec(name),
            seed=1,
            epochs=4,
            trackers=tracker,
            progress=lambda *told, seen=seen: seen.append(told),
        )
        found[name] = (run, tracker, seen)
    return found


@pytest.fixture(scope="module")
def runs(watched):
    return {name: run for name, (run, _, _) in watched.items()}


def test_a_run_has_the_schema(runs):
    run = runs["kakurenbo"]
    assert set(run) == {
        "method", "settings", "seed", "rate", "control_of", "metric", "cost", "wall_s", "cpu_s", "tracing_s", "history",
        "device", "busy", "classes", "confusion", "step_memory",
    }  # fmt: skip
    assert (run["method"], run["seed"], run["control_of"]) == ("kakurenbo", 1, None)
    assert run["settings"]["max_fraction"] == 0.3
    assert run["metric"]["name"] == "accuracy" and run["metric"]["value"] > 0.9
    assert {"forward", "backward", "steps", "ratio", "refresh", "backward_to_forward"} <= set(
        run["cost"]
    )
    assert [entry["accuracy"] for entry in run["history"]][-1] == run["metric"]["value"]
    assert min(run["cpu_s"], run["wall_s"]) > 0
    assert json.loads(json.dumps(run, allow_nan=False))["history"][0]["kept"] == SAMPLES


def test_what_another_trainer_left_half_accumulated_stops_no_step():
    """The state of accelerate is one for the whole process: a trainer that was left in the middle of a step leaves it so."""
    task, spec = built_in(f"digits@{FEW}"), MethodSpec("full")
    data = task.load(task.find(None))
    first = train(task, data, spec, seed=0, epochs=1)["metric"]
    GradientState()._set_sync_gradients(False)
    assert train(task, data, spec, seed=0, epochs=1)["metric"] == first


def test_the_time_of_tracing_is_noted(runs):
    [spec] = parse_methods("selective_backprop:keep=0.5:forward_passes=once")
    task = built_in(f"digits@{FEW}")
    assert (
        train(task, task.load(task.find(None)), spec, seed=0, epochs=1)["tracing_s"]
        > 0
        == runs["kakurenbo"]["tracing_s"]
    )


def test_costs_are_counted(runs):
    full, hiding = runs["full"]["cost"], runs["kakurenbo"]["cost"]
    assert full["forward"] == full["backward"] == 4 * SAMPLES and full["ratio"] == pytest.approx(1)
    assert full["steps"] == 4 * STEPS
    assert hiding["backward"] < full["backward"]
    assert hiding["forward"] == hiding["backward"] + hiding["refresh"] + hiding["comparing"]
    share = hiding["backward_to_forward"]
    assert hiding["ratio"] == pytest.approx(
        (hiding["forward"] + share * hiding["backward"]) / (1 + share) / (4 * SAMPLES)
    )
    for run in runs.values():
        assert sum(entry["steps"] for entry in run["history"]) == run["cost"]["steps"]


def test_the_history_tells_what_it_took_until_then(runs):
    for run in runs.values():
        for name in TIMES:
            values = [entry[name] for entry in run["history"]]
            assert values == sorted(values) and values[0] > 0
        last = run["history"][-1]
        assert last["cost"] == pytest.approx(run["cost"]["ratio"])
        assert (last["cpu_s"], last["wall_s"]) == (run["cpu_s"], run["wall_s"])
    assert [entry["cost"] for entry in runs["full"]["history"]] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0]
    )


def test_costs_by_another_ratio(runs):
    cost = runs["kakurenbo"]["cost"]
    counted = with_costs(runs["kakurenbo"], 3.0)
    assert counted["cost"]["ratio"] == pytest.approx(
        (cost["forward"] + 3 * cost["backward"]) / 4 / (4 * SAMPLES)
    )
    first = counted["history"][0]
    assert first["cost"] == pytest.approx(
        (first["forward"] + 3 * first["backward"]) / 4 / (4 * SAMPLES)
    )
    assert counted["cost"]["backward_to_forward"] == cost["backward_to_forward"]


def test_the_cost_of_scores_is_known_as_a_part_of_the_cost(digits, runs, tmp_path):
    task, data = digits
    values = torch.arange(SAMPLES, dtype=torch.float64)
    Scores(torch.arange(SAMPLES), values, forward=2 * SAMPLES, backward=SAMPLES).save(
        tmp_path / "scores.parquet"
    )
    [spec] = parse_methods(f"prune:scores={tmp_path / 'scores.parquet'}:keep=0.5")
    cost = with_costs(train(task, data, spec, seed=0, epochs=2), 3.0)["cost"]
    assert cost["scores_ratio"] == pytest.approx((2 + 3 * 1) / 4 / 2)
    assert cost["ratio"] == pytest.approx(cost["scores_ratio"] + 0.5)
    assert runs["full"]["cost"]["scores_ratio"] == 0


def test_the_same_seed_is_the_same_start_for_every_method(runs):
    """Methods keep everything in epoch 0: the same weights, the same batches, the same learning rates."""
    assert len({run["history"][0]["accuracy"] for run in runs.values()}) == 1


def test_the_same_seed_is_the_same_first_batch(digits):
    task, data = digits
    firsts = []
    for name in METHODS:
        model = task.build(5)
        run = thresher.attach(
            MethodSpec(name).create(),
            loader=task.loader(data, 5),
            criterion=task.criterion(),
            model=model,
            optimizer=task.optimizer(model),
            epochs=2,
        )
        firsts.append(next(iter(run.loader))[0])
        run.detach()
    assert all(torch.equal(first, firsts[0]) for first in firsts)
    assert not torch.equal(next(iter(task.loader(data, 6)))[0], firsts[0])


def test_a_run_repeats_itself_and_another_seed_differs(digits, runs):
    again = train(*digits, MethodSpec("infobatch"), seed=1, epochs=4)
    assert again["metric"] == runs["infobatch"]["metric"] and timeless(again) == timeless(
        runs["infobatch"]
    )
    other = train(*digits, MethodSpec("infobatch"), seed=2, epochs=4)
    assert timeless(other) != timeless(again)


def timeless(run):
    """The history without what is measured."""
    return [
        {
            name: value
            for name, value in entry.items()
            if name not in (*TIMES, "step_s", "step_memory")
        }
        for entry in run["history"]
    ]


def test_progress_is_told_every_epoch(watched):
    for run, _, seen in watched.values():
        assert [epochs for epochs, _ in seen] == [1, 2, 3, 4]
        assert [value for _, value in seen] == [entry["accuracy"] for entry in run["history"]]


def test_a_short_run_without_a_measured_ratio_takes_the_textbook_one(digits):
    run = train(
        *digits, MethodSpec("uniform", {"keep": 0.02}), seed=0, epochs=1, label="uniform@0.020"
    )
    assert run["cost"]["backward_to_forward"] is None and run["cost"]["ratio"] == pytest.approx(
        0.02, abs=1e-3
    )
    assert (run["method"], run["control_of"]) == ("uniform@0.020", None)


@pytest.fixture(scope="module")
def shorter():
    """Full training, cut short, on all digits."""
    rates = []
    task = replace(
        task_of("digits"),
        name="watched",
        lr_factor=lambda progress: rates.append(progress) or one_cycle(progress),
    )
    run = train(
        task,
        task.load(None),
        MethodSpec("full"),
        seed=1,
        epochs=4,
        label="shorter@0.600",
        share=0.6,
    )
    return run, rates


def test_a_shorter_run_costs_its_share_of_the_whole(shorter):
    run, _ = shorter
    trained = 2 * 1438 + 9 * 64
    assert (run["method"], run["settings"], run["cost"]["steps"]) == (
        "shorter@0.600",
        {"epochs": 2.4},
        2 * 23 + 9,
    )
    assert run["cost"]["forward"] == run["cost"]["backward"] == trained
    assert run["cost"]["full_forward"] == run["cost"]["full_backward"] == 4 * 1438
    assert (
        run["cost"]["ratio"]
        == pytest.approx(trained / (4 * 1438))
        == pytest.approx(0.6, abs=0.5 * 64 / (4 * 1438))
    )


def test_a_shorter_run_has_its_epochs_and_its_part_of_one(shorter):
    run, _ = shorter
    assert [entry["complete"] for entry in run["history"]] == [True, True, False]
    assert [entry["steps"] for entry in run["history"]] == [23, 23, 9]
    assert [entry["epoch"] for entry in run["history"]] == [0, 1, 2]
    assert run["history"][-1]["cost"] == pytest.approx(run["cost"]["ratio"])
    assert run["history"][-1]["accuracy"] == run["metric"]["value"] > 0.9


def test_the_learning_rate_of_a_shorter_run_has_decayed_at_its_end(shorter):
    _, progress = shorter
    assert progress == sorted(progress) and progress[0] == 0 and len(progress) == 2 * 23 + 9 + 1
    assert progress[-1] == pytest.approx(1) and progress[-2] < 1
    assert progress[23] == pytest.approx(1438 / (2 * 1438 + 9 * 64))


def test_accuracy_puts_the_model_back_into_training():
    model = torch.nn.Linear(2, 2)
    batches = [(torch.eye(2), torch.tensor([0, 1])), (torch.eye(2), torch.tensor([0, 0]))]
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.zero_()
    assert accuracy(model, batches) == 0.75 and model.training


def test_keys_tell_runs_apart_by_every_setting():
    specs = parse_methods(
        "kakurenbo,kakurenbo:tau=0.5,uniform:keep=0.5,selective_backprop,selective_backprop:forward_passes=once"
    )
    jobs = [Job.of(spec, seed) for spec in specs for seed in (0, 1)]
    jobs += [
        Job.control(kind, 0, cost) for kind in ("uniform", "shorter") for cost in (0.5, 0.501, 1.0)
    ]
    assert len({job.key for job in jobs}) == len(jobs)
    assert jobs[0].key.startswith("kakurenbo-seed0-")


@pytest.mark.parametrize("kind", ["uniform", "shorter"])
def test_methods_of_the_same_cost_have_the_same_control(kind):
    assert Job.control(kind, 0, 0.6651).key == Job.control(kind, 0, 0.6654).key
    assert Job.control(kind, 0, 0.6651).key != Job.control(kind, 0, 0.6661).key


@pytest.mark.parametrize(("cost", "share"), [(1.02, 1.0), (0.5004, 0.5), (0.0001, 0.001)])
def test_a_control_costs_no_more_than_everything_and_no_less_than_something(cost, share):
    uniform, shorter = (Job.control(kind, 0, cost) for kind in ("uniform", "shorter"))
    assert uniform.spec.create().keep == shorter.share == share
    assert (uniform.label, shorter.label) == (f"uniform@{share:.3f}", f"shorter@{share:.3f}")
    assert uniform.share == 1 and shorter.spec.name == "full"


def test_controls_of_smaller_batches_and_permuted_signals():
    winnow, pruned = parse_methods("winnow:share=0.4,uniform:keep=0.5+selective_backprop:keep=0.5")
    smaller, placebo = (Job.control(kind, 0, 0.4, winnow) for kind in ("smaller", "placebo"))
    assert (smaller.label, smaller.spec.attachment(), smaller.spec.create().keep) == (
        "smaller@0.400",
        {"spend": "batches"},
        0.4,
    )
    assert (
        placebo.label == "placebo@0.400" and type(placebo.spec.create()).__name__ == "WinnowPlacebo"
    )
    names = [type(part).__name__ for part in Job.control("placebo", 0, 0.4, pruned).spec.create()]
    assert names == ["UniformSubset", "SelectiveBackpropPlacebo"]
    assert (
        len(
            {
                job.key
                for job in (smaller, placebo, Job.of(winnow, 0), Job.control("uniform", 0, 0.4))
            }
        )
        == 4
    )


def test_a_placebo_of_several_methods_permutes_all_that_choose_by_signals():
    (two,) = parse_methods("kakurenbo+selective_backprop")
    assert [type(part).__name__ for part in as_placebo(two).create()] == [
        "KakurenboPlacebo",
        "SelectiveBackpropPlacebo",
    ]
    (random,) = parse_methods("uniform:keep=0.5+random_backprop")
    with pytest.raises(
        ValueError, match=r"uniform:keep=0.5\+random_backprop: RandomBackprop chooses without"
    ):
        as_placebo(random)
    with pytest.raises(ValueError, match="its signals are permuted already"):
        as_placebo(as_placebo(two))


def test_kinds_of_controls_are_checked():
    assert parse_controls("smaller, placebo") == ("smaller", "placebo") and parse_controls("") == ()
    for text in ("half", "uniform,uniform"):
        with pytest.raises(
            ValueError, match="--controls: shorter@time, .*, placebo, fewer, each at most once"
        ):
            parse_controls(text)


def test_epochs_of_a_control():
    assert Job.control("shorter", 0, 0.56).epochs(25) == 14
    assert Job.control("shorter", 0, 0.57).epochs(25) == 15
    assert Job.control("uniform", 0, 0.57).epochs(25) == 25


def test_a_tracker_is_told_every_epoch_by_the_names_of_the_history(watched):
    run, tracker, _ = watched["kakurenbo"]
    assert [step for step, _ in tracker.told] == [0, 1, 2, 3] and tracker.finished
    assert tracker.config["max_fraction"] == 0.3
    for entry, (_, told) in zip(run["history"], tracker.told, strict=True):
        assert {"accuracy", "easy_share", "scheduled_fraction", "moved_back", "lr_scale"} <= set(
            told
        )
        assert all(entry[name] == value for name, value in told.items())


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"batch_size": 4}, (10, 4)),
        ({"batch_size": 4, "drop_last": True}, (8, 4)),
        ({"batch_size": 4, "sampler": SubsetRandomSampler(range(6))}, (6, 4)),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(10)), 3, False)}, (10, 3)),
        ({"batch_sampler": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]}, (10, 5)),
    ],
)
def test_sizes_of_an_epoch_and_its_batches(settings, sizes):
    assert sizes_of(DataLoader(TensorDataset(torch.zeros(10, 1)), **settings)) == sizes


class SomeDigits(Script):
    """Digits through a loader that gives only some of them."""

    settings = {}

    def training(self, data, seed):
        made = built_in("digits").training(data, seed)
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(
            made.loader.dataset, batch_size=32, generator=generator, **self.settings
        )
        return replace(made, loader=loader)


@pytest.mark.parametrize(
    "settings",
    [{"shuffle": True, "drop_last": True}, {"sampler": SubsetRandomSampler(range(FEW // 2))}],
)
@pytest.mark.parametrize("method", depth(["infobatch"], ["full", "infobatch"]))
def test_costs_are_shares_of_what_the_loader_gives(few, monkeypatch, settings, method):
    monkeypatch.setattr(SomeDigits, "settings", settings)
    task = SomeDigits(Path("none.py"), "build")
    run = train(task, few, MethodSpec(method), seed=0, epochs=4)
    cost = run["cost"]["ratio"]
    assert cost == pytest.approx(1.0) if method == "full" else cost < 0.97
    uniform = train(task, few, MethodSpec("uniform", {"keep": round(cost, 3)}), seed=0, epochs=4)
    shorter = train(task, few, MethodSpec("full"), seed=0, epochs=4, share=round(cost, 3))
    assert uniform["cost"]["ratio"] == pytest.approx(cost, abs=0.05)
    assert shorter["cost"]["ratio"] == pytest.approx(cost, abs=0.05)


def test_a_metric_that_is_not_finite_is_named(few):
    class Diverges(SomeDigits):
        def training(self, data, seed):
            return replace(super().training(data, seed), evaluate=lambda model: float("nan"))

    with pytest.raises(ValueError, match="evaluate returned nan after epoch 0"):
        train(Diverges(Path("none.py"), "build"), few, MethodSpec("full"), seed=0, epochs=1)


@pytest.mark.parametrize("returned", [None, "high", torch.zeros(2)])
def test_a_metric_that_is_no_number_is_named(few, returned):
    class Forgets(SomeDigits):
        def training(self, data, seed):
            return replace(super().training(data, seed), evaluate=lambda model: returned)

    with pytest.raises(
        ValueError, match="evaluate returned .*; it must return a number, larger for a better model"
    ):
        train(Forgets(Path("none.py"), "build"), few, MethodSpec("full"), seed=0, epochs=1)


def test_a_criterion_may_leave_the_mean_to_the_loop(few):
    class ByRow(SomeDigits):
        def training(self, data, seed):
            return replace(
                super().training(data, seed), criterion=torch.nn.CrossEntropyLoss(reduction="none")
            )

    task, usual = ByRow(Path("none.py"), "build"), SomeDigits(Path("none.py"), "build")
    own, mean = (
        train(one, few, MethodSpec("full"), seed=0, epochs=2)["metric"] for one in (task, usual)
    )
    assert own == mean


def test_a_metric_has_a_name_that_no_number_of_the_method_has(few):
    class Kept(SomeDigits):
        def training(self, data, seed):
            return replace(super().training(data, seed), metric="kept")

    with pytest.raises(
        ValueError, match="the metric is called 'kept', and so is a number of the method"
    ):
        train(Kept(Path("none.py"), "build"), few, MethodSpec("kakurenbo"), seed=0, epochs=1)


def test_a_run_says_whether_the_machine_was_busy_at_its_begin_or_end(few, monkeypatch):
    for states, busy in (
        ([False, False], False),
        ([False, True], True),
        ([True], True),
        ([None, None], None),
    ):
        said = iter(states)
        monkeypatch.setattr("thresher_lab.training.loop.is_busy", lambda said=said: next(said))
        assert (
            train(SomeDigits(Path("none.py"), "build"), few, MethodSpec("full"), seed=0, epochs=1)[
                "busy"
            ]
            is busy
        )


@pytest.mark.parametrize(
    ("batch", "got"),
    [([1, 2, 3], "3 parts"), ({"x": 1, "y": 2}, "dict"), (torch.zeros(2), "Tensor")],
)
def test_batches_are_pairs(few, batch, got):
    with pytest.raises(ValueError, match=f"batches must be pairs of inputs and targets, got {got}"):
        task_of(f"digits@{FEW}").training(few, 0).passed(torch.nn.Identity(), batch)


def test_names_that_every_tracker_takes():
    assert (
        tracker_name("infobatch:prune_fraction=0.3 once, seed 1")
        == "infobatch-prune_fraction=0.3-once-seed-1"
    )


class Judged(SomeDigits):
    """Digits, judged by something that comes after them."""

    told, value = [], 0.25

    def training(self, data, seed):
        made = super().training(data, seed)

        def downstream(model):
            self.told.append(made.evaluate(model))
            return self.value

        return replace(made, downstream=downstream)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_what_comes_downstream_is_the_metric_of_the_run(few, monkeypatch, share):
    monkeypatch.setattr(Judged, "told", [])
    run = train(
        Judged(Path("none.py"), "build"), few, MethodSpec("full"), seed=1, epochs=3, share=share
    )
    assert run["metric"] == {"name": "downstream accuracy", "value": 0.25}
    accuracies = [entry["accuracy"] for entry in run["history"]]
    assert Judged.told == accuracies[-1:], "called once, with the model after its last epoch"
    assert (run["history"][-1]["cpu_s"], run["history"][-1]["wall_s"]) == (
        run["cpu_s"],
        run["wall_s"],
    )


def test_what_comes_downstream_must_be_finite(few, monkeypatch):
    monkeypatch.setattr(Judged, "value", float("inf"))
    with pytest.raises(ValueError, match="downstream returned inf after epoch 1"):
        train(Judged(Path("none.py"), "build"), few, MethodSpec("full"), seed=1, epochs=2)


def test_a_loader_without_a_batch(few, monkeypatch):
    monkeypatch.setattr(SomeDigits, "settings", {"drop_last": True, "sampler": range(31)})
    with pytest.raises(
        ValueError,
        match=f"has no batch: {FEW} samples, batch_size=32 and drop_last=True.*smaller batch_size",
    ):
        train(SomeDigits(Path("none.py"), "build"), few, MethodSpec("full"), seed=0, epochs=1)


def test_several_processes_train_with_data_parallelism_only(few, monkeypatch):
    monkeypatch.setattr(loop, "number_of_processes", lambda: 2)
    with pytest.raises(
        ValueError,
        match="2 processes train with DistributedDataParallel .* is configured for Conv2d: choose",
    ):
        loop._network(torch.nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        ("full", True),
        ("uniform:keep=0.5:spend=batches", False),
        ("uniform:keep=0.5", False),
        ("infobatch", False),
    ],
)
def test_times_of_what_needs_no_thresher_are_without_its_work(digits, monkeypatch, method, plain):
    calls = []
    monkeypatch.setattr(loop.Clock, "take_out", lambda _, spent: calls.append(spent))
    [spec] = parse_methods(method)
    train(*digits, spec, seed=0, epochs=2)
    assert [spent["epoch"] for spent in calls] == ([0, 1] if plain else [])
    assert all(spent["attribution_s"] > 0 for spent in calls)


def test_own_work_is_taken_out_of_a_clock():
    clock = loop.Clock()
    clock.load_state_dict({"wall_s": 4.0, "cpu_s": 3.0})
    clock.take_out({"epoch": 0, "seconds": 2.0, "loading_s": 0.25, "steps_s": 0.75})
    assert clock.state_dict() == {
        "wall_s": 3.0,
        "cpu_s": 2.25,
    }  # it waited for other processes like the rest
    clock.load_state_dict({"wall_s": 2.0, "cpu_s": 4.0})
    clock.take_out(
        {"epoch": 1, "seconds": 2.0, "loading_s": 0.0, "steps_s": 1.5}
    )  # of several threads it had one
    assert clock.state_dict() == {"wall_s": 1.5, "cpu_s": 3.5}
    clock.take_out({})
    assert clock.state_dict() == {"wall_s": 1.5, "cpu_s": 3.5}
