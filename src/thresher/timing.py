"""The time that a training took, and a forecast of the time that full training would have taken.

Time is always booked on one name: on the loop's own work ("loading", "steps") or on one of Thresher's own parts. Nothing is run
for the forecast: it is made of the loop's own steps, less the own parts that were inside of them.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from thresher.cost import Cost

OUTSIDE, START, LOADING, STEPS = "outside", "start", "loading", "steps"
"""What the loop does: between two passes; from the begin of a pass to its first batch; waiting for a batch; a step."""

PLANNING, REFRESH, SCORING_PASS, TRACING, ATTRIBUTION = "planning", "refresh", "scoring", "tracing", "attribution"
"""Thresher's own parts: what full training would not have done."""

PARTS = (PLANNING, REFRESH, SCORING_PASS, TRACING, ATTRIBUTION)

WHOLE_STEPS, FEWEST, SPREAD_OVER = 8, 3, 512
"""Number of whole steps that are trained for the forecast, the least that say anything, and the steps that they are among."""

NOISE = 0.02
"""Share by which two equal trainings differ on a quiet machine: a smaller difference is none."""

INDIRECT = 0.5
"""Share of the time of attribution by which the loop's own work takes longer beside it, at most: it finds less in the caches.
Measured on a step of .35 ms, which took .05 ms longer beside .12 ms of attribution."""

LARGE = 0.1
"""Share of full training's time from which on attribution is a large part of the steps."""

MOST_ERROR = 0.1
"""Relative error of the forecast up to which a training that is tied with full training took "about the same time"."""

LEAST_KNOWN = 0.5
"""Share of the time of a training for which full training's time must be known, so that the two are compared."""

SECONDS_TO_WARN = 1.0
"""Length of a training, in seconds, from which on it matters that it is slower."""


