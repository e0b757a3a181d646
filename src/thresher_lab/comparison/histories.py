"""Reads from the files of a run what happened to one sample."""

import re
from pathlib import Path
from string import Formatter
from typing import Any

from thresher import methods
from thresher.methods import nearest_name
from thresher_lab.comparison.controls import CONTROLS
from thresher_lab.training.files import JsonRun, read_checked
from thresher_lab.training.samples import class_name
from thresher_lab.training.store import RUNS

REMEDY = "Delete the files of the run; the same `thresher compare` makes them again"
COLUMNS = ("id", "trained", "hidden", "loss_by_epoch", "trained_by_epoch")


def history_of(run: Path, sample: int) -> dict[str, Any]:
    """Reads the history of one sample from the Parquet file of a run.

    Args:
        run: Path of the Parquet file, or of the run without a suffix, or the beginning of it where the runs of no other method
            begin so; of several seeds the lowest is read, which the title names.
        sample: Id of the sample.

    Returns:
        `title`, a summary in one line, and `epochs` in order. An entry has `epoch` (its number, from 0), `loss` (the last known
        one at its end), `trained` (how often the sample was trained on), and `rule` (why it was skipped; "" if it was not).

    Raises:
        FileNotFoundError: There is no such run; the message lists the runs in the same folder.
        ValueError: Runs of several methods begin so, there is no such sample, or a file is damaged.
    """
    import pyarrow.parquet as pq

    run = run_named(run)
    table = run.with_name(f"{run.name}.parquet")
    details = run.with_name(f"{run.name}.json")
    for path in (table, details):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file of a run. {REMEDY}")
    run_of = read_checked(details, JsonRun, REMEDY)
    missing = [name for name in COLUMNS if name not in pq.read_schema(table).names]
    if missing:
        raise ValueError(f"{table}: the columns {', '.join(missing)} are missing. {REMEDY}")
    rows = pq.read_table(table, filters=[("id", "==", sample)]).to_pylist()
    if not rows:
        raise ValueError(
            f"{table} has no sample {sample}; ids are 0 to {pq.read_metadata(table).num_rows - 1}"
        )
    epochs = len(rows[0]["loss_by_epoch"])
    if len(run_of["history"]) != epochs:
        raise ValueError(
            f"{details}: `history` has {len(run_of['history'])} epochs, {table.name} has {epochs}. {REMEDY}"
        )
    return _history_from(rows[0], run_of)


def run_named(run: Path) -> Path:
    """Returns the path of the run, without a suffix, that a path names or begins to name; of several seeds the lowest.

    Args:
        run: Path of a file of the run, or of the run without a suffix, or the beginning of it.

    Raises:
        FileNotFoundError: There is no such run; the message lists the runs in the same folder.
        ValueError: Runs of several methods begin so.
    """
    stem = run.name.removesuffix(".parquet").removesuffix(".json")
    label = re.sub(r"[^A-Za-z0-9_.@=-]+", "_", stem)  # a label, as files have it
    there = sorted(path.stem for path in run.parent.glob("*.parquet"))
    if label in there:
        matching = [label]
    else:
        matching = [name for name in there if name.startswith(label)]
    if not matching and (inside := sorted(path.stem for path in (run / RUNS).glob("*.parquet"))):
        raise FileNotFoundError(
            f"{run} is a comparison; give one of its runs, such as {run / RUNS / inside[0]}"
        )
    if not matching:
        names = list(dict.fromkeys(name.rpartition("-seed")[0] or name for name in there))
        near = nearest_name(label, names)
        question = f"did you mean {near!r}? There are" if near else "there are"
        raise FileNotFoundError(
            f"{run}: no such run of a comparison; {question} {', '.join(names) or 'none'}"
        )
    if len({name.rpartition("-seed")[0] or name for name in matching}) > 1:
        raise ValueError(
            f"{run}: several runs begin so: {', '.join(matching)}; give more of the name"
        )
    return run.with_name(min(matching, key=_seed_of))


def _seed_of(name: str) -> int:
    """Returns the seed in the name of a run, 0 where it has none: runs that differ by it alone are of one method."""
    seed = name.rpartition("-seed")[2].partition("-")[0]
    return int(seed) if seed.isdigit() else 0


def _history_from(row: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    rule = rule_of(run)
    epochs = [
        {
            "epoch": entry["epoch"],
            "loss": loss,
            "trained": times,
            "rule": "" if times else _skip_reason(rule, entry),
        }
        for entry, loss, times in zip(
            run["history"], row["loss_by_epoch"], row["trained_by_epoch"], strict=True
        )
    ]
    if "target" in row:
        target = f" (class {class_name(row['target'], run.get('classes'))})"
    else:
        target = ""
    title = (
        f"sample {row['id']}{target} under {run['method']}, seed {run['seed']}: trained on {row['trained']} times, "
        f"skipped in {row['hidden']} of {len(epochs)} epochs"
    )
    return {"title": title, "epochs": epochs}


def rule_of(run: dict[str, Any]) -> str:
    """Returns the rule by which the method of a run skips samples, with the settings of the run."""
    name = run["method"].partition(" ")[0].partition(":")[0].partition("@")[0]
    info = methods.infos().get(name)
    if info is None:
        if name in CONTROLS:
            return CONTROLS[name].rule
        return methods.MethodInfo("", "", "").rule
    wanted = {field for _, field, _, _ in Formatter().parse(info.rule) if field}
    return info.rule.format(
        **{field: run["settings"].get(field, "its setting") for field in wanted}
    )


def _skip_reason(rule: str, entry: dict[str, Any]) -> str:
    share = entry.get("actual_fraction")
    if share is not None:
        share += entry.get("dropped_fraction", 0.0)
    if share == 0:
        return "not among the samples of the loader's epoch: by its sampler or drop_last"
    if share is None:
        return rule
    return f"{rule} ({share:.1%} of the samples were skipped)"
