"""Summarizes a comparison: each method against full training and its controls, and what to do next."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from thresher_lab.advise.budget import about_equal_seeds, in_fewer_steps
from thresher_lab.comparison.controls import CONTROLS, SAME_TIME, kind_of
from thresher_lab.comparison.statistics import (
    LEAST_SEEDS,
    Against,
    Finding,
    Paired,
    against_controls,
    findings,
    seeds_to_tell,
    seeds_to_tell_from_control,
)
from thresher_lab.training.files import listed

DEFAULT_MARGIN, OF_FULL = 0.5, 0.05
"""Loss that does not matter: in points where the metric is a share, else as a share of full training's metric."""

BASELINE = "the baseline"
"""Verdict of full training."""

WALL_LEFT_BLANK = (
    "A wall time is blank if the machine was busy, or if more or fewer other runs were in progress than during full training."
)

RunDict = dict[str, Any]
"""A run as in results.json."""
RowDict = dict[str, Any]
"""A row of the summary, or a part of one."""
Place = tuple[str, str | None]
"""Name of a method, and a kind of its controls; None for the method itself."""


def sentences_on_times(results: Mapping[str, Any]) -> list[str]:
    """Returns how far the times of a comparison compare; nothing if there is no doubt.

    Args:
        results: Content of results.json.

    Example:
        >>> sentences_on_times({"runs": [{"busy": True}, {"busy": False}, {}], "summary": []})
        ['Times, of the CPU too, were measured on a busy machine: in 1 of 3 runs, its load was above its cores.']
    """
    runs = results["runs"]
    each = {run.get("samples", number): run.get("busy") is True for number, run in enumerate(runs)}  # methods share controls
    busy = sum(each.values())
    said = f"in {busy} of {len(each)} runs, its load was above its cores"
    blank = any(row["wall_ratio"] is None for row in results["summary"])
    return [f"Times, of the CPU too, were measured on a busy machine: {said}."] * (busy > 0) + [WALL_LEFT_BLANK] * blank


def unfinished(results: Mapping[str, Any]) -> list[str]:
    """Returns how far a comparison is, as a sentence; nothing if it is finished.

    Args:
        results: Content of results.json.
    """
    running = results.get("running")
    if running is None:
        return []
    done = f"Not finished: {running['finished']} of at most {running['runs']} runs."
    return [f"{done} Verdicts may change. Do not stop because one looks good: that finds more by chance."]


def left_out_sentence(one: Mapping[str, str]) -> str:
    """Returns an entry of `left_out` in results.json as a sentence.

    Args:
        one: Entry: the method, the control and why.

    Example:
        >>> left_out_sentence({"method": "prune", "control": "placebo", "why": "Prune decides before training"})
        'Left out is the control placebo of prune. Prune decides before training.'
    """
    return f"Left out is the control {one['control']} of {one['method']}. {one['why'].rstrip('.')}."


def margin_of(runs: Sequence[RunDict]) -> float:
    """Returns the margin of a comparison that was given none: half a point, or a twentieth of full training's other metric.

    Args:
        runs: Runs as in results.json.

    Example:
        >>> run = {"method": "full", "control_of": None, "seed": 0, "metric": {"name": "-mse", "value": -0.053}}
        >>> margin_of([run])
        0.0027
    """
    full = [run["metric"]["value"] for run in runs if run["method"] == "full"]
    size = 0.0 if is_share(runs) or not full else OF_FULL * abs(statistics.mean(full))
    return float(f"{size:.2g}") if 0 < size < math.inf else DEFAULT_MARGIN


