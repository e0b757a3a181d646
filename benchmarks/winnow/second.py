"""Winnow's second version beside the first one, since removed, and beside other ways to spend the cost.

What was decided before the first counted training:

- Points, margins of tests, looks at rates and paired differences are those of `benchmarks.winnow`; every arm looks at the same
  three rates with two seeds, on samples that are not counted. Eight counted seeds. Holm's correction is over the tasks.
- At a share of 0.5, on seven tasks: the second version loses at most 0.7 points against plain full training on five of them,
  which the lower end of the paired interval must show, and on none is a loss of more than one point shown. It is shown to be
  better than smaller batches on five, and than the first version on three. Spent in fewer steps, it is shown to be better than
  fewer epochs on five, at no more CPU time.
- The second version becomes the default if it is shown to be better than the first one on two tasks, and worse on none.
- Full training in stratified batches against full training is told first, whatever it is.

Some arms were trained twice, because the learning rate of the first trainings was wrong. Those are kept in a file of their own.
They had the rows and steps of the new ones, and the machine of full training, so CPU times are theirs. All arms of the
characters were trained again, because the fonts of the first trainings were not recorded.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.marks import between_marks
from benchmarks.winnow.characters import characters
from benchmarks.winnow.jobs import (
    SHORT,
    Arm,
    Done,
    Job,
    chosen_factor,
    load,
    looks_of,
    run_missing,
    train_arm,
)
from benchmarks.winnow.table import said
from benchmarks.winnow.tasks import PROBLEMS, Problem, fashion, problem_of
from thresher_lab.comparison.controls import FULL_TRAINING
from thresher_lab.comparison.statistics import ALPHA, Paired, holm
from thresher_lab.tasks.networks import resnet8
from thresher_lab.training.files import markdown_table
from thresher_lab.training.specs import MethodSpec, Spec

SEEDS = range(8)
LARGEST_LOSS, MOST_LOSS = 0.7, 1.0
"""Points that the second version may lose against full training, and points of which no loss may be shown to be larger."""
NO_LOSS_ON, BETTER_THAN_SMALLER_ON, BETTER_THAN_FIRST_ON, BETTER_IN_STEPS_ON = 5, 5, 3, 5
BETTER_FOR_DEFAULT = 2
BEGIN, END = "<!-- tables of benchmarks.winnow.second -->", "<!-- end of the second tables -->"
GAINS = "<!-- table of stratified full training -->", "<!-- end of the stratified table -->"
FIRST_TABLE = "<!-- first table of benchmarks.winnow -->", "<!-- end of the first table -->"
"""Marks of the page with the tables, and of those about stratified batches and about Winnow."""

SAME_TIME = "fewer epochs, same time"
"""Full training for as many epochs as take the CPU time of the second version at half of the cost."""
FEW = "few samples, many epochs"
"""A random subset, the same in every epoch, on four tasks with fewer seeds; added after the others, beside the goal."""
FEW_ON, FEW_SEEDS = (
    ("fashion-10k-noisy", "fashion-augmented-10", "text-10", "resnet8-augmented-32"),
    range(5),
)
OTHER_MACHINE = (SAME_TIME, FEW)
"""Arms that were trained on another machine than full training, so that their CPU times do not compare."""


def _winnow(share: float, **batch: Any) -> Spec:
    return MethodSpec("winnow", {"share": share}, batch)


ARMS: Sequence[Arm] = (
    Arm("full", lambda _: FULL_TRAINING),
    Arm("full, stratified", lambda _: MethodSpec("full", {}, {"stratify": "class"})),
    Arm("first version", lambda _: MethodSpec("the first version of winnow, since removed")),
    Arm("second version", _winnow),
    Arm(
        "smaller batches",
        lambda share: MethodSpec("uniform", {"keep": share}, {"spend": "batches"}),
    ),
    Arm(
        "smaller, stratified",
        lambda share: MethodSpec(
            "uniform", {"keep": share}, {"spend": "batches", "stratify": "class"}
        ),
    ),
    Arm("in fewer steps", partial(_winnow, spend="steps")),
    Arm("fewer epochs", lambda _: FULL_TRAINING, shorter=True),
    Arm(SAME_TIME, lambda _: FULL_TRAINING, shorter=True),
    Arm("second version, rate of full training", _winnow, rate_of="full"),
    Arm(
        "second version, that rate x share^0.25",
        lambda share: MethodSpec("winnow", {"share": share, "lr_scale": share**0.25}),
        rate_of="full",
    ),
    Arm("second version, placebo", partial(_winnow, placebo=True), rate_of="second version"),
    Arm(FEW, lambda share: MethodSpec("uniform", {"keep": share, "fixed": True})),
)
"""All arms. Those with `rate_of` have no look at the rates."""
AT_FULL_COST = ("full", "full, stratified")
ROOT = Path(__file__).resolve().parents[2]
RUNS, EARLIER_RUNS = (
    ROOT / "benchmarks" / "results" / f"winnow-second-{name}.jsonl.gz"
    for name in ("runs", "wrong-clock-runs")
)
EVERYWHERE = tuple(arm.name for arm in ARMS if "placebo" not in arm.name and arm.name != FEW)
LENGTHS = (
    "full",
    "full, stratified",
    "second version",
    "smaller batches",
    "in fewer steps",
    "fewer epochs",
)
OTHER_SHARES = ("first version", "second version", "smaller batches", "in fewer steps")


def _resnet8(name: str, epochs: int) -> Problem:
    task = replace(problem_of("fashion-resnet8").task, name=name, network=partial(resnet8, width=8))
    return Problem(task, partial(fashion, 3000, augmented=True, test=10_000), epochs)


def _renamed(of: str, name: str, epochs: int) -> Problem:
    problem = problem_of(of)
    return replace(problem, task=replace(problem.task, name=name), epochs=epochs)


CHARACTERS = replace(
    problem_of("fashion-resnet8").task,
    name="characters",
    network=partial(resnet8, width=8, classes=94),
)
TASKS: Mapping[str, Problem] = {
    problem.task.name: problem
    for problem in (
        *(
            one
            for one in PROBLEMS
            if one.task.name
            in ("fashion-10k-noisy", "fashion-augmented-10", "relief", "fashion-resnet8")
        ),
        _renamed("text", "text-10", 10),
        Problem(CHARACTERS, characters, 8),
        _resnet8("resnet8-augmented-32", 32),
        _resnet8("resnet8-augmented-8", 8),
        _resnet8("resnet8-augmented-16", 16),
    )
}
"""The tasks; the last two show how what is gained depends on the length of the training, and are not among the seven."""
ONE_OF_LENGTHS = ("resnet8-augmented-8", "resnet8-augmented-16")
SEVEN = (
    "fashion-10k-noisy",
    "fashion-augmented-10",
    "text-10",
    "characters",
    "relief",
    "fashion-resnet8",
    "resnet8-augmented-32",
)
TIME_SHARES = {
    "fashion-10k-noisy": 0.57,
    "fashion-augmented-10": 0.75,
    "text-10": 0.61,
    "characters": 0.49,
    "relief": 0.62,
    "fashion-resnet8": 0.47,
    "resnet8-augmented-32": 0.61,
    "resnet8-augmented-8": 0.57,
    "resnet8-augmented-16": 0.57,
}
"""CPU time of the second version at half of the cost, in its first trainings, as a share of full training's."""
AT_OTHER_SHARES = ("fashion-10k-noisy", "fashion-augmented-10", "characters")
TITLES = {
    "fashion-10k-noisy": "Fashion-MNIST, 20 % wrong labels",
    "fashion-augmented-10": "Fashion-MNIST, augmented, 10 epochs",
    "text-10": "text, next byte, 10 epochs",
    "characters": "94 characters of free fonts, ResNet-8",
    "relief": "relief (mean IoU)",
    "fashion-resnet8": "Fashion-MNIST, ResNet-8",
    "resnet8-augmented-32": "Fashion-MNIST, ResNet-8, augmented, 32 epochs",
    "resnet8-augmented-8": "Fashion-MNIST, ResNet-8, augmented, 8 epochs",
    "resnet8-augmented-16": "Fashion-MNIST, ResNet-8, augmented, 16 epochs",
}


