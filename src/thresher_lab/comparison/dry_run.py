"""What a comparison would train, and about how long: the comparison itself, with workers that train nothing.

A short probe gives the prices: an epoch of full training, an evaluation, the start of a process, and the share of the time that
each method takes. Times are those of a machine that does nothing else.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thresher.methods import requirements_of
from thresher_lab.advise.pace import Pace, torch_threads
from thresher_lab.advise.probe import Probe, Says, chooses_in_forward, quietly
from thresher_lab.comparison.compare import JOBS, LOOK_SEEDS, ComparedRuns, Watcher, folder_identity
from thresher_lab.comparison.controls import FULL_TRAINING, Control, Job, Rates
from thresher_lab.comparison.summary import left_out_sentence
from thresher_lab.comparison.workers import Finished, Slots
from thresher_lab.recipes.running import task_of
from thresher_lab.tasks.script import errors_placed
from thresher_lab.training.loop import TEXTBOOK, Clock, rehearse, sizes_of, with_costs
from thresher_lab.training.processes import number_of_processes
from thresher_lab.training.specs import Composition, Spec
from thresher_lab.training.store import LOOKS, ReadOnlyStore

PROBE_SECONDS = 20.0
"""Time limit for the epochs of the probe, in seconds."""
BEGIN = """
import torch, thresher_lab.training.loop, thresher_lab.comparison.workers
from thresher_lab.training.loop import StepMemory
StepMemory(torch.device("cpu"))
"""
"""What a worker imports and sets up before it trains."""


@dataclass(frozen=True)
class Passes:
    """What a method would do to a training.

    Attributes:
        time: Time of its epochs as a share of those of full training.
        forward: Forward passes as a share of those of full training.
        backward: Backward passes, likewise.
    """

    time: float = 1.0
    forward: float = 1.0
    backward: float = 1.0


@dataclass(frozen=True)
class Prices:
    """Seconds that the parts of a comparison take on an idle machine.

    Attributes:
        imports: Seconds that the imports take, in the command itself and in each process.
        start: Seconds until a process can train after its imports: reading the data, and what is made once.
        run: Seconds to prepare a run.
        epoch: Seconds that full training takes for an epoch, without evaluation.
        evaluation: Seconds of an evaluation.
        trace: Seconds to trace the model, in runs that choose in the forward pass of training.
        pace: Times of a step of full training.
        methods: What each method would do, by label; a method that is not there is taken for full training.
    """

    imports: float
    start: float
    run: float
    epoch: float
    evaluation: float
    trace: float
    pace: Pace
    methods: Mapping[str, Passes] = field(default_factory=dict[str, Passes])

    def passes(self, job: Job) -> Passes:
        """Returns what the method of a run would do.

        Args:
            job: The run.
        """
        if job.spec.name == "uniform" and not isinstance(job.spec, Composition) and "keep" in job.spec.given:
            keep, in_batches = job.spec.given["keep"], job.spec.batch.get("spend") == "batches"
            step = self.pace.step(self.pace.compute * self.pace.of_smaller(keep), keep) / self.pace.full if in_batches else keep
            return Passes(step, keep, keep)
        return self.methods.get((job.spec != FULL_TRAINING and job.method) or job.spec.label, Passes())

    def seconds(self, job: Job, epochs: int) -> float:
        """Returns the seconds of a run, without the start of its process.

        Args:
            job: The run.
            epochs: Number of epochs of full training.
        """
        trace = self.trace if chooses_in_forward(job.spec) else 0.0
        return self.run + trace + self.training(job, epochs) + job.epochs(epochs) * self.evaluation

    def training(self, job: Job, epochs: int) -> float:
        """Returns the seconds of the steps of a run, see `seconds`."""
        return job.share * epochs * self.epoch * self.passes(job).time


class DryWorkers(Slots):
    """Workers that train nothing: their clock goes on by the seconds that a run would take.

    Args:
        count: Number of processes.
        seconds: Function that returns the seconds of a run.
        outcome: Function that returns the results of a run.
        start: Seconds until a new process can train.

    Attributes:
        wall_s: Seconds until the last event.
        cpu_s: Seconds of all processes together.
    """

    def __init__(
        self, count: int, seconds: Callable[[Job], float], outcome: Callable[[Job], dict[str, Any]], start: float
    ) -> None:
        super().__init__(count)
        self._seconds, self._outcome, self._start = seconds, outcome, start
        self._processes = self._begun = 0
        self.wall_s = self.cpu_s = 0.0

    def start(self, job: Job) -> None:
        """Hands a job to an idle process, or to a new one where none is idle."""
        new = self._processes == len(self._busy)
        self._processes += new
        self._begun += 1
        took = self._seconds(job) + new * self._start
        self.cpu_s += took
        self._busy[self.wall_s + took, self._begun] = job

    def _receive(self) -> tuple[Any, Finished]:
        """Returns the job that is over first, and sets the clock to its end."""
        first = self.wall_s, _ = min(self._busy)
        return first, Finished(self._busy[first], self._outcome(self._busy[first]))


class _Notes(Watcher):
    """Keeps what would run, in the order in which it would be over."""

    def __init__(self) -> None:
        self.runs: list[tuple[Job, bool]] = []
        self.without: list[str] = []

    def finished(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        """Keeps a run, and whether it is finished already."""
        self.runs.append((job, reused))

    def left_out(self, method: str, control: Control, why: str) -> None:
        """Keeps which control is left out."""
        self.without.append(left_out_sentence({"method": method, "control": control, "why": why}))


def dry_run(
    task: str,
    methods: Sequence[Spec],
    seeds: Sequence[int],
    epochs: int,
    out: Path,
    *,
    data: Path | None = None,
    jobs: int | None = None,
    controls: Sequence[Control] | None = None,
    factors: Sequence[float] = (),
    says: Says = quietly,
) -> dict[str, Any]:
    """Returns what `compare` would train, and about how long; nothing is written, and nothing is trained that is kept.

    Args:
        task: Name of the task.
        methods: Methods to compare.
        seeds: Random seeds.
        epochs: Number of epochs of every run.
        out: Folder of the comparison; finished runs in it are not trained again.
        data: Folder with the data, for tasks that take one.
        jobs: Number of processes that train side by side. Default: 2.
        controls: Kinds of controls to train. Default: as in `compare`.
        factors: Factors on the learning rate that every arm is tried with first. Default: none.
        says: Function that is called with a line about what is done now. Default: none.

    Returns:
        Plain values: `runs` with name, label, epochs, seconds (without the start of a process), control and finished; `wall_s`
        and `cpu_s` of all that is not finished; `jobs`, `cores`, `left_out` (sentences), `not_estimated` (labels of methods
        that are taken to last as long as full training), and `looks` where rates are tried: the number of runs, how many of
        them are finished, and the same times of them together.

    Raises:
        ValueError: An argument is not possible, or several processes were started to train together.
        FileNotFoundError: The data is missing.
    """
    if number_of_processes() > 1:
        raise ValueError("--dry-run: give the command by itself; it says how long one process or several side by side take")
    identity = folder_identity(task, epochs)
    store = ReadOnlyStore(out, identity)
    prices = measured_prices(task, methods, epochs, data=data, says=says)
    how: dict[str, Any] = {"jobs": jobs or JOBS, "controls": controls}
    plan = schedule(store, methods, seeds, epochs, prices, **how)
    looks = [
        schedule(
            ReadOnlyStore(out / LOOKS, identity), methods, LOOK_SEEDS, epochs, prices, rates=Rates(everywhere=factor), **how
        )
        for factor in factors
    ]
    labels = {spec.label for spec in methods} - {FULL_TRAINING.label}
    plan |= {"not_estimated": sorted(labels - prices.methods.keys())}
    return plan | ({"looks": _together(looks)} if looks else {})


def _together(looks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the number of runs of several schedules, those that are finished, and their times."""
    finished = [run["finished"] for one in looks for run in one["runs"]]
    times = {
        name: sum(one[name] for one in looks if not all(run["finished"] for run in one["runs"])) for name in ("wall_s", "cpu_s")
    }
    return {"runs": len(finished), "finished": sum(finished), **times}


