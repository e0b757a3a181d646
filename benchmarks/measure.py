"""Paired, interleaved timing on machines that others use, too.

Every round runs each side once (or a small block of calls of each), in an order that is drawn anew, so that what disturbs one
side disturbs all. The result is the ratio to the baseline within a round: its median over the rounds, with a
distribution-free interval. The baseline runs twice per round; the ratio of these two is the A/A row, and a difference inside
its interval is none. CPU time is reported beside wall time, with one thread; garbage collection stays on, because it is part of
the cost of a side.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from thresher_lab.advise.pace import Spent, torch_threads

AGAIN = "{} again (A/A)"


def take_turns(
    sides: Sequence[Callable[[], Spent]],
    *,
    rounds: int,
    seed: int,
    calls: int = 1,
    warm_up: int = 1,
    last: Sequence[Callable[[], Spent] | None] = (),
) -> list[list[Spent]]:
    """Calls functions that time themselves, in turns and in an order that is drawn anew each time.

    Args:
        sides: The functions to compare.
        rounds: Number of rounds.
        seed: Random seed of the order; no global random state is used.
        calls: Number of calls of each function in a round.
        warm_up: Number of calls of each function before the first round, which are not counted.
        last: Functions that are called at the end of each round, one per side; None where a side has none.

    Returns:
        Seconds of each side in each round, summed over the calls of the round.
    """
    draw, order = random.Random(seed), list(range(len(sides)))
    for _ in range(warm_up):
        for side in sides:
            side()
    times: list[list[Spent]] = [[] for _ in sides]
    for _ in range(rounds):
        of_round: list[list[Spent]] = [[] for _ in sides]
        for _ in range(calls):
            draw.shuffle(order)
            for i in order:
                of_round[i].append(sides[i]())
        for i, finish in enumerate(last):
            if finish is not None:
                of_round[i].append(finish())
        for of_side, found in zip(times, of_round, strict=True):
            of_side.append(
                Spent(sum(spent.wall for spent in found), sum(spent.cpu for spent in found))
            )
    return times


@dataclass(frozen=True)
class Interval:
    """A median with its interval.

    Attributes:
        median: Median of the values.
        low: Lower end of the interval.
        high: Upper end of the interval.
        coverage: Probability that [low, high] contains the true median; below the level that was asked for where there are too
            few values, and the interval is then that of all values.
    """

    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        return f"{self.median:6.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Returns the median with its binomial interval, which assumes nothing but independent values.

    The r-th smallest and r-th largest of n values enclose the true median with probability 1 - 2 P(X < r), X binomial
    (n, 1/2); r is the largest with at least `level`, and 1 where there is none.

    Args:
        values: The values, at least one.
        level: Probability that the interval should have, in (0, 1). Default: 0.95.

    Raises:
        ValueError: There are no values.
    """
    n, ordered = len(values), sorted(values)
    if not n:
        raise ValueError("median_interval: no values")
    below, rank, coverage = 1, 1, 1 - 2 * 2.0**-n if n > 1 else 0.0
    for r in range(2, n // 2 + 1):
        below += math.comb(n, r - 1)
        wider = 1 - 2 * below / 2**n
        if wider < level:
            break
        rank, coverage = r, wider
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[n - rank], coverage)


@dataclass(frozen=True)
class Side:
    """One of the things that are compared.

    Attributes:
        name: Name in the table.
        act: Function that is timed; its argument is what `prepare` returned.
        prepare: Function that is called before every `act`, outside the timing.
        finish: Function for work that `act` postponed; called after the last `act` of a round, and timed.
        limit: Largest ratio to the baseline that passes; None where the row only informs.
        limit_s: Largest number of CPU seconds of a call that passes; None where there is no such limit.
    """

    name: str
    act: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    finish: Callable[[], Any] | None = None
    limit: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True)
