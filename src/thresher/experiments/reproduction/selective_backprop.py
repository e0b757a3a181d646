"""Selective-Backprop: time to target errors in four arms."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from thresher.experiments.comparison.time_to_target import first_at, points_of
from thresher.experiments.reproduction.artefact import FULL, Artefact, Claim, Measured, Part, Run, Table, Value

PAPER = "Selective-Backprop (arXiv 1910.00762)"
PART, TASK, EPOCHS = "arms", "fashion-mnist-small@10000", 15
ROWS = {
    "Selective-Backprop": "selective_backprop:beta=1:forward_passes=twice",
    "Selective-Backprop, stale losses": "selective_backprop:beta=1:forward_passes=twice:score_every=3",
    "Selective-Backprop, one forward pass": "selective_backprop:beta=1:forward_passes=once",
    "importance sampling": "batch_importance",
}
FACTORS = (1.4, 1.2, 1.1)
"""Targets, in errors that full training ends with (mean of the seeds)."""


def time_until(measured: Measured, row: str, seed: int, factor: float) -> float:
    """CPU seconds until a run's test error is a multiple of full training's; infinite where that never comes."""
    full = measured[PART][FULL]
    target = factor * (1 - statistics.mean(run["metric"]["value"] for run in full.values()))
    reached = first_at(points_of(measured[PART][row][seed]), target)
    return math.inf if reached is None else reached["cpu_s"]


def sooner(row: str, than: str, factor: float) -> Value:
    """How many times sooner one arm is at a target than another."""

    def ratio(measured: Measured, seed: int) -> float:
        own, other = (time_until(measured, name, seed, factor) for name in (row, than))
        return other / own if math.isfinite(own) else 0.0

    return ratio


def _tables(measured: Measured, _: Mapping[str, Any]) -> list[Table]:
    rows = []
    for row, runs in measured[PART].items():
        times = [[time_until(measured, row, seed, factor) for seed in runs] for factor in FACTORS]
        error = statistics.mean(1 - run["metric"]["value"] for run in runs.values())
        rows.append([row, f"{100 * error:.2f}", *map(_seconds, times), f"{_mean_cost(list(runs.values())):.3f}"])
    header = ["", "error at the end, %", *(f"CPU s to {factor:g}x" for factor in FACTORS), "cost in all"]
    return [Table(f"{TASK}, {EPOCHS} epochs: until a multiple of full training's error", header, rows)]


def _seconds(times: list[float]) -> str:
    reached = [time for time in times if math.isfinite(time)]
    note = "" if len(reached) == len(times) else f" ({len(reached)} of {len(times)} seeds)"
    return f"{statistics.mean(reached):.1f}{note}" if reached else "never"


def _mean_cost(runs: list[Run]) -> float:
    return statistics.mean(run["cost"]["ratio"] for run in runs)


TIME_TO_TARGET = Artefact(
    name="selective-backprop-time-to-target",
    paper=f"{PAPER}, the experiment behind its abstract",
    shows="time to a target error: full training, Selective-Backprop, stale losses, importance sampling",
    here="A small CNN on 10,000 pictures of Fashion-MNIST for the networks on CIFAR-10, CIFAR-100 and SVHN. "
    "The paper: up to 3.5 times sooner than SGD, 1.02 to 1.8 times sooner than importance sampling, stale losses 26 % more",
    parts=[Part(PART, TASK, EPOCHS, ROWS)],
    claims=[
        Claim(
            "Selective-Backprop is sooner than full training at 1.2 times its error (CPU time)",
            sooner("Selective-Backprop", FULL, 1.2),
            above=1,
            scale=1,
        ),
        Claim(
            "it is sooner than importance sampling",
            sooner("Selective-Backprop", "importance sampling", 1.2),
            above=1,
            scale=1,
        ),
        Claim(
            "stale losses make it sooner still",
            sooner("Selective-Backprop, stale losses", "Selective-Backprop", 1.2),
            above=1,
            scale=1,
        ),
    ],
    tables=_tables,
    seeds=(0, 1, 2, 3, 4),
)

ARTEFACTS = (TIME_TO_TARGET,)