def schedule(
    store: ReadOnlyStore,
    methods: Sequence[Spec],
    seeds: Sequence[int],
    epochs: int,
    prices: Prices,
    *,
    jobs: int,
    controls: Sequence[Control] | None = None,
    rates: Rates | None = None,
) -> dict[str, Any]:
    """Returns which runs there would be, in which order, and how long they take together; see `dry_run`.

    Args:
        store: Finished runs.
        methods: Methods to compare.
        seeds: Random seeds.
        epochs: Number of epochs of every run.
        prices: Seconds of the parts.
        jobs: Number of processes that train side by side.
        controls: Kinds of controls to train. Default: as in `compare`.
        rates: Factors on the learning rate. Default: 1 for all.
    """
    cores = available_cores()
    crowded = max(1.0, jobs / cores)
    notes = _Notes()
    workers: Any = DryWorkers(
        jobs,
        lambda job: crowded * prices.seconds(job, epochs),
        lambda job: outcome(job, prices, epochs),
        crowded * (prices.imports + prices.start),
    )
    ComparedRuns(store, methods, seeds, controls, notes, rates).work(workers)
    labels = [FULL_TRAINING.label, *(spec.label for spec in methods)]
    runs = [
        {
            "name": job.name,
            "label": f"{job.label}{f' of {job.method}' * bool(job.method)}",
            "epochs": job.epochs(epochs),
            "seconds": prices.seconds(job, epochs),
            "control": job.label not in labels,
            "finished": reused,
        }
        for job, reused in notes.runs
    ]
    runs.sort(key=lambda run: len(labels) if run["control"] else labels.index(run["label"]))
    times = {"wall_s": prices.imports + workers.wall_s, "cpu_s": prices.imports + workers.cpu_s / crowded}
    return {"runs": runs, **times, "jobs": jobs, "cores": cores, "left_out": notes.without}


