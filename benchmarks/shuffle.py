"""Times `thresher.Shuffle`: an id of it beside one of torch.randperm, and the first batch when a run goes on in mid-epoch.

`python -m benchmarks.shuffle [--quick] [--out FILE.json]`; exit code 1 where an id of a computed order takes more than 15 ns,
or the first batch more CPU time from `iter(run.loader)` on, after `run.load_state_dict`, than two torch.randperm of all samples:
the epoch is made again. The results show the same with shuffle=True. Memory is what NumPy allocates for the order.
"""

import argparse
import statistics
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import thresher
from benchmarks.measure import Side, judgment, lines, seconds_in_turns
from benchmarks.overhead import about
from thresher.permutation import PIECE, Permutation
from thresher_lab.training.store import write_json

RESULTS = Path(__file__).resolve().parent / "results" / "shuffle.json"
MOST_NS, MOST_PERMUTATIONS = 15.0, 2.0
BATCH = 128
METHODS: dict[str, Callable[[], Any]] = {
    "FullData": thresher.FullData,
    "UniformSubset(0.5)": lambda: thresher.UniformSubset(keep=0.5),
}


class Numbers(Dataset[int]):
    """The numbers 0 to n - 1: a dataset that takes no time."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> int:
        return i


def pieces(n: int) -> None:
    """Makes the ids of an epoch as a loader does, piece by piece."""
    order = Permutation(n, seed=0, epoch=0)
    for begin in range(0, n, PIECE):
        order.piece(begin, min(begin + PIECE, n))


def per_id(n: int, rounds: int) -> list[dict[str, Any]]:
    """Returns CPU nanoseconds per id, medians over the rounds, and the memory of an order."""
    sides = [
        Side("Shuffle", lambda _: pieces(n)),
        Side("Shuffle, as Python numbers", lambda _: sum(1 for _ in thresher.Shuffle(range(n)))),
        Side(
            "torch.randperm",
            lambda _: torch.randperm(n, generator=torch.Generator().manual_seed(0)),
        ),
    ]
    cpu, _ = seconds_in_turns(sides, pairs=rounds)
    tracemalloc.start()
    pieces(n)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    memory = {"Shuffle": peak, "torch.randperm": 8 * n}
    found = []
    for side, seconds in zip(sides, cpu, strict=True):
        ns, limit = (
            statistics.median(seconds) / n * 1e9,
            MOST_NS if side.name == "Shuffle" else None,
        )
        row = {"name": side.name, "ns": ns, "bytes": memory.get(side.name), "limit": limit}
        found.append({**row, "ok": limit is None or ns <= limit})
    return found


def attached(method: Any, n: int, batch: int, *, computed: bool) -> Any:
    """Returns a run over the numbers, with a `Shuffle` or with shuffle=True."""
    data = Numbers(n)
    order: dict[str, Any] = {"sampler": thresher.Shuffle(data)} if computed else {"shuffle": True}
    loader = DataLoader(data, batch, collate_fn=torch.tensor, **order)
    return thresher.attach(method, loader=loader, criterion=nn.MSELoss(), epochs=2)


def middle_of(method: Any, n: int, *, computed: bool) -> dict[str, Any]:
    """Returns the state of a run in the middle of an epoch, which was reached in large batches."""
    run = attached(method, n, BATCH * max(1, min(n // 16, 2**20) // BATCH), computed=computed)
    for _ in run.loader:
        if run.progress >= 0.25:  # of two epochs
            break
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has not computed the loss of a batch")
        return run.state_dict()


def going_on(method: Any, n: int, rounds: int, *, computed: bool) -> dict[str, Any]:
    """Returns CPU seconds from `iter(run.loader)` to the first batch in the middle of an epoch, medians over the rounds."""
    state, run = (
        middle_of(method, n, computed=computed),
        attached(method, n, BATCH, computed=computed),
    )
    side = Side("", lambda _: next(iter(run.loader)), prepare=lambda: run.load_state_dict(state))
    (cpu_s,), (wall_s,) = seconds_in_turns([side], pairs=rounds)
    permuted = Side("", lambda _: torch.randperm(n, generator=torch.Generator().manual_seed(0)))
    (permuted_s,), _ = seconds_in_turns([permuted], pairs=rounds)
    seconds = statistics.median(cpu_s)
    limit = MOST_PERMUTATIONS * statistics.median(permuted_s)
    name = "Shuffle" if computed else "shuffle=True"
    judged = {"limit": limit, "ok": limit is None or seconds <= limit}
    return {"name": name, "cpu_s": seconds, "wall_s": statistics.median(wall_s), **judged}


def tables(ids: Sequence[dict[str, Any]], resumed: Sequence[dict[str, Any]]) -> str:
    """Returns both tables as text."""
    of_ids = [
        (
            row["name"],
            f"{row['ns']:.1f}",
            "" if row["bytes"] is None else f"{row['bytes'] / 2**20:.1f}",
            judgment(row["limit"], row["ok"]),
        )
        for row in ids
    ]
    of_resumed = [
        (
            f"{row['method']}, {row['name']}",
            f"{row['cpu_s'] * 1e3:.1f}",
            f"{row['wall_s'] * 1e3:.1f}",
            judgment(row["limit"], row["ok"]),
        )
        for row in resumed
    ]
    return "\n\n".join(
        (
            lines(("ids of an epoch", "CPU ns an id", "memory MiB", "limit, ns"), of_ids),
            lines(("first batch in mid-epoch", "CPU ms", "wall ms", "limit, s"), of_resumed),
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shuffle", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure once")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)"
    )
    parser.add_argument(
        "--ids", type=int, default=10**7, help="number of ids that are timed (default: %(default)s)"
    )
    parser.add_argument(
        "--n", type=int, default=10**8, help="number of samples of the run (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    rounds = 1 if given.quick else 11
    ids = per_id(given.ids, rounds)
    resumed = [
        {"method": name, **going_on(method(), given.n, min(rounds, 5), computed=computed)}
        for name, method in METHODS.items()
        for computed in (True, False)
    ]
    print(tables(ids, resumed))
    missed = [row["name"] for row in ids if not row["ok"]]
    missed += [f"{row['method']}, {row['name']}" for row in resumed if not row["ok"]]
    results = {
        "benchmark": "shuffle",
        "quick": given.quick,
        **about(torch.device("cpu")),
        "ids": given.ids,
        "n": given.n,
    }
    write_json(
        given.out,
        {**results, "rounds": rounds, "missed": missed, "per_id": ids, "resumed": resumed},
    )
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
