"""The training loop of the experiments: trains one network once and attaches a method as any user does."""

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import thresher
from thresher.cost import Cost
from thresher_lab.training.accumulation import GradientSum, Groups
from thresher_lab.training.confusion import confusion
from thresher_lab.training.processes import (
    combine_counts,
    fresh_accelerator,
    group_by_length,
    number_of_processes,
    of_each_process,
    of_first,
    own_rank,
    shard_loader,
)
from thresher_lab.training.samples import Recording
from thresher_lab.training.specs import Spec
from thresher_lab.training.store import Checkpoint, Stateful
from thresher_lab.training.trainable import Trainable, Training


class Length:
    """The length of a run: all epochs, or a share of them that ends after the nearest step.

    Args:
        share: Share of the epochs to train, (0, 1].
        epochs: Number of epochs of full training.
        samples: Number of samples in an epoch.
        batch_size: Number of samples in every batch of an epoch but the last.

    Attributes:
        steps: Number of steps of each epoch; None for an epoch that is not cut short.
        samples: Number of samples that the whole run trains on, with repeats.
    """

    def __init__(self, share: float, epochs: int, samples: int, batch_size: int) -> None:
        wanted = share * epochs * samples
        whole = min(epochs, int(wanted / samples + 1e-9))
        left = wanted - whole * samples
        rest = max(round(left / batch_size), 0 if whole else 1)
        if rest * batch_size >= samples or samples - left < abs(rest * batch_size - left):
            whole = whole + 1
            rest = 0
        self.steps: list[int | None] = [None] * whole + [rest] * (rest > 0)
        self.samples = whole * samples + rest * batch_size
        self._stretch = len(self.steps) * samples / self.samples

    def progress(self, of_epochs: float) -> float:
        """Returns the share of this run that is done, given the share of its epochs if all of them were whole."""
        return min(1.0, of_epochs * self._stretch)


def is_busy() -> bool | None:
    """Returns whether more work is waiting than there are cores: the load average of the last minute is above their number.

    The work of all programs counts, also that of runs beside this one. None where the system has no load average.
    """
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
    return load > (os.cpu_count() or 1)


class StepMemory:
    """Measures how much memory a step takes at its peak, above what was held before it, on a CPU or a CUDA device.

    On a CPU, torch's profiler notes each allocation, which takes some milliseconds; on CUDA, the allocator has a counter.

    Args:
        device: Device of the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak: int | None = None
        if device.type == "cpu" and _can_profile():
            _start_profiler()

    def of(self, step: Callable[[], bool]) -> bool:
        """Calls a step, measures it, and returns what it returned: whether there was a batch to train on.

        Args:
            step: The step.
        """
        measured = {"cpu": _on_host, "cuda": _on_cuda}.get(self._device.type)
        if measured is None or (measured is _on_host and not _can_profile()):
            return step()
        trained, peak = measured(step, self._device)
        if trained:
            self._peak = peak
        return trained

    def take(self) -> int | None:
        """Returns the peak of the step that was measured since the last call, in bytes; None where there was none."""
        peak = self._peak
        self._peak = None
        return peak


@cache
def _start_profiler() -> None:
    """Lets torch set up its profiler, which takes about a second in each process, so that no step takes that time."""
    _on_host(lambda: True, torch.device("cpu"))


def _can_profile() -> bool:
    """Returns whether torch can note allocations: in the first thread of a process only, and one profiler at a time.

    In several processes it would write to the standard error stream of each.
    """
    first = (
        threading.current_thread() is threading.main_thread()
        and not torch.distributed.is_initialized()
    )
    return first and not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def _on_cuda(step: Callable[[], bool], device: torch.device) -> tuple[bool, int]:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return step(), torch.cuda.max_memory_allocated(device) - before


def _on_host(step: Callable[[], bool], _: torch.device) -> tuple[bool, int]:
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # or torch would write to the standard error stream that it measures
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as noted:
        trained = step()
    results: Any = noted.profiler and noted.profiler.kineto_results
    events = sorted(
        (one.start_ns(), one.nbytes()) for one in results.events() if one.name() == "[memory]"
    )
    return trained, max(accumulate((size for _, size in events), initial=0))


EpochCallback = Callable[[int, float], None]
"""Function that is called after each epoch with the number of epochs done and the metric."""

TEXTBOOK = 2.0
"""Ratio of backward to forward time that is used if a run was too short to measure its own."""

COST_COUNTERS = ("forward", "backward", "refresh", "scoring", "steps")
BETWEEN_SEEDS = 1_000_003
"""Difference of the seeds that processes draw with in the network and in the loading of their samples."""


class Clock:
    """Adds up the wall seconds and CPU seconds of the blocks `with clock.running():`."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.cpu_s = 0.0

    def state_dict(self) -> dict[str, float]:
        """Returns the sums."""
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Restores sums that were saved; later blocks add to them."""
        self.wall_s = state_dict["wall_s"]
        self.cpu_s = state_dict["cpu_s"]

    def take_out(self, spent: Mapping[str, Any]) -> None:
        """Takes Thresher's own work of an epoch out of the sums.

        Args:
            spent: Entry of `run.times` of full training; empty if there is none.
        """
        if spent:
            seconds = spent["seconds"] - spent["loading_s"] - spent["steps_s"]
            # It runs on one thread, and waits for other processes as long as the rest of the training does.
            self.cpu_s -= seconds * min(1.0, self.cpu_s / self.wall_s)
            self.wall_s -= seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures a block until it ends and the device has finished its work."""
        wall = time.perf_counter()
        cpu = time.process_time()
        yield
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu


