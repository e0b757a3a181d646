"""Summarizes a comparison: each method against full training and its controls, and what to do next."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from thresher_lab.advise.budget import about_equal_seeds
from thresher_lab.comparison.controls import CONTROLS, SAME_TIME, kind_of
from thresher_lab.comparison.statistics import (
    LEAST_SEEDS,
    Against,
    Finding,
    Paired,
    PairedAtAnyLook,
    against_controls,
    findings,
    seeds_to_tell,
    seeds_to_tell_from_control,
)
from thresher_lab.training.files import listed

DEFAULT_MARGIN = 0.5
OF_FULL = 0.05
"""Loss that does not matter: in points where the metric is a share, else as a share of full training's metric."""

DECIDED = "decided"
"""Value of `until` in results.json if the comparison stops when every verdict is decided."""
AGAINST = {
    "better": "better than {}",
    "worse": "worse than {}",
    "no better": "no better than {}",
    "unclear": "not told apart from {}",
    None: "no verdict against {}: the times are not equal",
}
"""Verdicts on a method against its controls, by finding."""
WALL_LEFT_BLANK = (
    "A wall time is blank if the machine was busy, or if the number of other runs in progress differed from that during full "
    "training."
)

RunDict = dict[str, Any]
"""A run as in results.json."""
RowDict = dict[str, Any]
"""A row of the summary, or a part of one."""
Place = tuple[str, str | None]
"""Name of a method, and a kind of its controls; None for the method itself."""


def sentences_on_times(results: Mapping[str, Any]) -> list[str]:
    """Returns sentences on what limits the comparison of times; none if nothing does.

    Args:
        results: Content of results.json.

    Example:
        >>> sentences_on_times({"runs": [{"busy": True}, {"busy": False}, {}], "summary": []})
        ['The machine was busy, so all times, including CPU times, are unreliable: in 1 of 3 runs, its load exceeded its cores.']
    """
    blank = any(row["wall_ratio"] is None for row in results["summary"])
    return times_of_busy_machine(results) + ([WALL_LEFT_BLANK] if blank else [])


def times_of_busy_machine(results: Mapping[str, Any]) -> list[str]:
    """Returns a sentence on how many runs had a busy machine; none if no run had.

    Args:
        results: Content of results.json.
    """
    runs = results["runs"]
    # Methods share controls, so that a run may be there twice.
    is_busy = {
        run.get("samples", number): run.get("busy") is True for number, run in enumerate(runs)
    }
    busy = sum(is_busy.values())
    if not busy:
        return []
    return [
        f"The machine was busy, so all times, including CPU times, are unreliable: in {busy} of {len(is_busy)} runs, its load "
        "exceeded its cores."
    ]


def unfinished(results: Mapping[str, Any]) -> list[str]:
    """Returns a sentence on the progress of a comparison; none if it is finished.

    Args:
        results: Content of results.json.
    """
    running = results.get("running")
    if running is None:
        return []
    done = f"Not finished: {running['finished']} of at most {running['runs']} runs."
    if interval_sentences(results):
        return [f"{done} It stops when every verdict is decided."]
    return [
        f"{done} Verdicts may change. Do not stop because one looks good: that finds more by chance."
    ]


def interval_sentences(results: Mapping[str, Any]) -> list[str]:
    """Returns a sentence that the intervals are valid at every look; none if they are for one look.

    Args:
        results: Content of results.json.
    """
    if results.get("until") != DECIDED:
        return []
    return [
        "Intervals and verdicts are valid at every look: training stops when every verdict is decided."
    ]


def left_out_sentence(one: Mapping[str, str]) -> str:
    """Returns an entry of `left_out` in results.json as a sentence.

    Args:
        one: Entry: the method, the control and why.

    Example:
        >>> left_out_sentence({"method": "prune", "control": "placebo", "why": "Prune decides before training"})
        'Skipped the placebo control of prune: Prune decides before training.'
    """
    return f"Skipped the {one['control']} control of {one['method']}: {one['why'].rstrip('.')}."


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


