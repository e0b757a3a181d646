"""What to do after a comparison, in a few sentences: a pick, or what would decide."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from thresher.experiments.comparison.summary import CONTROLS_IN_WORDS, RowDict, is_share, listed, methods_without_loss

MARGINS = tuple(step * size for size in (0.1, 1.0, 10.0) for step in (1, 1.5, 2, 3, 5, 7))
"""Margins that may be named, in points, smallest first."""
MOST_LISTED = 12
"""Number of seeds up to which a sentence lists all of them."""
APART = 0.1
"""Difference between counted cost and CPU time, as shares of full training, from which it is said."""
LEAST_SCORES = 0.005
"""Cost of scores, as a share of full training, from which it is named."""
NOT_COUNTED = "Not counted are, for example, steps of the optimizer, loading, and the choice of rows."
SAVES = 0.99
"""Cost above which a method is not said to save anything."""
SIMPLEST = ("smaller", "shorter", "uniform")
"""Controls that can take the place of a method, the one that is usually best first."""


@dataclass(frozen=True)
class Conclusion:
    """What a comparison comes to.

    Args:
        pick: Row of the summary that is picked, of a method or of a control; None where nothing is.
        sentences: Sentences that say what to do, and why.
    """

    pick: RowDict | None
    sentences: list[str]


def closing(results: Mapping[str, Any]) -> list[str]:
    """Returns sentences that say what to do with a comparison.

    Args:
        results: Content of results.json.

    Returns:
        A pick where a method is shown to lose no more than the margin, and what its controls say of it; else the seeds or the
        margin that would decide; else that nothing saves without a loss.
    """
    return conclude(results).sentences


def time_beside_cost(results: Mapping[str, Any]) -> list[str]:
    """Returns sentences on each method whose CPU time is not what its counted cost says, and what is known about why.

    Args:
        results: Content of results.json.
    """
    said = []
    for row in results["summary"]:
        if row["control_of"] is not None or row.get("cpu_ratio") is None:
            continue
        runs = [run for run in results["runs"] if run["method"] == row["method"] and run["control_of"] is None]
        known = [run["cost"].get("scores_ratio") for run in runs]
        scores = None if None in known else fmean(known)
        apart = abs(row["cpu_ratio"] - row["cost_ratio"] + (scores or 0.0)) > APART
        if apart or (scores or 0.0) >= LEAST_SCORES:
            said.append(f"{row['method']}: {_cost_in_words(row, runs, scores, apart=apart)}")
    return said


def _cost_in_words(row: RowDict, runs: Sequence[Mapping[str, Any]], scores: float | None, *, apart: bool) -> str:
    traced = [run["tracing_s"] for run in runs if run.get("tracing_s")]
    tracing = f", of which tracing the model took {max(traced):.1f} s of each run" if traced and apart else ""
    said = f"the counted cost is {row['cost_ratio']:.2f} of full training"
    if scores is not None and scores >= LEAST_SCORES:
        own = row["cost_ratio"] - scores
        said += f": {scores:.2f} for scores that were made before the run, and {own:.2f} for the run itself. Its CPU time is "
    else:
        said += ", and the CPU time "
    said += f"{row['cpu_ratio']:.2f}{tracing}."
    return f"{said} {NOT_COUNTED}" if apart and scores is not None else said


def conclude(results: Mapping[str, Any]) -> Conclusion:
    """Returns the pick of a comparison beside the sentences of `closing`.

    Args:
        results: Content of results.json.
    """
    rows = [row for row in results["summary"] if row["control_of"] is None and row["difference"] is not None]
    judged = [row for row in rows if row.get("finding") is not None]
    saving = [row for row in judged if row["finding"] == "no loss" and row["cost_ratio"] <= SAVES and not _worse(row)]
    if saving:
        return _pick(min(saving, key=lambda row: (_standing(row), row["cost_ratio"])), results)
    return Conclusion(None, _without_a_pick(judged, results))


def _without_a_pick(judged: Sequence[RowDict], results: Mapping[str, Any]) -> list[str]:
    if unclear := [row for row in judged if row["finding"] == "unclear"]:
        return _undecided(max(unclear, key=lambda row: row["difference"]), results)
    if not judged:
        return ["There is nothing to pick from: no method has a verdict."]
    if without_loss := [row for row in judged if row["finding"] == "no loss"]:
        names = listed([row["method"] for row in without_loss])
        return [
            f"Nothing to pick. No loss is shown for {names}, but nothing is saved, or a control of the same cost is better."
        ]
    best = max(judged, key=lambda row: row["difference"])
    return [
        f"Nothing to pick: every method with a verdict loses. The smallest loss is that of {best['method']}, "
        f"{_amount(results, best)} at {best['cost_ratio']:.3f} of the cost. Try a larger share of the cost, or train on "
        "everything."
    ]


def _worse(row: RowDict) -> bool:
    return any(found["finding"] == "worse" for found in row["against"].values())


def _standing(row: RowDict) -> int:
    """Returns 0 for a method that beats all its controls, 1 for one that beats some or has none, 2 for any other."""
    found = [one["finding"] for one in row["against"].values()]
    return 0 if found and set(found) == {"better"} else 1 if not found or "better" in found else 2


def _pick(row: RowDict, results: Mapping[str, Any]) -> Conclusion:
    kept = f"loses no more than {_in_words(results, results['margin'])} at {row['cost_ratio']:.3f} of the cost of full training"
    picked = f"Our pick: {row['method']}. It {kept}"
    if not row["against"] and _controls_of(row, results):
        tail = "None of its controls has a verdict: whether smaller batches of the same cost would do as well is not known."
        return Conclusion(row, [f"{picked}.", tail])
    if not row["against"]:
        tail = "No controls were trained: whether smaller batches of the same cost would do as well is not known."
        return Conclusion(row, [f"{picked}.", tail])
    if not (equal := [kind for kind, one in row["against"].items() if one["finding"] != "better"]):
        return Conclusion(row, [f"{picked}, and is better than all of its controls."])
    if "placebo" in equal and len(equal) < len(row["against"]):
        beside = "it is not told from permuted signals, so that it is not shown that its choice of samples matters."
        return Conclusion(row, [f"{picked}. Yet {beside}"])
    found = {control["method"].partition("@")[0]: control for control in _controls_of(row, results)}
    for kind in (kind for kind in SIMPLEST if kind in equal and found[kind]["finding"] == "no loss"):
        said = (
            f"Our pick: {found[kind]['method']}, {CONTROLS_IN_WORDS[kind]}. {row['method']} {kept}, and so does this control, "
            "which is simpler and not shown to be worse."
        )
        return Conclusion(found[kind], [said])
    names = listed([CONTROLS_IN_WORDS[kind] for kind in equal])
    return Conclusion(row, [f"{picked}. It is not shown to be better than {names} of the same cost."])


def _controls_of(row: RowDict, results: Mapping[str, Any]) -> list[RowDict]:
    return [control for control in results["summary"] if control["control_of"] == row["method"]]


def _undecided(row: RowDict, results: Mapping[str, Any]) -> list[str]:
    seeds = sorted({run["seed"] for run in results["runs"]})
    ways = [way for way in (_seeds_in_words(row, seeds), _margin_in_words(row, results)) if way]
    if not ways:
        more = ",".join(str(seed) for seed in range(max(5, len(seeds) + 3)))
        counted = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
        return [f"Cannot tell yet with {counted}. Repeat the command with more of them, such as --seeds {more}."]
    spread = _spread(row, results)
    ranges = f": from seed to seed, the difference of {row['method']} to full training ranges over {spread}" if spread else ""
    said = " ".join(ways)
    return [f"Cannot tell yet{ranges}. {said}"]


def _seeds_in_words(row: RowDict, seeds: Sequence[int]) -> str:
    needed = row["seeds_needed"]
    if needed is None:
        return ""
    more = [seed for seed in range(needed + len(seeds)) if seed not in seeds]
    how = "" if needed > MOST_LISTED else f" (--seeds {','.join(map(str, [*seeds, *more][:needed]))})"
    return f"About {needed} seeds{how} would decide on {row['method']} if further ones differ as these {len(seeds)} do."


def _margin_in_words(row: RowDict, results: Mapping[str, Any]) -> str:
    """Returns the smallest round margin with which these seeds show no loss of a method; "" where there is none."""
    unit = 1.0 if _whole(results) else max(1e-12, abs(_full(results)["mean"]) / 100)
    for margin in (size * unit for size in MARGINS if size * unit > results["margin"]):
        if row["method"] in methods_without_loss(results["runs"], margin, results.get("looks", 1)):
            size = _in_words(results, margin)
            shown = f"It is shown already that {row['method']} loses no more than {size}"
            return f"{shown}: use --margin {margin:.4g} if such a loss does not matter."
    return ""


def _spread(row: RowDict, results: Mapping[str, Any]) -> str | None:
    values = {run["seed"]: run["metric"]["value"] for run in results["runs"] if run["method"] == "full"}
    own = [run for run in results["runs"] if run["method"] == row["method"] and run["control_of"] is None]
    differences = [run["metric"]["value"] - values[run["seed"]] for run in own]
    if len(differences) < 2:
        return None
    return _in_words(results, (100 if _whole(results) else 1) * (max(differences) - min(differences)))


def _full(results: Mapping[str, Any]) -> RowDict:
    return next(row for row in results["summary"] if row["method"] == "full")


def _whole(results: Mapping[str, Any]) -> bool:
    return is_share(results["runs"])


def _in_words(results: Mapping[str, Any], amount: float) -> str:
    """Returns an amount of the metric, which is in points where the metric is a share."""
    return f"{amount:.2g} point{'s' if f'{amount:.2g}' != '1' else ''}" if _whole(results) else f"{amount:.3g}"


def _amount(results: Mapping[str, Any], row: RowDict) -> str:
    scale: Callable[[float], float] = (lambda value: 100 * value) if _whole(results) else (lambda value: value)
    return _in_words(results, abs(scale(row["difference"])))
