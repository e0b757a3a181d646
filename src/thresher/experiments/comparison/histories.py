"""What happened to one sample in one run, read from what the run left behind."""

from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from thresher import methods
from thresher.experiments.training.store import read_json


@dataclass(frozen=True)
class Epoch:
    """One epoch of a sample: the loss that was known of it at the end, how often it was trained on, and why not."""

    epoch: int
    loss: float
    trained: int
    rule: str


@dataclass(frozen=True)
class History:
    """All epochs of a sample under a line that sums them up."""

    title: str
    epochs: list[Epoch]


def history_of(run: Path, sample: int) -> History:
    """Read one row of a run's Parquet file.

    Args:
        run: The file, or its name without the ending.
        sample: Id.

    Raises:
        FileNotFoundError: No such run; the message lists those beside it.
        ValueError: No such sample.
    """
    import pyarrow.parquet as pq

    stem = run.name.removesuffix(".parquet").removesuffix(".json")
    table, details = run.with_name(f"{stem}.parquet"), run.with_name(f"{stem}.json")
    for path in (table, details):
        if not path.is_file():
            there = ", ".join(sorted(other.stem for other in run.parent.glob("*.parquet"))) or "none"
            raise FileNotFoundError(f"{path}: no such run of a comparison; there are {there}")
    rows = pq.read_table(table, filters=[("id", "==", sample)]).to_pylist()
    if not rows:
        raise ValueError(f"{table} has no sample {sample}; ids are 0 to {pq.read_metadata(table).num_rows - 1}")
    return _told(rows[0], read_json(details))


def _told(row: dict[str, Any], run: dict[str, Any]) -> History:
    rule = rule_of(run)
    epochs = [
        Epoch(entry["epoch"], loss, times, "" if times else _reason(rule, entry))
        for entry, loss, times in zip(run["history"], row["loss_by_epoch"], row["trained_by_epoch"], strict=True)
    ]
    target = f" (class {row['target']})" if "target" in row else ""
    title = (
        f"sample {row['id']}{target} under {run['method']}, seed {run['seed']}: trained on {row['trained']} times, "
        f"skipped in {row['hidden']} of {len(epochs)} epochs"
    )
    return History(title, epochs)


def rule_of(run: dict[str, Any]) -> str:
    """What makes a run's method skip a sample, with the settings of the run."""
    name = run["method"].partition(" ")[0].partition(":")[0].partition("@")[0]
    info = methods.infos().get(name)
    if info is None:
        return "not reached: training had ended" if name == "shorter" else methods.MethodInfo("", "", "").rule
    wanted = {field for _, field, _, _ in Formatter().parse(info.rule) if field}
    return info.rule.format(**{field: run["settings"].get(field, "its setting") for field in wanted})


def _reason(rule: str, entry: dict[str, Any]) -> str:
    share = entry.get("actual_fraction")
    if share == 0:
        return "not among the samples of the loader's epoch: by its sampler or drop_last"
    return rule if share is None else f"{rule} ({share:.1%} of the samples were skipped)"
