"""Claims that were added after the runs are judged by what the results keep of them, with bounds on the spread."""

import json
import math
import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import thresher
from thresher.schedules import step_value
from thresher_lab import reproduction as papers
from thresher_lab.comparison.statistics import Paired
from thresher_lab.recipes.running import task_of
from thresher_lab.reproduction import ada_selection
from thresher_lab.reproduction.artefact import judged, overall, specs_of
from thresher_lab.reproduction.page import paper_pages
from thresher_lab.training.specs import parse_methods

RESULTS = Path(__file__).parents[3] / "benchmarks/results/reproduce"
KAKURENBO, DIET = "KAKURENBO (arXiv 2310.10102)", "Diet Selective-Backprop (poster)"
OURS = "AdaBoost, losses scaled"
"""A reading of AdaBoost that is ours, not a baseline of the paper."""


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def judged_with(mean: float, spread: float, above: float) -> dict[str, Any]:
    """Interval and verdict of five seeds whose spread is at most `spread`, as `Claim.judge` words them."""
    half = float(stats.t.ppf(0.975, 4)) * spread / math.sqrt(5)
    paired = Paired(5, mean, mean - half, mean + half, spread)
    verdict = judged(paired, above)
    needed = paired.seeds_for(abs(mean - above)) if verdict == "cannot tell" else None
    return {"mean": mean, "ci95": [mean - half, mean + half], "verdict": verdict} | (
        {"seeds_needed": needed} if verdict == "cannot tell" else {}
    )


def over_all_baselines(part):
    """AdaSelection over the best of all baselines: means from the summary, spreads from table 4, rounded up."""
    artefact = papers.ARTEFACTS["adaselection-table-3"]
    [shared] = [one for one in artefact.parts if one.name == part]
    [summary] = [
        one["summary"] for one in result("adaselection-table-3")["parts"] if one["name"] == part
    ]
    means = {row["method"]: row["mean"] for row in summary}
    table = result("adaselection-table-4")["tables"][0]
    [cells] = [cells for cells in table["rows"] if cells[0].startswith(f"{part}, ")]
    spreads = {
        name: (float(cell.partition(" ± ")[2]) + 0.005) / 100
        for name, cell in zip(table["header"][2:], cells[2:], strict=True)
    }

    def mean_of(method):
        labels = (specs_of(shared, None)[f"{method} {rate}"].label for rate in ada_selection.RATES)
        return statistics.fmean(means[label] for label in labels)

    best = max((name for name in spreads if name not in ("AdaSelection", OURS)), key=mean_of)
    if best in ada_selection.POOL:  # the claim about the candidates has the runs of each seed
        [known] = [
            one
            for one in result("adaselection-table-3")["claims"]
            if one["claim"].startswith(f"{part}: AdaSelection is better than the best of its three")
        ]
        return {key: known[key] for key in ("mean", "ci95", "verdict", "note")}
    gain = mean_of("AdaSelection") - mean_of(best)
    found = judged_with(gain, spreads["AdaSelection"] + spreads[best], 0)
    return found | {"note": "with our reconstruction; interval and seeds are upper bounds"}


def weight_on_best(part):
    """The last weight of the best candidate: of values in [0, 1], the mean bounds the spread."""
    [table] = [
        one
        for one in result("adaselection-weights")["tables"]
        if one["title"].startswith(f"{part}: ")
    ]
    weights = dict(zip(table["header"][1:], map(float, table["rows"][-1][1:]), strict=True))
    [summary] = [
        one["summary"] for one in result("adaselection-rates")["parts"] if one["name"] == part
    ]
    [shared] = [one for one in papers.ARTEFACTS["adaselection-rates"].parts if one.name == part]
    means = {row["method"]: row["mean"] for row in summary}
    specs = specs_of(shared, None)
    best = max(weights, key=lambda name: means[specs[f"{name} 0.3"].label])
    weight = weights[best]
    within = min(max(0.5, weight - 0.0005), weight + 0.0005)  # the mean before it was rounded
    spread = math.sqrt(5 / 4 * within * (1 - within))
    [apart] = [
        one for one in result("adaselection-weights")["claims"] if one["says"].startswith("Figure")
    ]
    if abs(1 - apart["mean"] - weight) < 0.001:  # uniform selection has all the weight elsewhere
        half = apart["ci95"][1] - apart["mean"] + 0.0015
        spread = half * math.sqrt(5) / float(stats.t.ppf(0.975, 4))
    found = judged_with(weight, spread, 0.5)
    low, high = found["ci95"]
    found["ci95"] = [max(low - 0.0005, 0.0), min(high + 0.0005, 1.0)]
    note = "with our reconstruction; mean rounded; interval and seeds are upper bounds"
    return found | {"note": note}