def outcome(job: Job, prices: Prices, epochs: int = 1) -> dict[str, Any]:
    """Returns as much of the results of a run as a comparison needs to find its controls.

    Args:
        job: The run.
        prices: Prices with the passes of its method.
        epochs: Number of epochs of full training. Default: 1.
    """
    passes, whole = prices.passes(job), 1_000_000
    ratio = prices.pace.backward / prices.pace.forward if prices.pace.backward and prices.pace.forward else TEXTBOOK
    counts = {"forward": round(job.share * whole * passes.forward), "backward": round(job.share * whole * passes.backward)}
    cost = counts | {"full_forward": whole, "full_backward": whole, "backward_to_forward": ratio}
    took = prices.training(job, epochs)
    return with_costs({"cost": cost, "history": [], "cpu_s": took, "wall_s": took}, ratio)


def measured_prices(
    task: str, methods: Sequence[Spec], epochs: int, *, data: Path | None = None, says: Says = quietly
) -> Prices:
    """Returns the seconds of the parts of a comparison, from a short probe.

    Args:
        task: Name of the task.
        methods: Methods to compare.
        epochs: Number of epochs of every run.
        data: Folder with the data, for tasks that take one.
        says: Function that is called with a line about what is done now. Default: none.
    """
    says("starting a process, and reading the data")
    imports, trainable = process_seconds(), task_of(task)
    specs = [FULL_TRAINING, *(spec for spec in methods if spec != FULL_TRAINING)]
    with torch_threads(1), errors_placed(trainable):
        loaded, loading = _timed(lambda: trainable.load(trainable.find(data)))
        rehearsed = [_timed(lambda: rehearse(trainable, loaded, FULL_TRAINING, seed=0, epochs=epochs))[1] for _ in range(2)]
        torch.manual_seed(0)
        training = trainable.training(loaded, 0)
        probe = Probe(training, epochs=epochs, seed=0, says=says)
        probe.try_evaluate()
        pace, _, rows = probe.forecasts(specs, PROBE_SECONDS)
        _, evaluation = _timed(lambda: training.evaluate(training.model))
    size = sizes_of(training.loader)[1]
    by_label = {spec.label: spec for spec in specs}
    measured = {
        row["method"]: _passes_of(by_label[row["method"]], row, size, traced=probe.fallback is None)
        for row in rows
        if row["refused"] is None
    }
    full = measured[FULL_TRAINING.label].time
    epoch = len(training.loader) * pace.full * full
    shares = {name: Passes(one.time / full, one.forward, one.backward) for name, one in measured.items()}
    first, run = rehearsed  # the first one in a process imports more
    return Prices(imports, loading + max(0.0, first - run), run, epoch, evaluation, probe.trace_s, pace, shares)


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_seconds() -> float:
    """Returns the seconds that a worker takes to begin: CPU seconds where the system counts those of other processes."""
    before, begun = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-c", BEGIN], check=True, capture_output=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return spent or time.perf_counter() - begun


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of a function and its seconds: CPU seconds where the work is done on the CPU."""
    clock = Clock()
    with clock.running():
        result = call()
    return result, clock.wall_s if torch.accelerator.is_available() else clock.cpu_s


def _passes_of(spec: Spec, row: Mapping[str, Any], size: int, *, traced: bool) -> Passes:
    """Returns what a method would do, from its entry in the advice, with batches of this size."""
    share = 1 - row["saves"]
    if row["stage"] != "batch":
        kept = 1 - row["left_out"]
        return Passes(share, kept + row["forwarded"], kept)
    method: Any = spec.create()
    count = method.count(size)
    keep = count / size if count is not None else getattr(method, "expected_keep", math.nan)
    if math.isnan(keep):
        return Passes(share, share, share)
    if not requirements_of(method).signals:
        return Passes(share, keep, keep)
    return Passes(share, 1.0 if traced and spec.settings.get("forward_passes") != "twice" else 1 + keep, keep)