def summarize(runs: Sequence[RunDict], margin: float = DEFAULT_MARGIN, looks: int = 1) -> list[RowDict]:
    """Returns one row per method and control, in the order of their first runs; controls follow their method.

    Args:
        runs: Runs of `training.loop.train`, with cost ratios that can be compared; full training with every seed is among them.
        margin: Loss against full training that does not matter, above 0: in points (hundredths) where the metric is a share
            (all values of full training are from 0 to 1), else in units of the metric. Default: 0.5.
        looks: Number of times that the verdicts may be looked at, with more seeds each time; findings are corrected for it.
            Default: 1.

    Returns:
        Rows with the keys method, control_of, rate, mean, std, difference, ci95, finding, seeds_needed, against, cost_ratio,
        wall_ratio, cpu_ratio, memory_ratio, verdict and sentence. `against` has for each control of a method the difference to
        it, ci95, finding, seeds_needed and verdict; the finding is None for the control in the same time if unequal times speak
        for it, see `_is_fair`. Differences are paired by seed. Intervals are for one comparison; findings are corrected for the
        number of methods, and findings against controls for the number of controls. Ratios of times and of the peak memory of a
        step, None if not known, are medians over the seeds. A row with a training that has diverged, half of whose losses or
        more are not finite, has no finding.
    """
    whole = is_share(runs)
    margin = margin / 100 if whole else margin
    groups = _grouped_runs(runs)
    full = groups["full", None]
    broken = {place: seeds for place, group in groups.items() if (seeds := _diverged(group))}
    sound = {} if ("full", None) in broken else {place: group for place, group in groups.items() if place not in broken}
    to_full = {place: _paired(group, full) for place, group in sound.items() if place[0] != "full"}
    found: dict[Place, Finding] = {}
    for of_methods in (True, False):
        found |= findings({at: paired for at, paired in to_full.items() if (at[1] is None) is of_methods}, margin, looks)
    beside = {
        at: _paired(sound[at[0], None], group) for at, group in sound.items() if at[1] is not None and (at[0], None) in sound
    }
    against = against_controls(beside, margin, looks)
    for at in [at for at in beside if at[1] == SAME_TIME]:
        if not _is_fair(against[at], sound[at[0], None], sound[at], full):
            del against[at]
    rows = []
    for place, group in groups.items():
        row = _summary_row(group, full)
        if place in to_full:
            own = [at for at in beside if at[0] == place[0] and place[1] is None]
            kinds = {at[1]: _against(beside[at], against.get(at), margin, looks * len(beside)) for at in own}
            among = looks * sum((at[1] is None) is (place[1] is None) for at in to_full)
            row |= _judged(to_full[place], found[place], margin, among, whole=whole)
            row["against"], row["verdict"] = kinds, "; ".join([row["verdict"], *_verdicts_against(kinds, row["cost_ratio"])])
        elif place in broken or ("full", None) in broken:
            row["verdict"] = _broken_in_words(broken.get(place, ()), of_full=("full", None) in broken)
        rows.append(row)
    baseline, metric = _summary_row(full, full)["mean"], full[0]["metric"]["name"]
    return [row | {"sentence": _row_sentence(row, baseline, len(full), metric, whole)} for row in rows]


TIME_TOLERANCE = 0.03
"""Share by which two times may differ and still count as the same."""


def _time_gap(method: float | None, control: float | None) -> float | None:
    """Returns the share by which a control took more time than its method, or than full training if the method took longer.

    Args:
        method: Time of the method, as a share of full training.
        control: Time of the control.

    Returns:
        None if a time is unknown.
    """
    return control / min(1.0, method) - 1 if method and control is not None else None


def _is_fair(finding: Against, method: Sequence[RunDict], control: Sequence[RunDict], full: Sequence[RunDict]) -> bool:
    """Returns whether a finding holds although the times differ: the winner must not be the one with more time."""
    clock = "cpu_ratio" if control[0].get("length", {}).get("clock", "cpu_s") == "cpu_s" else "wall_ratio"
    gap = _time_gap(*(_summary_row(runs, full)[clock] for runs in (method, control)))
    if gap is None or abs(gap) <= TIME_TOLERANCE:
        return gap is not None
    return finding not in (("better",) if gap < 0 else ("worse", "no better"))


def _diverged(runs: Sequence[RunDict]) -> list[int]:
    """Returns the seeds with which half of the losses of the last epoch or more were not finite."""
    last = [(run["seed"], run["history"][-1]) for run in runs if run.get("history")]
    return [seed for seed, entry in last if 2 * entry.get("nonfinite", 0) >= max(1, entry.get("backward", 0))]


def _broken_in_words(seeds: Sequence[int], *, of_full: bool) -> str:
    if of_full:
        return "no verdict: full training has diverged"
    with_seeds = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    return f"no verdict: it diverged with {with_seeds}, half of its losses or more are not finite"


def _grouped_runs(runs: Sequence[RunDict]) -> dict[Place, list[RunDict]]:
    """Returns the runs of each method and control; methods come in the order of their first runs, before their controls."""
    groups: dict[str, dict[str | None, list[RunDict]]] = {}
    for run in runs:
        groups.setdefault(run["control_of"] or run["method"], {None: []}).setdefault(kind_of(run), []).append(run)
    return {(name, kind): group for name, kinds in groups.items() for kind, group in kinds.items()}


def _paired(runs: Sequence[RunDict], others: Sequence[RunDict]) -> Paired:
    value = {run["seed"]: run["metric"]["value"] for run in others}
    # While a comparison runs, a method may have seeds that its control does not have yet.
    return Paired.of([run["metric"]["value"] - value[run["seed"]] for run in runs if run["seed"] in value])


