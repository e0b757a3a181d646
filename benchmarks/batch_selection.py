"""Compares whole epochs of training that select in the batch with full training: is the possible saving also measured?

The measured saving is that of the CPU seconds of an epoch of the loop, with loader, optimizer and selection. The possible
saving is that of a loop that knows the kept rows beforehand: it passes the other rows forward without gradients, and the kept
rows forward and backward. The counted saving is the number of backward passes left out, times the measured time of a backward
pass; how much of it is possible differs between machines. Run it as `python -m benchmarks.batch_selection [--quick] [--out
FILE.json]`; the exit code is 1 where, with one forward pass, the measured saving is less than 90 % of the possible one: where
the whole interval is below. Where the interval contains 90 %, these processes cannot tell.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thresher
from benchmarks.measure import Side, lines, median_interval, seconds_in_turns
from benchmarks.overhead import about
from thresher_lab.tasks import built_in
from thresher_lab.tasks.base import Task

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "batch_selection.json"
TASKS = ("fashion-mnist", "fashion-mnist-resnet8")
KEEP = 0.33
LEAST_SEEN = 0.9
SEED = 0
WARM_UP = 66
"""Number of steps of each side before the timing starts: a trace is compared with the module in steps 1, 2, 4, ..., 64."""


def steps_of(
    task: Task, data: Any, method: Any, passes: str, epochs: int, *, batches: int = 1
) -> Iterator[None]:
    """Trains a run of its own, one step per turn: with the loading of the batch and the work at the end of an epoch.

    A step that takes its rows from several `batches` of the data is followed by turns in which nothing happens.
    """
    model = task.build(SEED)
    optimizer = task.optimizer(model)
    loader, criterion = task.loader(data, SEED), task.criterion()
    run = thresher.attach(
        method,
        loader=loader,
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        forward_passes=passes,  # pyright: ignore[reportArgumentType]
    )
    for _ in range(epochs):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield from repeat(None, batches)


def passes_over(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], *, backward: bool
) -> Iterator[None]:
    """Makes forward passes with gradient, and backward passes after them if `backward`, and nothing else."""
    for x, y in cycle(batches):
        loss = F.cross_entropy(model(x), y)
        if backward:
            loss.backward()
            model.zero_grad()
        yield


def known_rows(task: Task, data: Any) -> Iterator[None]:
    """Trains on the first rows of each batch, as if they had been chosen before: the others are only passed forward."""
    model = task.build(SEED)
    optimizer, criterion, loader = task.optimizer(model), task.criterion(), task.loader(data, SEED)
    kept = thresher.SelectiveBackprop(keep=KEEP)
    while True:
        for x, y in loader:
            n = kept.count(len(y)) or 0
            with torch.no_grad():
                criterion(model(x[n:]), y[n:])
            criterion(model(x[:n]), y[:n]).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def seconds_of(name: str, samples: int, rounds: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of an epoch of each side in each round; the sides take a step in turns."""
    task = built_in(f"{name}@{samples}")
    data = task.load(task.find(None))
    batches, model = list(task.loader(data, SEED)), task.build(SEED)
    chosen, epochs = (
        thresher.SelectiveBackprop(keep=KEEP),
        rounds + 1 + math.ceil(WARM_UP / len(batches)),
    )
    steps_of_twice = math.ceil(samples * kept_share(samples, task.batch_size) / task.batch_size)
    if len(batches) % steps_of_twice:
        raise ValueError(
            f"{name}@{samples}: the {steps_of_twice} steps of two passes do not divide its {len(batches)} batches"
        )
    steps = {
        "full": steps_of(task, data, thresher.FullData(), "auto", epochs),
        "again": steps_of(task, data, thresher.FullData(), "auto", epochs),
        "once": steps_of(task, data, chosen, "once", epochs),
        "twice": steps_of(
            task, data, chosen, "twice", epochs, batches=len(batches) // steps_of_twice
        ),
        "known": known_rows(task, data),
        "forward": passes_over(model, batches, backward=False),
        "both": passes_over(model, batches, backward=True),
    }
    sides = [Side(side, lambda _, of=of: next(of)) for side, of in steps.items()]
    cpu, _ = seconds_in_turns(sides, pairs=rounds, calls=len(batches), warm_up=WARM_UP)
    return dict(zip(steps, cpu, strict=True))


