"""Trains a recipe once: the work of `thresher train`."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from thresher.experiments.recipes.measuring import Measure
from thresher.experiments.recipes.task import RecipeTask
from thresher.experiments.training.checkpoint import Checkpoint
from thresher.experiments.training.loop import EpochCallback, train
from thresher.experiments.training.processes import number_of_processes, own_rank
from thresher.experiments.training.specs import Spec
from thresher.experiments.training.store import RESULTS, versions, whole, write_json
from thresher.experiments.training.trainable import Training

WEIGHTS = "model.pt"
CHECKPOINT = "checkpoint.pt"


def run(
    task: RecipeTask,
    spec: Spec,
    *,
    out: Path,
    data: Path | None = None,
    seed: int = 0,
    progress: EpochCallback | None = None,
) -> dict[str, Any]:
    """Trains a recipe, and writes its results and the weights that were tested last.

    A checkpoint is written after each epoch and deleted at the end: after an interruption, the same call continues from it.
    Several processes call it together; the first one writes the files.

    Args:
        task: Recipe to train.
        spec: Method, from `task.spec`.
        out: Folder for results.json and model.pt, and for checkpoint.pt during the training.
        data: Path of the data. Default: none, if the task of the recipe finds its data itself.
        seed: Random seed for weight initialisation, sample order and selection.
        progress: Function that is called after each epoch.

    Returns:
        The content of results.json: task, epochs, device, processes, versions, recipe, published, and the run in `runs`, as
        `train` returns it.

    Raises:
        ValueError: The data does not match the recipe, the method does not work with it, or the folder holds the checkpoint of
            another training.
        FileNotFoundError: There is no such data.
    """
    loaded = task.load(task.find(data))
    out.mkdir(parents=True, exist_ok=True)
    checkpoint, trained = Checkpoint(out / CHECKPOINT, identity(task, spec, seed)), list[Training]()
    found = train(
        task, loaded, spec, seed=seed, epochs=task.epochs, progress=progress, checkpoint=checkpoint, on_end=trained.append
    )
    results = {
        "task": task.name,
        "epochs": task.epochs,
        "device": found.pop("device"),
        "processes": number_of_processes(),
        "versions": versions(),
        "recipe": task.recipe,
        "published": [one.model_dump() for one in task.settings.published],
        "runs": [found],
    }
    if own_rank() == 0:
        write_json(out / RESULTS, results)
        with whole(out / WEIGHTS) as file:
            torch.save(tested_network(trained[0]).state_dict(), file)
    checkpoint.delete()
    return results


def tested_network(training: Training) -> nn.Module:
    """Returns the network that the recipe tests: the trained one, or the average of its weights."""
    assert isinstance(training.evaluate, Measure)
    return training.evaluate.tested(training.model)


def identity(task: RecipeTask, spec: Spec, seed: int) -> dict[str, Any]:
    """Returns the values that distinguish a training from others in the same folder."""
    named = {"recipe": task.name, "epochs": task.epochs, "method": spec.label, "seed": seed, "weights": str(task.weights)}
    return named | {"settings of the recipe": task.recipe, "settings of the method": spec.settings}
