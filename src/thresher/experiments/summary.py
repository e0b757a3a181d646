"""What a comparison shows: each method against full training and against its controls, paired by seed."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95
NO_SPREAD = 1e-9

Run = dict[str, Any]


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % t-interval of the mean of paired differences; None for fewer than two."""
    if len(differences) < 2:
        return None
    mean, error = float(np.mean(differences)), float(stats.sem(differences))
    if error == 0:
        return mean, mean
    low, high = stats.t.interval(LEVEL, len(differences) - 1, loc=mean, scale=error)
    return float(low), float(high)


def verdict(bounds: tuple[float, float] | None) -> str:
    """The interval in plain words; where every seed gives the same difference, there is no spread to judge it by."""
    if bounds is None or bounds[1] - bounds[0] < NO_SPREAD:
        return "not enough seeds to tell"
    if bounds[1] < 0:
        return "loses"
    return "gains" if bounds[0] > 0 else "no difference shown"


def control_verdict(bounds: Mapping[str, tuple[float, float] | None]) -> str:
    """The intervals of the differences to the controls, by their kind, in plain words."""
    words = {"loses": "loses to {}", "gains": "beats {}", "no difference shown": "not told from {}"}
    kinds: dict[str, list[str]] = {}
    for kind, bound in bounds.items():
        kinds.setdefault(verdict(bound), []).append(kind)
    return "; ".join(words[said].format(" and ".join(names)) for said, names in kinds.items() if said in words)


def kind_of(run: Run) -> str | None:
    """Which control a run is, such as `uniform`; None for a method."""
    return None if run["control_of"] is None else run["method"].partition("@")[0]


def summarise(runs: Sequence[Run]) -> list[Run]:
    """One row a method and one a control, in the order of their first runs; controls follow their method.

    Args:
        runs: See `training.train`, with cost ratios that can be compared; `full` among them for every seed.

    Returns:
        Rows of method, control_of, mean, std, difference, ci95, cost_ratio, wall_ratio, cpu_ratio and verdict. Differences are
        paired by seed with `full`; time ratios are medians over the seeds.
    """
    groups: dict[str, dict[str | None, list[Run]]] = {}
    for run in runs:
        groups.setdefault(run["control_of"] or run["method"], {}).setdefault(kind_of(run), []).append(run)
    full = _by_seed(groups["full"][None])
    rows = []
    for kinds in groups.values():
        controls = {kind: group for kind, group in kinds.items() if kind is not None}
        rows.append(_row(kinds[None], full, controls))
        rows += [_row(group, full, {}) for group in controls.values()]
    return rows


def _row(runs: Sequence[Run], full: dict[int, Run], controls: Mapping[str, Sequence[Run]]) -> Run:
    values = [run["metric"]["value"] for run in runs]
    cost = statistics.mean(run["cost"]["ratio"] for run in runs)
    row = {
        "method": _label(runs, cost),
        "control_of": runs[0]["control_of"],
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "difference": None,
        "ci95": None,
        "cost_ratio": cost,
        "wall_ratio": _median_ratio(runs, full, "wall_s"),
        "cpu_ratio": _median_ratio(runs, full, "cpu_s"),
        "verdict": "the baseline",
    }
    if runs[0]["method"] == "full":
        return row
    differences = _differences(runs, full)
    bounds = interval(differences)
    beside = {kind: interval(_differences(runs, _by_seed(group))) for kind, group in controls.items()}
    words = [verdict(bounds), control_verdict(beside)]
    return row | {
        "difference": statistics.mean(differences),
        "ci95": None if bounds is None else list(bounds),
        "verdict": "; ".join(filter(None, words)),
    }


def _label(runs: Sequence[Run], cost: float) -> str:
    """The method's; that of controls, which differ in their cost by seed, tells the mean."""
    kind = kind_of(runs[0])
    return runs[0]["method"] if kind is None else f"{kind}@{cost:.3f}"


def _by_seed(runs: Sequence[Run]) -> dict[int, Run]:
    return {run["seed"]: run for run in runs}


def _differences(runs: Sequence[Run], others: dict[int, Run]) -> list[float]:
    return [run["metric"]["value"] - others[run["seed"]]["metric"]["value"] for run in runs]


def _median_ratio(runs: Sequence[Run], full: dict[int, Run], clock: str) -> float:
    return statistics.median(run[clock] / full[run["seed"]][clock] for run in runs)
