"""Scores out of finished training: what a method that selects in its course knows of the samples at the end."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thresher.scores.forgetting import NeverLearned, unlearned
from thresher.scores.table import Scores, pyarrow

if TYPE_CHECKING:
    from thresher.run.run import Run


def forgotten_in(run: "Run", *, never_learned: NeverLearned = "presentations", labels: Tensor | None = None) -> Scores:
    """Forgetting events of each sample in a run of `thresher.Forgetting`; the cost is that of the run.

    Args:
        run: Whose records have the column "forgetting".
        never_learned: Score of a sample that was never right, see `thresher.scores.forgetting`; one never seen has NaN.
        labels: Classes, shape (N,), int64; None where there are none.

    Raises:
        ValueError: The run has no such column, or no such `never_learned`.
    """
    from thresher.methods.forgetting import forgetting_events

    if "forgetting" not in run.records:
        raise ValueError(
            f"forgotten_in: the run of {run.method!r} does not count forgetting events; attach thresher.Forgetting()"
        )
    column = run.records["forgetting"].cpu()
    values = torch.where(column > 0, forgetting_events(column).float(), unlearned("forgotten_in", never_learned, run.epochs))
    return Scores(
        torch.arange(len(column)),
        values.where(column >= 0, torch.nan),
        "forgetting",
        labels=labels,
        forward=run.cost.forward,
        backward=run.cost.backward,
        provenance={"method": repr(run.method), "epochs": run.epochs, "never_learned": never_learned},
    )


def from_run(path: str | os.PathLike[str]) -> Scores:
    """How often each sample was trained on in a run of `thresher compare`: the subset that the run itself preferred.

    The cost is that of the run, from the JSON file beside it, else every training of a sample counted once; see
    `Scores.without_cost` where it was spent for another reason.

    Args:
        path: Of the run's samples, DIR/runs/NAME with or without .parquet.

    Raises:
        ImportError: pyarrow is not installed.
        FileNotFoundError: No such file.
        ValueError: It is damaged, or has no columns id and trained; the message names it.
    """
    pa, pq = pyarrow()
    path = Path(path)
    path = path if path.suffix == ".parquet" else path.with_name(f"{path.name}.parquet")
    with path.open("rb") as file:
        try:
            found = pq.ParquetFile(file)
            names = [name for name in ("id", "trained", "target") if name in found.schema_arrow.names]
            columns = {name: column.to_numpy() for name, column in zip(names, found.read(names).columns, strict=True)}
            ids, trained, target = (
                torch.from_numpy(columns[name].astype("int64")) if name in columns else None
                for name in ("id", "trained", "target")
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ValueError(f"{path}: damaged, or no Parquet file: {error}") from error
    if ids is None or trained is None:
        raise ValueError(
            f"{path}: the samples of a run have the columns id and trained; this has {', '.join(names) or 'neither'}"
        )
    run = _facts(path.with_suffix(".json"))
    cost = run.get("cost", {})
    told = {name: run[name] for name in ("method", "settings", "seed") if name in run}
    return Scores(
        ids,
        trained,
        "trained",
        labels=target,
        forward=cost.get("forward", int(trained.sum())),
        backward=cost.get("backward", int(trained.sum())),
        provenance={"run": path.name, **told},
    )


def _facts(path: Path) -> dict[str, Any]:
    """What is known of the run; nothing where there is no file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
