"""Measures what Winnow costs beside the rows that it trains on: its plans, the time of an epoch, and an epoch of slow data.

Winnow trains on a share of each batch, so that an epoch should take that share of the time of full training: `over share` is
the time of an epoch over that of full training, divided by the share. Some of a step takes the same time for any number of
rows, in PyTorch as in this library. The rows "by hand" show what PyTorch alone makes of it: a loop without this library,
with as many steps and as many rows in each, drawn uniformly. "step of 2 rows" is the time of a step that computes next to
nothing, over that of a step of full training. A limit that even the loop by hand misses is out of reach on that network; it
is said so, and not counted as missed. The steps of the plain CNN are so short (`SHORT_STEPS`) that this decides its figures;
the limit is for the other two. Sides take a step in turns, in several processes, and limits are judged by the interval over the
processes.

`python -m benchmarks.winnow_cost [--quick] [--out FILE.json] [--only plan epochs slow] [--page FILE.md]`; the exit code is 1
where a limit is missed: where the whole interval is above it. Where the interval contains the limit, these processes cannot
tell.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

import thresher
from benchmarks.marks import between_marks
from benchmarks.measure import Interval, Side, compare, lines, median_interval, seconds_in_turns
from benchmarks.overhead import TEN_MILLION, about, attached, randperm, start_epoch
from benchmarks.winnow.tasks import plain_cnn
from thresher.records import NEVER_SEEN
from thresher_lab.tasks import built_in
from thresher_lab.tasks.base import Data, Task
from thresher_lab.tasks.networks import perceptron
from thresher_lab.training.files import markdown_table

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "winnow_cost.json"
SHARES = (0.5, 0.35)
LIMIT = 1.05
"""Largest time of an epoch over that of full training and over the share, and over that of the loop by hand."""
STEPS_LIMIT = 1.12
"""Largest time of an epoch in fewer steps over that of full training and over the share."""
PLAN_LIMIT = 2.5
"""Largest time of a plan over that of torch.randperm."""
SHORT_STEPS = ("plain CNN",)
"""Networks with steps of a few milliseconds at 128 rows, a quarter of which no number of rows changes: by hand informs."""
FEW = 2
"""Rows of a step that computes next to nothing; BatchNorm needs two."""
SEED = 0
WARM_UP = 2
"""Number of epochs of each side before the timing starts: records are known, and a run has timed its own first steps."""
PARTS = ("plan", "epochs", "slow")
MARKS = "<!-- tables of benchmarks.winnow_cost -->", "<!-- end of the tables of costs -->"
"""Lines of a page that the tables stand between."""


# Networks and data


def networks(samples: int) -> dict[str, Callable[[], tuple[Task, Data]]]:
    """Returns functions that load what epochs are measured with, by name.

    The rates are a tenth of those of the tasks, so that no side diverges: an epoch takes the same time with any rate.

    Args:
        samples: Number of samples of an epoch.
    """

    def loaded(name: str, **changes: Any) -> tuple[Task, Data]:
        task = built_in(f"{name}@{samples}")
        return replace(task, lr=task.lr / 10, **changes), task.load(task.find(None))

    return {
        "plain CNN": partial(loaded, "fashion-mnist", network=plain_cnn),
        "small CNN": partial(loaded, "fashion-mnist"),
        "ResNet-8": partial(loaded, "fashion-mnist-resnet8"),
    }


class SlowDataset(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take a millisecond to load, and hardly any work."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._inputs = torch.randn(n, 20, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.001)
        return self._inputs[i], torch.tensor(i % 10)


def slow_task(samples: int) -> tuple[Task, Data]:
    """Returns a training that waits for its data nearly all of the time."""
    nothing = torch.empty(0)
    data = Data(SlowDataset(samples), nothing, nothing)  # pyright: ignore[reportArgumentType]
    return Task(
        "slow", lambda _: None, lambda _: data, partial(perceptron, 20), lr=0.01, batch_size=64
    ), data


# Loops, a step per turn


class EvenBatches(Sampler[list[int]]):
    """A new random subset in each epoch, in batches whose sizes differ by one at most.

    Args:
        n: Number of samples of the dataset.
        steps: Number of steps of an epoch.
        rows: Number of rows of all steps together.
    """

    def __init__(self, n: int, steps: int, rows: int) -> None:
        self._n = n
        self._ends = [step * rows // steps for step in range(steps + 1)]
        self._generator = torch.Generator().manual_seed(SEED)

    def __iter__(self) -> Iterator[list[int]]:
        ids = torch.randperm(self._n, generator=self._generator).tolist()
        for begin, end in pairwise(self._ends):
            yield ids[begin:end]

    def __len__(self) -> int:
        return len(self._ends) - 1


def steps(
    loader: Any, model: Any, criterion: Any, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Trains for an epoch, one step per turn."""
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def by_hand(task: Task, data: Data, share: float) -> Iterator[None]:
    """Trains without this library: on all samples, or with as many steps on a share of them."""
    model, loader = task.build(SEED), task.loader(data, SEED)
    if share < 1:
        n = len(data.train)
        rows = round(share * n)
        batches = EvenBatches(n, len(loader), rows)
        loader = DataLoader(data.train, batch_sampler=batches)
    optimizer, criterion = task.optimizer(model), task.criterion()
    while True:
        yield from steps(loader, model, criterion, optimizer)


