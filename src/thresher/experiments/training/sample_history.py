"""The history of every sample in one run, as it is read from the Parquet file of the run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thresher.scores.table import pyarrow


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
        if full is None or full.trained.shape != self.trained.shape or not np.array_equal(full.ids, self.ids):
            return self
        return replace(self, given=full.trained > 0)

    @property
    def mean_loss(self) -> NDArray[np.float64]:
        """Mean loss of each sample over the epochs, shape (N,); infinity for samples that were never seen."""
        seen = np.isfinite(self.losses)
        sums = np.where(seen, self.losses, 0).sum(axis=1, dtype=np.float64)
        return np.divide(sums, seen.sum(axis=1), out=np.full(len(sums), np.inf), where=seen.any(axis=1))


def class_name(number: int, classes: Sequence[str] | None) -> str:
    """Returns the name of a class; its number where it has none.

    Args:
        number: Number of the class, 0 or more.
        classes: Names of the classes in the order of their numbers; None: they have numbers alone.

    Example:
        >>> class_name(1, ["cat", "dog"]), class_name(7, None)
        ('dog', '7')
    """
    return classes[number] if classes is not None and number < len(classes) else str(number)


def read_history(path: Path) -> RunHistory:
    """Reads the history of one run from its Parquet file.

    Raises:
        ValueError: The file is damaged; the message says what to do.
    """
    pa, pq = pyarrow()
    try:
        table = pq.read_table(path)
        targets = table["target"].to_numpy() if "target" in table.column_names else None
        losses, trained = (_matrix(table[name]) for name in ("loss_by_epoch", "trained_by_epoch"))
        return RunHistory(table["id"].to_numpy(), targets, np.where(np.isfinite(losses), losses, np.nan), trained)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete the run's files, and the same command makes them again"
        ) from error


def _matrix(column: Any) -> NDArray[Any]:
    """Returns a column of equally long lists as a matrix with one row per list."""
    values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(column), -1) if len(column) else values.reshape(0, 0)