def planned() -> Iterator[tuple[str, Arm, float]]:
    """Yields each task with each arm and share that is trained: first the seven tasks at half of the cost."""
    by_name, shares = {arm.name: arm for arm in ARMS}, dict.fromkeys(AT_FULL_COST, 1.0)
    for tasks, names in ((SEVEN, EVERYWHERE), (ONE_OF_LENGTHS, LENGTHS)):
        for task in tasks:
            share_of = {**shares, SAME_TIME: TIME_SHARES[task]}
            yield from ((task, by_name[name], share_of.get(name, 0.5)) for name in names)
    for task in AT_OTHER_SHARES:
        yield task, by_name["second version, placebo"], 0.5
        yield from ((task, by_name[name], share) for share in (0.35, 0.7) for name in OTHER_SHARES)
    yield from ((task, by_name[FEW], 0.5) for task in FEW_ON)


def seeds_of(arm: Arm) -> range:
    """Returns the seeds of an arm that count."""
    return FEW_SEEDS if arm.name == FEW else SEEDS


@cache
def earlier() -> dict[Job, dict[str, Any]]:
    """Returns the trainings that were made again."""
    return load(EARLIER_RUNS)


def timed(done: Done) -> Done:
    """Returns the trainings with the CPU times of those that they took the place of, on the machine of full training."""
    again = {job.task for job in earlier() if job.arm == "full"}
    times = {
        (job.task, job.arm, job.share, job.seed): one["cpu_s"]
        for job, one in earlier().items()
        if job.task not in again
    }
    keys = {job: (job.task, job.arm, job.share, job.seed) for job in done}
    return {job: {**one, "cpu_s": times.get(keys[job], one["cpu_s"])} for job, one in done.items()}