class Session:
    """One run in progress: the prepared model, the attached method, the clock, and the history so far.

    Several processes train together, each on its part of every batch.

    Args:
        accelerator: Accelerator that sets device and precision.
        training: Objects to train with.
        spec: Method to attach.
        seed: Random seed of the method.
        epochs: Number of epochs of full training.
        share: Share of the epochs to train, (0, 1].
        rate: Factor on the learning rate.
        epochs_in: File for the history of every sample, see `Recording`; None for none.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        training: Training,
        spec: Spec,
        *,
        seed: int,
        epochs: int,
        share: float,
        rate: float,
        epochs_in: Path | None,
    ) -> None:
        self.accelerator = accelerator
        self.training = training
        self.epochs = epochs
        self._was_busy = is_busy()
        self.loader = shard_loader(training.loader, seed)
        self.samples, batch_size = sizes_of(self.loader)
        if not self.samples:
            raise ValueError(
                f"the training loader has no batch: {len(training.loader.dataset)} samples, batch_size={batch_size} and "  # pyright: ignore[reportArgumentType]
                "drop_last=True. Give it more samples, a smaller batch_size, or drop_last=False."
            )
        if spec.batch.get("batches") == "by_length":
            self.loader = group_by_length(self.loader, seed)
        self.model, self.optimizer = accelerator.prepare(training.model, training.optimizer)
        self.network = _network(self.model)
        self.sum = GradientSum(
            accelerator, self.model, training.criterion, batch_size * training.accumulate
        )
        self.length = Length(share, epochs, self.samples, batch_size)
        self.run = self._attach(spec, seed)
        # So far, only the passes that compute scores before training are counted.
        self._scores = {
            "scores_forward": self.run.cost.forward,
            "scores_backward": self.run.cost.backward,
        }
        self.scheduler = thresher.ProgressLR(
            self.optimizer,
            self.run,
            lambda done: rate * training.schedule(self.length.progress(done)),
        )
        self.clock = Clock()
        self.recording = Recording(self.run, training.loader.dataset, epochs_in=epochs_in)
        # Full training would need no Thresher, so its times are those of a plain loop: `train` takes out Thresher's own work.
        self._is_plain = spec.name == "full"
        self.memory = StepMemory(accelerator.device)
        self.entries: list[dict[str, Any]] = []
        # With the same seed, dropout would leave out the same units in all processes.
        if own_rank():
            torch.manual_seed(seed + BETWEEN_SEEDS * own_rank())

    def _attach(self, spec: Spec, seed: int) -> thresher.Run:
        return thresher.attach(
            spec.create(),
            loader=self.loader,
            criterion=self.training.criterion,
            model=self.model,
            optimizer=self.optimizer,
            epochs=len(self.length.steps),
            seed=seed,
            forward=self.training.forward,
            **spec.attachment(),
        )

    def train(self, checkpoint: Checkpoint | None, progress: EpochCallback | None) -> None:
        """Trains all epochs that the checkpoint, if there is one, does not contain."""
        parts = self._parts()
        parts_of_process = {"run": self.run, "clock": self.clock}
        if checkpoint is not None:
            self.entries = checkpoint.load(parts, parts_of_process).get("entries", [])
        for epoch, steps in islice(enumerate(self.length.steps), len(self.entries), None):
            with self.clock.running():
                self._train_epoch(epoch, steps)
            if self._is_plain:
                self.clock.take_out(
                    next((spent for spent in self.run.times if spent["epoch"] == epoch), {})
                )
            metric = self._end_epoch(epoch)
            if checkpoint is not None:
                checkpoint.save(parts, parts_of_process, entries=self.entries)
            if progress is not None:
                progress(epoch + 1, metric)

    def finish(self, samples_to: Path | None) -> dict[str, Any]:
        """Detaches the method and returns metric, cost, times and history; writes the history of every sample to a file."""
        full = self.epochs * self.samples
        counted = asdict(self.run.cost) | self._scores
        cost = combine_counts(of_each_process(counted)) | {
            "full_forward": full,
            "full_backward": full,
        }
        by_epoch = of_each_process(counts_by_epoch(self.run, self.samples))
        counts = zip(map(combine_counts, zip(*by_epoch, strict=True)), self.entries, strict=True)
        history = with_step_time([count | entry for count, entry in counts])
        if samples_to is not None:
            self.recording.save(samples_to)
        inside = self.run.model.module
        self.run.detach()
        times = {name: self.entries[-1][name] for name in ("wall_s", "cpu_s")}
        times["busy"] = of_first(self._was_busy or is_busy())
        times["tracing_s"] = getattr(inside, "tracing_s", 0.0)
        times["step_memory"] = max(
            (peak for one in self.entries if (peak := one.get("step_memory")) is not None),
            default=None,
        )
        classes = None if self.training.classes is None else list(self.training.classes)
        outcome = {
            "metric": self._final_metric(),
            "classes": classes,
            "confusion": self._confusion(),
        }
        return outcome | {"cost": cost, **times, "history": history}

    def _confusion(self) -> list[list[int]] | None:
        """Returns how often each class is taken for each other one; None where the training does not say it."""
        predict = self.training.predict
        return of_first(
            confusion(*predict(self.network)) if predict is not None and own_rank() == 0 else None
        )

    def close(self) -> None:
        """Lets go of a training that was never begun."""
        self.run.detach()
        self.accelerator.free_memory()

    def _parts(self) -> dict[str, Stateful]:
        """Returns the objects that change during training, by their names in checkpoints."""
        model = self.accelerator.unwrap_model(self.model)
        parts: dict[str, Stateful] = {
            "recording": self.recording
        }  # first: what it refuses, no other part has taken
        parts |= {
            "model": model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            **self.training.also,
        }
        if self.accelerator.scaler is None:
            return parts
        return parts | {"scaler": self.accelerator.scaler}

    def _train_epoch(self, epoch: int, steps: int | None) -> None:
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(epoch)
        step = self._stepping(steps)
        is_measured = epoch in (
            0,
            1,
            len(self.length.steps) - 1,
        )  # where methods warm up, and where they train on all again
        second = partial(self.memory.of, step) if is_measured else step
        more = step() and second()
        while more:
            more = step()
        if steps is not None:
            self.run.detach()  # ends the epoch that is cut short, so that it is in the history

    def _stepping(self, steps: int | None) -> Callable[[], bool]:
        """Returns a function that makes the next step of the epoch, and returns whether there was a batch for one.

        Args:
            steps: Number of batches after which the epoch is cut short; None for the whole epoch.
        """
        if self.training.accumulate == 1:
            return partial(self._step, islice(self.run.loader, steps))
        try:
            if steps is None:
                total = len(self.run.loader)
            else:
                total = min(len(self.run.loader), steps)
        except TypeError:  # of a batch method that keeps rows by chance
            total = None
        groups = Groups(islice(self.run.loader, steps), self.training.accumulate, total)
        return lambda: self._step_with(groups.next_group())

    def _step(self, batches: Iterator[Any]) -> bool:
        """Trains on the next batch, and returns whether there was one."""
        for batch in islice(batches, 1):
            loss = self.run.criterion(*self.training.passed(self.run.model, batch))
            self.accelerator.backward(loss.mean())  # of a criterion with reduction="none"
            self._update()
            return True
        return False

    def _step_with(self, batches: Iterator[tuple[Any, bool]]) -> bool:
        """Trains on a group of batches with one step, and returns whether there was a batch."""
        stepped = False
        for batch, last in batches:
            with self.sum.waiting(last=last):
                outputs, y = self.training.passed(self.run.model, batch)
                loss = self.run.criterion(outputs, y)
                self.accelerator.backward(self.sum.weighted(loss.mean(), y))
            stepped = True
        if stepped:
            self.sum.correct()
            self._update()
        return stepped

    def _update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def _end_epoch(self, epoch: int) -> float:
        """Evaluates the model, adds the epoch to the history and to the trackers, and returns the metric."""
        metric = self._measured(self.training.evaluate, epoch)
        times = {"wall_s": self.clock.wall_s, "cpu_s": sum(of_each_process(self.clock.cpu_s))}
        spent = times | {"step_memory": self.memory.take()}
        self.entries.append(
            of_first({self.training.metric: metric} | spent | self.recording.epoch())
        )
        counted = combine_counts(
            of_each_process(self.run.history[epoch] if len(self.run.history) > epoch else {})
        )
        if (name := self.training.metric) in counted:
            raise ValueError(
                f"the metric is called {name!r}, and so is a number of the method: give the metric another name"
            )
        self.accelerator.log(loggable(counted | self.entries[-1]), step=epoch)
        return metric

    def _measured(
        self, measure: Callable[[nn.Module], float], epoch: int, of: str = "evaluate"
    ) -> float:
        """Returns what a function measures of the model: in the first process, whose BatchNorm layers are those of the run."""
        return of_first(finite(measure(self.network), epoch, of) if own_rank() == 0 else None)

    def _final_metric(self) -> dict[str, Any]:
        """Returns name and value of the metric of the run: that of the last epoch, or the one downstream."""
        name = self.training.metric
        if self.training.downstream is None:
            return {"name": name, "value": self.entries[-1][name]}
        value = self._measured(self.training.downstream, len(self.entries) - 1, of="downstream")
        return {"name": f"downstream {name}", "value": value}


def train(
    task: Trainable,
    data: Any,
    spec: Spec,
    *,
    seed: int,
    epochs: int,
    label: str | None = None,
    share: float = 1.0,
    rate: float = 1.0,
    progress: EpochCallback | None = None,
    samples_to: Path | None = None,
    trackers: Any = None,
    track_to: Path | None = None,
    checkpoint: Checkpoint | None = None,
    on_end: Callable[[Training], None] | None = None,
) -> dict[str, Any]:
    """Trains once, and measures the metric of the task after each epoch.

    Accelerate decides about device and precision: `accelerate config`, or ACCELERATE_USE_CPU and ACCELERATE_MIXED_PRECISION.
    Several processes call it together, and all of them get the same results. The first one evaluates, and writes the files.

    Args:
        task: Task to train.
        data: Data that `task.load` returned.
        spec: Method to attach.
        seed: Random seed; every method gets the same initial weights and the same order of samples from the same seed.
        epochs: Number of epochs of full training, which costs are shares of.
        label: Name of the method in the results. Default: `spec.label`.
        share: Share of the epochs to train, (0, 1]; the learning rate decays within this share.
        rate: Factor on the learning rate. Default: 1.
        progress: Function that is called after each epoch.
        samples_to: Path of a Parquet file for the history of every sample, see `Recording`. Default: no such file.
        trackers: Trackers as in `log_with` of accelerate; each epoch is logged. Default: none.
        track_to: Folder for trackers that write files.
        checkpoint: Checkpoint, written after each epoch. If its file exists, training goes on from it to the same numbers.
        on_end: Function that is called at the end with the objects that were trained.

    Returns:
        Plain values, see `files.StoredRun`; `step_memory` is in bytes. An entry of the history has the counts of its epoch, the
        metric, cost, wall_s and cpu_s since the start, step_s and step_memory, and losses. Times are without evaluation.
    """
    torch.manual_seed(seed)
    name = label or spec.label
    accelerator = _accelerator(trackers, track_to, f"{name} seed {seed}", spec)
    training = task.training(data, seed)
    where = epochs_file(samples_to, checkpoint)
    session = Session(
        accelerator,
        training,
        spec,
        seed=seed,
        epochs=epochs,
        share=share,
        rate=rate,
        epochs_in=where,
    )
    try:
        session.train(checkpoint, progress)
        measured = session.finish(samples_to)
    finally:
        if checkpoint is None:
            session.recording.discard()
    _end(accelerator)
    if on_end is not None:
        on_end(training)
    facts = {"label": name, "seed": seed, "epochs": epochs, "share": share, "rate": rate}
    return outcome_of(spec, **facts, **measured, device=_device_of(accelerator))


def outcome_of(
    spec: Spec,
    *,
    label: str,
    seed: int,
    epochs: int,
    share: float,
    rate: float,
    cost: dict[str, Any],
    **measured: Any,
) -> dict[str, Any]:
    """Returns the results of a run, see `train`.

    Args:
        spec: Method of the run.
        label: Name of the method in the results.
        seed: Random seed.
        epochs: Number of epochs of full training.
        share: Share of the epochs that was trained.
        rate: Factor on the learning rate.
        cost: Counts of the run and of full training, and `backward_to_forward` (None if not known).
        **measured: Other measured values by their names in the results, `history` among them.
    """
    facts = {
        "method": label,
        "settings": spec.settings if share == 1 else {"epochs": share * epochs},
        "seed": seed,
        "rate": rate,
        "control_of": None,
        "cost": cost,
    }
    return with_costs(facts | measured, cost["backward_to_forward"] or TEXTBOOK)


def rehearse(task: Trainable, data: Any, spec: Spec, *, seed: int, epochs: int) -> None:
    """Sets up a run and closes it again, so that a comparison refuses what cannot be trained before it trains anything.

    Args:
        task: Task to train.
        data: Data that `task.load` returned.
        spec: Method to attach.
        seed: Random seed.
        epochs: Number of epochs of full training.

    Raises:
        ValueError: The training or the method is refused.
    """
    torch.manual_seed(seed)
    Session(
        _accelerator(None, None, "", spec),
        task.training(data, seed),
        spec,
        seed=seed,
        epochs=epochs,
        share=1.0,
        rate=1.0,
        epochs_in=None,
    ).close()


def train_on_all(
    training: Training,
    attach: Callable[..., Any],
    *,
    epochs: int,
    seed: int,
    command: str,
    after_epoch: Callable[[Any, nn.Module, int], None],
) -> tuple[Any, nn.Module]:
    """Trains on all samples in a plain loop, and leaves the global random states as they were.

    Args:
        training: Objects to train with.
        attach: Function that makes the run, such as `thresher.observe`, without the objects of the training.
        epochs: Number of epochs.
        seed: Random seed.
        command: Name of the command, for messages.
        after_epoch: Function that is called after each epoch with the run, its model, and the number of epochs done.

    Returns:
        The run, still attached, and the trained model.

    Raises:
        ValueError: The loader has no batch.
    """
    accelerator = fresh_accelerator()
    with thresher.rng.undisturbed(accelerator.device):
        torch.manual_seed(seed + BETWEEN_SEEDS * own_rank())
        model, optimizer = accelerator.prepare(training.model, training.optimizer)
        objects = {
            "loader": training.loader,
            "criterion": training.criterion,
            "model": model,
            "optimizer": optimizer,
        }
        run = attach(**objects, epochs=epochs, seed=seed)
        scheduler = thresher.ProgressLR(optimizer, run, training.schedule)
        for epoch in range(1, epochs + 1):
            for step, batch in enumerate(run.loader, 1):
                loss = run.criterion(*training.passed(run.model, batch))
                accelerator.backward(
                    loss.mean() / training.accumulate
                )  # of a criterion with reduction="none"
                if step % training.accumulate == 0 or step == len(run.loader):
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler.step()
            after_epoch(run, model, epoch)
    if not run.cost.backward:
        size = run.loader.n
        raise ValueError(
            f"{command}: a loader of {size} samples has no batch; give it more of them, or drop_last=False"
        )
    return run, accelerator.unwrap_model(model, keep_fp32_wrapper=False)


def with_costs(run: dict[str, Any], backward_to_forward: float) -> dict[str, Any]:
    """Returns the run with its costs as shares of full training: in total, of scores before it, and up to each epoch's end."""
    cost = run["cost"]
    counts = Cost(full_forward=cost["full_forward"], full_backward=cost["full_backward"])
    history = []
    for entry in run["history"]:
        counts.forward += entry["forward"]
        counts.backward += entry["backward"]
        history.append(entry | {"cost": counts.ratio(backward_to_forward)})
    counts.forward = cost["forward"]
    counts.backward = cost["backward"]
    ratios = {"ratio": counts.ratio(backward_to_forward)}
    if "scores_forward" in cost:  # not in the files of earlier versions
        whole = cost["full_forward"] + backward_to_forward * cost["full_backward"]
        ratios["scores_ratio"] = (
            cost["scores_forward"] + backward_to_forward * cost["scores_backward"]
        ) / whole
    return run | {"cost": cost | ratios, "history": history}


