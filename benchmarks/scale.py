"""Measures a training with Kakurenbo on 10^8 samples in one process: memory, plans, the saved state, and going on.

`python -m benchmarks.scale [--quick] [--out FILE.json] [--page FILE.md]`; exit code 1 where a limit is missed. Memory
is what the process holds beyond what it held before `attach`, at its largest from the first batch after a plan to the end of
the epoch, the forward-only pass over hidden samples included. The benchmark takes 6 GB, most of it to load a state beside
a run.

The model of a training in many processes is made of parts that `benchmarks.many_ranks` counts and times.
"""

import argparse
import gc
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import thresher
from benchmarks import many_ranks
from benchmarks.many_ranks import Size
from benchmarks.marks import between_marks
from benchmarks.measure import Row, Side, compare, judgement, lines, ratios_table, seconds_in_turns
from benchmarks.overhead import BATCH, Attached, CheapDataset, Shift, about, as_it_is, fill, randperm, resident, start_epoch
from thresher_lab.training.store import write_json

RESULTS = Path(__file__).resolve().parent / "results" / "scale.json"
N, QUICK_N = 10**8, 10**6
MOST_RESIDENT, MOST_STATE, MOST_PLAN, MOST_FIRST_S = 14.0, 13.5, 1.0, 0.2
"""Limits: bytes per sample, CPU time over that of torch.randperm, and CPU seconds."""
LARGE_BATCH = 2**11
MODEL, CHECKED = Size(10**9, 1024), Size(2**21, 1024)
"""Size of the training that is modelled, and that at which its traffic is counted."""
QUICK_MODEL = Size(2**17, 16), Size(2**14, 16)
MARKS = "<!-- tables of benchmarks.scale -->", "<!-- end of the tables -->"
"""Lines of a page that the results stand between."""


