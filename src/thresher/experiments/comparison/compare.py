"""Methods against full training and against controls of the same cost, on the same seeds."""

import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thresher.experiments.comparison.job import CONTROLS, FULL, Control, Job
from thresher.experiments.comparison.summary import MARGIN, summarise
from thresher.experiments.comparison.workers import Advanced, Workers
from thresher.experiments.recipes.resolve import task_of
from thresher.experiments.training.loop import TEXTBOOK, with_costs
from thresher.experiments.training.recording import LOSS_BINS
from thresher.experiments.training.specs import Spec
from thresher.experiments.training.store import Store, versions

Results = dict[str, Any]


class Watcher:
    """Told what happens in a comparison; override what is of interest."""

    def planned(self, runs: int, epochs: int) -> None:
        """So many runs of so many epochs there are at most, finished ones included."""

    def started(self, job: Job) -> None:
        """A run begins."""

    def advanced(self, job: Job, epochs: int, metric: float) -> None:
        """So many epochs of a run are over."""

    def finished(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        """A run is over, or was found finished."""

    def shared(self, job: Job) -> None:
        """A control turned out to be that of another method too: one run fewer."""


def compare(
    task: str,
    methods: Sequence[Spec],
    seeds: Sequence[int],
    epochs: int,
    out: Path,
    *,
    data: Path | None = None,
    jobs: int = 2,
    controls: Sequence[Control] = CONTROLS,
    margin: float = MARGIN,
    track: str | None = None,
    watcher: Watcher | None = None,
) -> Results:
    """Train every method with every seed, `full` as well, and for each such run controls of the same cost.

    The controls of a run are a fresh random subset each epoch, `UniformSubset(keep=cost)`, and full data for a share `cost` of
    the epochs, the learning rate decaying within them; cost is what that run turned out to cost in forward and backward passes.
    Methods whose costs agree in three digits after the point share their controls. Finished runs are kept in `out` and not
    repeated, so the same call goes on where it was stopped.

    Args:
        task: See `tasks.task_of`.
        methods: What to compare; `full` is added where it is missing.
        seeds: Distinct; every method gets the same initial weights and shuffling for the same seed.
        epochs: Of every run.
        out: Folder for runs/, comparison.json and results.json.
        data: A folder with the data, for tasks that take one.
        jobs: Processes side by side, one torch thread each.
        controls: Which kinds of controls to train.
        margin: See `summarise`; another margin over finished runs trains nothing anew.
        track: A tracker of accelerate that is told of every epoch, such as "tensorboard"; its files go to `out`/trackers.
        watcher: Told what happens.

    Returns:
        The content of results.json: task, epochs, device, versions, margin, loss_bins, runs and summary.

    Raises:
        ValueError: Something that was asked for is not possible; mostly before anything runs.
        FileNotFoundError: The data is not there; the message says where to get it.
        RunError: A run failed; those that were finished are kept.
    """
    if not seeds or epochs < 1 or jobs < 1:
        raise ValueError(f"compare: needs a seed, and 1 or more epochs and jobs; got {list(seeds)}, {epochs} and {jobs}")
    if not margin > 0:
        raise ValueError(f"compare: `margin` must be above 0, got {margin}")
    if track is not None:
        check_tracker(track)
    folder = task_of(task).find(data)
    identity = {"task": task, "epochs": epochs, "recipe": task_of(task).recipe, "versions": versions()}
    store = Store(out, identity)
    comparison = _Comparison(store, methods, seeds, controls, watcher or Watcher())
    comparison.watcher.planned(comparison.expected, epochs)
    where = {"samples": store.runs, "track": track, "track_to": out / "trackers"}
    with Workers(jobs, task=task, epochs=epochs, folder=folder, **where) as workers:
        comparison.work(workers)
    runs = comparison.results()
    device = ", ".join(sorted({run.pop("device") for run in runs}))
    results = {
        "task": task,
        "epochs": epochs,
        "device": device,
        "versions": versions(),
        "margin": margin,
        "loss_bins": LOSS_BINS.tolist(),
        "runs": runs,
        "summary": summarise(runs, margin),
    }
    store.save_results(results)
    return results


def check_tracker(name: str) -> None:
    """Raise ValueError where accelerate does not know a tracker, or its package is not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = [str(tracker) for tracker in get_available_trackers()]
    if name not in available:
        why = "its package is not installed" if name in LOGGER_TYPE_TO_CLASS else "accelerate has no such tracker"
        raise ValueError(f"--track {name}: {why}; installed: {', '.join(available) or 'none'}")


class _Comparison:
    """Which runs are waiting, and which are done."""

    def __init__(
        self, store: Store, methods: Sequence[Spec], seeds: Sequence[int], kinds: Sequence[Control], watcher: Watcher
    ) -> None:
        others = [spec for spec in methods if spec.name != FULL.name]
        self.watcher = watcher
        self._store = store
        self._asked = [Job.of(spec, seed) for spec in (FULL, *others) for seed in seeds]
        self._queue = deque(self._asked)
        self._done: dict[str, dict[str, Any]] = {}
        self._kinds = kinds
        self._controls: dict[str, list[Job]] = {}

    @property
    def expected(self) -> int:
        """Runs, with the controls that there are where no two methods share them."""
        return len(self._asked) + len(self._kinds) * sum(job.needs_control for job in self._asked)

    def work(self, workers: Workers) -> None:
        """Train until nothing is waiting."""
        while True:
            while workers.free and (job := self._next()) is not None:
                workers.start(job)
                self.watcher.started(job)
            if not workers.busy:
                return
            event = workers.next_event()
            if isinstance(event, Advanced):
                self.watcher.advanced(event.job, event.epochs, event.metric)
            else:
                self._store.save_run(event.job.key, event.run)
                self._finish(event.job, event.run, reused=False)

    def results(self) -> list[dict[str, Any]]:
        """All runs with costs that can be compared, controls after the run that they are of."""
        runs = []
        for asked in self._asked:
            runs.append(self._run(asked))
            runs += [self._run(job) | {"control_of": asked.label} for job in self._controls.get(asked.key, [])]
        return runs

    def _next(self) -> Job | None:
        """The next job that is not in the store already."""
        while self._queue:
            job = self._queue.popleft()
            run = self._store.run(job.key)
            if run is None:
                return job
            self._finish(job, run, reused=True)
        return None

    def _finish(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        self._done[job.key] = run
        self.watcher.finished(job, run, reused=reused)
        if not all(asked.key in self._done for asked in self._asked if asked.spec == FULL):
            return
        for asked in self._asked:
            if asked.needs_control and asked.key in self._done and asked.key not in self._controls:
                self._add_controls(asked)

    def _add_controls(self, asked: Job) -> None:
        known = {job.key for jobs in self._controls.values() for job in jobs}
        cost = self._run(asked)["cost"]["ratio"]
        self._controls[asked.key] = [Job.control(kind, asked.seed, cost) for kind in self._kinds]
        for job in self._controls[asked.key]:
            if job.key in known:
                self.watcher.shared(job)
            else:
                self._queue.append(job)

    def _run(self, job: Job) -> dict[str, Any]:
        """A finished run, its cost by one backward/forward ratio for all: the median of those that the full runs measured.

        Each run measures its own over a few steps, and that is noisy: with its own ratio, a run would be held against a
        control of a cost that depends on what else the machine did. Measured once, it stays with the folder.
        """
        if self._store.backward_to_forward is None:
            full = [self._done[job.key] for job in self._asked if job.spec == FULL]
            measured = [run["cost"]["backward_to_forward"] or TEXTBOOK for run in full]
            self._store.backward_to_forward = statistics.median(measured)
        ratio = self._store.backward_to_forward
        run = with_costs(self._done[job.key], ratio)
        if (samples := self._store.samples(job.key)) is not None:
            run |= {"samples": samples}
        return run | {"cost": run["cost"] | {"backward_to_forward": ratio}}
