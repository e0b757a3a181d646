"""A training that is timed: the parts of its steps, half a batch, the loader, and the sizes of its samples."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import thresher
from thresher import to_device
from thresher_lab.advise.pace import Pace, Spent, pace_of_rounds
from thresher_lab.training.loop import as_number, is_busy, sizes_of
from thresher_lab.training.processes import fresh_accelerator
from thresher_lab.training.specs import parse_methods
from thresher_lab.training.trainable import Training

SLOW_STEP = 10.0
"""Seconds of a step from which the machine is too slow to time its parts."""
BATCHES = 6
"""Largest number of batches that are prepared, and of which the samples' sizes are taken."""
ROUNDS = 9
"""Largest number of rounds in which the parts are timed."""
TIMED_SECONDS = 0.1
"""Smallest time that is measured at once, in seconds, so that a short disturbance of the machine is a small one."""
ROUND_SECONDS = 2.0
"""Seconds that the whole steps of a round take at most, unless one step takes longer."""
LOADING_SECONDS = 3.0
"""Seconds after which no further batch is loaded, when batches are prepared and when the loader is timed."""
SMALLEST_HALVED = 4
"""Smallest batch of which half is timed: BatchNorm needs two samples."""

SETTINGS = ("", ":stratify=none", ":spend=steps", ":spend=steps:stratify=none")
"""Settings of Winnow on the command line, the preferred ones first."""

Now = Callable[[], Spent]
"""Function that returns the wall and CPU seconds so far."""
Announce = Callable[[str], None]
"""Function that is called with a line about what is done now."""