def attached(n: int, batch: int) -> Attached:
    """Returns a run with a computed shuffle over n cheap samples, after an epoch whose losses are filled in."""
    model, data = Shift(), CheapDataset(n)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch, sampler=thresher.Shuffle(data), collate_fn=as_it_is)
    run = thresher.attach(
        thresher.Kakurenbo(), loader=loader, criterion=nn.CrossEntropyLoss(), model=model, optimizer=optimizer, epochs=1000
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


@contextmanager
def largest(found: dict[str, int]) -> Iterator[None]:
    """Writes the largest number of bytes that the process held, at any of many moments, to `found["resident"]`."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            found["resident"] = max(found["resident"], resident()[0])

    found["resident"] = resident()[0]
    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def nbytes(state: Any) -> int:
    """Returns the bytes of all tensors in a state."""
    if isinstance(state, Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(map(nbytes, parts))


def counted(run: thresher.Run) -> int:
    """Returns the bytes of the tables of a run: records, counts, and the plan."""
    plan = run._epochs.held.own
    return nbytes([dict(run.records), run.trained, plan.ids, *([] if plan.refresh is None else [plan.refresh])])


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
    return {"name": name, "value": value, "unit": unit, "limit": limit, "ok": limit is None or value <= limit}


def state_and_resume(made: Attached, n: int, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the bytes of the state in mid-epoch, and the CPU seconds of the first batch of a run that goes on from there.

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
    (cpu_s,), _ = seconds_in_turns([side], pairs=rounds)
    first = row("first batch after a resume in mid-epoch", statistics.median(cpu_s), MOST_FIRST_S, "CPU s")
    return row("saved state, tensors", nbytes(state) / n, MOST_STATE), first


def plans(made: Attached, n: int, rounds: int) -> list[Row]:
    """Times plans of a run, as it makes them and holds them, over torch.randperm.

    Args:
        made: The run.
        n: Number of samples.
        rounds: Number of rounds.
    """
    fill(made.run.records)  # losses of few samples that are repeated have many ties
    planner = made.run._epochs._planner
    side = Side("Kakurenbo", lambda _: planner.plan(1, 0), limit=MOST_PLAN if n >= N else None)
    return compare(randperm(n), [side], pairs=rounds)


def as_text(results: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Returns the tables."""
    found = [
        (one["name"], f"{one['value']:.3f} {one['unit']}", judgement(one["limit"], one["ok"]))
        for one in (*results["memory"], results["state"], results["first"])
    ]
    table = lines((f"N = {results['n']:,}, one process", "", "limit"), found)
    return "\n\n".join((table, f"a plan over torch.randperm(N)\n{ratios_table(rows)}", many_ranks_part(results["model"])))


def one_process_part(results: Mapping[str, Any]) -> str:
    """Returns what was measured in one process in Markdown.

    Args:
        results: Content of the results.
    """
    again, plan = results["plans"]
    ratio = f"{plan['cpu']['median']:.2f} [{plan['cpu']['low']:.2f}, {plan['cpu']['high']:.2f}]"
    rows = (*results["memory"], results["state"], results["first"])
    measured = [(one["name"], f"{one['value']:.3f} {one['unit']}", one["limit"]) for one in rows]
    measured.append((f"a plan, {plan['cpu_s']:.1f} CPU s", f"{ratio} of the CPU time of torch.randperm", plan["limit"]))
    measured.append(("torch.randperm against itself (A/A)", f"{again['cpu']['median']:.2f}", None))
    return "\n".join(
        (
            f"Kakurenbo on {results['n']:,} samples in one process, one thread:\n",
            "| | measured | limit |",
            "|---|---|---|",
            *(f"| {name} | {value} | {'' if limit is None else f'{limit:g}'} |" for name, value, limit in measured),
        )
    )


def page_part(results: Mapping[str, Any]) -> str:
    """Returns the part of a page that shows the results, in Markdown.

    Args:
        results: Content of the results.
    """
    return f"{one_process_part(results)}\n\n{many_ranks_part(results['model'])}"


def many_ranks_part(found: Mapping[str, Any]) -> str:
    """Returns the model in Markdown.

    Args:
        found: Result of `many_ranks.model`.
    """
    held, got, spent = found["memory"], found["traffic"], found["seconds"]
    table = [
        ("memory", "records, and how often each sample was trained on, of the block", _mega(held["records"])),
        ("memory", "who is kept, of all samples", _mega(held["marks"])),
        ("memory", "numbers of kept samples by 1,024 places of the order", _mega(held["places"])),
        ("memory", "signals that wait for the end of the epoch, at its largest", _mega(held["noted"])),
        ("memory", "all of these", _mega(sum(held.values()))),
        ("traffic of a plan", "counts, for the losses at the cuts", _mega(got["counts"])),
        ("traffic of a plan", "who is kept", _mega(got["marks"])),
        ("traffic of a plan", "numbers of kept samples", _mega(got["places"])),
        ("traffic of an epoch", "signals on their way to the records", _mega(found["home"])),
        ("CPU time of a plan", "the plan of the block", f"{spent['plan'] * 1e3:.0f} ms"),
        ("CPU time of a plan", "numbers of kept samples of its part of the order", f"{spent['order'] * 1e3:.0f} ms"),
    ]
    same = "the very numbers of bytes" if found["as_expected"] else "OTHER NUMBERS OF BYTES THAN THE FORMULAS"
    return "\n".join(
        (
            f"Each of {found['ranks']:,} ranks, with {found['n']:,} samples:\n",
            "| | part | of one rank |",
            "|---|---|---|",
            *(f"| {what} | {part} | {number} |" for what, part, number in table),
            f"\nCounted with {found['checked_ranks']:,} ranks that are threads of one process and {found['checked_n']:,} "
            f"samples: {same}.",
        )
    )


def _mega(size: float) -> str:
    return f"{size / 1e6:,.2f} MB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"measure {QUICK_N:,} samples, and plans once")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="page in Markdown whose model is written anew (default: none)")
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
        "model": many_ranks.model(*(QUICK_MODEL if given.quick else (MODEL, CHECKED))),
    }
    missed = [one["name"] for one in (*of_memory, state, first, *results["plans"]) if not one["ok"]]
    missed += [] if results["model"]["as_expected"] else ["traffic"]
    print(as_text(results, rows))
    write_json(given.out, {**results, "missed": missed})
    if given.page is not None:
        given.page.write_text(between_marks(given.page.read_text(), *MARKS, page_part(results)))
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