def ready(done: Done) -> Iterator[Job]:
    """Yields the trainings that can run now: looks at once, and counted ones as soon as their rate is chosen."""
    for task, arm, share in planned():
        if not arm.rate_of:
            yield from looks_of(SHORT, task, arm.name, share)
        factor = factor_of(done, task, arm, share)
        if factor is not None:
            yield from (Job(task, arm.name, share, factor, seed) for seed in seeds_of(arm))


def factor_of(done: Done, task: str, arm: Arm, share: float) -> float | None:
    """Returns the chosen factor on the rate; None before all looks are done."""
    if arm.rate_of and arm.rate_of not in AT_FULL_COST:  # the rate of another arm at the same share
        return chosen_factor(SHORT, done, task, replace(arm, name=arm.rate_of, rate_of=""), share)
    return chosen_factor(SHORT, done, task, arm, share)


def run(job: Job) -> dict[str, Any]:
    """Trains once, as `jobs.train_arm` does."""
    return train_arm(job, next(arm for arm in ARMS if arm.name == job.arm), TASKS[job.task])


def rows_of(done: Done, task: str, share: float) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the counted trainings of each arm of which all are done, by seed."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for of_task, arm, at in planned():
        own = at in (share, 1.0) if arm.name != SAME_TIME else share == 0.5
        if of_task != task or not own:
            continue
        factor = factor_of(done, task, arm, at)
        jobs = (
            []
            if factor is None
            else [Job(task, arm.name, at, factor, seed) for seed in seeds_of(arm)]
        )
        if jobs and all(job in done for job in jobs):
            found[arm.name] = [{**done[job], "factor": factor} for job in jobs]
    return found


def difference(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], left: str, right: str
) -> Paired | None:
    """Returns the paired difference of two arms in points, on the seeds of both; None where one is not complete."""
    if left not in rows or right not in rows:
        return None
    return Paired.of(
        [a["metric"] - b["metric"] for a, b in zip(rows[left], rows[right], strict=False)]
    )


def cpu_share(rows: Mapping[str, Sequence[Mapping[str, Any]]], arm: str) -> float:
    """Returns the CPU time of an arm as a share of full training with the same seeds."""
    return fmean(a["cpu_s"] / b["cpu_s"] for a, b in zip(rows[arm], rows["full"], strict=True))


def better_on(rows: Mapping[str, Any], left: str, right: str) -> list[str]:
    """Returns the tasks on which one arm is shown to be better than another, after Holm's correction over the tasks."""
    found = {task: difference(of_task, left, right) for task, of_task in rows.items()}
    chances = holm({task: paired.chance(0) for task, paired in found.items() if paired is not None})
    return [task for task, chance in chances.items() if chance <= ALPHA]