def summarize(
    runs: Sequence[RunDict],
    margin: float = DEFAULT_MARGIN,
    looks: int = 1,
    *,
    any_look: bool = False,
) -> list[RowDict]:
    """Returns one row per method and control, in the order of their first runs; controls follow their method.

    Args:
        runs: Runs of `training.loop.train`, with cost ratios that can be compared; full training with every seed is among them.
        margin: Loss against full training that does not matter, above 0: in points (hundredths) where the metric is a share
            (all values of full training are from 0 to 1), else in units of the metric. Default: 0.5.
        looks: Number of times that the verdicts may be looked at, with more seeds each time; findings are corrected for it.
            Default: 1.
        any_look: Whether intervals and findings are valid at every look; "loses" is then a loss beyond the margin.
            Default: False.

    Returns:
        Rows with the keys method, control_of, rate, mean, std, difference, ci95, finding, seeds_needed, against, cost_ratio,
        wall_ratio, cpu_ratio, memory_ratio and verdict. `against` holds the difference of a method to each of its controls,
        with ci95, finding, seeds_needed and verdict. Differences are paired by seed. Each interval is for one comparison;
        findings are corrected for the number of methods, and findings against controls for the number of controls. Ratios of
        times and memory are medians over the seeds, or None if unknown. A finding is None if a training diverged (half of its
        losses or more are not finite), or if the winner had more time, see `_is_fair`.
    """
    share = is_share(runs)
    named_margin = amount_text(margin, share=share)
    margin = margin / 100 if share else margin
    groups = _grouped_runs(runs)
    full = groups["full", None]
    broken = {place: seeds for place, group in groups.items() if (seeds := _diverged(group))}
    if ("full", None) in broken:
        sound = {}
    else:
        sound = {place: group for place, group in groups.items() if place not in broken}
    to_full = {
        place: _paired(group, full, any_look=any_look)
        for place, group in sound.items()
        if place[0] != "full"
    }
    found: dict[Place, Finding] = {}
    for of_methods in (True, False):
        found |= findings(
            {at: paired for at, paired in to_full.items() if (at[1] is None) is of_methods},
            margin,
            looks,
        )
    beside = {
        at: _paired(sound[at[0], None], group, any_look=any_look)
        for at, group in sound.items()
        if at[1] is not None and (at[0], None) in sound
    }
    against = against_controls(beside, margin, looks)
    for at in [at for at in beside if at[1] == SAME_TIME]:
        if not _is_fair(against[at], sound[at[0], None], sound[at], full):
            del against[at]
    rows = []
    for place, group in groups.items():
        row = _summary_row(group, full)
        if place in to_full:
            paired = to_full[place]
            among = looks * sum((at[1] is None) is (place[1] is None) for at in to_full)
            row |= _judged(paired, found[place], seeds_to_tell, margin, among)
            row["against"] = {
                at[1]: _judged(
                    differences,
                    against.get(at),
                    seeds_to_tell_from_control,
                    margin,
                    looks * len(beside),
                )
                | {"verdict": AGAINST[against.get(at)].format(CONTROLS[at[1]].words)}
                for at, differences in beside.items()
                if place == (at[0], None)
            }
            verdicts = [_verdict(row, paired, named_margin), *_verdicts_against(row["against"])]
            row["verdict"] = "; ".join(verdicts)
        elif ("full", None) in broken:
            row["verdict"] = "no verdict: full training diverged"
        elif place in broken:
            seeds = ", ".join(map(str, broken[place]))
            row["verdict"] = (
                f"no verdict: diverged, half of the losses or more are not finite (seeds: {seeds})"
            )
        rows.append(row)
    return rows


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
    if method and control is not None:
        return control / min(1.0, method) - 1
    return None


def _is_fair(
    finding: Against, method: Sequence[RunDict], control: Sequence[RunDict], full: Sequence[RunDict]
) -> bool:
    """Returns whether a finding holds although the times differ: the winner must not be the one with more time."""
    if control[0].get("length", {}).get("clock", "cpu_s") == "cpu_s":
        clock = "cpu_ratio"
    else:
        clock = "wall_ratio"
    gap = _time_gap(*(_summary_row(runs, full)[clock] for runs in (method, control)))
    if gap is None or abs(gap) <= TIME_TOLERANCE:
        return gap is not None
    return finding not in (("better",) if gap < 0 else ("worse", "no better"))