def _summary_row(runs: Sequence[RunDict], full: Sequence[RunDict]) -> RowDict:
    """Returns the row of some runs, before they are judged."""
    values = [run["metric"]["value"] for run in runs]
    cost = statistics.mean(run["cost"]["ratio"] for run in runs)
    return {
        "method": _label(runs, cost),
        "control_of": runs[0]["control_of"],
        "rate": runs[0].get("rate", 1.0),
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "difference": None,
        "ci95": None,
        "finding": None,
        "seeds_needed": None,
        "against": {},
        "cost_ratio": cost,
        "wall_ratio": _median_ratio(runs, full, "wall_s") if _in_like_company(runs, full) else None,
        "cpu_ratio": _median_ratio(runs, full, "cpu_s"),
        "memory_ratio": _median_ratio(runs, full, "step_memory"),
        "verdict": BASELINE,
    }


def _label(runs: Sequence[RunDict], cost: float) -> str:
    """Returns the label of a method; or of a control, with the mean of the costs, which differ by seed."""
    kind = kind_of(runs[0])
    return runs[0]["method"] if kind in (None, SAME_TIME) else f"{kind}@{cost:.3f}"


def of_known(ratio: float | None) -> str:
    """Returns a ratio with two digits, or that it is unknown."""
    return "an unknown share" if ratio is None else f"{ratio:.2f}"


def _median_ratio(runs: Sequence[RunDict], full: Sequence[RunDict], measure: str) -> float | None:
    """Returns the median over the seeds of a measure as a share of full training; None where it is not known of each run."""
    of_full = {run["seed"]: run.get(measure) for run in full}
    pairs = [(run.get(measure), of_full[run["seed"]]) for run in runs]
    known = [own / whole for own, whole in pairs if own is not None and whole]
    return statistics.median(known) if len(known) == len(pairs) else None


LIKE_COMPANY = 0.5
"""Difference in the mean number of other runs, and share of runs on a busy machine, up to which wall times compare."""


def _in_like_company(runs: Sequence[RunDict], full: Sequence[RunDict]) -> bool:
    """Returns whether little else ran, and as much beside some runs as beside full training, as far as that is known."""

    def mean(of: Sequence[RunDict], name: str) -> float:
        return fmean(run.get(name) or 0 for run in of)

    busy = max(mean(runs, "busy"), mean(full, "busy"))
    return max(busy, abs(mean(runs, "other_runs") - mean(full, "other_runs"))) <= LIKE_COMPANY


def _judged(paired: Paired, finding: Finding, margin: float, among: int, *, whole: bool) -> RowDict:
    needed = seeds_to_tell(paired, margin, among) if finding == "unclear" else None
    verdicts = {
        "no loss": f"no loss within the margin of {_amount_in_words(margin, whole)}",
        "loses": "loses",
        "unclear": _unclear(paired, needed),
    }
    return {**_difference_entries(paired), "finding": finding, "seeds_needed": needed, "verdict": verdicts[finding]}


def _against(paired: Paired, finding: Against | None, margin: float, among: int) -> RowDict:
    needed = seeds_to_tell_from_control(paired, margin, among) if finding == "unclear" else None
    verdict = _unclear(paired, needed) if finding == "unclear" else finding or "no verdict, the times are not equal"
    return {**_difference_entries(paired), "finding": finding, "seeds_needed": needed, "verdict": verdict}


def _difference_entries(paired: Paired) -> RowDict:
    return {"difference": paired.mean, "ci95": None if paired.low is None else [paired.low, paired.high]}


def _verdicts_against(against: Mapping[Any, RowDict], cost: float) -> list[str]:
    """Returns the verdicts against the controls of a method; those of the same cost with the same finding share one."""
    words = {"unclear": "not told apart from {}", None: "no verdict against {}: the times are not equal"}
    kinds: dict[tuple[str | None, str], list[str]] = {}
    for kind, found in against.items():
        kinds.setdefault((found["finding"], _at_cost(kind, cost)), []).append(CONTROLS[kind].words)
    return [f"{words.get(one, f'{one} than {{}}').format(listed(names))}{at}" for (one, at), names in kinds.items()]


def _at_cost(kind: str, cost: float) -> str:
    """Returns what a control costs beside its method; none but a placebo costs more than full training."""
    if kind == SAME_TIME:
        return ""
    return " at the cost of full training" if kind != "placebo" and round(cost, 3) > 1 else " at the same cost"


def _unclear(paired: Paired, needed: int | None) -> str:
    """Returns why the seeds decide nothing, and how many would be enough."""
    if paired.n >= LEAST_SEEDS and not paired.decides:
        return "the same difference with every seed, no spread to judge by"
    if paired.n < LEAST_SEEDS:
        return f"not enough seeds to tell: {paired.n} of at least {LEAST_SEEDS}"
    return "not enough seeds to tell" + ("" if needed is None else f" (about {needed} would do)")


def _amount_in_words(value: float, whole: bool) -> str:
    """Returns a difference of metrics in words: in points where the metric is a share of a whole."""
    return f"{100 * value:.3g} points" if whole else f"{value:.4g}"


