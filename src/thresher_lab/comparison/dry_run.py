"""Lists the runs of a comparison, and estimates how long the unfinished ones will take."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from thresher_lab.comparison.compare import JOBS, LOOK_SEEDS, ComparedRuns, Watcher, folder_identity
from thresher_lab.comparison.controls import FULL_TRAINING, Control, Rates
from thresher_lab.comparison.summary import left_out_sentence
from thresher_lab.recipes.running import task_of
from thresher_lab.training.processes import number_of_processes
from thresher_lab.training.specs import Spec
from thresher_lab.training.store import LOOKS, ReadOnlyStore


def dry_run(
    task: str,
    methods: Sequence[Spec],
    seeds: Sequence[int],
    epochs: int,
    out: Path,
    *,
    data: Path | None = None,
    jobs: int | None = None,
    controls: Sequence[Control] | None = None,
    factors: Sequence[float] = (),
) -> dict[str, Any]:
    """Lists what `compare` would train, without training or writing anything.

    Args:
        task: Name of the task.
        methods: Methods to compare.
        seeds: Random seeds.
        epochs: Number of epochs of every run.
        out: Folder of the comparison; finished runs in it are not trained again.
        data: Folder with the data, for tasks that take one.
        jobs: Number of processes that train side by side. Default: 2.
        controls: Kinds of controls to train. Default: as in `compare`.
        factors: Factors on the learning rate that every arm is tried with first. Default: none.

    Returns:
        `runs` and `looks` (the runs that choose rates), see `ComparedRuns.planned`; `seconds_left`, see `seconds_left`;
        `left_out`, sentences on the controls that are not trained.

    Raises:
        ValueError: An argument is not possible, or several processes were started to train together.
        FileNotFoundError: The data is missing.
    """
    if number_of_processes() > 1:
        raise ValueError("--dry-run: give the command by itself; it trains nothing")
    task_of(task).find(data)
    for spec in methods:
        spec.create()
    identity = folder_identity(task, epochs)
    compared = ComparedRuns(ReadOnlyStore(out, identity), methods, seeds, controls, Watcher())
    runs = compared.planned(epochs)
    looks = []
    for factor in factors:
        store = ReadOnlyStore(out / LOOKS, identity)
        looks += ComparedRuns(
            store, methods, LOOK_SEEDS, controls, Watcher(), Rates(everywhere=factor)
        ).planned(epochs)
    labels = [FULL_TRAINING.label, *(spec.label for spec in methods)]
    runs.sort(key=lambda run: labels.index(run["of"]))
    return {
        "runs": runs,
        "looks": looks,
        "seconds_left": seconds_left(runs + looks, jobs or JOBS),
        "left_out": [left_out_sentence(one) for one in compared.list_left_out()],
    }


def seconds_left(runs: Sequence[Mapping[str, Any]], jobs: int) -> float | None:
    """Estimates the time of the unfinished runs from the mean of the finished runs of the same arm.

    Args:
        runs: Runs, see `ComparedRuns.planned`.
        jobs: Number of processes that train side by side.

    Returns:
        None if an arm has no finished run.
    """
    took: dict[str, list[float]] = {}
    for run in runs:
        if run["finished"]:
            took.setdefault(run["arm"], []).append(run["seconds"])
    left = [run["arm"] for run in runs if not run["finished"]]
    if any(arm not in took for arm in left):
        return None
    return sum(fmean(took[arm]) for arm in left) / jobs
