"""Reads the folder of a comparison: results.json, and for each run the history of every sample where one was written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thresher_lab.comparison.controls import kind_of
from thresher_lab.comparison.summary import RunDict
from thresher_lab.training.files import Results, ShownSamples, read_checked
from thresher_lab.training.samples import RunHistory, read_history
from thresher_lab.training.store import RESULTS, RUNS

ResultsDict = dict[str, Any]
"""The content of results.json."""


Samples = Mapping[str, RunHistory]
"""Histories by the file name that a run has under `samples`."""
ShownOfRuns = Mapping[str, Mapping[int, Mapping[str, str | None]]]
"""What samples look like, by the file name that a run has under `shown`, and by id: "png", a file in base64, or "text"."""


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
        if any((folder / RUNS).glob("*.json")):
            raise FileNotFoundError(
                f"{path} is not there yet: it comes with the first run of full training that finishes"
            )
        raise FileNotFoundError(f"{path} is not there; `thresher compare --out {folder}` makes it")
    results = read_checked(
        path, Results, f"Delete the file; `thresher compare --out {folder}` makes it again"
    )
    named = {run["samples"]: run for run in results["runs"] if run.get("samples")}
    samples = {
        name: read_history(folder / name) for name in sorted(named) if (folder / name).is_file()
    }
    for name, history in samples.items():
        own = len(named[name]["history"])
        epochs = history.losses.shape[1]
        if own != epochs:
            raise ValueError(
                f"{path}: the `history` of {named[name]['method']}, seed {named[name]['seed']}, has {own} epochs, {name} has "
                f"{epochs}. Delete the file; `thresher compare --out {folder}` makes it again"
            )
    return results, samples


def load_shown(folder: Path, results: ResultsDict) -> ShownOfRuns:
    """Reads what samples look like from the files that the runs name, as far as they are there.

    Args:
        folder: Folder of a comparison.
        results: Content of results.json.

    Raises:
        ValueError: A file is damaged; the message says what to do.
    """
    remedy = "Delete the run's files, and the same command makes them again"
    named = [
        run["shown"]
        for run in results["runs"]
        if run.get("shown") and (folder / run["shown"]).is_file()
    ]
    read = {name: read_checked(folder / name, ShownSamples, remedy)["shown"] for name in named}
    return {
        name: {int(number): dict(one) for number, one in held.items()}
        for name, held in read.items()
    }


def runs_by_method(results: ResultsDict) -> dict[str, list[RunDict]]:
    """Returns the runs of each method, one run per seed, without the controls."""
    by_method: dict[str, list[RunDict]] = {}
    for run in results["runs"]:
        if kind_of(run) is None:
            by_method.setdefault(run["method"], []).append(run)
    return by_method


def controls(results: ResultsDict) -> dict[str, dict[str, list[RunDict]]]:
    """Returns the runs of the controls by their kind and by the method that they belong to."""
    by_kind: dict[str, dict[str, list[RunDict]]] = {}
    for run in results["runs"]:
        if (kind := kind_of(run)) is not None:
            by_kind.setdefault(kind, {}).setdefault(run["control_of"], []).append(run)
    return by_kind


def histories(results: ResultsDict, samples: Samples) -> dict[str, dict[int, RunHistory]]:
    """Returns the histories of each method by seed; methods without any history are not included.

    Samples that the loader did not yield to full training (because of its sampler or `drop_last`) do not count as left out.
    With `drop_last` this is exact for methods that see the same batches, and off by at most one batch per epoch for others.
    """
    by_method = {
        method: {
            run["seed"]: samples[run["samples"]] for run in runs if run.get("samples") in samples
        }
        for method, runs in runs_by_method(results).items()
    }
    full = by_method.get("full", {})
    return {
        method: {seed: history.beside(full.get(seed)) for seed, history in of_seeds.items()}
        for method, of_seeds in by_method.items()
        if of_seeds
    }


def by_epoch(
    runs: list[RunDict], name: str
) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Returns one value of the history over the epochs, for several runs.

    Args:
        runs: Runs of one method.
        name: Key of the value in the entries of `history`, such as "accuracy".

    Returns:
        Epoch numbers from 1, shape (E,), and values, shape (runs, E), for the E epochs in which all runs have a finite value.
        None where there is no such epoch.
    """
    lengths = min(len(run.get("history", ())) for run in runs)
    values = np.array(
        [[entry.get(name) for entry in run.get("history", ())[:lengths]] for run in runs],
        dtype=np.float64,
    )
    known = np.isfinite(values).all(axis=0)
    if known.any():
        return (np.flatnonzero(known) + 1, values[:, known])
    return None
