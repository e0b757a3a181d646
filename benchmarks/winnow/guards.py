"""The two guards of Winnow: how often they speak where nothing is wrong, and whether they speak where something is.

- The agreement of loss and uncertainty, which is to see many wrong labels: clean tasks, and tasks with 10, 20 and 40 % of wrong
  labels.
- The probe, which is to see that a training gets worse: clean tasks, and planted trainings that go wrong. Each training with a
  probe is watched to its end without acting, and several rules are asked when they would have spoken. Where the rule of the
  library speaks, and on all planted trainings, the same training runs once more with the guard.

Every training is at half of the cost unless a row says otherwise, and each has its rate of full training times share ** 0.25.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.winnow.measures import AT_ONCE
from benchmarks.winnow.table import between_marks
from benchmarks.winnow.tasks import Problem, Sets, fashion, held_out, problem_of, with_wrong
from thresher import EpochPlan, Winnow
from thresher.cost import Cost
from thresher.experiments.tasks import TASKS
from thresher.experiments.tasks.base import Task, one_cycle
from thresher.experiments.training.loop import train
from thresher.experiments.training.specs import MethodSpec
from thresher.experiments.training.trainable import Training
from thresher.methods._probe import BEHIND, HELD, WAS_BEHIND, rise
from thresher.methods.winnow import LEAST_SPREAD, MEASURED_FROM, SOONEST

BEGIN, END = "<!-- tables of benchmarks.winnow.guards -->", "<!-- end of the tables of benchmarks.winnow.guards -->"
"""Lines of a page that the tables stand between."""

NOISY_SEEDS = 2
"""Number of seeds with wrong labels."""

WRONG = (0.1, 0.2, 0.4)
"""Shares of wrong labels."""

Losses = NDArray[np.float32]
"""Losses of samples, shape (n,)."""


@dataclass(frozen=True)
class Rated(Task):
    """A task whose learning rate stays at a multiple of the largest one after 40 % of the training.

    Args:
        late: Factor on the learning rate after 40 % of the training, which full batches may bear and smaller ones do not.
    """

    late: float = 1.0

    def schedule(self, progress: float) -> float:
        """Returns the factor on the learning rate at `run.progress`."""
        return one_cycle(progress) if progress < 0.4 else self.late


@dataclass(frozen=True)
class Subject:
    """A training that is watched.

    Args:
        problem: Task, data and number of epochs.
        probe: Number of samples that are held back.
        settings: Settings of Winnow that differ from its defaults.
        planted: Description of the fault that is built into the training; "" where there is none.
        noisy: Whether it is also trained with wrong labels.
        labels: Whether the agreement is measured: there are classes.
        seeds: Number of seeds without wrong labels.
    """

    problem: Problem
    probe: int = 500
    settings: Mapping[str, Any] = field(default_factory=dict)
    planted: str = ""
    noisy: bool = False
    labels: bool = True
    seeds: int = 3


def _late(late: float) -> Problem:
    problem = problem_of("fashion-10k")
    return replace(problem, task=Rated(**{**vars(problem.task), "late": late}))


DIGITS = Problem(replace(TASKS["digits"], name="digits"), partial(held_out, "digits"), 20)
FEW_AND_WRONG = replace(problem_of("fashion-10k"), sets=partial(fashion, 2000, wrong=0.2), epochs=30)
SHARP = {"share": 0.125, "width": 8.0, "score": "loss", "least_agreement": -1.0}

SUBJECTS: Mapping[str, Subject] = {
    "fashion-10k": Subject(problem_of("fashion-10k")),
    "fashion-10k, 30 epochs": Subject(replace(problem_of("fashion-10k"), epochs=30)),
    "fashion-augmented-10": Subject(problem_of("fashion-augmented-10")),
    "fashion-imbalanced": Subject(problem_of("fashion-imbalanced"), noisy=True),
    "fashion-resnet8": Subject(problem_of("fashion-resnet8"), probe=200),
    "mnist-5k": Subject(problem_of("mnist-5k"), probe=250, noisy=True),
    "digits": Subject(DIGITS, probe=100, noisy=True),
    "bike": Subject(problem_of("bike"), labels=False),
    "relief": Subject(problem_of("relief"), probe=100, seeds=2),
    "text": Subject(problem_of("text"), probe=50, seeds=2),
    "rate x 2": Subject(_late(2.0), planted="the rate is twice the largest one after 40 %"),
    "rate x 1.5, share 0.1": Subject(
        _late(1.5), settings={"share": 0.1}, planted="the rate is 1.5 times the largest one after 40 %"
    ),
    "largest losses of 8": Subject(
        FEW_AND_WRONG, probe=100, settings=SHARP, planted="share 0.125, 1 of 8 candidates by its loss, 20 % wrong labels"
    ),
}
"""The trainings by name."""


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        subject: Name of the training.
        arm: "off" without a probe, "watched" with a probe that does not act, "on" with the guard.
        seed: Random seed.
        wrong: Share of wrong labels that are added.
    """

    subject: str
    arm: str
    seed: int
    wrong: float = 0.0


