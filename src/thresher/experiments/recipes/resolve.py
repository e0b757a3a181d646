"""What is trained under a name on the command line."""

from pathlib import Path

from thresher.experiments.recipes.task import RecipeTask
from thresher.experiments.tasks import built_in
from thresher.experiments.tasks.script import Script
from thresher.experiments.training.base import Trainable


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
        return RecipeTask.of(function)
    if colon and path.endswith(".py"):
        return Script.of(Path(path), function)
    return built_in(name)
