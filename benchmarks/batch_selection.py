"""Whole epochs of training that select in the batch, beside full training: is the saving that is counted also seen?

Counted: backward passes left out, times what a backward pass was measured to take. Seen: CPU seconds of an epoch of the loop,
loader, optimizer and selection included. `python -m benchmarks.batch_selection [--quick] [--out FILE.json]`; exit code 1
where less than 95 % of what is counted is seen with one forward pass.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thresher
from benchmarks.measure import Side, lines, median_interval, take_turns
from benchmarks.overhead import about
from thresher.experiments.tasks import Task, built_in

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "batch_selection.json"
TASKS = ("fashion-mnist", "fashion-mnist-resnet8")
KEEP = 0.33
LEAST_SEEN = 0.95
SEED = 0


def epochs_of(task: Task, data: Any, method: Any, passes: str, rounds: int) -> Callable[[object], None]:
    """A run of its own, one epoch a call."""
    model = task.build(SEED)
    optimizer = task.optimizer(model)
    loader, criterion = task.loader(data, SEED), task.criterion()
    run = thresher.attach(
        method,
        loader=loader,
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=2 * rounds + 2,
        forward_passes=passes,  # pyright: ignore[reportArgumentType]
    )

    def epoch(_: object) -> None:
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def passes_over(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], *, backward: bool) -> Callable[[object], None]:
    """Forward passes with gradients, and backward passes after them, with nothing around them."""

    def go(_: object) -> None:
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            if backward:
                loss.backward()
                model.zero_grad()

    return go


def measure(name: str, samples: int, rounds: int) -> dict[str, Any]:
    """Epochs of one task: medians over the rounds of what was seen and counted within each.

    Args:
        name: Of the task.
        samples: Of an epoch.
        rounds: Epochs of each side, taken in turns.
    """
    task = built_in(f"{name}@{samples}")
    data = task.load(task.find(None))
    batches, model = list(task.loader(data, SEED)), task.build(SEED)
    chosen = thresher.SelectiveBackprop(keep=KEEP)
    sides = {
        "full": epochs_of(task, data, thresher.FullData(), "auto", rounds),
        "again": epochs_of(task, data, thresher.FullData(), "auto", rounds),
        "once": epochs_of(task, data, chosen, "once", rounds),
        "twice": epochs_of(task, data, chosen, "twice", rounds),
        "forward": passes_over(model, batches, backward=False),
        "both": passes_over(model, batches, backward=True),
    }
    acts = [Side(side, act) for side, act in sides.items()]
    cpu, _ = take_turns(acts, pairs=rounds)
    seconds = dict(zip(sides, cpu, strict=True))
    keep = sum(chosen.count(len(y)) or 0 for _, y in batches) / samples
    found: dict[str, Any] = {"task": f"{name}@{samples}", "keep": keep, "rounds": rounds}
    found["seconds"] = {side: statistics.median(values) for side, values in seconds.items()}
    return found | {figure: vars(median_interval(values)) for figure, values in ratios(seconds, keep).items()}


def ratios(seconds: dict[str, list[float]], keep: float) -> dict[str, list[float]]:
    """For each round: backward over forward, epochs over the full one, and what was seen over what was counted."""
    rounds: Iterator[tuple[float, ...]] = zip(*(seconds[side] for side in seconds), strict=True)
    found: dict[str, list[float]] = {}
    for full, again, once, twice, forward, both in rounds:
        backward = both - forward
        figures = {
            "backward_to_forward": backward / forward,
            "again": again / full,
            "once": once / full,
            "twice": twice / full,
            "seen_once": (full - once) / ((1 - keep) * backward),
            "seen_twice": (full - twice) / ((1 - keep) * backward - keep * forward),
        }
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    return found


def table(measured: Sequence[dict[str, Any]]) -> str:
    """The figures as text."""

    def interval(of: dict[str, float]) -> str:
        return f"{of['median']:.3f} [{of['low']:.3f}, {of['high']:.3f}]"

    figures = ("backward_to_forward", "again", "once", "twice", "seen_once", "seen_twice")
    header = ("", "backward/forward", "A/A", "once/full", "twice/full", "seen/counted, once", "seen/counted, twice")
    return lines(header, [(row["task"], *(interval(row[figure]) for figure in figures)) for row in measured])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 where the limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_selection", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few batches and rounds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, help="tasks to measure")
    given = parser.parse_args(arguments)
    samples, rounds = (640, 3) if given.quick else (3840, 11)
    measured = [measure(name, samples, rounds) for name in given.only]
    print(table(measured))
    missed = [row["task"] for row in measured if row["seen_once"]["median"] < LEAST_SEEN]
    results = {"benchmark": "batch_selection", "quick": given.quick, **about(torch.device("cpu")), "missed": missed}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({**results, "measured": measured}, indent=1) + "\n")
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
