"""A recipe trained once: what `thresher train` does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thresher.experiments.recipes.measuring import Measure
from thresher.experiments.recipes.sets import Sets
from thresher.experiments.recipes.task import RecipeTask
from thresher.experiments.training.base import Training
from thresher.experiments.training.checkpoint import Checkpoint
from thresher.experiments.training.loop import Progress, train
from thresher.experiments.training.specs import Spec
from thresher.experiments.training.store import RESULTS, versions, whole, write_json

WEIGHTS = "model.pt"
CHECKPOINT = "checkpoint.pt"


@dataclass
class Kept:
    """A recipe that remembers what was made for the run, for its weights afterwards.

    Args:
        task: The recipe.
    """

    task: RecipeTask
    made: list[Training] = field(default_factory=list)

    @property
    def name(self) -> str:
        """See `Trainable`, like the others."""
        return self.task.name

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training."""
        return self.task.recipe

    @property
    def find(self) -> Callable[[Path | None], Path | None]:
        """Says where the data lies."""
        return self.task.find

    @property
    def load(self) -> Callable[[Path | None], Sets]:
        """Reads it."""
        return self.task.load

    def training(self, data: Sets, seed: int) -> Training:
        """What the run trains."""
        self.made.append(self.task.training(data, seed))
        return self.made[-1]

    @property
    def model(self) -> nn.Module:
        """What is tested: the network, or the average of its weights."""
        test = self.made[-1].evaluate
        assert isinstance(test, Measure)
        return self.made[-1].model if test.average is None else test.average.model


def run(
    task: RecipeTask,
    spec: Spec,
    *,
    out: Path,
    data: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train a recipe, and write its results and the weights that were tested last.

    A checkpoint is written after each epoch and goes at the end: after an interruption the same call goes on from there.

    Args:
        task: The recipe.
        spec: The method, of `task.spec`.
        out: Folder for results.json and model.pt, and for checkpoint.pt meanwhile.
        data: Where the data lies.
        seed: Of weights, order and draws.
        progress: Told after each epoch.

    Returns:
        The content of results.json: task, epochs, versions, recipe, published, and in `runs` the run, as `train` returns it.

    Raises:
        ValueError: The data is not as the recipe has it, the method does not go with it, or the folder holds the checkpoint of
            another training.
        FileNotFoundError: The data is not there.
    """
    kept = Kept(task)
    loaded = task.load(task.find(data))
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(out / CHECKPOINT, identity(task, spec, seed))
    found = train(kept, loaded, spec, seed=seed, epochs=task.epochs, progress=progress, checkpoint=checkpoint)
    results = {
        "task": task.name,
        "epochs": task.epochs,
        "device": found.pop("device"),
        "versions": versions(),
        "recipe": task.recipe,
        "published": [one.model_dump() for one in task.settings.published],
        "runs": [found],
    }
    write_json(out / RESULTS, results)
    with whole(out / WEIGHTS) as file:
        torch.save(kept.model.state_dict(), file)
    checkpoint.delete()
    return results


def identity(task: RecipeTask, spec: Spec, seed: int) -> dict[str, Any]:
    """What tells a training from others that might have been begun in the same folder."""
    named = {"recipe": task.name, "epochs": task.epochs, "method": spec.label, "seed": seed, "weights": str(task.weights)}
    return named | {"settings of the recipe": task.recipe, "settings of the method": spec.settings}
