"""Scores as a setting of methods, or the path of their Parquet file; and irreducible losses, which batch methods look up."""

import os
from typing import Any

import torch
from torch import Tensor

from thresher.scores import Scores


def checked_scores(method: object, name: str, value: Any) -> Scores | str:
    """Returns a setting that is scores, or the path of their file.

    Args:
        method: Method whose setting it is; its class name begins the message.
        name: Name of the setting.
        value: Value of the setting.

    Raises:
        ValueError: It is neither scores nor a path.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, Scores | str):
        raise ValueError(
            f"{type(method).__name__}: `{name}` must be a thresher.scores.Scores or the path of its Parquet file, got {value!r}"
        )
    return value


def loaded(scores: Scores | str) -> Scores:
    """Returns scores, read from the file where they are a path."""
    return Scores.load(scores) if isinstance(scores, str) else scores


def table_of(method: object, irreducible: Scores | str) -> Tensor:
    """Returns the irreducible losses by id, shape (largest id + 1,), float32, NaN where unknown.

    Args:
        method: Method whose setting they are; its class name begins the message.
        irreducible: The losses.

    Raises:
        ValueError: There are no losses.
    """
    scores = loaded(irreducible)
    if not scores.samples:
        raise ValueError(f"{type(method).__name__}: `irreducible` has no losses; compute them with thresher.scores.irreducible")
    return scores.dense(scores.samples)


def check_known(method: object, irreducible: Scores | str, ids: Tensor) -> None:
    """Refuses samples without a finite irreducible loss.

    Args:
        method: Method whose setting the losses are; its class name begins the message.
        irreducible: The losses.
        ids: Ids of the samples of the dataset, shape (N,), int64.

    Raises:
        ValueError: Some samples have no finite irreducible loss.
    """
    unknown = ids[~table_entries(table_of(method, irreducible), ids.cpu()).isfinite()]
    if len(unknown):
        raise ValueError(
            f"{type(method).__name__}: `irreducible` has no finite loss for {len(unknown)} of {len(ids)} samples, the first is "
            f"{int(unknown[0])}; compute it for every sample that is trained on"
        )


def table_entries(table: Tensor, ids: Tensor) -> Tensor:
    """Returns the entries of a table at some ids, without waiting for the device.

    Args:
        table: Table by id, shape (m,), m >= 1, floating point.
        ids: Ids, shape (n,), int64, 0 or more.

    Returns:
        Entries, shape (n,), of the dtype of the table; NaN for ids beyond its end.
    """
    last = len(table) - 1
    return torch.where(ids <= last, table.index_select(0, ids.clamp(max=last)), torch.nan)