def is_share(runs: Sequence[RunDict]) -> bool:
    """Returns whether the metric is a share, which people read in percent: all values of full training are from 0 to 1."""
    return all(0 <= run["metric"]["value"] <= 1 for run in runs if run["method"] == "full")


def _row_sentence(row: RowDict, baseline: float, seeds: int, metric: str, whole: bool) -> str:
    """Returns the row as sentences with its numbers."""
    level = (lambda value: f"{100 * value:.2f} %") if whole else (lambda value: f"{value:.4g}")
    over = f"over {seeds} seed{'s' if seeds > 1 else ''}"
    if row["difference"] is None:
        name = "Full training" if row["method"] == "full" else row["method"]
        tail = "" if row["verdict"] == BASELINE else f"; {row['verdict']}"
        return f"{name} reaches {metric} {level(row['mean'])} {over}{tail}."
    wall = "" if row["wall_ratio"] is None else f", {row['wall_ratio']:.2f} of its wall time"
    parts = [
        f"{row['method']} reaches {metric} {level(row['mean'])} where full training reaches {level(baseline)}, "
        f"{_with_interval(row, whole)} {over}: {row['verdict'].partition(';')[0]}.",
        f"It costs {row['cost_ratio']:.3f} of full training as counted, {of_known(row['cpu_ratio'])} of its CPU time"
        f"{wall} and {of_known(row['memory_ratio'])} of the memory of its steps.",
    ]
    for kind, found in row["against"].items():
        at = _at_cost(kind, row["cost_ratio"])
        parts.append(f"Against {CONTROLS[kind].words}{at} {_with_interval(found, whole)}: {found['verdict']}.")
    return " ".join(parts)


def _with_interval(of: RowDict, whole: bool) -> str:
    return difference_text(
        of, (lambda value: f"{100 * value:+.2f}") if whole else (lambda value: f"{value:+.4g}"), " points" * whole
    )


def difference_text(of: Mapping[str, Any], signed: Callable[[float], str], unit: str = "") -> str:
    """Returns a difference with its 95 % interval; "" where there is none.

    Args:
        of: Row of the summary, or its entry against a control.
        signed: Function that writes a difference.
        unit: Unit of the difference. Default: none.
    """
    if of["difference"] is None:
        return ""
    bounds = "" if of["ci95"] is None else " [{}, {}]".format(*map(signed, of["ci95"]))
    return f"{signed(of['difference'])}{unit}{bounds}"


def forms(results: Mapping[str, Any]) -> tuple[Callable[[float], str], Callable[[float], str]]:
    """Returns how values and differences are written: in percent and points where the metric is a share.

    Args:
        results: Content of results.json.
    """
    if _whole(results):
        return (lambda value: f"{100 * value:.2f}"), (lambda value: f"{100 * value:+.2f}")
    return (lambda value: f"{value:.4g}"), (lambda value: f"{value:+.3g}")


MOST_OPEN = 3
"""Number of open verdicts that are named."""
OF_SENSE = 10
"""Multiple of the margin of a comparison up to which a larger one is proposed."""
MARGINS = tuple(step * size for size in (0.1, 1.0, 10.0) for step in (1, 1.5, 2, 3, 5, 7))
"""Margins that may be named, in points, smallest first."""
MOST_SENSIBLE = 30
"""Number of seeds up to which a command for them is named."""
MOST_LISTED = 12
"""Number of seeds up to which a sentence lists all of them."""
APART = 0.1
"""Difference between counted cost and CPU time, as shares of full training, from which it is said."""
LEAST_SCORES = 0.005
"""Cost of scores, as a share of full training, from which it is named."""
NOT_COUNTED = "Not counted are, for example, steps of the optimizer, loading, and the choice of rows."
SAVES = 0.99
"""Cost above which a method is not said to save anything."""
SIMPLEST = ("smaller", "shorter", SAME_TIME, "fewer", "uniform")
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
        A pick where a method or a control is shown to lose no more than the margin, the cheapest by CPU time among those that
        are not told apart; else the seeds or the margin that would decide; else that nothing saves without a loss.
    """
    return conclude(results).sentences


NOT_JUDGED = (
    "The difference may come from the time alone. Other programs or another machine change times: repeat in another --out, on "
    "a machine that does nothing else."
)
NO_TIME_SAVED = 0.97
"""Share of full training's CPU time from which on no time is saved, but for noise."""


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
            tried = any(one["method"].startswith("winnow") and "in steps" in one["method"] for one in results["summary"])
            said.append(f"{row['method']}: {_cost_in_words(row, runs, scores, apart=apart, tried=tried)}")
    return said


