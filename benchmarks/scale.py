"""Measures a training with Kakurenbo on 10^8 samples: memory, plans, the saved state, and going on; in one process and in 8.

`python -m benchmarks.scale [--quick] [--out FILE.json] [--page FILE.md]`; exit code 1 where a limit is missed. Memory
is what the process holds beyond what it held before `attach`, at its largest from the first batch after a plan to the end of
the epoch, the forward-only pass over hidden samples included. The benchmark takes 6 GB, most of it to load a state beside
a run.

Of eight processes `benchmarks.many_ranks` measures the parts of an epoch that concern the books, without the training.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import thresher
from benchmarks import many_ranks
from benchmarks.many_ranks import largest
from benchmarks.marks import between_marks
from benchmarks.measure import Row, Side, compare, judgment, lines, ratios_table, seconds_in_turns
from benchmarks.overhead import (
    BATCH,
    Attached,
    CheapDataset,
    Shift,
    about,
    as_it_is,
    fill,
    randperm,
    resident,
    start_epoch,
)
from thresher_lab.training.store import write_json

RESULTS = Path(__file__).resolve().parent / "results" / "scale.json"
N, QUICK_N = 10**8, 10**6
MOST_RESIDENT, MOST_STATE, MOST_PLAN, MOST_FIRST = 18.0, 13.5, 1.0, 2.0
"""Limits: bytes per sample, and CPU time over that of torch.randperm."""
LARGE_BATCH = 2**11
MOST_OF_RANKS = {
    "first": {"planning": 26.0, "rest": 15.0},
    "others": {"gathering": 2.5, "planning": 2.5, "rest": 2.5},
}
"""Limits: bytes per sample of all processes, that process 0 and another one hold."""
MARKS = "<!-- tables of benchmarks.scale -->", "<!-- end of the tables -->"
"""Lines of a page that the results stand between."""


def attached(n: int, batch: int) -> Attached:
    """Returns a run with a computed shuffle over n cheap samples, after an epoch whose losses are filled in."""
    model, data = Shift(), CheapDataset(n)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch, sampler=thresher.Shuffle(data), collate_fn=as_it_is)
    run = thresher.attach(
        thresher.Kakurenbo(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=1000,
    )
    start_epoch(run)
    fill(run.records)
    return Attached(run, optimizer)


def steps(made: Attached) -> Iterator[None]:
    """Trains, one step per turn, for an epoch or the rest of one."""
    for x, y in made.run.loader:
        made.run.criterion(made.run.model(x), y).backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        yield


def nbytes(state: Any) -> int:
    """Returns the bytes of all tensors in a state."""
    if isinstance(state, Tensor):
        return state.nbytes
    parts = (
        state.values()
        if isinstance(state, Mapping)
        else state
        if isinstance(state, list | tuple)
        else ()
    )
    return sum(map(nbytes, parts))


def counted(run: thresher.Run) -> int:
    """Returns the bytes of the tables of a run: records, counts, and the plan."""
    plan = run._timeline.plan
    return nbytes(
        [
            dict(run.records),
            run.trained,
            plan.ids,
            *([] if plan.refresh is None else [plan.refresh]),
        ]
    )


def memory(n: int) -> tuple[Attached, list[dict[str, Any]]]:
    """Trains an epoch, and returns the run and the rows of its memory.

    Args:
        n: Number of samples.
    """
    for _ in steps(small := attached(1000, BATCH)):  # loads what a training needs
        pass
    small.run.state_dict()
    gc.collect()
    before, found = resident()[0], {"resident": 0}
    made = attached(n, min(LARGE_BATCH, n // 16))
    epoch = steps(made)
    next(epoch)  # makes the plan
    with largest(found):
        tables = counted(made.run)
        for _ in epoch:
            pass
        epochs = made.run.history
    hidden = epochs[-1]["refreshed"] / n
    # A process of a million samples holds more for one batch than for a table.
    held, limit = (found["resident"] - before) / n, MOST_RESIDENT if n >= N else None
    return made, [
        row("tables of the run, added up", tables / n, MOST_RESIDENT),
        row(f"resident memory, {hidden:.0%} of the samples hidden", held, limit),
    ]


def row(name: str, value: float, limit: float | None, unit: str = "B per sample") -> dict[str, Any]:
    """Returns one line of the results."""
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "limit": limit,
        "ok": limit is None or value <= limit,
    }


def state_and_resume(made: Attached, n: int, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the bytes of the state in mid-epoch, and the CPU time of the first batch of a run that goes on from there.

    Args:
        made: The run, between epochs.
        n: Number of samples.
        rounds: Number of times that the run goes on.
    """
    epoch = steps(made)
    while made.run.progress * 1000 % 1 < 0.05:
        next(epoch)
    state = made.run.state_dict()
    run = attached(n, min(LARGE_BATCH, n // 16)).run
    side = Side("", lambda _: next(iter(run.loader)), prepare=lambda: run.load_state_dict(state))
    (cpu_s, permuted_s), _ = seconds_in_turns([side, randperm(n)], pairs=rounds)
    ratio = statistics.median(cpu_s) / statistics.median(permuted_s)
    limit = MOST_FIRST if n >= N else None
    first = row("first batch after a resume in mid-epoch", ratio, limit, "randperms")
    return row("saved state, tensors", nbytes(state) / n, MOST_STATE), first


def plans(made: Attached, n: int, rounds: int) -> list[Row]:
    """Times plans of a run, as it makes them and holds them, over torch.randperm.

    Args:
        made: The run.
        n: Number of samples.
        rounds: Number of rounds.
    """
    fill(made.run.records)  # losses of few samples that are repeated have many ties
    planner = made.run._timeline.planner
    side = Side("Kakurenbo", lambda _: planner.plan(1, 0), limit=MOST_PLAN if n >= N else None)
    return compare(randperm(n), [side], pairs=rounds)


def as_text(results: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Returns the tables."""
    found = [
        (one["name"], f"{one['value']:.3f} {one['unit']}", judgment(one["limit"], one["ok"]))
        for one in (*results["memory"], results["state"], results["first"])
    ]
    table = lines((f"N = {results['n']:,}, one process", "", "limit"), found)
    return "\n\n".join(
        (
            table,
            f"a plan over torch.randperm(N)\n{ratios_table(rows)}",
            many_ranks_part(results["processes"]),
        )
    )


def one_process_part(results: Mapping[str, Any]) -> str:
    """Returns what was measured in one process in Markdown.

    Args:
        results: Content of the results.
    """
    again, plan = results["plans"]
    ratio = f"{plan['cpu']['median']:.2f} [{plan['cpu']['low']:.2f}, {plan['cpu']['high']:.2f}]"
    rows = (*results["memory"], results["state"], results["first"])
    measured = [(one["name"], f"{one['value']:.3f} {one['unit']}", one["limit"]) for one in rows]
    measured.append(
        (
            f"a plan, {plan['cpu_s']:.1f} CPU s",
            f"{ratio} of the CPU time of torch.randperm",
            plan["limit"],
        )
    )
    measured.append(("torch.randperm against itself (A/A)", f"{again['cpu']['median']:.2f}", None))
    return "\n".join(
        (
            f"Kakurenbo on {results['n']:,} samples in one process, one thread:\n",
            "| | measured | limit |",
            "|---|---|---|",
            *(
                f"| {name} | {value} | {'' if limit is None else f'{limit:g}'} |"
                for name, value, limit in measured
            ),
        )
    )


def page_part(results: Mapping[str, Any]) -> str:
    """Returns the part of a page that shows the results, in Markdown.

    Args:
        results: Content of the results.
    """
    return f"{one_process_part(results)}\n\n{many_ranks_part(results['processes'])}"


PARTS = {
    "recording": "the losses of the epoch are recorded",
    "gathering": "they are sent to process 0",
    "planning": "process 0 plans, and sends the plan",
    "order": "the kept samples of the order are counted",
    "rest": "after that",
}
"""Parts of an epoch, and what happens in them."""


def rows_of_ranks(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of the memory of several processes.

    Args:
        found: Result of `many_ranks.measure`.
    """
    limits = MOST_OF_RANKS if found["n"] >= N else {"first": {}, "others": {}}
    return [
        row(f"{who}: {part}", found[who][part], limits[who].get(part))
        for who in limits
        for part in PARTS
    ]


def many_ranks_part(found: Mapping[str, Any]) -> str:
    """Returns what was measured in several processes in Markdown.

    Args:
        found: Result of `many_ranks.measure`.
    """
    limits = MOST_OF_RANKS

    def cell(who: str, part: str) -> str:
        most = limits[who].get(part)
        return f"{found[who][part]:.2f}{'' if most is None else f' (limit {most:g})'}"

    table = (
        f"| {what} | {cell('first', part)} | {cell('others', part)} | {_seconds(found['seconds'].get(part))} |"
        for part, what in PARTS.items()
    )
    return "\n".join(
        (
            f"Kakurenbo on {found['n']:,} samples in {found['ranks']} processes on two cores, an epoch without its training; "
            "bytes per sample of all processes, at the largest:\n",
            "| part of the epoch | process 0 | the largest of the others | wall time |",
            "|---|---|---|---|",
            *table,
        )
    )


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"measure {QUICK_N:,} samples, and plans once"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)"
    )
    parser.add_argument(
        "--page", type=Path, help="page in Markdown whose tables are written anew (default: none)"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    n, rounds = (QUICK_N, 1) if given.quick else (N, 5)
    made, of_memory = memory(n)
    state, first = state_and_resume(made, n, rounds)
    rows = plans(made, n, rounds)
    results = {
        "benchmark": "scale",
        "quick": given.quick,
        **about(torch.device("cpu")),
        "n": n,
        "rounds": rounds,
        "memory": of_memory,
        "state": state,
        "first": first,
        "plans": [one.as_dict() for one in rows],
        "peak_bytes": resident()[1],
        "processes": many_ranks.measure(n),
    }
    judged = (*of_memory, state, first, *results["plans"], *rows_of_ranks(results["processes"]))
    missed = [one["name"] for one in judged if not one["ok"]]
    print(as_text(results, rows))
    write_json(given.out, {**results, "missed": missed})
    if given.page is not None:
        given.page.write_text(between_marks(given.page.read_text(), *MARKS, page_part(results)))
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