def whole_steps(steps: int, most: int) -> tuple[int, ...]:
    """Returns the numbers of the steps of an epoch that train on all rows of their batch, so that the time of one is known.

    They are spread unevenly, so that none of them falls together with what a loop does in every k-th step.

    Args:
        steps: Number of steps of the epoch.
        most: Largest number of whole steps that the budget of the epoch allows.

    Returns:
        At most 8 numbers, ascending; none where there would be fewer than 3.

    Example:
        >>> whole_steps(79, 8), whole_steps(79, 2), whole_steps(20, 8)
        ((9, 23, 28, 42, 48, 53, 67, 73), (), ())
    """
    count, among = min(WHOLE_STEPS, steps // 8, most), min(steps, SPREAD_OVER)
    if count < FEWEST:
        return ()
    first = among // 8  # after the steps in which memory is allocated and the model traced
    gap = (among - first) / count
    return tuple(first + int((i + i * 0.618034 % 1) * gap) for i in range(count))


class SmallStep(NamedTuple):
    """What a step on some rows of a batch takes, as shares of a step on all of them.

    Attributes:
        rows: Share of the rows, in (0, 1).
        wall: Share of the wall time.
        cpu: Share of the CPU time; nan where it was not measured.
        error: Relative error of the share of the wall time, half of a 95 % interval.
        cpu_error: Relative error of the share of the CPU time.
    """

    rows: float
    wall: float
    cpu: float
    error: float
    cpu_error: float

    def at(self, rows: float, clock: int) -> float:
        """Returns the share of a step's time at another share of the rows; time is a line in the number of rows.

        Args:
            rows: Share of the rows, in (0, 1].
            clock: 0 for wall time, 1 for CPU time.
        """
        measured = self[1 + clock]
        line = 1 - (1 - measured) * (1 - rows) / (1 - self.rows)
        # Below what was measured the line may go down to 0, where whole steps need more memory than the caches have.
        return max(line, measured * rows / self.rows) if rows < self.rows else line


def _median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the median of durations, since something else may lengthen a few of them, and its relative standard error."""
    median = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - median) for value in values)  # the deviation of a normal distribution
    return median, (1.2533 * spread / len(values) ** 0.5 / median if median > 0 else math.inf)


def _is_busy() -> bool:
    """Returns whether more work waits than there are cores, by the load of the last minute, where the system has it."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1)


class Timing:
    """Books the time of a training on what it was spent for.

    Args:
        device: Device of the model. On CUDA single steps are timed by events, since the host runs ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.attribution_s = 0.0
        """Seconds of the loop's steps in which samples were attributed, added up where that is done: calls would cost more."""
        self._now, self._wall, self._cpu = OUTSIDE, time.perf_counter(), time.process_time()
        self._spent = {name: [0.0, 0.0] for name in (OUTSIDE, START, LOADING, STEPS, *PARTS)}
        self.entries: list[dict[str, Any]] = []
        """What is known of the time of each epoch that this process has ended."""
        self.small_step: SmallStep | None = None
        """What a step on some rows takes, measured in the epoch that had whole steps; None where it is not known."""
        self._restart()

    def _restart(self) -> None:
        for spent in self._spent.values():
            spent[:] = 0.0, 0.0
        self.attribution_s = 0.0
        self._batches = self._rows = self._whole_batches = self._whole_rows = 0
        self._durations: dict[bool, list[tuple[Any, float]]] = {True: [], False: []}
        self._step: tuple[float, float, Any] | None = None
        self._whole: bool | None = None

    def drop(self) -> None:
        """Forgets what was booked since the last epoch was closed: it was no training."""
        self.switch(OUTSIDE)
        self._restart()

    def switch(self, to: str) -> str:
        """Books the time since the last call on the name that was set then, and returns that name.

        Args:
            to: Name that the time from now on is booked on.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        spent, before = self._spent[self._now], self._now
        spent[0] += wall - self._wall
        spent[1] += cpu - self._cpu
        self._now, self._wall, self._cpu = to, wall, cpu
        return before

    # What the loader reports

    def begin(self) -> None:
        """Notes that a pass over the loader begins."""
        self.switch(START)
        self._step = self._whole = None

    def asked(self) -> None:
        """Notes that the loop asks for a batch, so that the step before is over."""
        if self._now == START:
            return  # workers start, for which full training waits once an epoch as well
        self.switch(ATTRIBUTION)
        now = self._at_step()
        if self._step is not None and self._whole is not None and len(self._durations[self._whole]) < SPREAD_OVER:
            self._durations[self._whole].append(self._since(self._step, now))
        self._step = now

    def load(self) -> str:
        """Notes that the loop's own loader is asked for a batch, and returns the name for `switch` after it."""
        return START if self._now == START else self.switch(LOADING)

    def _at_step(self) -> tuple[float, float, Any]:
        """Returns the time that was booked on the loop's own work; on CUDA with an event."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        (load, load_cpu), (step, step_cpu) = self._spent[LOADING], self._spent[STEPS]
        return load + step - self.attribution_s, load_cpu + step_cpu - self.attribution_s, event

    @staticmethod
    def _since(before: tuple[float, float, Any], now: tuple[float, float, Any]) -> tuple[Any, float]:
        wall: Any = now[0] - before[0] if now[2] is None else (before[2], now[2])
        return wall, now[1] - before[1]

    def yielded(self, rows: int, *, whole: bool) -> None:
        """Notes that the loop gets a batch.

        Args:
            rows: Number of its rows.
            whole: Whether its step is one of full training.
        """
        self.switch(STEPS)
        self._batches += 1
        self._rows += rows
        self._whole = whole
        self._whole_batches += whole
        self._whole_rows += rows * whole

    def end(self) -> None:
        """Notes that the loop has left the pass."""
        self.switch(OUTSIDE)

    # The end of an epoch

    def close(
        self, *, epoch: int, full: int, rows: int | None, loads: bool, size: int, small: bool, tracing_s: float
    ) -> dict[str, Any]:
        """Ends an epoch, and notes what is known of its time.

        Args:
            epoch: Number of the epoch.
            full: Number of samples that full training would have trained on.
            rows: Number of samples that went through a backward pass; None where it is not known.
            loads: Whether all samples of full training were loaded; else those alone that the loop got.
            size: Number of rows of a batch of full training.
            small: Whether the steps had fewer rows than those of full training, in the backward pass at least.
            tracing_s: Seconds that tracing took, in the loop's steps.

        Returns:
            The entry: `seconds`, and what is in it of each own part; `full_seconds`, the forecast of full training, where it is
            known, and `time_error`, its relative error; the same of CPU time where there is no accelerator. Where the forecast
            is not known, `time_unknown` has the reason.
        """
        self.switch(self._now)
        spent, clocks = self._spent, (0, 1) if self._device.type == "cpu" else (0,)
        wall, cpu = spent[STEPS]
        of_cpu = min(1.0, cpu / wall) if wall else 1.0  # other processes had the rest
        for clock in clocks:
            for part, seconds in ((TRACING, tracing_s), (ATTRIBUTION, self.attribution_s)):
                moved = min(seconds * (of_cpu if clock else 1.0), spent[STEPS][clock])
                spent[STEPS][clock] -= moved
                spent[part][clock] += moved
        # A system interrupts a process where it asks for the time, which is in attribution mostly: that is waiting as in steps.
        waited = spent[ATTRIBUTION][0] - spent[ATTRIBUTION][1] / max(of_cpu, 1e-9) if len(clocks) > 1 else 0.0
        if waited > 0:
            spent[ATTRIBUTION][0] -= waited
            spent[STEPS][0] += waited
        of_run = [sum(spent[name][clock] for name in spent if name != OUTSIDE) for clock in clocks]
        found: dict[str, Any] = {"epoch": epoch, **dict(zip(("seconds", "cpu_seconds"), of_run, strict=False))}
        found |= {f"{name}_s": spent[name][0] for name in PARTS if spent[name][0]}
        found["time_unknown"] = "the samples that went through the model are not known"
        if rows is not None and full and self._batches and self._rows:
            if small and self.small_step is None and (measured := self._measured(rows, clocks)) is not None:
                self.small_step = measured
            share = rows / self._batches / size if small else 1.0
            if share >= 1 - NOISE or self.small_step is not None:
                of_full = [self._forecast(clock, share, full, size, loads=loads) for clock in clocks]
                found |= dict(zip(("full_seconds", "full_cpu_seconds"), of_full, strict=False))
                errors = self.small_step[3:] if small and self.small_step is not None else (NOISE, NOISE)
                for clock, name in zip(clocks, ("time_error", "cpu_time_error"), strict=False):
                    found[name] = errors[clock] + INDIRECT * spent[ATTRIBUTION][clock] / of_full[clock]
                del found["time_unknown"]
            else:
                found["time_unknown"] = (
                    "the steps train on fewer rows than those of full training, and too few of them trained on all rows of "
                    "their batch to show what these take (an epoch has few batches or few rows, the model is compiled, or "
                    "the run goes on with a saved state)"
                )
        if _is_busy():
            found["busy"] = True
        self.entries.append(found)
        self._restart()
        return found

    def _measured(self, rows: int, clocks: Sequence[int]) -> SmallStep | None:
        """Returns what the steps on some rows took, beside the whole ones; None where there are too few of either."""
        whole, small = self._durations[True], self._durations[False]
        if min(len(whole), len(small)) < FEWEST or self._device.type not in ("cpu", "cuda"):
            return None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            whole, small = ([(begin.elapsed_time(end), 0.0) for (begin, end), _ in some] for some in (whole, small))
        shares, errors = [math.nan, math.nan], [NOISE, NOISE]
        for clock in clocks:
            of_whole, whole_error = _median_and_error([one[clock] for one in whole])
            of_small, small_error = _median_and_error([one[clock] for one in small])
            shares[clock], errors[clock] = of_small / of_whole, max(NOISE, 2.4 * math.hypot(whole_error, small_error))
        some_rows = (rows - self._whole_rows) / max(1, self._batches - self._whole_batches)
        share = some_rows / (self._whole_rows / self._whole_batches)
        return SmallStep(share, *shares, *errors) if share < 1 - NOISE else None

    def _forecast(self, clock: int, share: float, full: int, size: int, *, loads: bool) -> float:
        start, load, steps = (self._spent[name][clock] for name in (START, LOADING, STEPS))
        if share >= 1 - NOISE or self.small_step is None:
            return start + load * (1 if loads else full / self._rows) + steps * full / self._rows
        return start + (load + steps) / self.small_step.at(share, clock) * full / size / self._batches

    def forget(self) -> None:
        """Forgets all epochs: a saved run goes on, which another machine may have begun."""
        self.entries.clear()
        self.small_step = None
        self.drop()


class TimeTold(NamedTuple):
    """The time of the epochs that are over, beside the forecast of full training.

    Attributes:
        epochs: Number of epochs for which full training's time is known.
        seconds: Wall time of these epochs.
        full: Wall time that full training would have taken for them.
        cpu: CPU time of these epochs over that of full training; None where there is an accelerator, or where equal steps took
            too different CPU times to tell.
        error: Relative error of the forecast, half of a 95 % interval.
        parts: Seconds by what they were spent on: the steps, and each own part.
        unknown: Reason why the time of full training is not known in some epoch, a sentence without its full stop; else empty.
        busy: Whether the machine had more work than cores at the end of an epoch. Default: False.
    """

    epochs: int
    seconds: float
    full: float
    cpu: float | None
    error: float
    parts: Mapping[str, float]
    unknown: str
    busy: bool = False

    @property
    def longer(self) -> float:
        """How much longer the training took than full training, as a share of that; negative where it was shorter."""
        return self.seconds / self.full - 1

    @property
    def is_told_from_full(self) -> bool:
        """Whether the difference is larger than the error of the forecast."""
        return abs(self.longer) > self.error * max(1.0, self.seconds / self.full)

    def __str__(self) -> str:
        if not self.epochs:
            return f"not known: {self.unknown or 'no epoch is over yet'}"
        large = self.parts[ATTRIBUTION] > LARGE * self.full
        if self.error > MOST_ERROR and not self.is_told_from_full:
            steps = "attributing samples is a large part of such short steps" if large else "equal steps took different times"
            why = "the machine was busy" if self.busy else steps
            return (
                f"not known: it took {self.seconds:.3g} s, and the forecast of full training, {self.full:.3g} s, may be wrong "
                f"by {self.error:.0%}, because {why}"
            )
        # Beside so much attribution the loop's own work takes longer, too, which full training would not have paid.
        error, amount = f"± {self.error * self.seconds / self.full:.0%}", f"{abs(self.longer):.0%}"
        longer = f"at least {amount}" if large and self.longer > 0 else f"{amount} {error}"
        longer = f"about {amount}" if self.busy else longer  # the error is that of a machine that does nothing else
        longer += f" {'longer' if self.longer > 0 else 'shorter'} than"
        same = f"about the same{'' if self.busy else f' ({error})'} as"
        found = f"{longer if self.is_told_from_full else same} full training would have taken"
        spent = [f"{name} {value:.3g} s" for name, value in self.parts.items() if value >= 0.01 * self.seconds]
        found += f" ({', '.join(spent)}; forecast of full training {self.full:.3g} s)"
        if self.cpu is not None and abs(self.cpu - 1 - self.longer) >= NOISE:
            found += f"; CPU time {abs(self.cpu - 1):.0%} {'more' if self.cpu > 1 else 'less'}"
        found += "; the machine was busy, so that this is rough" * self.busy
        return found + (f"; some epochs are left out, because {self.unknown}" if self.unknown else "")


def told(entries: Iterable[Mapping[str, Any]]) -> TimeTold:
    """Returns the time of epochs that are over.

    Args:
        entries: Entries of `run.times`.

    Example:
        >>> print(told([{"seconds": 3.2, "tracing_s": 1.3, "full_seconds": 2.9, "time_error": 0.02}]))
        10% ± 2% longer than full training would have taken (steps 1.9 s, tracing 1.3 s; forecast of full training 2.9 s)
        >>> print(told([]))
        not known: no epoch is over yet
    """
    entries = [*entries]
    known = [entry for entry in entries if entry.get("full_seconds")]
    if sum(entry["seconds"] for entry in known) < LEAST_KNOWN * sum(entry.get("seconds", 0.0) for entry in entries):
        known = []  # what a few epochs took is not what the training takes: the first one traces, and others select less
    seconds, full = (sum(entry[name] for entry in known) for name in ("seconds", "full_seconds"))
    own = {name: sum(entry.get(f"{name}_s", 0.0) for entry in known) for name in PARTS}
    cpu = None
    if known and all(entry.get("full_cpu_seconds") for entry in known):
        cpu = sum(entry["cpu_seconds"] for entry in known) / sum(entry["full_cpu_seconds"] for entry in known)
        cpu = cpu if max(entry["cpu_time_error"] for entry in known) <= MOST_ERROR else None
    error = max((entry["time_error"] for entry in known), default=0.0)
    unknown = next((entry["time_unknown"] for entry in reversed(entries) if entry.get("time_unknown")), "")
    busy = any(entry.get("busy") for entry in known)
    return TimeTold(len(known), seconds, full, cpu, error, {STEPS: seconds - sum(own.values()), **own}, unknown, busy)


class Stopwatch:
    """Measures the ratio of backward time to forward time in the first steps, without waiting for the device.

    On the CPU it reads the process time; on CUDA it records events, which are read when the ratio is asked for.

    Args:
        device: Device of the model.
    """

    WARM_UP = 2
    STEPS = 12

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[list[Any]] = []
        self._shares: dict[int, float] = {}
        self.running = True
        """Whether more steps are to be measured."""

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def forward(self, call: Callable[[], Any]) -> Any:
        """Runs a forward pass of the training, notes when it began and ended, and returns its result."""
        begin = self._now()
        result = call()
        self._pairs.append([begin, self._now()])
        self.running = len(self._pairs) < self.WARM_UP + self.STEPS
        return result

    def watch(self, loss: torch.Tensor, share: float = 1.0) -> None:
        """Notes when the backward pass of `loss` begins and ends; it runs on a `share` of the rows."""
        if not self._pairs or len(self._pairs[-1]) != 2 or not loss.requires_grad:
            return
        pair = self._pairs[-1]
        self._shares[id(pair)] = share

        def started(_: torch.Tensor) -> None:
            if len(pair) == 2:
                pair.append(self._now())
                torch.autograd.Variable._execution_engine.queue_callback(lambda: pair.append(self._now()))

        loss.register_hook(started)

    def ratio(self) -> float | None:
        """Returns the median of backward time over forward time; None before three steps were measured."""
        ratios = []
        for pair in self._pairs[self.WARM_UP :]:
            if len(pair) != 4:
                continue
            if self._device.type == "cuda":
                if not pair[3].query():
                    continue
                forward, backward = pair[0].elapsed_time(pair[1]), pair[2].elapsed_time(pair[3])
            else:
                forward, backward = pair[1] - pair[0], pair[3] - pair[2]
            share = self._shares.get(id(pair), 1.0)
            if forward > 0 and share > 0:
                ratios.append(backward / forward / share)
        return statistics.median(ratios) if len(ratios) >= 3 else None

    def update(self, cost: Cost) -> None:
        """Writes the measured ratio to a cost; an earlier ratio stays while none is measured."""
        cost.backward_to_forward = self.ratio() or cost.backward_to_forward
