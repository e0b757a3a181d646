"""Training one network once: a plain loop that attaches a method like any user's."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import thresher
from thresher.cost import Cost
from thresher.experiments.training.base import Trainable
from thresher.experiments.training.checkpoint import Checkpoint, Stateful
from thresher.experiments.training.recording import Recording
from thresher.experiments.training.specs import Spec

Progress = Callable[[int, float], None]
"""Called after each epoch with the number of epochs done and the test metric."""

TEXTBOOK = 2.0
"""Backward over forward time where a run was too short to measure its own."""

COUNTED = ("forward", "backward", "refresh", "scoring", "steps")


class Clock:
    """Adds up wall and CPU seconds of what runs inside `with clock.running():`."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.cpu_s = 0.0

    def state_dict(self) -> dict[str, float]:
        """The sums."""
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Add to sums that were saved."""
        self.wall_s, self.cpu_s = state_dict["wall_s"], state_dict["cpu_s"]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count until the block ends and the device has done its work."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu


class Length:
    """How long a run trains: all epochs, or a share of them that ends after the nearest step.

    Args:
        share: Of the epochs, (0, 1].
        epochs: Of full training.
        samples: Of an epoch.
        batch_size: Of all batches of an epoch but the last.
    """

    def __init__(self, share: float, epochs: int, samples: int, batch_size: int) -> None:
        wanted = share * epochs * samples
        whole = min(epochs, int(wanted / samples + 1e-9))
        left = wanted - whole * samples
        rest = max(round(left / batch_size), 0 if whole else 1)
        if rest * batch_size >= samples or samples - left < abs(rest * batch_size - left):
            whole, rest = whole + 1, 0
        self.steps: list[int | None] = [None] * whole + [rest] * (rest > 0)
        """Of each epoch; None for one that is not cut short."""
        self.samples = whole * samples + rest * batch_size
        """That will have been trained on."""
        self._stretch = len(self.steps) * samples / self.samples

    def progress(self, of_epochs: float) -> float:
        """Share of this run that is done, where `of_epochs` of its epochs are, all counted whole."""
        return min(1.0, of_epochs * self._stretch)


def train(
    task: Trainable,
    data: Any,
    spec: Spec,
    *,
    seed: int,
    epochs: int,
    label: str | None = None,
    share: float = 1.0,
    progress: Progress | None = None,
    samples_to: Path | None = None,
    trackers: Any = None,
    track_to: Path | None = None,
    checkpoint: Checkpoint | None = None,
) -> dict[str, Any]:
    """Train once and measure on the test set after each epoch.

    Device and precision are accelerate's: `accelerate config`, or ACCELERATE_USE_CPU and ACCELERATE_MIXED_PRECISION.

    Args:
        task: What to train.
        data: From `task.load`.
        spec: The method.
        seed: The same seed gives the same initial weights and the same shuffling to every method.
        epochs: Of the whole training, which costs are shares of.
        label: What the method is called in the results. Default: `spec.label`.
        share: Of the epochs to train, (0, 1]; the learning rate decays within them.
        progress: Told after each epoch.
        samples_to: Parquet file for the history of every sample, see `Recording`. Default: none is written.
        trackers: What accelerate takes as `log_with`, such as "tensorboard"; told the numbers of each epoch by their names in
            the history. Default: none.
        track_to: Folder for trackers that write files.
        checkpoint: Written after each epoch; where its file is there, training goes on from it, to the same numbers as if it
            had never been interrupted. Times are then of the epochs that count.

    Returns:
        The run in plain values: method, settings, seed, control_of, metric, cost, wall_s, cpu_s, history, device. An entry of
        the history has what its epoch counted, the test metric after it, what it took until then (cost, wall_s, cpu_s), seconds
        a step, and the distribution of losses, see `Recording`.
        Times are those of training; evaluation does not count, nor does what comes downstream.
    """
    torch.manual_seed(seed)
    accelerator = Accelerator(log_with=trackers, project_dir=track_to)
    accelerator.init_trackers(tracked_as(f"{label or spec.label} seed {seed}"), config=plain(spec.settings))
    training = task.training(data, seed)
    model, optimizer = accelerator.prepare(training.model, training.optimizer)
    samples, batch_size = sizes_of(training.loader)
    length = Length(share, epochs, samples, batch_size)
    run = thresher.attach(
        spec.create(),
        loader=training.loader,
        criterion=training.criterion,
        model=model,
        optimizer=optimizer,
        epochs=len(length.steps),
        seed=seed,
        **spec.attachment(),
    )
    scheduler = thresher.ProgressLR(optimizer, run, lambda done: training.schedule(length.progress(done)))
    clock, recording = Clock(), Recording(run, training.loader.dataset, keep=samples_to is not None)
    parts: dict[str, Stateful] = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "scheduler": scheduler}
    parts |= {"run": run, "clock": clock, "recording": recording, **training.also}
    parts |= {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
    before = {} if checkpoint is None else checkpoint.load(parts)
    entries: list[dict[str, Any]] = before.get("entries", [])
    for epoch, steps in islice(enumerate(length.steps), len(entries), None):
        with clock.running():
            for batch in islice(run.loader, steps):
                x, y = pair_of(batch)
                loss = run.criterion(run.model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        metric = finite(float(training.evaluate(model)), epoch)
        entries.append({training.metric: metric, "wall_s": clock.wall_s, "cpu_s": clock.cpu_s} | recording.epoch())
        counted = run.history[epoch] if len(run.history) > epoch else {}
        accelerator.log(plain(counted | entries[-1]), step=epoch)
        if checkpoint is not None:
            checkpoint.save(parts, entries=entries)
        if progress is not None:
            progress(epoch + 1, metric)
    full = epochs * samples
    cost = asdict(run.cost) | {"full_forward": full, "full_backward": full}
    history = _with_step_time([counts | entry for counts, entry in zip(_epochs_of(run, samples), entries, strict=True)])
    if samples_to is not None:
        recording.save(samples_to)
    run.detach()
    measured = {"name": training.metric, "value": entries[-1][training.metric]}
    if training.downstream is not None:
        value = finite(float(training.downstream(model)), len(entries) - 1, of="downstream")
        measured = {"name": f"downstream {training.metric}", "value": value}
    accelerator.end_training()
    accelerator.free_memory()
    outcome = {
        "method": label or spec.label,
        "settings": spec.settings if share == 1 else {"epochs": share * epochs},
        "seed": seed,
        "control_of": None,
        "metric": measured,
        "cost": cost,
        "wall_s": clock.wall_s,
        "cpu_s": clock.cpu_s,
        "history": history,
        "device": str(accelerator.device),
    }
    return with_costs(outcome, cost["backward_to_forward"] or TEXTBOOK)


def with_costs(run: dict[str, Any], backward_to_forward: float) -> dict[str, Any]:
    """The run with its costs as shares of full training: of the whole, and in the history of all until the end of an epoch."""
    cost = run["cost"]
    counts = Cost(full_forward=cost["full_forward"], full_backward=cost["full_backward"])
    history = []
    for entry in run["history"]:
        counts.forward += entry["forward"]
        counts.backward += entry["backward"]
        history.append(entry | {"cost": counts.ratio(backward_to_forward)})
    counts.forward, counts.backward = cost["forward"], cost["backward"]
    return run | {"cost": cost | {"ratio": counts.ratio(backward_to_forward)}, "history": history}


def tracked_as(name: str) -> str:
    """A run's name in letters that every tracker takes."""
    return re.sub(r"[^A-Za-z0-9_.@=-]+", "-", name)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and words among some values, which is what every tracker takes."""
    return {name: value for name, value in values.items() if isinstance(value, int | float | str)}


def sizes_of(loader: DataLoader[Any]) -> tuple[int, int]:
    """Samples of a full epoch, which a sampler and `drop_last` may make fewer than the dataset has, and of its batches."""
    sampler: Any = loader.sampler if loader.batch_size else loader.batch_sampler
    if not loader.batch_size:  # batches are the user's own, as large as they tell
        samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        return samples, getattr(sampler, "batch_size", None) or math.ceil(samples / len(loader))
    samples = len(sampler)
    return samples - samples % loader.batch_size * loader.drop_last, loader.batch_size


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of a batch.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    got = f"{len(batch)} parts" if isinstance(batch, list | tuple) else type(batch).__name__
    raise ValueError(f"batches must be pairs of inputs and targets, got {got}; give the loader a collate_fn that makes them")


def finite(metric: float, epoch: int, of: str = "evaluate") -> float:
    """The metric after an epoch.

    Raises:
        ValueError: It is not finite, so that no results could be told.
    """
    if not math.isfinite(metric):
        raise ValueError(f"{of} returned {metric} after epoch {epoch}; a comparison needs finite values")
    return metric


def _epochs_of(run: thresher.Run, samples: int) -> list[dict[str, Any]]:
    """What each epoch computed; the run itself has no entry of one that was cut short."""
    counted, entries = asdict(run.cost), list(run.history)
    rest = {name: counted[name] - sum(entry[name] for entry in entries) for name in COUNTED}
    if rest["forward"]:
        entries.append({"epoch": len(entries), "complete": False, "kept": samples, **rest})
    return entries


def _with_step_time(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    starts = [0.0, *(entry["wall_s"] for entry in history)]
    return [
        entry | {"step_s": (entry["wall_s"] - start) / max(1, entry["steps"])}
        for entry, start in zip(history, starts, strict=False)
    ]