def open_beside_intervals(results: Mapping[str, Any]) -> list[str]:
    """Returns why verdicts are open beside intervals that exclude 0, as a sentence; nothing where there are none.

    Args:
        results: Content of results.json.
    """
    methods = [row for row in results["summary"] if row["control_of"] is None and row.get("finding") is not None]
    differences = [(row["method"], row) for row in methods]
    for row in methods:
        against = row["against"].items()
        differences += [(f"{row['method']} against {CONTROLS[kind].words}", found) for kind, found in against]
    unclear = [(name, one["ci95"]) for name, one in differences if one["finding"] == "unclear" and one["ci95"] is not None]
    apart = [name for name, (low, high) in unclear if low * high > 0]
    if not apart:
        return []
    more = f" and {len(apart) - MOST_OPEN} more" if len(apart) > MOST_OPEN else ""
    return [
        f"The interval excludes 0 and the verdict is open: {', '.join(apart[:MOST_OPEN])}{more}. An interval is for one "
        "comparison alone; verdicts allow for all that are made here, and need more."
    ]


def _cost_in_words(row: RowDict, runs: Sequence[Mapping[str, Any]], scores: float | None, *, apart: bool, tried: bool) -> str:
    traced = [run["tracing_s"] for run in runs if run.get("tracing_s")]
    tracing = f", of which tracing the model took {max(traced):.1f} s of each run" if traced and apart else ""
    said = f"the counted cost is {row['cost_ratio']:.2f} of full training"
    if scores is not None and scores >= LEAST_SCORES:
        itself = row["cost_ratio"] - scores
        said += (
            f": {scores:.2f} for scores that were made before the run, and {itself:.2f} for the run itself. Its CPU time is "
        )
    else:
        said += ", and the CPU time "
    said += f"{row['cpu_ratio']:.2f}{tracing}."
    fewer = "" if tried else in_fewer_steps(row["method"], row["cost_ratio"], 1 - row["cpu_ratio"])
    if row["cost_ratio"] < NO_TIME_SAVED <= row["cpu_ratio"]:
        busy = " as measured on a busy machine" if any(run.get("busy") for run in runs) else ""
        said += f" So it saved no time here{busy}."
    return " ".join([said, *[NOT_COUNTED] * (apart and scores is not None), *[fewer] * bool(fewer)])


def conclude(results: Mapping[str, Any]) -> Conclusion:
    """Returns the pick of a comparison beside the sentences of `closing`, which begin with fewer epochs in the same time.

    A method that is shown to be better than all of its controls comes first. Otherwise everything that is not told apart is
    on the same footing, methods and controls, and the cheapest by CPU time is picked.

    Args:
        results: Content of results.json.
    """
    rows = [row for row in results["summary"] if row["control_of"] is None and row["difference"] is not None]
    judged = [row for row in rows if row.get("finding") is not None]
    options = _options(judged, results)
    if results.get("equal_seeds"):
        return Conclusion(None, [about_equal_seeds(seeds) for seeds in results["equal_seeds"]])
    first = [_in_the_same_time(row, results) for row in judged if SAME_TIME in row["against"]]
    if not options:
        return Conclusion(None, first + _without_a_pick(judged, results))
    picked = _cheapest(options, results) if len(options) > 1 else _only(options[0], results)
    if all(row["control_of"] is not None for row in options):
        picked.sentences.extend(_about_methods(judged, results))
    return Conclusion(picked.pick, first + picked.sentences)


def _in_the_same_time(row: RowDict, results: Mapping[str, Any]) -> str:
    """Returns how a method stands against the control in the same time, or why that is not known."""
    found, words = row["against"][SAME_TIME], CONTROLS[SAME_TIME].words
    control = next(one for one in _controls_of(row, results) if kind_of(one) == SAME_TIME)
    (own, time), (took, _) = time_of(row, results), time_of(control, results)
    gap = _time_gap(own, took)
    said = {"unclear": "not shown to be better or worse", None: "not judged"}.get(found["finding"], found["finding"])
    length = f"{results['epochs'] * control['cost_ratio']:.3g} of {results['epochs']} epochs"
    set_by = _set_by(row, results)
    sentences = [
        f"Against {words}, {row['method']} is {said}: {_with_interval(found, _whole(results))}.",
        f"They trained for {length}{set_by} and took {of_known(took)} of the {time} of full training, and {row['method']} "
        f"{of_known(own)}.",
    ]
    if gap is not None and abs(gap) > TIME_TOLERANCE:
        than = row["method"] if (own or 0) <= 1 else "full training"
        sentences.append(f"So they had {abs(gap):.0%} {'less' if gap < 0 else 'more'} time than {than}.")
    if found["finding"] is None:
        sentences.append(NOT_JUDGED)
    return " ".join(sentences)


