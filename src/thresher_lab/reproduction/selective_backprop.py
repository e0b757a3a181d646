"""Selective-Backprop: time until target errors are reached, for four methods and full training."""

import math
import statistics

import numpy as np

from thresher_lab.comparison.time_to_target import TARGET_FACTORS, first_at, points_of
from thresher_lab.reproduction.artefact import (
    FULL_ROW,
    PageTable,
    PartResults,
    RunsByPart,
    RunsByRow,
)


def time_until(runs: RunsByRow, seed: int, row: str, factor: float) -> float:
    """Returns the CPU seconds until the test error of a run is at most a multiple of that of full training.

    Args:
        runs: Runs by row and seed.
        seed: Random seed of the run.
        row: Name of the row.
        factor: The multiple, of the mean error of full training after its last epoch.

    Returns:
        Seconds; infinite where the error is never reached.
    """
    full = statistics.mean(run["metric"]["value"] for run in runs[FULL_ROW].values())
    reached = first_at(points_of(runs[row][seed]), factor * (1 - full))
    return math.inf if reached is None else reached["cpu_s"]


def sooner(runs: RunsByRow, seed: int, row: str, than: str, factor: float) -> float:
    """Returns how many times sooner one row reaches a target than another; 0 where it never does.

    Where the other one never does, its whole time counts: it takes at least as long.
    """
    own = time_until(runs, seed, row, factor)
    if not math.isfinite(own):
        return 0.0
    whole = points_of(runs[than][seed])[-1]["cpu_s"]
    return min(time_until(runs, seed, than, factor), whole) / own


def time_tables(measured: RunsByPart, results: PartResults) -> list[PageTable]:
    """Returns the times to each target, and the error over time."""
    [runs] = measured.values()
    [result] = results.values()
    batches = result.get("batches", {})
    rows = []
    for row, of_row in runs.items():
        times = [
            [time_until(runs, seed, row, factor) for seed in of_row] for factor in TARGET_FACTORS
        ]
        error = statistics.mean(1 - run["metric"]["value"] for run in of_row.values())
        cost, steps = (
            statistics.mean(run["cost"][of] for run in of_row.values()) for of in ("ratio", "steps")
        )
        spent = [f"{cost:.3f}", f"{steps:.0f}", batches.get(result["labels"][row], "")]
        rows.append([row, f"{100 * error:.2f}", *map(_mean_seconds, times), *spent])
    times_to = [f"CPU s to {factor:g}x" for factor in TARGET_FACTORS]
    header = ["", "error at the end, %", *times_to, "cost in all", "steps", "batches"]
    setting = f"{result['task']}, {result['epochs']} epochs"
    title = f"{setting}: until the error is a multiple of that of full training"
    return [PageTable(title, header, rows), _error_over_time(runs)]


SECONDS = "CPU s"
ERROR = "error, %"
SHOWN_EPOCHS = 11
"""Number of epochs that the table of the error over time shows."""


def _error_over_time(runs: RunsByRow) -> PageTable:
    """Returns the mean CPU time and the mean test error after some epochs, two columns per row of the experiment."""
    curves = {row: list(map(points_of, of_row.values())) for row, of_row in runs.items()}
    length = len(curves[FULL_ROW][0])
    rows = []
    for epoch in sorted({round(at) for at in np.linspace(0, length - 1, SHOWN_EPOCHS)}):
        here = [[points[epoch] for points in seeds] for seeds in curves.values()]
        seconds, errors = (
            [statistics.mean(point[of] for point in points) for points in here]
            for of in ("cpu_s", "error")
        )
        rows.append(
            [
                str(epoch),
                *(f"{time:.1f}" for time in seconds),
                *(f"{100 * error:.2f}" for error in errors),
            ]
        )
    header = ["epoch", *(f"{row}, {of}" for of in (SECONDS, ERROR) for row in curves)]
    return PageTable("Test error over time, mean of the seeds", header, rows)


def _mean_seconds(times: list[float]) -> str:
    reached = [time for time in times if math.isfinite(time)]
    note = "" if len(reached) == len(times) else f" ({len(reached)} of {len(times)} seeds)"
    return f"{statistics.mean(reached):.1f}{note}" if reached else "never"
