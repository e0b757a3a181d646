"""The tasks by name; one kind a file."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from thresher.experiments.base import Trainable
from thresher.experiments.data.base import Data, part
from thresher.experiments.script import Script
from thresher.experiments.tasks import contours, images, regression, relief, small, text
from thresher.experiments.tasks.base import Task

TASKS = {task.name: task for kind in (images, small, regression, text, relief, contours) for task in kind.TASKS}


def task_of(name: str) -> Trainable:
    """What is trained under a name.

    Args:
        name: Of a task; `NAME@SAMPLES` for so many of its training samples, see `data.base.part`; `recipe:NAME`, see
            `RecipeTask`; or `FILE.py:FUNCTION`, see `Script`.

    Raises:
        ValueError: No such task, the message lists them; no number after the @; or no such function.
        FileNotFoundError: No such file.
    """
    path, colon, function = name.rpartition(":")
    if path == "recipe":
        from thresher.experiments.recipes.task import RecipeTask

        return RecipeTask.of(function)
    if colon and path.endswith(".py"):
        return Script.of(Path(path), function)
    return built_in(name)


def built_in(name: str) -> Task:
    """A task of this package; see `task_of`."""
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