class Row:
    """The ratios of one side to the baseline.

    Attributes:
        name: Name of the side.
        cpu: Ratio of CPU times.
        wall: Ratio of wall times.
        cpu_s: Median CPU seconds of a call of this side.
        wall_s: Median wall seconds of a call of this side.
        pairs: Number of rounds.
        calls: Number of calls of each side in a round.
        limit: Largest ratio that passes, see `Side`.
        judged: Name of the ratio that is compared with the limit, "cpu" or "wall".
        limit_s: Largest number of CPU seconds of a call that passes, see `Side`.
    """

    name: str
    cpu: Interval
    wall: Interval
    cpu_s: float
    wall_s: float
    pairs: int
    calls: int
    limit: float | None
    judged: str
    limit_s: float | None = None

    @property
    def value(self) -> float:
        """The ratio that is compared with the limit."""
        return (self.cpu if self.judged == "cpu" else self.wall).median

    @property
    def ok(self) -> bool:
        """Whether the value and the CPU seconds are within their limits, or there are none."""
        return (self.limit is None or self.value <= self.limit) and (
            self.limit_s is None or self.cpu_s <= self.limit_s
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the values by name."""
        return {**asdict(self), "value": self.value, "ok": self.ok}


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits until the device has finished its work."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def _timed(call: Callable[[], Any], wait: Callable[[], None]) -> Spent:
    """Calls a function and returns the time until it and the device are done."""
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wait()
    return Spent(cpu=time.process_time() - cpu, wall=time.perf_counter() - wall)


def _clock_overhead(wait: Callable[[], None], times: int = 201) -> Spent:
    """Returns the time that timing itself takes, which is subtracted from each measured time."""
    found = [_timed(lambda: None, wait) for _ in range(times)]
    return Spent(
        cpu=statistics.median(spent.cpu for spent in found),
        wall=statistics.median(spent.wall for spent in found),
    )


def seconds_in_turns(
    sides: Sequence[Side],
    *,
    pairs: int,
    calls: int = 1,
    warm_up: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[list[list[float]], list[list[float]]]:
    """Times all sides in turns.

    Args:
        sides: Sides to time.
        pairs: Number of rounds.
        calls: Number of calls of each side in a round.
        warm_up: Number of calls of each side before the first round, which are not counted.
        device: Device whose work is waited for before and after each call.
        seed: Random seed of the order of the sides; no global random state is used.

    Returns:
        CPU seconds and wall seconds of every side in every round, summed over the calls of the round.
    """
    wait = synchronizer(torch.device(device))
    with torch_threads(1):
        overhead = _clock_overhead(wait)

        def timed(call: Callable[[], Any]) -> Spent:
            spent = _timed(call, wait)
            return Spent(
                cpu=max(spent.cpu - overhead.cpu, 1e-9), wall=max(spent.wall - overhead.wall, 1e-9)
            )

        times = take_turns(
            [lambda side=side: timed(partial(side.act, side.prepare())) for side in sides],
            rounds=pairs,
            seed=seed,
            calls=calls,
            warm_up=warm_up,
            last=[None if side.finish is None else partial(timed, side.finish) for side in sides],
        )
    return [[spent.cpu for spent in of_side] for of_side in times], [
        [spent.wall for spent in of_side] for of_side in times
    ]


def compare(
    baseline: Side,
    sides: Sequence[Side],
    *,
    pairs: int,
    calls: int = 1,
    warm_up: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[Row]:
    """Returns the ratios of each side to the baseline, the A/A row first.

    Args:
        baseline: The baseline.
        sides: Sides that are compared with the baseline.
        pairs: Number of rounds.
        calls: Number of calls of each side in a round, in turns; times are summed over them.
        warm_up: Number of calls of each side before the first round, which are not counted.
        device: Device whose work is waited for before and after each call; wall time is judged where it is not the CPU.
        seed: Random seed of the order of the sides; no global random state is used.
    """
    device = torch.device(device)
    everyone = [
        baseline,
        replace(baseline, name=AGAIN.format(baseline.name), limit=None, limit_s=None),
        *sides,
    ]
    cpu, wall = seconds_in_turns(
        everyone, pairs=pairs, calls=calls, warm_up=warm_up, device=device, seed=seed
    )

    def over_baseline(times: list[list[float]], i: int) -> Interval:
        return median_interval([mine / base for mine, base in zip(times[i], times[0], strict=True)])

    return [
        Row(
            name=everyone[i].name,
            cpu=over_baseline(cpu, i),
            wall=over_baseline(wall, i),
            cpu_s=statistics.median(cpu[i]) / calls,
            wall_s=statistics.median(wall[i]) / calls,
            pairs=pairs,
            calls=calls,
            limit=everyone[i].limit,
            judged="cpu" if device.type == "cpu" else "wall",
            limit_s=everyone[i].limit_s,
        )
        for i in range(1, len(everyone))
    ]


def lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as text: the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    )


def judgment(limit: float | None, ok: bool, limit_s: float | None = None) -> str:
    """Returns the limits of a value and of its CPU seconds, and whether they were met; "" without a limit."""
    limits = [
        *([] if limit is None else [f"<= {limit:g}"]),
        *([] if limit_s is None else [f"<= {limit_s:.3g} s"]),
    ]
    return f"{', '.join(limits)} {'ok' if ok else 'MISSED'}" if limits else ""


def ratios_table(rows: Sequence[Row]) -> str:
    """Returns the rows of `compare` as text."""
    return lines(
        ("", "CPU ratio [95 %]", "wall ratio [95 %]", "CPU ms", "wall ms", "limit"),
        [
            (
                row.name,
                str(row.cpu),
                str(row.wall),
                f"{row.cpu_s * 1e3:.4g}",
                f"{row.wall_s * 1e3:.4g}",
                judgment(row.limit, row.ok, row.limit_s),
            )
            for row in rows
        ],
    )
