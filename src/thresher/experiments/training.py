"""Training one network once: a plain loop that attaches a method like any user's."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import thresher
from thresher.cost import Cost
from thresher.experiments.data import Data
from thresher.experiments.specs import MethodSpec
from thresher.experiments.tasks import Task

Progress = Callable[[int, float], None]
"""Called after each epoch with the number of epochs done and the test metric."""

TEXTBOOK = 2.0
"""Backward over forward time where a run was too short to measure its own."""

EVALUATION_BATCH = 1000

COUNTED = ("forward", "backward", "refresh", "scoring", "steps")


class Clock:
    """Adds up wall and CPU seconds of what runs inside `with clock.running():`."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.cpu_s = 0.0

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
    task: Task,
    data: Data,
    spec: MethodSpec,
    *,
    seed: int,
    epochs: int,
    label: str | None = None,
    share: float = 1.0,
    progress: Progress | None = None,
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

    Returns:
        The run in plain values: method, settings, seed, control_of, metric, cost, wall_s, cpu_s, history, device. An entry of
        the history has what its epoch counted, the test metric after it, and what it took until then: cost, wall_s and cpu_s.
        Times are those of training; evaluation does not count.
    """
    torch.manual_seed(seed)
    accelerator = Accelerator()
    model, optimizer = _prepared(accelerator, task, seed)
    test = [(x.to(accelerator.device), y.to(accelerator.device)) for x, y in _batches(data.test_inputs, data.test_targets)]
    length = Length(share, epochs, len(data.train), task.batch_size)
    run = thresher.attach(
        spec.create(),
        loader=task.loader(data, seed),
        criterion=task.criterion(),
        model=model,
        optimizer=optimizer,
        epochs=len(length.steps),
        seed=seed,
        **spec.attachment(),
    )
    scheduler = thresher.ProgressLR(optimizer, run, lambda done: task.schedule(length.progress(done)))
    clock, entries = Clock(), []
    for epoch, steps in enumerate(length.steps):
        with clock.running():
            for x, y in islice(run.loader, steps):
                loss = run.criterion(run.model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        entries.append({task.metric: accuracy(model, test), "wall_s": clock.wall_s, "cpu_s": clock.cpu_s})
        if progress is not None:
            progress(epoch + 1, entries[-1][task.metric])
    full = epochs * len(data.train)
    cost = asdict(run.cost) | {"full_forward": full, "full_backward": full}
    history = [counts | entry for counts, entry in zip(_epochs_of(run, len(data.train)), entries, strict=True)]
    run.detach()
    accelerator.free_memory()
    outcome = {
        "method": label or spec.label,
        "settings": spec.settings if share == 1 else {"epochs": share * epochs},
        "seed": seed,
        "control_of": None,
        "metric": {"name": task.metric, "value": entries[-1][task.metric]},
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


def accuracy(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Share of right answers, in evaluation mode; the model is put back into training mode."""
    model.eval()
    with torch.inference_mode():
        right = [(model(x).argmax(1) == y).sum() for x, y in batches]
    model.train()
    return int(torch.stack(right).sum()) / sum(len(y) for _, y in batches)


def _epochs_of(run: thresher.Run, samples: int) -> list[dict[str, Any]]:
    """What each epoch computed; the run itself has no entry of one that was cut short."""
    counted, entries = asdict(run.cost), list(run.history)
    rest = {name: counted[name] - sum(entry[name] for entry in entries) for name in COUNTED}
    if rest["forward"]:
        entries.append({"epoch": len(entries), "complete": False, "kept": samples, **rest})
    return entries


def _prepared(accelerator: Accelerator, task: Task, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = task.build(seed)
    return accelerator.prepare(model, task.optimizer(model))


def _batches(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(inputs.split(EVALUATION_BATCH), targets.split(EVALUATION_BATCH), strict=True)