CHAINS = {
    "EL2N 25% takes less time than full": [
        "SB 50% takes less time than full",
        "Diet-SB 50% (25%) takes less time than SB 50%",
        "EL2N 25% takes less time than Diet-SB 50% (25%)",
    ],
    "Random-Backprop 50% takes less time than full": [
        "SB 50% takes less time than full",
        "Random-Backprop 50% takes less time than SB 50%",
    ],
    "Random-Backprop 75% takes less time than full": [
        "SB 50% takes less time than full",
        "Random-Backprop 50% takes less time than SB 50%",
        "Random-Backprop 75% takes less time than Random-Backprop 50%",
    ],
}


def chained(text):
    """A difference as the sum of others: their spreads add up at most."""
    of = {one["claim"]: one for one in result("diet-sb-runtime")["claims"]}
    steps = [of[step] for step in CHAINS[text]]
    half = sum(step["ci95"][1] - step["mean"] for step in steps)
    spread = half * math.sqrt(5) / float(stats.t.ppf(0.975, 4))
    found = judged_with(sum(step["mean"] for step in steps), spread, 0)
    return found | {"note": f"interval: upper bound; {steps[0]['note']}"}


def bounded():
    """What is judged by bounds, by the result and the claim."""
    parts = [part.name for part in papers.ARTEFACTS["adaselection-weights"].parts]
    text = "AdaSelection is better than the best of the seven baselines"
    last = "the last weight of the candidate that is best alone"
    return {
        **{("adaselection-table-3", f"{part}: {text}"): over_all_baselines(part) for part in parts},
        **{("adaselection-weights", f"{part}: {last}"): weight_on_best(part) for part in parts},
        **{("diet-sb-runtime", text): chained(text) for text in CHAINS},
    }


def test_claims_without_runs_are_judged_by_bounds():
    for (name, text), expected in bounded().items():
        [found] = [one for one in result(name)["claims"] if one["claim"] == text]
        for key, value in expected.items():
            assert found[key] == (pytest.approx(value) if key in ("mean", "ci95") else value), text
    for name in {name for name, _ in bounded()}:
        assert result(name)["verdict"] == overall(result(name)["claims"])


def test_bounds_decide_only_what_every_spread_would():
    assert judged_with(0.3, 0.1, 0)["verdict"] == "reproduced"
    assert judged_with(-0.3, 0.1, 0)["verdict"] == "not reproduced"
    open_one = judged_with(0.05, 0.1, 0)
    assert open_one["verdict"] == "cannot tell" and open_one["seeds_needed"] > 5
    exact = Paired.of(values := (0.1, 0.3, 0.2, 0.6, 0.4))
    assert judged_with(exact.mean, statistics.stdev(values), 0)["ci95"] == pytest.approx(
        [exact.low, exact.high]
    )


def nearest_normal(edges, below):
    """The least distance of a distribution function, known at some edges, from that of any normal distribution."""
    centers, widths = np.meshgrid(np.linspace(-2, 5, 281), np.linspace(0.02, 5, 250))
    normal = stats.norm.cdf(edges[:, None, None], centers, widths)
    return float(np.abs(normal - below[:, None, None]).max(axis=0).min())


def test_what_is_not_judged_has_the_figures_of_the_results():
    table = result("kakurenbo-figure-1")["tables"][0]
    assert table["header"][:2] == ["loss from", "epoch 0, %"]
    edges = np.array([0, *(float(row[0]) for row in table["rows"]), 100])
    shares = [float(row[1]) / 100 for row in table["rows"]]
    distance = nearest_normal(edges, np.cumsum([0, 0, *shares]))
    said = re.search(r"at least ([\d.]+) from every normal", papers.UNJUDGED[KAKURENBO])
    assert said and distance - 0.01 < float(said[1]) < distance
    assert "of 10,000 losses rejects 0.01" in papers.UNJUDGED[KAKURENBO].replace("\n", " ")
    assert 0.886 / math.sqrt(10_000) < 0.01  # the limit of Lilliefors at 5 %
    bell = stats.norm.cdf(edges := np.linspace(0, 4, 9), 2, 0.6)
    assert nearest_normal(edges, bell) < 0.005
    [rows] = [part["summary"] for part in result("diet-sb-runtime")["parts"]]
    [el2n] = [row for row in rows if row["method"].endswith("el2n-3x2:keep=0.75")]
    assert f"(median ratio {el2n['memory_ratio']:.3f})" in papers.UNJUDGED[DIET]


