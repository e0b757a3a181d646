"""Scores from a finished run of a method that selects during training."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from thresher.cost import Cost
from thresher.score_table import Scores, pyarrow
from thresher.scores.forgetting import NeverLearned, events_in_turns, score_of_never_learned


class FinishedRun(Protocol):
    """Protocol of a finished `thresher.Run`, from which scores are computed.

    Attributes:
        method: Method of the run.
        epochs: Number of epochs.

    Example:
        >>> from types import SimpleNamespace
        >>> run: FinishedRun = SimpleNamespace(method="Forgetting()", epochs=2, records={}, cost=Cost(forward=8))
        >>> run.cost.forward
        8
    """

    method: Any
    epochs: int

    @property
    def records(self) -> Mapping[str, Tensor]:
        """Values stored for each sample, shape (N,), by column name."""
        ...

    @property
    def cost(self) -> Cost:
        """Number of samples that the run put through forward and backward passes."""
        ...


def forgotten_in(
    run: FinishedRun, *, never_learned: NeverLearned = "presentations", labels: Tensor | None = None
) -> Scores:
    """Scores each sample by its number of forgetting events in a run of `thresher.Forgetting`.

    The cost of the scores is the cost of the run.

    Args:
        run: Run of `thresher.Forgetting`, whose stored values of each sample include "forgetting".
        never_learned: Score of a sample that was never classified correctly: "presentations" (the number of epochs), "infinite"
            or "zero". A sample that was never seen has NaN. Default: "presentations".
        labels: Classes, shape (N,), int64. Default: None, there are no classes.

    Returns:
        Scores of all N samples.

    Raises:
        ValueError: The run does not count forgetting events, or `never_learned` is not one of the allowed values.

    Example:
        >>> from types import SimpleNamespace
        >>> turns = torch.tensor([4, 0, 1], dtype=torch.int16)
        >>> run = SimpleNamespace(method="Forgetting()", epochs=5, cost=Cost(15, 15), records={"forgetting": turns})
        >>> forgotten_in(run).values
        tensor([2., 5., 0.])
    """
    if "forgetting" not in run.records:
        raise ValueError(
            f"forgotten_in: the run of {run.method!r} does not count forgetting events; attach thresher.Forgetting()"
        )
    turns = run.records["forgetting"].cpu()
    hardest = score_of_never_learned("forgotten_in", never_learned, run.epochs)
    values = torch.where(turns > 0, events_in_turns(turns).float(), hardest)
    return Scores(
        torch.arange(len(turns)),
        values.where(turns >= 0, torch.nan),
        "forgetting",
        labels=labels,
        forward=run.cost.forward,
        backward=run.cost.backward,
        provenance={
            "method": repr(run.method),
            "epochs": run.epochs,
            "never_learned": never_learned,
        },
    )


def from_run(path: str | os.PathLike[str]) -> Scores:
    """Scores each sample by how often a run of `thresher compare` trained on it.

    The cost of the scores is the cost of the run, from the JSON file next to the samples. Without that file, the cost is one
    forward and one backward pass for each use of a sample in training. If the run was not made only for the scores, use
    `Scores.without_cost`, so that its cost is not counted.

    Args:
        path: File with the samples of the run, DIR/runs/NAME with or without .parquet.

    Returns:
        Scores of the samples of the run, with their targets as labels.

    Raises:
        ImportError: pyarrow is not installed.
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or lacks the columns id and trained.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> pa, pq = pyarrow()
        >>> with TemporaryDirectory() as folder:
        ...     pq.write_table(pa.table({"id": [0, 1, 2], "trained": [4, 1, 3]}), f"{folder}/run.parquet")
        ...     from_run(f"{folder}/run").values
        tensor([4., 1., 3.])
    """
    pa, pq = pyarrow()
    path = Path(path)
    path = path if path.suffix == ".parquet" else path.with_name(f"{path.name}.parquet")
    with path.open("rb") as file:
        try:
            table = pq.ParquetFile(file)
            names = [
                name for name in ("id", "trained", "target") if name in table.schema_arrow.names
            ]
            columns = {
                name: column.to_numpy()
                for name, column in zip(names, table.read(names).columns, strict=True)
            }
            ids, times_trained, target = (
                torch.from_numpy(columns[name].astype("int64")) if name in columns else None
                for name in ("id", "trained", "target")
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ValueError(f"{path}: damaged, or not a Parquet file: {error}") from error
    if ids is None or times_trained is None:
        raise ValueError(
            f"{path}: the file of a run must have the columns id and trained; this file has {', '.join(names) or 'neither'}"
        )
    result = _run_result(path.with_suffix(".json"))
    cost = result.get("cost", {})
    return Scores(
        ids,
        times_trained,
        "trained",
        labels=target,
        forward=cost.get("forward", int(times_trained.sum())),
        backward=cost.get("backward", int(times_trained.sum())),
        provenance={"run": path.name}
        | {
            name: result[name]
            for name in ("method", "settings", "seed", "classes")
            if name in result
        },
    )


def _run_result(path: Path) -> dict[str, Any]:
    """Returns the result of the run; an empty dict if the file does not exist.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    cost = result.get("cost", {}) if isinstance(result, dict) else None
    if isinstance(cost, dict):
        counts = [cost.get(name, 0) for name in ("forward", "backward")]
    else:
        counts = [None]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(
            f"{path}: `cost` must have whole numbers `forward` and `backward`. Delete the files of the run, and run the same "
            "`thresher compare` again"
        )
    return result
