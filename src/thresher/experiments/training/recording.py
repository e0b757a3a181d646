"""What a run records beside its costs: the distribution of losses by epoch, and the history of every sample as Parquet."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import thresher
from thresher.experiments.training.epoch_file import EpochFile, SampleRows
from thresher.experiments.training.store import whole
from thresher.scores.table import pyarrow
from thresher.shards import shard_of

LOSS_BINS: NDArray[np.float64] = np.logspace(-6, 2, 41)
"""Edges of the bins of loss histograms; the first and the last bin also count the losses outside."""
EASY = 0.05
"""Share of the largest loss below which a sample counts as easy."""
MOST_CLASSES = 10_000
"""Number of classes from which whole-number targets are treated as quantities and not as class labels."""


class Recording:
    """Records the losses of a run and how often each sample was trained, epoch by epoch.

    The history of every sample is written to a file as the epochs end; in memory there is one epoch, however many there are.
    Several processes call its functions together: each has the samples of all of them, and the first one writes the files.

    Args:
        run: Run, before its first epoch.
        dataset: Dataset of the run; class labels are read from `tensors[-1]` or `targets`, if they are whole numbers.
        epochs_in: Path of a file for the history of every sample, 5 bytes per sample and epoch, of which `save` makes a table.
            It is needed as long as a state may be loaded, until `discard`. Default None: no history is kept.
    """

    def __init__(self, run: thresher.Run, dataset: Any, *, epochs_in: Path | None = None) -> None:
        self._run = run
        self._world = shard_of(run.records).world
        self._classes = class_labels(dataset)
        self._before = self._of_all(run.trained).copy()
        self._epochs = None if epochs_in is None or self._world.rank else EpochFile(epochs_in, len(self._before))

    def epoch(self) -> dict[str, Any]:
        """Returns loss_histogram, easy_share and, with classes, hidden_by_class of the epoch that has just ended."""
        trained = self._of_all(self._run.trained).copy()
        times, self._before = trained - self._before, trained
        losses = self._last_losses()
        if self._epochs is not None:
            self._epochs.append(losses, np.minimum(times, 255).astype(np.uint8))
        found = distribution(losses)
        if self._classes is not None:
            hidden = self._classes[times == 0]
            found["hidden_by_class"] = np.bincount(hidden, minlength=int(self._classes.max()) + 1).tolist()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: tensors and plain values. Finished epochs are not in it but in their file."""
        state: dict[str, Any] = {"before": [torch.from_numpy(self._before)]}
        return state if self._epochs is None else state | {"epochs": self._epochs.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state.

        Raises:
            ValueError: The history of every sample is to be kept, and that of the epochs before is not there.
        """
        if self._epochs is not None:
            if "epochs" not in state_dict:
                raise ValueError(
                    "the checkpoint was written without the history of every sample, of which the first epochs are lost: go on "
                    "without `samples_to`, or delete the checkpoint, and the training starts anew"
                )
            self._epochs.load_state_dict(state_dict["epochs"])
        self._before = state_dict["before"][0].numpy()

    def _last_losses(self) -> NDArray[np.float32]:
        """Returns the last loss of every sample, shape (N,); NaN if the method does not record losses."""
        if "loss" not in self._run.records:
            return np.full(len(self._before), np.nan, dtype=np.float32)
        return self._of_all(self._run.records["loss"]).astype(np.float32)

    def _of_all(self, column: torch.Tensor) -> NDArray[Any]:
        """Returns a column for the samples of all processes, shape (N, ...); in one process it may be the run's own memory."""
        return np.moveaxis(self._world.join(np.moveaxis(_to_numpy(column), 0, -1)), -1, 0)

    def save(self, path: Path) -> None:
        """Writes one row per sample: id, target, final records, trained, hidden, loss_by_epoch and trained_by_epoch.

        Raises:
            ValueError: There is no history, or no epoch has ended.
        """
        records = {name: self._of_all(column) for name, column in self._run.records.items()}
        if self._world.rank:
            return
        if self._epochs is None or not self._epochs.epochs:
            raise ValueError("Recording.save: there is no history; give `epochs_in`, and call `epoch` after each epoch")
        with whole(path) as file:
            tables = (self._table(rows, records) for rows in self._epochs.rows())
            first = next(tables)
            with pyarrow()[1].ParquetWriter(file, first.schema) as writer:
                for table in chain([first], tables):
                    writer.write_table(table)

    def discard(self) -> None:
        """Deletes the file of the epochs, if there is one."""
        if self._epochs is not None:
            self._epochs.delete()

    def _table(self, rows: SampleRows, records: Mapping[str, NDArray[Any]]) -> Any:
        """Returns the table of some samples, of pyarrow."""
        part = slice(rows.ids.start, rows.ids.stop)
        columns: dict[str, Any] = {"id": np.arange(rows.ids.start, rows.ids.stop, dtype=np.int64)}
        if self._classes is not None:
            columns["target"] = self._classes[part]
        columns |= {name: column[part] for name, column in records.items()}
        columns |= {"trained": self._before[part], "hidden": (rows.trained == 0).sum(1).astype(np.int16)}
        return pyarrow()[0].table(
            columns | {"loss_by_epoch": _list_column(rows.losses), "trained_by_epoch": _list_column(rows.trained)}
        )


def distribution(losses: NDArray[np.float32]) -> dict[str, Any]:
    """Returns counts of the finite losses in `LOSS_BINS` and the share below `EASY` of the largest; empty without any."""
    finite = losses[np.isfinite(losses)].astype(np.float64)
    if not len(finite):
        return {}
    counts, _ = np.histogram(np.clip(finite, LOSS_BINS[0], LOSS_BINS[-1]), LOSS_BINS)
    return {"loss_histogram": counts.tolist(), "easy_share": float(np.mean(finite < EASY * finite.max()))}


def class_labels(dataset: Any) -> NDArray[np.int64] | None:
    """Returns the class of every sample, shape (N,); None if the dataset does not hold classes as whole numbers from 0."""
    tensors = getattr(dataset, "tensors", None)
    held = tensors[-1] if tensors else getattr(dataset, "targets", None)
    if isinstance(held, torch.Tensor):
        whole = held.layout is torch.strided and not (held.is_floating_point() or held.is_complex())
        labels = np.asarray(held.cpu()) if whole else np.empty(0)
    else:
        plain = isinstance(held, list | tuple | np.ndarray) and all(isinstance(label, int | np.integer) for label in held)
        labels = np.asarray(held) if plain else np.empty(0)
    if labels.ndim != 1 or len(labels) != len(dataset) or not len(labels) or labels.dtype == bool:
        return None
    return labels.astype(np.int64) if labels.min() >= 0 and labels.max() < MOST_CLASSES else None


def _to_numpy(column: torch.Tensor) -> NDArray[Any]:
    column = column.detach().cpu()
    return (column.float() if column.dtype is torch.bfloat16 else column).numpy()


def _list_column(values: NDArray[Any]) -> Any:
    """Returns a column of pyarrow with one list per row, of values of shape (rows, length)."""
    pa, _ = pyarrow()
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1]).cast(
        pa.list_(pa.from_numpy_dtype(values.dtype))
    )
