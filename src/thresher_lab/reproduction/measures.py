"""What claims measure: numbers of the runs of a part with one seed, which the TOML files of the papers name."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean

from thresher.cost import Cost
from thresher_lab.reproduction.artefact import FULL_ROW, RunsByRow


def metric(runs: RunsByRow, seed: int, row: str = FULL_ROW) -> float:
    """Returns the metric of a row."""
    return runs[row][seed]["metric"]["value"]


def surplus(runs: RunsByRow, seed: int, row: str, over: str) -> float:
    """Returns the metric of a row minus that of another."""
    return metric(runs, seed, row) - metric(runs, seed, over)


def mean_gain(runs: RunsByRow, seed: int, rows: Sequence[str], over: Sequence[str]) -> float:
    """Returns the mean of the gains of several rows, each over the row at the same place in `over`."""
    return fmean(surplus(runs, seed, *pair) for pair in zip(rows, over, strict=True))


def lead(runs: RunsByRow, seed: int, row: str, others: Sequence[str]) -> float:
    """Returns the metric of a row minus that of the best of some others."""
    rivals = [partial(metric, runs, row=other) for other in others]
    return metric(runs, seed, row) - best_of(rivals, runs[FULL_ROW])(seed)


def steps(runs: RunsByRow, seed: int, row: str) -> float:
    """Returns the number of optimizer steps of a row."""
    return runs[row][seed]["cost"]["steps"]


def cpu(runs: RunsByRow, seed: int, row: str) -> float:
    """Returns the CPU time of a row, as a share of full training with the same seed."""
    return runs[row][seed]["cpu_s"] / runs[FULL_ROW][seed]["cpu_s"]


def cpu_saved(runs: RunsByRow, seed: int, row: str, over: str) -> float:
    """Returns by how much the CPU time of a row is below that of another, as a share of full training."""
    return cpu(runs, seed, over) - cpu(runs, seed, row)


def cost(runs: RunsByRow, seed: int, row: str, backward_to_forward: float | None = None) -> float:
    """Returns the counted cost of a row, as a share of full training.

    Args:
        runs: Runs of a part.
        seed: Random seed of the run.
        row: Name of the row.
        backward_to_forward: Cost of a backward pass, in forward passes. Default: as measured in the run.
    """
    counts = runs[row][seed]["cost"]
    if backward_to_forward is None:
        return counts["ratio"]
    names = ("forward", "backward", "full_forward", "full_backward")
    return Cost(**{name: counts[name] for name in names}).ratio(backward_to_forward)


def cost_saved(
    runs: RunsByRow, seed: int, row: str, over: str, backward_to_forward: float | None = None
) -> float:
    """Returns by how much the cost of a row is below that of another, see `cost`."""
    return cost(runs, seed, over, backward_to_forward) - cost(runs, seed, row, backward_to_forward)


def overhead(runs: RunsByRow, seed: int, row: str) -> float:
    """Returns the cost of a row minus its CPU time, both as shares of full training: below 0 if it takes longer than its passes."""
    return cost(runs, seed, row) - cpu(runs, seed, row)


Candidate = Callable[[int], float]
"""Function that returns the number of one seed."""


def best_of(
    candidates: Iterable[Candidate],
    seeds: Iterable[int],
    choose: Callable[..., Candidate] = max,
) -> Candidate:
    """Returns the candidate whose mean over all seeds is the largest; the largest of each seed would be too good.

    Args:
        candidates: The candidates.
        seeds: All seeds.
        choose: `max` or `min`. Default: `max`.
    """
    return choose(candidates, key=lambda candidate: fmean(map(candidate, seeds)))