Done = Mapping[Job, Mapping[str, Any]]
"""Results of the trainings that are done."""


SEEN: list[tuple[Losses, Losses]] = []
"""Losses of the held-back samples and of all others at each evaluation of the training in progress."""


class Watched(Winnow):
    """Winnow whose probe sees everything and never acts: each bad evaluation seems to be the first one in a row."""

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Returns the plan of an epoch in which the guard has not spoken."""
        marks = records["held_back"].float()
        held = marks.isinf().numpy()
        if held.any() and self._probe is not None and self._probe.due(epoch - 1, epochs):
            losses = records["loss"].float().numpy()
            SEEN.append((losses[held], losses[~held]))
        marks[marks == WAS_BEHIND] = HELD
        return super().plan_epoch({**records, "held_back": marks}, epoch=epoch, epochs=epochs, generator=generator)


class WatchedSpec(MethodSpec):
    """Winnow whose probe does not act."""

    def create(self) -> Any:
        """Returns the method."""
        return Watched(**self.given)


def run(job: Job) -> dict[str, Any]:
    """Trains once, and returns the metric in points, the cost, and what the guards saw."""
    subject = SUBJECTS[job.subject]
    problem, sets, metrics = subject.problem, _sets(subject, job.wrong), list[float]()
    given = {**subject.settings, **({} if job.arm == "off" else {"probe": subject.probe})}
    spec = (WatchedSpec if job.arm == "watched" else MethodSpec)("winnow", given)

    def measure(training: Training) -> None:
        batches = list(zip(sets.test[0].split(AT_ONCE), sets.test[1].split(AT_ONCE), strict=True))
        metrics.append(100 * problem.task.evaluate(training.model, batches))

    SEEN.clear()
    trained = train(problem.task, sets.data, spec, seed=job.seed, epochs=problem.epochs, on_end=measure)
    history = trained["history"]
    counts = {name: trained["cost"][name] for name in ("forward", "backward", "full_forward", "full_backward")}
    found = {"metric": metrics[0], "cost": Cost(**counts).ratio(), "cpu_s": trained["cpu_s"]}
    found |= {name: [entry.get(name) for entry in history] for name in ("agreement", "spread", "uniform")}
    if job.arm == "watched":
        found["spoke"] = {name: rule(SEEN) for name, rule in RULES.items()}
    if job.arm == "on":
        found["full_from"] = next((entry["epoch"] for entry in history if entry["guard"]), None)
    return found


def _sets(subject: Subject, wrong: float) -> Sets:
    sets = subject.problem.sets()
    if not wrong:
        return sets
    inputs, labels = sets.train.tensors  # pyright: ignore[reportAttributeAccessIssue]
    return replace(sets, train=TensorDataset(inputs, with_wrong(labels, wrong)))


# When a rule speaks: number of the evaluation, from 0; None: never.

Seen = Sequence[tuple[Losses, Losses]]
"""Losses of the held-back samples and of all others, at each evaluation."""


def speaks(seen: Seen, behind: Callable[[Losses, Losses], bool], in_a_row: int) -> int | None:
    """Returns the first evaluation at which a paired rule speaks.

    Args:
        seen: Losses at each evaluation.
        behind: Function of the losses of the best evaluation and of those now that returns whether the latter are worse.
        in_a_row: Number of evaluations in a row that must be worse.
    """
    best, row = seen[0][0], 0
    for number, (now, _) in enumerate(seen[1:], start=1):
        row = row + 1 if behind(best, now) else 0
        if row == in_a_row:
            return number
        better = rise(best, now)
        best = now if better is None or better.mean < 0 else best
    return None


def log_is_behind(best: Losses, now: Losses) -> bool:
    """Returns whether the mean of the squeezed losses has risen, as in the library."""
    rose = rise(best, now)
    return rose is not None and rose.behind


def mean_is_behind(best: Losses, now: Losses) -> bool:
    """Returns whether the mean loss has risen by more than the same number of standard errors."""
    if not np.isfinite(now).all():
        return True
    differences = now.astype(np.float64) - best
    return differences.mean() > BEHIND * differences.std(ddof=1) / np.sqrt(len(differences))


def gap_widens(seen: Seen) -> int | None:
    """Returns the first evaluation at which the gap between held-back and other samples is wider than before."""
    smallest = np.inf
    for number, (now, others) in enumerate(seen):
        if not np.isfinite(now).all():
            return number
        gap = now.mean(dtype=np.float64) - others[np.isfinite(others)].mean(dtype=np.float64)
        if gap > smallest + BEHIND * now.std(ddof=1) / np.sqrt(len(now)):
            return number
        smallest = min(smallest, gap)
    return None


CHOSEN = "log of losses, twice"
"""Rule of the library."""

RULES: Mapping[str, Callable[[Seen], int | None]] = {
    "gap to the others": gap_widens,
    "mean loss, once": partial(speaks, behind=mean_is_behind, in_a_row=1),
    "mean loss, twice": partial(speaks, behind=mean_is_behind, in_a_row=2),
    "log of losses, once": partial(speaks, behind=log_is_behind, in_a_row=1),
    CHOSEN: partial(speaks, behind=log_is_behind, in_a_row=2),
}
"""Rules by name."""


def jobs(done: Done) -> Iterator[Job]:
    """Yields all trainings; those with the guard as soon as it is known that it speaks."""
    for name, subject in SUBJECTS.items():
        for wrong in WRONG if subject.noisy else ():
            yield from (Job(name, "off", seed, wrong) for seed in range(NOISY_SEEDS))
        for seed in range(subject.seeds):
            yield Job(name, "off", seed)
            yield (watched := Job(name, "watched", seed))
            if subject.planted or (watched in done and done[watched]["spoke"][CHOSEN] is not None):
                yield Job(name, "on", seed)


# What is shown


def agreement_rows(done: Done) -> list[dict[str, Any]]:
    """Returns one row for each task and share of wrong labels: agreement and spread where they are judged."""
    rows = []
    for name, subject in SUBJECTS.items():
        for wrong in (0.0, *(WRONG if subject.noisy else ())):
            seeds = range(NOISY_SEEDS if wrong else subject.seeds)
            trainings = [done[job] for seed in seeds if (job := Job(name, "off", seed, wrong)) in done]
            if subject.labels and not subject.planted and len(trainings) == len(seeds):
                rows.append(_agreement_row(name, wrong, trainings, subject.problem.epochs))
    return rows


def _agreement_row(name: str, wrong: float, trainings: Sequence[Mapping[str, Any]], epochs: int) -> dict[str, Any]:
    judged = [epoch for epoch in range(epochs) if epoch >= max(SOONEST, MEASURED_FROM * epochs)]
    values = [(one["agreement"][epoch], one["spread"][epoch]) for one in trainings for epoch in judged]
    low = [(agreement, spread) for agreement, spread in values if agreement < Winnow.least_agreement]
    return {
        "task": name,
        "wrong": wrong,
        "trainings": len(trainings),
        "agreement": [min(value for value, _ in values), max(value for value, _ in values)],
        "spread_where_low": [min(low, key=_second)[1], max(low, key=_second)[1]] if low else None,
        "low": sum(any(one["agreement"][epoch] < Winnow.least_agreement for epoch in judged) for one in trainings),
        "fell_back": sum(any(one["uniform"]) for one in trainings),
    }


def _second(pair: tuple[float, float]) -> float:
    return pair[1]


def probe_rows(done: Done) -> list[dict[str, Any]]:
    """Returns one row for each training: how many seeds each rule speaks for, and the metrics without and with the guard."""
    rows = []
    for name, subject in SUBJECTS.items():
        arms = {arm: [done.get(Job(name, arm, seed)) for seed in range(subject.seeds)] for arm in ("off", "watched", "on")}
        if None in arms["off"] or None in arms["watched"]:
            continue
        watched = [one for one in arms["watched"] if one is not None]
        acted = [one or quiet for one, quiet in zip(arms["on"], watched, strict=True)]
        rows.append(
            {
                "training": name,
                "planted": subject.planted,
                "probe": subject.probe,
                "trainings": subject.seeds,
                "spoke": {rule: sum(one["spoke"][rule] is not None for one in watched) for rule in RULES},
                "off": [one["metric"] for one in arms["off"] if one is not None],
                "on": [one["metric"] for one in acted],
                "cost_quiet": fmean(one["cost"] for one in watched),
                "cost": fmean(one["cost"] for one in acted),
            }
        )
    return rows


def agreement_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows of the agreement as a table in Markdown."""
    head = ["task", "wrong labels", "agreement", "spread where it is below 0.5", "below 0.5", "drew uniformly"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        spread = "" if row["spread_where_low"] is None else _range(row["spread_where_low"])
        of = f" of {row['trainings']}"
        wrong = f"{100 * row['wrong']:g} %" if row["wrong"] else "none"
        lines.append([row["task"], wrong, _range(row["agreement"]), spread, f"{row['low']}{of}", f"{row['fell_back']}{of}"])
    return _markdown(lines)


def probe_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows of the probe as a table in Markdown."""
    head = ["training", *RULES, "metric without", "metric with", "cost before it acts", "cost"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        spoke = [f"{row['spoke'][rule]} of {row['trainings']}" for rule in RULES]
        planted = f" ({row['planted']})" if row["planted"] else ""
        metrics = [", ".join(f"{value:.1f}" for value in row[arm]) for arm in ("off", "on")]
        lines.append([f"{row['training']}{planted}", *spoke, *metrics, f"{row['cost_quiet']:.3f}", f"{row['cost']:.3f}"])
    return _markdown(lines)


def _range(values: Sequence[float]) -> str:
    return f"{values[0]:.2f} to {values[1]:.2f}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results(done: Done) -> dict[str, Any]:
    """Returns the trainings and the rows of both tables as plain values."""
    return {
        "limits": {"least_agreement": Winnow.least_agreement, "least_spread": LEAST_SPREAD, "behind": BEHIND},
        "agreement": agreement_rows(done),
        "probe": probe_rows(done),
        "trainings": [{"job": asdict(job), "result": dict(result)} for job, result in done.items()],
    }


def with_tables(page: str, done: Done) -> str:
    """Returns a page whose tables are written anew.

    Args:
        page: Text with the lines `BEGIN` and `END`.
        done: Results of the trainings.
    """
    rows = probe_rows(done)
    clean = probe_table([row for row in rows if not row["planted"]])
    planted = probe_table([row for row in rows if row["planted"]])
    parts = [
        "**Agreement of loss and uncertainty**, smallest to largest over the judged epochs:",
        agreement_table(agreement_rows(done)),
        "**Probe, where nothing is wrong**: every training that a rule speaks in is a false alarm.",
        clean,
        "**Probe, where a training is made to go wrong**:",
        planted,
    ]
    return between_marks(page, BEGIN, END, "\n\n".join(parts))


def load(path: Path) -> dict[Job, dict[str, Any]]:
    """Returns the results of the trainings in a file; {} where there is no such file."""
    if not path.exists():
        return {}
    return {Job(**line["job"]): line["result"] for line in json.loads(path.read_text())["trainings"]}


def run_all(path: Path) -> dict[Job, dict[str, Any]]:
    """Runs what is missing, writes the results after each training, and returns them."""
    done = load(path)
    while missing := next((job for job in jobs(done) if job not in done), None):
        done[missing] = run(missing)
        path.write_text(json.dumps(results(done), indent=1) + "\n")
        print(f"{len(done):4d}  {missing}: {done[missing]['metric']:.2f} {done[missing].get('spoke', '')}", flush=True)
    return done


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.winnow.guards", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results/winnow-guards.json"), help="File of the trainings and results."
    )
    parser.add_argument("--page", type=Path, help="Page in Markdown whose tables are written anew. Default: none.")
    parser.add_argument("--show", action="store_true", help="Run nothing; print and write what there is.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = load(given.results) if given.show else run_all(given.results)
    if given.page is not None:
        given.page.write_text(with_tables(given.page.read_text(), done))
    print(agreement_table(agreement_rows(done)), probe_table(probe_rows(done)), sep="\n\n")


if __name__ == "__main__":
    main()
