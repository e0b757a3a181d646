"""The tasks by name; one kind a file."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from thresher.experiments.tasks import contours, images, regression, relief, small, text
from thresher.experiments.tasks.base import Task
from thresher.experiments.tasks.data.base import Data, part

TASKS = {task.name: task for kind in (images, small, regression, text, relief, contours) for task in kind.TASKS}


def built_in(name: str) -> Task:
    """A task of this package; see `recipes.resolve.task_of`."""
    base, at, samples = name.partition("@")
    if base not in TASKS:
        raise ValueError(f"no task {base!r}; there are {', '.join(TASKS)}, and your own training as FILE.py:FUNCTION")
    task = TASKS[base]
    if not at:
        return task
    if not samples.isdecimal() or not int(samples):
        raise ValueError(f"task {name!r}: write {base}@SAMPLES, a number of training samples such as {base}@1000")
    return replace(task, name=name, load=partial(_part, task.load, int(samples)))


def _part(load: Callable[[Path | None], Data], samples: int, folder: Path | None) -> Data:
    return part(load(folder), samples)
