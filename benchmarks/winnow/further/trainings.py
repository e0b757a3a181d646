"""What is trained: the ways, their looks at the rates and their counted seeds, as one line of JSON for each training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from benchmarks.winnow.further.proxy import train_beside
from benchmarks.winnow.further.variants import AveragedUncertainty, ChangingShare, ThresholdKeep
from benchmarks.winnow.jobs import FIRST_LOOK, Done, Job
from benchmarks.winnow.measures import AT_ONCE
from benchmarks.winnow.tasks import Part, Problem, problem_of
from thresher import Winnow
from thresher_lab.comparison.controls import FULL_TRAINING
from thresher_lab.tasks.base import Data, Task
from thresher_lab.training.loop import train
from thresher_lab.training.specs import MethodSpec, Spec
from thresher_lab.training.trainable import Training

TASKS = ("fashion-10k", "fashion-augmented-10", "fashion-10k-noisy")
BUDGET = 0.5
FACTORS = (0.6, 1.0, 1.6)
LOOKS = 2
SEEDS = 6

AVERAGED = 0.25
"""Share of the steps, the last ones, whose weights are averaged."""

BASE = "winnow"
"""Name of the way that all others are compared with."""


@dataclass(frozen=True)
class Outcome:
    """What one training gave.

    Attributes:
        models: Networks to measure, by the name of the measure: "metric", and "averaged" where weights were averaged.
        cost: Cost as a share of full training.
        facts: Other numbers to keep.
    """

    models: Mapping[str, nn.Module]
    cost: float
    facts: Mapping[str, Any]


Trainer = Callable[[Task, Data, int, int], Outcome]
"""Function of a task, its data, the number of epochs and the seed, that trains once."""


@dataclass(frozen=True)
class Way:
    """A way to train.

    Args:
        name: Name in the table.
        trainer: Function that trains once; None for a way that is measured in the trainings of another one.
        of: Name of the way whose trainings it is measured in. Default "": its own.
        measure: Name of the measure that rates are chosen by, and that counts.
        attempt: Whether it is an attempt to go further than Winnow, rather than a way to compare with.
    """

    name: str
    trainer: Trainer | None = None
    of: str = ""
    measure: str = "metric"
    attempt: bool = True

    @property
    def trained_as(self) -> str:
        """The name of the way whose trainings it is measured in."""
        return self.of or self.name


@dataclass(frozen=True)
class Given(MethodSpec):
    """Methods that are not in the registry of the library."""

    method: Any = None

    def create(self) -> Any:
        """Returns the methods."""
        return self.method

    @property
    def settings(self) -> dict[str, Any]:
        """Nothing: the name says all."""
        return {}


class TailAverage:
    """The mean of the weights after each of the last steps.

    Args:
        model: Network.
        optimizer: Optimizer of the network, whose steps are counted.
        steps: Number of steps of the training.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, steps: int) -> None:
        self._own, self._left = model, steps
        self._last = round(AVERAGED * steps)
        self._averaged = AveragedModel(model)
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    @property
    def model(self) -> nn.Module:
        """The network with the mean of the weights."""
        return self._averaged.module

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps that are left, and the mean."""
        return {"left": self._left, "averaged": self._averaged.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state."""
        self._left = state_dict["left"]
        self._averaged.load_state_dict(state_dict["averaged"])

    def _after_step(self) -> None:
        self._left -= 1
        if self._left < self._last:
            self._averaged.update_parameters(self._own)


@dataclass(frozen=True)
class AveragedTask(Task):
    """A task whose trainings average the weights of their last steps.

    Args:
        steps: Number of steps of a training.
    """

    steps: int = 0

    def training(self, data: Data, seed: int) -> Training:
        """Returns new objects for one run, with the average."""
        training = super().training(data, seed)
        return replace(training, also={"average": TailAverage(training.model, training.optimizer, self.steps)})


def cost_of(forward: int, backward: int, full: int) -> float:
    """Returns a cost as a share of full training, where a backward pass costs two forward passes.

    Args:
        forward: Number of samples that were put through a forward pass.
        backward: Number of samples that were put through a backward pass.
        full: Number of samples that full training puts through each.
    """
    return (forward + 2 * backward) / (3 * full)


def attached(spec: Spec, *, averaged: bool = False) -> Trainer:
    """Returns a trainer that attaches methods to the loop of the experiments.

    Args:
        spec: Methods.
        averaged: Whether weights are averaged, too.
    """

    def trainer(task: Task, data: Data, epochs: int, seed: int) -> Outcome:
        models: dict[str, nn.Module] = {}

        def keep(training: Training) -> None:
            models["metric"] = training.model
            if averaged:
                average: Any = training.also["average"]
                models["averaged"] = average.model

        if averaged:
            task = AveragedTask(**vars(task), steps=epochs * len(task.loader(data, seed)))
        trained = train(task, data, spec, seed=seed, epochs=epochs, on_end=keep)
        cost = trained["cost"]
        counted = {name: cost[name] for name in ("forward", "backward", "full_forward", "steps")}
        judged = {name: [entry[name] for entry in trained["history"] if name in entry] for name in ("agreement", "uniform")}
        spent = cost_of(cost["forward"], cost["backward"], cost["full_forward"])
        return Outcome(models, spent, {**counted, **judged, "cpu_s": trained["cpu_s"]})

    return trainer


