"""What a comparison shows: each method against full training and against its controls, paired by seed."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from thresher.experiments.comparison.statistics import (
    LEAST_SEEDS,
    Against,
    Finding,
    Paired,
    against_controls,
    findings,
    seeds_to_tell,
    seeds_to_tell_from_control,
)

MARGIN = 0.5
"""Points where the metric is a share."""

CONTROLS_IN_WORDS = {"uniform": "random", "shorter": "fewer epochs"}

Run = dict[str, Any]
Place = tuple[str, str | None]
"""A method, and which of its controls; None for itself."""


def kind_of(run: Run) -> str | None:
    """Which control a run is, such as `uniform`; None for a method."""
    return None if run["control_of"] is None else run["method"].partition("@")[0]


def summarise(runs: Sequence[Run], margin: float = MARGIN) -> list[Run]:
    """One row a method and one a control, in the order of their first runs; controls follow their method.

    Args:
        runs: See `training.train`, with cost ratios that can be compared; `full` among them for every seed.
        margin: A loss against full training that does not matter, above 0: in points (hundredths) where the metric is a
            share, all values of full training from 0 to 1, else in its own units.

    Returns:
        Rows of method, control_of, mean, std, difference, ci95, finding, seeds_needed, against, cost_ratio, wall_ratio,
        cpu_ratio, verdict and sentence; `against` has for each control of a method the difference to it, ci95, finding,
        seeds_needed and verdict. Differences are paired by seed. Intervals are for one comparison; findings are corrected for
        how many methods there are, and those against controls for how many controls they have. Time ratios are medians over
        the seeds.
    """
    whole = is_share(runs)
    margin = margin / 100 if whole else margin
    groups = _groups(runs)
    full = groups["full", None]
    to_full = {place: _paired(group, full) for place, group in groups.items() if place[0] != "full"}
    found: dict[Place, Finding] = {}
    for of_methods in (True, False):
        found |= findings({at: paired for at, paired in to_full.items() if (at[1] is None) is of_methods}, margin)
    beside = {at: _paired(groups[at[0], None], group) for at, group in groups.items() if at[1] is not None}
    against = against_controls(beside, margin)
    rows = []
    for place, group in groups.items():
        row = _described(group, full)
        if place in to_full:
            own = [at for at in beside if at[0] == place[0] and place[1] is None]
            kinds = {at[1]: _against(beside[at], against[at], margin, len(beside)) for at in own}
            among = sum((at[1] is None) is (place[1] is None) for at in to_full)
            row |= _judged(to_full[place], found[place], kinds, margin, among, whole=whole)
        rows.append(row)
    baseline, metric = _described(full, full)["mean"], full[0]["metric"]["name"]
    return [row | {"sentence": _sentence(row, baseline, len(full), metric, whole)} for row in rows]


def _groups(runs: Sequence[Run]) -> dict[Place, list[Run]]:
    """Runs of the same method or control, methods in the order of their first runs and before their controls."""
    groups: dict[str, dict[str | None, list[Run]]] = {}
    for run in runs:
        groups.setdefault(run["control_of"] or run["method"], {None: []}).setdefault(kind_of(run), []).append(run)
    return {(name, kind): group for name, kinds in groups.items() for kind, group in kinds.items()}


def _paired(runs: Sequence[Run], others: Sequence[Run]) -> Paired:
    value = {run["seed"]: run["metric"]["value"] for run in others}
    return Paired.of([run["metric"]["value"] - value[run["seed"]] for run in runs])


def _described(runs: Sequence[Run], full: Sequence[Run]) -> Run:
    """What there is to say of some runs before they are judged."""
    values = [run["metric"]["value"] for run in runs]
    cost = statistics.mean(run["cost"]["ratio"] for run in runs)
    return {
        "method": _label(runs, cost),
        "control_of": runs[0]["control_of"],
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "difference": None,
        "ci95": None,
        "finding": None,
        "seeds_needed": None,
        "against": {},
        "cost_ratio": cost,
        "wall_ratio": _median_ratio(runs, full, "wall_s"),
        "cpu_ratio": _median_ratio(runs, full, "cpu_s"),
        "verdict": "the baseline",
    }


def _label(runs: Sequence[Run], cost: float) -> str:
    """The method's; that of controls, which differ in their cost by seed, tells the mean."""
    kind = kind_of(runs[0])
    return runs[0]["method"] if kind is None else f"{kind}@{cost:.3f}"


