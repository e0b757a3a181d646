"""Every number of the README is one of a committed result, or of the code."""

import json
import re
from collections import defaultdict
from functools import reduce
from math import floor
from pathlib import Path
from statistics import fmean, median

from benchmarks import observe, people
from benchmarks.grpo import step
from benchmarks.winnow.jobs import SHORT
from benchmarks.winnow.second import LARGEST_LOSS, NO_LOSS_ON, SEVEN

import thresher

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
SENTENCES = " ".join(README.split())
RESULTS = ROOT / "benchmarks" / "results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def said(pattern):
    found = re.search(pattern, SENTENCES)
    assert found is not None, pattern
    return [float(number) for number in found.groups()]


def test_it_is_read_in_ten_minutes():
    lines = README.splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 400
    assert len(set(re.findall(r"\]\(([^)#]+\.md)", README))) <= 12


def test_wrong_labels_come_first_then_exact_skipping_then_half_the_cost():
    """With the changed lines, a picture and the price at the top."""
    parts = ("finds wrong labels", "```diff", "docs/figures/suspects.png", "bit for bit")
    sections = ("## Skip samples exactly, in TRL", "## Train at half the cost", "## What to expect")
    places = [README.index(part) for part in (*parts, *sections)]
    assert places == sorted(places) and README[: places[3]].count("\n") <= 20
    assert (ROOT / "docs/figures/suspects.png").stat().st_size < 50_000


def test_winnow_at_half_of_the_cost():
    found = result("winnow-second")
    verdict, tables = found["verdict"], {task: found["tables"][f"{task} at 0.5"] for task in SEVEN}
    on, tasks, most, wanted = said(
        r"On (\d+) of the (\d+) tasks, Winnow loses less than ([\d.]+) percentage points .+? was at least (\d+) tasks\."
    )
    better, in_time = said(
        r"On (\d+) tasks, Winnow is better than random batches .+? On (\d+) tasks, it is better than full training that is cut"
    )
    counted = (
        "loses little",
        "tasks",
        "better than smaller batches",
        "better than fewer epochs in the same time",
    )
    assert (on, tasks, better, in_time) == tuple(len(verdict[name]) for name in counted)
    assert (
        (most, wanted) == (LARGEST_LOSS, NO_LOSS_ON)
        and "with eight seeds" in SENTENCES
        and found["seeds"] == 8
    )
    more = {
        task: rows["second version"]["metric"]
        - rows["second version, rate of full training"]["metric"]
        for task, rows in tables.items()
    }
    at_most = said(
        r"instead of the rate that is best for Winnow, it loses at most ([\d.]+) points more"
    )
    assert at_most == [round(max(more.values()), 1)]
    assert said(r"Training took (\d+) % to (\d+) % of the CPU time") == [
        round(100 * choose(rows["second version"]["cpu"] for rows in tables.values()))
        for choose in (min, max)
    ]
    largest = min(
        (rows["second version"]["to_full"] for rows in tables.values()),
        key=lambda to_full: to_full["mean"],
    )
    assert said(r"The largest loss is ([\d.]+) ± ([\d.]+) points of mean IoU") == [
        round(-largest["mean"], 2),
        round((largest["high"] - largest["low"]) / 2, 2),
    ]
    assert largest == tables["relief"]["second version"]["to_full"]
    assert len(SHORT.factors) == 3 and "best of three learning rates" in SENTENCES


def test_the_time_of_skipping_in_grpo():
    found = result("grpo")["2/3"]
    shares = [round(median(step.ratios(found, place)), 2) for place in (0, 1)]
    assert shares == said(
        r"two thirds of the groups without a signal, a training step took ([\d.]+) of the CPU time, "
        r"and the whole step with generation ([\d.]+)\."
    )


def test_the_number_of_methods():
    others = said(r"or one of \[(\d+) more methods")[0]
    assert len(thresher.methods.names()) == 1 + others


def test_wrong_labels_by_people_are_found_as_measured():
    numbers = said(
        r"AUROC \(1 is perfect, 0.5 is guessing\) of ([\d.]+) on images of CIFAR-10N \((\d+) % wrong\) and ([\d.]+) on texts "
        r"\((\d+) % wrong\): of the first 100 suspects, (\d+) and (\d+) are wrong. Cross-validation comes to ([\d.]+) and "
        r"([\d.]+), and takes ([\d.]+) and ([\d.]+) times as long again"
    )
    sources = people.by_source(people.load(people.RUNS))
    images, texts = (sources[name] for name in ("CIFAR-10, random1", "texts, one rater"))

    def means(*keys):
        found = []
        for rows in (images, texts):
            values = [reduce(lambda of, key: of.get(key, {}), keys, row) for row in rows]
            found.append(fmean(value for value in values if value != {}))
        return found

    auroc = means("end", "suspicion", "auroc")
    wrong = [100 * share for share in means("wrong")]
    assert numbers[:4] == [round(auroc[0], 2), round(wrong[0]), round(auroc[1], 2), round(wrong[1])]
    assert numbers[4:6] == [round(100 * share) for share in means("end", "suspicion", "first")]
    validated = means("end", "cross-validation", "auroc")
    assert numbers[6:8] == [round(value, 2) for value in validated]
    for rows, times in zip((images, texts), numbers[8:], strict=True):
        of = [row["cross_validation_cpu_s"] / row["cpu_s"] for row in rows if "cleanlab" in row]
        assert times == round(fmean(of), 1)


def test_wrong_labels_are_ranked_as_promised():
    of_labels, least = said(
        r"On five tasks with (\d+) % of the labels replaced, the AUROC is at least ([\d.]+)\."
    )
    found = defaultdict(list)
    for job, scores in observe.load(observe.RUNS).items():
        if job.noise == f"{of_labels:.0f} %":
            found[job.task].append(scores["suspicion"]["auroc"])
    assert len(found) == 5 and round(min(map(fmean, found.values())), 2) == least


def test_observing_takes_the_time_that_was_measured():
    least, most, of_cnn, of_perceptron = said(
        r"a step takes ([\d.]+) to ([\d.]+) ms longer: (\d+) % for a small CNN, up to (\d+) % for a tiny perceptron"
    )
    measured = result("observe-times")
    steps = [round(one["step_us"] / 1000, 1) for one in measured.values()]
    shares = [round(100 * (one["ratio"]["median"] - 1)) for one in measured.values()]
    assert [least, most] == [min(steps), max(steps)]
    assert [of_cnn, of_perceptron] == [shares[0], max(shares)]


def test_suspicions_are_trusted_as_far_as_measured():
    rule = result("trust")["rule"]
    said_of_each = said(
        r"after three epochs, with a validation accuracy of one half \(0\.7 with two equal classes\), "
        r"it was at least ([\d.]+) on each of (\d+) tasks, "
        r"and ([\d.]+) on (\d+) tasks if each class is mistaken for one other\. "
        r"Before that, it was as low as ([\d.]+)\."
    )
    any_class, one_class = (rule[f"{kind}, within"] for kind in ("symmetric", "pairs"))
    outside = (rule[f"{kind}, outside"]["least"] for kind in ("symmetric", "pairs"))
    measured = [floor(100 * any_class["least"]) / 100, any_class["auroc"]["n"]]
    measured += [floor(100 * one_class["least"]) / 100, one_class["auroc"]["n"]]
    assert (rule["visits"], rule["accuracy"], 0.5 + rule["gain"] / 2) == (3, 0.5, 0.7)
    assert said_of_each == [*measured, round(min(outside), 2)]
