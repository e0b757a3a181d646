"""What a run records beside its costs: the distribution of losses by epoch, and the history of every sample as Parquet."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

import thresher
from thresher.experiments.training.store import whole

LOSS_BINS: NDArray[np.float64] = np.logspace(-6, 2, 41)
"""Edges of the bins of loss histograms; the first and the last bin also count the losses outside."""
EASY = 0.05
"""Share of the largest loss below which a sample counts as easy."""
MOST_CLASSES = 10_000
"""Number of classes from which whole-number targets are treated as quantities and not as class labels."""


class Recording:
    """Records the losses of a run and how often each sample was trained, epoch by epoch.

    Args:
        run: Run, before its first epoch.
        dataset: Dataset of the run; class labels are read from `tensors[-1]` or `targets`, if they are whole numbers.
        keep: Whether to keep the history of every sample for `save`, 5 bytes per sample and epoch. Default: True.
    """

    def __init__(self, run: thresher.Run, dataset: Any, *, keep: bool = True) -> None:
        self._run = run
        self._keep = keep
        self._classes = class_labels(dataset)
        self._losses: list[NDArray[np.float32]] = []
        self._trained: list[NDArray[np.uint8]] = []
        self._before = _to_numpy(run.trained)

    def epoch(self) -> dict[str, Any]:
        """Returns loss_histogram, easy_share and, with classes, hidden_by_class of the epoch that has just ended."""
        trained = _to_numpy(self._run.trained)
        times, self._before = trained - self._before, trained
        losses = self._last_losses()
        if self._keep:
            self._losses.append(losses)
            self._trained.append(np.minimum(times, 255).astype(np.uint8))
        found = distribution(losses)
        if self._classes is not None:
            hidden = self._classes[times == 0]
            found["hidden_by_class"] = np.bincount(hidden, minlength=int(self._classes.max()) + 1).tolist()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, as lists of tensors by name."""
        lists = {"losses": self._losses, "trained": self._trained, "before": [self._before]}
        return {name: [torch.from_numpy(one) for one in arrays] for name, arrays in lists.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state."""
        self._losses = [one.numpy() for one in state_dict["losses"]]
        self._trained = [one.numpy() for one in state_dict["trained"]]
        self._before = state_dict["before"][0].numpy()

    def _last_losses(self) -> NDArray[np.float32]:
        """Returns the last loss of every sample, shape (N,); NaN if the method does not record losses."""
        if "loss" not in self._run.records:
            return np.full(len(self._before), np.nan, dtype=np.float32)
        return _to_numpy(self._run.records["loss"]).astype(np.float32)

    def save(self, path: Path) -> None:
        """Writes one row per sample: id, target, final records, trained, hidden, loss_by_epoch and trained_by_epoch."""
        trained = np.stack(self._trained, axis=1)
        columns: dict[str, Any] = {"id": np.arange(len(trained), dtype=np.int64)}
        if self._classes is not None:
            columns["target"] = self._classes
        columns |= {name: _to_numpy(column) for name, column in self._run.records.items()}
        columns |= {"trained": self._before, "hidden": (trained == 0).sum(1).astype(np.int16)}
        columns["loss_by_epoch"] = _list_column(np.stack(self._losses, axis=1))
        columns["trained_by_epoch"] = _list_column(trained)
        with whole(path) as file:
            pq.write_table(pa.table(columns), file)


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
    return (column.float() if column.dtype is torch.bfloat16 else column).numpy().copy()


def _list_column(values: NDArray[Any]) -> pa.Array:
    """Returns a column with one list per row, of values of shape (rows, length)."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1]).cast(
        pa.list_(pa.from_numpy_dtype(values.dtype))
    )
