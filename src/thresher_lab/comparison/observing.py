"""Trains a task once, on everything, returns what was observed of its samples, and has the file of that."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

import thresher
from thresher import DataMap
from thresher.scores import Scores
from thresher_lab.advise.pace import torch_threads
from thresher_lab.recipes.running import task_of
from thresher_lab.training.loop import train_on_all
from thresher_lab.training.trainable import Training

CLASSES = b"classes"
"""Key in the metadata of the Parquet file whose value is JSON with the names of the classes."""


def observed(
    task: str,
    *,
    epochs: int,
    seed: int = 0,
    data: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[DataMap, Training]:
    """Trains a task as full training does, and observes its samples.

    Args:
        task: Name of a task, or a user's own training as FILE.py:FUNCTION.
        epochs: Number of epochs, 1 or more.
        seed: Random seed. Default: 0.
        data: Folder or file with the data. Default: where the task finds it.
        progress: Function that is called with the number of epochs done. Default: none.

    Returns:
        The data map, and the training, whose model is trained.

    Raises:
        FileNotFoundError: The data is missing.
        ValueError: The task is unknown, or its loader has no batch.
    """
    trainable = task_of(task)
    training = trainable.training(trainable.load(trainable.find(data)), seed)
    with torch_threads(1):  # as in a comparison
        return _trained(training, epochs, seed, progress), training


def write_table(found: DataMap, classes: Sequence[str] | None, path: Path) -> None:
    """Writes a data map to a Parquet file, with the names of the classes for `thresher prune` in its metadata.

    Args:
        found: The data map.
        classes: Names of the classes in the order of their numbers; None: they have numbers alone.
        path: The file.
    """
    names = {} if classes is None else {CLASSES: json.dumps([*classes])}
    pq.write_table(pa.table(found).replace_schema_metadata(names), path)


def read_table(path: Path) -> DataMap | None:
    """Returns the table of `thresher observe`; None for another file."""
    try:
        if "suspicion" not in pq.read_schema(path).names:
            return None
    except pa.ArrowException:
        return None
    table = pq.read_table(path)
    return DataMap({name: table[name].to_numpy() for name in table.column_names})


def read_scores(path: Path) -> Scores | None:
    """Returns how suspicious the samples of a table of `thresher observe` are; None for another file."""
    found = read_table(path)
    if found is None:
        return None
    classes = (pq.read_schema(path).metadata or {}).get(CLASSES, b"null")
    return replace(found.scores(), provenance={"classes": json.loads(classes)})


def _trained(
    training: Training, epochs: int, seed: int, progress: Callable[[int], None] | None
) -> DataMap:
    def report(run: thresher.Run, model: nn.Module, epoch: int) -> None:
        if progress is not None:
            progress(epoch)

    run, _ = train_on_all(
        training, thresher.observe, epochs=epochs, seed=seed, command="observe", after_epoch=report
    )
    table = run.data_map()
    run.detach()
    return table