def with_winnow(
    task: Task, data: Data, share: float, epochs: int, spend: Literal["steps"] | None = None
) -> Iterator[None]:
    """Trains with Winnow; the draw stays in proportion to the uncertainty, however little the network has learned."""
    model, loader = task.build(SEED), task.loader(data, SEED)
    optimizer = task.optimizer(model)
    run = thresher.attach(
        thresher.Winnow(share, least_agreement=-1),
        loader=loader,
        criterion=task.criterion(),
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        spend=spend,
    )
    for _ in range(epochs):
        yield from steps(run.loader, run.model, run.criterion, optimizer)


# Measuring, in a process of its own


def epoch_seconds(
    load: Callable[[], tuple[Task, Data]], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the CPU seconds and the wall seconds of an epoch of each side; the sides take a step in turns."""
    task, data = load()
    n, few = len(data.train), FEW / task.batch_size
    epochs = rounds + WARM_UP + 1
    turns = {"full": by_hand(task, data, 1.0), "again": by_hand(task, data, 1.0)}
    for share in (*SHARES, few):
        turns[_side("hand", share, few)] = by_hand(task, data, share)
        turns[_side("winnow", share, few)] = with_winnow(task, data, share, epochs)
    for share in SHARES:
        turns[_side("steps", share, few)] = with_winnow(
            task, data, share, round(epochs / share) + 1, "steps"
        )
    sides = [Side(name, lambda _, of=of: next(of)) for name, of in turns.items()]
    calls = -(-n // task.batch_size)
    both = seconds_in_turns(sides, pairs=rounds, calls=calls, warm_up=WARM_UP * calls)
    # All sides take as many steps: in fewer steps, those are of more epochs.
    parts = {_side("steps", share, few): share for share in SHARES}
    cpu, wall = (
        {name: parts.get(name, 1) * sum(of) / rounds for name, of in zip(turns, times, strict=True)}
        for times in both
    )
    return cpu, wall


def _side(kind: str, share: float, few: float) -> str:
    return f"{kind} {'few' if share == few else f'{share:g}'}"


def network_seconds(name: str, samples: int, rounds: int) -> dict[str, float]:
    """Returns the CPU seconds of an epoch of each side, with one of the networks."""
    return epoch_seconds(networks(samples)[name], rounds)[0]


def slow_seconds(samples: int, rounds: int) -> dict[str, float]:
    """Returns the wall seconds of an epoch of each side, with samples that take a millisecond to load."""
    return epoch_seconds(partial(slow_task, samples), rounds)[1]


def plan_ratios(n: int, pairs: int) -> dict[str, float]:
    """Returns the CPU time of plans over that of torch.randperm(n), in medians over the pairs, with its A/A ratio."""
    method, generator = thresher.Winnow(0.5), torch.Generator().manual_seed(1)
    known = {
        "uncertainty": torch.rand(n, generator=generator).to(torch.bfloat16),
        "loss": torch.empty(n).exponential_(generator=generator).to(torch.bfloat16),
        "credit": torch.rand(n, generator=generator),
    }
    unknown = {name: torch.full_like(column, NEVER_SEEN) for name, column in known.items()}
    seeds = iter(range(10**9))

    def planned(records: Mapping[str, Tensor]) -> None:
        method.plan_epoch(
            records, epoch=5, epochs=10, generator=torch.Generator().manual_seed(next(seeds))
        )

    started = attached(method, n, torch.device("cpu")).run
    for name, column in known.items():
        started.records[name].copy_(column)
    sides = [
        Side("plan, records known", lambda _: planned(known)),
        Side("plan, before records", lambda _: planned(unknown)),
        Side("start of an epoch", lambda _: start_epoch(started)),
    ]
    names = ("again", *(side.name for side in sides))
    return {
        name: row.cpu.median
        for name, row in zip(names, compare(randperm(n), sides, pairs=pairs), strict=True)
    }


def in_processes(
    count: int, measure: Callable[..., dict[str, float]], *arguments: Any
) -> dict[str, list[float]]:
    """Measures in several new processes, one after the other, and returns the value of each by name.

    The place of memory in a process makes one side some percent slower or faster as long as the process lives. More rounds do
    not change that; more processes do.

    Args:
        count: Number of processes.
        measure: Function that returns values by name.
        arguments: Arguments of the function.
    """
    found: dict[str, list[float]] = {}
    for _ in range(count):
        with get_context("spawn").Pool(1) as pool:
            for name, value in pool.apply(measure, arguments).items():
                found.setdefault(name, []).append(value)
    return found


# What was found


@dataclass(frozen=True)
class Found:
    """One figure, and how it is judged.

    Args:
        name: Name of the figure.
        value: Median over the processes, with its interval.
        limit: Largest value that passes; None where the figure only informs.
        by_hand: The same figure of the loop by hand, where there is one.
    """

    name: str
    value: Interval
    limit: float | None = None
    by_hand: Interval | None = None

    @property
    def verdict(self) -> str:
        """Whether the limit is met: "met", "missed", "out of reach" where the loop by hand misses it too, or "cannot tell"."""
        if self.limit is None:
            return ""
        if self.value.high <= self.limit:
            return "met"
        if self.value.low <= self.limit:
            return "cannot tell"
        return (
            "out of reach"
            if self.by_hand is not None and self.by_hand.low > self.limit
            else "missed"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the values by name."""
        return {**asdict(self), "verdict": self.verdict}


def epoch_figures(
    seconds: Mapping[str, Sequence[float]], *, short_steps: bool = False
) -> list[Found]:
    """Returns what the times of epochs say.

    Args:
        seconds: Seconds of an epoch of each side, one value per process.
        short_steps: Whether the steps are so short that the comparison with the loop by hand only informs. Default: False.
    """
    each = [
        dict(zip(seconds, values, strict=True)) for values in zip(*seconds.values(), strict=True)
    ]

    def over(side: str, other: str | None = None, share: float = 1.0) -> Interval:
        def full(s: Mapping[str, float]) -> float:
            return (s["full"] + s["again"]) / 2 if other is None else s[other]

        return median_interval([s[side] / full(s) / share for s in each])

    found = [Found("full training again (A/A)", over("again", "full"))]
    for share in SHARES:
        hand = over(f"hand {share:g}", share=share)
        found += [
            Found(f"by hand at {share:g}, over share", hand),
            Found(
                f"Winnow at {share:g}, over share",
                over(f"winnow {share:g}", share=share),
                LIMIT,
                hand,
            ),
            Found(
                f"Winnow at {share:g}, over by hand",
                over(f"winnow {share:g}", f"hand {share:g}"),
                None if short_steps else LIMIT,
            ),
            Found(
                f"Winnow at {share:g} in fewer steps, over share",
                over(f"steps {share:g}", share=share),
                STEPS_LIMIT,
            ),
        ]
    return [
        *found,
        Found(f"step of {FEW} rows by hand, over a full step", over("hand few")),
        Found(f"step of {FEW} rows with Winnow, over a full step", over("winnow few")),
    ]


def plan_figures(ratios: Mapping[str, Sequence[float]]) -> list[Found]:
    """Returns what the times of plans say.

    Args:
        ratios: Times over that of torch.randperm by name, one value per process.
    """
    intervals = {name: median_interval(values) for name, values in ratios.items()}
    title = {"again": "torch.randperm again (A/A)"}
    return [
        Found(title.get(name, name), interval, PLAN_LIMIT if name.startswith("plan") else None)
        for name, interval in intervals.items()
    ]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Args:
        plan: Number of samples of a plan.
        pairs: Number of pairs of a plan and torch.randperm in a process.
        samples: Number of samples of an epoch with a network.
        slow: Number of samples of an epoch of slow data.
        rounds: Number of epochs of each side in a process.
        processes: Number of processes.
    """

    plan: int = TEN_MILLION
    pairs: int = 7
    samples: int = 1920
    slow: int = 512
    rounds: int = 4
    processes: int = 6


QUICK = Sizes(plan=2_000_000, pairs=3, samples=512, slow=128, rounds=1, processes=2)


def measured(part: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Measures one of `PARTS`, and yields one table after the other."""

    def table(
        on: str, unit: str, values: Mapping[str, Sequence[float]], found: Sequence[Found]
    ) -> dict[str, Any]:
        rounded = {name: [float(f"{value:.5g}") for value in of] for name, of in values.items()}
        return {"part": part, "on": on, unit: rounded, "figures": [one.as_dict() for one in found]}

    if part == "plan":
        ratios = in_processes(sizes.processes, plan_ratios, sizes.plan, sizes.pairs)
        yield table(
            f"{sizes.plan:,} samples, CPU time over torch.randperm",
            "ratios",
            ratios,
            plan_figures(ratios),
        )
    elif part == "epochs":
        for name in networks(sizes.samples):
            seconds = in_processes(
                sizes.processes, network_seconds, name, sizes.samples, sizes.rounds
            )
            figures = epoch_figures(seconds, short_steps=name in SHORT_STEPS)
            yield table(f"{name}, CPU time of an epoch", "seconds", seconds, figures)
    else:
        seconds = in_processes(sizes.processes, slow_seconds, sizes.slow, sizes.rounds)
        title = "samples that take 1 ms to load, wall time of an epoch"
        yield table(title, "seconds", seconds, epoch_figures(seconds))


HEADER = ("median [95 %]", "limit", "")
"""Headings of the tables, without the first one."""


def _cells(table: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    return [
        (
            one["name"],
            str(Interval(**one["value"])).strip(),
            "" if one["limit"] is None else f"at most {one['limit']:g}",
            one["verdict"],
        )
        for one in table["figures"]
    ]


def as_text(table: Mapping[str, Any]) -> str:
    """Returns a table of `measured` as text."""
    return lines((table["on"], *HEADER), _cells(table))


def page_part(tables: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables in Markdown.

    Args:
        tables: Tables of `measured`; none where nothing is measured yet.
    """
    parts = [markdown_table((table["on"], *HEADER), _cells(table)) for table in tables]
    return "\n\n".join(parts) or "Not measured yet."


def judged(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the names of the figures that missed their limits, or may have, by verdict."""
    named = [
        (one["verdict"], f"{table['on']}: {one['name']}")
        for table in tables
        for one in table["figures"]
    ]
    verdicts = ("missed", "out of reach", "cannot tell")
    return {
        verdict.replace(" ", "_"): [name for of, name in named if of == verdict]
        for verdict in verdicts
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.winnow_cost", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="measure few samples, rounds and processes only"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="parts to measure; the results of others stay in the file",
    )
    parser.add_argument(
        "--page", type=Path, help="page in Markdown whose tables are written anew (default: none)"
    )
    given = parser.parse_args(arguments)
    before = (
        json.loads(given.out.read_text())
        if given.out.exists()
        else {"tables": [], "quick": given.quick}
    )
    if before["quick"] != given.quick and set(given.only) != set(PARTS):
        parser.error(
            f"{given.out} was measured {'with' if before['quick'] else 'without'} --quick: give another --out"
        )
    sizes = QUICK if given.quick else Sizes()
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for table in before["tables"]:
        found[table["part"]] += [] if table["part"] in given.only else [table]
    for part in given.only:
        for table in measured(part, sizes):
            print(f"{as_text(table)}\n", flush=True)
            found[part].append(table)
    tables = [table for of_part in found.values() for table in of_part]
    verdicts = judged(tables)
    results = {
        "benchmark": "winnow_cost",
        "quick": given.quick,
        **about(torch.device("cpu")),
        **verdicts,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({**results, "tables": tables}, indent=1) + "\n")
    if given.page is not None:
        given.page.write_text(between_marks(given.page.read_text(), *MARKS, page_part(tables)))
    for verdict, names in verdicts.items():
        print(
            f"{verdict.replace('_', ' ')}: {len(names)}" + "".join(f"\n  {name}" for name in names)
        )
    return 1 if verdicts["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
