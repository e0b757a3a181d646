"""What a batch method is asked, what is counted of its plans, and what a saved run remembers of it."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import BatchPlan


@dataclass(frozen=True)
class Answer:
    """Answers with the plan that it was made with, and counts its steps in place."""

    plan: object
    stage = "batch"

    def init_state(self):
        return {"steps": torch.zeros(1)}

    def count(self, n):
        return None

    def plan_batch(self, signals, state, *, step, generator):
        state["steps"] += 1
        return self.plan, state


def attach(plan, **settings):
    loader = DataLoader(TensorDataset(torch.randn(10, 3), torch.arange(10) % 2), 6)
    return thresher.attach(
        Answer(plan),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=nn.Linear(3, 2),
        epochs=3,
        **settings,
    )


def stage_of(state):
    (rank,) = state["ranks"]
    return rank["batch_stage"]


def test_an_answer_that_is_no_plan():
    run = attach([1, 2])
    with pytest.raises(
        TypeError, match=r"Answer.plan_batch must return \(thresher.BatchPlan, state\), got list"
    ):
        next(iter(run.loader))
    assert stage_of(run.state_dict())["step"] == 0


def test_facts_are_means_and_are_told_once():
    run = attach(BatchPlan(torch.tensor([0, 1]), facts={"note": 0.5}))
    for _ in range(2):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
    told = {"candidates": 10, "selected": 4, "note": 0.5, "actual_fraction": 0.6}
    assert [{name: entry[name] for name in told} for entry in run.history] == [told, told]


def test_its_state_is_a_copy():
    run = attach(BatchPlan(torch.tensor([0])), seed=3)
    batches = iter(run.loader)
    x, y = next(batches)
    run.criterion(run.model(x), y).backward()
    saved = run.state_dict()
    x, y = next(batches)
    run.criterion(run.model(x), y).backward()
    assert stage_of(saved)["state"]["steps"].item() == 1
    other = attach(BatchPlan(torch.tensor([0])), seed=9)
    other.load_state_dict(saved)
    again = stage_of(other.state_dict())
    assert (again["step"], again["seed"], again["state"]["steps"].item(), again["candidates"]) == (
        1,
        3,
        1,
        6,
    )
    for x, y in other.loader:
        other.criterion(other.model(x), y).backward()
    assert other.history[-1]["candidates"] == 10 and other.history[-1]["selected"] == 2