def _set_by(row: RowDict, results: Mapping[str, Any]) -> str:
    """Returns which seeds set the length of the control in the same time; "" if all of them did."""
    runs = [run for run in results["runs"] if run["method"] == SAME_TIME and run["control_of"] == row["method"]]
    seeds = runs[0].get("length", {}).get("seeds", len(runs))
    return "" if seeds >= len(runs) else f" (set by the times of the first {seeds} seeds)"


def _options(judged: Sequence[RowDict], results: Mapping[str, Any]) -> list[RowDict]:
    """Returns the rows that may be picked and are not told apart, of each kind of control one; none unless one has no loss."""
    methods = [row for row in judged if row["finding"] == "no loss" and row["cost_ratio"] <= SAVES and not _worse(row)]
    if best := [row for row in methods if row["against"] and _beats_all(row)]:
        return best
    controls = [one for row in judged for one in _controls_of(row, results) if _is_option(one, row, results)]
    controls.sort(key=lambda one: (one["finding"] != "no loss", one["cost_ratio"]), reverse=True)
    of_kind = {kind_of(one): one for one in controls}
    options = [*methods, *(of_kind[kind] for kind in SIMPLEST if kind in of_kind)]
    return options if any(row["finding"] == "no loss" for row in options) else []


def _is_option(control: RowDict, row: RowDict, results: Mapping[str, Any]) -> bool:
    """Returns whether a control may take the place of its method.

    With few seeds, a control is often neither shown to lose nor shown not to. It counts where it is tied with its method,
    and lies within the margin as measured: the method has to be better, not the control.
    """
    kind = kind_of(control)
    against = row["against"].get(kind)
    if kind not in SIMPLEST or against is None or against["finding"] in ("better", None) or control["cost_ratio"] > SAVES:
        return False
    margin = results["margin"] / 100 if _whole(results) else results["margin"]
    within = control["difference"] >= -margin and against["difference"] <= margin
    beside = row["finding"] == "no loss" and not _worse(row)
    return control["finding"] == "no loss" or (control["finding"] == "unclear" and within and beside)


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
    best, scale = max(judged, key=lambda row: row["difference"]), 100 if _whole(results) else 1
    return [
        f"Nothing to pick: every method with a verdict loses. The smallest loss is that of {best['method']}, "
        f"{_in_words(results, scale * -best['difference'])} at {best['cost_ratio']:.3f} of the cost. Another learning rate or "
        "a larger share may lose less; else train on everything."
    ]


def _worse(row: RowDict) -> bool:
    return any(found["finding"] == "worse" for found in row["against"].values())


def _beats_all(row: RowDict) -> bool:
    return all(found["finding"] == "better" for found in row["against"].values())


def _only(row: RowDict, results: Mapping[str, Any]) -> Conclusion:
    """Returns the conclusion where one row may be picked."""
    kept = (
        f"It loses no more than {_in_words(results, results['margin'])} at {row['cost_ratio']:.3f} of the cost of full training"
    )
    said = [f"Our pick: {_named(row)}. {kept}{_beside_controls(row, results)}"]
    ratio, time = time_of(row, results)
    if ratio is not None and ratio > SAVES:
        said.append(f"Yet it saves no {time} here: it took {ratio:.2f} of that of full training.")
    elif row["against"] and _beats_all(row):
        said += _slower(row, results)
    return Conclusion(row, said)


def _beside_controls(row: RowDict, results: Mapping[str, Any]) -> str:
    """Returns the end of the sentence on a pick, and what its controls say of it."""
    if row["control_of"] is not None:
        return "."
    if not row["against"]:
        why = "None of its controls has a verdict" if _controls_of(row, results) else "No controls were trained"
        return f". {why}: whether smaller batches of the same cost would do as well is not known."
    if not (equal := [kind for kind, one in row["against"].items() if one["finding"] != "better"]):
        return f", and is better than {listed([CONTROLS[kind].words for kind in row['against']])} of the same cost."
    if "placebo" in equal and len(equal) < len(row["against"]):
        return ". Yet it is not told apart from permuted signals, so that it is not shown that its choice of samples matters."
    return f". It is not shown to be better than {listed([CONTROLS[kind].words for kind in equal])} of the same cost."


def _slower(row: RowDict, results: Mapping[str, Any]) -> list[str]:
    """Returns that a method takes more time than a control that it is better than; nothing where it does not."""
    own, time = time_of(row, results)
    controls = [(ratio, one) for one in _controls_of(row, results) if (ratio := time_of(one, results)[0]) is not None]
    if own is None or not controls:
        return []
    least, control = min(controls, key=lambda one: one[0])
    if round(own, 2) <= round(least, 2):
        return []
    words = _words(control)
    return [f"It is not the cheapest in {time}: it took {own:.2f} of that of full training, and {words} took {least:.2f}."]


