"""The tasks by name; one kind of task per file."""

from dataclasses import replace

from thresher.methods import no_such
from thresher_lab.tasks.base import Task, training_subset
from thresher_lab.tasks.contours import CONTOUR_TASKS
from thresher_lab.tasks.images import IMAGE_TASKS, SMALL_TASKS
from thresher_lab.tasks.regression import REGRESSION_TASKS
from thresher_lab.tasks.relief import RELIEF_TASKS
from thresher_lab.tasks.text import TEXT_TASKS

KINDS_OF_TASKS = (
    IMAGE_TASKS,
    SMALL_TASKS,
    REGRESSION_TASKS,
    TEXT_TASKS,
    RELIEF_TASKS,
    CONTOUR_TASKS,
)
TASKS = {task.name: task for tasks in KINDS_OF_TASKS for task in tasks}


def built_in(name: str) -> Task:
    """Returns a task of this package.

    Args:
        name: Name of the task, or NAME@SAMPLES for a subset of its training samples, see `tasks.base.training_subset`.

    Raises:
        ValueError: There is no such task, or no number after the @.
    """
    base, at, samples = name.partition("@")
    if base not in TASKS:
        raise ValueError(
            no_such("task", base, TASKS, also=", and your own training as FILE.py:FUNCTION")
        )
    task = TASKS[base]
    if not at:
        return task
    if not samples.isdecimal() or not int(samples):
        raise ValueError(
            f"task {name!r}: write {base}@SAMPLES, a number of training samples such as {base}@1000"
        )
    return replace(
        task, name=name, load=lambda folder: training_subset(task.load(folder), int(samples))
    )