def beside(score: Any) -> Trainer:
    """Returns a trainer with a small network beside the trained one.

    Args:
        score: Rule of the choice, see `benchmarks.winnow.further.proxy.chosen`.
    """

    def trainer(task: Task, data: Data, epochs: int, seed: int) -> Outcome:
        done = train_beside(task, data, score=score, budget=BUDGET, seed=seed, epochs=epochs)
        cost = done.rows / done.batches + done.share
        return Outcome({"metric": done.model}, cost, {"rows": done.rows, "batches": done.batches, "proxy": done.share})

    return trainer


def _variant(name: str, *methods: Any, **batch: Any) -> Way:
    method = methods[0] if len(methods) == 1 else list(methods)
    return Way(name, attached(Given(name, batch=batch, method=method)))


def _then(score: Any) -> Way:
    methods = Winnow(0.6, lr_scale=1.0, paced=False), ThresholdKeep(0.75, score)
    return _variant(f"then in the forward pass, by {score}", *methods, forward_passes="once")


WAYS: Sequence[Way] = (
    Way(BASE, attached(MethodSpec("winnow", {"share": BUDGET, "lr_scale": 1.0, "paced": False}), averaged=True), attempt=False),
    _variant("averaged uncertainty, factor 0.5", AveragedUncertainty(BUDGET, lr_scale=1.0, factor=0.5)),
    _then("grad_norm"),
    _variant("share 0.35 to 0.65", ChangingShare(0.35, lr_scale=1.0, last=0.65)),
    Way("averaged weights", of=BASE, measure="averaged"),
    Way("chosen by a small network's uncertainty", beside("uncertainty")),
    Way("full", attached(FULL_TRAINING, averaged=True), attempt=False),
    Way("full, averaged weights", of="full", measure="averaged", attempt=False),
    _then("loss"),
    Way("smaller", attached(MethodSpec("uniform", {"keep": BUDGET}, {"spend": "batches"}), averaged=True), attempt=False),
    Way("smaller, averaged weights", of="smaller", measure="averaged", attempt=False),
    Way("chosen by a small network's loss", beside("loss")),
    _variant("averaged uncertainty, factor 0.8", AveragedUncertainty(BUDGET, lr_scale=1.0, factor=0.8)),
    _variant("share 0.65 to 0.35", ChangingShare(0.65, lr_scale=1.0, last=0.35)),
    _then("uncertainty"),
)
"""All ways, in the order in which they are trained."""


def ready(done: Done, tasks: Sequence[str] = TASKS) -> Iterator[Job]:
    """Yields the trainings that can run now: looks at once, and counted ones as soon as their rate is chosen.

    Args:
        done: Results of the trainings that are done.
        tasks: Names of the tasks.
    """
    for way in WAYS:
        for task in tasks:
            yield from looks_of(way, task)
            factor = chosen_factor(done, way, task)
            if factor is not None:
                yield from counted_of(way, task, factor)


def looks_of(way: Way, task: str) -> list[Job]:
    """Returns the trainings that the rate of a way is chosen by."""
    return [_job(way, task, factor, FIRST_LOOK + look) for factor in FACTORS for look in range(LOOKS)]


def counted_of(way: Way, task: str, factor: float) -> list[Job]:
    """Returns the counted trainings of a way at a rate."""
    return [_job(way, task, factor, seed) for seed in range(SEEDS)]


def _job(way: Way, task: str, factor: float, seed: int) -> Job:
    return Job(task, way.trained_as, 1.0 if way.trained_as == "full" else BUDGET, factor, seed)


def chosen_factor(done: Done, way: Way, task: str) -> float | None:
    """Returns the factor with the best mean of the way's measure, of equally good ones the smallest; None before all looks."""
    looks = looks_of(way, task)
    if not all(job in done for job in looks):
        return None
    means = {factor: fmean(done[job][way.measure] for job in looks if job.factor == factor) for factor in FACTORS}
    return max(FACTORS, key=lambda factor: (means[factor], -factor))


def run(job: Job) -> dict[str, Any]:
    """Trains once, and returns the measures, the cost and what the training counted."""
    problem = problem_of(job.task)
    way = next(way for way in WAYS if way.name == job.arm)
    assert way.trainer is not None
    sets = problem.sets()
    outcome = way.trainer(problem.at(job.factor), sets.data, problem.epochs, job.seed)
    part = sets.choice if job.looks else sets.test
    measures = {name: _measured(problem, model, part) for name, model in outcome.models.items()}
    return {**measures, "cost": {"ratio": outcome.cost, **outcome.facts}}


def _measured(problem: Problem, model: nn.Module, part: Part) -> float:
    return 100 * problem.task.evaluate(model, list(zip(part[0].split(AT_ONCE), part[1].split(AT_ONCE), strict=True)))