def test_the_command_for_hiding_early_and_late_is_one():
    [command] = re.findall(r"`(thresher compare [^`]+)`", papers.UNJUDGED[KAKURENBO])
    words = shlex.split(command)
    early, late = parse_methods(words[words.index("--methods") + 1])
    settings = thresher.Kakurenbo(**early.parts[0].given).schedule
    assert [step_value(settings, epoch, 15) > 0 for epoch in (1, 14)] == [True, False]
    settings = thresher.Kakurenbo(**late.parts[0].given).schedule
    assert [step_value(settings, epoch, 15) > 0 for epoch in (1, 14)] == [False, True]
    assert task_of(words[2]) is not None


def test_what_is_not_judged_ends_the_page(monkeypatch):
    found = result("kakurenbo-figure-6")
    monkeypatch.setitem(papers.UNJUDGED, KAKURENBO, "")
    assert "Not judged" not in paper_pages([found], {}, [], "i.md")["kakurenbo.md"]
    monkeypatch.setitem(papers.UNJUDGED, KAKURENBO, "That it is cheap.")
    text = paper_pages([found], {}, [], "i.md")["kakurenbo.md"]
    assert text.endswith("|\n\nNot judged: That it is cheap.\n")


@pytest.mark.parametrize(
    ("last", "verdict"), [(0.9, "reproduced"), (0.2, "not reproduced"), (None, "cannot tell")]
)
def test_the_weight_is_that_of_the_candidate_that_is_best_alone(last, verdict):
    """Small Loss is the best of the three with each seed but one."""
    weights = [0.9, 0.1, 0.8, 0.2, 0.6] if last is None else [last + 0.01 * n for n in range(5)]
    alone = {"Big Loss": 0.5, "Small Loss": 0.7, "Uniform": 0.6}
    runs: dict[str, Any] = {
        f"{name} 0.3": {
            seed: {"metric": {"value": 0.9 if seed == 0 and name == "Uniform" else of}}
            for seed in range(5)
        }
        for name, of in alone.items()
    }
    histories = [
        [{"weight_big_loss": 0, "weight_small_loss": w, "weight_uniform": 1 - w}] for w in weights
    ]
    runs[ada_selection.WEIGHTS_ROW] = {seed: {"history": of} for seed, of in enumerate(histories)}
    artefact = papers.ARTEFACTS["adaselection-weights"]
    [claim] = [one for one in artefact.claims if one.text.startswith("text: the last weight")]
    found = claim.judge({"text": runs}, range(5))
    assert found["mean"] == pytest.approx(statistics.mean(weights)) and found["verdict"] == verdict


@pytest.mark.parametrize(("ours", "verdict"), [(0.99, "reproduced"), (0.85, "not reproduced")])
def test_one_baseline_that_is_better_is_enough(ours, verdict):
    artefact = papers.ARTEFACTS["adaselection-table-3"]
    [claim] = [
        one
        for one in artefact.claims
        if one.text.startswith("text: AdaSelection is better than the best of the seven")
    ]
    others = ("Uniform", "Big Loss", "Small Loss", "AdaBoost", "Gradient Norm", "Coresets 1")
    means = {**dict.fromkeys(others, 0.1), "Coresets 2": 0.9, "AdaSelection": ours}
    runs = {
        f"{name} {rate}": {
            seed: {"metric": {"value": of + 0.001 * seed * len(name)}} for seed in range(5)
        }
        for name, of in means.items()
        for rate in ada_selection.RATES
    }
    runs["full"] = {seed: {} for seed in range(5)}
    assert claim.judge({"text": runs}, range(5))["verdict"] == verdict


@pytest.mark.parametrize(("seconds", "verdict"), [(8.0, "reproduced"), (12.0, "not reproduced")])
@pytest.mark.parametrize("text", CHAINS)
def test_time_is_saved_over_full_training(text, seconds, verdict):
    artefact = papers.ARTEFACTS["diet-sb-runtime"]
    [claim] = [one for one in artefact.claims if one.text == text]
    row = text.partition(" takes")[0]
    full = {"cpu_s": 10.0, "cost": {"backward_to_forward": 1.8}}
    runs = {
        "full": dict.fromkeys(range(5), full),
        row: {seed: {"cpu_s": seconds + 0.1 * seed} for seed in range(5)},
    }
    assert claim.judge({"runtime": runs}, range(5))["verdict"] == verdict
