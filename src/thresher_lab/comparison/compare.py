"""Trains methods, full training and controls of the same cost with the same seeds; stops when all is decided, if asked."""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any

from thresher_lab.advise.budget import equal_seeds
from thresher_lab.comparison.controls import (
    CONTROLS,
    FULL_TRAINING,
    ON_REQUEST,
    SAME_TIME,
    Arm,
    Control,
    Job,
    Rates,
    as_placebo,
    has_controls,
    kind_of,
    same_time_share,
    why_no_placebo_of,
)
from thresher_lab.comparison.ray_workers import Cluster, RayWorkers
from thresher_lab.comparison.statistics import LEAST_SEEDS
from thresher_lab.comparison.summary import DECIDED, margin_of, summarize
from thresher_lab.comparison.workers import (
    Advanced,
    RunRefusedError,
    RunValueError,
    Slots,
    TogetherWorkers,
    Warned,
    Workers,
)
from thresher_lab.recipes.running import task_of
from thresher_lab.training.folders import sole_use
from thresher_lab.training.loop import TEXTBOOK, with_costs
from thresher_lab.training.processes import check_joined, number_of_processes, of_first
from thresher_lab.training.samples import LOSS_BINS
from thresher_lab.training.specs import Spec
from thresher_lab.training.store import LOOKS, RUNS, Store, versions

JOBS = 2
"""Number of runs that are trained side by side by default."""


SEEDS_OF_LENGTH = 2
"""Number of seeds, the first ones, whose times set the length of the control in the same time."""


