"""The folder of a comparison, read: its results, and the history of every sample where there is one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from thresher.experiments.comparison.summary import kind_of
from thresher.experiments.training.store import RESULTS, read_json

Results = dict[str, Any]
Run = dict[str, Any]


@dataclass(frozen=True)
class History:
    """The samples of one run.

    Attributes:
        ids: Shape (N,), ascending.
        targets: Classes, shape (N,); None where there are none.
        losses: As last seen by the end of each epoch, shape (N, epochs); NaN where a sample was not seen by then.
        trained: How often a sample was trained on in each epoch, shape (N, epochs).
        given: Which samples were there to train on in each epoch, shape (N, epochs); None: all.
    """

    ids: NDArray[np.int64]
    targets: NDArray[np.int64] | None
    losses: NDArray[np.float32]
    trained: NDArray[np.uint8]
    given: NDArray[np.bool_] | None = None

    @property
    def dropped(self) -> NDArray[np.bool_]:
        """Which samples an epoch was not trained on although they were there, shape (N, epochs)."""
        untrained = self.trained == 0
        return untrained if self.given is None else untrained & self.given

    @property
    def hidden(self) -> NDArray[np.int64]:
        """In how many epochs a sample was left out, shape (N,)."""
        return self.dropped.sum(axis=1)

    def beside(self, full: "History | None") -> "History":
        """The same run, given what full training with its seed trained on; as it is where that is unknown or of other data."""
        if full is None or full.trained.shape != self.trained.shape or not np.array_equal(full.ids, self.ids):
            return self
        return replace(self, given=full.trained > 0)

    @property
    def mean_loss(self) -> NDArray[np.float64]:
        """Over the epochs, shape (N,); infinite for samples that were never seen."""
        seen = np.isfinite(self.losses)
        sums = np.where(seen, self.losses, 0).sum(axis=1, dtype=np.float64)
        return np.divide(sums, seen.sum(axis=1), out=np.full(len(sums), np.inf), where=seen.any(axis=1))


Samples = Mapping[str, History]
"""By what a run has under `samples`."""


def load(folder: Path) -> tuple[Results, Samples]:
    """Read results.json and the histories that its runs name and that are there.

    Raises:
        FileNotFoundError: The folder has no results.json; the message says how to make one.
        ValueError: A file is damaged, or is not what a comparison writes.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; `thresher compare --out {folder}` makes it")
    results = read_json(path)
    if not isinstance(results, dict) or not results.get("runs") or not results.get("summary"):
        raise ValueError(f"{path} holds no comparison: it needs `runs` and `summary`; `thresher compare` writes such a file")
    named = {run["samples"] for run in results["runs"] if run.get("samples")}
    return results, {name: read_history(folder / name) for name in sorted(named) if (folder / name).is_file()}


def read_history(path: Path) -> History:
    """Read the history of one run.

    Raises:
        ValueError: The file is damaged; the message says what to do.
    """
    try:
        table = pq.read_table(path)
        targets = table["target"].to_numpy() if "target" in table.column_names else None
        losses, trained = (_matrix(table[name]) for name in ("loss_by_epoch", "trained_by_epoch"))
        return History(table["id"].to_numpy(), targets, np.where(np.isfinite(losses), losses, np.nan), trained)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete the run's files, and the same command makes them again"
        ) from error


def _matrix(column: pa.ChunkedArray) -> NDArray[Any]:
    """Lists of the same length, one a row."""
    values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(column), -1) if len(column) else values.reshape(0, 0)


def methods(results: Results) -> dict[str, list[Run]]:
    """The runs of each method, a run a seed; controls left out."""
    found: dict[str, list[Run]] = {}
    for run in results["runs"]:
        if kind_of(run) is None:
            found.setdefault(run["method"], []).append(run)
    return found


def controls(results: Results) -> dict[str, dict[str, list[Run]]]:
    """The runs of controls, by kind and by the method that they are controls of."""
    found: dict[str, dict[str, list[Run]]] = {}
    for run in results["runs"]:
        if (kind := kind_of(run)) is not None:
            found.setdefault(kind, {}).setdefault(run["control_of"], []).append(run)
    return found


def histories(results: Results, samples: Samples) -> dict[str, dict[int, History]]:
    """What there is of each method's samples, by seed; methods with nothing left out.

    What the loader did not yield, by its sampler or `drop_last`, full training did not see either, and no method left it out.
    With `drop_last` that is exact for methods that see the same batches, and up to a batch an epoch off for others.
    """
    found = {
        method: {run["seed"]: samples[run["samples"]] for run in runs if run.get("samples") in samples}
        for method, runs in methods(results).items()
    }
    full = found.get("full", {})
    return {
        method: {seed: history.beside(full.get(seed)) for seed, history in of_seeds.items()}
        for method, of_seeds in found.items()
        if of_seeds
    }


def by_epoch(runs: list[Run], name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """A fact of the history of every run.

    Returns:
        Epochs from 1, shape (E,), and values, shape (runs, E), of the epochs for which all runs have it; None where there are
        none.
    """
    lengths = min(len(run.get("history", ())) for run in runs)
    values = np.array([[entry.get(name) for entry in run.get("history", ())[:lengths]] for run in runs], dtype=np.float64)
    known = np.isfinite(values).all(axis=0)
    return (np.flatnonzero(known) + 1, values[:, known]) if known.any() else None