def _cheapest(options: Sequence[RowDict], results: Mapping[str, Any]) -> Conclusion:
    """Returns the conclusion where several rows are not told apart: the one of the least time, of equal ones the simplest."""
    timed = [(row, *time_of(row, results)) for row in options]
    time, known = timed[0][2], all(ratio is not None for _, ratio, _ in timed)
    sizes = [(round(ratio if known and ratio is not None else row["cost_ratio"], 2), row) for row, ratio, _ in timed]
    least, pick = min(sizes, key=lambda one: (one[0], _complexity(one[1])))
    which = "The cheapest" if [size for size, _ in sizes].count(least) == 1 else "The cheapest and simplest"
    if known:
        (size, row), *more = [one for one in sizes if one[1] is not pick]
        other = [f"{_words(row)} took {size:.2f}", *(f"{_words(row)} {size:.2f}" for size, row in more)]
        cost = f"{which} is {_named(pick)}, which took {least:.2f} of the {time} of full training; {listed(other)}."
    else:
        counted = f"{which} as counted is {_named(pick)}, at {pick['cost_ratio']:.3f} of the cost of full training."
        cost = f"The {time} of some of them is not known. {counted}"
    shown = [_words(row) for row in options if row["finding"] == "no loss"]
    seeds, size = sorted({run["seed"] for run in results["runs"]}), _in_words(results, results["margin"])
    sure = len(shown) == len(options)
    so_far = "" if sure else f", as far as these {len(seeds)} seeds show"
    said = [f"Any of these will do{so_far}: {listed([_words(row) for row in options])}. {cost}"]
    if known and least > SAVES:
        said.append(f"None of them saves {time} here.")
    if sure:
        said.append(f"Each of these {len(options)} loses no more than {size}; none of them is shown to be better than another.")
    else:
        more = _seeds_in_words(pick, seeds) if pick["finding"] == "unclear" else ""
        only = listed(shown)
        said.append(f"It is shown for {only} only that the loss is no more than {size}. {more}".rstrip())
    return Conclusion(pick, said)


def _complexity(row: RowDict) -> int:
    """Returns the place of a row among those that take the same time, the simplest first: controls, then methods."""
    kind = kind_of(row)
    return len(SIMPLEST) if kind is None else SIMPLEST.index(kind)


def _words(row: RowDict) -> str:
    kind = kind_of(row)
    return row["method"] if kind is None else CONTROLS[kind].words


def _named(row: RowDict) -> str:
    """Returns the name of a row in words, and that in the table where it is another."""
    return row["method"] if row["control_of"] is None else f"{_words(row)} ({row['method']})"


