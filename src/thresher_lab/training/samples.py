"""What a run records of every sample, how it is read again, and which samples stand out."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

import thresher
from thresher_lab.training.processes import own_rank
from thresher_lab.training.store import whole

MARK = 16
"""Number of random bytes at the beginning of a file, by which a state recognizes its file."""

AT_ONCE = 2**22
"""Number of values that are read at once."""


class SampleRows(NamedTuple):
    """All epochs of some samples.

    Attributes:
        ids: The samples, consecutive ones.
        losses: Last losses at the end of each epoch, shape (len(ids), epochs), float32.
        trained: Number of times that a sample was trained on in each epoch, at most 255, shape (len(ids), epochs), uint8.
    """

    ids: range
    losses: NDArray[np.float32]
    trained: NDArray[np.uint8]


class EpochFile:
    """A file to which the epochs of a run are written as they end: 5 bytes per sample and epoch, of which none stay in memory.

    Args:
        path: Path of the file. One that is there already is replaced when the first epoch is written.
        n: Number of samples.

    Attributes:
        epochs: Number of epochs in the file.
    """

    def __init__(self, path: Path, n: int) -> None:
        self._path = path
        self._n = n
        self._mark = b""
        self._epoch = np.dtype([("losses", np.float32, (n,)), ("trained", np.uint8, (n,))])
        self.epochs = 0

    def append(self, losses: NDArray[np.float32], trained: NDArray[np.uint8]) -> None:
        """Writes an epoch, in place of those that were written after the last loaded state.

        Args:
            losses: Last loss of each sample, shape (n,).
            trained: Number of times that each sample was trained on in the epoch, shape (n,).
        """
        if not self.epochs:
            self._mark = os.urandom(MARK)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(self._mark)
        with self._path.open("r+b") as file:
            file.truncate(self._size(self.epochs))
            file.seek(0, os.SEEK_END)
            file.write(losses.data)
            file.write(trained.data)
            file.flush()
            os.fsync(file.fileno())
        self.epochs += 1

    def rows(self) -> Iterator[SampleRows]:
        """Yields all epochs of the samples, some samples at a time."""
        step = max(1, AT_ONCE // max(1, self.epochs))
        held = np.memmap(self._path, self._epoch, "r", offset=MARK, shape=(self.epochs,))
        for first in range(0, self._n, step):
            ids = range(first, min(first + step, self._n))
            losses, trained = (
                held[name][:, first : ids.stop].T.copy() for name in ("losses", "trained")
            )
            yield SampleRows(ids, losses, trained)

    def delete(self) -> None:
        """Deletes the file, if there is one."""
        self._path.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: which file it is of, and how many epochs it has then."""
        return {"mark": self._mark.hex(), "epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes back to a state; epochs that were written later are written again.

        Raises:
            ValueError: The file is not there, is of another training, or has fewer epochs.
        """
        mark = bytes.fromhex(state_dict["mark"])
        epochs = state_dict["epochs"]
        read_mark = b""
        if self._path.is_file():
            with self._path.open("rb") as file:
                read_mark = file.read(MARK)
        if epochs and (read_mark != mark or self._path.stat().st_size < self._size(epochs)):
            raise ValueError(
                f"{self._path} does not hold the {epochs} epochs of every sample that belong to the checkpoint: it was "
                "deleted, cut short, or written by another training. Delete the checkpoint, and the training starts anew"
            )
        self._mark = mark
        self.epochs = epochs

    def _size(self, epochs: int) -> int:
        return MARK + self._epoch.itemsize * epochs


LOSS_BINS: NDArray[np.float64] = np.logspace(-6, 2, 41)
"""Edges of the bins of loss histograms; the first and the last bin also count the losses outside."""
EASY = 0.05
"""Share of the largest loss below which a sample counts as easy."""
MOST_CLASSES = 10_000
"""Number of classes from which whole-number targets are treated as quantities and not as class labels."""


class Recording:
    """Records the losses of a run and how often each sample was trained, epoch by epoch.

    The history of every sample is written to a file as the epochs end; in memory there is one epoch, however many there are.
    In several processes the first one records and writes the file; in the others its functions do nothing.

    Args:
        run: Run, before its first epoch.
        dataset: Dataset of the run; class labels are read from `tensors[-1]` or `targets`, if they are whole numbers.
        epochs_in: Path of a file for the history of every sample, 5 bytes per sample and epoch, of which `save` makes a table.
            It is needed as long as a state may be loaded, until `discard`. Default None: no history is kept.
    """

    def __init__(self, run: thresher.Run, dataset: Any, *, epochs_in: Path | None = None) -> None:
        self._run = run
        self._elsewhere = own_rank() > 0
        self._classes = class_labels(dataset)
        if self._elsewhere:
            self._before = np.empty(0, dtype=np.int32)
        else:
            self._before = _to_numpy(run.trained).copy()
        if epochs_in is None or self._elsewhere:
            self._epochs = None
        else:
            self._epochs = EpochFile(epochs_in, len(self._before))

    def epoch(self) -> dict[str, Any]:
        """Returns loss_histogram, easy_share and, with classes, hidden_by_class of the epoch that has just ended."""
        if self._elsewhere:
            return {}
        trained = _to_numpy(self._run.trained).copy()
        times = trained - self._before
        self._before = trained
        losses = self._last_losses()
        if self._epochs is not None:
            self._epochs.append(losses, np.minimum(times, 255).astype(np.uint8))
        entry = distribution(losses)
        if self._classes is not None:
            hidden = self._classes[times == 0]
            entry["hidden_by_class"] = np.bincount(
                hidden, minlength=int(self._classes.max()) + 1
            ).tolist()
        return entry

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: tensors and plain values. Finished epochs are not in it but in their file."""
        state: dict[str, Any] = {"before": [torch.from_numpy(self._before)]}
        if self._epochs is None:
            return state
        return state | {"epochs": self._epochs.state_dict()}

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
        return _to_numpy(self._run.records["loss"]).astype(np.float32)

    def save(self, path: Path) -> None:
        """Writes one row per sample: id, target, final records, trained, hidden, loss_by_epoch and trained_by_epoch.

        Raises:
            ValueError: There is no history, or no epoch has ended.
        """
        if self._elsewhere:
            return
        records = {name: _to_numpy(column) for name, column in self._run.records.items()}
        if self._epochs is None or not self._epochs.epochs:
            raise ValueError(
                "Recording.save: there is no history; give `epochs_in`, and call `epoch` after each epoch"
            )
        with whole(path) as file:
            tables = (self._table(rows, records) for rows in self._epochs.rows())
            first = next(tables)
            with pq.ParquetWriter(file, first.schema) as writer:
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
        columns |= {
            "trained": self._before[part],
            "hidden": (rows.trained == 0).sum(1).astype(np.int16),
        }
        return pa.table(
            columns
            | {
                "loss_by_epoch": _list_column(rows.losses),
                "trained_by_epoch": _list_column(rows.trained),
            }
        )


def distribution(losses: NDArray[np.float32]) -> dict[str, Any]:
    """Returns counts of the finite losses in `LOSS_BINS` and the share below `EASY` of the largest; empty without any."""
    finite = losses[np.isfinite(losses)].astype(np.float64)
    if not len(finite):
        return {}
    counts, _ = np.histogram(np.clip(finite, LOSS_BINS[0], LOSS_BINS[-1]), LOSS_BINS)
    return {
        "loss_histogram": counts.tolist(),
        "easy_share": float(np.mean(finite < EASY * finite.max())),
    }


def class_labels(dataset: Any) -> NDArray[np.int64] | None:
    """Returns the class of every sample, shape (N,); None if the dataset does not hold classes as whole numbers from 0."""
    with suppress(TypeError, ValueError):
        labels = np.asarray(thresher.labels_of(dataset))
        if labels.dtype.kind in "iu" and labels.min() >= 0 and labels.max() < MOST_CLASSES:
            return labels.astype(np.int64)
    return None


def _to_numpy(column: torch.Tensor) -> NDArray[Any]:
    column = column.detach().cpu()
    return (column.float() if column.dtype is torch.bfloat16 else column).numpy()


def _list_column(values: NDArray[Any]) -> Any:
    """Returns a column of pyarrow with one list per row, of values of shape (rows, length)."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1]).cast(
        pa.list_(pa.from_numpy_dtype(values.dtype))
    )


@dataclass(frozen=True)
class RunHistory:
    """What happened to every sample in one run.

    Args:
        ids: Sample ids, shape (N,), int64, ascending.
        targets: Class of each sample, shape (N,), int64; None for data without classes.
        losses: Latest loss of each sample at the end of each epoch, shape (N, epochs), float32; NaN where the sample had not
            been seen by then.
        trained: Number of times that each sample was trained on in each epoch, shape (N, epochs), uint8.
        given: Mask of the samples that the loader offered in each epoch, shape (N, epochs), bool. None: the loader offered
            all of them.
    """

    ids: NDArray[np.int64]
    targets: NDArray[np.int64] | None
    losses: NDArray[np.float32]
    trained: NDArray[np.uint8]
    given: NDArray[np.bool_] | None = None

    @property
    def dropped(self) -> NDArray[np.bool_]:
        """Mask of the samples that were offered in an epoch and not trained on, shape (N, epochs)."""
        untrained = self.trained == 0
        return untrained if self.given is None else untrained & self.given

    @property
    def hidden(self) -> NDArray[np.int64]:
        """Number of epochs in which each sample was left out, shape (N,)."""
        return self.dropped.sum(axis=1)

    def beside(self, full: "RunHistory | None") -> "RunHistory":
        """Returns this history with `given` taken from full training with the same seed.

        The history is returned unchanged where full training is unknown, or has other samples or epochs.
        """
        if (
            full is None
            or full.trained.shape != self.trained.shape
            or not np.array_equal(full.ids, self.ids)
        ):
            return self
        return replace(self, given=full.trained > 0)

    @property
    def mean_loss(self) -> NDArray[np.float64]:
        """Mean loss of each sample over the epochs, shape (N,); infinity for samples that were never seen."""
        seen = np.isfinite(self.losses)
        sums = np.where(seen, self.losses, 0).sum(axis=1, dtype=np.float64)
        return np.divide(
            sums, seen.sum(axis=1), out=np.full(len(sums), np.inf), where=seen.any(axis=1)
        )


def class_name(number: int, classes: Sequence[str] | None) -> str:
    """Returns the name of a class; its number where it has none.

    Args:
        number: Number of the class, 0 or more.
        classes: Names of the classes in the order of their numbers; None: they have numbers alone.

    Example:
        >>> class_name(1, ["cat", "dog"]), class_name(7, None)
        ('dog', '7')
    """
    if classes is not None and number < len(classes):
        return classes[number]
    return str(number)


def read_history(path: Path) -> RunHistory:
    """Reads the history of one run from its Parquet file.

    Raises:
        ValueError: The file is damaged; the message says what to do.
    """
    try:
        table = pq.read_table(path)
        targets = table["target"].to_numpy() if "target" in table.column_names else None
        losses, trained = (_matrix(table[name]) for name in ("loss_by_epoch", "trained_by_epoch"))
        return RunHistory(
            table["id"].to_numpy(), targets, np.where(np.isfinite(losses), losses, np.nan), trained
        )
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete the run's files, and the same command makes them again"
        ) from error


def _matrix(column: Any) -> NDArray[Any]:
    """Returns a column of equally long lists as a matrix with one row per list."""
    values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if len(column):
        return values.reshape(len(column), -1)
    return values.reshape(0, 0)


TOP_SHARE = 0.02
"""Share of the samples with the largest losses, which the paper of KAKURENBO looks at separately."""


def mean_of_part(losses: NDArray[np.float32], part: str) -> NDArray[np.float64]:
    """Returns the mean of each column over all finite values, the largest 2 % of them (at least one), or the others.

    Args:
        losses: Losses by sample and epoch, shape (N, epochs).
        part: "all", "top" or "bottom".

    Returns:
        Means, shape (epochs,); NaN where there is no value.
    """
    return np.array(
        [_mean_of_sorted(np.sort(column[np.isfinite(column)]), part) for column in losses.T]
    )


def _mean_of_sorted(ordered: NDArray[np.float32], part: str) -> float:
    top = max(1, round(TOP_SHARE * len(ordered)))
    chosen = {"all": ordered, "bottom": ordered[:-top], "top": ordered[-top:]}[part]
    if len(chosen):
        return float(chosen.mean(dtype=np.float64))
    return float("nan")


MOST_TOGETHER = 12
"""Largest number of samples on a sheet."""
MOST_OF_A_CLASS = 3
"""Largest number of samples of one class on a sheet."""

RowOrder = NDArray[np.int64]
"""Row numbers into a history, in the order in which a sheet shows them."""


def easiest_first(history: RunHistory) -> RowOrder:
    """Returns all samples by mean loss, the lowest first."""
    return np.argsort(history.mean_loss, kind="stable")


def hardest_first(history: RunHistory) -> RowOrder:
    """Returns the samples that were trained on twice or more by mean loss, the highest first; of a single epoch, all of it."""
    return _highest_loss_first(history, ~_trained_once(history))


MOST_SUSPECTS = 100
"""Largest number of samples whose labels are suspected."""


SHOWN_SUSPECTS = 40
"""Number of these that a report shows."""


def suspects(history: RunHistory) -> RowOrder:
    """Returns the samples whose labels are likeliest to be wrong: the hardest ones; none where samples have no class."""
    return hardest_first(history)[: MOST_SUSPECTS if history.targets is not None else 0]


def once_hardest_first(history: RunHistory) -> RowOrder:
    """Returns the samples that were trained on once by their loss, the highest first; it says less than a mean over epochs."""
    return _highest_loss_first(history, _trained_once(history))


def _trained_once(history: RunHistory) -> NDArray[np.bool_]:
    return (history.trained.sum(axis=1) <= 1) & (history.trained.shape[1] > 1)


def _highest_loss_first(history: RunHistory, among: NDArray[np.bool_]) -> RowOrder:
    seen = np.flatnonzero(np.isfinite(history.mean_loss) & among)
    return seen[np.argsort(-history.mean_loss[seen], kind="stable")]


def most_hidden_first(history: RunHistory) -> RowOrder:
    """Returns the samples that were left out, by the number of epochs without them; ties by mean loss, the lowest first."""
    order = np.lexsort((history.mean_loss, -history.hidden))
    return order[history.hidden[order] > 0]


def never_hidden_first(history: RunHistory) -> RowOrder:
    """Returns the samples that were trained on in every epoch, the easiest first; none where no sample was ever left out."""
    order = easiest_first(history)
    if history.hidden.any():
        return order[history.hidden[order] == 0]
    return order[:0]


def lowest_combined_rank_first(history: RunHistory) -> RowOrder:
    """Returns all samples by the sum of their ranks by mean loss and by times trained, the lowest first."""
    return np.argsort(
        rankdata(history.mean_loss) + rankdata(history.trained.sum(axis=1)), kind="stable"
    )


ORDERS: dict[str, Callable[[RunHistory], RowOrder]] = {
    "easiest: the lowest mean loss over the epochs": easiest_first,
    "hardest: the highest mean loss over the epochs": hardest_first,
    "trained on once, and wrong by most then: the highest loss": once_hardest_first,
    "left out in most epochs": most_hidden_first,
    "never left out, the easiest of them first": never_hidden_first,
    "easy and seldom trained on: the lowest sum of the ranks by mean loss and by times trained": lowest_combined_rank_first,
}


def standing_out(history: RunHistory, most: int = MOST_TOGETHER) -> dict[str, RowOrder]:
    """Returns the rows of the samples on each sheet by its title; no sample is on two of them.

    A sheet has at most `MOST_OF_A_CLASS` samples of a class. Those on smaller sheets are among those on larger ones.

    Args:
        history: History of the samples.
        most: Largest number of samples on a sheet, 1 or more. Default: 12.
    """
    left = np.ones(len(history.ids), dtype=bool)
    groups: dict[str, RowOrder] = {}
    for title, order in ORDERS.items():
        rows = order(history)
        rows = rows[left[rows]]
        groups[title] = (
            rows if history.targets is None else _first_of_classes(rows, history.targets)
        )[:most]
        left[groups[title]] = False
    return {title: rows for title, rows in groups.items() if len(rows)}


def _first_of_classes(rows: RowOrder, targets: NDArray[np.int64]) -> RowOrder:
    """Returns the first rows of each class, `MOST_OF_A_CLASS` of them, in their order."""
    by_class = np.argsort(targets[rows], kind="stable")
    ordered = targets[rows][by_class]
    nth = np.empty(len(rows), dtype=np.int64)
    nth[by_class] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    return rows[nth < MOST_OF_A_CLASS]
