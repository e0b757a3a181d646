"""Times compiled steps that leave rows out, beside the smallest possible time, and trainings on sequences of many lengths.

`python -m benchmarks.compiled [--quick] [--only PART ...] [--out FILE.json] [--page FILE.md]`; exit code 1 where a limit is
missed. The baseline is `torch.compile(model)`, all of whose rows go backward.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import thresher
from benchmarks.marks import between_marks
from benchmarks.measure import Interval, Side, lines, median_interval, seconds_in_turns
from benchmarks.overhead import ROOT, about
from benchmarks.subset_backward import (
    BATCH,
    LM,
    TASKS,
    VOCABULARY,
    Task,
    keep_memory,
    losses_of_tokens,
    rows_of,
)
from thresher.subset import SubsetBackward, kept_rows

RESULTS = ROOT / "benchmarks" / "results" / "compiled.json"
MARKS = "<!-- compiled -->", "<!-- end of compiled -->"
"""Lines of the page that the results stand between."""
STEP_LIMITS = {"conv-gn": 1.10, "resnet20": 1.15, "vit": 1.15, "lm": 1.10}
"""Largest time of a step that keeps a third of the rows, over that of the ideal step."""
ALL_ROWS_LIMIT = 1.05
EXACT_LIMIT = 1e-12
COMPILATIONS_LIMIT = 2
LENGTHS_LIMIT = 1.1
GROWTH_LIMIT = 16.0
"""Largest growth of the memory of a process in MiB, over the second half of a training: all lengths have come by then."""
THIRD = 1 / 3


@dataclass(frozen=True)
class Row:
    """One measured value.

    Attributes:
        part: Part of the benchmark.
        name: Name of the model or training.
        what: Name of the value.
        value: The value; with an interval, its median.
        limit: Largest value that passes; None where the row only informs.
        low: Lower end of the 95 % interval; None without one.
        high: Upper end of the 95 % interval; None without one.
    """

    part: str
    name: str
    what: str
    value: float
    limit: float | None
    low: float | None = None
    high: float | None = None

    @property
    def judged(self) -> str:
        """Judgment by the interval: met or missed where all of it is on that side of the limit, else "cannot tell"."""
        if self.limit is None:
            return ""
        low, high = (
            (self.value, self.value)
            if self.low is None or self.high is None
            else (self.low, self.high)
        )
        return "met" if high <= self.limit else "missed" if low > self.limit else "cannot tell"

    def as_dict(self) -> dict[str, Any]:
        """Returns the values by name."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "judged": self.judged,
        }


def row_of(part: str, name: str, what: str, found: Interval, limit: float | None) -> Row:
    """Returns a row of a value with an interval."""
    return Row(part, name, what, found.median, limit, found.low, found.high)


# Steps


