"""The guard of Winnow against wrong labels: how often it speaks where nothing is wrong, and whether it does where something is.

The agreement of loss and uncertainty is to see many wrong labels: clean tasks, and tasks with 10, 20 and 40 % of wrong labels.
Every training was one of Winnow's first version, since removed, at half of the cost: they can be read, and not be made again.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.winnow.table import between_marks
from benchmarks.winnow.tasks import Problem, held_out, problem_of
from thresher import Winnow
from thresher.methods.winnow import LEAST_SPREAD, MEASURED_FROM, SOONEST
from thresher_lab.tasks import TASKS

BEGIN, END = (
    "<!-- table of benchmarks.winnow.guards -->",
    "<!-- end of the table of benchmarks.winnow.guards -->",
)
"""Lines of a page that the table stands between."""

NOISY_SEEDS = 2
"""Number of seeds with wrong labels."""

WRONG = (0.1, 0.2, 0.4)
"""Shares of wrong labels."""


@dataclass(frozen=True)
class Subject:
    """A training whose agreement is measured.

    Args:
        problem: Task, data and number of epochs.
        noisy: Whether it is also trained with wrong labels.
        seeds: Number of seeds without wrong labels.
    """

    problem: Problem
    noisy: bool = False
    seeds: int = 3


DIGITS = Problem(replace(TASKS["digits"], name="digits"), partial(held_out, "digits"), 20)
SUBJECTS: Mapping[str, Subject] = {
    "fashion-10k": Subject(problem_of("fashion-10k")),
    "fashion-10k, 30 epochs": Subject(replace(problem_of("fashion-10k"), epochs=30)),
    "fashion-augmented-10": Subject(problem_of("fashion-augmented-10")),
    "fashion-imbalanced": Subject(problem_of("fashion-imbalanced"), noisy=True),
    "fashion-resnet8": Subject(problem_of("fashion-resnet8")),
    "mnist-5k": Subject(problem_of("mnist-5k"), noisy=True),
    "digits": Subject(DIGITS, noisy=True),
    "relief": Subject(problem_of("relief"), seeds=2),
    "text": Subject(problem_of("text"), seeds=2),
}
"""The trainings by name."""


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        subject: Name of the training.
        seed: Random seed.
        wrong: Share of wrong labels that are added.
    """

    subject: str
    seed: int
    wrong: float = 0.0


Done = Mapping[Job, Mapping[str, Any]]
"""Results of the trainings that are done."""


def jobs() -> Iterator[Job]:
    """Yields all trainings."""
    for name, subject in SUBJECTS.items():
        for wrong in WRONG if subject.noisy else ():
            yield from (Job(name, seed, wrong) for seed in range(NOISY_SEEDS))
        yield from (Job(name, seed) for seed in range(subject.seeds))


# What is shown


def agreement_rows(done: Done) -> list[dict[str, Any]]:
    """Returns one row for each task and share of wrong labels: agreement and spread where they are judged."""
    rows = []
    for name, subject in SUBJECTS.items():
        for wrong in (0.0, *(WRONG if subject.noisy else ())):
            seeds = range(NOISY_SEEDS if wrong else subject.seeds)
            trainings = [done[job] for seed in seeds if (job := Job(name, seed, wrong)) in done]
            if len(trainings) == len(seeds):
                rows.append(_agreement_row(name, wrong, trainings, subject.problem.epochs))
    return rows


def _agreement_row(
    name: str, wrong: float, trainings: Sequence[Mapping[str, Any]], epochs: int
) -> dict[str, Any]:
    judged = [epoch for epoch in range(epochs) if epoch >= max(SOONEST, MEASURED_FROM * epochs)]
    values = [
        (one["agreement"][epoch], one["spread"][epoch]) for one in trainings for epoch in judged
    ]
    low = [
        (agreement, spread) for agreement, spread in values if agreement < Winnow.least_agreement
    ]
    return {
        "task": name,
        "wrong": wrong,
        "trainings": len(trainings),
        "agreement": [min(value for value, _ in values), max(value for value, _ in values)],
        "spread_where_low": [min(low, key=_second)[1], max(low, key=_second)[1]] if low else None,
        "low": sum(
            any(one["agreement"][epoch] < Winnow.least_agreement for epoch in judged)
            for one in trainings
        ),
        "fell_back": sum(any(one["uniform"]) for one in trainings),
    }


def _second(pair: tuple[float, float]) -> float:
    return pair[1]


def agreement_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows of the agreement as a table in Markdown."""
    head = [
        "task",
        "wrong labels",
        "agreement",
        "spread where it is below 0.5",
        "below 0.5",
        "drew uniformly",
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        spread = "" if row["spread_where_low"] is None else _range(row["spread_where_low"])
        of = f" of {row['trainings']}"
        wrong = f"{100 * row['wrong']:g} %" if row["wrong"] else "none"
        lines.append(
            [
                row["task"],
                wrong,
                _range(row["agreement"]),
                spread,
                f"{row['low']}{of}",
                f"{row['fell_back']}{of}",
            ]
        )
    return _markdown(lines)


def _range(values: Sequence[float]) -> str:
    return f"{values[0]:.2f} to {values[1]:.2f}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results(done: Done) -> dict[str, Any]:
    """Returns the trainings and the rows of the table as plain values."""
    return {
        "limits": {"least_agreement": Winnow.least_agreement, "least_spread": LEAST_SPREAD},
        "agreement": agreement_rows(done),
        "trainings": [{"job": asdict(job), "result": dict(result)} for job, result in done.items()],
    }


def with_table(page: str, done: Done) -> str:
    """Returns a page whose table is written anew.

    Args:
        page: Text with the lines `BEGIN` and `END`.
        done: Results of the trainings.
    """
    title = "**Agreement of loss and uncertainty**, smallest to largest over the judged epochs:"
    return between_marks(page, BEGIN, END, f"{title}\n\n{agreement_table(agreement_rows(done))}")


def load(path: Path) -> dict[Job, dict[str, Any]]:
    """Returns the results of the trainings in a file; {} where there is no such file."""
    if not path.exists():
        return {}
    return {
        Job(**line["job"]): line["result"] for line in json.loads(path.read_text())["trainings"]
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.winnow.guards", description=__doc__)
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results/winnow-guards.json"),
        help="File of the trainings.",
    )
    parser.add_argument(
        "--page", type=Path, help="Page in Markdown whose table is written anew. Default: none."
    )
    given = parser.parse_args()
    done = load(given.results)
    if given.page is not None:
        given.page.write_text(with_table(given.page.read_text(), done))
    print(agreement_table(agreement_rows(done)))


if __name__ == "__main__":
    main()