def _median_ratio(runs: Sequence[Run], full: Sequence[Run], clock: str) -> float:
    of_full = {run["seed"]: run[clock] for run in full}
    return statistics.median(run[clock] / of_full[run["seed"]] for run in runs)


def _judged(
    paired: Paired, finding: Finding, against: Mapping[str | None, Run], margin: float, among: int, *, whole: bool
) -> Run:
    needed = seeds_to_tell(paired, margin, among) if finding == "unclear" else None
    said = {
        "no loss": f"no loss within the margin of {amount(margin, whole)}",
        "loses": "loses",
        "unclear": untold(paired, needed),
    }
    words = [said[finding], *_of_controls(against)]
    return {
        **_difference(paired),
        "finding": finding,
        "seeds_needed": needed,
        "against": dict(against),
        "verdict": "; ".join(words),
    }


def _against(paired: Paired, finding: Against, margin: float, among: int) -> Run:
    needed = seeds_to_tell_from_control(paired, margin, among) if finding == "unclear" else None
    said = untold(paired, needed) if finding == "unclear" else finding
    return {**_difference(paired), "finding": finding, "seeds_needed": needed, "verdict": said}


def _difference(paired: Paired) -> Run:
    return {"difference": paired.mean, "ci95": None if paired.low is None else [paired.low, paired.high]}


def _of_controls(against: Mapping[Any, Run]) -> list[str]:
    """What was found against controls, those with the same finding together."""
    words = {
        "better": "better than {}",
        "worse": "worse than {}",
        "no better": "no better than {}",
        "unclear": "not told from {}",
    }
    kinds: dict[str, list[str]] = {}
    for kind, found in against.items():
        kinds.setdefault(found["finding"], []).append(CONTROLS_IN_WORDS[kind])
    return [words[finding].format(" and ".join(names)) + " at the same cost" for finding, names in kinds.items()]


def untold(paired: Paired, needed: int | None) -> str:
    """Why it cannot be told, and how many seeds would do."""
    if paired.n >= LEAST_SEEDS and not paired.tells:
        return "the same difference with every seed, no spread to judge by"
    return "not enough seeds to tell" + ("" if needed is None else f" (about {needed} would do)")


def amount(value: float, whole: bool) -> str:
    """A difference of metrics: in points where the metric is a share of a whole."""
    return f"{100 * value:.3g} points" if whole else f"{value:.4g}"


def is_share(runs: Sequence[Run]) -> bool:
    """Whether the metric is a share, which people read in percent: all that full training reaches is from 0 to 1."""
    return all(0 <= run["metric"]["value"] <= 1 for run in runs if run["method"] == "full")


def _sentence(row: Run, baseline: float, seeds: int, metric: str, whole: bool) -> str:
    """The row as a sentence that names its numbers."""
    level = (lambda value: f"{100 * value:.2f} %") if whole else (lambda value: f"{value:.4g}")
    over = f"over {seeds} seed{'s' if seeds > 1 else ''}"
    if row["difference"] is None:
        return f"Full training reaches {metric} {level(row['mean'])} {over}."
    parts = [
        f"{row['method']} reaches {metric} {level(row['mean'])} where full training reaches {level(baseline)}, "
        f"{_with_interval(row, whole)} {over}: {row['verdict'].partition(';')[0]}.",
        f"It costs {row['cost_ratio']:.3f} of full training as counted, {row['cpu_ratio']:.2f} of its CPU time and "
        f"{row['wall_ratio']:.2f} of its wall time.",
    ]
    for kind, found in row["against"].items():
        parts.append(f"Against {CONTROLS_IN_WORDS[kind]} at the same cost {_with_interval(found, whole)}: {found['verdict']}.")
    return " ".join(parts)


def _with_interval(of: Run, whole: bool) -> str:
    scale, unit, form = (100, " points", "+.2f") if whole else (1, "", "+.4g")
    bounds = of["ci95"]
    between = "" if bounds is None else f" [{scale * bounds[0]:{form}}, {scale * bounds[1]:{form}}]"
    return f"{scale * of['difference']:{form}}{unit}{between}"