def _diverged(runs: Sequence[RunDict]) -> list[int]:
    """Returns the seeds with which half of the losses of the last epoch or more were not finite."""
    last = [(run["seed"], run["history"][-1]) for run in runs if run.get("history")]
    return [
        seed
        for seed, entry in last
        if 2 * entry.get("nonfinite", 0) >= max(1, entry.get("backward", 0))
    ]


def _grouped_runs(runs: Sequence[RunDict]) -> dict[Place, list[RunDict]]:
    """Returns the runs of each method and control; methods come in the order of their first runs, before their controls."""
    groups: dict[str, dict[str | None, list[RunDict]]] = {}
    for run in runs:
        groups.setdefault(run["control_of"] or run["method"], {None: []}).setdefault(
            kind_of(run), []
        ).append(run)
    return {(name, kind): group for name, kinds in groups.items() for kind, group in kinds.items()}


def _paired(runs: Sequence[RunDict], others: Sequence[RunDict], *, any_look: bool) -> Paired:
    value = {run["seed"]: run["metric"]["value"] for run in others}
    # While a comparison runs, a method may have seeds that its control does not have yet.
    differences = [
        run["metric"]["value"] - value[run["seed"]] for run in runs if run["seed"] in value
    ]
    return (PairedAtAnyLook if any_look else Paired).of(differences)


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
        "verdict": "the baseline",
    }


def _label(runs: Sequence[RunDict], cost: float) -> str:
    """Returns the label of a method; or of a control, with the mean of the costs, which differ by seed."""
    kind = kind_of(runs[0])
    if kind in (None, SAME_TIME):
        return runs[0]["method"]
    return f"{kind}@{cost:.3f}"


def _median_ratio(runs: Sequence[RunDict], full: Sequence[RunDict], measure: str) -> float | None:
    """Returns the median over the seeds of a measure as a share of full training; None where it is not known of each run."""
    of_full = {run["seed"]: run.get(measure) for run in full}
    pairs = [(run.get(measure), of_full[run["seed"]]) for run in runs]
    known = [own / whole for own, whole in pairs if own is not None and whole]
    return statistics.median(known) if len(known) == len(pairs) else None


LIKE_COMPANY = 0.5
"""Difference in the mean number of other runs, and share of runs on a busy machine, up to which wall times compare."""


def _in_like_company(runs: Sequence[RunDict], full: Sequence[RunDict]) -> bool:
    """Returns whether wall times compare: little else ran, and as many other runs as during full training."""

    def mean(of: Sequence[RunDict], name: str) -> float:
        return fmean(run.get(name) or 0 for run in of)

    busy = max(mean(runs, "busy"), mean(full, "busy"))
    return max(busy, abs(mean(runs, "other_runs") - mean(full, "other_runs"))) <= LIKE_COMPANY


def _judged(
    paired: Paired,
    finding: Finding | Against | None,
    tell: Callable[[Paired, float, int], int | None],
    margin: float,
    among: int,
) -> RowDict:
    return {
        "difference": paired.mean,
        "ci95": None if paired.low is None else [paired.low, paired.high],
        "finding": finding,
        "seeds_needed": tell(paired, margin, among) if finding == "unclear" else None,
    }


def _verdict(row: RowDict, paired: Paired, margin: str) -> str:
    if row["finding"] == "no loss":
        return f"no loss within the margin of {margin}"
    if row["finding"] == "loses":
        if paired.any_look:
            return f"loses more than the margin of {margin}"
        return "loses"
    if paired.n < LEAST_SEEDS:
        return f"not enough seeds to tell: {paired.n} of at least {LEAST_SEEDS}"
    if not paired.decides:
        return "the same difference with every seed, no spread to judge by"
    if row["seeds_needed"] is None:
        return "not enough seeds to tell"
    return f"not enough seeds to tell (about {row['seeds_needed']} would do)"


def _verdicts_against(against: Mapping[Any, RowDict]) -> list[str]:
    """Returns a verdict per finding, with the controls that have it; the control in the same time has its own."""
    names: dict[tuple[str | None, bool], list[str]] = {}
    for kind, found in against.items():
        names.setdefault((found["finding"], kind == SAME_TIME), []).append(CONTROLS[kind].words)
    return [AGAINST[finding].format(listed(named)) for (finding, _), named in names.items()]


