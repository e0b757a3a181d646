"""Finds the task, recipe or script that a name on the command line stands for."""

from pathlib import Path

from thresher.experiments.recipes.task import RecipeTask
from thresher.experiments.tasks import built_in
from thresher.experiments.tasks.script import Script
from thresher.experiments.training.trainable import Trainable


def task_of(name: str) -> Trainable:
    """Returns the task, recipe or script that a name stands for.

    Args:
        name: Name of a task; `NAME@SAMPLES` for a subset of its training samples, see `tasks.built_in`; `recipe:NAME`, see
            `RecipeTask`; or `FILE.py:FUNCTION`, see `Script`.

    Raises:
        ValueError: There is no such task, and the message lists all tasks; no number after the @; or no such function.
        FileNotFoundError: There is no such file.
    """
    path, colon, function = name.rpartition(":")
    if path == "recipe":
        return RecipeTask.of(function)
    if colon and path.endswith(".py"):
        return Script.of(Path(path), function)
    return built_in(name)