def made(
    task: Task, batch: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a model with inputs and targets, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, (x, y) = task.model().to(dtype), task.batch(batch)
    return model, x.to(dtype) if x.is_floating_point() else x, y


def steps(name: str, rounds: int, batch: int) -> list[Row]:
    """Times steps of one model; in a round all forms take turns."""
    keep_memory()  # not before lengths are measured: memory that is kept for each of them is no leak
    task = TASKS[name]
    model, x, y = made(task, batch)
    compiled: Any = torch.compile(model)
    subset = thresher.subset_backward(compiled, strict=True)

    def full(_: Tensor) -> None:
        task.losses(compiled(x), y).mean().backward()
        model.zero_grad(set_to_none=True)

    def kept(rows: Tensor) -> None:
        task.losses(kept_rows(subset(x), rows), y[rows]).mean().backward()
        model.zero_grad(set_to_none=True)

    every, third = rows_of(1.0, batch, x.device), rows_of(THIRD, batch, x.device)
    began = time.perf_counter()
    kept(third())
    seconds = time.perf_counter() - began
    sides = [
        Side("forward", lambda _: compiled(x), every),
        Side("full", full, every),
        Side("again", full, every),
    ]
    sides += [Side("all", kept, every), Side("third", kept, third)]
    (forward, whole, again, all_rows, some), _ = seconds_in_turns(sides, pairs=rounds, warm_up=2)
    share = len(third()) / batch
    ideal = [f + share * (t - f) for f, t in zip(forward, whole, strict=True)]

    def ratio(times: list[float], least: list[float]) -> Interval:
        return median_interval([mine / base for mine, base in zip(times, least, strict=True)])

    return [
        row_of("steps", name, "keep 1/3 over ideal", ratio(some, ideal), STEP_LIMITS[name]),
        row_of("steps", name, "keep 1 over full", ratio(all_rows, whole), ALL_ROWS_LIMIT),
        row_of("steps", name, "full again (A/A)", ratio(again, whole), None),
        row_of("steps", name, "keep 1/3 over full", ratio(some, whole), None),
        Row("steps", name, "compilation, s", seconds, None),
    ]


# Exactness and compilations


def exactness(name: str, batch: int) -> list[Row]:
    """Compares float64 gradients with those of the model itself, for several numbers of rows.

    Where batch normalization mixes samples, gradients of fewer than all rows are compared with those of `subset_backward`
    without a compiler.
    """
    task = TASKS[name]
    model, x, y = made(task, batch, torch.float64)
    compiled = thresher.subset_backward(model, strict=True, compile=True)
    examined = thresher.subset_backward(model, strict=True, compile=False)
    mixes = bool(thresher.mixes_samples(model))
    worst = 0.0
    for k in sorted({1, 2, batch // 3, batch // 2, batch - 1, batch}):
        rows = torch.randperm(batch, generator=torch.Generator().manual_seed(k))[:k].sort().values
        found = []
        for network in (compiled, examined if mixes and k < batch else model):
            model.zero_grad()
            task.losses(kept_rows(network(x), rows), y[rows]).mean().backward()
            found.append([p.grad for p in model.parameters()])
        largest = max(float(g.abs().max()) for g in found[1])
        worst = max(
            worst, *(float((a - b).abs().max()) / largest for a, b in zip(*found, strict=True))
        )
    return [Row("exactness", name, "float64 gradient, relative error", worst, EXACT_LIMIT)]


def compilations(name: str, count: int, batch: int) -> list[Row]:
    """Counts compilations over steps of which each keeps another number of rows."""
    task = TASKS[name]
    model, x, y = made(task, batch)
    subset = thresher.subset_backward(model, strict=True, compile=True)
    for step in range(count):
        rows = torch.randperm(batch)[: 1 + step * 37 % batch].sort().values
        task.losses(kept_rows(subset(x), rows), y[rows]).mean().backward()
        model.zero_grad(set_to_none=True)
    return [
        Row(
            "compilations",
            name,
            f"{count} steps of varying rows",
            subset.compilations,
            COMPILATIONS_LIMIT,
        )
    ]


# Sequences of many lengths


def lengths_of(count: int, most: int) -> list[int]:
    """Returns the length of the longest sequence of each batch, of at most 100 different ones, in a fixed random order."""
    order = torch.randperm(max(count, 100), generator=torch.Generator().manual_seed(0)).tolist()
    return [most - place % min(100, most - 8) for place in order][:count]


def resident() -> float:
    """Returns the memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class LongLM(LM):
    """The causal language model for sequences of up to 160 tokens, of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(160, self.tokens.embedding_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps shape (B, T) to (B, T, VOCABULARY)."""
        return self.head(self.layers(self.tokens(tokens) + self.positions[: tokens.shape[1]]))


def lengths(name: str, compile_it: bool, count: int, batch: int, most: int) -> list[Row]:
    """Times a training on sequences of many lengths with all rows kept, and one with a third, over plain training.

    The trainings take turns by steps. Tracing and compilation are counted, on both sides.
    """
    torch.manual_seed(0)
    model = LongLM()
    plain: Any = torch.compile(model) if compile_it else model
    networks: dict[str, Any] = {"plain": plain} if compile_it else {"plain": plain, "again": plain}
    networks |= {
        form: thresher.subset_backward(model, strict=False, compile=compile_it)
        for form in ("all", "third")
    }
    seconds = dict.fromkeys(networks, 0.0)
    for step, length in enumerate(lengths_of(count, most)):
        tokens = torch.randint(VOCABULARY, (batch, length + 1))
        names = list(networks)
        for form in names[step % len(names) :] + names[: step % len(names)]:
            rows = _rows(form, batch)
            began = time.perf_counter()
            _train(networks[form], tokens, rows)
            seconds[form] += time.perf_counter() - began
    fallen = [
        form
        for form, network in networks.items()
        if isinstance(network, SubsetBackward) and network.fallback
    ]
    traces = max(
        network._patience.traces
        for network in networks.values()
        if isinstance(network, SubsetBackward)
    )
    again = (
        [Row("lengths", name, "plain again (A/A)", seconds["again"] / seconds["plain"], None)]
        if "again" in seconds
        else []
    )
    return [
        Row(
            "lengths",
            name,
            "keep 1: total time over plain",
            seconds["all"] / seconds["plain"],
            LENGTHS_LIMIT,
        ),
        Row(
            "lengths",
            name,
            "keep 1/3: total time over plain",
            seconds["third"] / seconds["plain"],
            LENGTHS_LIMIT,
        ),
        *again,
        Row("lengths", name, "traces", traces, None),
        Row("lengths", name, "trainings that ended with the plain model", len(fallen), None),
    ]


def _rows(form: str, batch: int) -> Tensor:
    return (
        torch.arange(batch)
        if form != "third"
        else torch.randperm(batch)[: round(THIRD * batch)].sort().values
    )


def _train(network: Any, tokens: Tensor, rows: Tensor) -> None:
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    losses_of_tokens(kept_rows(network(x), rows), y[rows]).mean().backward()
    network.zero_grad(set_to_none=True)


def memory(name: str, compile_it: bool, count: int, batch: int, most: int) -> list[Row]:
    """Measures the memory of trainings on sequences of many lengths, each in a process of its own.

    In the first half the allocator of the process finds room for all lengths, with and without `subset_backward`.
    """
    rows = []
    for form, limit in (("plain", None), ("all", GROWTH_LIMIT), ("third", GROWTH_LIMIT)):
        with get_context("spawn").Pool(1) as pool:
            first, second = pool.apply(growths, (form, compile_it, count, batch, most))
        what = {"plain": "plain model", "all": "keep 1", "third": "keep 1/3"}[form]
        rows.append(
            Row(
                "memory", name, f"{what}: growth in steps {count // 5} to {count}, MiB", first, None
            )
        )
        rows.append(
            Row("memory", name, f"{what}: growth in {count} further steps, MiB", second, limit)
        )
    return rows


def growths(form: str, compile_it: bool, count: int, batch: int, most: int) -> tuple[float, float]:
    """Returns by how many MiB this process grows, after all lengths have come once, and in as many steps again.

    A value is the median over a tenth of the steps: the allocator takes and gives back up to 20 MiB within a few of them.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network: Any = LongLM()
    if form != "plain":
        network = thresher.subset_backward(network, strict=False, compile=compile_it)
    elif compile_it:
        network = torch.compile(network)
    found: list[float] = []
    for length in 2 * lengths_of(count, most):
        _train(network, torch.randint(VOCABULARY, (batch, length + 1)), _rows(form, batch))
        found.append(resident())
    window = max(1, count // 10)
    first, second, third = (
        median(found[end - window : end]) for end in (2 * window, count, 2 * count)
    )
    return second - first, third - second


# Command


def parts(quick: bool) -> dict[str, Callable[[], list[list[Row]]]]:
    """Returns the parts of the benchmark by name."""
    rounds, batch, names = (3, 16, ["conv-gn"]) if quick else (21, BATCH, list(STEP_LIMITS))
    count, sequences, most = (6, 4, 24) if quick else (500, 32, 160)
    of_memory = {"causal LM": False} if quick else {"causal LM": False, "causal LM, compiled": True}
    of_lengths: list[Callable[[], list[Row]]] = [
        lambda: lengths("causal LM", False, count, sequences, most)
    ]
    if not quick:
        of_lengths.append(
            lambda: _from_nothing("causal LM, compiled", True, count, sequences, most)
        )
    return {
        "lengths": lambda: [measure() for measure in of_lengths],
        "memory": lambda: [
            memory(name, compile_it, count, sequences, most)
            for name, compile_it in of_memory.items()
        ],
        "steps": lambda: [steps(name, rounds, batch) for name in names],
        "exactness": lambda: [exactness(name, 8 if quick else 32) for name in names],
        "compilations": lambda: [
            compilations(name, 8 if quick else 200, 12 if quick else 32) for name in names
        ],
    }


def _from_nothing(*arguments: Any) -> list[Row]:
    """Measures lengths without what the compiler keeps on disk of earlier processes."""
    with fresh_cache():
        return lengths(*arguments)


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows as text."""
    body = [
        (f"{row['part']}: {row['name']}", row["what"], _value(row), _limit(row)) for row in rows
    ]
    return lines(("", "", "value", "limit"), body)


def page_part(results: Mapping[str, Any]) -> str:
    """Returns the part of the page that shows the results, in Markdown."""
    header = ("part", "model", "value", "measured", "limit")
    body = [header, tuple("---" for _ in header)]
    body += [
        (row["part"], TITLES.get(row["name"], row["name"]), row["what"], _value(row), _limit(row))
        for row in results["rows"]
    ]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in body)
    versions = results["versions"]
    return f"{table}\n\nMeasured on one thread of an {results['device']['name']} CPU, torch {versions['torch']}."


TITLES = {name: task.title for name, task in TASKS.items()}


def _value(row: Mapping[str, Any]) -> str:
    interval = "" if row["low"] is None else f" [{row['low']:.3f}, {row['high']:.3f}]"
    value = row["value"]
    return (
        f"{value:.1e}{interval}"
        if 0 < value < 1e-3
        else f"{value:.3f}{interval}"
        if value % 1
        else f"{value:g}"
    )


def _limit(row: Mapping[str, Any]) -> str:
    return "" if row["limit"] is None else f"{row['limit']:g}: {row['judged']}"


def measured_before(path: Path, part: str, *, quick: bool) -> list[dict[str, Any]]:
    """Returns the rows of a part that a file of results has; those of another kind of run are left out.

    Args:
        path: JSON file, which need not exist.
        part: Name of the part.
        quick: Whether this run measures little.
    """
    held = json.loads(path.read_text()) if path.is_file() else {"quick": quick, "rows": []}
    return [row for row in held["rows"] if row["part"] == part and held["quick"] is quick]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="measure little: only to see that it runs"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(parts(True)),
        help="parts to measure; others stay (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)"
    )
    parser.add_argument(
        "--page", type=Path, help="page in Markdown whose part is written anew (default: none)"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, measure in parts(given.quick).items():
        if given.only is None or name in given.only:
            found = [row.as_dict() for row in itertools.chain.from_iterable(measure())]
            print(as_text(found), flush=True)
        else:
            found = measured_before(given.out, name, quick=given.quick)
        rows += found
    missed = [f"{row['name']}: {row['what']}" for row in rows if row["judged"] == "missed"]
    results = {
        "benchmark": "compiled",
        "quick": given.quick,
        **about(torch.device("cpu")),
        "missed": missed,
        "rows": rows,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n")
    if given.page is not None:
        given.page.write_text(between_marks(given.page.read_text(), *MARKS, page_part(results)))
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
