"""Measures how soon methods reach a target error, by counted cost and by CPU time, as the paper of Selective-Backprop does.

Targets are multiples of the error of full training after its last epoch. A run reaches a target at the end of the first epoch
whose test error is no larger, so that times are those of whole epochs of the run.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

TARGET_FACTORS = (1.4, 1.2, 1.1)
"""Targets, as multiples of the error of full training after its last epoch."""


def measure(results: dict[str, Any], factors: Sequence[float] = TARGET_FACTORS) -> dict[str, Any]:
    """Returns curves and times to targets from the results of a comparison.

    Args:
        results: Results of `compare`, whose metric is a share of right answers.
        factors: Targets, as multiples of the error of full training after its last epoch (median of the seeds).

    Returns:
        task, epochs, device, versions, backward_to_forward, targets (factor, error) and arms. An arm has method, settings,
        error after the last epoch (median of the seeds), curve (epoch, cost, cpu_s, error, lowest, highest: means and extremes
        over the seeds) and reached: for each target the number of seeds that reached it, the medians of cost and cpu_s until
        then, and the medians of both as shares of full training with the same seed, over the seeds with which full training
        reached it. A median is None where half of the seeds or more did not reach the target.
    """
    groups: dict[str, dict[int, list[dict[str, float]]]] = {}
    for run in (run for run in results["runs"] if run["control_of"] is None):
        groups.setdefault(run["method"], {})[run["seed"]] = points_of(run)
    full = groups["full"]
    error = statistics.median(points[-1]["error"] for points in full.values())
    targets = [{"factor": factor, "error": factor * error} for factor in factors]
    settings = {run["method"]: run["settings"] for run in results["runs"]}
    arms = [
        {
            "method": method,
            "settings": settings[method],
            "error": statistics.median(points[-1]["error"] for points in seeds.values()),
            "curve": _mean_curve(list(seeds.values())),
            "reached": [_times_reached(seeds, full, target["error"]) for target in targets],
        }
        for method, seeds in groups.items()
    ]
    copied = ("task", "epochs", "device", "versions")
    ratio = results["runs"][0]["cost"]["backward_to_forward"]
    return {name: results[name] for name in copied} | {
        "backward_to_forward": ratio,
        "targets": targets,
        "arms": arms,
    }


def points_of(run: dict[str, Any]) -> list[dict[str, float]]:
    """Returns cost, CPU seconds and test error after each epoch of a run.

    Raises:
        ValueError: The metric was not measured after every epoch.
    """
    name = run["metric"]["name"]
    if any(name not in entry for entry in run["history"]):
        raise ValueError(
            f"time to target needs the metric after each epoch; {name!r} is measured once, after the last"
        )
    return [
        {"cost": entry["cost"], "cpu_s": entry["cpu_s"], "error": 1 - entry[name]}
        for entry in run["history"]
    ]


def _mean_curve(seeds: Sequence[list[dict[str, float]]]) -> list[dict[str, float]]:
    curve = []
    for epoch, points in enumerate(zip(*seeds, strict=True)):
        errors = [point["error"] for point in points]
        means = {
            name: statistics.mean(point[name] for point in points)
            for name in ("cost", "cpu_s", "error")
        }
        curve.append({"epoch": epoch, **means, "lowest": min(errors), "highest": max(errors)})
    return curve


def _times_reached(
    seeds: dict[int, list[dict[str, float]]], full: dict[int, list[dict[str, float]]], target: float
) -> dict[str, float | int | None]:
    times = {seed: first_at(points, target) for seed, points in seeds.items()}
    of_full = {seed: first_at(full[seed], target) for seed in seeds}
    reached: dict[str, float | int | None] = {
        "seeds": sum(time is not None for time in times.values()),
        "of": len(seeds),
    }
    for name, short in (("cost", "cost"), ("cpu_s", "cpu")):
        reached[name] = _median([None if time is None else time[name] for time in times.values()])
        pairs = [(time, of_full[seed]) for seed, time in times.items()]
        reached[f"{short}_to_full"] = _median(
            [
                None if time is None else time[name] / whole[name]
                for time, whole in pairs
                if whole is not None
            ]
        )
    return reached


def first_at(points: Sequence[dict[str, float]], target: float) -> dict[str, float] | None:
    """Returns the first point whose error is no larger than the target; None where there is none."""
    return next((point for point in points if point["error"] <= target + 1e-12), None)


def _median(values: Sequence[float | None]) -> float | None:
    """Returns the median of times, where None is longer than any other; None where the median is such a time."""
    if not values:
        return None
    median = statistics.median(math.inf if value is None else value for value in values)
    return median if math.isfinite(median) else None
