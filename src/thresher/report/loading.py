"""Reads the folder of a comparison: results.json, and for each run the history of every sample where one was written."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from thresher.experiments.comparison.summary import RunDict, kind_of
from thresher.experiments.training.files import Results, read_checked
from thresher.experiments.training.store import RESULTS

ResultsDict = dict[str, Any]
"""The content of results.json."""
"""One entry of `runs` in results.json."""


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


Samples = Mapping[str, RunHistory]
"""Histories by the file name that a run has under `samples`."""


def load_comparison(folder: Path) -> tuple[ResultsDict, Samples]:
    """Reads results.json and the histories of samples that its runs name.

    Histories whose files are missing are left out.

    Args:
        folder: Folder of a comparison, the `--out` of `thresher compare`.

    Returns:
        The content of results.json, and the histories by file name.

    Raises:
        FileNotFoundError: The folder has no results.json; the message says how to make one.
        ValueError: A file is damaged, or was not written by a comparison.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; `thresher compare --out {folder}` makes it")
    results = read_checked(path, Results, f"Delete the file; `thresher compare --out {folder}` makes it again")
    named = {run["samples"]: run for run in results["runs"] if run.get("samples")}
    samples = {name: read_history(folder / name) for name in sorted(named) if (folder / name).is_file()}
    for name, history in samples.items():
        own, epochs = len(named[name]["history"]), history.losses.shape[1]
        if own != epochs:
            raise ValueError(
                f"{path}: the `history` of {named[name]['method']}, seed {named[name]['seed']}, has {own} epochs, {name} has "
                f"{epochs}. Delete the file; `thresher compare --out {folder}` makes it again"
            )
    return results, samples


def read_history(path: Path) -> RunHistory:
    """Reads the history of one run from its Parquet file.

    Raises:
        ValueError: The file is damaged; the message says what to do.
    """
    try:
        table = pq.read_table(path)
        targets = table["target"].to_numpy() if "target" in table.column_names else None
        losses, trained = (_matrix(table[name]) for name in ("loss_by_epoch", "trained_by_epoch"))
        return RunHistory(table["id"].to_numpy(), targets, np.where(np.isfinite(losses), losses, np.nan), trained)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete the run's files, and the same command makes them again"
        ) from error


def _matrix(column: pa.ChunkedArray) -> NDArray[Any]:
    """Returns a column of equally long lists as a matrix with one row per list."""
    values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(column), -1) if len(column) else values.reshape(0, 0)


def runs_by_method(results: ResultsDict) -> dict[str, list[RunDict]]:
    """Returns the runs of each method, one run per seed, without the controls."""
    found: dict[str, list[RunDict]] = {}
    for run in results["runs"]:
        if kind_of(run) is None:
            found.setdefault(run["method"], []).append(run)
    return found


def controls(results: ResultsDict) -> dict[str, dict[str, list[RunDict]]]:
    """Returns the runs of the controls by their kind and by the method that they belong to."""
    found: dict[str, dict[str, list[RunDict]]] = {}
    for run in results["runs"]:
        if (kind := kind_of(run)) is not None:
            found.setdefault(kind, {}).setdefault(run["control_of"], []).append(run)
    return found


def histories(results: ResultsDict, samples: Samples) -> dict[str, dict[int, RunHistory]]:
    """Returns the histories of each method by seed; methods without any history are not included.

    Samples that the loader did not yield to full training (because of its sampler or `drop_last`) do not count as left out.
    With `drop_last` this is exact for methods that see the same batches, and off by at most one batch per epoch for others.
    """
    found = {
        method: {run["seed"]: samples[run["samples"]] for run in runs if run.get("samples") in samples}
        for method, runs in runs_by_method(results).items()
    }
    full = found.get("full", {})
    return {
        method: {seed: history.beside(full.get(seed)) for seed, history in of_seeds.items()}
        for method, of_seeds in found.items()
        if of_seeds
    }


def by_epoch(runs: list[RunDict], name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Returns one value of the history over the epochs, for several runs.

    Args:
        runs: Runs of one method.
        name: Key of the value in the entries of `history`, such as "accuracy".

    Returns:
        Epoch numbers from 1, shape (E,), and values, shape (runs, E), for the E epochs in which all runs have a finite value.
        None where there is no such epoch.
    """
    lengths = min(len(run.get("history", ())) for run in runs)
    values = np.array([[entry.get(name) for entry in run.get("history", ())[:lengths]] for run in runs], dtype=np.float64)
    known = np.isfinite(values).all(axis=0)
    return (np.flatnonzero(known) + 1, values[:, known]) if known.any() else None