def tracker_name(name: str) -> str:
    """Returns the name of a run with only those characters that every tracker accepts."""
    return re.sub(r"[^A-Za-z0-9_.@=-]+", "-", name)


def loggable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers and strings among some values: what every tracker accepts."""
    return {name: value for name, value in values.items() if isinstance(value, int | float | str)}


def sizes_of(loader: DataLoader[Any]) -> tuple[int, int]:
    """Returns the number of samples in a full epoch and in a batch, of all processes together.

    A sampler or `drop_last` may make an epoch smaller than the dataset.
    """
    if (processes := number_of_processes()) > 1 and loader.batch_size:  # all samples are dealt out
        samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        size = processes * loader.batch_size
        return samples - samples % size * loader.drop_last, size
    sampler: Any = loader.sampler if loader.batch_size else loader.batch_sampler
    if not loader.batch_size:  # A batch sampler of the user's own decides about the batches.
        samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        return samples, getattr(sampler, "batch_size", None) or math.ceil(samples / len(loader))
    samples = len(sampler)
    return samples - samples % loader.batch_size * loader.drop_last, loader.batch_size


def as_number(metric: Any, of: str = "evaluate") -> float:
    """Returns the metric as a number.

    Raises:
        ValueError: It is none.
    """
    try:
        return float(metric)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{of} returned {metric!r:.80}; it must return a number, larger for a better model"
        ) from None


def finite(metric: Any, epoch: int, of: str = "evaluate") -> float:
    """Returns the metric after an epoch, if it is a finite number.

    Raises:
        ValueError: The metric is no number, or not finite.
    """
    value = as_number(metric, of)
    if not math.isfinite(value):
        raise ValueError(
            f"{of} returned {value} after epoch {epoch}; a comparison needs finite values"
        )
    return value


def _network(model: nn.Module) -> nn.Module:
    """Returns the network of a prepared model, whose forward pass one process can call alone.

    Raises:
        ValueError: Several processes train, and the model is not in DistributedDataParallel.
    """
    if number_of_processes() > 1 and not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"{number_of_processes()} processes train with DistributedDataParallel here, and accelerate is configured for "
            f"{type(model).__name__}: choose multi-GPU or multi-CPU in `accelerate config`, or start the command by torchrun."
        )
    if isinstance(model, DistributedDataParallel):
        return model.module
    return model


def _device_of(accelerator: Accelerator) -> str:
    """Returns the device of a run for its results, with the number of processes where there are several."""
    several = number_of_processes()
    if several == 1:
        return str(accelerator.device)
    return f"{several} x {accelerator.device.type}"


def _accelerator(trackers: Any, track_to: Path | None, name: str, spec: Spec) -> Accelerator:
    accelerator = fresh_accelerator(log_with=trackers, project_dir=track_to)
    accelerator.init_trackers(tracker_name(name), config=loggable(spec.settings))
    return accelerator


def _end(accelerator: Accelerator) -> None:
    """Ends the trackers, and not the process group, in which further runs train, as `end_training` would do."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.free_memory()