def verdict(done: Done) -> dict[str, Any]:
    """Returns how far the goal is met, on the tasks of the seven that are complete."""
    rows = {task: rows_of(done, task, 0.5) for task in SEVEN}
    rows = {task: of_task for task, of_task in rows.items() if set(EVERYWHERE) <= set(of_task)}
    to_full = {
        task: difference(of_task, "second version", "full") for task, of_task in rows.items()
    }
    small = [
        task
        for task, paired in to_full.items()
        if paired is not None and (paired.low or 0) > -LARGEST_LOSS
    ]
    shown = holm(
        {
            task: paired.chance_below(-MOST_LOSS)
            for task, paired in to_full.items()
            if paired is not None
        }
    )
    cheaper = [
        task
        for task in rows
        if cpu_share(rows[task], "in fewer steps") <= 1.02 * cpu_share(rows[task], "fewer epochs")
    ]
    counts = {
        "tasks": list(rows),
        "loses little": small,
        "loses much": [task for task, chance in shown.items() if chance <= ALPHA],
        "better than smaller batches": better_on(rows, "second version", "smaller batches"),
        "better than the first version": better_on(rows, "second version", "first version"),
        "worse than the first version": better_on(rows, "first version", "second version"),
        "better than fewer epochs in the same time": better_on(rows, "second version", SAME_TIME),
        "worse than fewer epochs in the same time": better_on(rows, SAME_TIME, "second version"),
        "in fewer steps better than fewer epochs": better_on(
            rows, "in fewer steps", "fewer epochs"
        ),
        "in fewer steps at no more CPU time": cheaper,
    }
    numbers = {name: len(tasks) for name, tasks in counts.items()}
    met = (
        numbers["loses little"] >= NO_LOSS_ON
        and not numbers["loses much"]
        and numbers["better than smaller batches"] >= BETTER_THAN_SMALLER_ON
        and numbers["better than the first version"] >= BETTER_THAN_FIRST_ON
        and numbers["in fewer steps better than fewer epochs"] >= BETTER_IN_STEPS_ON
        and numbers["in fewer steps at no more CPU time"] >= BETTER_IN_STEPS_ON
    )
    better, worse = (
        numbers["better than the first version"],
        numbers["worse than the first version"],
    )
    return {**counts, "met": met, "becomes the default": better >= BETTER_FOR_DEFAULT and not worse}


def results(done: Done) -> dict[str, Any]:
    """Returns all rows and the verdict on the goal."""
    return {
        "verdict": verdict(done),
        "trainings": len(done),
        "seeds": len(SEEDS),
        "tables": tables(done),
        "pairs": list(pairs(done)),
        "time_shares": TIME_SHARES,
    }


def tables(done: Done) -> dict[str, Any]:
    """Returns the rows of all tables, by task and share."""
    return {
        f"{task} at {share:g}": {
            arm: {
                "factor": trainings[0]["factor"],
                "metric": fmean(one["metric"] for one in trainings),
                "cost": fmean(one["cost"]["ratio"] for one in trainings),
                "cpu": cpu_share(rows, arm) if arm not in OTHER_MACHINE else None,
                "to_full": _as_dict(difference(rows, arm, "full")) if arm != "full" else None,
                "second_minus": _as_dict(difference(rows, "second version", arm))
                if arm != "second version"
                else None,
            }
            for arm, trainings in rows.items()
        }
        for share in (0.5, 0.35, 0.7)
        for task in (*SEVEN, *ONE_OF_LENGTHS)
        if "full" in (rows := rows_of(done, task, share)) and len(rows) > 2
    }


def pairs(done: Done) -> Iterator[dict[str, Any]]:
    """Yields Winnow at half of the cost beside smaller batches, which take as many steps, task by task."""
    for task in (*SEVEN, *ONE_OF_LENGTHS):
        rows = rows_of(done, task, 0.5)
        paired = difference(rows, "second version", "smaller batches")
        if paired is None:
            continue
        own = rows["second version"]
        other = rows["smaller batches"]
        yield {
            "task": task,
            "method": _winnow(0.5).label,
            "mean": fmean(one["metric"] for one in own),
            "other": MethodSpec("uniform", {"keep": 0.5}, {"spend": "batches"}).label,
            "other_mean": fmean(one["metric"] for one in other),
            "difference": paired.mean,
            "ci95": [paired.low, paired.high],
            "steps": round(fmean(one["cost"]["steps"] for one in own)),
            "seeds": paired.n,
        }


def _as_dict(paired: Paired | None) -> dict[str, Any] | None:
    return None if paired is None else asdict(paired)


def text(done: Done) -> str:
    """Returns the verdict and the tables in Markdown."""
    parts = [goal_in_words(verdict(done))]
    for share in (0.5, 0.35, 0.7):
        for task in (*SEVEN, *ONE_OF_LENGTHS):
            rows = rows_of(done, task, share)
            if "full" in rows and len(rows) > 2:
                parts.append(f"**{TITLES[task]}, at {share:g} of the cost**\n\n{_table(rows)}")
    return "\n\n".join(parts)


def gains(done: Done) -> str:
    """Returns the table of what full training gains by stratified batches."""
    tasks = (*SEVEN, *ONE_OF_LENGTHS)
    return markdown_table(
        ("task", "points"),
        [(TITLES[task], _to_full(done, task, "full, stratified")) for task in tasks],
    )


