"""Training one network once: a plain loop that attaches a method like any user's."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import thresher
from thresher.experiments.data import Data
from thresher.experiments.specs import MethodSpec
from thresher.experiments.tasks import Task

Progress = Callable[[int, float], None]
"""Called after each epoch with the number of epochs done and the test metric."""

TEXTBOOK = 2.0
"""Backward over forward time where a run was too short to measure its own."""

EVALUATION_BATCH = 1000


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


def train(
    task: Task,
    data: Data,
    spec: MethodSpec,
    *,
    seed: int,
    epochs: int,
    label: str | None = None,
    control_of: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train once and measure on the test set after each epoch.

    Device and precision are accelerate's: `accelerate config`, or ACCELERATE_USE_CPU and ACCELERATE_MIXED_PRECISION.

    Args:
        task: What to train.
        data: From `task.load`.
        spec: The method.
        seed: The same seed gives the same initial weights and the same shuffling to every method.
        epochs: Of the whole training.
        label: What the method is called in the results. Default: `spec.label`.
        control_of: The label of the method that this run is a control of.
        progress: Told after each epoch.

    Returns:
        The run in plain values: method, settings, seed, control_of, metric, cost, wall_s, cpu_s, history, device. Times are
        those of training; evaluation does not count.
    """
    torch.manual_seed(seed)
    accelerator = Accelerator()
    model, optimizer = _prepared(accelerator, task, seed)
    test = [(x.to(accelerator.device), y.to(accelerator.device)) for x, y in _batches(data.test_inputs, data.test_targets)]
    run = thresher.attach(
        spec.create(),
        loader=task.loader(data, seed),
        criterion=task.criterion(),
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        seed=seed,
    )
    scheduler = thresher.ProgressLR(optimizer, run, task.schedule)
    clock, metrics = Clock(), []
    for epoch in range(epochs):
        with clock.running():
            for x, y in run.loader:
                loss = run.criterion(run.model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        metrics.append(accuracy(model, test))
        if progress is not None:
            progress(epoch + 1, metrics[-1])
    history = [entry | {task.metric: value} for entry, value in zip(run.history, metrics, strict=True)]
    run.detach()
    accelerator.free_memory()
    return {
        "method": label or spec.label,
        "settings": spec.settings,
        "seed": seed,
        "control_of": control_of,
        "metric": {"name": task.metric, "value": metrics[-1]},
        "cost": asdict(run.cost) | {"ratio": run.cost.ratio(run.cost.backward_to_forward or TEXTBOOK)},
        "wall_s": clock.wall_s,
        "cpu_s": clock.cpu_s,
        "history": history,
        "device": str(accelerator.device),
    }


def accuracy(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Share of right answers, in evaluation mode; the model is put back into training mode."""
    model.eval()
    with torch.inference_mode():
        right = [(model(x).argmax(1) == y).sum() for x, y in batches]
    model.train()
    return int(torch.stack(right).sum()) / sum(len(y) for _, y in batches)


def _prepared(accelerator: Accelerator, task: Task, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = task.build(seed)
    return accelerator.prepare(model, task.optimizer(model))


def _batches(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(inputs.split(EVALUATION_BATCH), targets.split(EVALUATION_BATCH), strict=True)