def time_of(row: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[float | None, str]:
    """Returns the time of a row as a share of full training, and its name: CPU time, or wall time on another device.

    Args:
        row: Row of the summary in results.json.
        results: Content of results.json.
    """
    if results.get("device", "cpu") == "cpu":
        return row.get("cpu_ratio"), "CPU time"
    return row.get("wall_ratio"), "wall time"


def _about_methods(judged: Sequence[RowDict], results: Mapping[str, Any]) -> list[str]:
    """Returns why no method is among the options."""
    said = []
    if lost := [row["method"] for row in judged if row["finding"] == "loses"]:
        said.append(f"{listed(lost)} {'loses' if len(lost) == 1 else 'lose'} against full training.")
    if worse := [row["method"] for row in judged if row["finding"] != "loses" and _worse(row)]:
        said.append(f"{listed(worse)} {'is' if len(worse) == 1 else 'are'} worse than a control of the same cost.")
    if unclear := [row for row in judged if row["finding"] == "unclear" and not _worse(row)]:
        best = max(unclear, key=lambda row: row["difference"])
        said += [f"Whether {best['method']} would do is open.", *_undecided(best, results)]
    return said


def _controls_of(row: RowDict, results: Mapping[str, Any]) -> list[RowDict]:
    return [control for control in results["summary"] if control["control_of"] == row["method"]]


def _undecided(row: RowDict, results: Mapping[str, Any]) -> list[str]:
    seeds = sorted({run["seed"] for run in results["runs"]})
    ways = [way for way in (_seeds_in_words(row, seeds), _margin_in_words(row, results)) if way]
    if not ways:
        more = ",".join(str(seed) for seed in range(max(5, len(seeds) + 3)))
        said = [f"Cannot tell yet with {len(seeds)} seed{'s' * (len(seeds) > 1)}.", *_so_far(row, results)]
        return [" ".join([*said, f"Repeat the command with more seeds, such as --seeds {more}."])]
    differences, ranges = _differences(row, results), ""
    if len(differences) > 1:
        spread = _in_words(results, (100 if _whole(results) else 1) * (max(differences) - min(differences)))
        ranges = f": from seed to seed, the difference of {row['method']} to full training ranges over {spread}"
    said = " ".join([*_so_far(row, results), *ways])
    return [f"Cannot tell yet{ranges}. {said}"]


def _so_far(row: RowDict, results: Mapping[str, Any]) -> list[str]:
    """Returns what the seeds say of a row that is not decided: that all of them lose, or that no control is as good."""
    differences = _differences(row, results)
    least = -max(differences) * (100 if _whole(results) else 1)
    if least > results["margin"] and len(differences) > 1:
        return [f"Yet it lost about {_in_words(results, least)} or more with every seed."]
    if row["control_of"] is None and row["against"] and _beats_all(row):
        return ["Yet it is better than all of its controls."]
    return []


def _seeds_in_words(row: RowDict, seeds: Sequence[int]) -> str:
    needed = row["seeds_needed"]
    if needed is None:
        return ""
    if needed > MOST_SENSIBLE:
        return (
            f"The seeds of {row['method']} differ too much to decide by more of them: about {needed} would do, by a rough "
            f"estimate from {len(seeds)}."
        )
    more = [seed for seed in range(needed + len(seeds)) if seed not in seeds]
    listing = f"--seeds {','.join(map(str, [*seeds, *more][:needed]))}"
    how = f" ({listing if needed <= MOST_LISTED else f'--until-decided --max-seeds {needed}'})"
    return f"About {needed} seeds{how} would decide on {row['method']} if further ones differ as these {len(seeds)} do."


def _margin_in_words(row: RowDict, results: Mapping[str, Any]) -> str:
    """Returns the smallest round margin with which these seeds show no loss of a method; "" where there is none."""
    whole = _whole(results)
    unit = 1.0 if whole else max(1e-12, abs(next(one["mean"] for one in results["summary"] if one["method"] == "full")) / 100)
    rows = [one for one in results["summary"] if one["control_of"] is None and one["difference"] is not None]
    to_full = {one["method"]: Paired.of(_differences(one, results)) for one in rows}
    for margin in (size * unit for size in MARGINS if results["margin"] < size * unit <= OF_SENSE * results["margin"]):
        shown = findings(to_full, margin / 100 if whole else margin, results.get("looks", 1))
        if shown[row["method"]] == "no loss":
            size = _in_words(results, margin)
            shown = f"It is shown already that {row['method']} loses no more than {size}"
            return f"{shown}: use --margin {margin:.4g} if such a loss does not matter."
    return ""


def _differences(row: RowDict, results: Mapping[str, Any]) -> list[float]:
    """Returns the differences of the runs of a row to full training, seed by seed."""
    values = {run["seed"]: run["metric"]["value"] for run in results["runs"] if run["method"] == "full"}
    own = [run for run in results["runs"] if (run["method"], run["control_of"]) == (row["method"], row["control_of"])]
    return [run["metric"]["value"] - values[run["seed"]] for run in own]


def _whole(results: Mapping[str, Any]) -> bool:
    return is_share(results["runs"])


def _in_words(results: Mapping[str, Any], amount: float) -> str:
    """Returns an amount of the metric, which is in points where the metric is a share."""
    return f"{amount:.2g} point{'s' if f'{amount:.2g}' != '1' else ''}" if _whole(results) else f"{amount:.3g}"


def rates_sentences(results: Mapping[str, Any]) -> list[str]:
    """Returns sentences on the learning rates of a comparison; none where every arm has that of the training.

    Args:
        results: Content of results.json.
    """
    looked = results.get("rates")
    if not looked:
        return []
    factors, seeds = (listed([f"{one:g}" for one in looked[name]]) for name in ("factors", "seeds"))
    by_method: dict[str, list[RowDict]] = {}
    for row in results["summary"]:
        by_method.setdefault(row["control_of"] or row["method"], []).append(row)
    said = [
        f"Every arm was tried with the learning rate of the training times {factors}, on the seeds {seeds}, which do not "
        f"count, and has the best one: {'; '.join(_of_method(rows) for rows in by_method.values())}."
    ]
    ends = {min(looked["factors"]), max(looked["factors"])}
    at_end = [row["method"] for row in results["summary"] if row["rate"] in ends and not row["method"].startswith("placebo@")]
    if at_end and len(looked["factors"]) > 2:
        named = listed([*dict.fromkeys(at_end)])
        said.append(
            f"Best at the smallest or the largest of these rates were {named}. Rates beyond them may change the verdicts."
        )
    return said


def _of_method(rows: Sequence[RowDict]) -> str:
    own, *controls = rows
    others = [f"{kind_of(row)} {row['rate']:g}" for row in controls if not row["method"].startswith("placebo@")]
    return f"{own['method']} {own['rate']:g}" + (f" ({', '.join(others)})" if others else "")