def first_table(done: Done) -> str:
    """Returns the table of docs/winnow.md: what half of the cost loses on seven tasks, and fewer epochs in the same time."""
    arms = ("second version", "smaller batches", "fewer epochs", SAME_TIME)
    rows = [(TITLES[task], *(_to_full(done, task, arm) for arm in arms)) for task in SEVEN]
    return markdown_table(("task", "Winnow", *arms[1:]), rows)


def _to_full(done: Done, task: str, arm: str) -> str:
    return said(difference(rows_of(done, task, 0.5), arm, "full")) or "not finished"


def _table(rows: Mapping[str, list[Mapping[str, Any]]]) -> str:
    lines = [
        (
            arm,
            f"x {trainings[0]['factor']:g}",
            f"{fmean(one['cost']['ratio'] for one in trainings):.3f}",
            f"{cpu_share(rows, arm):.2f}" if arm not in OTHER_MACHINE else "",
            f"{fmean(one['metric'] for one in trainings):.2f}",
            "" if arm == "full" else said(difference(rows, arm, "full")),
            "" if arm == "second version" else said(difference(rows, "second version", arm)),
        )
        for arm, trainings in rows.items()
    ]
    return markdown_table(
        ("arm", "rate", "cost", "CPU time", "metric", "to full", "second version - this"), lines
    )


def goal_in_words(found: Mapping[str, Any]) -> str:
    """Returns how far the goal is met, in sentences."""
    n = {name: len(tasks) for name, tasks in found.items() if isinstance(tasks, list)}
    done = n["tasks"]
    state = "met" if found["met"] else "not met" if done == len(SEVEN) else "not met so far"
    would = "becomes the default" if found["becomes the default"] else "does not become the default"
    default = (
        would
        if done == len(SEVEN)
        else f"{would.replace('becomes', 'would become').replace('does', 'would')} by these"
    )
    return (
        f"{done} of {len(SEVEN)} tasks are complete. The goal is {state}. At half of the cost the second version loses at most "
        f"{LARGEST_LOSS:g} points on {n['loses little']} of them ({NO_LOSS_ON} wanted), and is shown to lose more than "
        f"{MOST_LOSS:g} on {n['loses much']} (0). It is shown to be better than smaller batches on "
        f"{n['better than smaller batches']} ({BETTER_THAN_SMALLER_ON}), better than the first version on "
        f"{n['better than the first version']} ({BETTER_THAN_FIRST_ON}) and worse on {n['worse than the first version']}: it "
        f"{default}. In fewer steps it is shown to be better than fewer epochs on "
        f"{n['in fewer steps better than fewer epochs']} ({BETTER_IN_STEPS_ON}), at no more CPU time on "
        f"{n['in fewer steps at no more CPU time']}. Beside the goal: in the CPU time of the second version, fewer epochs are "
        f"shown to be worse than it on {n['better than fewer epochs in the same time']} tasks, and better on "
        f"{n['worse than fewer epochs in the same time']}."
    )


def main(run_one: Callable[[Job], dict[str, Any]] = run) -> None:
    """Runs what is missing, and writes the results. It goes on where it was stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.winnow.second", description=main.__doc__
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="Number of processes, each with one thread. Default: 2."
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="Minutes after which no further training begins. Default: no limit.",
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="Trainings.")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results/winnow-second.json"),
        help="Results.",
    )
    parser.add_argument(
        "--page", type=Path, help="Page in Markdown whose tables are written anew. Default: none."
    )
    parser.add_argument(
        "--stratified",
        type=Path,
        help="Page whose table of full training is written anew. Default: none.",
    )
    parser.add_argument(
        "--winnow", type=Path, help="Page about Winnow whose table is written anew. Default: none."
    )
    parser.add_argument(
        "--show", action="store_true", help="Run nothing; print and write what there is."
    )
    given = parser.parse_args()
    end = time.monotonic() + (0 if given.show else 60 * (given.minutes or float("inf")))
    done = timed(
        load(given.runs)
        if given.show
        else run_missing(ready, run_one, given.runs, given.jobs, lambda: time.monotonic() > end)
    )
    given.results.write_text(json.dumps(results(done), indent=1) + "\n")
    parts = (
        (given.page, (BEGIN, END), text),
        (given.stratified, GAINS, gains),
        (given.winnow, FIRST_TABLE, first_table),
    )
    for page, marks, written in parts:
        if page is not None:
            page.write_text(between_marks(page.read_text(), *marks, written(done)))
    print(text(done))


if __name__ == "__main__":
    main()