def epochs_file(samples_to: Path | None, checkpoint: Checkpoint | None) -> Path | None:
    """Returns the file for the finished epochs of every sample: the one of the checkpoint, else a hidden file next to the result."""
    if samples_to is None:
        return None
    if checkpoint is None:
        return samples_to.with_name(f".{samples_to.name}.epochs")
    return checkpoint.epochs_in


def counts_by_epoch(run: thresher.Run, samples: int) -> list[dict[str, Any]]:
    """Returns the counts of each epoch; the history of the run itself has no entry of an epoch that was cut short.

    Args:
        run: Run, at its end.
        samples: Number of samples in an epoch of full training.
    """
    counted = asdict(run.cost)
    entries = list(run.history)
    rest = {name: counted[name] - sum(entry[name] for entry in entries) for name in COST_COUNTERS}
    if rest["forward"]:
        entries.append({"epoch": len(entries), "complete": False, "kept": samples, **rest})
    return entries


def with_step_time(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the history with the seconds per step of each epoch.

    Args:
        history: Entries with `steps`, and `wall_s` since the start.
    """
    starts = [0.0, *(entry["wall_s"] for entry in history)]
    return [
        entry | {"step_s": (entry["wall_s"] - start) / max(1, entry["steps"])}
        for entry, start in zip(history, starts, strict=False)
    ]
