import json

import pytest
import torch

import thresher
from thresher.experiments.job import Job
from thresher.experiments.specs import MethodSpec, parse_methods
from thresher.experiments.tasks import task_of
from thresher.experiments.training import accuracy, train

METHODS = ("full", "kakurenbo", "infobatch")


@pytest.fixture(scope="module")
def digits():
    task = task_of("digits")
    return task, task.load(task.find(None))


@pytest.fixture(scope="module")
def runs(digits):
    return {name: train(*digits, MethodSpec(name), seed=1, epochs=4) for name in METHODS}


def test_a_run_has_the_schema(runs):
    run = runs["kakurenbo"]
    assert set(run) == {
        "method", "settings", "seed", "control_of", "metric", "cost", "wall_s", "cpu_s", "history", "device",
    }  # fmt: skip
    assert (run["method"], run["seed"], run["control_of"]) == ("kakurenbo", 1, None)
    assert run["settings"]["max_fraction"] == 0.3
    assert run["metric"]["name"] == "accuracy" and run["metric"]["value"] > 0.9
    assert {"forward", "backward", "steps", "ratio", "refresh", "backward_to_forward"} <= set(run["cost"])
    assert [entry["accuracy"] for entry in run["history"]][-1] == run["metric"]["value"]
    assert min(run["cpu_s"], run["wall_s"]) > 0
    assert json.loads(json.dumps(run, allow_nan=False))["history"][0]["kept"] == 1438


def test_costs_are_counted(runs):
    full, hiding = runs["full"]["cost"], runs["kakurenbo"]["cost"]
    assert full["forward"] == full["backward"] == 4 * 1438 and full["ratio"] == 1 and full["steps"] == 4 * 23
    assert hiding["backward"] < full["backward"] and hiding["forward"] == hiding["backward"] + hiding["refresh"]
    share = hiding["backward_to_forward"]
    assert hiding["ratio"] == pytest.approx((hiding["forward"] + share * hiding["backward"]) / (1 + share) / (4 * 1438))
    for run in runs.values():
        assert sum(entry["steps"] for entry in run["history"]) == run["cost"]["steps"]


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
    timeless = ("metric", "history")
    again = train(*digits, MethodSpec("infobatch"), seed=1, epochs=4)
    assert [again[key] for key in timeless] == [runs["infobatch"][key] for key in timeless]
    other = train(*digits, MethodSpec("infobatch"), seed=2, epochs=4)
    assert other["history"] != again["history"]


def test_progress_is_told_every_epoch(digits):
    seen = []
    run = train(*digits, MethodSpec("uniform", {"keep": 0.25}), seed=0, epochs=3, progress=lambda *told: seen.append(told))
    assert [epochs for epochs, _ in seen] == [1, 2, 3]
    assert [value for _, value in seen] == [entry["accuracy"] for entry in run["history"]]


def test_a_short_run_without_a_measured_ratio_takes_the_textbook_one(digits):
    run = train(*digits, MethodSpec("uniform", {"keep": 0.02}), seed=0, epochs=1, label="uniform@0.020", control_of="kakurenbo")
    assert run["cost"]["backward_to_forward"] is None and run["cost"]["ratio"] == pytest.approx(0.02, abs=1e-3)
    assert (run["method"], run["control_of"]) == ("uniform@0.020", "kakurenbo")


def test_accuracy_puts_the_model_back_into_training():
    model = torch.nn.Linear(2, 2)
    batches = [(torch.eye(2), torch.tensor([0, 1])), (torch.eye(2), torch.tensor([0, 0]))]
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.zero_()
    assert accuracy(model, batches) == 0.75 and model.training


def test_keys_tell_runs_apart_by_every_setting():
    a, b = parse_methods("kakurenbo,kakurenbo:tau=0.5")
    jobs = [Job.of(a, 0), Job.of(a, 1), Job.of(b, 0)]
    jobs += [Job.control("kakurenbo", 0, 0.5), Job.control("infobatch", 0, 0.5), Job.control("kakurenbo", 0, 0.5000001)]
    assert len({job.key for job in jobs}) == len(jobs)
    assert Job.of(a, 0).key.startswith("kakurenbo-seed0-")


def test_a_control_costs_no_more_than_everything():
    job = Job.control("kakurenbo", 0, 1.02)
    assert job.spec.create().keep == 1.0 and job.label == "uniform@1.000"