def measure(name: str, samples: int, rounds: int, processes: int) -> dict[str, Any]:
    """Measures epochs of one task, and returns medians over several processes.

    The place of memory in a process makes one side some percent slower or faster as long as the process lives. More rounds do
    not change that; more processes do.

    Args:
        name: Name of the task.
        samples: Number of samples of an epoch.
        rounds: Number of epochs of each side in a process.
        processes: Number of processes, one after the other.
    """
    seconds: dict[str, list[float]] = {}
    for _ in range(processes):
        with get_context("spawn").Pool(1) as pool:
            for side, values in pool.apply(seconds_of, (name, samples, rounds)).items():
                seconds.setdefault(side, []).append(sum(values) / rounds)
    keep = kept_share(samples, built_in(name).batch_size)
    each = [
        dict(zip(seconds, values, strict=True)) for values in zip(*seconds.values(), strict=True)
    ]
    return {
        "task": f"{name}@{samples}",
        "keep": keep,
        "rounds": rounds,
        "processes": processes,
        "seconds": {
            side: [round(value, 4) for value in values] for side, values in seconds.items()
        },
        **{
            name: vars(median_interval([figure(one, keep) for one in each]))
            for name, figure in FIGURES.items()
        },
    }


def kept_share(samples: int, batch_size: int) -> float:
    """Returns the share of an epoch's samples that is kept, of whole batches and a partial last one."""
    chosen = thresher.SelectiveBackprop(keep=KEEP)
    whole, rest = divmod(samples, batch_size)
    kept = [chosen.count(size) or 0 for size in [batch_size] * whole + [rest] * (rest > 0)]
    return sum(kept) / samples


def _backward(s: Mapping[str, float]) -> float:
    return s["both"] - s["forward"]


def _full(s: Mapping[str, float]) -> float:
    """Returns the mean of the two sides that do the same."""
    return (s["full"] + s["again"]) / 2


def seen_once(s: Mapping[str, float], keep: float) -> float:
    """Returns the time of an epoch that one forward pass saves, over the time of the backward passes left out."""
    return (_full(s) - s["once"]) / ((1 - keep) * _backward(s))


def of_possible(s: Mapping[str, float], keep: float) -> float:
    """Returns the time of an epoch that one forward pass saves, over that of a loop that knows the kept rows beforehand."""
    return (_full(s) - s["once"]) / (_full(s) - s["known"])


def seen_twice(s: Mapping[str, float], keep: float) -> float:
    """Returns the same for two forward passes; it is above 1 because the first pass, without gradients, is cheaper."""
    return (_full(s) - s["twice"]) / ((1 - keep) * _backward(s) - keep * s["forward"])


FIGURES: dict[str, Callable[[Mapping[str, float], float], float]] = {
    "backward_to_forward": lambda s, keep: _backward(s) / s["forward"],
    "again": lambda s, keep: s["again"] / s["full"],
    "once": lambda s, keep: s["once"] / _full(s),
    "twice": lambda s, keep: s["twice"] / _full(s),
    "known": lambda s, keep: s["known"] / _full(s),
    "of_possible": of_possible,
    "seen_once": seen_once,
    "seen_twice": seen_twice,
}
"""Functions of the seconds of each side and the share kept, by the name of their result."""


def table(measured: Sequence[dict[str, Any]]) -> str:
    """Returns the results as text."""

    def interval(of: dict[str, float]) -> str:
        return f"{of['median']:.3f} [{of['low']:.3f}, {of['high']:.3f}]"

    ratios = ("backward/forward", "A/A", "once/full", "twice/full", "known rows/full")
    header = ("", *ratios, "seen/possible, once", "seen/counted, once", "seen/counted, twice")
    return lines(
        header, [(row["task"], *(interval(row[figure]) for figure in FIGURES)) for row in measured]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where the limit is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_selection", description=__doc__
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure a few batches, rounds and processes only"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=TASKS,
        default=TASKS,
        help="tasks to measure; the results of others stay in the file",
    )
    given = parser.parse_args(arguments)
    size = (768, 2, 2) if given.quick else (1920, 4, 6)
    before = (
        json.loads(given.out.read_text())
        if given.out.exists()
        else {"measured": [], "quick": given.quick}
    )
    if before["quick"] != given.quick and set(given.only) != set(TASKS):
        parser.error(
            f"{given.out} was measured {'with' if before['quick'] else 'without'} --quick: give another --out"
        )
    found = {row["task"].partition("@")[0]: row for row in before["measured"]}
    found |= {name: measure(name, *size) for name in given.only}
    measured = [found[name] for name in TASKS if name in found]
    print(table(measured))
    missed = [row["task"] for row in measured if row["of_possible"]["high"] < LEAST_SEEN]
    untold = [
        row["task"]
        for row in measured
        if row["of_possible"]["low"] < LEAST_SEEN <= row["of_possible"]["high"]
    ]
    judged = {"missed": missed, "cannot_tell": untold}
    results = {
        "benchmark": "batch_selection",
        "quick": given.quick,
        **about(torch.device("cpu")),
        **judged,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({**results, "measured": measured}, indent=1) + "\n")
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    print("".join(f"{one}: cannot tell; more processes would\n" for one in untold), end="")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