def amount_text(amount: float, *, share: bool) -> str:
    """Returns an amount of the metric, in points if the metric is a share.

    Args:
        amount: Amount, in hundredths if the metric is a share.
        share: Whether the metric is a share.

    Example:
        >>> amount_text(0.5, share=True), amount_text(0.5, share=False)
        ('0.5 points', '0.5')
    """
    if not share:
        return f"{amount:.4g}"
    return f"{amount:.3g} point{'s' * (amount != 1)}"


def is_share(runs: Sequence[RunDict]) -> bool:
    """Returns whether the metric is a share, which people read in percent: all values of full training are from 0 to 1."""
    return all(0 <= run["metric"]["value"] <= 1 for run in runs if run["method"] == "full")


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


def training_text(results: Mapping[str, Any]) -> str:
    """Returns the epochs, seeds and device of a comparison, such as "20 epochs, 1 seed, cpu"."""
    seeds = len({run["seed"] for run in results["runs"]})
    return f"{results['epochs']} epochs, {seeds} seed{'s' * (seeds > 1)}, {results['device']}"


def forms(results: Mapping[str, Any]) -> tuple[Callable[[float], str], Callable[[float], str]]:
    """Returns how values and differences are written: in percent and points where the metric is a share.

    Args:
        results: Content of results.json.
    """
    if is_share(results["runs"]):
        return (lambda value: f"{100 * value:.2f}"), (lambda value: f"{100 * value:+.2f}")
    return (lambda value: f"{value:.4g}"), (lambda value: f"{value:+.3g}")


SAVES = 0.99
"""Largest cost that counts as a saving."""
SIMPLEST = (SAME_TIME, "shorter", "smaller", "fewer", "uniform")
"""Controls that can take the place of a method, the simplest first."""


NOTHING_JUDGED = "There is nothing to pick from: no method has a verdict."


@dataclass(frozen=True)
class Conclusion:
    """What a comparison comes to.

    Args:
        pick: Row of the summary that is picked, of a method or of a control; None if nothing is.
        sentences: Advice; the verdict, time and differences of the pick or of the closest method; what would decide.
    """

    pick: RowDict | None
    sentences: list[str]


def conclude(results: Mapping[str, Any]) -> Conclusion:
    """Returns the pick of a comparison, and its sentences.

    A method is picked if it is shown to lose no more than the margin and to be better than each of its controls (the placebo
    must not be better). Otherwise the simplest control that is shown to lose no more than the margin is picked.

    Args:
        results: Content of results.json.
    """
    if results.get("equal_seeds"):
        return Conclusion(None, [about_equal_seeds(seeds) for seeds in results["equal_seeds"]])
    judged = [
        row
        for row in results["summary"]
        if row["control_of"] is None and row.get("finding") is not None
    ]
    if not judged:
        return Conclusion(None, [NOTHING_JUDGED])
    without_loss = [
        row for row in judged if row["finding"] == "no loss" and row["cost_ratio"] <= SAVES
    ]
    best = [row for row in without_loss if _is_best(row)]
    if best:
        pick = min(best, key=lambda row: time_of(row, results)[0] or row["cost_ratio"])
        advice = f"Use {pick['method']}: {pick['verdict']}."
        return Conclusion(pick, [advice, _measured(pick, results)])
    control = _simplest_control(judged, results)
    margin = amount_text(results["margin"], share=is_share(results["runs"]))
    order = ("loses", "unclear", "no loss")
    closest = max(judged, key=lambda row: (order.index(row["finding"]), row["difference"]))
    advice = f"No method is shown to lose at most {margin} and to beat its controls."
    if control is not None:
        words = CONTROLS[kind_of(control)].words
        advice = f"Use {control['method']} ({words}): it loses at most {margin}."
    verdict = f"The closest method is {closest['method']}: {closest['verdict']}."
    sentences = [advice, f"{verdict} {_measured(closest, results)}"]
    return Conclusion(control, sentences + _what_would_decide(closest, results))


