"""Checks a submission to the league: `make submission FOLDER=benchmarks/results/league/NAME`. It runs no code of it."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.league.row import IDENTITY, QUICK, RUNS, SEEDS, Row
from benchmarks.winnow.jobs import Done, Job, load
from thresher_lab.tasks.script import Script

KEYS = ("method", "name", "settings", "file", "versions", "no_placebo")
"""Entries of the file of the method, which `thresher league` writes."""


def faults(folder: Path) -> list[str]:
    """Returns why a submission is refused, a sentence for each fault; [] if it is accepted.

    Args:
        folder: Folder that `thresher league` wrote, with the file of the method.
    """
    missing = [name for name in (IDENTITY, RUNS) if not (folder / name).is_file()]
    if missing:
        return [f"{name} is missing." for name in missing]
    identity = json.loads((folder / IDENTITY).read_text())
    without = [key for key in KEYS if key not in identity]
    if without:
        return [f"{IDENTITY} has no {key!r}." for key in without]
    done = load(folder / RUNS)
    tasks = [*QUICK, *sorted({job.task for job in done} - {*QUICK})]
    row = Row(identity["method"], identity["no_placebo"], tasks)
    found = list(_file_faults(folder, identity))
    for task in tasks:
        found += _task_faults(row, done, task)
    return found or list(_unplanned(row, done))


def _file_faults(folder: Path, identity: dict[str, Any]) -> Iterator[str]:
    """Yields why the file of the method is not that of the runs. It is read, and not run."""
    files = sorted(folder.glob("*.py"))
    if not files:
        yield "the file of the method is missing."
    elif all(Script(file, identity["name"]).recipe != identity["file"] for file in files):
        yield "the file of the method, or a module that it imports, is not that of the runs."


def _task_faults(row: Row, done: Done, task: str) -> Iterator[str]:
    """Yields what is missing of a task: an arm, a rate or a seed, the first of them that the others depend on."""
    if not any(job.task == task for job in done):
        yield f"{task}: no run."
        return
    for name in row.arms:
        if not any((job.task, job.arm) == (task, name) for job in done):
            yield f"{task}: the arm {name!r} is missing."
            continue
        untried = [job for job in row.looks(done, task, name) if job not in done]
        for job in untried:
            yield f"{task}, {name}: the rate x {job.factor:g} was not tried with seed {job.seed}."
        if untried:
            continue
        counted = row.counted(done, task, name)
        for job in counted:
            if job not in done:
                yield f"{task}, {name}: seed {job.seed} is missing at the rate x {job.factor:g}."
            elif name == row.name and "full" not in done[job]:
                yield f"{task}, {name}: full training is missing with seed {job.seed}."
            elif not _is_sound(done[job]):
                yield f"{task}, {name}: seed {job.seed} has a number that is not finite."
        if not counted:
            yield f"{task}, {name}: its seeds {SEEDS[0]} to {SEEDS[-1]} cannot be judged before those faults are mended."


def _is_sound(result: Any) -> bool:
    numbers = [result["metric"], result["cpu_s"], result["cost"]["ratio"]]
    numbers += [result["full"][key] for key in ("metric", "cpu_s") if "full" in result]
    return all(math.isfinite(number) for number in numbers)


def _unplanned(row: Row, done: Done) -> Iterator[str]:
    """Yields the trainings that the row does not need: a choice among more runs would be a choice by their results."""
    needed = set[Job](row.ready(done))
    extra = [job for job in done if job not in needed]
    if extra:
        yield f"{len(extra)} runs are not of the plan, such as {extra[0]}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.league.submission", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="Folder of the submission.")
    folder = parser.parse_args(arguments).folder
    found = faults(folder)
    if found:
        parser.exit(1, "".join(f"{folder}: {fault}\n" for fault in found))
    print(f"{folder}: accepted")


if __name__ == "__main__":
    main()