def now() -> Spent:
    """Returns the wall and CPU seconds so far, after the device has finished its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return Spent(time.perf_counter(), time.process_time())


def ignore(_: str) -> None:
    """Announces nothing."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of samples: the number of values in the first array or list of each.

    Attributes:
        smallest: Size of the smallest sample.
        largest: Size of the largest sample.
        padding: Share of padding in random batches, [0, 1).
        sorted_padding: Share of padding if samples of similar sizes share a batch.
    """

    smallest: int
    largest: int
    padding: float
    sorted_padding: float


@dataclass(frozen=True)
class Measured:
    """Times of a training.

    Attributes:
        device: Device of the training.
        batch_size: Number of samples in a batch.
        steps: Number of batches in an epoch.
        pace: Seconds of the parts of a step; None if a step takes too long.
        step_s: Seconds of the first step, or of the second one if the first was slow.
        evaluation_s: Seconds of an evaluation.
        sizes: Sizes of the samples; None if unknown.
        fallback: Reason why the model cannot be traced; None if it can.
        busy: Whether the machine had more work than cores.
        settings: Those of `SETTINGS` that the training accepts. Default: all.
    """

    device: str
    batch_size: int
    steps: int
    pace: Pace | None
    step_s: float
    evaluation_s: float = 0.0
    sizes: Sizes | None = None
    fallback: str | None = None
    busy: bool = False
    settings: Sequence[str] = SETTINGS


def accepted_settings(training: Training, share: float) -> list[str]:
    """Returns those of `SETTINGS` with which a training accepts Winnow.

    Args:
        training: The training.
        share: Share of the cost of full training, (0, 1).
    """
    accepted: list[str] = []
    for settings in SETTINGS:
        (spec,) = parse_methods(f"winnow:share={share:.12g}{settings}")
        with suppress(TypeError, ValueError), warnings.catch_warnings(action="ignore"):
            thresher.attach(
                spec.create(),
                loader=training.loader,
                criterion=training.criterion,
                model=training.model,
                optimizer=training.optimizer,
                epochs=1,
                forward=training.forward,
                **spec.attachment(),
            ).detach()
            accepted.append(settings)
    return accepted


class _TooSlowError(Exception):
    """A step takes too long."""


class TimedTraining:
    """A training whose steps are timed; its weights stay as they are.

    Args:
        training: The training.
        seed: Random seed of the samples that are drawn.
        seconds: Time limit for the rounds, in seconds. There is always one round.
        clock: Function that returns the seconds so far. Default: `now`.
        announce: Function that is called with a line about what is done now. Default: none.

    Raises:
        ValueError: The training's loader has no batch.
    """

    def __init__(
        self,
        training: Training,
        *,
        seed: int = 0,
        seconds: float = math.inf,
        clock: Now = now,
        announce: Announce = ignore,
    ) -> None:
        self._dataset: Any = training.loader.dataset
        if not len(training.loader):
            raise ValueError(
                f"advise: the loader of {len(self._dataset)} samples has no batch; give it more of them, or drop_last=False"
            )
        self._accelerator = fresh_accelerator()
        self._model, self._optimizer = self._accelerator.prepare(training.model, training.optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * 0
        self._training = training
        self._seed = seed
        self._clock = clock
        self._announce = announce
        self._until = clock().wall + seconds
        self._device: torch.device = self._accelerator.device
        self._batch_size = min(sizes_of(training.loader)[1], len(self._dataset))

    def measure(self) -> Measured:
        """Times one step, `evaluate`, and the parts of steps in turns.

        Raises:
            ValueError: `evaluate` does not return a number.
        """
        was_busy = is_busy()
        self._announce("timing one step")
        try:
            step = self._typical_step()
        except _TooSlowError:
            return self._result(None, self._clock().wall - self._begun)
        self._announce("calling `evaluate` once")
        begun = self._clock()
        with self._modes_kept():
            as_number(self._training.evaluate(self._model))
        evaluation = self._since(begun)
        samples = self._draw_samples(step["loader"].wall)
        self._announce("tracing the model")
        fallback = self._why_not_traced(samples[0])
        rounds = self._measure_rounds(samples, step)
        on_one_thread = self._device.type == "cpu" and torch.get_num_threads() == 1
        return self._result(
            pace_of_rounds(rounds, by_cpu=on_one_thread, accumulate=self._training.accumulate),
            sum(part.wall for part in step.values()),
            evaluation_s=evaluation.cpu if on_one_thread else evaluation.wall,
            sizes=self._sizes_of(samples),
            fallback=fallback,
            busy=bool(was_busy or is_busy()),
        )

    def _result(self, pace: Pace | None, step_s: float, **more: Any) -> Measured:
        return Measured(
            str(self._device), self._batch_size, len(self._training.loader), pace, step_s, **more
        )

    def _since(self, begun: Spent) -> Spent:
        end = self._clock()
        return Spent(end.wall - begun.wall, end.cpu - begun.cpu)

    def _typical_step(self) -> dict[str, Spent]:
        """Returns the times of a step; a slow first one is repeated, because much is set up in it, such as a compiled model."""
        first = self._clock()
        try:
            return self._whole_step()
        except _TooSlowError:
            if self._since(first).wall > 2 * SLOW_STEP:
                raise
        return self._whole_step()

    def _whole_step(self) -> dict[str, Spent]:
        """Times a step with loading, and stops after the part in which it becomes too slow."""
        begun = self._clock()
        self._begun = begun.wall

        def check() -> None:
            if self._since(begun).wall > SLOW_STEP:
                raise _TooSlowError

        batch = to_device(next(iter(self._training.loader)), self._device)
        loading = self._since(begun)
        check()
        times = self._time_parts([batch], check)
        check()
        return {"loader": loading, **times}

    def _draw_samples(self, loading_s: float) -> list[list[Any]]:
        """Returns the samples of some random batches, fewer if a batch loads slowly."""
        size = self._batch_size
        most = int(LOADING_SECONDS / max(loading_s, 1e-9))
        count = max(1, min(BATCHES, len(self._dataset) // size, most))
        generator = torch.Generator().manual_seed(self._seed)
        ids = torch.randperm(len(self._dataset), generator=generator)[: count * size].tolist()
        samples = [self._dataset[i] for i in ids]
        return [samples[i : i + size] for i in range(0, len(ids), size)]

    def _collate(self, samples: Sequence[Any]) -> Any:
        return to_device(self._training.loader.collate_fn(list(samples)), self._device)

    def _sizes_of(self, batches: Sequence[Sequence[Any]]) -> Sizes | None:
        """Returns the sizes of samples and their padding; None if the size of a sample is unknown."""
        rows = [[size_of(sample) for sample in batch] for batch in batches]
        sizes = sorted(size for row in rows for size in row if size is not None)
        if not sizes or len(sizes) < sum(map(len, rows)):
            return None
        padded = [size_of(self._training.loader.collate_fn(list(batch))) or 0 for batch in batches]
        similar = [sizes[i : i + self._batch_size] for i in range(0, len(sizes), self._batch_size)]
        least = sum(len(row) * row[-1] for row in similar)
        padding = max(0.0, 1 - sum(sizes) / max(1, sum(padded)))
        return Sizes(sizes[0], sizes[-1], padding, min(padding, 1 - sum(sizes) / max(1, least)))

    def _why_not_traced(self, samples: Sequence[Any]) -> str | None:
        traced = thresher.subset_backward(self._model)
        with warnings.catch_warnings(action="ignore"):  # the answer has the reason
            self._training.passed(traced, self._collate(samples))
        return traced.fallback

    def _measure_rounds(
        self, samples: Sequence[Sequence[Any]], step: Mapping[str, Spent]
    ) -> list[dict[str, Spent]]:
        """Times all parts in turns, until the rounds are done or the time is up; the first of several warms up."""
        batches = [self._collate(batch) for batch in samples]
        compute = sum(part.wall for name, part in step.items() if name != "loader")
        batches *= max(1, math.ceil(TIMED_SECONDS / max(compute * len(batches), 1e-9)))
        batches = batches[: max(1, int(ROUND_SECONDS / max(compute, 1e-9)))]
        halves = []
        if self._batch_size >= SMALLEST_HALVED:
            half = [self._collate(batch[: len(batch) // 2]) for batch in samples]
            halves = [half[i % len(half)] for i in range(len(batches))]
        self._announce(
            f"timing the parts of a step, for {max(0.0, self._until - self._clock().wall):.0f} s at most"
        )
        rounds: list[dict[str, Spent]] = []
        while len(rounds) <= ROUNDS:
            begun = self._clock()
            rounds.append(self._measure_round(batches, halves, step["loader"].wall))
            took = self._since(begun).wall
            if begun.wall + 2 * took > self._until:
                break
        return rounds[1:] or rounds

    def _measure_round(
        self, batches: Sequence[Any], halves: Sequence[Any], loading_s: float
    ) -> dict[str, Spent]:
        times = self._time_parts(batches)
        if halves:
            parts = self._time_parts(halves)
            times["half"] = Spent(
                sum(part.wall for part in parts.values()), sum(part.cpu for part in parts.values())
            )
        times["scoring"] = self._time_scoring(batches)
        times["loader"] = self._time_loader(loading_s)
        if self._training.loader.num_workers or self._device.type != "cpu":
            times["loop"] = self._time_loader(loading_s, train=True)
        return times

    def _time_parts(
        self, batches: Sequence[Any], check: Callable[[], None] = lambda: None
    ) -> dict[str, Spent]:
        """Returns the mean seconds of the forward pass, the backward pass and the optimizer."""
        marks: list[list[Spent]] = []
        for batch in batches:
            begun = self._clock()
            loss = self._loss(batch)
            forward = self._clock()
            check()
            self._accelerator.backward(loss)
            backward = self._clock()
            check()
            self._optimizer.step()
            self._optimizer.zero_grad()
            marks.append([begun, forward, backward, self._clock()])
        names = ("forward", "backward", "optimizer")
        return {name: _mean_between(marks, i) for i, name in enumerate(names)}

    def _loss(self, batch: Any) -> Tensor:
        outputs, targets = self._training.passed(self._model, batch)
        return self._training.criterion(outputs, targets).mean()

    def _time_scoring(self, batches: Sequence[Any]) -> Spent:
        with self._modes_kept(), torch.no_grad():
            self._model.eval()
            begun = self._clock()
            for batch in batches:
                self._loss(batch)
            spent = self._since(begun)
        return Spent(spent.wall / len(batches), spent.cpu / len(batches))

    @contextmanager
    def _modes_kept(self) -> Iterator[None]:
        """Puts every part of the model back into the mode it had: some are in evaluation mode for good."""
        modes = [(part, part.training) for part in self._model.modules()]
        yield
        for part, mode in modes:
            part.training = mode

    def _time_loader(self, loading_s: float, *, train: bool = False) -> Spent:
        """Returns the mean seconds of a batch of the user's loader, after the batches that workers made ahead.

        Args:
            loading_s: Seconds that a batch took to load in a typical step.
            train: Whether each batch is trained on, as in the loop. Default: False.
        """
        loader = self._training.loader
        iterator: Iterable[Any] = iter(loader)
        untimed = loader.num_workers * (loader.prefetch_factor or 0)
        # The first batch also waits for the order of the epoch to be drawn, which is long for many samples. It is timed only if
        # batches load so slowly that this does not matter.
        if loading_s < 1:
            untimed += 1
        for batch in islice(iterator, min(untimed, len(loader) // 2)):
            self._load(batch, train=train)
        begun = self._clock()
        count = 0
        wanted = max(BATCHES, 2 * loader.num_workers)
        for batch in iterator:
            self._load(batch, train=train)
            count += 1
            spent = self._since(begun).wall
            if spent > LOADING_SECONDS or (count >= wanted and spent >= TIMED_SECONDS):
                break
        spent = self._since(begun)
        return Spent(spent.wall / count, spent.cpu / count)

    def _load(self, batch: Any, *, train: bool) -> None:
        batch = to_device(batch, self._device)
        if train:
            self._accelerator.backward(self._loss(batch))
            self._optimizer.step()
            self._optimizer.zero_grad()


def _mean_between(marks: Sequence[Sequence[Spent]], i: int) -> Spent:
    """Returns the mean seconds between two marks of each step."""
    wall = sum(step[i + 1].wall - step[i].wall for step in marks)
    cpu = sum(step[i + 1].cpu - step[i].cpu for step in marks)
    return Spent(wall / len(marks), cpu / len(marks))


def size_of(sample: Any) -> int | None:
    """Returns the number of values in the first array or list of a sample or batch; None if it has none.

    Args:
        sample: A tensor, an array, a number, or these in tuples, lists and mappings.

    Example:
        >>> size_of({"input_ids": [5, 7, 9], "label": 1}), size_of((torch.zeros(2, 3), 1)), size_of("text")
        (3, 6, None)
    """
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, int | float):
        return 1
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    elif isinstance(sample, list) and sample and isinstance(sample[0], int | float):
        return len(sample)
    if isinstance(sample, list | tuple):
        return size_of(sample[0]) if sample else None
    size = getattr(sample, "size", None)
    return size if isinstance(size, int) else None