class Watcher:
    """Functions that are called as a comparison proceeds; subclasses override those that they need."""

    def planned(self, runs: int, epochs: int, look: float | None = None) -> None:
        """Is called once, with the largest possible number of runs (finished ones included) and the epochs of each.

        While learning rates are tried, it is called for each, with the factor `look`.
        """

    def started(self, job: Job) -> None:
        """Is called when a run begins."""

    def advanced(self, job: Job, epochs: int, metric: float) -> None:
        """Is called after each epoch of a run, with the number of epochs so far and the value of the metric."""

    def finished(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        """Is called when a run is over, or was found finished (`reused`)."""

    def shared(self, job: Job) -> None:
        """Is called when a control is the same as that of another method, which makes one run fewer."""

    def left_out(self, method: str, control: Control, why: str) -> None:
        """Is called when a control that was not asked for by name is not trained for a method, with the reason."""

    def warned(self, text: str, run: str) -> None:
        """Is called with a warning in the process of a run, and the name of the run; writes it to the standard error."""
        sys.stderr.write(f"{text}\n")

    def dropped(self, job: Job) -> None:
        """Is called when the training of a run that was started is refused, which makes one run fewer."""


def compare(
    task: str,
    methods: Sequence[Spec],
    seeds: Sequence[int],
    epochs: int,
    out: Path,
    *,
    data: Path | None = None,
    jobs: int | None = None,
    controls: Sequence[Control] | None = None,
    margin: float | None = None,
    until_decided: bool = False,
    rates: Rates | None = None,
    track: str | None = None,
    cluster: Cluster | None = None,
    watcher: Watcher | None = None,
    on_results: Callable[[bool], None] | None = None,
) -> dict[str, Any]:
    """Trains every method and full training with every seed, and for each run of a method controls of the same cost.

    The controls of a run, at its counted cost, are a fresh random subset in each epoch; full data for a share of the epochs,
    within which the learning rate decays; as many steps as full training, with smaller batches that are drawn uniformly; and a
    placebo: the method with its signals permuted among the samples. Methods whose costs agree in three digits after the point
    share their controls, except for the placebo. On request there is one more: all epochs on one random subset. A further
    control has the time of the method: full data for as many epochs as fit into it. The times of the first two seeds set that
    length, which is kept, also for seeds that are added later. Runs go seed by seed, and results.json is written after each of
    them. Finished runs are kept in `out`, and the same call goes on where it was stopped. Several processes of torchrun or
    accelerate launch call it and train each run together.

    Args:
        task: Name of the task, see `recipes.running.task_of`.
        methods: Methods to compare; full training is added where it is missing.
        seeds: Distinct random seeds; a seed gives all methods the same initial weights and shuffling.
        epochs: Number of epochs of every run, 1 or more.
        out: Folder for runs/, comparison.json and results.json.
        data: Folder with the data, for tasks that take one.
        jobs: Number of processes that train side by side. Default: 2; 1 where several train a run; on a cluster, as many as
            it has room for.
        controls: Kinds of controls to train. Default: all of `CONTROLS` that are possible, without those in `ON_REQUEST`; the
            results name those that are not possible.
        margin: Loss that does not matter, above 0, see `summarize`; another margin trains nothing again. Default: `margin_of`.
        until_decided: Whether to stop as soon as every verdict is decided, by intervals that are valid at every look. It looks
            after each seed from the third on, when all runs with it and those before are finished. Default: False.
        rates: Factors on the learning rate by arm, see `chosen_rates`. Default: 1 for all.
        track: Name of a tracker of accelerate, such as "tensorboard", which logs every epoch to `out`/trackers. Default: none.
        cluster: Cluster of Ray that trains the runs. Default: processes of this machine.
        watcher: Object whose functions are called as runs proceed. Default: none.
        on_results: Function that is called each time results.json was written before the end, with whether training goes on.
            Default: none.

    Returns:
        The content of results.json, with the keys runs and summary among others.

    Raises:
        ValueError: An argument is not possible, or the folder is in use; most errors come before anything is trained.
        FileNotFoundError: The data is missing.
        RunError: A run failed; finished runs are kept.
    """
    if not seeds or epochs < 1 or (jobs is not None and jobs < 1):
        raise ValueError(
            f"compare: needs a seed, and 1 or more epochs and jobs; got {list(seeds)}, {epochs} and {jobs}"
        )
    check_joined()
    if (processes := number_of_processes()) > 1 and (jobs not in (None, 1) or cluster):
        raise ValueError(
            f"{'--ray' if cluster else f'--jobs {jobs}'}: {processes} processes train each run together, one run after the "
            "other. Leave the option out, or start the command by itself to train runs side by side."
        )
    if until_decided and len(seeds) <= LEAST_SEEDS:
        raise ValueError(
            f"--until decided: needs more than {LEAST_SEEDS} seeds to choose from, such as --seeds 0-11; got {list(seeds)}"
        )
    if margin is not None and not margin > 0:
        raise ValueError(f"compare: `margin` must be above 0, got {margin}")
    if track is not None:
        check_tracker(track)
    for spec in filter(has_controls, methods if "placebo" in (controls or ()) else ()):
        as_placebo(spec)
    watcher = watcher or Watcher()
    where = {"task": task, "epochs": epochs, "folder": task_of(task).find(data)}
    workers = _workers(jobs, watcher, cluster, out, **where, trackers=track)
    if isinstance(workers, TogetherWorkers) and not workers.leads(
        [Job.of(one, seeds[0]) for one in (FULL_TRAINING, *methods)]
    ):
        return of_first(None)
    with sole_use(out):
        comparison = ComparedRuns(
            Store(out, folder_identity(task, epochs)), methods, seeds, controls, watcher, rates
        )
        watcher.planned(comparison.expected, epochs, comparison.rates.everywhere)
        ends = Ending(comparison, margin) if until_decided else None

        def save(goes_on: bool = True) -> None:
            written = _save_results(comparison, task, epochs, margin, ends, running=True)
            if written and on_results is not None:
                on_results(goes_on)

        try:
            with workers:
                comparison.work(workers, save, ends)
        except BaseException:
            save(False)
            raise
        return of_first(_save_results(comparison, task, epochs, margin, ends))


def _workers(
    jobs: int | None, watcher: Watcher, cluster: Cluster | None, out: Path, **where: Any
) -> Any:
    """Returns what trains: processes of this machine, a cluster, or the processes that were started to train together."""
    if cluster is not None:
        return RayWorkers(jobs, cluster, out, **where)
    where |= {"samples": out / RUNS, "track_to": out / "trackers"}
    if number_of_processes() == 1:
        return Workers(jobs or JOBS, **where)
    return TogetherWorkers(
        lambda event: watcher.advanced(event.job, event.epochs, event.metric), **where
    )


def folder_identity(task: str, epochs: int) -> dict[str, Any]:
    """Returns what all runs of a folder have in common.

    Args:
        task: Name of the task.
        epochs: Number of epochs of every run.
    """
    recipe = task_of(task).recipe
    return {
        "task": task,
        "epochs": epochs,
        "recipe": recipe,
        "versions": versions(),
        "processes": number_of_processes(),
    }


def _save_results(
    comparison: "ComparedRuns",
    task: str,
    epochs: int,
    margin: float | None,
    ends: "Ending | None",
    *,
    running: bool = False,
) -> dict[str, Any]:
    """Writes results.json, and returns its content; empty if no run can be compared yet."""
    runs = comparison.runs()
    if not runs:
        return {}
    if ends is None:
        looks = comparison.store.looks_with({len(comparison.seeds)})
    else:
        runs = [run for run in runs if run["seed"] in (ends.decided or comparison.seeds)]
        # A later command without `until_decided` corrects its verdicts for these looks.
        comparison.store.looks_with({len({run["seed"] for run in runs})})
        looks = 1
    alike = equal_seeds(runs)
    runs = [run for run in runs if not any(run["seed"] in seeds[1:] for seeds in alike)]
    margin = margin_of(runs) if margin is None else margin
    device = ", ".join(sorted({run.pop("device") for run in runs}))
    classes = next(filter(None, [run.pop("classes", None) for run in runs]), None)
    results = {
        "task": task,
        "epochs": epochs,
        "device": device,
        "processes": number_of_processes(),
        "versions": versions(),
        "margin": margin,
        "looks": looks,
        "rates": {"factors": [*rates.factors], "seeds": [*rates.seeds]}
        if (rates := comparison.rates).factors
        else None,
        "loss_bins": LOSS_BINS.tolist(),
        "classes": classes,
        "left_out": comparison.list_left_out(),
        "equal_seeds": alike,
        "runs": runs,
        "summary": summarize(runs, margin, looks, any_look=ends is not None),
    }
    if ends is not None:
        results["until"] = DECIDED
    if running:
        results["running"] = {"finished": comparison.finished, "runs": comparison.expected}
    comparison.store.save_results(results)
    return results


def check_tracker(name: str) -> None:
    """Raises ValueError if accelerate does not know a tracker, or if the package of the tracker is not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = [str(tracker) for tracker in get_available_trackers()]
    if name not in available:
        if name in LOGGER_TYPE_TO_CLASS:
            why = "its package is not installed"
        else:
            why = "accelerate has no such tracker"
        raise ValueError(f"--track {name}: {why}; installed: {', '.join(available) or 'none'}")


class ConcurrentRuns:
    """Measures the mean number of other runs that are in progress during a run."""

    def __init__(self) -> None:
        self._at = self._sum = 0.0
        self._running: dict[str, tuple[float, float]] = {}

    def begin(self, key: str) -> None:
        """Notes that a run begins."""
        self._running[key] = self._now()

    def end(self, key: str) -> float:
        """Notes that a run has ended, and returns the mean number of others."""
        now, total = self._now()
        began, before = self._running.pop(key)
        if now > began:
            return round((total - before) / (now - began) - 1, 2)
        return 0.0

    def _now(self) -> tuple[float, float]:
        """Returns the time, and the sum of the times of all runs until then."""
        now = time.monotonic()
        self._sum += (now - self._at) * len(self._running)
        self._at = now
        return now, self._sum


class ComparedRuns:
    """The runs of a comparison: those that wait, and those that are done.

    Args:
        store: Files of the comparison.
        methods: Methods to compare.
        seeds: Random seeds.
        kinds: Kinds of controls; None for all that are possible.
        watcher: Object whose functions are called as runs proceed.
        rates: Factors on the learning rate. Default: 1 for all.

    Attributes:
        store: Files of the comparison.
        seeds: Random seeds, in the order of training.
        rates: Factors on the learning rate.
        left_out: Reasons for which controls are left out, by the label of the method and the kind of the control.
    """

    def __init__(
        self,
        store: Store,
        methods: Sequence[Spec],
        seeds: Sequence[int],
        kinds: Sequence[Control] | None,
        watcher: Watcher,
        rates: Rates | None = None,
    ) -> None:
        others = [spec for spec in methods if spec != FULL_TRAINING]
        self.watcher = watcher
        self.left_out: dict[tuple[str, Control], str] = {}
        self.store = store
        self.rates = rates or Rates()
        of_full = self.rates.of(FULL_TRAINING.label)
        specs = (FULL_TRAINING, *others)
        self._asked = [
            Job.of(spec, seed, self.rates.of(spec.label), of_full)
            for spec in specs
            for seed in seeds
        ]
        self.seeds = [*seeds]
        self._queue = [*self._asked]
        self._done: dict[str, dict[str, Any]] = {}
        self._refused: dict[str, str] = {}
        self._shared = 0
        self._by_name = kinds is not None
        self._kinds = {spec.label: self._kinds_of(spec, kinds) for spec in (FULL_TRAINING, *others)}
        self._controls: dict[str, dict[Control, Job]] = {}

    @property
    def expected(self) -> int:
        """Number of runs, with the controls, if no further two methods share a control."""
        return sum(1 + len(self._kinds[job.label]) for job in self._asked) - self._shared

    @property
    def finished(self) -> int:
        """Number of finished runs."""
        return len(self._done)

    def list_left_out(self) -> list[dict[str, str]]:
        """Returns the controls that are left out, as results.json lists them."""
        return [
            {"method": method, "control": kind, "why": why}
            for (method, kind), why in self.left_out.items()
        ]

    def work(
        self,
        workers: Slots,
        on_run: Callable[[], None] | None = None,
        ends: Callable[[], bool] | None = None,
    ) -> None:
        """Trains until no run is waiting.

        Args:
            workers: Workers that train.
            on_run: Function that is called after each run that was trained. Default: none.
            ends: Function that returns whether to end now; runs in progress are lost. Default: never.
        """
        concurrent = ConcurrentRuns()
        self._take_finished()
        while ends is None or not ends():
            while workers.free and (job := self._next()) is not None:
                workers.start(job)
                concurrent.begin(job.key)
                self.watcher.started(job)
            if not workers.busy:
                return
            try:
                event = workers.next_event()
            except RunRefusedError as refused:
                concurrent.end(refused.job.key)
                self._refuse(refused)
                continue
            if isinstance(event, Advanced):
                self.watcher.advanced(event.job, event.epochs, event.metric)
            elif isinstance(event, Warned):
                self.watcher.warned(event.text, event.run)
            else:
                run = event.run | {"other_runs": concurrent.end(event.job.key)}
                self.store.save_run(event.job.key, run)
                self._finish(event.job, run, reused=False)
                if on_run is not None:
                    on_run()

    def planned(self, epochs: int) -> list[dict[str, Any]]:
        """Returns all runs, those that are finished and those that are not; nothing is trained.

        Args:
            epochs: Number of epochs of full training.

        Returns:
            `name`, `of` (label of the method), `arm` (label and kind of control), `control` (bool), `finished`, `seconds` (of a
            finished run, else None) and `epochs`; None for a control whose length follows from a run that is not finished.
        """
        self._take_finished()
        runs = []
        listed = set()
        for asked in self._asked:
            controls = self._controls.get(asked.key, {})
            arms = {kind: controls.get(kind) for kind in self._kinds_left(asked)}
            for kind, job in ({None: asked} | arms).items():
                arm = asked.label if kind is None else f"{kind} of {asked.label}"
                run = {
                    "name": f"{arm}, seed {asked.seed}",
                    "of": asked.label,
                    "arm": arm,
                    "control": kind is not None,
                    "finished": False,
                    "seconds": None,
                    "epochs": None,
                }
                if job is not None:
                    if job.key in listed:
                        continue
                    listed.add(job.key)
                    run["epochs"] = job.epochs(epochs)
                    if done := self._done.get(job.key):
                        run |= {"finished": True, "seconds": done["wall_s"]}
                runs.append(run)
        return runs

    def whole_seeds(self) -> list[int]:
        """Returns the first seeds, up to one of which a run is not finished."""
        waiting = {asked.seed for asked in self._asked if not self._is_whole(asked)}
        return [*takewhile(lambda seed: seed not in waiting, self.seeds)]

    def _is_whole(self, asked: Job) -> bool:
        controls = self._controls.get(asked.key, {})
        return asked.key in self._done and all(
            kind in controls and controls[kind].key in self._done
            for kind in self._kinds_left(asked)
        )

    def runs(self) -> list[dict[str, Any]]:
        """Returns the finished runs that full training has finished for, with costs that can be compared.

        The controls of a run follow it. There are none before the cost of a backward pass is known.
        """
        if not self._has_costs():
            return []
        seeds = {
            job.seed for job in self._asked if job.spec == FULL_TRAINING and job.key in self._done
        }
        runs = []
        for asked in self._asked:
            if asked.seed not in seeds or asked.key not in self._done:
                continue
            runs.append(self._run(asked))
            controls = self._controls.get(asked.key, {})
            for kind in self._kinds_left(asked):
                if kind not in controls or controls[kind].key not in self._done:
                    continue
                run = self._run(controls[kind]) | {"control_of": asked.label}
                if kind == SAME_TIME:
                    run["length"] = self.store.lengths[asked.label]
                runs.append(run)
        return runs

    def _kinds_left(self, asked: Job) -> list[Control]:
        """Returns the kinds of controls of a method that are not left out."""
        label = asked.label
        return [kind for kind in self._kinds[label] if (label, kind) not in self.left_out]

    def _kinds_of(self, spec: Spec, kinds: Sequence[Control] | None) -> Sequence[Control]:
        """Returns the kinds of controls that a method has; of all of them, where none are asked for by name."""
        if not has_controls(spec):
            return ()
        if kinds is None:
            asked = [kind for kind in CONTROLS if kind not in ON_REQUEST]
        else:
            asked = kinds
        if self.rates.everywhere is not None:  # a placebo has the rate of its method
            return [kind for kind in asked if kind != "placebo"]
        if kinds is not None:
            return sorted(kinds, key=lambda kind: kind != SAME_TIME)
        reason = why_no_placebo_of(spec)
        if reason:
            self._leave_out(spec.label, "placebo", reason)
        return [kind for kind in asked if kind != "placebo" or not reason]

    def _leave_out(self, method: str, kind: Control, why: str) -> None:
        if (method, kind) not in self.left_out:
            self.left_out[method, kind] = why
            self.watcher.left_out(method, kind, why)

    def _refuse(self, refused: RunRefusedError) -> None:
        """Leaves out smaller batches that cannot be made: for all seeds of a method, because seeds are compared in pairs.

        Raises:
            RunRefusedError: They were asked for by name, or are what the method itself makes.
        """
        if self._by_name or any(job.key == refused.job.key for job in self._asked):
            raise refused
        self._refused[refused.job.key] = refused.why
        self.watcher.dropped(refused.job)
        for asked in self._asked:
            self._check_refused(asked)

    def _check_refused(self, asked: Job) -> None:
        for kind, job in self._controls.get(asked.key, {}).items():
            if job.key in self._refused:
                self._leave_out(asked.label, kind, self._refused[job.key])

    def _next(self) -> Job | None:
        """Returns the next job whose run is not in the store; None if there is none.

        Those in the store come first, so that the time left counts none of them. Then it goes seed by seed: full training and
        what it is compared with run at about the same time, under the same load.
        """
        self._take_finished()
        job = min(self._queue, key=lambda job: self.seeds.index(job.seed), default=None)
        if job is not None:
            self._queue.remove(job)
        return job

    def _take_finished(self) -> None:
        while kept := [
            (job, run) for job in self._queue if (run := self.store.run(job.key)) is not None
        ]:
            for job, run in kept:
                self._queue.remove(job)
                self._finish(job, run, reused=True)

    def _finish(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        self._done[job.key] = run
        self.watcher.finished(job, run, reused=reused)
        if not self._has_costs():
            return
        for asked in self._asked:
            if has_controls(asked.spec) and asked.key in self._done:
                self._add_controls(asked)

    def _add_controls(self, asked: Job) -> None:
        """Adds the controls of a finished run that wait for nothing else."""
        controls = self._controls.setdefault(asked.key, {})
        for kind in self._kinds[asked.label]:
            if kind in controls or (cost := self._share_of(asked, kind)) is None:
                continue
            job = Job.control(kind, asked.seed, cost, asked.spec, self.rates.of(asked.label, kind))
            if any(
                job.key == other.key for jobs in self._controls.values() for other in jobs.values()
            ):
                self._shared += 1
                self.watcher.shared(job)
            else:
                self._queue.append(job)
            controls[kind] = job
        self._check_refused(asked)

    def _share_of(self, asked: Job, kind: Control) -> float | None:
        """Returns the share of full training that a control of a run is given; None before it can be known."""
        if kind != SAME_TIME:
            return self._run(asked)["cost"]["ratio"]
        label = asked.label
        lengths = self.store.lengths
        first = [job for job in self._asked if job.seed in self.seeds[:SEEDS_OF_LENGTH]]
        own, full = (
            [job.key for job in first if job.label == name] for name in (label, FULL_TRAINING.label)
        )
        if label not in lengths and all(key in self._done for key in (*own, *full)):
            if self._done[asked.key].get("device", "cpu") == "cpu":
                clock = "cpu_s"
            else:
                clock = "wall_s"
            share = same_time_share(
                *([self._done[key][clock] for key in keys] for keys in (own, full))
            )
            if share is None:
                self._leave_out(label, kind, "The time of its runs is not known")
                return None
            length = {"share": round(share, 3), "clock": clock, "seeds": len(own)}
            self.store.remember(lengths=lengths | {label: length})
        return self.store.lengths.get(label, {}).get("share")

    def _has_costs(self) -> bool:
        """Returns whether costs can be compared: full training has measured the cost of a backward pass.

        Each run measures the ratio of backward to forward time over a few steps, which is noisy: the cost of a control would
        depend on what else the machine did. All runs have the ratio of full training with the first seed; the folder keeps it.
        """
        full = self._asked[0]
        if self.store.backward_to_forward is None and full.key in self._done:
            measured = self._done[full.key]["cost"]["backward_to_forward"]
            self.store.remember(backward_to_forward=measured or TEXTBOOK)
        return self.store.backward_to_forward is not None

    def _run(self, job: Job) -> dict[str, Any]:
        """Returns a finished run, with its cost by the ratio that all runs have."""
        ratio = self.store.backward_to_forward
        assert ratio is not None
        run = with_costs(self._done[job.key], ratio)
        return (
            run
            | self.store.beside(job.key)
            | {"cost": run["cost"] | {"backward_to_forward": ratio}}
        )


LOOK_SEEDS = (10_000, 10_001)
"""Seeds of the runs that rates are chosen by, and that do not count."""


def chosen_rates(
    task: str,
    methods: Sequence[Spec],
    seeds: Sequence[int],
    epochs: int,
    out: Path,
    factors: Sequence[float],
    **options: Any,
) -> Rates:
    """Tries every arm of a comparison with the same factors on its learning rate, and returns the best factor of each.

    A control is tried at the cost of its method, and a placebo is not tried: it has the rate of its method. Where two factors
    are equally good, the one nearer to 1 is chosen.

    Args:
        task: Name of the task, see `compare`.
        methods: Methods to compare.
        seeds: Seeds that count.
        epochs: Number of epochs of every run.
        out: Folder of the comparison; the runs are in its folder `LOOKS`.
        factors: Factors on the learning rate.
        options: Further arguments of `compare`.

    Raises:
        ValueError: A seed that counts is one of `LOOK_SEEDS`, a factor makes a training fail, or an argument of `compare` is
            not possible.
    """
    if shared := sorted({*seeds} & {*LOOK_SEEDS}):
        raise ValueError(
            f"--rates: tries rates with the seeds {LOOK_SEEDS}, which must not count; leave {shared} out of --seeds"
        )
    metrics: dict[Arm, dict[float, list[float]]] = {}
    for factor in factors:
        try:
            results = compare(
                task,
                methods,
                LOOK_SEEDS,
                epochs,
                out / LOOKS,
                rates=Rates(everywhere=factor),
                **options,
            )
        except RunValueError as error:
            raise ValueError(
                f"--rates: with the factor {factor:g}, {error}. Leave this factor out, if it is the reason."
            ) from error
        for run in results["runs"]:
            arm: Any = (run["control_of"] or run["method"], kind_of(run))
            metrics.setdefault(arm, {}).setdefault(factor, []).append(run["metric"]["value"])
    chosen = {
        arm: max(of, key=lambda factor, of=of: (mean(of[factor]), -abs(factor - 1)))
        for arm, of in metrics.items()
    }
    return Rates(chosen, factors, LOOK_SEEDS)


class Ending:
    """Ends a comparison at the first number of seeds, from the third on, at which every verdict is decided.

    All numbers are looked at in turn, so a command that was stopped ends with the same seeds.

    Args:
        comparison: Runs of the comparison.
        margin: Loss that does not matter; None for that of `margin_of`.

    Attributes:
        decided: The seeds that decided; None before.
    """

    def __init__(self, comparison: ComparedRuns, margin: float | None) -> None:
        self.decided: list[int] | None = None
        self._comparison = comparison
        self._margin = margin
        self._next = LEAST_SEEDS

    def __call__(self) -> bool:
        """Returns whether the finished runs decide."""
        whole = self._comparison.whole_seeds()
        while self.decided is None and self._next <= len(whole):
            seeds = whole[: self._next]
            runs = [run for run in self._comparison.runs() if run["seed"] in seeds]
            margin = margin_of(runs) if self._margin is None else self._margin
            if equal_seeds(runs) or is_decided(summarize(runs, margin, any_look=True)):
                self.decided = seeds
            self._next += 1
        return self.decided is not None


def is_decided(summary: Sequence[dict[str, Any]]) -> bool:
    """Returns whether each method is decided against full training, and against fewer epochs in the same time if it has them.

    Args:
        summary: Rows of `summarize`.
    """
    methods = [row for row in summary if row["control_of"] is None]
    verdicts = methods + [
        row["against"][SAME_TIME] for row in methods if SAME_TIME in row["against"]
    ]
    return all(verdict["finding"] != "unclear" for verdict in verdicts)