def _is_best(row: RowDict) -> bool:
    return all(
        found["finding"] == "better" or (kind == "placebo" and found["finding"] != "worse")
        for kind, found in row["against"].items()
    )


def _simplest_control(judged: Sequence[RowDict], results: Mapping[str, Any]) -> RowDict | None:
    methods = {row["method"] for row in judged}
    controls = [
        row
        for row in results["summary"]
        if row["control_of"] in methods
        and row["finding"] == "no loss"
        and row["cost_ratio"] <= SAVES
        and kind_of(row) in SIMPLEST
    ]
    return min(
        controls, key=lambda row: (SIMPLEST.index(kind_of(row)), row["cost_ratio"]), default=None
    )


def _measured(row: RowDict, results: Mapping[str, Any]) -> str:
    """Returns sentences on the time of a method and on the differences that its verdict is about."""
    ratio, clock = time_of(row, results)
    _, signed = forms(results)
    unit = " points" if is_share(results["runs"]) else ""
    sentences = []
    if ratio is None:
        sentences.append(f"Its {clock} is unknown.")
    else:
        sentences.append(f"It took {ratio:.2f} of the {clock} of full training.")
    sentences.append(f"Difference from full training: {difference_text(row, signed, unit)}.")
    if SAME_TIME in row["against"]:
        difference = difference_text(row["against"][SAME_TIME], signed, unit)
        sentences.append(f"Difference from fewer epochs in the same time: {difference}.")
    if not row["against"]:
        sentences.append("It has no control with a verdict.")
    return " ".join(sentences)


def _what_would_decide(row: RowDict, results: Mapping[str, Any]) -> list[str]:
    """Returns how many seeds would decide on a method, as a sentence; nothing if it is decided."""
    verdicts = [row, *(found for kind, found in row["against"].items() if kind == SAME_TIME)]
    unclear = [found["seeds_needed"] for found in verdicts if found["finding"] == "unclear"]
    if not unclear:
        return []
    seeds = len({run["seed"] for run in results["runs"]})
    if None in unclear:
        return [f"Too few seeds to tell: {seeds}. Repeat the command with more."]
    needed = max(unclear)
    return [
        f"About {needed} seeds (--seeds 0-{needed - 1}) would decide, a rough estimate from {seeds}."
    ]


def time_of(row: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[float | None, str]:
    """Returns the time of a row as a share of full training, and its name: CPU time, or wall time on another device.

    Args:
        row: Row of the summary in results.json.
        results: Content of results.json.
    """
    if results.get("device", "cpu") == "cpu":
        return row.get("cpu_ratio"), "CPU time"
    return row.get("wall_ratio"), "wall time"


def length_sentences(results: Mapping[str, Any]) -> list[str]:
    """Returns which seeds set the length of the control in the same time, as a sentence; nothing if all of them did.

    Args:
        results: Content of results.json.
    """
    seeds = len({run["seed"] for run in results["runs"]})
    lengths = [run["length"]["seeds"] for run in results["runs"] if run.get("length")]
    if not lengths or min(lengths) >= seeds:
        return []
    return [f"The times of the first {min(lengths)} seeds set the length of {SAME_TIME}."]


def rates_sentences(results: Mapping[str, Any]) -> list[str]:
    """Returns sentences on the learning rates of a comparison; none where every arm has that of the training.

    Args:
        results: Content of results.json.
    """
    tried = results.get("rates")
    if not tried:
        return []
    rows = [row for row in results["summary"] if kind_of(row) != "placebo"]
    factors = listed([f"{factor:g}" for factor in tried["factors"]])
    seeds = listed([str(seed) for seed in tried["seeds"]])
    best = "; ".join(f"{row['method']} {row['rate']:g}" for row in rows)
    sentences = [
        f"Each method and control was tried at {factors} times the learning rate of the training, on seeds that do not count ({seeds}), "
        f"and uses the best: {best}."
    ]
    ends = (min(tried["factors"]), max(tried["factors"]))
    at_end = dict.fromkeys(row["method"] for row in rows if row["rate"] in ends)
    if at_end and len(tried["factors"]) > 2:
        sentences.append(
            f"The best rate is the smallest or largest tried for {listed([*at_end])}; a wider range may change the verdicts."
        )
    return sentences
